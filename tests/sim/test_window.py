"""What a warm-up does to the metrics: a closed loop's rates are those of its steady state, however much is trimmed."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from pdvsim.sim.config import Acceptance, Arch, Experiment, Scoring, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate
from pdvsim.study.stats import interval

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


def test_trimming_counts_by_the_rows(loops: list[Result]) -> None:
    """Each rate against a sum over the rows, in Python."""
    run, warmup = loops[0], 50
    start_s, end_s = run.requests["arrival_s"][warmup], run.requests["arrival_s"].max()
    output, prompt = run.requests["output_tokens"].tolist(), run.requests["prompt_tokens"].tolist()
    requests = tokens_in = tokens_out = 0.0
    for id, tokens, at_s in zip(*(run.deliveries[n].tolist() for n in ("request", "tokens", "time_s")), strict=True):
        if start_s < at_s <= end_s:
            requests += tokens / output[id]
            tokens_in += prompt[id] * tokens / output[id]
            tokens_out += tokens
    metrics = trimmed(run, warmup)
    assert metrics["duration"] == end_s - start_s
    assert metrics["completed"] == pytest.approx(requests)
    assert metrics["total_input_tokens"] == pytest.approx(tokens_in)
    assert metrics["total_output_tokens"] == tokens_out
    assert metrics["request_goodput"] == pytest.approx(requests / (end_s - start_s))
    e2el_s = (run.requests["finish_s"] - run.requests["arrival_s"])[warmup:]
    assert metrics["mean_e2el_ms"] == pytest.approx(1e3 * e2el_s.mean())


def test_where_the_last_send_would_leave_nothing_the_last_finish_closes() -> None:
    for traffic in (Traffic(num_prompts=40, max_concurrency=64, **R128), Traffic(num_prompts=40, **R128)):
        run = simulate(Experiment("colocated", traffic))
        metrics = summarise(run, Scoring(warmup_requests=10))
        assert metrics["duration"] == run.requests["finish_s"].max()
        assert metrics["completed"] == pytest.approx(40)  # all were served in it


def test_an_open_loop_is_measured_to_its_last_finish() -> None:
    run = simulate(Experiment("pd", Traffic(num_prompts=60, request_rate=20.0, **R128)))
    metrics = summarise(run, Scoring(warmup_requests=20))
    assert metrics["duration"] == run.requests["finish_s"].max() - run.requests["arrival_s"][20]
    in_flight = int((run.requests["finish_s"][:20] > run.requests["arrival_s"][20]).sum())
    assert 40 < metrics["completed"] < 40 + in_flight


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


def test_adaptive_counts_its_drafting_rounds_alone() -> None:
    """At concurrency 128 it decodes plainly, but for the few rounds at the end."""
    traffic = Traffic(num_prompts=160, max_concurrency=128, **R128)
    for blocks in (True, False):
        run = simulate(Experiment("adaptive", traffic), blocks=blocks)
        metrics = summarise(run)
        rounds, drafts = int(run.requests["rounds"].sum()), int(run.requests["drafts"].sum())
        assert 0 < drafts < rounds / 2
        assert metrics["spec_decode_num_drafts"] == drafts
        verified = run.launches["rows"][run.launches["kind"] == 2]
        assert verified.sum() == drafts
        shares = np.array(metrics["spec_decode_per_position_acceptance_rates"])
        assert metrics["spec_decode_acceptance_length"] == pytest.approx(1 + shares.sum())
        assert metrics["spec_decode_acceptance_length"] > 1.8
