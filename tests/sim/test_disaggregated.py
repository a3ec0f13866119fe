"""Prefill and decode engines: what is sent, what it costs, and the queues that they are."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.kv import held_tokens, windows_of
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.links import LINKS, Fabric, LinkSpec, Piece
from pdvsim.sim.records import Result
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests
from pdvsim.testing import check_alike, check_counts, check_streams, checked

FREE_HOST = Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0)
PAIR = "tinyllama-1.1b:llama-2-7b"
FIXED = Traffic("random", num_prompts=40, input_len=600, output_len=30, random_range_ratio=0.0)


def apart(
    groups: str,
    traffic: Traffic = FIXED,
    server: dict[str, Any] | None = None,
    host: Host | None = None,
    **hardware: Any,
) -> Experiment:
    hardware = {"profile": "roofline", "band": False} | hardware
    settings = Server(**{"pair": PAIR} | (server or {}))
    return Experiment(
        "pd", traffic, server=settings, hardware=Hardware(disaggregate=groups, **hardware), host=host or Host()
    )


def sent(result: Result) -> float:
    return sum(way["bytes"] for way in result.meta["links"].values())


@pytest.fixture
def endless_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LINKS, "nvlink4", LinkSpec(0.0, 1e30, "made up"))


# what is sent ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("server", "hardware"), [
    ({"drafter": "none"}, {}),
    ({}, {}),
    ({}, {"draft_kv": "recomputed"}),
    ({}, {"kv_transfer": "prompt"}),
    ({"drafter": "ngram"}, {}),
    ({"pair": "llama-3.1-8b", "drafter": "eagle3"}, {}),
    ({"pair": "none:gpt-oss-20b"}, {}),  # half of its layers have windows
    ({"pair": "none:llama-3.1-70b"}, {"tensor_parallel_size": 4}),
    ({"pair": "none:llama-3.1-70b"}, {"tensor_parallel_size": 4, "prefill_tensor_parallel_size": 2}),
    ({"pair": "none:llama-3.1-70b"}, {"tensor_parallel_size": 2, "prefill_tensor_parallel_size": 4}),
])  # fmt: skip
def test_bytes_are_those_of_the_tokens(server: dict[str, Any], hardware: dict[str, Any]) -> None:
    """KV bytes of a token times tokens, by the port that has most to do; the drafter's where it is sent."""
    experiment = apart("2p1d", replace(FIXED, random_range_ratio=0.8), server, **hardware)
    decode = experiment.pair
    models = [decode.target]
    if experiment.speculates and experiment.hardware.draft_kv == "sent" and not decode.draft.on_host:
        models.append(decode.draft)
    prompts = [request.prompt_tokens for request in make_requests(experiment.traffic, experiment.acceptance)]
    held = sum(held_tokens(tokens, windows_of(models)) for tokens in prompts)
    size = experiment.hardware.tensor_parallel_size
    ports = max(1, size / (experiment.hardware.prefill_tensor_parallel_size or size))
    expected = ports * sum(model.kv_bytes_per_token for model in models) * held
    assert sent(simulate(experiment)) == pytest.approx(expected, rel=1e-12)


def test_what_is_cached_where_it_decodes_is_not_sent() -> None:
    """Turns of a conversation on one decode engine: only the new text of each turn, in whole blocks, is sent."""
    talk = Traffic("random", num_prompts=24, input_len=160, output_len=32, num_turns=4, max_concurrency=1,
                   random_range_ratio=0.0)  # fmt: skip
    result = simulate(apart("1p1d", talk, {"drafter": "none"}))
    tokens = sent(result) / apart("1p1d").pair.target.kv_bytes_per_token
    prompts = result.requests["prompt_tokens"]
    first = prompts[result.requests["turn"] == 0].sum()
    new = sum(later - 32 - before for before, later in pairwise(prompts) if later > before)
    later = (result.requests["turn"] > 0).sum()
    assert first + new <= tokens <= first + new + 32 * later  # up to two blocks more per turn
    alone = simulate(apart("1p1d", talk, {"drafter": "none", "enable_prefix_caching": False}))
    assert sent(alone) == pytest.approx(prompts.sum() * apart("1p1d").pair.target.kv_bytes_per_token)


@given(
    pieces=st.lists(st.tuples(st.floats(0, 5), st.floats(0, 5), st.floats(0, 300)), min_size=1, max_size=4),
    layers=st.integers(1, 12),
    free_s=st.floats(0, 10),
)
def test_layers_are_sent_one_after_the_other(
    pieces: list[tuple[float, float, float]], layers: int, free_s: float
) -> None:
    """As each is computed, by Lindley's recursion layer by layer; no more is hidden than the prefill takes."""
    fabric = Fabric(LinkSpec(0.25, 10.0, "made up"), 2)
    fabric.send(0.0, 0, 1, 10 * free_s)
    now_s, ready, forwards = 0.0, [], []
    for gap_s, takes_s, size in pieces:
        begin_s = now_s + gap_s
        now_s = begin_s + takes_s
        forwards.append(Piece(begin_s, now_s, size))
        ready += [(begin_s + takes_s * (n + 1) / layers, size / layers) for n in range(layers)]
    done_s = free_s
    for at_s, size in ready:
        done_s = max(done_s, at_s) + size / 10
    arrival_s = fabric.stream(0, 1, forwards, layers) - 0.25
    assert arrival_s == pytest.approx(done_s, abs=1e-9)
    whole_s, last_s = sum(size for *_, size in pieces) / 10, pieces[-1][2] / layers / 10
    assert arrival_s >= now_s + last_s - 1e-9
    computed_s = now_s - pieces[0][0]
    assert arrival_s - now_s >= whole_s - computed_s - 1e-9


# what it costs --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("engine", [None, "sglang"])
def test_over_an_endless_link_the_first_token_is_prefill_and_one_step(endless_link: None, k: int, engine: Any) -> None:
    """One request at a time. The step computes the last token of the prompt; SGLang sends the token instead."""
    alone = replace(FIXED, num_prompts=5, max_concurrency=1, random_range_ratio=0.9)
    chosen: dict[str, Any] = {"profile": None, "engine": "sglang"} if engine else {}
    server = {"num_speculative_tokens": k, "pair": "llama-3.2-1b:llama-3.1-8b"}
    experiment = apart("1p1d", alone, server, FREE_HOST, **chosen)
    result = simulate(experiment)
    side = experiment.sides
    only = simulate(applicable(replace(side.prefill, traffic=replace(alone, output_len=1)))).requests
    prefill_s = only["first_token_s"] - only["arrival_s"]
    model = CostModel(experiment.pair.target, covering_profile(experiment).fit(experiment.pair.target))
    contexts = result.requests["prompt_tokens"] - 1
    step_s = [0.0 if engine else model.price(1, 1, 1, context).at(context).seconds for context in contexts]
    ttft_s = result.requests["first_token_s"] - result.requests["arrival_s"]
    profile = covering_profile(experiment)
    between_s = profile.handover_s  # router and connector
    assert between_s == (0.18 if engine else 0.0)
    assert ttft_s == pytest.approx(prefill_s + between_s + step_s, abs=2 * (profile.host.request_s + 1e-9))


def test_a_drafter_is_sent_or_prefilled_again() -> None:
    """Sent: it prefills with the target. Recomputed: the first draft of a request has its prompt before it."""
    alone = replace(FIXED, num_prompts=8, max_concurrency=1)
    draft_s, prefill_gpus = {}, {}
    for draft_kv in ("sent", "recomputed"):
        experiment = apart("1p1d", alone, None, FREE_HOST, draft_kv=draft_kv)
        launches = simulate(experiment).launches
        drafted = (launches["role"] == 0) & (launches["gpu"] == 1)
        draft_s[draft_kv] = (launches["end_s"] - launches["start_s"])[drafted].sum()
        prefill_gpus[draft_kv] = {int(gpu) for gpu in launches["gpu"][launches["role"] == 0]}
    assert prefill_gpus == {"sent": {0, 1}, "recomputed": {1}}
    drafter = experiment.pair.draft
    model = CostModel(drafter, covering_profile(experiment).fit(drafter))
    prompt_s = model.price(0, prompts=[(0, 600)]).seconds_0
    lag_s = [model.price(1, 1 + lag, 4, 600).at(600).seconds for lag in (0, 1)]  # it reads its last token either way
    assert draft_s["recomputed"] - draft_s["sent"] == pytest.approx(8 * (prompt_s - (lag_s[1] - lag_s[0])), rel=0.02)


# queues ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
@given(gaps=st.lists(st.floats(0, 0.02), min_size=2, max_size=40))
@settings(max_examples=40)
def test_prefill_engines_are_servers_of_one_queue(servers: int, gaps: list[float]) -> None:
    """Equal prompts, one per forward: waits by the recursion of Kiefer and Wolfowitz, as of M/D/x."""
    experiment = apart(
        f"{servers}p1d", server={"drafter": "none", "max_prompts_per_forward": 1}, host=FREE_HOST, link="100gbe"
    )
    model = CostModel(experiment.pair.target, covering_profile(experiment).fit(experiment.pair.target))
    service_s = model.price(0, prompts=[(0, 600)], first_tokens=1).seconds_0
    arrivals_s = np.cumsum(gaps).tolist()
    free_s, starts_s = [0.0] * servers, []
    for arrival_s in arrivals_s:
        starts_s.append(max(arrival_s, heapq.heappop(free_s)))
        heapq.heappush(free_s, starts_s[-1] + service_s)
    asked = [Request(i, at_s, 600, 2, b"\0\0") for i, at_s in enumerate(arrivals_s)]
    launches = simulate(experiment, requests=asked).launches
    prefills = launches["start_s"][launches["gpu"] < servers]
    assert np.sort(prefills) == pytest.approx(np.array(starts_s), abs=1e-9)


def test_decode_engines_are_replicas(endless_link: None) -> None:
    """Twice the engines for twice the burst: every request as of half of both."""
    burst = replace(FIXED, num_prompts=40, request_rate=float("inf"))
    one = simulate(apart("1p1d", burst, {"drafter": "none"})).requests["finish_s"]
    double = simulate(apart("2p2d", replace(burst, num_prompts=80), {"drafter": "none"})).requests["finish_s"]
    assert np.sort(double) == pytest.approx(np.sort(np.repeat(one, 2)))
    copies = apart("1p1d", replace(burst, num_prompts=80), {"drafter": "none"}, replicas=2)
    assert np.sort(simulate(copies).requests["finish_s"]) == pytest.approx(np.sort(double))


# all else -------------------------------------------------------------------------------------------------------------

LOADS: dict[str, Traffic] = {
    "closed loop": replace(FIXED, max_concurrency=12, random_range_ratio=0.7),
    "poisson": replace(FIXED, request_rate=15.0, random_range_ratio=0.7),
    "conversations": replace(FIXED, input_len=100, num_turns=4, max_concurrency=6),
    "one token": replace(FIXED, output_len=1),
}


@pytest.mark.parametrize(("load", "server", "hardware"), [
    ("one token", {}, {}),
    ("conversations", {"pair": "llama-3.2-1b:llama-3.1-8b"}, {"profile": None, "engine": "vllm"}),
    ("conversations", {"pair": "llama-3.2-1b:llama-3.1-8b"}, {"profile": None, "engine": "sglang"}),
    ("poisson", {"pair": "llama-3.1-8b", "drafter": "eagle3"}, {"profile": None}),
    ("conversations", {"kv_cache": "reserved"}, {"kv_capacity_tokens": 2000, "router": "prefix-aware"}),
])  # fmt: skip
def test_every_request_is_served_once(load: str, server: dict[str, Any], hardware: dict[str, Any]) -> None:
    """The invariants of every policy, with full caches, and the same with and without the fast path."""
    experiment = applicable(apart("2p2d", LOADS[load], server, **hardware))
    result = checked(experiment)
    check_alike(result, simulate(experiment, blocks=False))
    assert result.meta["gpus"] == experiment.gpus == 4
    assert summarise(result)["completed"] == len(result.requests["id"])


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_engines_may_have_ranks_and_spread_experts(engine: Any) -> None:
    """Two ranks that prefill, four that decode: each is a batch of its own, with a port, and all are used."""
    layout = {"data_parallel_size": 4, "prefill_data_parallel_size": 2, "enable_expert_parallel": True}
    burst = replace(FIXED, num_prompts=24, max_concurrency=12)
    experiment = apart("1p1d", burst, {"pair": "none:qwen3-30b-a3b-fp8"}, profile=None, engine=engine, **layout)
    result = simulate(experiment)
    check_counts(result, [30] * 24, [0.0] * 24)
    check_streams(result)
    assert experiment.gpus == 6
    assert set(result.launches["gpu"]) == set(range(6))
    assert sent(result) == 24 * 600 * experiment.pair.target.kv_bytes_per_token
    assert {int(way[0]) for way in result.meta["links"]} == {0, 1}
