"""Simulations for a decision: batches of experiments on all cores, one row each, cached.

A seed gives every architecture, load and setting the same requests, so rows of one seed are paired.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, Literal

from pdvsim.bench.length import CLOSE, given_length, length_of, mean_turns, needed_length, with_length
from pdvsim.bench.pool import Backend, Row
from pdvsim.bench.rows import cache_rows
from pdvsim.bench.run import SweepInterrupted, run
from pdvsim.bench.sweep import Point
from pdvsim.decide.formula import Formula
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Traffic
from pdvsim.sim.metrics.steady import LEAST, LEAST_LOOP, Length, loop_length, rate_length
from pdvsim.sim.relevance import applicable
from pdvsim.sim.workload.requests import Workload

LoadAxis = Literal["load", "concurrency", "requests"]

WAITING = 1.25  # concurrency that saturates a server, relative to its batch limit
BATCH_PROMPTS = 512  # requests of a batch job that suffice to compare settings: twice the largest batch
MOST_WAITING_SHARE = 0.03  # mean share of a run's requests that wait for admission


class Spent(Exception):
    """The next runs would exceed the budget."""


class Bench:
    """Runs each experiment once, `jobs` concurrently (None: one per core); reports the number done to `progress`.

    With `band` also at the ends of their error bars, if they have any. Tables need that; decisions do not. `prompts` is
    the number of requests of a run, if that is given; else a run is as long as its load needs.
    """

    def __init__(
        self,
        jobs: int | None = None,
        progress: Callable[[int], None] | None = None,
        band: bool = False,
        prompts: int | None = None,
    ) -> None:
        self.jobs = jobs
        self.prompts = prompts
        self.progress = progress or (lambda done: None)
        self.band = band
        self.runs, self._most = 0, math.inf
        self._known, self._kept = dict[Experiment, Row](), cache_rows()  # of this decision, and of earlier ones

    def rows(self, experiments: Sequence[Experiment]) -> list[Row]:
        """One row per experiment, in order. Ctrl-C raises KeyboardInterrupt; finished rows are kept."""
        asked, experiments = experiments, list(map(self._as_run, experiments))
        new = [experiment for experiment in dict.fromkeys(experiments) if experiment not in self._known]
        if self.runs + len(new) > self._most:
            raise Spent
        # longest first: a long run started last would leave cores idle; numbered, as points finish in any order
        new.sort(key=lambda experiment: -experiment.traffic.num_prompts)
        points = [Point("request_rate", e.traffic.request_rate, at, e) for at, e in enumerate(new)]
        before, rows = self.runs, list[Row]()
        try:
            rows = run(points, Backend(self.jobs), lambda done: self.progress(before + done), self._kept)
        except SweepInterrupted as stop:
            rows = stop.rows
            raise
        finally:
            self._known |= {new[row["run"]]: row for row in rows}
            self.runs += len(rows)
        return self.known(asked) or []

    @contextmanager
    def within(self, most: float) -> Iterator[None]:
        """Refuse to run more than `most` simulations in all (`Spent`)."""
        before, self._most = self._most, min(self._most, most)
        try:
            yield
        finally:
            self._most = before

    def sized(self, experiment: Experiment) -> Experiment:
        """The experiment with the length that its load needs, at a request rate by formula, or the given one."""
        traffic = experiment.traffic
        if self.prompts is not None and load_axis(traffic) != "requests":
            return with_length(experiment, given_length(self.prompts))
        if load_axis(traffic) == "requests":
            return experiment
        if traffic.use_trace_timestamps:
            return with_length(experiment, length_of(experiment))
        if load_axis(traffic) == "concurrency":
            return with_length(experiment, loop_length(traffic, mean_turns(traffic)))
        service_s = Formula(experiment).answer_s(experiment.longest_draft)
        return with_length(experiment, rate_length(traffic, mean_turns(traffic), service_s))

    def lengthened(self, candidates: Mapping[str, Experiment], share: float = 1.0) -> dict[str, Experiment]:
        """The candidates with one length: a share of what suffices for the slowest that keeps up."""
        every = dict(candidates)
        one = next(iter(every.values()))
        if self.prompts is not None or load_axis(one.traffic) != "load" or one.traffic.use_trace_timestamps:
            return every
        rows = self.rows(list(every.values()))
        needed = [needed_length(c, row) for c, row in zip(every.values(), rows, strict=True) if keeps_up(row)]
        longest = max(needed, key=lambda length: length.total, default=length_of(one)).short(share, LEAST // 2)
        if longest.total <= CLOSE * one.traffic.num_prompts:
            return every
        return {name: with_length(candidate, longest) for name, candidate in every.items()}

    def replicated(self, candidates: Mapping[str, Experiment], seeds: int) -> dict[str, list[Row]]:
        """The rows of each candidate on the first `seeds`, by name."""
        rows = iter(self.rows([run for candidate in candidates.values() for run in replications(candidate, seeds)]))
        return {name: list(islice(rows, seeds)) for name in candidates}

    def known(self, experiments: Sequence[Experiment]) -> list[Row] | None:
        """The rows of experiments if all have been run, else None."""
        runs = list(map(self._as_run, experiments))
        if any(run not in self._known for run in runs):
            return None
        return [self._known[run] | {"pair": e.server.pair} for run, e in zip(runs, experiments, strict=True)]

    def _as_run(self, experiment: Experiment) -> Experiment:
        """The experiment to simulate for this one: without drafts, one run stands for all drafters."""
        if not experiment.speculates:
            server = experiment.server
            alone = replace(server, pair=f"none:{server.pair.partition(':')[2]}", drafter=None)
            experiment = replace(experiment, server=alone)
        return applicable(experiment if self.band else without_band(experiment))


def without_band(experiment: Experiment) -> Experiment:
    """The same experiment without its error band: decisions compare runs that share their forward times."""
    return replace(experiment, hardware=replace(experiment.hardware, band=False))


def replications(experiment: Experiment, num_runs: int) -> list[Experiment]:
    """The same experiment with `num_runs` consecutive seeds."""
    seed = experiment.traffic.seed
    return [replace(experiment, traffic=replace(experiment.traffic, seed=seed + run)) for run in range(num_runs)]


def load_axis(traffic: Traffic) -> LoadAxis:
    """Kind of load: a request rate, a closed loop, or a batch job whose requests all arrive at the start."""
    if traffic.request_rate < math.inf:
        return "load"
    return "requests" if traffic.max_concurrency is None else "concurrency"


def load_of(traffic: Traffic) -> float:
    """The load on its axis."""
    loads = {"load": traffic.request_rate, "requests": traffic.num_prompts, "concurrency": traffic.max_concurrency}
    return float(loads[load_axis(traffic)] or 0)


def load_words(traffic: Traffic) -> str:
    """The load as text, after "at"."""
    words = {"load": "{:g} req/s", "requests": "a batch of {:g} requests", "concurrency": "concurrency {:g}"}
    return words[load_axis(traffic)].format(load_of(traffic))


def at_load(experiment: Experiment, load: float) -> Experiment:
    """The same experiment at another load of its kind."""
    axis, traffic = load_axis(experiment.traffic), experiment.traffic
    if axis == "load":
        return at_rate(experiment, load)
    if axis == "requests":
        return replace(experiment, traffic=replace(traffic, num_prompts=round(load)))
    return replace(experiment, traffic=replace(traffic, max_concurrency=round(load)))


def shortened(experiment: Experiment, share: float) -> Experiment:
    """The experiment with the same start and a share of what it measures, or of a batch job."""
    traffic = experiment.traffic
    if load_axis(traffic) == "requests":  # fewer would not fill the batches that the whole job fills
        few = min(traffic.num_prompts, max(math.ceil(share * traffic.num_prompts), BATCH_PROMPTS))
        return replace(experiment, traffic=replace(traffic, num_prompts=few))
    if not experiment.scoring.steady or traffic.use_trace_timestamps:
        return experiment
    cycle = math.ceil((traffic.max_concurrency or 0) * mean_turns(traffic))
    return with_length(experiment, length_of(experiment).short(share, max(LEAST_LOOP // 2, cycle)))


def at_rate(experiment: Experiment, rate: float) -> Experiment:
    """The same experiment at another request rate: the same requests, scaled in time."""
    replays = experiment.traffic.use_trace_timestamps and rate < math.inf  # a batch has no arrival times
    return replace(experiment, traffic=replace(experiment.traffic, request_rate=rate, use_trace_timestamps=replays))


def mean_gap(traffic: Traffic) -> float:
    """Mean gap between the sampled arrivals at a rate of one per second: about 1."""
    return _mean_gap(replace(traffic, request_rate=1.0))


@lru_cache
def _mean_gap(traffic: Traffic) -> float:
    return float(Workload(traffic, Acceptance()).arrival_s[-1]) / traffic.num_prompts


def mean_output_tokens(traffic: Traffic) -> float:
    """Mean output tokens of the sampled requests."""
    return _mean_output_tokens(replace(traffic, request_rate=math.inf, use_trace_timestamps=False))


@lru_cache
def _mean_output_tokens(traffic: Traffic) -> float:
    return float(Workload(traffic, Acceptance()).lengths[:, 1].sum()) / traffic.num_prompts


def conversation_output_tokens(traffic: Traffic) -> float:
    """Mean output tokens of all turns of a conversation."""
    return mean_output_tokens(traffic) * mean_turns(traffic)


def delivered_tokens_per_s(experiment: Experiment, row: Row) -> float:
    """Output tokens per second in the steady state: what is offered, where the server keeps up with a request rate."""
    traffic = experiment.traffic
    if load_axis(traffic) == "load" and keeps_up(row):
        return traffic.request_rate * mean_output_tokens(traffic)
    return float(row["output_throughput"])


def one_server(experiment: Experiment) -> Experiment:
    """One of the replicas with its part of a request rate; the experiment itself if its requests share prefixes.

    Those are found on the server that had them before, which one of several need not be.
    """
    traffic, count = experiment.traffic, experiment.hardware.replicas
    if count == 1 or load_axis(traffic) != "load" or traffic.shares or not experiment.scoring.steady:
        return experiment
    hardware = replace(experiment.hardware, replicas=1, router=Hardware.router)
    one = replace(experiment, hardware=hardware, traffic=replace(traffic, request_rate=traffic.request_rate / count))
    length = length_of(experiment)
    return with_length(one, Length(math.ceil(length.start / count), max(LEAST, math.ceil(length.measured / count))))


def saturated(experiment: Experiment) -> Experiment:
    """The same server with requests always waiting, so that it delivers its maximum throughput.

    Users of conversations do not think: otherwise most of them would, and nothing would wait.
    """
    rows = experiment.server.max_num_seqs * experiment.batches
    traffic = replace(
        at_rate(experiment, math.inf).traffic, max_concurrency=math.ceil(WAITING * rows), think_time_s=0.0
    )
    return with_length(replace(experiment, traffic=traffic), loop_length(traffic, mean_turns(experiment.traffic)))


def in_loop(experiment: Experiment, clients: int, prompts: int | None = None) -> Experiment:
    """The same server in a closed loop, measured over `prompts` requests, or as many as the loop needs."""
    if prompts is not None and prompts < clients:
        raise ValueError(f"--num-prompts {prompts} are too few for {clients} concurrent requests")
    traffic = replace(experiment.traffic, max_concurrency=clients)
    length = loop_length(traffic, mean_turns(traffic)) if prompts is None else given_length(prompts)
    return with_length(replace(experiment, traffic=traffic), length)


def at_acceptance(experiment: Experiment, rate: float) -> Experiment:
    """The same experiment at another acceptance rate: the same random numbers with another threshold."""
    return replace(experiment, acceptance=replace(experiment.acceptance, acceptance_rate=rate))


def keeps_up(row: Mapping[Any, Any]) -> bool:
    """Whether a run's queue stayed bounded: it is not labelled overloaded, and few requests waited.

    Near saturation a short run's label is "inconclusive". There the wait for admission decides: above saturation the
    number waiting is proportional to the requests so far, below it is not.
    """
    if row["stability"] == "overloaded":
        return False
    rate = float(row["load"])
    if math.isinf(rate) or row.get("load_kind") == "concurrency":  # a closed loop bounds the queue
        return True
    waiting = rate * float(row["breakdown_ms_queue"]) / 1e3  # Little's law
    return waiting <= MOST_WAITING_SHARE * float(row["completed"])


def kept_up(rows: Sequence[Mapping[Any, Any]]) -> bool:
    """Whether more than half of the replications kept up."""
    return 2 * sum(map(keeps_up, rows)) > len(rows)
