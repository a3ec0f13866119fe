"""One result on disk, a sweep or a single run, as a table of points with its configuration and foundation."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.bench.resultfiles import Config, RunDocument, SweepHeader, has_records, read_frame, read_header
from pdvsim.bench.rows import ROWS, Rows
from pdvsim.bench.sweep import flatten
from pdvsim.common.files import digest
from pdvsim.sim.engines.profiles import TABLES, engine_profile, tables_file
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.kernels import shipped_tables
from pdvsim.sim.prices.profile import Profile, builtin, roofline
from pdvsim.sim.prices.profile import load as load_profile
from pdvsim.sim.reading import printable, quoted

if TYPE_CHECKING:
    import pandas as pd

KEYS = ("arch", "load_kind", "load")  # identify a point, with its settings and seed
NEEDED = (*KEYS, "seed", "output_throughput", "stability")
# numeric columns, by prefix and suffix of their names
FIGURES = ("mean_", "std_", "median_", "breakdown_ms_", "lanes_", "kinds_", "total_", "max_output_")
FIGURES_END = (
    "load",
    "seed",
    "_ms",
    "_throughput",
    "_goodput",
    "duration",
    "completed",
    "_acceptance_rate",
    "_acceptance_length",
    "_share",
)
LARGEST = 10**18  # beyond it, pandas has no integer
RATES = "spec_decode_per_position_acceptance_rates"
LOAD_SETTINGS = ("seed", "request_rate", "max_concurrency", "use_trace_timestamps")


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

    @property
    def pair(self) -> str:
        return str(self.config.server.get("pair", "?"))

    def workload(self, columns: Collection[str] = ()) -> list[dict[str, Any]]:
        """Everything that two results must share to be paired by seed, except `columns`."""
        config = self.config
        traffic = {k: v for k, v in config.traffic.items() if k not in LOAD_SETTINGS}
        parts = (traffic, config.acceptance, config.hardware, config.scoring)
        return [{k: v for k, v in part.items() if k not in columns} for part in parts]

    def setting(self, name: str) -> Any:
        """A setting of the configuration, in the format of a sweep's table."""
        groups = (group for group in self.config.model_dump().values() if isinstance(group, dict))
        value = next((group[name] for group in groups if name in group), "not stated")
        if isinstance(value, list):
            return "+".join(map(str, value))
        return "none" if value is None else value


def known_profile(gpu: str, name: str, config: Config) -> Profile | None:
    """The profile `name`, if it is built in or its file still exists."""
    if gpu in GPUS:
        engines = (
            engine_profile(engine, card, str(config.hardware.get("engine") or "").partition("==")[2])
            for engine, card, _ in shipped_tables()
            if name == f"{gpu}-{engine}" and card == gpu
        )
        for profile in (builtin(gpu), roofline(GPUS[gpu]), *engines):
            if profile.name == name:
                return profile
    path = config.hardware.get("profile")
    if path and Path(path).is_file():
        profile = tables_file(Path(path), GPUS[gpu]) if path.endswith(TABLES) else load_profile(path)
        return profile if profile.name == name else None
    return None


def read_sweep(folder: Path) -> tuple[Source, pd.DataFrame]:
    """A sweep's folder; a ValueError of one line if it is invalid."""
    header = read_header(SweepHeader, folder / "sweep.json", "not a sweep's folder")
    path = folder / "summary.parquet"
    if not path.exists():
        raise ValueError(f"{path}: No such file: the sweep has not saved any point")
    if header.made and digest(path) != header.made.get(path.name):
        raise ValueError(
            f"{path}: is damaged or was changed; see `pdvsim sweep --check {folder}`; --resume writes it again"
        )
    table = read_frame(path)
    vary = tuple(str(name).replace("-", "_") for name in header.sweep.vary or {})
    for name in (*NEEDED, *vary):
        if name not in table:
            raise ValueError(f"{path}: column {name} is missing")
    if not len(table):
        raise ValueError(f"{path}: holds no point")
    stems = [folder / "details" / f"{int(point):05d}" for point in table["point"]] if "point" in table else []
    saved = [str(stem) if has_records(stem) else "" for stem in stems]
    lost = saved.count("") if header.save_detailed else 0
    source = Source(
        folder.resolve().name, folder, header.date, header.pdvsim_version, header.sweep.base,
        tuple(name for name in vary if name not in KEYS), header.provenance,
        _incomplete(folder, len(table), header.num_points, lost),
    )  # fmt: skip
    rows, keys = Rows(folder / ROWS), header.keys.split()
    digests: list[Any] = [_digests(rows, keys, stem) if stem and keys else None for stem in saved]
    return source, _filled(table, source).assign(records=saved or "", records_sha256=digests or None)


def _digests(rows: Rows, keys: list[str], stem: str) -> dict[str, str]:
    """The digests of a point's records."""
    point = int(Path(stem).name)
    entry = rows.get(keys[point]) if point < len(keys) else None
    if entry is None:
        raise ValueError(f"{rows.path}: the row of point {point} is damaged or missing: its records cannot be checked")
    return entry.details


def _incomplete(folder: Path, done: int, asked: int | None, lost: int) -> str:
    """Number of points of an interrupted or partly failed sweep, and of `lost` records, as text; empty if complete."""
    failed = 0 if asked is None else len(Rows(folder / ROWS).failed)
    parts = [f"{done} of {asked} points"] if asked is not None and (failed or done < asked) else []
    parts += [f"{failed} failed"] if failed else []
    parts += [f"no histograms of {lost} of {done} points: their records are missing"] if lost else []
    return f"{folder.resolve().name}: {', '.join(parts)}" if parts else ""


def read_run(path: Path) -> tuple[Source, pd.DataFrame]:
    """The JSON file of one run; a ValueError of one line if it is invalid."""
    import pandas as pd

    document = read_header(RunDocument, path, "neither a sweep's folder nor a run's JSON file")
    stem, written = path.with_suffix(""), document.records_sha256
    saved = str(stem) if has_records(stem) else ""
    source = Source(
        stem.name, path, document.date, document.pdvsim_version, document.config, (), document.provenance,
        f"{stem.name}: no histograms: its records are missing" if written and not saved else "",
    )  # fmt: skip
    kind, load = document.load
    row = {"arch": document.arch, "load_kind": kind, "load": load}
    row |= flatten(document.model_dump(exclude={"config", "provenance", "records_sha256", "sha256"}))
    digests: Any = None if written is None else {name.split(".")[-2]: is_now for name, is_now in written.items()}
    table = _filled(pd.DataFrame({k: [v] for k, v in row.items()}), source)
    return source, table.assign(records=saved, records_sha256=[digests])


def _filled(table: pd.DataFrame, source: Source) -> pd.DataFrame:
    """`table` with columns that older files or real runs lack; a ValueError if a value is not a number."""
    for name in map(str, table.columns):
        if name.startswith(FIGURES) or name.endswith(FIGURES_END):
            table[name] = [_number(source.path, name, value) for value in table[name]]
        else:
            for value in table[name]:
                for item in value if isinstance(value, list) else [value] if name == RATES else ():
                    _number(source.path, name, item)
    for name, value in (("pair", source.pair), ("profile", "none"), ("foundation", "not stated"), ("gpu", "?")):
        if name not in table:
            table[name] = value
    return table.copy()  # defragments: pandas warns about many inserted columns


def _number(path: Path, name: str, value: Any) -> float:
    """A number from a file; nan if it is empty."""
    if value is None:
        return math.nan
    good = isinstance(value, float | np.number) or (type(value) is int and abs(value) < LARGEST)
    if not good:
        raise ValueError(f"{path}: {printable(name)} must hold numbers, got {quoted(value)}")
    return value  # type: ignore[no-any-return]
