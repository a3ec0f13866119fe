"""Simulations for a decision: batches of experiments on all cores, one row each, remembered.

The same seed gives every architecture, load and setting the same requests, so that rows of one seed are pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from pdvsim.common.outcomes import Row
from pdvsim.sim.config import Acceptance, Experiment, Traffic
from pdvsim.sim.relevance import suited
from pdvsim.sim.workload.requests import Workload
from pdvsim.study.sweep import Point, SweepInterrupted, run_sweep

if TYPE_CHECKING:
    import pandas as pd

LEAST_SATURATED = 200  # requests of a run that is to saturate a server
WAITING = 0.03  # share of a run's requests that may, on average, be waiting for admission


class Bench:
    """Runs experiments, `jobs` at a time (None: one per core), each once; `progress` hears how many are done.

    With `band` also at the ends of their error bars, where they have any: for tables, as no decision needs it.
    """

    def __init__(
        self, jobs: int | None = None, progress: Callable[[int], None] | None = None, band: bool = False
    ) -> None:
        self.jobs = jobs
        self.progress = progress or (lambda done: None)
        self.band = band
        self.runs = 0
        self._known: dict[Experiment, Row] = {}

    def rows(self, experiments: Sequence[Experiment]) -> list[Row]:
        """A row for each experiment, in their order. Ctrl-C raises KeyboardInterrupt; what had finished is known."""
        experiments = list(map(self._as_run, experiments))
        new = [experiment for experiment in dict.fromkeys(experiments) if experiment not in self._known]
        new.sort(key=lambda experiment: -experiment.traffic.num_prompts)  # a long run begun last would keep one core
        # a point's number finds its experiment again, whichever of them finished
        points = [Point("request_rate", e.traffic.request_rate, at, e) for at, e in enumerate(new)]
        before = self.runs
        if points:
            try:
                self._keep(new, run_sweep(points, self.jobs, lambda done, total: self.progress(before + done)))
            except SweepInterrupted as stop:
                self._keep(new, stop.points)
                raise
        return [self._known[experiment] for experiment in experiments]

    def known(self, experiments: Sequence[Experiment]) -> list[Row] | None:
        """The rows of experiments that have all been run; None if one has not."""
        experiments = list(map(self._as_run, experiments))
        if any(experiment not in self._known for experiment in experiments):
            return None
        return [self._known[experiment] for experiment in experiments]

    def _as_run(self, experiment: Experiment) -> Experiment:
        return suited(experiment if self.band else without_band(experiment))

    def _keep(self, experiments: Sequence[Experiment], frame: pd.DataFrame) -> None:
        for row in frame.to_dict("records"):
            self._known[experiments[int(row["run"])]] = {str(key): value for key, value in row.items()}
        self.runs += len(frame)


def without_band(experiment: Experiment) -> Experiment:
    """The same experiment run once: decisions compare runs that share their forward times, whatever their error."""
    return replace(experiment, hardware=replace(experiment.hardware, band=False))


def replications(experiment: Experiment, num_runs: int) -> list[Experiment]:
    """The same experiment with `num_runs` seeds from its own on."""
    seed = experiment.traffic.seed
    return [replace(experiment, traffic=replace(experiment.traffic, seed=seed + run)) for run in range(num_runs)]


def at_rate(experiment: Experiment, rate: float) -> Experiment:
    """The same experiment at another request rate: the same requests, squeezed or stretched in time."""
    return replace(experiment, traffic=replace(experiment.traffic, request_rate=rate))


@lru_cache
def mean_gap(traffic: Traffic) -> float:
    """Mean gap between the arrivals drawn for a rate of one per second: 1, but for chance."""
    *_, last = Workload(replace(traffic, request_rate=1.0), Acceptance()).arrivals()
    return float(last[-1]) / traffic.num_prompts


@lru_cache
def mean_output_tokens(traffic: Traffic) -> float:
    """Output tokens per request of those drawn."""
    return sum(float(tokens[:, 1].sum()) for tokens in Workload(traffic, Acceptance()).lengths()) / traffic.num_prompts


def saturated(experiment: Experiment) -> Experiment:
    """The same server with more requests waiting than it admits, always: what it delivers is the most that it can."""
    limit, servers = experiment.server.max_num_seqs, experiment.hardware.replicas
    rows = limit * servers
    traffic = replace(
        experiment.traffic, request_rate=math.inf, max_concurrency=2 * rows, num_prompts=max(8 * rows, LEAST_SATURATED)
    )
    scoring = replace(experiment.scoring, warmup_requests=max(3 * rows, LEAST_SATURATED // 4))
    return replace(experiment, traffic=traffic, scoring=scoring)


def at_acceptance(experiment: Experiment, rate: float) -> Experiment:
    """The same experiment at another acceptance rate: the same coins, against another threshold."""
    return replace(experiment, acceptance=replace(experiment.acceptance, acceptance_rate=rate))


def keeps_up(row: Row) -> bool:
    """Whether a run's queue stayed bounded: it is not labelled overloaded, and few of all requests were ever waiting.

    Near saturation a short run's label is "inconclusive". There the wait for admission decides: beyond saturation the
    number waiting is a share of all who came, below it is not.
    """
    if row["stability"] == "overloaded":
        return False
    rate = float(row["load"])  # of a closed loop it is infinite, and the loop is what bounds the queue
    waiting = rate * float(row["breakdown_ms_queue"]) / 1e3  # Little's law
    return math.isinf(rate) or waiting <= WAITING * float(row["completed"])


def kept_up(rows: Sequence[Row]) -> bool:
    """Whether more than half of the replications kept up."""
    return 2 * sum(map(keeps_up, rows)) > len(rows)
