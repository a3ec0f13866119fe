"""Prefix caching in a served load: a hit skips exactly its prefill, nothing else changes, and nothing is lost."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import ENDLESS, KINDS, Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.metrics.summary import summarise
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
def test_the_fast_path_is_the_same(arch: Arch) -> None:
    """In conversations, with evictions and preemptions; all else is in test_laws.py."""
    experiment = Experiment(arch, TALK, hardware=Hardware(kv_capacity_tokens=1200))
    fast, slow = simulate(experiment), simulate(experiment, blocks=False)
    check_alike(fast, slow)
    assert fast.meta == slow.meta
    assert fast.meta["prefix_cache_evictions"]


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


# routers --------------------------------------------------------------------------------------------------------------


def test_a_prefix_aware_router_keeps_a_prefix_on_one_server() -> None:
    traffic = Traffic("prefix_repetition", num_prompts=96, prefix_len=512, num_prefixes=12, request_rate=10)
    rates = {}
    for router in ("round-robin", "least-loaded", "prefix-aware"):
        hardware = Hardware(replicas=4, router=router, kv_capacity_tokens=20_000)  # type: ignore[arg-type]
        metrics = summarise(simulate(Experiment("colocated", traffic, server=Server(PAIR), hardware=hardware)))
        rates[router] = metrics["prefix_cache_hit_rate"]
    assert rates["prefix-aware"] == pytest.approx(100 * (96 - 12) / 96 * 512 / 768)  # a miss for each prefix
    assert max(rates["round-robin"], rates["least-loaded"]) < 0.8 * rates["prefix-aware"]


def test_a_prefix_aware_router_leaves_a_server_that_has_far_more_to_do() -> None:
    """One prefix for all: the first server would get everything."""
    traffic = Traffic("random", num_prompts=600, prefix_len=64, input_len=64, output_len=64)
    hardware = Hardware(replicas=2, router="prefix-aware")
    result = simulate(Experiment("colocated", traffic, hardware=hardware))
    share = float(result.requests["replica"].mean())
    assert 0.3 < share < 0.7
