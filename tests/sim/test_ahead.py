"""Drafting ahead: how often a verdict is guessed, and what that is worth to one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import covering_profile, make_planner, simulate
from pdvsim.sim.workload.acceptance import draw_streams, expected_tokens, guessed_rate, was_guessed

SILENT = Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0)


@pytest.mark.parametrize("fan", [0, 1, 4])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9, 1.0])
def test_verdicts_are_guessed_as_often_as_the_formula_says(alpha: float, k: int, fan: int) -> None:
    """At every tenth position of 200 requests, within 4.5 standard deviations."""
    coins, rates = np.random.default_rng(1), np.random.default_rng(2)
    streams, _ = draw_streams(Acceptance(alpha), np.full(200, 200), coins, rates)
    hits = []
    for number, runs in enumerate(streams):
        request = Request(number, 0.0, 1, 200, runs)
        request.k = k
        for request.emitted in range(1, 200, 10):
            hits.append(was_guessed(request, min(runs[request.emitted], k), fan, 1.0))
    expected = guessed_rate(alpha, k, fan, 1.0)
    assert abs(np.mean(hits) - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / len(hits)) + 1e-12


def speed(arch: str = "pdv-ahead", host: Host = SILENT, at_once: int = 1, gpus: int = 2, **server: Any) -> float:
    experiment = Experiment(
        arch,
        Traffic("random", num_prompts=6 * at_once, input_len=16, output_len=2000, max_concurrency=at_once),
        Acceptance(0.8),
        Server(num_speculative_tokens=4, **server),
        Hardware(verify_gpu=gpus - 1, **({"link_latency_s": 0.0} if gpus > 1 else {})),
        host,
    )
    return float(summarise(simulate(experiment))["output_throughput"])


@pytest.mark.parametrize("fan", [0, 2, 8])
def test_one_request_with_drafts_ahead(fan: int) -> None:
    """A round takes the longer of verify and draft ahead; one that was not guessed has its draft before it, or none."""
    hardware = Hardware(verify_gpu=1, link_latency_s=0.0)
    experiment = Experiment("pdv-ahead", server=Server(num_speculative_tokens=4), hardware=hardware)
    planner = make_planner(experiment, covering_profile(experiment))
    k, context, rate = 4, 1016, 0.8
    verify = planner.round_s(1, context, k) - planner.host_s
    draft = planner.models["draft"].shape(1, 1, k)
    draft_s = draft.solo_0 + draft.solo_1 * context
    verify -= draft_s

    def ahead_s(branches: int) -> float:
        shape = planner.models["draft"].shape(branches, 1, k + 1)
        return shape.solo_0 + shape.solo_1 * context * branches

    wide, narrow = ((k + 1) * fan, fan) if fan else (1, 1)
    hits, again = guessed_rate(rate, k, fan, 1.0), guessed_rate(rate, 0, fan, 1.0)
    gain = expected_tokens(rate, k)
    drafting = gain / (max(verify, ahead_s(wide)) + (1 - hits) * draft_s)
    share = again / (1 - hits + again)
    round_s = share * max(verify, ahead_s(wide)) + (1 - share) * max(verify, ahead_s(narrow))
    plain = (share * gain + 1 - share) / round_s
    assert speed(ahead_fan=fan, ahead_miss="draft") == pytest.approx(drafting, rel=0.03)
    assert speed(ahead_fan=fan, ahead_miss="plain") == pytest.approx(plain, rel=0.03)


def test_the_latency_model_chooses_no_worse_than_not_drafting_ahead() -> None:
    """On two GPUs with few requests it gains a quarter and more; on one it leaves off."""
    for at_once, gpus, least in ((1, 2, 1.25), (4, 2, 1.0), (32, 2, 0.98), (1, 1, 0.98), (16, 1, 0.98)):
        host = Host()
        plain, ahead = (speed(arch, host, at_once, gpus) for arch in ("pdv", "pdv-ahead"))
        assert ahead >= least * plain, (at_once, gpus)


def test_what_says_nothing_of_the_next_token_is_refused() -> None:
    for acceptance in (Acceptance(synthetic_acceptance_rates=(0.8,) * 4), Acceptance(acceptance_temperature_slope=0.1)):
        with pytest.raises(ValueError, match="pdv-ahead needs --acceptance-rate"):
            Experiment("pdv-ahead", acceptance=acceptance)
