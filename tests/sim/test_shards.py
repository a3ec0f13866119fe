"""Tensor parallelism: what a shard is, what it exchanges, and what a group of GPUs is as a server."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.config import SHARDED
from pdvsim.sim.models.presets import PRESETS, shard
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.links import ALL_REDUCES, LINKS, LinkName, all_reduce_s
from pdvsim.sim.prices.transfer import BAR, TOKENS, shipped, with_collectives

NVLINK = LINKS["nvlink4"]
KIB, MIB = 2**10, 2**20
# Other times on the same links, as (GPUs, bytes, microseconds): vLLM pull requests 24111 (2 GPUs) and 24532 (4), the
# best of its kernels in CUDA graphs; SGLang pull request 22734 (8 H200s, MSCCL++ in CUDA graphs). NCCL itself, which
# engines leave to large messages, takes 6 us for 2 GPUs (its issue 1259) and 17 for 8 (the same pull request).
OTHERS: tuple[tuple[int, float, float], ...] = (
    (2, 512 * KIB, 7.0),
    (4, 512 * KIB, 10.0), (4, MIB, 14.0), (4, 1.5 * MIB, 19.0), (4, 2 * MIB, 21.0), (4, 3 * MIB, 23.0),
    (4, 4 * MIB, 28.0),
    (8, 2 * KIB, 5.86), (8, 16 * KIB, 6.37), (8, 64 * KIB, 8.2), (8, 128 * KIB, 8.8), (8, 256 * KIB, 10.56),
    (8, 512 * KIB, 11.96), (8, MIB, 14.01),
)  # fmt: skip


# what a shard is -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpus", SHARDED)
@pytest.mark.parametrize("name", [n for n, spec in PRESETS.items() if spec.heads % 8 == 0 and spec.kv_heads != 10])
def test_shards_are_the_whole_model(name: str, gpus: int) -> None:
    """Weights, KV cache and arithmetic of all of them together, but for what is on every one.

    That is the router, what MLA compresses with and its KV cache, what tokens and gates are compressed with before
    experts and in KDA, the indexer of sparse attention with its cache, and KV heads that are fewer than GPUs.
    """
    whole, part = PRESETS[name], shard(PRESETS[name], gpus)
    routes = 0 if whole.experts is None else whole.experts.count
    index, index_flops, on_all = 0.0, 0, whole.hidden * routes * whole.expert_layers
    if whole.experts is not None and whole.experts.latent:
        on_all += 2 * whole.hidden * whole.experts.latent * whole.expert_layers
    if whole.state is not None and whole.state.kind == "kda":
        on_all += 2 * whole.hidden * whole.state.value_dim * whole.state.layers
    if (sparse := whole.sparse) is not None:
        index, index_flops = sparse.scans * sparse.index_bytes, sparse.scans * sparse.flops_per_pair
        queries = (sparse.query_inputs or whole.hidden) * sparse.index_heads * sparse.index_dim
        on_all += sparse.scans * (queries + whole.hidden * (sparse.index_heads + sparse.index_dim))
    if (entries := whole.compressed) is not None:
        index_flops = entries.selecting * 2 * entries.index_heads * entries.index_dim // entries.ratio
    if (latent := whole.latent) is not None:
        compressed = (latent.query_rank or 0) + latent.kv_rank + latent.rope_dim
        on_all += whole.caching_layers * whole.hidden * compressed
        assert part.kv_bytes_per_token == whole.kv_bytes_per_token
    elif whole.kv_heads % gpus == 0:
        assert gpus * (part.kv_bytes_per_token - index) == whole.kv_bytes_per_token - index
    if whole.latent is not None or whole.kv_heads % gpus == 0:
        assert gpus * (part.params - on_all) == whole.params - on_all
    assert gpus * part.expert_bytes == whole.expert_bytes
    assert gpus * (part.attention_flops_per_pair - index_flops) == whole.attention_flops_per_pair - index_flops
    assert (part.layers, part.hidden, part.head_dim) == (whole.layers, whole.hidden, whole.head_dim)


def test_fewer_kv_heads_than_gpus_are_on_several() -> None:
    whole = PRESETS["gemma-2b"]
    part = shard(whole, 8)
    assert (part.heads, part.kv_heads) == (1, 1)
    assert part.kv_bytes_per_token == whole.kv_bytes_per_token


# what it takes -------------------------------------------------------------------------------------------------------


@given(
    st.sampled_from(sorted(PRESETS)), st.sampled_from(sorted(GPUS)), st.sampled_from(SHARDED), st.integers(1, 256),
    st.integers(1, 9), st.integers(0, 4096), st.sampled_from(sorted(LINKS)),
)  # fmt: skip
def test_a_shard_takes_its_part_and_what_is_sent(
    name: str, card: str, gpus: int, rows: int, tokens: int, context: int, link: LinkName
) -> None:
    """Never less than the whole divided by the GPUs; and the all-reduces and the logits on top."""
    spec = PRESETS[name]
    try:
        part = shard(spec, gpus)
    except ValueError:
        return

    def seconds(latency: CostModel) -> float:
        return latency.price(rows, tokens).seconds(rows * context)

    for fits in (lambda m: shipped().fit(m, GPUS[card]), lambda m: ForwardTerms.roofline(m, GPUS[card])):
        alone, whole = fits(part), fits(spec)
        assert seconds(CostModel(part, alone)) >= seconds(CostModel(spec, whole)) / gpus * (1 - 1e-9)
        new = alone.padded_rows(rows) * tokens
        if gpus == 1 or new not in TOKENS:  # between knots it is a straight line
            continue
        reduced = spec.all_reduces * all_reduce_s(LINKS[link], gpus, new * spec.hidden * 2)
        gathered = all_reduce_s(LINKS[link], gpus, new * part.vocab * gpus)
        sent = seconds(CostModel(part, with_collectives(alone, part, LINKS[link], "h200"))) - seconds(
            CostModel(part, alone)
        )
        assert sent == pytest.approx(reduced + gathered, rel=1e-6)


def test_all_reduces_are_as_published_and_more_is_never_faster() -> None:
    for gpus in (2, 4, 8):
        sizes = np.geomspace(64, 1e9, 200)
        times = [all_reduce_s(NVLINK, gpus, size) for size in sizes]
        assert all(a <= b for a, b in pairwise(times))
        assert all_reduce_s(NVLINK, gpus, ALL_REDUCES["bytes"][-1]) == pytest.approx(ALL_REDUCES[str(gpus)][-1] * 1e-6)
    assert 1e9 / all_reduce_s(NVLINK, 8, 1e9) == pytest.approx(275e9, rel=0.06)  # NCCL's, of 8 H100s, beyond the curve
    assert all_reduce_s(NVLINK, 1, 1e6) == 0


@pytest.mark.parametrize(("gpus", "size", "micros"), OTHERS)
def test_the_bar_holds_what_others_published(gpus: int, size: float, micros: float) -> None:
    ratio = all_reduce_s(NVLINK, gpus, size) * 1e6 / micros
    assert 1 / (1 + BAR) <= ratio <= 1 + BAR


def test_a_ring_by_hand() -> None:
    """Four GPUs: six steps, each a quarter of the bytes; 14.1 us for the first and 5.7 for every other."""
    seconds = all_reduce_s(LINKS["pcie4"], 4, 63e6)
    assert seconds == pytest.approx(14.1e-6 + 5 * 5.7e-6 + 6 * 63e6 / 4 / 31.5e9)
