"""Offload of the KV cache to host memory and SSD: what they keep, what a fetch costs, and when it is not worth it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.core import ENDLESS
from pdvsim.sim.machine.tiers import KvTier
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.prices.links import LINKS, LinkSpec
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate
from pdvsim.testing import check_alike

TALKS = Traffic(
    "random", num_prompts=60, input_len=600, output_len=40, num_turns=6, max_concurrency=10, think_time_s=1.0,
    random_range_ratio=0.0,
)  # fmt: skip
PREFIXES = Traffic(
    "random", num_prompts=40, input_len=100, output_len=10, prefix_len=1000, num_prefixes=8, max_concurrency=1,
    random_range_ratio=0.0,
)  # fmt: skip
ENDLESS_GB, SMALL_TOKENS = 1e6, 9000
PAIR = "tinyllama-1.1b:llama-2-7b"


def served(
    traffic: Traffic = TALKS, arch: str = "colocated", server: dict[str, Any] | None = None, **hardware: Any
) -> Result:
    hardware = {"kv_capacity_tokens": SMALL_TOKENS, "band": False} | hardware
    settings = Server(**{"pair": PAIR} | (server or {}))
    free = Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0)
    return simulate(Experiment(arch, traffic, server=settings, hardware=Hardware(**hardware), host=free))


def hits(result: Result) -> int:
    return int(result.requests["num_cached_tokens"].clip(0).sum())


def by_tier(result: Result) -> list[float]:
    return [result.meta.get(f"kv_{tier}_hit_tokens", 0) for tier in ("gpu", "host", "ssd")]


@pytest.mark.parametrize("arch", ["colocated", "pd", "pdv"])
def test_an_endless_tier_hits_like_an_endless_cache(arch: str) -> None:
    """A turn finds all that its conversation has computed, on the GPU or offloaded."""
    small, tier, large = (
        served(TALKS, arch, **options) for options in ({}, {"kv_offload_gb": ENDLESS_GB}, {"kv_capacity_tokens": 10**7})
    )
    assert hits(small) < 0.6 * hits(large)
    assert hits(tier) == hits(large)
    gpu, host, ssd = by_tier(tier)
    assert gpu + host + ssd == hits(tier)
    assert host > 0
    assert summarise(tier)["prefix_cache_hits"] == hits(tier)


def test_a_tier_that_is_slower_than_the_prefill_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    none = served()
    monkeypatch.setitem(LINKS, "pcie5", LinkSpec(0.0, 1e6, "made up"))
    slow = served(kv_offload_gb=ENDLESS_GB)
    check_alike(none, slow)
    assert by_tier(slow)[1] == 0
    assert slow.meta["kv_host_slower_tokens"] > 0
    assert slow.meta["kv_host_fetch_ms"] > slow.meta["kv_prefill_ms"]


@pytest.mark.parametrize("server", [{}, {"drafter": "none"}])
def test_a_fetch_costs_its_bytes(server: dict[str, Any]) -> None:
    """One request at a time: the first token is later than with an endless cache by the time of the fetch."""
    tier, large = (
        served(PREFIXES, server=server, **options)
        for options in ({"kv_capacity_tokens": 4000, "kv_offload_gb": ENDLESS_GB}, {"kv_capacity_tokens": 10**6})
    )
    later_s = tier.requests["first_token_s"] - tier.requests["arrival_s"]
    later_s = later_s - (large.requests["first_token_s"] - large.requests["arrival_s"])
    experiment = tier.experiment
    models = [experiment.pair.target, *([experiment.pair.draft] if experiment.speculates else [])]
    token_bytes, link = sum(model.kv_bytes_per_token for model in models), LINKS["pcie5"]
    _, host, _ = by_tier(tier)
    fetches = int((later_s > 1e-9).sum())
    assert fetches > 3
    expected_s = token_bytes * host / link.bytes_per_s + fetches * link.latency_s
    assert later_s.sum() == pytest.approx(expected_s, rel=1e-3)


def test_an_ssd_follows_host_memory() -> None:
    """What the host has lost comes from the SSD; only what is faster to compute is missing of all hits."""
    pair = {"pair": "none:qwen2.5-72b", "drafter": None}  # whose prefill takes long
    card = {"tensor_parallel_size": 4, "kv_capacity_tokens": 12_000}
    host, both = (
        served(TALKS, server=pair, **card, **tiers)
        for tiers in ({"kv_offload_gb": 4.0}, {"kv_offload_gb": 4.0, "kv_offload_ssd_gb": ENDLESS_GB})
    )
    large = served(TALKS, server=pair, tensor_parallel_size=4, kv_capacity_tokens=10**6)
    assert by_tier(both)[2] > 0
    slower = both.meta["kv_host_slower_tokens"] + both.meta["kv_ssd_slower_tokens"]
    assert hits(host) < hits(both) == hits(large) - slower


@given(
    stored=st.lists(st.tuples(st.integers(0, 4), st.integers(1, 6)), min_size=1, max_size=30),
    capacity=st.integers(0, 14),
)
def test_a_tier_forgets_the_least_recently_used(stored: list[tuple[int, int]], capacity: int) -> None:
    """Against a list of blocks, oldest first, in which the last block of a prompt is older than those before it."""
    tier = KvTier("host", LINKS["pcie5"], 16 * capacity + 5, 1.0)
    order: list[tuple[int, int]] = []
    for text, blocks in stored:
        tier.store(((ENDLESS, text),), blocks)
        used = [(text, at) for at in reversed(range(blocks))]
        order = [block for block in order if block not in used] + used
        order = order[max(0, len(order) - capacity) :]
        for known in range(5):
            there = {at for one, at in order if one == known}
            assert tier.blocks.match(((ENDLESS, known),), 0, 10) == len(there)
            assert there == set(range(len(there)))


def test_fetches_take_turns_on_the_link() -> None:
    """A second of latency, 16 tokens per second."""
    tier = KvTier("host", LinkSpec(1.0, 16.0, "made up"), 10**6, 1.0)
    assert [tier.fetch(0.0, 32), tier.fetch(1.0, 16), tier.fetch(10.0, 16)] == [3.0, 4.0, 12.0]
    assert tier.hit_tokens == 64
