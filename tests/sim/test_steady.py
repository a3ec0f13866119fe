"""The steady state: where it begins, how long a run must be to have one, and what is measured in it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.bench.length import length_of, mean_turns, sized, too_short
from pdvsim.bench.stats import interval
from pdvsim.sim.config import Acceptance, Arch, Experiment, Scoring, Traffic
from pdvsim.sim.metrics.stability import Census, stability
from pdvsim.sim.metrics.steady import FILL, LEAST, LEAST_LOOP, LOOPS_LONG, TALKS_LONG, loop_length, mser5, rate_length
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

TALKS: dict[str, Any] = {"dataset_name": "random", "input_len": 64, "output_len": 32, "num_turns": 6}


@settings(max_examples=25)
@given(start=st.integers(0, 200), seed=st.integers(0, 99), height=st.floats(-20, 20))
def test_mser5_cuts_a_step_where_it_ends(start: int, seed: int, height: float) -> None:
    """White noise after a start of another mean: a start beyond the noise is cut, and little more than that."""
    noise = np.random.default_rng(seed).normal(0, 1, 500)
    noise[:start] += height
    cut = mser5(noise)
    assert cut is not None
    if abs(height) > 3:
        assert cut >= start - 5
    assert cut <= max(start + 5, 250)


def test_what_never_settles_has_no_steady_state() -> None:
    assert mser5(np.arange(500.0)) is None
    assert mser5(np.ones(500)) == 0
    assert mser5(np.ones(20)) is None


def test_a_closed_loop_is_as_long_as_its_conversations() -> None:
    traffic = Traffic(max_concurrency=64, num_turns=10)
    assert loop_length(traffic, 10.0) == (FILL * 640, LOOPS_LONG * 640)
    assert loop_length(Traffic(max_concurrency=1), 1.0) == (2, LEAST_LOOP)
    prefixes = Traffic("random", max_concurrency=1, prefix_len=2000, num_prefixes=150)
    assert loop_length(prefixes, 1.0).start > 150 * math.log(150)  # the coupon collector's


def test_at_a_rate_think_times_count_and_more_load_takes_more_requests() -> None:
    traffic = Traffic(request_rate=8.0, num_turns=10, think_time_s=10.0)
    talk_s = 10 * 2.0 + 9 * 10.0
    assert rate_length(traffic, 10.0, 2.0) == (math.ceil(8 * FILL * talk_s), 8 * TALKS_LONG * talk_s)
    twice = rate_length(replace(traffic, request_rate=16.0), 10.0, 2.0)
    assert twice == tuple(2 * n for n in rate_length(traffic, 10.0, 2.0))
    assert rate_length(Traffic(request_rate=1.0), 1.0, 0.5) == (1, LEAST)
    assert rate_length(Traffic(request_rate=1.0), 1.0, 0.5, transient_s=70.0).start == 70
    assert rate_length(Traffic(request_rate=9.0), 1.0, 0.5, transient_s=70.0) == (630, 630)


@pytest.mark.parametrize(
    "load",
    [{"request_rate": 40.0, "think_time_s": 0.3}, {"max_concurrency": 12}, {"max_concurrency": 5, "num_turns": 1}],
)
def test_a_run_that_is_long_enough_delivers_its_load(load: dict[str, Any]) -> None:
    """Of conversations at a rate, what is delivered is what the conversations that begin bring; loops stay full."""
    experiment = sized(Experiment(traffic=Traffic(**TALKS | load)), lambda run: summarise(simulate(run)))
    run = simulate(experiment)
    metrics, window = summarise(run), run.requests
    starts = window["arrival_s"][window["turn"] == 0]
    begun = starts[starts > starts.max() - metrics["duration"]]
    offered = len(begun) * mean_turns(experiment.traffic) / metrics["duration"]
    assert metrics["request_throughput"] == pytest.approx(offered, rel=0.15)
    if "request_rate" in load:
        assert metrics["stability"] == "stable"
        assert not too_short(experiment.traffic, metrics)
        assert metrics["transient_s"] * load["request_rate"] < 1.2 * length_of(experiment).start
    else:
        inside = metrics["request_throughput"] * metrics["mean_e2el_ms"] / 1e3  # Little's law, nobody thinks
        assert inside == pytest.approx(load["max_concurrency"], rel=0.05)


def test_what_is_measured_ends_with_the_last_request_that_waits_for_no_answer() -> None:
    """Each figure against a sum over the rows, in Python; the same from records that are not kept."""
    traffic = Traffic(**TALKS, think_time_s=0.2, request_rate=30.0, num_prompts=300)
    scoring = Scoring(steady=True, warmup_requests=60, goodput=("e2el:1e6",))
    experiment = Experiment(traffic=traffic, scoring=scoring)
    run = simulate(experiment)
    rows, metrics = run.requests, summarise(run)
    start_s, end_s = rows["arrival_s"][60], rows["arrival_s"][rows["turn"] == 0].max()
    assert end_s < rows["arrival_s"].max()
    assert metrics["duration"] == end_s - start_s
    counted = (rows["arrival_s"] >= start_s) & (rows["arrival_s"] <= end_s)
    assert metrics["mean_e2el_ms"] == pytest.approx(1e3 * (rows["finish_s"] - rows["arrival_s"])[counted].mean())
    inside = (run.deliveries["time_s"] > start_s) & (run.deliveries["time_s"] <= end_s)
    assert metrics["total_output_tokens"] == run.deliveries["tokens"][inside].sum()
    assert metrics["conversations"] == ((rows["turn"] == 0) & counted).sum()
    streamed = summarise(simulate(replace(experiment, scoring=replace(scoring, detailed=False))))
    for name in ("duration", "completed", "mean_ttft_ms", "mean_itl_ms", "mean_e2el_ms", "transient_s"):
        assert streamed[name] == pytest.approx(metrics[name], rel=1e-9, nan_ok=True), name
    assert streamed["stability"] == metrics["stability"]


def test_a_load_that_never_came_is_not_called_stable() -> None:
    """Conversations that last longer than the run: most of their requests come after the last of them has begun."""
    traffic = Traffic(num_turns=10, think_time_s=10.0, request_rate=8.0, num_prompts=500)
    metrics = summarise(simulate(Experiment(traffic=traffic, scoring=Scoring(warmup_requests=100))))
    assert metrics["stability"] == "inconclusive"
    assert "delivered 2.32 of 8 req/s" in too_short(traffic, metrics)


def test_a_queue_that_rises_between_halves_is_not_stable() -> None:
    """Waits of 0.3 s in the first half of the measured time and 1.3 s in the second, emptied once in every slice."""
    arrival_s = np.arange(4000) / 20
    wait_s = np.where(arrival_s < 150, 0.3, 1.3) * (np.arange(4000) % 40 > 0)
    label = stability(
        {"arrival_s": arrival_s, "admitted_s": arrival_s + wait_s, "finish_s": arrival_s + wait_s + 0.1},
        Traffic(request_rate=20.0, num_prompts=4000),
    )
    assert label == "inconclusive"
    level = {"arrival_s": arrival_s, "admitted_s": arrival_s + 0.01, "finish_s": arrival_s + 0.2}
    assert stability(level, Traffic(request_rate=20.0, num_prompts=4000)) == "stable"


def test_the_hit_rate_must_settle_too() -> None:
    """Requests in the system are level from the first second; only the cache still fills until 40 s."""
    arrival_s = np.arange(4000) / 40
    rows = {"arrival_s": arrival_s, "admitted_s": arrival_s, "finish_s": arrival_s + 0.5}
    cached = np.minimum(arrival_s / 40, 1) * 1000
    census = Census()
    census.add(rows | {"prompt_tokens": np.full(4000, 1000), "num_cached_tokens": cached.astype(int)})
    assert 30 < census.transient_s() < 50
    level = Census()
    level.add(rows)
    assert level.transient_s() < 2


# warm-up -------------------------------------------------------------------------------------------------------------


R128: dict[str, Any] = {"dataset_name": "random", "input_len": 128, "output_len": 128}
RATES = ("request_throughput", "output_throughput", "total_token_throughput", "request_goodput")
LOOP = 16


@pytest.fixture(scope="module")
def loops() -> list[Result]:
    """Long closed loops of one server, one a seed."""
    traffic = Traffic(dataset_name="random", num_prompts=400, input_len=64, output_len=40, random_range_ratio=0.5)
    runs = (replace(traffic, max_concurrency=LOOP, seed=seed) for seed in range(4))
    return [simulate(Experiment("colocated", run, scoring=Scoring(goodput=("e2el:1e6",)))) for run in runs]


def trimmed(result: Result, warmup: int) -> dict[str, Any]:
    return summarise(result, replace(result.experiment.scoring, warmup_requests=warmup))


def test_every_trim_gives_the_same_rates(loops: list[Result]) -> None:
    expected = [trimmed(run, LOOP) for run in loops]
    for warmup in (1, 5, 100, 200):
        measured = [trimmed(run, warmup) for run in loops]
        for name in RATES:
            rate, reference = (interval(metrics[name] for metrics in runs) for runs in (measured, expected))
            assert abs(rate.mean - reference.mean) < rate.half_width + reference.half_width, (name, warmup)
            assert rate.mean == pytest.approx(reference.mean, rel=0.02), (name, warmup)


def test_the_interactive_law_holds_in_the_window(loops: list[Result]) -> None:
    """X R = N: as many are in the loop as it has room for."""
    for run in loops:
        metrics = trimmed(run, 3 * LOOP)
        inside = metrics["request_throughput"] * metrics["mean_e2el_ms"] / 1e3
        assert inside == pytest.approx(LOOP, rel=0.03)
        assert metrics["max_concurrent_requests"] == LOOP


@pytest.mark.parametrize("arch", sorted(set(ARCHS) - {"autoregressive"}))
def test_the_rate_per_judged_token_estimates_what_was_given(arch: Arch) -> None:
    """Within four standard deviations of a binomial; vLLM's, over all drafted, is another figure."""
    alpha = 0.6
    traffic = Traffic(num_prompts=24, max_concurrency=4, seed=5, **R128)
    for detailed in (True, False):
        scoring = Scoring(detailed=detailed, warmup_requests=2)
        metrics = summarise(simulate(Experiment(arch, traffic, Acceptance(acceptance_rate=alpha), scoring=scoring)))
        judged, accepted = metrics["spec_decode_judged_tokens"], metrics["spec_decode_accepted_tokens"]
        assert accepted < judged < metrics["spec_decode_draft_tokens"]
        assert metrics["spec_decode_judged_acceptance_rate"] == pytest.approx(100 * accepted / judged)
        assert abs(accepted / judged - alpha) < 4 * math.sqrt(alpha * (1 - alpha) / judged)
        assert metrics["spec_decode_acceptance_rate"] < 100 * alpha - 10
