"""Drafting ahead: how often a verdict is guessed, and what that is worth to one request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.prices.links import LINKS, LinkSpec
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.acceptance import Streams, expected_tokens, guessed_rate, was_guessed
from pdvsim.sim.workload.requests import make_requests
from pdvsim.testing import LOADS

TWO = Hardware(place=("prefill=1", "verify=1"))
SILENT = Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0)


@pytest.fixture(autouse=True)
def link(monkeypatch: pytest.MonkeyPatch) -> None:
    """A link without latency."""
    monkeypatch.setitem(LINKS, "made up", LinkSpec(0.0, 450e9, "made up"))  # type: ignore[misc]


@pytest.mark.parametrize("fan", [0, 1, 4])
@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 0.9, 1.0])
def test_verdicts_are_guessed_as_often_as_the_formula_says(alpha: float, k: int, fan: int) -> None:
    """At every tenth position of 200 requests, within 4.5 standard deviations."""
    coins, rates = np.random.default_rng(1), np.random.default_rng(2)
    streams = Streams(Acceptance(alpha), coins, rates).draw(np.full(200, 200))
    hits = []
    for number, runs in enumerate(streams):
        request = Request(number, 0.0, 1, 200, runs)
        request.state.k = k
        for request.state.emitted in range(1, 200, 10):
            hits.append(was_guessed(request, min(runs[request.state.emitted], k), fan, 1.0))
    expected = guessed_rate(alpha, k, fan, 1.0)
    assert abs(np.mean(hits) - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / len(hits)) + 1e-12


def speed(
    arch: str = "pdv-ahead", host: Host = SILENT, at_once: int = 1, gpus: int = 2, output_len: int = 2000, **server: Any
) -> float:
    experiment = Experiment(
        arch,
        Traffic("random", num_prompts=4 * at_once, input_len=16, output_len=output_len, max_concurrency=at_once),
        Acceptance(0.8), Server(num_speculative_tokens=4, **server),
        Hardware(**({"place": ("prefill=1", "verify=1"), "link": "made up"} if gpus > 1 else {})), host,
    )  # fmt: skip
    return float(summarise(simulate(experiment))["output_throughput"])


@pytest.mark.parametrize("fan", [0, 8])
def test_one_request_with_drafts_ahead(fan: int) -> None:
    """A round takes the longer of verify and draft ahead; one that was not guessed has its draft before it, or none."""
    hardware = Hardware(place=("prefill=1", "verify=1"), link="made up")
    experiment = Experiment("pdv-ahead", server=Server(num_speculative_tokens=4), hardware=hardware)
    planner = ServerParts(experiment).planner
    k, context, rate = 4, 1016, 0.8
    verify = planner.round_s(1, context, k) - planner._host_s(1)
    draft_s = planner.models["draft"].price(1, 1, k).seconds(context)
    verify -= draft_s

    def ahead_s(branches: int) -> float:
        return planner.models["draft"].price(branches, 1, k + 1).seconds(context * branches)

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
    for at_once, gpus, least in ((1, 2, 1.25), (16, 2, 0.98), (1, 1, 0.98)):
        host = Host()
        plain, ahead = (speed(arch, host, at_once, gpus, 300) for arch in ("pdv", "pdv-ahead"))
        assert ahead >= least * plain, (at_once, gpus)


def test_lanes_have_limits_of_their_own() -> None:
    """Drafts for two at most, made ahead or not, and verifies of five at most."""
    server = Server(max_num_seqs=8, max_draft_batch=2, max_verify_batch=5, ahead_fan=1)
    result = simulate(Experiment("pdv-ahead", LOADS["all sent at time 0"].traffic, server=server))
    rows = {kind: result.launches["rows"][result.launches["kind"] == KINDS.index(kind)] for kind in KINDS}
    assert rows["draft"].max() == 2
    assert rows["verify"].max() == 5
    assert rows["ahead"].max() == 2 * 5  # four drafts, so five outcomes each


def test_measured_acceptance_gives_the_tokens_after_a_draft() -> None:
    """A round is drafted ahead if all drafts of the one before were accepted, and the position after them as well."""
    traffic = Traffic("random", num_prompts=20, input_len=32, output_len=200, max_concurrency=1)
    acceptance = Acceptance(acceptance_model="sharegpt-eagle3")
    experiment = Experiment("pdv-ahead", traffic, acceptance, Server(ahead_fan=0, ahead_miss="draft"), TWO)
    used = simulate(experiment).requests["ahead_used"]
    k = experiment.longest_draft
    for request in make_requests(traffic, acceptance):
        guessed, at = 0, 1
        while at < request.output_tokens:
            accepted_next = request.accept_runs[at] > k
            at += min(request.accept_runs[at], k) + 1
            guessed += accepted_next and at < request.output_tokens
        assert used[request.id] == k * guessed
