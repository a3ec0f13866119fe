"""DeepSeek-V4's compressed attention: what it holds, what it reads, what it costs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.machine.kv import capacity_tokens, states_tokens
from pdvsim.sim.models.layers import Compressed
from pdvsim.sim.models.presets import PRESETS, CannotShard, shard
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.parts import LONGEST, ModelKernels

H200 = GPUS["h200"]
FLASH, PRO = PRESETS["deepseek-v4-flash"], PRESETS["deepseek-v4-pro"]
MILLION = 2**20


def attention(spec: ModelSpec) -> Compressed:
    assert spec.compressed is not None
    return spec.compressed


def roofline(spec: ModelSpec) -> CostModel:
    return CostModel(spec, ForwardTerms.roofline(spec, H200))


def test_the_kv_cache_has_the_published_size() -> None:
    """vLLM's announcement: 9.62 GiB for 1M tokens of V4-Pro in 16 bits, 8.7 times less than V3.2 would take."""
    wide, sparse = replace(PRO, kv_dtype_bytes=None), PRESETS["deepseek-v3.2"].sparse
    assert sparse is not None
    assert wide.kv_bytes_per_token * MILLION / 2**30 == pytest.approx(9.62, abs=0.005)
    former = replace(PRESETS["deepseek-v3.2"], sparse=replace(sparse, index_bytes=2 * sparse.index_dim))
    assert former.kv_bytes_per_token / wide.kv_bytes_per_token == pytest.approx(8.7, abs=0.05)


def test_a_block_is_near_that_of_vllm() -> None:
    """vLLM pull request 48993: 1,315,008 bytes per block of 256 tokens, with index keys of 68 bytes and padding."""
    own = attention(PRO)
    packed = PRO.kv_bytes_per_token - own.selecting * (132 - 68) / own.ratio
    assert 0.95 < 256 * packed / 1_315_008 < 1
    assert (own.entry_bytes(1), own.index_bytes(1)) == (584, 132)  # as vLLM and SGLang lay them out


def test_parameters_that_a_token_takes() -> None:
    """13B of 284B and 49B of 1.6T, by the makers' account."""
    for spec, total, active in ((FLASH, 284, 13), (PRO, 1600, 49)):
        assert spec.params / 1e9 == pytest.approx(total, rel=0.02)
        assert (spec.active_params + spec.head_params) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("spec", [FLASH, PRO], ids=["flash", "pro"])
@given(rows=st.integers(1, 64), context=st.integers(0, 60_000), k=st.integers(0, 7))
def test_what_a_row_reads(spec: ModelSpec, rows: int, context: int, k: int) -> None:
    """Counted layer by layer: windows, selected entries, the whole index, and all entries of 128 tokens."""
    own = attention(spec)
    cost = roofline(spec).price(rows, k + 1, 1, context * rows).at(context * rows)
    without = roofline(replace(spec, compressed=replace(own, window=0))).price(rows, k + 1, 1, 0).at(0)
    entries = own.selecting * min(context / 4, own.entries) + own.whole * context / 128 + own.layers * own.window
    read = 584 * entries + own.selecting * 132 * context / 4
    assert cost.bytes - without.bytes == pytest.approx(rows * read, rel=2e-4, abs=rows * context)  # whole bytes


def test_a_prompt_is_multiplied_pair_by_pair() -> None:
    own = replace(attention(FLASH), entries=10)
    spec = replace(FLASH, compressed=own)
    for start, tokens in ((0, 300), (512, 256)):
        flops = roofline(spec).price(0, prompts=[(start, tokens)]).flops_0 - 2 * spec.active_params * tokens
        seen = np.arange(start, start + tokens) + 1
        head = 4 * 64 * 512  # of one query token with one entry
        entries = 21 * np.minimum(seen / 4, 10) + 20 * seen / 128 + 43 * 128
        index = 21 * 2 * 64 * 128 * seen / 4
        assert flops == pytest.approx((head * entries + index).sum(), rel=1e-3)


def test_a_request_keeps_windows_and_unfinished_entries_whatever_it_drafts() -> None:
    """By hand for V4-Pro: 61 windows of 128 tokens; 8 tokens of 30 layers and 128 of 31 that compressors hold."""
    windows, csa, hca = 61 * 128 * 584, 30 * 8 * 4 * 4 * (512 + 128), 31 * 128 * 2 * 4 * 512
    assert PRO.kept_bytes == windows + csa + hca
    assert states_tokens([PRO], 1) == states_tokens([PRO], 8) >= PRO.kept_bytes / PRO.kv_bytes_per_token
    # room of 8 B200 for requests of 100,000 tokens, by hand
    part, b200 = shard(PRO, 8), GPUS["b200"]
    held = 100_000 + states_tokens([part], 4)
    room = 0.9 * b200.memory_bytes - part.weight_bytes
    assert capacity_tokens(0.9 * b200.memory_bytes, [part]) // held == room // (100_000 * 5511 + part.kept_bytes)


def test_shards_divide_heads_and_their_groups_alone() -> None:
    part, own = shard(PRO, 8), attention(PRO)
    assert (part.heads, attention(part).output_groups) == (16, 2)
    assert part.kv_bytes_per_token == PRO.kv_bytes_per_token
    whole, mine = PRO.attention_products, part.attention_products
    assert [8 * a[0] * a[1] == b[0] * b[1] for a, b in zip(mine, whole, strict=True)] == [False, True, True, True]
    assert attention(part).compressors(7168) == own.compressors(7168)
    with pytest.raises(CannotShard, match="groups of heads, 8, is no multiple"):
        shard(replace(FLASH, heads=128), 16)


@pytest.mark.parametrize(("engine", "card"), [("vllm", "h200"), ("sglang", "b200"), ("trtllm", "b200")])
def test_attention_with_its_products_takes_as_long_as_the_timed_modules(engine: str, card: str) -> None:
    """Rows with 1,024 cached tokens: the layers of V4-Pro on 8 GPUs against the sum of timed ones."""
    profile, spec = engine_profile(engine, card), shard(PRO, 8)  # type: ignore[arg-type]
    tables = profile.tables
    assert tables is not None
    own, parts = attention(spec), ModelKernels(tables, spec, profile.step.block_products)
    counts = {"csa": own.selecting, "hca": own.layers - own.selecting}
    products = zip(counts.values(), [layer for _, layer in own.compressors(spec.hidden)], strict=True)
    rows, fixed, slopes, *_ = parts.decode()
    ours = fixed + slopes * rows * 1024 + sum(n * parts._module_products(layer, rows) for n, layer in products)
    timed = np.zeros(rows.shape)
    for kind, count in counts.items():
        table = tables.sparse_attention("decode", kind, spec.hidden, spec.heads, "fp8")
        at, base, slope = table._replace(scale=1.0).lines((64, LONGEST))  # type: ignore[union-attr]
        timed += count * np.interp(rows, at, base + slope * at * 1024)
    assert np.median(np.abs(ours / timed - 1)) < 0.1
