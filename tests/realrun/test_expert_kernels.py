"""Kernels of mixtures of experts and of 8-bit weights against their references, and pinned routing against its law."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from pdvsim.realrun.engine import experts, linear, reference_ops
from pdvsim.realrun.engine.batch import BACK, Gate, Pinned, Residual
from pdvsim.realrun.engine.fp8 import E4M3, Matrix, plain, quantised
from pdvsim.realrun.engine.model import fresh
from pdvsim.realrun.engine.weights import LayerWeights
from pdvsim.sim.models.layers import Experts

pytestmark = pytest.mark.usefixtures("quick_interpreter")
quick = settings(max_examples=3, deadline=None)
SCRATCH = 4  # the slot of padding


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact(x: torch.Tensor) -> torch.Tensor:
    """Rows that e4m3 holds exactly, with a largest value that makes their scale a power of two."""
    rows = x.clamp(-7, 7).to(E4M3).float()
    rows[:, 0] = 7.0
    return rows


def ids_of(tokens: int) -> torch.Tensor:
    return torch.arange(tokens).int()


def layer(count: int, hidden: int, width: int, eight_bits: bool) -> LayerWeights:
    nothing = torch.empty(0)

    def stored(x: torch.Tensor) -> Matrix:
        return quantised(x) if eight_bits else x

    gate_up = stored(normal(count, 2 * width, hidden, seed=1) / hidden**0.5)
    down = stored(normal(count, hidden, width, seed=2) / width**0.5)
    return LayerWeights(nothing, None, nothing, gate_up, down, router=normal(count, hidden, seed=3))


@quick
@given(st.integers(1, 20), st.sampled_from([(4, 2), (16, 4)]), st.booleans())
def test_a_mixture_is_its_twins(tokens: int, sizes: tuple[int, int], pinned: bool) -> None:
    count, taken = sizes
    w, gate = layer(count, 48, 24, False), Gate("silu", 8)
    slots, positions = torch.arange(tokens).int() // 3, torch.arange(tokens).int() + 7
    pin = Pinned(2, tokens // 2, 0.7, 0.5) if pinned else None
    x = normal(tokens, 48, seed=tokens)
    expected = reference_ops.mixture(Residual(x.clone(), None), w, taken, gate, 1e-5, pin, slots, positions, SCRATCH)
    mixed = experts.mixture(Residual(x.clone(), None), w, taken, gate, 1e-5, pin, slots, positions, SCRATCH)
    torch.testing.assert_close(mixed.x, expected.x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(mixed.squares.sum(0), mixed.x.pow(2).sum(-1), rtol=1e-5, atol=1e-5)


@quick
@given(st.integers(1, 20), st.sampled_from([(4, 2), (16, 4)]))
def test_experts_multiply_8_bits_by_8_bits(tokens: int, sizes: tuple[int, int]) -> None:
    """Gate and up of each token's experts, and down of each pair's own row: with inputs that 8 bits hold exactly."""
    count, taken = sizes
    w, gate = layer(count, 48, 24, True), Gate("silu", 8)
    ids, shares = reference_ops.route(
        normal(tokens, count, seed=tokens), taken, None, ids_of(tokens), ids_of(tokens), -1
    )
    order, bounds = reference_ops.group(ids, count)
    x, rows = exact(normal(tokens, 48, seed=8)), exact(normal(tokens * taken, 24, seed=9))
    gate_up, down = plain(w.gate_up, torch.float32), plain(w.down, torch.float32)
    each = ids.flatten().long()
    up = torch.einsum("poi,pi->po", gate_up[each], x.repeat_interleave(taken, 0))
    products = experts._multiplied(linear.to_fp8(x), w.gate_up, order, bounds, shares, gate, torch.float32)
    torch.testing.assert_close(products, reference_ops.gated(up, gate), rtol=1e-4, atol=1e-3)
    expected = torch.einsum("poi,pi->po", down[each], rows) * shares.flatten()[:, None]
    products = experts._multiplied(linear.to_fp8(rows), w.down, order, bounds, shares, None, torch.float32)
    torch.testing.assert_close(products, expected, rtol=1e-4, atol=1e-3)


@quick
@given(st.sampled_from([1, 20, 70]), st.sampled_from([(4, 2), (128, 8)]), st.integers(0, 40), st.booleans())
def test_tokens_are_routed_and_grouped_alike(tokens: int, sizes: tuple[int, int], layer: int, pinned: bool) -> None:
    count, taken = sizes
    logits, slots = normal(tokens, count, seed=tokens), torch.arange(tokens).int() % 5
    pin = Pinned(layer, tokens // 2, 0.7, 0.5) if pinned else None
    positions = torch.arange(tokens).int() * 3
    ids, shares = experts.route(logits, taken, pin, slots, positions, SCRATCH)
    wanted, weights = reference_ops.route(logits, taken, pin, slots, positions, SCRATCH)
    assert torch.equal(ids, wanted)
    torch.testing.assert_close(shares, weights)
    read = [set(row) for row in ids.tolist()]
    assert all(row == {count} if slot == SCRATCH else len(row) == taken for row, slot in zip(read, slots, strict=True))
    (order, bounds), (expected, known) = experts.group(ids, count), reference_ops.group(ids, count)
    assert torch.equal(bounds, known)
    assert torch.equal(order[: bounds[-1]], expected[: bounds[-1]])


@pytest.mark.parametrize(("count", "taken"), [(128, 8), (8, 2)])
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (8, 1), (16, 4)])
def test_pinned_routing_reads_as_many_experts_as_simulated(count: int, taken: int, rows: int, width: int) -> None:
    """Over many layers and places, the mean of the distinct experts is the law's within two hundredths."""
    law = Experts(count, taken, 8)
    slots = torch.arange(rows).repeat_interleave(width)
    distinct = []
    for at in range(400):
        positions = (torch.arange(width) + 17 * at).repeat(rows)
        pin = Pinned(at % 48, rows * width, fresh(width, law.overlap, taken / count), 1.0)
        ids, _ = reference_ops.route(torch.zeros(rows * width, count), taken, pin, slots, positions, -1)
        distinct.append(len(ids.unique()))
    assert sum(distinct) / len(distinct) == pytest.approx(law.read(rows * law.independent(width)), rel=0.02)


@pytest.mark.parametrize(("count", "taken"), [(128, 8), (8, 2)])
@pytest.mark.parametrize("tokens", [32, 100])
def test_so_do_prompts(count: int, taken: int, tokens: int) -> None:
    law = Experts(count, taken, 8)
    distinct = []
    for at in range(100):
        pin = Pinned(at % 48, 0, 1.0, fresh(BACK, law.overlap, taken / count))
        slots = torch.full((tokens,), at)
        ids, _ = reference_ops.route(torch.zeros(tokens, count), taken, pin, slots, torch.arange(tokens), -1)
        distinct.append(len(ids.unique()))
    assert sum(distinct) / len(distinct) == pytest.approx(law.read(law.independent(tokens)), rel=0.02)


@quick
@given(st.integers(1, 33), st.sampled_from([(48, 40), (64, 128)]), st.booleans())
def test_products_with_8_bit_weights(tokens: int, sizes: tuple[int, int], gated: bool) -> None:
    inputs, outputs = sizes
    weight, x = quantised(normal(outputs, inputs, seed=4)), exact(normal(tokens, inputs, seed=5))
    stream, gate = Residual(x, x.pow(2).sum(-1)[None]), Gate("silu", 4) if gated else None
    with mock.patch.multiple(linear, SMALL_TOKENS=64, BLOCK_N=16, BLOCK_K=16):
        products = linear.normed(stream, weight, 1e-5, gate=gate)
        into = linear.added(x, weight, Residual(normal(tokens, outputs, seed=6), None))
    torch.testing.assert_close(products, reference_ops.normed(stream, weight, 1e-5, gate=gate), rtol=1e-4, atol=1e-4)
    expected = reference_ops.added(x, weight, Residual(normal(tokens, outputs, seed=6), None))
    torch.testing.assert_close(into.x, expected.x, rtol=1e-4, atol=1e-4)
