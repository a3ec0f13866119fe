# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton kernels take pointers and compile-time constants that Python's types do not describe.)
"""Attention on the GPU: a few new tokens per row over ragged cached contexts, and prompt chunks over theirs.

Decode: the query heads that share a kv head, and a row's new tokens, are packed into one tile, so each key is read
once; a row's context is cut into a fixed number of splits, sized on the device from its length, whose results a
second kernel combines. The kernel also turns q and k and writes the cache: each split writes the positions it owns.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdvsim.realrun import twins
from pdvsim.realrun.batch import MAX_CHUNKS, Batch

MAX_SPLITS = 32
HALF_TYPES = (torch.bfloat16, torch.float16)  # what the library's prefill kernel takes


@dataclass(slots=True)
class Tuning:
    """How decode attention runs; one object so that a benchmark can try others."""

    programs_per_sm: int = 4  # splits are added until about this many programs per multiprocessor
    block: int = 64
    stages: int = 3
    warps: int = 4
    overlap: bool = False


TUNING = Tuning()


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 8


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
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
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

    if end > first:
        t = tl.arange(0, BLOCK_T)[:, None]
        mine = (t < TOKENS) & (first + t >= begin) & (first + t < end)
        c = tl.load(cos_ptr + (first + t) * (DIM // 2) + half, mask=mine, other=0.0)
        s = tl.load(sin_ptr + (first + t) * (DIM // 2) + half, mask=mine, other=0.0)
        new_key = _turned(tokens, t * width + (heads + head) * DIM, d, c, s, mine, DIM)
        new_value = tl.load(tokens + t * width + (heads + kv_heads + head) * DIM + d, mask=mine, other=0.0)
        tl.store(keys + (first + t) * DIM + d, new_key.to(kv_ptr.dtype.element_ty), mask=mine)
        tl.store(values + (first + t) * DIM + d, new_value, mask=mine)
        tl.debug_barrier()  # the loop below reads these positions back through other threads

    i = tl.arange(0, BLOCK_Q)
    query = first + i // GROUP
    real = i < TOKENS * GROUP
    c = tl.load(cos_ptr + query[:, None] * (DIM // 2) + half, mask=real[:, None], other=0.0)
    s = tl.load(sin_ptr + query[:, None] * (DIM // 2) + half, mask=real[:, None], other=0.0)
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
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
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
    qkv: Tensor, kv: Tensor, batch: Batch, positions: Tensor, cos: Tensor, sin: Tensor, tuning: Tuning = TUNING
) -> Tensor:
    _, _, kv_heads, capacity, dim = kv.shape
    heads = qkv.shape[1] // dim - 2 * kv_heads
    group, tokens, rows = heads // kv_heads, batch.tokens_per_row, batch.rows
    out = qkv.new_empty(rows * tokens, heads * dim)
    wanted = tuning.programs_per_sm * _multiprocessors(qkv.device) // (rows * kv_heads)
    splits = 1 << (max(1, min(MAX_SPLITS, wanted)).bit_length() - 1)
    part = qkv.new_empty((rows * kv_heads * splits * tokens * group, dim), dtype=torch.float32) if splits > 1 else out
    lse = part.new_empty(part.shape[0], dtype=torch.float32)
    launch = {"launch_pdl": True} if tuning.overlap else {}
    block = tuning.block if dim * kv.element_size() <= 256 else max(16, tuning.block // 2)
    _decode[(splits, kv_heads, rows)](
        qkv, kv, batch.row_slots, positions, cos, sin, out, part, lse,
        heads, kv_heads, capacity, kv.stride(0), dim**-0.5 * 1.4426950408889634, splits,
        TOKENS=tokens, GROUP=group, DIM=dim, BLOCK_Q=max(16, triton.next_power_of_2(tokens * group)),
        BLOCK_T=triton.next_power_of_2(tokens), BLOCK=block, SPLIT=splits > 1, OVERLAP=tuning.overlap,
        num_warps=tuning.warps, num_stages=tuning.stages, **launch,
    )  # fmt: skip
    if splits > 1:
        _combine[(tokens * group, kv_heads, rows)](
            part, lse, out, heads, kv_heads, splits, TOKENS=tokens, GROUP=group, DIM=dim, BLOCK_S=splits,
            OVERLAP=tuning.overlap, num_warps=2, **launch,
        )  # fmt: skip
    return out


def prefill_plan(batch: Batch, kv: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """What `prefill_attention` needs of a chunk part, made once for all layers."""
    if kv.dtype not in HALF_TYPES:
        return twins.prefill_plan(batch, kv, slots, positions)
    lengths = batch.chunk_bounds[1:] - batch.chunk_bounds[:-1]
    seen = torch.where(lengths > 0, batch.chunk_starts + lengths, 0)
    offsets = torch.zeros(MAX_CHUNKS + 1, dtype=torch.int32, device=kv.device)
    offsets[:MAX_CHUNKS] = batch.chunk_slots * (kv.shape[2] * kv.shape[3])
    return offsets, seen


def prefill_attention(qkv: Tensor, kv: Tensor, batch: Batch, plan: tuple[Tensor, Tensor]) -> Tensor:
    """Attention of the chunk part, already rotated and written, over its stretches' whole contexts."""
    if kv.dtype not in HALF_TYPES:
        return twins.prefill_attention(qkv, kv, batch, plan)
    _, all_slots, kv_heads, capacity, dim = kv.shape
    q = qkv[:, : qkv.shape[1] - 2 * kv_heads * dim].unflatten(-1, (-1, dim))
    # The cache as one run of positions, heads `capacity` apart: a slot is then an offset that lives on the device.
    run = ((all_slots - 1) * kv_heads + 1) * capacity
    k, v = (side.as_strided((run, kv_heads, dim), (dim, capacity * dim, 1)) for side in kv.unbind(0))
    offsets, seen = plan
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, batch.chunk_bounds, offsets, batch.chunk, capacity, 0.0, True, False, seqused_k=seen
    )[0]
    return out.flatten(1)
