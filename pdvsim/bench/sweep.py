"""Sweeps: loads x varied flags x architectures x replications, one row per point.

Replication i has seed base + i, the same for every architecture and load, so that differences are paired. Rows are in
the order of the points for every backend (`pool`). Nothing in a row depends on this machine's clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.bench.pool import Row
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.limits import NumRuns, RequestRate, Requests, check_list, check_points, check_ranges
from pdvsim.sim.relevance import applicable, vet

if TYPE_CHECKING:
    import pandas as pd

LoadKind = Literal["concurrency", "request_rate", "trace"]

DEFAULT_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True)
class Point:
    """One run of a sweep; `varied` are its values of the varied flags, in order."""

    load_kind: LoadKind
    load: float
    run: int
    experiment: Experiment
    varied: tuple[tuple[str, Any], ...] = ()

    @property
    def labels(self) -> Row:
        """The columns that identify this point in its sweep, which come first in its row."""
        labels: Row = {
            "arch": self.experiment.arch,
            "pair": self.experiment.server.pair,
            "load_kind": self.load_kind,
            "load": self.load,
            "run": self.run,
            "seed": self.experiment.traffic.seed,
        }
        # a list becomes a text, to be a table key
        return labels | {n: "+".join(map(str, v)) if isinstance(v, tuple) else v for n, v in self.varied}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.labels.items() if name not in ("load_kind", "run"))


@dataclass(frozen=True)
class Sweep:
    """Loads x varied flags x architectures x replications around one experiment."""

    archs: tuple[Arch, ...] = ("colocated",)
    concurrency: tuple[Requests, ...] = ()
    request_rate: tuple[RequestRate, ...] = ()
    num_runs: NumRuns = 1
    base: Experiment = field(default_factory=Experiment)
    vary: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # fields of the experiment and their values

    def __post_init__(self) -> None:
        check_list("arch", self.archs)
        varied_lists = {f"vary {name}": values for name, values in self.vary.items()}
        lists = {"concurrency": self.concurrency, "request-rate": self.request_rate, **varied_lists}
        for name, values in lists.items():
            check_list(name, values, needed=False)
        check_ranges(self)
        if self.concurrency and self.request_rate:
            raise ValueError("--concurrency and --request-rate are mutually exclusive")
        if self.concurrency and self.base.traffic.max_concurrency is not None:
            raise ValueError("--concurrency and --max-concurrency are mutually exclusive")
        if self.base.traffic.use_trace_timestamps and self.concurrency:
            raise ValueError("--use-trace-timestamps replays arrivals: give --request-rate, not --concurrency")
        loads = len(self.concurrency or self.request_rate or DEFAULT_RATES)
        varied = math.prod(map(len, self.vary.values()))
        check_points("loads x varied values x architectures x runs", loads, varied, len(self.archs), self.num_runs)
        _ = self._points  # before the first run

    def points(self) -> list[Point]:
        """Every run, loads outermost."""
        return list(self._points)

    @cached_property
    def _points(self) -> list[Point]:
        axes = [[(name, value) for value in values] for name, values in self.vary.items()]
        seed, given = self.base.traffic.seed, list[Point]()
        for (kind, load, settings), varied, arch in product(self._loads(), product(*axes), self.archs):
            for run in range(self.num_runs):
                experiment = self.base.with_settings(**{"arch": arch, "seed": seed + run, **dict(varied), **settings})
                given.append(Point(kind, load, run, experiment, varied))
        vet(point.experiment for point in given if point.run == 0)
        idle = False
        for at, point in enumerate(given):
            if point.run == 0:  # seeds do not affect which options have an effect
                idle = applicable(point.experiment) is not point.experiment
            if idle:
                given[at] = replace(point, experiment=applicable(point.experiment))
        return given

    def _loads(self) -> Iterator[tuple[LoadKind, float, dict[str, Any]]]:
        """The loads, each with its settings."""
        if self.concurrency:
            for limit in self.concurrency:
                yield "concurrency", float(limit), {"request_rate": math.inf, "max_concurrency": limit}
        elif self.base.traffic.use_trace_timestamps and not self.request_rate:
            yield "trace", math.nan, {}
        else:
            for rate in map(float, self.request_rate or DEFAULT_RATES):
                yield "request_rate", rate, {"request_rate": rate}


def flatten(metrics: dict[str, Any], prefix: str = "") -> Row:
    """Nested dictionaries as one level, their keys joined by underscores."""
    flat: Row = {}
    for name, value in metrics.items():
        flat |= flatten(value, f"{prefix}{name}_") if isinstance(value, dict) else {prefix + name: value}
    return flat


def frame_of(rows: Iterable[Row]) -> pd.DataFrame:
    """Rows as a frame; columns that a row lacks are empty."""
    import pandas as pd

    return pd.DataFrame(list(rows))
