"""The length of a run: as long as its load needs, by one rule for all commands (`sim.metrics.steady`).

The length of a closed loop is known. At a request rate it is found by runs of the experiment itself: each gives the
time that requests are in service and the length of the start, until a run is long enough for its own figures. A batch
job has no steady state, and a replayed log has the length of the log: both keep theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from pdvsim.sim.config import Acceptance, Experiment, Traffic
from pdvsim.sim.metrics.stability import is_closed_loop
from pdvsim.sim.metrics.steady import MOST, Length, first_uses, loop_length, rate_length
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload

FIRST_MEASURED = 200  # requests of the first run, after the think times of a conversation
ROUNDS = 4  # runs at most
CLOSE = 1.15  # a run may be this much shorter than its own figures ask for
GIVEN_START = 0.2  # share of a given number of requests that is excluded
SHORT = 0.9  # share of a request rate below which it was not delivered
GROWTH = 2.0  # of a run in which no steady state began

Measure = Callable[[Experiment], Mapping[str, Any]]


def sized(experiment: Experiment, measure: Measure) -> Experiment:
    """The experiment with the number of requests that its load needs, at least its own, and the start excluded.

    `measure` runs an experiment and returns its row.
    """
    traffic = experiment.traffic
    if is_closed_loop(traffic):
        return with_length(experiment, loop_length(traffic, mean_turns(traffic)))
    if math.isinf(traffic.request_rate) and not traffic.use_trace_timestamps:
        return experiment
    if traffic.use_trace_timestamps:
        return with_length(experiment, length_of(experiment))
    turns = mean_turns(traffic)
    thinking = traffic.request_rate * (turns - 1) * traffic.think_time_s
    length = Length(max(1, math.ceil(thinking + first_uses(traffic))), FIRST_MEASURED)
    for _ in range(ROUNDS):
        run = with_length(experiment, length)
        row = measure(run)
        needed = needed_length(run, row)
        if needed.total <= CLOSE * run.traffic.num_prompts or length.total >= MOST:
            break
        length = needed
    return with_length(experiment, needed)


def long_enough(experiment: Experiment) -> Experiment:
    """The experiment with the length that its load needs, and no less than its own, if its steady state is asked for.

    One with a warm-up has a length of its own already.
    """
    scoring = experiment.scoring
    if not scoring.steady or scoring.warmup_requests:
        return experiment
    needed = sized(experiment, lambda run: summarise(simulate(run)))
    length, given = length_of(needed), experiment.traffic.num_prompts
    return with_length(experiment, Length(length.start, max(length.measured, given - length.start)))


def needed_length(run: Experiment, row: Mapping[str, Any]) -> Length:
    """The length that a run should have had, by its own figures; longer than it was if no steady state began.

    A queue that grows has no steady state: a run that showed that was long enough.
    """
    traffic, start_s = run.traffic, float(row["transient_s"])
    if row["stability"] == "overloaded":
        return length_of(run)
    unsettled = math.isnan(start_s)
    needed = rate_length(traffic, mean_turns(traffic), service_s(row), 0.0 if unsettled else start_s)
    if unsettled and needed.total < GROWTH * traffic.num_prompts:
        times = GROWTH * traffic.num_prompts / needed.total
        needed = Length(math.ceil(times * needed.start), math.ceil(times * needed.measured))
    return needed


def service_s(row: Mapping[str, Any]) -> float:
    """Mean time from admission to the last token."""
    queue_ms = row["breakdown_ms"]["queue"] if "breakdown_ms" in row else row["breakdown_ms_queue"]
    return (float(row["mean_e2el_ms"]) - float(queue_ms)) / 1e3


def with_length(experiment: Experiment, length: Length) -> Experiment:
    """The experiment with such a length, or the longest allowed one, measured in its steady state.

    A replayed log keeps its own length.
    """
    if experiment.traffic.use_trace_timestamps:
        return replace(experiment, scoring=replace(experiment.scoring, steady=True, warmup_requests=0))
    if length.total > MOST:
        length = Length(min(length.start, MOST // 2), MOST - min(length.start, MOST // 2))
    traffic = replace(experiment.traffic, num_prompts=length.total)
    scoring = replace(experiment.scoring, steady=True, warmup_requests=length.start)
    return replace(experiment, traffic=traffic, scoring=scoring)


def given_length(prompts: int) -> Length:
    """The length of a run whose number of requests is given."""
    start = int(GIVEN_START * prompts)
    return Length(start, prompts - start)


def length_of(experiment: Experiment) -> Length:
    """The length that an experiment has."""
    start = experiment.scoring.warmup_requests
    return Length(start, experiment.traffic.num_prompts - start)


def too_short(traffic: Traffic, row: Mapping[str, Any]) -> str:
    """Why a run says little about the load that it speaks of; empty if it is long enough."""
    rate = float(row["request_throughput"])
    paced = not (math.isinf(traffic.request_rate) or traffic.use_trace_timestamps)
    if paced and traffic.converses and row["stability"] == "inconclusive" and rate < SHORT * traffic.request_rate:
        return f"the run delivered {rate:.3g} of {traffic.request_rate:g} req/s: it is too short for its conversations"
    return ""


@lru_cache
def mean_turns(traffic: Traffic) -> float:
    """Mean number of requests of a conversation; 1 without conversations."""
    if not traffic.converses:
        return 1.0
    few = replace(traffic, num_prompts=min(traffic.num_prompts, 1000 * traffic.num_turns))
    return Workload(few, Acceptance()).mean_turns
