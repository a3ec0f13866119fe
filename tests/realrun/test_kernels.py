"""Every Triton kernel against its torch twin, in Triton's interpreter, on ragged and awkward shapes."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from pdvsim.realrun.engine import attention, kernels, linear, reference_ops
from pdvsim.realrun.engine.arch import Activation
from pdvsim.realrun.engine.batch import ForwardBatch, Gate, Residual
from pdvsim.realrun.engine.cache import PAGE, Sequences
from pdvsim.realrun.engine.fp8 import E4M3

pytestmark = pytest.mark.usefixtures("quick_interpreter")
SLOTS, CAPACITY = 5, 96
SEQUENCES = Sequences(SLOTS, CAPACITY, torch.device("cpu"))
SEQUENCES.deal(range(SLOTS), CAPACITY // PAGE, np.random.default_rng(3))
PAGES, POOL = SEQUENCES.pages, SEQUENCES.pool
quick = settings(max_examples=4, deadline=None)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def rows_batch(slots: list[int], width: int, first: int = -1) -> ForwardBatch:
    nothing = ints(*[0] * 4)
    bounds = ints(*[0] * (4 + 1))
    return ForwardBatch(len(slots), width, 0, ints(*slots), nothing, nothing, bounds, PAGES, SLOTS, first)


def tables(dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.outer(torch.arange(CAPACITY).float(), 0.3 ** torch.arange(dim // 2).float())
    return angles.cos(), angles.sin()


@quick
@given(
    st.lists(st.integers(0, SLOTS), min_size=0, max_size=4),
    st.integers(1, 3),
    st.lists(st.integers(0, 9), min_size=1, max_size=11),
    st.integers(-2, 1),
)
def test_embed(slots: list[int], width: int, sizes: list[int], first: int) -> None:
    bounds = torch.tensor([0, *sizes]).cumsum(0).int()
    chunk = int(bounds[-1]) + 3 if sum(sizes) or not slots else 0
    batch = ForwardBatch(
        len(slots), width if slots else 0, chunk, ints(*slots), ints(*(i % SLOTS for i in range(len(sizes)))),
        ints(*(7 * i % 32 for i in range(len(sizes)))), bounds, PAGES, SLOTS, first,
    )  # fmt: skip
    tokens = torch.randint(0, 50, (SLOTS + 1, CAPACITY), dtype=torch.int32)
    length = torch.randint(2, 40, (SLOTS + 1,), dtype=torch.int32)
    arguments = (batch, tokens, length, normal(50, 24), 1.5)
    (stream, *places), (twin, *twin_places) = kernels.embed(*arguments), reference_ops.embed(*arguments)
    torch.testing.assert_close(stream.x, twin.x)
    torch.testing.assert_close(stream.squares, twin.x.pow(2).sum(-1)[None])
    assert all(a.equal(b) for a, b in zip(places, twin_places, strict=True))


@pytest.mark.parametrize("hidden", [32, 48, 1000])
def test_unit_norm(hidden: int) -> None:
    x = normal(3, 2, hidden)[:, 1]
    torch.testing.assert_close(kernels.unit_norm(x, 1e-5), reference_ops.unit_norm(x, 1e-5))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 3, 32), (8, 1, 64)])
def test_head_norm(heads: int, kv_heads: int, dim: int) -> None:
    qkv, weight = normal(5, (heads + 2 * kv_heads) * dim), 1 + normal(2, dim, seed=1)
    expected = qkv.clone()
    kernels.head_norm(qkv, weight, heads, kv_heads, 1e-6)
    reference_ops.head_norm(expected, weight, heads, kv_heads, 1e-6)
    torch.testing.assert_close(qkv, expected)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated(activation: Activation) -> None:
    gate_up, gate = 3 * normal(3, 2 * 1104), Gate(activation, 16)
    torch.testing.assert_close(kernels.gated(gate_up, gate), reference_ops.gated(gate_up, gate))


tunings = st.fixed_dictionaries({
    "SMALL_TOKENS": st.sampled_from([8, 64]), "BLOCK_N": st.sampled_from([16, 32]),
    "BLOCK_K": st.sampled_from([16, 32]), "PROGRAMS_PER_SM": st.sampled_from([0.1, 2.0]),
})  # fmt: skip
sizes = (st.integers(1, 20), st.sampled_from([16, 48, 112, 136]), st.sampled_from([16, 40, 64]), tunings)


@quick
@given(*sizes, st.sampled_from([None, "silu", "gelu_tanh"]), st.booleans(), st.integers(1, 3))
def test_normed(
    tokens: int,
    inputs: int,
    outputs: int,
    tuning: dict[str, Any],
    activation: Activation | None,
    biased: bool,
    parts: int,
) -> None:
    x, weight = normal(tokens, 2, inputs)[:, 0], normal(outputs, inputs, seed=1) * inputs**-0.5
    shares = torch.rand(parts, tokens)
    squares = x.pow(2).sum(-1) * shares / shares.sum(0)
    bias = normal(outputs, seed=3) if biased else None
    gate = Gate(activation, 4) if activation else None
    with mock.patch.multiple(linear, **tuning):
        got = linear.normed(Residual(x, squares), weight, 1e-5, bias=bias, gate=gate)
    expected = reference_ops.normed(Residual(x, None), weight, 1e-5, bias=bias, gate=gate)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@quick
@given(*sizes)
def test_added(tokens: int, inputs: int, outputs: int, tuning: dict[str, Any]) -> None:
    y, weight = normal(tokens, inputs), normal(outputs, inputs, seed=1)
    x = normal(tokens, outputs, seed=2)
    expected = reference_ops.added(y, weight, Residual(x.clone(), None)).x
    with mock.patch.multiple(linear, **tuning):
        got = linear.added(y, weight, Residual(x, None))
    assert got.x is x
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
    if tokens <= tuning["SMALL_TOKENS"]:
        torch.testing.assert_close(got.squares.sum(0), x.pow(2).sum(-1))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 16), (3, 3, 32), (10, 1, 16)])
def test_rope_write(heads: int, kv_heads: int, dim: int) -> None:
    qkv = normal(4, (heads + 2 * kv_heads) * dim)
    kv = normal(2, POOL, kv_heads, PAGE, dim)
    slots, positions = ints(0, 3, 3, 5), ints(7, 0, 95, 2)
    got_qkv, got_kv = qkv.clone(), kv.clone()
    kernels.rope_write(got_qkv, got_kv, PAGES, slots, positions, *tables(dim))
    reference_ops.rope_write(qkv, kv, PAGES, slots, positions, *tables(dim))
    torch.testing.assert_close(got_kv, kv)
    torch.testing.assert_close(got_qkv[:, : heads * dim], qkv[:, : heads * dim])


@quick
@given(
    st.lists(st.integers(0, CAPACITY - 9), min_size=1, max_size=3),
    st.integers(1, 5),
    st.sampled_from([(4, 2), (2, 2), (8, 1)]),
    st.sampled_from([1, 2, 40]),
    st.integers(0, 99),
    st.booleans(),
)
def test_decode_attention(
    firsts: list[int], width: int, shape: tuple[int, int], programs: int, seed: int, eight_bits: bool
) -> None:
    (heads, kv_heads), dim, rows = shape, 16, len(firsts)
    qkv = normal(rows * width, (heads + 2 * kv_heads) * dim, seed=seed)
    kv = normal(2, POOL, kv_heads, PAGE, dim, seed=seed + 1)
    cos, sin = tables(dim)
    if eight_bits:  # all that is written is held by 8 bits: the interpreter rounds to them another way
        qkv, kv, cos, sin = qkv.to(E4M3).float(), kv.to(E4M3), torch.ones_like(cos), torch.zeros_like(sin)
    batch = rows_batch([(3 * r + seed) % SLOTS for r in range(rows)], width)
    positions = torch.cat([torch.arange(f, f + width) for f in firsts]).int()
    got_qkv, got_kv = qkv.clone(), kv.clone()
    with mock.patch.object(attention, "BLOCK", 32), mock.patch.object(attention, "PROGRAMS_PER_SM", programs):
        planned = attention.plan(batch, positions, kv_heads)
        got = attention.decode_attention(got_qkv, got_kv, batch, planned, positions, cos, sin)
    entries = planned.table[-planned.programs * attention.ENTRY :].view(-1, attention.ENTRY).tolist()
    stretches = sorted((row, begin, end) for row, _, begin, end, *_ in entries if row >= 0 and begin < end)
    for r, first in enumerate(firsts):  # each row is read once, from its first position to its last
        edges = [(begin, end) for row, begin, end in stretches if row == r]
        assert edges[0][0] == 0
        assert edges[-1][1] == first + width
        assert all(end == begin for (_, end), (begin, _) in itertools.pairwise(edges))
    expected = reference_ops.decode_attention(qkv, kv, batch, positions, positions, cos, sin)
    torch.testing.assert_close(got_kv.float(), kv.float())
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@quick
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 40)), min_size=1, max_size=5),
    st.sampled_from([(4, 2), (2, 2), (3, 1)]),
    st.booleans(),
)
def test_prefill_attention(stretches: list[tuple[int, int]], shape: tuple[int, int], eight_bits: bool) -> None:
    (heads, kv_heads), dim = shape, 16
    sizes, starts = zip(*stretches, strict=True)
    bounds = torch.tensor([0, *sizes]).cumsum(0).int()
    real = int(bounds[-1])
    batch = ForwardBatch(
        0, 0, real + 5, ints(), ints(*(3 * i % SLOTS for i in range(len(sizes)))), ints(*starts), bounds, PAGES, SLOTS
    )
    qkv = normal(real + 5, (heads + 2 * kv_heads) * dim)
    kv = normal(2, POOL, kv_heads, PAGE, dim, seed=1).to(E4M3 if eight_bits else torch.float32)
    _, slots, positions = reference_ops.embed(
        batch, torch.zeros(SLOTS + 1, CAPACITY, dtype=torch.int32), ints(*[2] * (SLOTS + 1)), normal(1, 4), 1.0
    )
    got = attention.prefill_attention(qkv, kv, batch, slots, positions)
    expected = reference_ops.prefill_attention(qkv, kv, batch, slots, positions)
    torch.testing.assert_close(got[:real], expected[:real], rtol=1e-5, atol=1e-5)


@quick
@given(st.dictionaries(st.integers(0, PAGES.numel() - 1), st.integers(0, 99), min_size=1, max_size=300))
def test_turn_pages(entries: dict[int, int]) -> None:
    got, expected = PAGES.clone(), PAGES.clone()
    kernels.turn_pages(got, ints(*entries), ints(*entries.values()))
    reference_ops.turn_pages(expected, ints(*entries), ints(*entries.values()))
    assert got.equal(expected)
    assert all(got.view(-1)[place] == number for place, number in entries.items())


def test_argmax_takes_the_lowest_of_ties() -> None:
    logits = torch.randint(0, 30, (6, 9000)).float()
    logits[0] = -5.0
    logits[1, 8999] = 99.0
    expected = [int((row == row.max()).nonzero()[0]) for row in logits]
    assert kernels.argmax(logits).tolist() == reference_ops.argmax(logits).tolist() == expected


def test_append() -> None:
    tokens = torch.zeros(SLOTS + 1, CAPACITY, dtype=torch.int32)
    twin = tokens.clone()
    arguments = (ints(11, 12, 13), ints(0, 4, 2), ints(5, 0, 94))
    kernels.append(arguments[0], tokens, *arguments[1:])
    reference_ops.append(arguments[0], twin, *arguments[1:])
    assert tokens.equal(twin)
    assert tokens[0, 6] == 11
    assert tokens.count_nonzero() == 3


@quick
@given(st.integers(1, 9), st.integers(0, 999), st.booleans())
def test_settle(width: int, seed: int, pinned: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)

    batch = rows_batch([3, 0, SLOTS, 4], width)
    tokens, length = draw(0, 50, SLOTS + 1, CAPACITY), draw(2, 60, SLOTS + 1)
    agreed, chosen, limits = draw(0, width, 4), draw(50, 99, 4, width), draw(0, width, 4)
    pins = draw(0, width, 4) if pinned else ints(-1, -1, -1, -1)
    twin_tokens, twin_length = tokens.clone(), length.clone()
    got = kernels.settle(agreed, chosen, batch, limits, pins, tokens, length)
    expected = reference_ops.settle(agreed, chosen, batch, limits, pins, twin_tokens, twin_length)
    assert got.equal(expected)
    assert tokens.equal(twin_tokens)
    assert length.equal(twin_length)
    assert got[:, 0].tolist() == torch.minimum(pins if pinned else agreed, limits).tolist()
