"""Layers that keep a state, and attention that selects tokens: what they hold, what they read, and what they cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.machine.kv import states_tokens
from pdvsim.sim.machine.prefix import BLOCK, Reuse
from pdvsim.sim.models.layers import Sparse, State
from pdvsim.sim.models.presets import PRESETS, drafter, shard
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms, interpolate
from pdvsim.sim.prices.transfer import shipped
from pdvsim.sim.run import simulate
from pdvsim.testing import check_alike, check_counts

H200 = GPUS["h200"]
HYBRIDS = sorted(name for name, spec in PRESETS.items() if spec.state)
SPARSE = sorted(name for name, spec in PRESETS.items() if spec.sparse)
NEXT = PRESETS["qwen3-next-80b-a3b"]


def roofline(spec: ModelSpec) -> CostModel:
    return CostModel(spec, ForwardTerms.roofline(spec, H200))


def everything(model: CostModel) -> list[float]:
    """Prices of rows, drafts, prompts and a mix of them."""
    costs = [model.price(rows, tokens, 1, 9000 * rows) for rows in (1, 8, 200) for tokens in (1, 4)]
    costs += [model.price(0, prompts=[(512, 700)], first_tokens=1), model.price(4, 1, 5, 4000)]
    return [figure for cost in [*costs, model.price(4, 1, 1, 4000, [(0, 300)])] for figure in cost]


def test_no_layers_with_a_state_are_a_plain_model() -> None:
    """Every price and size is the plain model's, to the last bit."""
    plain = PRESETS["qwen3-8b"]
    empty = replace(plain, state=State("gdn", 0, 16, 32, 128, 128, 4))
    for terms in (ForwardTerms.roofline(plain, H200), shipped().fit(plain, H200)):
        assert everything(CostModel(empty, terms)) == everything(CostModel(plain, terms))
    assert shipped().fit(empty, H200).figures() == shipped().fit(plain, H200).figures()
    assert (empty.params, empty.kv_bytes_per_token, empty.weight_bytes) == (
        plain.params,
        plain.kv_bytes_per_token,
        plain.weight_bytes,
    )
    assert states_tokens([empty], 5) == 0


def test_the_state_of_qwen3_next_by_hand() -> None:
    """36 layers of 32 heads of 128 by 128 values of 16 bits, and 3 tokens of 8,192 channels; 12 layers of attention."""
    matrices, convolution = 32 * 128 * 128 * 2, 3 * (2 * 16 * 128 + 32 * 128) * 2
    assert NEXT.state_bytes == 36 * (matrices + convolution) == 39_518_208
    assert NEXT.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2 == 24_576
    # a state takes the room of 1,608 tokens, in blocks of 16
    assert states_tokens([NEXT], 1) == 1616
    assert states_tokens([NEXT], 4) == BLOCK * -(-4 * 39_518_208 // (16 * 24_576))


@pytest.mark.parametrize(
    ("name", "gpus", "tokens"),
    # the block sizes that vLLM's log states for these models
    [("qwen3-next-80b-a3b", 1, 544), ("qwen3.5-27b", 1, 784), ("qwen3.5-122b-a10b", 1, 2096)],
)
def test_snapshots_are_a_block_of_vllm_apart(name: str, gpus: int, tokens: int) -> None:
    assert shard(PRESETS[name], gpus).snapshot_tokens == tokens


@pytest.mark.parametrize("name", HYBRIDS)
@given(rows=st.integers(1, 64), k=st.integers(0, 8), context=st.integers(0, 100_000))
def test_a_verify_writes_a_state_per_token(name: str, rows: int, k: int, context: int) -> None:
    """Bytes: a row reads one state, and writes one after each of its k + 1 tokens."""
    spec = PRESETS[name]
    with_states = roofline(spec).price(rows, k + 1, 1, context * rows)
    none = replace(spec, state=replace(spec.state, layers=spec.state_layers, item_bytes=0, convolution=0))  # type: ignore[type-var]
    without = CostModel(none, roofline(spec).terms).price(rows, k + 1, 1, context * rows)
    assert with_states.bytes_0 - without.bytes_0 == pytest.approx(rows * (k + 2) * spec.state_bytes)
    assert with_states.bytes_1 == without.bytes_1 == spec.caching_layers * spec.kv_layer_bytes
    assert states_tokens([spec], k + 1) * spec.kv_bytes_per_token >= (k + 1) * spec.state_bytes


@pytest.mark.parametrize("name", SPARSE)
@given(rows=st.integers(1, 64), context=st.integers(0, 200_000))
def test_sparse_attention_reads_what_it_selects_and_scans_the_rest(name: str, rows: int, context: int) -> None:
    """Counted layer by layer; up to the selection it reads all, and the index besides."""
    spec, sparse = PRESETS[name], PRESETS[name].sparse
    assert sparse is not None
    cost = roofline(spec).price(rows, 1, 1, context * rows)
    one = sparse.layers * min(context, sparse.tokens) + (spec.layers - sparse.layers) * context
    read = one * spec.kv_layer_bytes + sparse.scans * sparse.index_bytes * context
    empty = roofline(spec).price(rows, 1, 1, 0).at(0).bytes
    assert cost.at(context * rows).bytes - empty == pytest.approx(rows * read, rel=1e-6, abs=1)
    if context <= sparse.tokens:
        dense = replace(spec, sparse=replace(sparse, tokens=1 << 40))
        assert roofline(dense).price(rows, 1, 1, context * rows).at(context * rows) == cost.at(context * rows)


def test_a_prompt_is_scored_whole_and_multiplied_with_what_is_selected() -> None:
    """Counted pair by pair, in a model that selects 40 tokens."""
    spec = PRESETS["deepseek-v3.2"]
    sparse = replace(spec.sparse or Sparse(0, 0, 0, 0, 0, 0), tokens=40)
    spec = replace(spec, sparse=sparse)
    for start, tokens in ((0, 30), (0, 100), (70, 25), (30, 50)):
        flops = roofline(spec).price(0, prompts=[(start, tokens)]).flops_0 - 2 * spec.active_params * tokens
        seen = np.arange(start, start + tokens) + 1
        selected = 61 * 2 * 128 * (2 * 512 + 64) * np.minimum(seen, 40).sum()
        assert flops == pytest.approx(selected + 61 * 2 * 64 * 128 * seen.sum())


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("name", ["qwen3.5-27b", "glm-5", "gemma-4-31b", "kimi-linear-48b-a3b", "mimo-v2-flash"])
def test_engines_have_their_kernels(engine: str, name: str) -> None:
    """Prices rise with rows and context, have no jump at the knee, and contexts beyond it cost less each."""
    spec = shard(PRESETS[name], 8) if name == "glm-5" else PRESETS[name]
    profile = engine_profile(engine, "h200").covering(Pair(drafter("none", spec), spec))  # type: ignore[arg-type]
    model = CostModel(spec, profile.models[spec.name])

    def seconds(rows: int, context: int) -> float:
        return model.price(rows, 1, 1, rows * context).seconds(rows * context)

    assert seconds(64, 1000) > seconds(8, 1000)
    assert seconds(64, 20_000) > seconds(64, 10_000) > 0
    if reach := spec.reach:
        assert seconds(64, reach + 1) == pytest.approx(seconds(64, reach), rel=1e-3)
        before, after = (
            seconds(64, reach) - seconds(64, reach // 2),
            seconds(64, reach + reach // 2) - seconds(64, reach),
        )
        assert 0 <= after < before
    if spec.state is not None:
        drafts = model.price(64, 4, 1, 64_000).seconds(64_000) - seconds(64, 1000)
        assert drafts > interpolate(model.terms.state_knots, 64 * 5) - interpolate(model.terms.state_knots, 64 * 2) > 0


def test_the_timed_kernels_are_near_what_their_bytes_suggest() -> None:
    """Gated delta nets of 64 rows on an H200: states of 32 bits, read and written, at 55% to 100% of the bandwidth."""
    spec = PRESETS["qwen3.5-27b"]
    for engine in ("vllm", "sglang", "trtllm"):
        profile = engine_profile(engine, "h200").covering(Pair(drafter("none", spec), spec))  # type: ignore[arg-type]
        states, least = profile.models[spec.name].state_knots, 2 * 192 * spec.state_bytes / H200.bandwidth_bytes_per_s
        grown = interpolate(states, 2 * 256) - interpolate(states, 2 * 64)
        assert least < grown / profile.step.kernels < least / 0.55


def hybrid_runs(pair: str, **more: Any) -> Experiment:
    traffic = Traffic(num_prompts=10, max_concurrency=5, request_rate=float("inf"), input_len=700, output_len=200)
    server = Server(pair, **more.pop("server", {}))
    return Experiment(
        "colocated", more.pop("traffic", traffic), server=server, hardware=Hardware(**{"band": False} | more)
    )


FLASH: dict[str, Any] = {"gpu": "b200", "tensor_parallel_size": 4}
ROOM: dict[str, Any] = {"kv_capacity_tokens": 120_000}
LONG = Traffic(num_prompts=10, max_concurrency=5, input_len=1900, output_len=300)
WINDOWS = Traffic(num_prompts=12, max_concurrency=6, input_len=900, output_len=400)


@pytest.mark.parametrize(("pair", "more"), [
    ("mtp-qwen3-next-80b-a3b:qwen3-next-80b-a3b", ROOM),
    # contexts cross what is selected, and the windows of both models, during the run
    ("mtp-deepseek-v4-flash:deepseek-v4-flash", {"traffic": LONG, "engine": "sglang"} | FLASH),
    ("gemma-3-1b:gemma-3-12b", {"traffic": WINDOWS}),
])  # fmt: skip
def test_many_rounds_in_one_step_give_the_same_records(pair: str, more: dict[str, Any]) -> None:
    experiment = hybrid_runs(pair, **more)
    result, traffic = simulate(experiment), experiment.traffic
    check_counts(result, [traffic.output_len or 0] * traffic.num_prompts, [0.0] * traffic.num_prompts)
    check_alike(result, simulate(experiment, blocks=False))


@pytest.mark.parametrize(("k", "caching", "states"), [(3, False, 4), (3, True, 5), (1, False, 2)])
def test_a_request_holds_a_state_per_draft_token_and_one_more(k: int, caching: bool, states: int) -> None:
    """As vLLM allots them: 1 + k, and 2 + k where prefixes are cached (mamba_cache_mode align)."""
    pair = "mtp-qwen3-next-80b-a3b:qwen3-next-80b-a3b"
    server = {"num_speculative_tokens": k, "enable_prefix_caching": caching}
    alone = Traffic(num_prompts=1, max_concurrency=1, input_len=700, output_len=200)
    result = simulate(hybrid_runs(pair, server=server, traffic=alone, kv_capacity_tokens=100_000))
    head = drafter("mtp", NEXT)
    room = states_tokens([NEXT, head], states)
    longest = -(-(700 + 200 + k) // BLOCK) * BLOCK
    assert 0 <= room + longest - result.meta["kv_peak_tokens"] <= 2 * BLOCK


@pytest.mark.parametrize(("name", "unit", "hardware"), [
    ("qwen3-next-80b-a3b", 544, {}),
    ("qwen3-30b-a3b", 16, {}),
    ("deepseek-v4-flash", 256, {"engine": "sglang"} | FLASH),
])  # fmt: skip
def test_prefixes_are_reused_at_snapshots(name: str, unit: int, hardware: dict[str, Any]) -> None:
    """A shared prefix of 1,500 tokens has two whole blocks of 544; a plain model reuses all blocks of 16."""
    traffic = Traffic("random", num_prompts=6, max_concurrency=1, input_len=100, output_len=20, prefix_len=1500)
    experiment = hybrid_runs(f"none:{name}", traffic=traffic, kv_capacity_tokens=200_000, **hardware)
    hits = simulate(replace(experiment, arch="autoregressive")).requests["num_cached_tokens"]
    assert hits[0] == 0
    assert set(hits[1:].tolist()) == {1500 // unit * unit}


def test_what_of_a_match_can_be_used() -> None:
    assert Reuse(snapshot_blocks=34).usable_tokens(100) == 2 * 544
    assert Reuse(snapshot_blocks=34, lost_blocks=1).usable_tokens(100) == 544
    assert Reuse(lost_blocks=1).usable_tokens(100) == 99 * BLOCK


@pytest.mark.parametrize(("name", "gpu"), [("qwen3.5-27b", "h200"), ("deepseek-v4-flash", "b300")])
def test_what_is_kept_follows_the_kv_cache_to_another_gpu(name: str, gpu: str) -> None:
    """Prompts of several chunks, prefilled on one GPU and decoded on another: their tokens, and a state or windows."""
    traffic = Traffic(num_prompts=5, max_concurrency=2, input_len=900, output_len=30)
    server = Server(f"none:{name}", max_num_batched_tokens=512)
    hardware = Hardware(band=False, gpu=gpu, place=("prefill=1",))
    result = simulate(Experiment("pd", traffic, server=server, hardware=hardware))
    spec = PRESETS[name]
    assert spec.kept_bytes > 0
    assert not spec.state or spec.kept_bytes == spec.state_bytes
    sent = result.requests["prompt_tokens"].sum() * spec.kv_bytes_per_token + 5 * spec.kept_bytes
    assert result.meta["links"]["1->0"]["bytes"] == sent
