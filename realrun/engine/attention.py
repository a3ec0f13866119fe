# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants that Python's types do not describe.)
"""Attention on the GPU: a few new tokens per row over ragged cached contexts, and prompt chunks over theirs.

Decode: the query heads that share a kv head, and a row's new tokens, are packed into one tile, so each key is read
once; a row's context is cut into a fixed number of splits, sized on the device from its length, whose results a
second kernel combines. The kernel also turns q and k and writes the cache: each split writes the positions it owns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdvsim.realrun.engine.batch import MAX_CHUNKS, Batch
from pdvsim.realrun.engine.buckets import PROGRAMS_PER_SM, query_tile
from pdvsim.realrun.engine.kernels import card, overlapping, take_turn
from pdvsim.sim.hardware.latency import cuts

LOG2_E = 1.4426950408889634  # kernels use exp2, which the hardware has


@dataclass(slots=True)
class AttentionTuning:
    """How decode attention runs; one object so that a benchmark can try others."""

    programs_per_sm: int = PROGRAMS_PER_SM  # splits are added until about this many programs per multiprocessor
    block: int = 64
    stages: int = 3
    warps: int = 4
    prefill: tuple[int, int, int] = (128, 64, 8)  # queries and keys per block, warps


TUNING = AttentionTuning()


@triton.jit
def _turned(base, row, d, c, s, inside, DIM: tl.constexpr):
    """Rows of `base` (row, DIM) turned by angles whose cosines and sines are `c` and `s`, in float32."""
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    x = tl.load(base + row + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(base + row + partner, mask=inside, other=0.0).to(tl.float32)
    return x * c + tl.where(d < DIM // 2, -y, y) * s


@triton.jit
def _decode(
    qkv_ptr, kv_ptr, row_slots_ptr, positions_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, lse_ptr,
    heads, kv_heads, capacity, value_offset, scale, splits,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    width = (heads + 2 * kv_heads) * DIM
    slot = tl.load(row_slots_ptr + r).to(tl.int64)
    first = tl.load(positions_ptr + r * TOKENS)
    total = first + TOKENS
    span = tl.cdiv(tl.cdiv(total, splits), BLOCK) * BLOCK
    begin = split * span
    end = tl.minimum(begin + span, total)
    d = tl.arange(0, DIM)[None, :]
    keys = kv_ptr + (slot * kv_heads + head) * capacity * DIM
    values = keys + value_offset
    half = d % (DIM // 2)
    tokens = qkv_ptr + r.to(tl.int64) * TOKENS * width

    # positions and angles may be read before the turn: the kernel ahead makes only q, k and v
    i = tl.arange(0, BLOCK_Q)
    query = first + i // GROUP
    real = i < TOKENS * GROUP
    c = tl.load(cos_ptr + query[:, None] * (DIM // 2) + half, mask=real[:, None], other=0.0)
    s = tl.load(sin_ptr + query[:, None] * (DIM // 2) + half, mask=real[:, None], other=0.0)
    take_turn(OVERLAP)
    if end > first:
        t = tl.arange(0, BLOCK_T)[:, None]
        mine = (t < TOKENS) & (first + t >= begin) & (first + t < end)
        c_new = tl.load(cos_ptr + (first + t) * (DIM // 2) + half, mask=mine, other=0.0)
        s_new = tl.load(sin_ptr + (first + t) * (DIM // 2) + half, mask=mine, other=0.0)
        new_key = _turned(tokens, t * width + (heads + head) * DIM, d, c_new, s_new, mine, DIM)
        new_value = tl.load(tokens + t * width + (heads + kv_heads + head) * DIM + d, mask=mine, other=0.0)
        tl.store(keys + (first + t) * DIM + d, new_key.to(kv_ptr.dtype.element_ty), mask=mine)
        tl.store(values + (first + t) * DIM + d, new_value, mask=mine)
        tl.debug_barrier()  # the loop below reads these positions back through other threads
    at = (i // GROUP) * width + (head * GROUP + i % GROUP) * DIM
    q = _turned(tokens, at[:, None], d, c, s, real[:, None], DIM).to(kv_ptr.dtype.element_ty)

    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total_weight = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
    j = tl.arange(0, BLOCK)
    for start in range(begin, end, BLOCK):
        position = start + j
        inside = position < end
        k = tl.load(keys + position[None, :] * DIM + tl.arange(0, DIM)[:, None], mask=inside[None, :], other=0.0)
        score = tl.dot(q, k, input_precision="ieee") * scale
        seen = inside[None, :] & (position[None, :] <= query[:, None])
        score = tl.where(seen, score, float("-inf"))
        new_top = tl.maximum(top, tl.max(score, 1))
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(score - safe_top[:, None])
        shrink = tl.exp2(top - safe_top)
        v = tl.load(values + position[:, None] * DIM + d, mask=inside[:, None], other=0.0)
        total_weight = total_weight * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    safe_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
    acc = acc / safe_weight[:, None]
    if SPLIT:
        row = ((r.to(tl.int64) * kv_heads + head) * splits + split) * (TOKENS * GROUP) + i
        tl.store(part_ptr + row[:, None] * DIM + d, acc, mask=real[:, None])
        lse = tl.where(total_weight == 0.0, float("-inf"), top + tl.log2(safe_weight))
        tl.store(lse_ptr + row, lse, mask=real)
    else:
        token = r.to(tl.int64) * TOKENS + i // GROUP
        out = out_ptr + (token * heads + head * GROUP + i % GROUP)[:, None] * DIM + d
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit
def _combine(
    part_ptr, lse_ptr, out_ptr, heads, kv_heads, splits,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    i, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    take_turn(OVERLAP)
    s = tl.arange(0, BLOCK_S)
    d = tl.arange(0, DIM)[None, :]
    row = ((r * kv_heads + head) * splits + s) * (TOKENS * GROUP) + i
    lse = tl.load(lse_ptr + row, mask=s < splits, other=float("-inf"))
    weight = tl.exp2(lse - tl.max(lse, 0))
    used = (weight > 0.0)[:, None]
    part = tl.load(part_ptr + row[:, None] * DIM + d, mask=used, other=0.0)
    out = tl.sum(part * weight[:, None], 0) / tl.sum(weight, 0)
    token = r * TOKENS + i // GROUP
    at = out_ptr + (token * heads + head * GROUP + i % GROUP) * DIM + tl.arange(0, DIM)
    tl.store(at, out.to(out_ptr.dtype.element_ty))


def decode_attention(
    qkv: Tensor, kv: Tensor, batch: Batch, positions: Tensor, cos: Tensor, sin: Tensor, tuning: AttentionTuning = TUNING
) -> Tensor:
    """Attention of a few new tokens a row over its cache."""
    _, _, kv_heads, capacity, dim = kv.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    group, tokens, rows = heads // kv_heads, batch.tokens_per_row, batch.rows
    out = qkv.new_empty(rows * tokens, heads * dim)
    splits = cuts(rows * kv_heads, tuning.programs_per_sm * card(qkv.device)[0])
    part = qkv.new_empty((rows * kv_heads * splits * tokens * group, dim), dtype=torch.float32) if splits > 1 else out
    lse = part.new_empty(part.shape[0], dtype=torch.float32)
    launch = overlapping(qkv.device)
    block = max(16, tuning.block * 256 // max(256, dim * kv.element_size()))  # long heads take shorter blocks
    _decode[(splits, kv_heads, rows)](
        qkv, kv, batch.row_slots, positions, cos, sin, out, part, lse,
        heads, kv_heads, capacity, kv.stride(0), dim**-0.5 * LOG2_E, splits,
        TOKENS=tokens, GROUP=group, DIM=dim, BLOCK_Q=query_tile(tokens * group),
        BLOCK_T=triton.next_power_of_2(tokens), BLOCK=block, SPLIT=splits > 1,
        num_warps=tuning.warps, num_stages=tuning.stages, **launch,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens * group, kv_heads, rows)](
            part, lse, out, heads, kv_heads, splits, TOKENS=tokens, GROUP=group, DIM=dim, BLOCK_S=splits,
            num_warps=2, **launch,
        )  # fmt: skip
    return out


@triton.jit
def _prefill(
    qkv_ptr, kv_ptr, slots_ptr, starts_ptr, bounds_ptr, out_ptr, heads, kv_heads, capacity, value_offset, scale,
    GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # the blocks with the longest contexts go first, so that short ones fill the end
    block, head, stretch = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.program_id(2)
    take_turn(OVERLAP)
    low = tl.load(bounds_ptr + stretch)
    count = tl.load(bounds_ptr + stretch + 1) - low
    if block * BLOCK_Q < count:
        slot = tl.load(slots_ptr + stretch).to(tl.int64)
        first = tl.load(starts_ptr + stretch) + block * BLOCK_Q
        i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, DIM)
        real = (i < count)[:, None]
        token = (low + i).to(tl.int64)
        q_rows = (token * (heads + 2 * kv_heads) + head)[:, None] * DIM + d[None, :]
        q = tl.load(qkv_ptr + q_rows, mask=real, other=0.0)
        query = first + tl.arange(0, BLOCK_Q)
        j = tl.arange(0, BLOCK)
        keys = kv_ptr + (slot * kv_heads + head // GROUP) * capacity * DIM
        k = keys + j[None, :] * DIM + d[:, None]
        v = keys + value_offset + j[:, None] * DIM + d[None, :]
        top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total_weight = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
        seen_by_all = (first + 1) // BLOCK * BLOCK
        end = tl.minimum(first + BLOCK_Q, first - block * BLOCK_Q + count)
        for start in range(0, seen_by_all, BLOCK):
            score = tl.dot(q, tl.load(k + start * DIM), input_precision="ieee") * scale
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total_weight = total_weight * shrink + tl.sum(weight, 1)
            values = tl.load(v + start * DIM)
            acc = tl.dot(weight.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        for start in range(seen_by_all, end, BLOCK):
            inside = start + j < end
            score = tl.dot(q, tl.load(k + start * DIM, mask=inside[None, :], other=0.0), input_precision="ieee")
            score = tl.where((start + j)[None, :] <= query[:, None], score * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - safe_top[:, None])
            shrink = tl.exp2(top - safe_top)
            total_weight = total_weight * shrink + tl.sum(weight, 1)
            values = tl.load(v + start * DIM, mask=inside[:, None], other=0.0)
            acc = tl.dot(weight.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        out = out_ptr + (token * heads + head)[:, None] * DIM + d[None, :]
        tl.store(out, (acc / total_weight[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def prefill_attention(qkv: Tensor, kv: Tensor, batch: Batch, slots: Tensor, positions: Tensor) -> Tensor:
    """Attention of the chunk part, already rotated and written; padding tokens are left unset."""
    _, _, kv_heads, capacity, dim = kv.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = qkv.new_empty(batch.chunk, heads * dim)
    half = kv.element_size() == 2
    block_q, block, warps = TUNING.prefill if half else (32, 32, 4)
    if dim > 128:
        block_q, block = min(block_q, 64), min(block, 32)
    block_q = min(block_q, max(16, triton.next_power_of_2(batch.chunk)))
    _prefill[(triton.cdiv(batch.chunk, block_q), heads, MAX_CHUNKS)](
        qkv, kv, batch.chunk_slots, batch.chunk_starts, batch.chunk_bounds, out,
        heads, kv_heads, capacity, kv.stride(0), dim**-0.5 * LOG2_E,
        GROUP=heads // kv_heads, DIM=dim, BLOCK_Q=block_q, BLOCK=block,
        num_warps=warps, num_stages=3 if dim <= 128 else 2, **overlapping(qkv.device),
    )  # fmt: skip
    return out
