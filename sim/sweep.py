"""Many experiments at once: architectures x loads x replications, on all cores, one row a point.

Replication i has seed base + i, the same for every architecture and load, so that differences are paired. Rows come
back in the order of the points whatever the number of jobs; nothing in a row depends on the clock of this machine.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.sim.config import Arch, Experiment

if TYPE_CHECKING:
    import pandas as pd

LoadKind = Literal["concurrency", "request_rate", "trace"]
Row = dict[str, Any]

DEFAULT_RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    load_kind: LoadKind
    load: float
    run: int
    experiment: Experiment


@dataclass(frozen=True)
class Sweep:
    """Architectures x loads x replications around one experiment."""

    archs: tuple[Arch, ...] = ("pdv",)
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    num_runs: int = 1
    base: Experiment = field(default_factory=Experiment)

    def __post_init__(self) -> None:
        for name, values in (
            ("arch", self.archs),
            ("concurrency", self.concurrency),
            ("request-rate", self.request_rate),
        ):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names a value twice: {', '.join(map(str, values))}")
        if not self.archs:
            raise ValueError("arch needs at least one value")
        if self.num_runs < 1:
            raise ValueError(f"num-runs must be greater than 0, got {self.num_runs}")
        if self.concurrency and self.request_rate:
            raise ValueError("--concurrency and --request-rate exclude each other")
        if self.concurrency and self.base.traffic.max_concurrency is not None:
            raise ValueError("--concurrency and --max-concurrency exclude each other")
        if self.base.traffic.use_trace_timestamps and (self.concurrency or self.request_rate):
            raise ValueError("--use-trace-timestamps fixes the load: it takes no --concurrency and no --request-rate")
        self.points()  # an architecture that refuses an option refuses it now, not in the middle of the sweep

    def points(self) -> list[Point]:
        """Every run, loads outermost."""
        return [
            Point(kind, load, run, self._experiment(arch, kind, load, run))
            for kind, load in self._loads()
            for arch in self.archs
            for run in range(self.num_runs)
        ]

    def _loads(self) -> Iterator[tuple[LoadKind, float]]:
        if self.concurrency:
            yield from (("concurrency", float(c)) for c in self.concurrency)
        elif self.base.traffic.use_trace_timestamps:
            yield "trace", math.nan
        else:
            yield from (("request_rate", float(r)) for r in self.request_rate or DEFAULT_RATES)

    def _experiment(self, arch: Arch, kind: LoadKind, load: float, run: int) -> Experiment:
        traffic = replace(self.base.traffic, seed=self.base.traffic.seed + run)
        if kind == "concurrency":
            traffic = replace(traffic, request_rate=math.inf, max_concurrency=int(load))
        elif kind == "request_rate":
            traffic = replace(traffic, request_rate=load)
        return replace(self.base, arch=arch, traffic=traffic)


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C in the middle of a sweep; `points` are the rows that were finished."""

    def __init__(self, points: pd.DataFrame) -> None:
        super().__init__("sweep interrupted")
        self.points = points


def run_sweep(
    points: Sequence[Point], jobs: int | None = None, progress: Callable[[int, int], None] | None = None
) -> pd.DataFrame:
    """Run the points, `jobs` at a time (None: one per core); one row a point, in their order.

    `progress` is called with the points done and the points in all. Ctrl-C raises SweepInterrupted.
    """
    jobs = min(jobs or cores(), len(points))
    rows: dict[int, Row] = {}
    finished = _in_process(points) if jobs <= 1 else _in_workers(points, jobs)
    try:
        for index, row in finished:
            rows[index] = row
            if progress:
                progress(len(rows), len(points))
    except KeyboardInterrupt:
        raise SweepInterrupted(_frame(rows)) from None
    finally:
        with warnings.catch_warnings(action="ignore"):  # joblib warns of the points given up
            finished.close()
    return _frame(rows)


def run_point(point: Point) -> Row:
    """Simulate one point and summarise it as one flat row."""
    from pdvsim.sim.band import ends, spanned
    from pdvsim.sim.metrics import summarise
    from pdvsim.sim.run import simulate

    result = simulate(point.experiment)
    row: Row = {
        "arch": point.experiment.arch,
        "load_kind": point.load_kind,
        "load": point.load,
        "run": point.run,
        "seed": point.experiment.traffic.seed,
    }
    row |= {
        name: result.meta[name]
        for name in ("profile", "foundation", "forward_error_bar", "gpu", "gpus")
        if name in result.meta
    }
    return row | flatten(spanned(summarise(result), ends(point.experiment)))


def flatten(metrics: dict[str, Any], prefix: str = "") -> Row:
    """Nested dictionaries as one level, their keys joined by underscores."""
    flat: Row = {}
    for name, value in metrics.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{name}_")
        else:
            flat[prefix + name] = value
    return flat


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_process(points: Sequence[Point]) -> Generator[tuple[int, Row], None, None]:
    for index, point in enumerate(points):
        yield index, run_point(point)


def _in_workers(points: Sequence[Point], jobs: int) -> Generator[tuple[int, Row], None, None]:
    from joblib import Parallel, delayed
    from joblib.externals.loky import get_reusable_executor

    pool = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    with _deaf_to_ctrl_c():  # workers inherit it: a terminal's Ctrl-C reaches every process, the parent answers it
        finished = pool(delayed(_numbered)(index, point) for index, point in enumerate(points))
    try:
        yield from finished
    except (KeyboardInterrupt, GeneratorExit):
        get_reusable_executor().shutdown(wait=False, kill_workers=True)
        raise


def _numbered(index: int, point: Point) -> tuple[int, Row]:
    return index, run_point(point)


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _frame(rows: dict[int, Row]) -> pd.DataFrame:
    import pandas as pd

    return pd.DataFrame([rows[index] for index in sorted(rows)])
