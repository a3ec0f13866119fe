"""Results read back from disk: sweeps and single runs as one table of points, with their records where they were saved.

A missing, truncated or incompatible file is rejected with one line that names the file and the field. Several results
become one table. If they are different experiments, or contain the same point twice, a column distinguishes them, so
that unrelated points are never paired or averaged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench.resultfiles import Records, read_records
from pdvsim.bench.sources import KEYS, Source, known_profile, read_run, read_sweep
from pdvsim.bench.stats import headline
from pdvsim.sim.config import RANKED
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.profile import builtin

if TYPE_CHECKING:
    import pandas as pd


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
    def configs(self) -> list[dict[str, Any]]:
        """The configuration of each result with points in the table."""
        return [self.sources[number].config.model_dump() for number in dict.fromkeys(self.points["source"])]

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
        if "warmup_requests" in row and not math.isnan(row["warmup_requests"]):
            return int(row["warmup_requests"])
        return int(self.source(row).config.scoring.get("warmup_requests", 0))

    def bandwidths_bytes_per_s(self, row: pd.Series[Any]) -> list[float]:
        """Copy bandwidth of each GPU of a server: as recorded, else from the profile; nan if unknown.

        The recorded value is that of the target's GPU. Other GPUs use their own profile.
        """
        config, own = self.source(row).config, row.get("bandwidth_bytes_per_s", math.nan)
        if own is None or not math.isfinite(own):
            profile = known_profile(str(row["gpu"]), str(row["profile"]), config)
            own = math.nan if profile is None else profile.gpu.bandwidth_bytes_per_s
        cards = str(row["cards"]).split("+") if "cards" in row else config.hardware.get("cards") or []
        ceilings = config.hardware.get("profile") == "roofline"

        def of(card: str) -> float:
            if card == row["gpu"] or card not in GPUS:
                return float(own) if card == row["gpu"] else math.nan
            return (GPUS[card] if ceilings else builtin(card).gpu).bandwidth_bytes_per_s

        return [of(card) for card in cards or [row["gpu"]] * RANKED[-1]]


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
        source, table = read_sweep(path) if path.is_dir() else read_run(path)
        tables.append(table.assign(source=number, results=source.name))
        sources.append(source)
    asked = list(dict.fromkeys(name for source in sources for name in source.vary))
    for source, table in zip(sources, tables, strict=True):
        for name in (name for name in asked if name not in table):
            table[name] = source.setting(name)
    points = pd.concat(tables, ignore_index=True).copy()  # defragments: pandas warns about many inserted columns
    points["run"] = points["seed"].rank(method="dense").astype(int) - 1  # one replication per seed
    first = [*KEYS, "pair", "run", "seed", *asked, "profile", "foundation"]  # as a sweep orders them
    points = points[list(dict.fromkeys([*first, *points.columns]))]
    candidates = [name for name in dict.fromkeys(("pair", *asked)) if points[name].nunique(dropna=False) > 1]
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


def records(row: pd.Series[Any]) -> Records | None:
    """The records of a point, or None if not saved; a ValueError names a bad file and column."""
    if not row["records"]:
        return None
    digests = row["records_sha256"]
    return read_records(row["records"], digests if isinstance(digests, dict) else None)
