"""Prefix caching in a served load: a hit skips exactly its prefill, nothing else changes, and nothing is lost."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import pdvsim
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import ENDLESS, KINDS, Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.metrics.timeline import trace
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import Log, Result
from pdvsim.sim.run import Client, simulate
from pdvsim.sim.workload.requests import Workload
from pdvsim.testing import check_alike

REPEATED = Traffic("prefix_repetition", num_prompts=60, prefix_len=100, num_prefixes=3, output_len=20, request_rate=30)
TALK = Traffic("random", num_prompts=60, input_len=50, output_len=20, num_turns=4, max_concurrency=6)
PAIR = "tinyllama-1.1b:llama-2-7b"
OFF = Server(enable_prefix_caching=False)


def prefilled(result: Result, role: int) -> int:
    """Prompt tokens that a model read; those of rows in the same launches are not counted."""
    launches = result.launches
    mine = launches["role"] == role
    reads = launches["kind"] == KINDS.index("prefill")
    others = launches["rows"] * (launches["width"] + launches["steps"] - 1)
    return int((launches["tokens"] - np.where(reads, 0, others))[mine].sum())


def same(one: Result, other: Result, columns: tuple[str, ...] = ()) -> bool:
    tables = ("requests", "launches", "deliveries")
    pairs = [(getattr(one, table), getattr(other, table)) for table in tables]
    return all(np.array_equal(a[name], b[name]) for a, b in pairs for name in a if name not in columns)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("traffic", [REPEATED, TALK])
def test_a_hit_skips_exactly_its_prefill(arch: Arch, traffic: Traffic) -> None:
    result = simulate(Experiment(arch, traffic))
    requests = result.requests
    computed = int((requests["prompt_tokens"] - requests["num_cached_tokens"]).sum())
    assert prefilled(result, role=1) == computed < int(requests["prompt_tokens"].sum())
    drafts = result.experiment.speculates and arch not in ("adaptive",)
    if drafts:  # the drafter follows, but for blocks that end with a token which it had not read
        assert computed <= prefilled(result, role=0) <= computed + 16 * len(requests["id"])
    off = simulate(Experiment(arch, traffic, server=OFF))
    assert prefilled(off, role=1) == int(requests["prompt_tokens"].sum())
    assert (off.requests["num_cached_tokens"] == -1).all()


@pytest.mark.parametrize("arch", ARCHS)
def test_without_anything_to_share_caching_changes_nothing(arch: Arch) -> None:
    plain = Traffic("random", num_prompts=40, input_len=200, output_len=20, request_rate=40)
    assert same(simulate(Experiment(arch, plain)), simulate(Experiment(arch, plain, server=OFF)))
    alone = replace(REPEATED, num_prefixes=10**6)  # prefixes that no two requests share
    on, off = (simulate(Experiment(arch, alone, server=server)) for server in (Server(), OFF))
    assert not on.requests["num_cached_tokens"].any()
    assert same(on, off, ("num_cached_tokens",))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("room", [None, 1200])
def test_the_fast_path_is_the_same(arch: Arch, room: int | None) -> None:
    """With evictions and preemptions too."""
    for traffic in (REPEATED, TALK):
        experiment = Experiment(arch, traffic, hardware=Hardware(kv_capacity_tokens=room))
        fast, slow = simulate(experiment), simulate(experiment, blocks=False)
        check_alike(fast, slow)
        assert fast.meta == slow.meta
        assert bool(fast.meta["prefix_cache_evictions"]) == (room is not None)


@pytest.mark.parametrize("arch", ARCHS)
def test_all_blocks_are_accounted_for_while_it_serves(arch: Arch) -> None:
    experiment = Experiment(arch, replace(TALK, max_concurrency=12), hardware=Hardware(kv_capacity_tokens=1300))
    env, log = Clock(), Log()
    cluster = Cluster(env, experiment, covering_profile(experiment), log, blocks=False)
    client = Client(env, Workload(experiment.traffic, experiment.acceptance), experiment, cluster, None)
    [server] = cluster.servers
    steps = 0
    while client.left:
        env.step()
        steps += 1
        if steps % 50 == 0:
            server.kv.check_integrity()
    server.kv.check_integrity()
    assert server.kv.used_tokens == 0
    assert server.kv.prefixes.evictions > 0


def ask(id: int, arrival_s: float, tokens: int, output: int = 4) -> Request:
    return Request(id, arrival_s, tokens, output, bytes(output), ((ENDLESS, 1),))


@pytest.mark.parametrize(
    ("pair", "lost"), [("llama-3.1-8b", 16), ("ngram:llama-2-7b", 0), ("tinyllama-1.1b:llama-2-7b", 0)]
)
@pytest.mark.parametrize("tokens", [64, 65, 200])
def test_a_head_loses_one_block_of_a_hit(pair: str, lost: int, tokens: int) -> None:
    """vLLM issue 54360: hits are max(0, (L - 1) // 16 - 1) blocks with EAGLE, and a draft model loses nothing."""
    server = Server(pair=pair, drafter="eagle3" if lost else None)
    result = simulate(Experiment("colocated", server=server), requests=[ask(0, 0.0, tokens), ask(1, 5.0, tokens)])
    assert result.requests["num_cached_tokens"].tolist() == [0, (tokens - 1) // 16 * 16 - lost]


def test_a_preempted_request_goes_on_with_what_is_still_cached() -> None:
    requests = [Request(n, 0.0, 64, 64, bytes(64), ((ENDLESS, n + 1),)) for n in range(12)]
    result = simulate(Experiment("colocated", hardware=Hardware(kv_capacity_tokens=640)), requests=requests)
    again = result.requests["resumptions"].sum()
    assert again > 0
    assert prefilled(result, role=1) == 12 * 64 + int(result.requests["recomputed_tokens"].sum()) + again
    assert not result.requests["num_cached_tokens"].any()
    assert not any(request.state.held_tokens for request in requests)


def test_answers_stay_on_the_gpu_that_decodes() -> None:
    """With prefill on a GPU of its own, prompts are shared and answers are not; only computed tokens are sent."""
    together = simulate(Experiment("pd", TALK))
    apart = simulate(Experiment("pd", TALK, hardware=Hardware(place=("prefill=1",))))
    cached = [int(result.requests["num_cached_tokens"].sum()) for result in (together, apart)]
    assert 0 < cached[1] < cached[0]
    computed = int((apart.requests["prompt_tokens"] - apart.requests["num_cached_tokens"]).sum())
    target = apart.experiment.pair.target
    assert apart.meta["links"]["1->0"]["bytes"] == computed * target.kv_bytes_per_token
    with pytest.raises(ValueError, match="--no-enable-prefix-caching"):
        simulate(Experiment("pd", TALK, hardware=Hardware(place=("prefill=0+1",))))


def test_a_reserved_cache_has_no_prefixes() -> None:
    result = simulate(Experiment("pd", REPEATED, server=Server(kv_cache="reserved")))
    assert (result.requests["num_cached_tokens"] == -1).all()


# routers --------------------------------------------------------------------------------------------------------------


def test_a_prefix_aware_router_keeps_a_prefix_on_one_server() -> None:
    traffic = Traffic("prefix_repetition", num_prompts=240, prefix_len=512, num_prefixes=24, request_rate=10)
    rates = {}
    for router in ("round-robin", "least-loaded", "prefix-aware"):
        hardware = Hardware(replicas=4, router=router, kv_capacity_tokens=20_000)  # type: ignore[arg-type]
        metrics = summarise(simulate(Experiment("colocated", traffic, server=Server(PAIR), hardware=hardware)))
        rates[router] = metrics["prefix_cache_hit_rate"]
    assert rates["prefix-aware"] == pytest.approx(100 * (240 - 24) / 240 * 512 / 768)  # a miss for each prefix
    assert max(rates["round-robin"], rates["least-loaded"]) < 0.8 * rates["prefix-aware"]


def test_a_prefix_aware_router_leaves_a_server_that_has_far_more_to_do() -> None:
    """One prefix for all: the first server would get everything."""
    traffic = Traffic("random", num_prompts=600, prefix_len=64, input_len=64, output_len=64)
    hardware = Hardware(replicas=2, router="prefix-aware")
    result = simulate(Experiment("colocated", traffic, hardware=hardware))
    share = float(result.requests["replica"].mean())
    assert 0.3 < share < 0.7


# its notes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("detailed", [True, False])
def test_a_run_reports_its_hits(detailed: bool) -> None:
    options: dict[str, Any] = {"arch": "pd", "dataset_name": "prefix_repetition", "num_prompts": 40, "request_rate": 20}
    options |= {"prefix_repetition_prefix_len": 128, "prefix_repetition_suffix_len": 64, "detailed": detailed}
    options |= {"prefix_repetition_num_prefixes": 2, "prefix_repetition_output_len": 16}
    run = pdvsim.run(**options)
    metrics = run.metrics
    assert metrics["prefix_cache_queries"] == 40 * 192
    assert metrics["prefix_cache_hits"] == 38 * 128
    assert metrics["prefix_cache_hit_rate"] == pytest.approx(100 * 38 * 128 / (40 * 192))
    assert metrics["mean_num_cached_tokens"] == pytest.approx(38 * 128 / 40)
    assert metrics["mean_ttft_hit_ms"] < metrics["mean_ttft_miss_ms"]
    assert "Prefix Cache" in run.table()
    assert "Prefix cache hit rate (%):               63.33" in run.table()
    assert "Prefix Cache" not in pdvsim.run(**options, enable_prefix_caching=False).table()


def test_mean_ttfts_are_those_of_the_requests() -> None:
    run = pdvsim.run(arch="colocated", dataset_name="random", random_prefix_len=300, num_prompts=50, request_rate=30)
    rows = run.requests
    ttft_ms = (rows.first_token_s - rows.arrival_s) * 1e3
    hit = rows.num_cached_tokens > 0
    assert run.metrics["mean_ttft_hit_ms"] == pytest.approx(ttft_ms[hit].mean())
    assert run.metrics["mean_ttft_miss_ms"] == pytest.approx(ttft_ms[~hit].mean())
    assert (rows.prompt_tokens == 1324).all()


def test_a_timeline_names_the_cached_tokens_of_each_request() -> None:
    result = simulate(Experiment("pd", REPEATED), traced=True)
    events = json.loads(b"".join(trace(result)))["traceEvents"]
    named = {
        event["args"]["id"]: event["args"]["num_cached_tokens"] for event in events if event.get("cat") == "request"
    }
    assert list(named.values()) == result.requests["num_cached_tokens"].tolist()
    assert set(named.values()) == {0, 96}
    shares = [event["args"]["percent"] for event in events if event["name"].startswith("prefix cache hits")]
    assert len(shares) == len(named)
    assert shares[-1] == pytest.approx(summarise(result)["prefix_cache_hit_rate"], abs=0.01)
