"""Mixtures of experts: tokens are routed on the device, grouped by expert, and each expert multiplies its own.

One program multiplies an expert's tokens with a tile of its weights, so an expert that no token takes is never read.
All sizes that depend on the routing stay on the device: a forward can be captured in a graph. Results are added up in
the order of a token's experts, so runs repeat bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, float32, int32

from pdvsim.realrun.engine.batch import BACK, Gate, Pinned, Residual
from pdvsim.realrun.engine.fp8 import Fp8, Matrix, operands
from pdvsim.realrun.engine.kernels import ACTIVATION_CODES, activate, overlapping, take_turn, unit_norm
from pdvsim.realrun.engine.linear import normed, to_fp8
from pdvsim.realrun.engine.weights import LayerWeights

PAIRS = 1024  # (token, expert) pairs that are counted in one step


@triton.jit
def _mixed(x):
    """A 32-bit integer hash."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit(do_not_specialize=["scratch", "row_tokens"])
def _route(
    logits_ptr, slots_ptr, positions_ptr, ids_ptr, shares_ptr, scratch, row_tokens, fresh_rows, fresh_chunk, layer,
    EXPERTS: tl.constexpr, TAKEN: tl.constexpr, SHARE: tl.constexpr, PINNED: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_TAKEN: tl.constexpr,
    BACK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    take_turn(OVERLAP)
    e = tl.arange(0, BLOCK)
    logits = tl.load(logits_ptr + m.to(tl.int64) * EXPERTS + e, mask=e < EXPERTS, other=float("-inf")).to(tl.float32)
    top = tl.max(logits, 0)
    left = logits
    at = tl.arange(0, BLOCK_TAKEN)
    weights = tl.zeros((BLOCK_TAKEN,), tl.float32)
    slot = tl.load(slots_ptr + m)
    for j in tl.static_range(TAKEN):
        if PINNED:
            places = tl.load(positions_ptr + m) - tl.arange(0, BACK)
            fresh = tl.where(m < row_tokens, fresh_rows, fresh_chunk)
            stream = _mixed(slot.to(tl.uint32) * 1024 + layer) * 64 + j
            drawn = (_mixed(stream + 2 * places.to(tl.uint32) * 0x9E3779B1) >> 8).to(tl.float32) * (1.0 / 16777216.0)
            since = tl.max(tl.where((drawn < fresh) | (places % BACK == 0), places, -1), 0).to(tl.uint32)
            best = (j * SHARE + (_mixed(stream + (2 * since + 1) * 0x9E3779B1) % SHARE)).to(tl.int32)
        else:
            best = tl.argmax(left, 0)
            left = tl.where(e == best, float("-inf"), left)
        taken = tl.sum(tl.where(e == best, tl.exp(logits - top), 0.0), 0)
        weights = tl.where(at == j, taken, weights)
        tl.store(ids_ptr + m * TAKEN + j, tl.where(slot == scratch, EXPERTS, best))  # padding takes none
    weights /= tl.sum(weights, 0)
    tl.store(shares_ptr + m * TAKEN + at, weights, mask=at < TAKEN)


def route(
    logits: Tensor, taken: int, pinned: Pinned | None, slots: Tensor, positions: Tensor, scratch: int
) -> tuple[Tensor, Tensor]:
    """Each token's experts and their shares; see `reference_ops.route`."""
    tokens, experts = logits.shape
    ids = logits.new_empty(tokens, taken, dtype=int32)
    shares = logits.new_empty(tokens, taken, dtype=float32)
    routing = pinned or Pinned(0, 0, 1.0, 1.0)
    _route[(tokens,)](
        logits, slots, positions, ids, shares, scratch,
        routing.row_tokens, routing.fresh_rows, routing.fresh_chunk, routing.layer,
        EXPERTS=experts, TAKEN=taken, SHARE=experts // taken, PINNED=pinned is not None,
        BLOCK=triton.next_power_of_2(experts), BLOCK_TAKEN=triton.next_power_of_2(taken), BACK=BACK,
        num_warps=1, **overlapping(logits.device),
    )  # fmt: skip
    return ids, shares


@triton.jit(do_not_specialize=["pairs"])
def _group(ids_ptr, order_ptr, bounds_ptr, pairs, experts, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    expert = tl.program_id(0)
    take_turn(OVERLAP)
    before = 0
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        ids = tl.load(ids_ptr + i, mask=i < pairs, other=2147483647)
        before += tl.sum((ids < expert).to(tl.int32), 0)
    tl.store(bounds_ptr + expert, before)
    for start in range(0, pairs, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mine = (tl.load(ids_ptr + i, mask=i < pairs, other=-1) == expert).to(tl.int32)
        rank = before + tl.cumsum(mine, 0) - 1
        tl.store(order_ptr + rank, i, mask=mine > 0)
        before += tl.sum(mine, 0)
    if expert == experts - 1:
        tl.store(bounds_ptr + experts, before)


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs of token and expert in the order of experts, and where each expert's begin; see `reference_ops.group`."""
    pairs = ids.numel()
    order, bounds = ids.new_empty(pairs), ids.new_empty(experts + 1)
    block = min(PAIRS, triton.next_power_of_2(pairs))
    _group[(experts,)](ids, order, bounds, pairs, experts, BLOCK=block, num_warps=4, **overlapping(ids.device))
    return order, bounds


@triton.jit
def _experts(
    x_ptr, weight_ptr, x_scales_ptr, scales_ptr, order_ptr, bounds_ptr, shares_ptr, out_ptr, outputs, inputs,
    SHARED_BY: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr, QUANTISED: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    tile, expert = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    rows = tl.where(n < outputs, n, 0).to(tl.int64) * inputs  # past the end, row 0 is read and never stored
    weight = weight_ptr + expert.to(tl.int64) * outputs * inputs + rows[:, None] + k[None, :]
    take_turn(OVERLAP)
    begin, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    for first in range(begin, end, BLOCK_M):
        m = first + tl.arange(0, BLOCK_M)
        m_in = m < end
        pair = tl.load(order_ptr + m, mask=m_in, other=0).to(tl.int64)
        x = x_ptr + (pair // SHARED_BY)[None, :] * inputs + k[:, None]
        acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in range(0, inputs, BLOCK_K):
            if EVEN:
                xs = tl.load(x + start, mask=m_in[None, :], other=0.0)
                w = tl.load(weight + start)
            else:
                k_in = start + k < inputs
                xs = tl.load(x + start, mask=m_in[None, :] & k_in[:, None], other=0.0)
                w = tl.load(weight + start, mask=k_in[None, :], other=0.0)
            acc = tl.dot(w, xs, acc, input_precision="ieee")
        if QUANTISED:
            acc *= tl.load(scales_ptr + expert * outputs + n, mask=n < outputs, other=0.0)[:, None]
            acc *= tl.load(x_scales_ptr + pair // SHARED_BY, mask=m_in, other=0.0)[None, :]
        if ACT:
            pairs = tl.reshape(acc, (BLOCK_N // (2 * GATE), 2, GATE, BLOCK_M))
            gates, values = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
            half = tl.reshape(activate(gates, ACT) * values, (BLOCK_N // 2, BLOCK_M))
            column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            at = pair[None, :] * (outputs // 2) + column[:, None]
            inside = m_in[None, :] & (column < outputs // 2)[:, None]
            tl.store(out_ptr + at, half.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            acc *= tl.load(shares_ptr + pair, mask=m_in, other=0.0)[None, :]
            at = pair[None, :] * outputs + n[:, None]
            tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=m_in[None, :] & (n < outputs)[:, None])


@triton.jit(do_not_specialize=["scratch"])
def _combine(
    y_ptr, x_ptr, squares_ptr, slots_ptr, scratch, hidden,
    TAKEN: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    known = (d < hidden) & (tl.load(slots_ptr + m) != scratch)
    total = tl.load(x_ptr + m * hidden + d, mask=d < hidden, other=0.0).to(tl.float32)
    for j in tl.static_range(TAKEN):
        total += tl.load(y_ptr + (m * TAKEN + j) * hidden + d, mask=known, other=0.0).to(tl.float32)
    rounded = total.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + m * hidden + d, rounded, mask=d < hidden)
    tl.store(squares_ptr + m, tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 0))


def _blocks(pairs: int, experts: int, eight: bool) -> tuple[int, int, int, int, int]:
    """Sizes of a program's tile (pairs, outputs, inputs), its warps and stages.

    A tile holds the pairs of nearly every expert and not only of the average one: an expert with more reads its
    weights twice.
    """
    mean_pairs = pairs / experts
    if mean_pairs <= 8:
        return 16, 64, 128, 4, 5
    if mean_pairs <= 20:
        return 32, 64, 64, 4, 4
    if mean_pairs <= 40:
        return (64, 64, 64, 4, 4) if eight else (64, 128, 64, 8, 4)
    return 128, 128, 64, 4, 3


def _multiplied(
    given: Matrix, weight: Matrix, order: Tensor, bounds: Tensor, shares: Tensor, gate: Gate | None, dtype: torch.dtype
) -> Tensor:
    """The products of each pair's expert: of its token with gate and up, or of its own row with down, weighted."""
    taken = shares.shape[1]
    x, values, x_scales, scales = operands(given, weight)
    experts, outputs, inputs = values.shape
    pairs = order.shape[0]
    out = shares.new_empty(pairs, outputs // 2 if gate else outputs, dtype=dtype)
    block_m, block_n, block_k, warps, stages = _blocks(pairs, experts, scales is not None)
    block_k = min(block_k * 2 // values.element_size(), max(32, triton.next_power_of_2(inputs)))
    _experts[(triton.cdiv(outputs, block_n), experts)](
        x, values, x_scales, scales, order, bounds, shares, out, outputs, inputs,
        SHARED_BY=taken if gate else 1, ACT=ACTIVATION_CODES[gate.activation] if gate else 0,
        GATE=gate.block if gate else 1, QUANTISED=scales is not None, EVEN=inputs % block_k == 0,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
        **overlapping(out.device),
    )  # fmt: skip
    return out


def mixture(
    stream: Residual, w: LayerWeights, taken: int, gate: Gate, eps: float, pinned: Pinned | None, slots: Tensor,
    positions: Tensor, scratch: int,
) -> Residual:  # fmt: skip
    """Add the routed experts' outputs to the stream in place; see `reference_ops.mixture`."""
    assert w.router is not None
    x = stream.x
    ids, shares = route(normed(stream, w.router, eps), taken, pinned, slots, positions, scratch)
    order, bounds = group(ids, w.router.shape[0])
    eight = isinstance(w.gate_up, Fp8)
    given = to_fp8(x, eps) if eight else unit_norm(x, eps)
    hidden = _multiplied(given, w.gate_up, order, bounds, shares, gate, x.dtype)
    y = _multiplied(to_fp8(hidden) if eight else hidden, w.down, order, bounds, shares, None, x.dtype)
    squares = x.new_empty(1, x.shape[0], dtype=float32)
    width = x.shape[1]
    _combine[(x.shape[0],)](
        y, x, squares, slots, scratch, width, TAKEN=taken, BLOCK=triton.next_power_of_2(width),
        **overlapping(x.device),
    )  # fmt: skip
    return Residual(x, squares)
