"""Results read back from disk: sweeps and single runs as one table of points, with their records where they were saved.

A file that is missing, damaged or changed is rejected with one line that names it: every row, document and table has
a digest, so what is read is what pdvsim wrote. Several results become one table. If they are different experiments, or
contain the same point twice, a column distinguishes them, so that unrelated points are never paired or averaged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdvsim.bench.output import WORDS, damaged_records, record_files
from pdvsim.bench.pool import Row
from pdvsim.bench.rows import ROWS
from pdvsim.bench.run import REPAIR, stored_sweep
from pdvsim.bench.stats import headline
from pdvsim.bench.sweep import flatten
from pdvsim.common.commandline import stored_value
from pdvsim.common.files import SEAL, digest, unbroken
from pdvsim.sim.config import GROUPS, RANKED
from pdvsim.sim.reading import error_text, printable, read_json, read_table
from pdvsim.sim.records import DELIVERY_DTYPES, LAUNCH_DTYPES, REQUEST_DTYPES, Columns

if TYPE_CHECKING:
    import pandas as pd

Config = dict[str, Any]  # the settings of an experiment by group, as `asdict` gives them

KEYS = ("arch", "load_kind", "load")  # identify a point, with its settings and seed
LOAD_SETTINGS = ("seed", "request_rate", "max_concurrency", "use_trace_timestamps")
NOT_SIMULATED = {"profile": "none", "foundation": "not stated", "gpu": "?"}  # of real runs
SHOWN_NAMES = 5
DTYPES = {"requests": REQUEST_DTYPES, "launches": LAUNCH_DTYPES, "deliveries": DELIVERY_DTYPES}


@dataclass(frozen=True)
class Source:
    """One sweep or run: its path, its configuration and its foundation."""

    name: str
    path: Path
    date: str
    version: str
    config: Config  # of the experiment, or the base of a sweep
    vary: tuple[str, ...]  # columns of the sweep's varied flags
    provenance: dict[str, Any] | None
    incomplete: str = ""  # missing points of a sweep or records of a run

    def workload(self, columns: Collection[str] = ()) -> list[dict[str, Any]]:
        """Everything that two results must share to be paired by seed, except `columns`."""
        traffic = {k: v for k, v in self.config["traffic"].items() if k not in LOAD_SETTINGS}
        parts = (traffic, *(self.config[name] for name in ("acceptance", "hardware", "scoring")))
        return [{k: v for k, v in part.items() if k not in columns} for part in parts]

    def setting(self, name: str) -> Any:
        """A setting of the configuration, in the format of a sweep's table."""
        groups = (self.config[group] for group in GROUPS)
        value = next((group[name] for group in groups if name in group), "not stated")
        if isinstance(value, tuple):
            return "+".join(map(str, value))
        return "none" if value is None else value


@dataclass(frozen=True)
class Results:
    """One row per point, and the columns that distinguish points besides architecture, load and seed."""

    points: pd.DataFrame
    sources: tuple[Source, ...]
    dims: tuple[str, ...]  # columns with several values: results, pair, varied flags

    @property
    def archs(self) -> list[str]:
        return list(dict.fromkeys(self.points["arch"]))

    @property
    def configs(self) -> list[Config]:
        """The configuration of each result with points in the table."""
        return [self.sources[number].config for number in dict.fromkeys(self.points["source"])]

    @property
    def detailed(self) -> int:
        """Number of points with saved records."""
        return int(self.points["records"].ne("").sum())

    def settings(self) -> list[tuple[dict[str, Any], pd.DataFrame]]:
        """The points by setting; points of one setting differ only in architecture, load and seed."""
        by = [*self.dims, *(["load_kind"] if self.points["load_kind"].nunique() > 1 else [])]
        if not by:
            return [({}, self.points)]
        grouped = self.points.groupby(by, sort=False, dropna=False)
        return [(dict(zip(by, key, strict=True)), group) for key, group in grouped]

    def by_load_kind(self) -> dict[str, Results]:
        """The points by kind of load: concurrency and rate need different axes."""
        return {str(kind): replace(self, points=group) for kind, group in self.points.groupby("load_kind", sort=False)}

    @property
    def headline(self) -> str:
        """The metric that compares architectures under these loads."""
        return headline(zip(self.points["load_kind"], self.points["load"], strict=True))

    @property
    def incomplete(self) -> list[str]:
        """One line per sweep with missing points or run with missing records."""
        return [source.incomplete for source in self.sources if source.incomplete]

    def source(self, row: pd.Series[Any]) -> Source:
        return self.sources[int(row["source"])]

    def warmup(self, row: pd.Series[Any]) -> int:
        """Requests excluded from a point's metrics."""
        return int(row.get("warmup_requests", self.source(row).config["scoring"]["warmup_requests"]))

    def bandwidths_bytes_per_s(self, row: pd.Series[Any]) -> list[float]:
        """Copy bandwidth of each GPU of a server, as it was recorded; nan if it was not."""
        several = row["bandwidths_bytes_per_s"]
        return several if isinstance(several, list) else [row.get("bandwidth_bytes_per_s", math.nan)] * RANKED[-1]


def label(setting: dict[str, Any]) -> str:
    """A setting as text."""
    return ", ".join(
        str(v) if k in ("pair", "results") else f"{k.replace('_', ' ')} {value_text(v)}" for k, v in setting.items()
    )


def value_text(value: Any) -> str:
    """A setting's value as text."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def load(paths: Sequence[Path | str]) -> Results:
    """The results in sweep folders and run files; a ValueError of one line if one is invalid."""
    import pandas as pd

    if not paths:
        raise ValueError("name at least one result: a sweep's folder or a run's JSON file")
    sources: list[Source] = []
    tables: list[pd.DataFrame] = []
    for number, path in enumerate(map(Path, paths)):
        source, rows = read_sweep(path) if path.is_dir() else read_run(path)
        table = pd.DataFrame(rows).assign(source=number, results=source.name)
        tables.append(table.astype({name: float for name in table if table[name].isna().all()}).copy())
        sources.append(source)
    varied = list(dict.fromkeys(name for source in sources for name in source.vary))
    for source, table in zip(sources, tables, strict=True):
        for name in (name for name in varied if name not in table):
            table[name] = source.setting(name)
    points = pd.concat(tables, ignore_index=True).copy()  # defragments: pandas warns about many inserted columns
    points["run"] = points["seed"].rank(method="dense").astype(int) - 1  # one replication per seed
    first = [*KEYS, "pair", "run", "seed", *varied, "profile", "foundation"]  # as a sweep orders them
    points = points[list(dict.fromkeys([*first, *points.columns]))]
    candidates = [name for name in dict.fromkeys(("pair", *varied)) if points[name].nunique(dropna=False) > 1]
    dims = tuple(candidates)
    if len(sources) > 1 and _mixed(points, sources, candidates):
        dims = ("results", *candidates)
        if points["results"].nunique() < len(sources):
            points["results"] = [str(sources[i].path) for i in points["source"]]
    again = points.duplicated([*KEYS, *dims, "seed"])
    if again.any():
        row = points[again].iloc[0]
        where = sources[int(row["source"])].path
        raise ValueError(f"{where}: {row['arch']} at load {row['load']:g} with seed {row['seed']} occurs twice")
    return Results(points, tuple(sources), dims)


def _mixed(points: pd.DataFrame, sources: Sequence[Source], dims: Sequence[str]) -> bool:
    """Whether one setting would contain points of different workloads, or the same point twice."""
    if points.duplicated([*KEYS, *dims, "seed"]).any():
        return True
    groups = points.groupby(list(dims), dropna=False)["source"] if dims else [((), points["source"])]
    workloads = [source.workload(dims) for source in sources]
    return any(workloads[i] != workloads[int(g.iloc[0])] for _, g in groups for i in g.unique())


def read_sweep(folder: Path) -> tuple[Source, list[Row]]:
    """A sweep's folder; a ValueError of one line if it is invalid."""
    stored, path = stored_sweep(folder), folder / ROWS
    if stored.damaged:
        raise ValueError(f"{path}: {stored.damaged} lines are damaged; {REPAIR}")
    if not stored.done:
        raise ValueError(f"{path}: the sweep has not saved any point")
    rows = []
    for index, labels, kept in stored.done:
        known = _saved(folder / "details" / f"{index:05}", kept.details) | kept.details.get("facts", {})
        rows.append({"point": index} | labels | kept.row | labels | known)
    done, every, name = len(rows), len(stored.points), folder.resolve().name
    lost = sum(not row["records"] for row in rows) if stored.header["save_detailed"] else 0
    missing = [f"{done} of {every} points"] * (done < every) + [f"{stored.failed} failed"] * (stored.failed > 0)
    missing += [f"no histograms of {lost} of {done} points: their records are missing"] * (lost > 0)
    vary = tuple(name for name in stored.header["sweep"]["vary"] if name not in KEYS)
    date = time.strftime("%Y%m%d-%H%M%S", time.localtime(path.stat().st_mtime))  # of the last row
    incomplete = f"{name}: {', '.join(missing)}" if missing else ""
    config, version = _settings(stored.header["sweep"]["base"]), stored.header["pdvsim_version"]
    return Source(name, folder, date, version, config, vary, stored.header["provenance"], incomplete), rows


def read_run(path: Path) -> tuple[Source, list[Row]]:
    """The JSON file of one run; a ValueError of one line if it is invalid."""
    document = _document(path)
    config, provenance = _settings(document.pop("config")), document.pop("provenance")
    digests = {name.split(".")[-2]: sha256 for name, sha256 in document.pop("records_sha256").items()}
    stem, traffic = path.with_suffix(""), config["traffic"]
    kind, load = "request_rate", traffic["request_rate"]
    if math.isinf(load) and traffic["use_trace_timestamps"]:
        kind, load = "trace", math.nan
    elif math.isinf(load) and traffic["max_concurrency"] is not None:
        kind, load = "concurrency", traffic["max_concurrency"]
    known = {name: math.inf if value == "inf" else value for name, value in flatten(document).items()}
    row = NOT_SIMULATED | known | {"load_kind": kind, "load": float(load)} | _saved(stem, digests)
    lost = f"{stem.name}: no histograms: its records are missing" if digests and not row["records"] else ""
    date, version = document["date"], document["pdvsim_version"]
    return Source(stem.name, path, date, version, config, (), provenance, lost), [row]


def _document(path: Path) -> dict[str, Any]:
    otherwise = "neither a sweep's folder nor a run's JSON file"
    try:
        document = read_json(path)
    except FileNotFoundError:
        raise ValueError(f"{path}: No such file: {otherwise}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not JSON, or cut short: {error_text(error)}") from None
    if not isinstance(document, dict) or not {"pdvsim_version", "config"} <= document.keys():
        raise ValueError(f"{path}: {otherwise}")
    if not unbroken(document):
        raise ValueError(f"{path}: is damaged or was changed: its content does not match its {SEAL}")
    return document


def _settings(given: Mapping[str, Any]) -> Config:
    """The settings of an experiment, of this version or another."""
    groups = {name: given.get(name, {}) for name in GROUPS}
    stored = {name: {key: stored_value(value) for key, value in group.items()} for name, group in groups.items()}
    return {**given, **stored}


def _saved(stem: Path, digests: Mapping[str, Any]) -> Row:
    """Where a point's records are, and their digests; nowhere if no file is there: `records` names a missing one."""
    there = bool(digests) and any(path.exists() for path in record_files(stem).values())
    return {"records": str(stem) if there else "", "records_sha256": digests}


def check_result(path: Path) -> tuple[bool, list[str]]:
    """Whether a sweep's folder, or a run's document with its records, is complete and unchanged; and how, in lines."""
    try:
        if not path.is_dir():
            digests = _document(path)["records_sha256"]
            bad = [name for name, was in digests.items() if digest(path.with_name(name)) != was]
            lines = [f"the document is complete, and {len(digests) - len(bad)} of {len(digests)} record files"]
            return not bad, lines + ([f"damaged or missing: {some(bad)}"] if bad else [])
        stored = stored_sweep(path)
    except ValueError as error:
        return False, [f"damaged: {error}"]
    missing = [f"{index:05}" for index, (_, kept) in enumerate(stored.points) if kept is None]
    damaged = [f"{ROWS} ({stored.damaged} lines)"] if stored.damaged else []
    for index, _, kept in stored.done if stored.header["save_detailed"] else ():
        damaged += [f"details/{name}" for name in damaged_records(path / "details" / f"{index:05}", kept.details)]
    failed = f", {stored.failed} failed" if stored.failed else ""
    lines = [f"{len(stored.done)} of {len(stored.points)} points are complete{failed}"]
    lines += [f"damaged: {some(damaged)}; {REPAIR}"] if damaged else []
    lines += [f"missing or unusable: {some(missing)}"] if missing else []
    lines += [f"{stored.others} rows of other settings"] if stored.others > 0 else []
    return not missing and not damaged, lines


def some(names: Sequence[str]) -> str:
    """The first few names, printable, and how many more there are."""
    shown = ", ".join(map(printable, names[:SHOWN_NAMES]))
    return shown + (f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else "")


class Records(NamedTuple):
    """The rows of a run; lanes, kinds and roles are numbers."""

    requests: Columns
    launches: Columns
    deliveries: Columns


def records(row: pd.Series[Any]) -> Records | None:
    """The records of a point, or None if not saved; a ValueError names a file that is damaged, changed or missing."""
    if not row["records"]:
        return None
    files = record_files(row["records"])
    return Records(*(_columns(path, name, row["records_sha256"].get(name)) for name, path in files.items()))


def _columns(path: Path, table: str, sha256: str | None) -> Columns:
    if digest(path) != sha256:
        raise ValueError(f"{path}: is damaged, changed or missing")
    frame = read_table(path).to_pandas(ignore_metadata=True)
    for name in WORDS.keys() & frame.keys():
        frame[name] = frame[name].astype(str).map({word: code for code, word in enumerate(WORDS[name])})
    return {name: np.asarray(frame[name], dtype) for name, dtype in DTYPES[table].items()}
