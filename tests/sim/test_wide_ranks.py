"""Servers of more GPUs than a node has: laws of their experts, of exchanges between nodes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.metrics.timeline import trace
from pdvsim.sim.models.layers import All2All
from pdvsim.sim.models.presets import model, shard
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.kernels import KernelTables
from pdvsim.sim.prices.links import LINKS, between_nodes, gather_s
from pdvsim.sim.run import simulate

SIZES = (8, 16, 32, 64)
HOW: tuple[All2All, ...] = ("allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput")
NVLINK: All2All = "flashinfer_nvlink_two_sided"
HIDDEN = 7168


def experiment(ranks: int, **more: Any) -> Experiment:
    chosen = {"gpu": "h200", "engine": "sglang", "data_parallel_size": ranks, "enable_expert_parallel": True}
    traffic = Traffic(input_len=200, output_len=20, num_prompts=2 * ranks, max_concurrency=2 * ranks)
    arch = "pd" if "disaggregate" in more else "autoregressive"
    server = Server(pair=more.pop("pair", "none:deepseek-v3"), max_num_seqs=64)
    return Experiment(arch, traffic, server=server, hardware=Hardware(**{**chosen, "band": False, **more}))


def costs(one: Experiment) -> CostModel:
    model_costs = covering_profile(one).cost_model(one.pair.target)
    assert model_costs.experts is not None
    return model_costs


def tables(card: str, engine: Any = "sglang") -> KernelTables:
    known = engine_profile(engine, card).tables
    assert known is not None
    return known


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "pdvsim"])
@pytest.mark.parametrize("card", ["h200", "gb200"])
def test_the_same_tokens_take_no_longer_on_more_gpus(engine: Any, card: str) -> None:
    """Outside the exchange; and with more tokens no less."""
    times = []
    for ranks in SIZES:
        model = costs(experiment(ranks, engine=engine, gpu=card))
        knots = model.terms.exchange_knots
        unexchanged = replace(model.terms, exchange_knots=tuple((at, 0.0) for at, _ in knots))
        each = [
            unexchanged.spread_s(tokens, 1) + model.terms.expert_s * model.experts.read(tokens)
            for tokens in (256, 1024, 4096)
        ]
        assert each == sorted(each)
        times.append(each)
    for fewer, more in pairwise(times):
        assert all(after <= before for before, after in zip(fewer, more, strict=True))


@pytest.mark.parametrize("card", ["h100-sxm", "h200", "b200", "b300"])
@pytest.mark.parametrize("how", HOW)
def test_an_exchange_between_nodes_takes_no_less_than_within_one(card: str, how: All2All) -> None:
    """More nodes no less, more tokens no less; and no more than ten times the bytes over one port."""
    tokens = np.array([1.0, 8.0, 64.0, 512.0, 4096.0])
    times_s = [tables(card).exchange_s(how, 8 * nodes, tokens, HIDDEN, nodes) for nodes in (1, 2, 4, 8)]
    for fewer, more in pairwise(times_s):
        assert (more >= fewer).all()
    assert all((np.diff(times) >= 0).all() for times in times_s)
    sent_s = 8 * tokens * HIDDEN * 3 / between_nodes(card).bytes_per_s
    # deepep_high_throughput was timed no slower for few tokens
    assert how == "deepep_high_throughput" or (times_s[1] > times_s[0]).all()
    if how != "allgather_reducescatter":  # that sends every token everywhere
        assert (times_s[-1] < 1e-3 + 10 * sent_s).all()


def test_timed_exchanges_between_nodes_are_read_as_they_were_timed() -> None:
    """DeepEP on two nodes of H200s beyond one, at numbers of tokens that were timed."""
    known = tables("h200")
    for mode, how in (("ll", HOW[1]), ("ht", HOW[2])):
        arrays = {name: known.arrays[f"deepep-nodes/{mode}/{name}"] for name in ("nodes", "tokens", "t", "hidden")}
        assert arrays["nodes"].tolist() == [1, 2, 4, 8]
        assert arrays["hidden"].tolist() == [HIDDEN]
        timed_s = np.exp(arrays["t"] / 1000.0) * 1e-6
        at = np.array([64.0, 128.0, 256.0])
        columns = np.searchsorted(arrays["tokens"], at)
        one, eight = (known.exchange_s(how, 8 * nodes, at, HIDDEN, nodes) for nodes in (1, 8))
        np.testing.assert_allclose(eight - one, (timed_s[3] - timed_s[0])[columns], rtol=1e-9)


@pytest.mark.parametrize("ranks", [24, 48, 72])
def test_copies_divide_experts_among_any_number_of_gpus(ranks: int) -> None:
    """256 experts of DeepSeek and 32 copies: 288 slots, of which drawn tokens take as many as expected."""
    whole = model("deepseek-v3")
    part = shard(whole, 1, ranks, True, None, 32, True).experts
    assert part is not None
    assert part.resident * ranks == part.slots == 288
    rng = np.random.default_rng(1)
    copied = np.concatenate([np.arange(256), rng.permutation(256)[:32]])  # the expert of each slot
    slots = [np.flatnonzero(copied == expert) for expert in range(256)]
    tokens, most = 48, []
    for _ in range(60):
        place = rng.permutation(288) // part.resident  # the GPU of each slot
        taken = {int(rng.choice(slots[one])) for _ in range(tokens) for one in rng.permutation(256)[:8]}
        most.append(np.bincount(place[list(taken)], minlength=ranks).max())
    assert part.read(tokens) == pytest.approx(np.mean(most), rel=0.08)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm", "pdvsim"])
@pytest.mark.parametrize("card", ["h200", "gb200"])
def test_balanced_experts_are_never_slower(engine: Any, card: str) -> None:
    """EPLB without copies, from tables that were timed with as many tokens for every expert.

    Many tokens are faster, but for kernels of vLLM and SGLang that see the tokens of all ranks.
    """
    usual, even = (costs(experiment(32, engine=engine, gpu=card, enable_eplb=on)) for on in (False, True))
    for tokens in (32, 256, 2048, 16_384):
        before, after = (
            one.terms.spread_s(tokens, 1) + one.terms.expert_s * one.experts.read(tokens) for one in (usual, even)
        )
        assert after <= before * (1 + 1e-9)
        if tokens >= 16_384 and engine in ("trtllm", "pdvsim"):
            assert after < 0.9 * before


def test_tables_with_as_many_tokens_per_expert_are_like_those_of_eplb() -> None:
    """TensorRT-LLM's EPLB with a power law, timed on GB200s with 256 slots (wideep_moe_perf, 1.3.0rc10), in us."""
    timed = {(16, 2048): 153.4, (16, 4096): 198.2, (32, 2048): 99.3, (32, 4096): 130.1, (32, 8192): 172.0}
    for (ranks, tokens), microseconds in timed.items():
        time_s = tables("gb200", "trtllm").experts(
            "nvfp4", np.array([float(tokens)]), HIDDEN, 2048, 8, 256, ranks, sent=True, balanced=True
        )
        assert time_s[0] == pytest.approx(microseconds * 1e-6, rel=0.12)


def test_the_exchange_over_nvlink_is_read_as_it_was_timed() -> None:
    """Per type of tokens; more tokens and more ranks take no less, fewer experts per token no more."""
    known = tables("gb200", "trtllm")
    at = np.array([1.0, 16.0, 64.0, 256.0, 1024.0, 8192.0])
    for kind, sent in (("nvfp4", "nvfp4"), ("fp8_block", "fp8"), ("int4_wo", "bfloat16")):
        arrays = {name: known.arrays[f"nvlink/{sent}/{name}"] for name in ("ranks", "tokens", "t")}
        times_s = {ranks: known.exchange_s(NVLINK, ranks, at, HIDDEN, 1, kind) for ranks in (2, 4, 8, 32, 64, 72)}
        timed_s = np.exp(arrays["t"][arrays["ranks"].tolist().index(32)] / 1000.0) * 1e-6
        columns = np.searchsorted(arrays["tokens"], at[2:])
        np.testing.assert_allclose(times_s[32][2:], timed_s[columns], rtol=1e-9)
        assert all((np.diff(times) >= 0).all() for times in times_s.values())
        assert (times_s[72] == times_s[64]).all()
        for fewer, more in pairwise(times_s.values()):
            assert (more[3:] >= fewer[3:]).all()
        assert (known.exchange_s(NVLINK, 32, at, HIDDEN, 1, kind, 4) <= times_s[32]).all()
    least = known.exchange_s(NVLINK, 32, at, HIDDEN, 1, "nvfp4")
    assert (least <= known.exchange_s(NVLINK, 32, at, HIDDEN, 1, "bfloat16")).all()


def test_a_ring_between_nodes_by_hand() -> None:
    link = LINKS["400gbe"]
    assert gather_s(link, 2, 1e9) == pytest.approx(18e-6 + 0.5e9 / 50e9)
    assert gather_s(link, 8, 1e9) == pytest.approx(18e-6 + 6 * 9.6e-6 + 0.875e9 / 50e9)
    # 4 ranks of 8 GPUs have no other rank on their node: all goes through the ports
    tokens = np.array([100.0])
    time_s = tables("h200").exchange_s(HOW[0], 4, tokens, HIDDEN, 4)
    assert time_s == pytest.approx(2 * gather_s(between_nodes("h200"), 4, 4 * 100 * HIDDEN * 2))


def test_64_ranks_serve_their_requests_and_step_together() -> None:
    one = experiment(64, all2all_backend="deepep_low_latency")
    result = simulate(one)
    assert result.meta["gpus"] == 64
    assert (result.requests["finish_s"] > 0).all()
    launches = result.launches
    assert set(launches["gpu"].tolist()) == set(range(64))
    steps = sorted({(start, end) for start, end in zip(launches["start_s"], launches["end_s"], strict=True)})
    assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(steps))
    names = b"".join(trace(replace(result, launches={name: values[:70] for name, values in launches.items()})))
    assert names.count(b'"process_name"') >= len(set(launches["gpu"][:70].tolist()))
