"""Triton kernels around the matrix products: embedding, norm, activation, rope, argmax, settling of drafts.

Each has its oracle of the same name and signature in `reference_ops`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdvsim.realrun.engine.arch import Activation
from pdvsim.realrun.engine.batch import ForwardBatch, Gate, Residual
from pdvsim.realrun.engine.cache import PAGE

SILU, GELU_TANH = 1, 2


@functools.cache
def card(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory one program may take."""
    if device.type != "cuda":
        return 8, 1 << 18  # the interpreter: any card will do
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count), int(
        getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    )


MOST_COUNTERS = 16384  # tiles of one product, or heads of all rows, that several programs work on
_counters: dict[tuple[torch.device, int], Tensor] = {}


def counters(device: torch.device) -> Tensor:
    """Zeroed counters of the current stream: its kernels run in order, and each leaves them at zero."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    if (device, stream) not in _counters:
        _counters[device, stream] = torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
    return _counters[device, stream]


ACTIVATION_CODES: dict[Activation, int] = {"silu": SILU, "gelu_tanh": GELU_TANH}


@functools.cache
def _can_overlap(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def overlapping(device: torch.device) -> dict[str, bool]:
    """Launch options that let a kernel start, and read weights, while the one ahead still runs, where the card can."""
    return {"OVERLAP": True, "launch_pdl": True} if _can_overlap(device) else {"OVERLAP": False}


@triton.jit
def take_turn(OVERLAP: tl.constexpr):
    """Wait until what the kernels ahead wrote can be read, then let the next kernel start.

    In this order at most two kernels run concurrently, so what the kernel before the one ahead wrote may be read
    even before the turn is taken.
    """
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def activate(x, ACT: tl.constexpr):
    """silu or tanh-approximated gelu of a float32 block; tanh(y) written as 2 sigmoid(2y) - 1."""
    if ACT == 1:
        return x * tl.sigmoid(x)
    else:
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _turn_pages(pages_ptr, places_ptr, numbers_ptr, count, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    take_turn(OVERLAP)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places_ptr + i, mask=i < count, other=0)
    tl.store(pages_ptr + place, tl.load(numbers_ptr + i, mask=i < count, other=0), mask=i < count)


def turn_pages(pages: Tensor, places: Tensor, numbers: Tensor) -> None:
    """Write the pages that slots were given since the last launch into the page table."""
    count = places.shape[0]
    _turn_pages[(triton.cdiv(count, 128),)](
        pages, places, numbers, count, BLOCK=128, num_warps=1, **overlapping(pages.device)
    )


@triton.jit(do_not_specialize=["row_tokens", "tokens_per_row", "first", "scratch", "stretches"])
def _embed(
    tokens_ptr, length_ptr, table_ptr, row_slots_ptr, chunk_slots_ptr, chunk_starts_ptr, chunk_bounds_ptr,
    x_ptr, squares_ptr, slots_ptr, positions_ptr,
    row_tokens, tokens_per_row, first, scratch, capacity, hidden, scale, stretches,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0)
    take_turn(OVERLAP)
    if m < row_tokens:
        slot = tl.load(row_slots_ptr + m // tokens_per_row)
        position = tl.load(length_ptr + slot) + first + m % tokens_per_row
    else:
        i = m - row_tokens
        c = tl.arange(0, CHUNKS)
        over = tl.load(chunk_bounds_ptr + 1 + c, mask=c < stretches, other=2147483647) <= i
        stretch = tl.sum(over.to(tl.int32), 0)
        real = stretch < stretches
        slot = tl.load(chunk_slots_ptr + stretch, mask=real, other=scratch)
        start = tl.load(chunk_starts_ptr + stretch, mask=real, other=0)
        position = start + tl.where(real, i - tl.load(chunk_bounds_ptr + stretch, mask=real, other=0), 0)
    known = tl.maximum(position, 0)  # a head's row may begin ahead of its prompt
    token = tl.load(tokens_ptr + slot.to(tl.int64) * capacity + known).to(tl.int64)
    tl.store(slots_ptr + m, slot)
    tl.store(positions_ptr + m, position)
    d = tl.arange(0, BLOCK)
    row = tl.load(table_ptr + token * hidden + d, mask=d < hidden, other=0.0).to(tl.float32) * scale
    rounded = row.to(x_ptr.dtype.element_ty)
    tl.store(x_ptr + m.to(tl.int64) * hidden + d, rounded, mask=d < hidden)
    tl.store(squares_ptr + m, tl.sum(rounded.to(tl.float32) * rounded.to(tl.float32), 0))


def embed(
    batch: ForwardBatch, tokens: Tensor, length: Tensor, table: Tensor, scale: float
) -> tuple[Residual, Tensor, Tensor]:
    """Rows of the embedding for tokens."""
    x = table.new_empty(batch.tokens, table.shape[1])
    squares = x.new_empty(1, batch.tokens, dtype=torch.float32)
    slots = length.new_empty(batch.tokens)
    positions = length.new_empty(batch.tokens)
    _embed[(batch.tokens,)](
        tokens, length, table, batch.row_slots, batch.chunk_slots, batch.chunk_starts, batch.chunk_bounds,
        x, squares, slots, positions,
        batch.row_tokens, max(batch.tokens_per_row, 1), batch.first, batch.scratch, tokens.shape[1], table.shape[1],
        scale, len(batch.chunk_slots), CHUNKS=triton.next_power_of_2(len(batch.chunk_slots)),
        BLOCK=triton.next_power_of_2(table.shape[1]),
        **overlapping(x.device),
    )  # fmt: skip
    return Residual(x, squares), slots, positions


@triton.jit
def _unit_norm(x_ptr, out_ptr, hidden, x_stride, eps, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    m = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    x = tl.load(x_ptr + m * x_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / hidden + eps)
    tl.store(out_ptr + m * hidden + d, (x * scale).to(out_ptr.dtype.element_ty), mask=d < hidden)


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """RMS norm without weights, which are folded into the next linear layer."""
    out = x.new_empty(x.shape)
    block = triton.next_power_of_2(x.shape[1])
    warps = min(16, max(1, block // 512))
    _unit_norm[(x.shape[0],)](
        x, out, x.shape[1], x.stride(0), eps, BLOCK=block, num_warps=warps, **overlapping(x.device)
    )
    return out


@triton.jit
def _head_norm(qkv_ptr, weight_ptr, heads, width, eps, DIM: tl.constexpr, OVERLAP: tl.constexpr):
    m, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, DIM)
    weight = tl.load(weight_ptr + (head >= heads) * DIM + d)
    take_turn(OVERLAP)
    at = qkv_ptr + m * width + head * DIM + d
    x = tl.load(at).to(tl.float32)
    rounded = (x * tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)).to(qkv_ptr.dtype.element_ty)
    tl.store(at, (rounded.to(tl.float32) * weight).to(qkv_ptr.dtype.element_ty))


def head_norm(qkv: Tensor, weight: Tensor, heads: int, kv_heads: int, eps: float) -> None:
    """RMS norm of every head of q and of k, in place."""
    _head_norm[(qkv.shape[0], heads + kv_heads)](
        qkv, weight, heads, qkv.stride(0), eps, DIM=weight.shape[1], num_warps=1, **overlapping(qkv.device)
    )


@triton.jit
def _gated(
    gate_up_ptr, out_ptr, width, ACT: tl.constexpr, GATE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr
):  # fmt: skip
    take_turn(OVERLAP)
    m = tl.program_id(1).to(tl.int64)
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate_at = gate_up_ptr + m * 2 * width + d // GATE * 2 * GATE + d % GATE
    gate = tl.load(gate_at, mask=d < width, other=0.0).to(tl.float32)
    up = tl.load(gate_at + GATE, mask=d < width, other=0.0).to(tl.float32)
    tl.store(out_ptr + m * width + d, (activate(gate, ACT) * up).to(out_ptr.dtype.element_ty), mask=d < width)


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """The gated activation of a fused gate and up projection."""
    width = gate_up.shape[1] // 2
    out = gate_up.new_empty(gate_up.shape[0], width)
    grid = (triton.cdiv(width, 1024), gate_up.shape[0])
    _gated[grid](
        gate_up, out, width, ACT=ACTIVATION_CODES[gate.activation], GATE=gate.block, BLOCK=1024,
        **overlapping(out.device),
    )  # fmt: skip
    return out


@triton.jit
def _rope_write(
    qkv_ptr, kv_ptr, pages_ptr, slots_ptr, positions_ptr, cos_ptr, sin_ptr,
    heads, kv_heads, width, value_offset,
    PAGE: tl.constexpr, DIM: tl.constexpr, BLOCK_H: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    take_turn(OVERLAP)
    m = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    d = tl.arange(0, DIM // 2)[None, :]
    inside = (h < heads + 2 * kv_heads) & (d < DIM // 2)
    slot = tl.load(slots_ptr + m).to(tl.int64)
    position = tl.load(positions_ptr + m).to(tl.int64)
    page = tl.load(pages_ptr + slot * width + position // PAGE).to(tl.int64)
    source = qkv_ptr + (m * (heads + 2 * kv_heads) + h) * DIM + d
    low = tl.load(source, mask=inside, other=0.0)
    high = tl.load(source + DIM // 2, mask=inside, other=0.0)
    c = tl.load(cos_ptr + position * (DIM // 2) + d)
    s = tl.load(sin_ptr + position * (DIM // 2) + d)
    is_value = h >= heads + kv_heads
    turned_low = low.to(tl.float32) * c - high.to(tl.float32) * s
    turned_high = high.to(tl.float32) * c + low.to(tl.float32) * s
    low = tl.where(is_value, low, turned_low.to(low.dtype))
    high = tl.where(is_value, high, turned_high.to(high.dtype))
    tl.store(source, low, mask=h < heads)
    tl.store(source + DIM // 2, high, mask=h < heads)
    head = tl.where(is_value, h - heads - kv_heads, h - heads).to(tl.int64)
    row = (page * kv_heads + head) * PAGE + position % PAGE
    target = kv_ptr + tl.where(is_value, value_offset, 0) + row * DIM + d
    tl.store(target, low.to(kv_ptr.dtype.element_ty), mask=inside & (h >= heads))
    tl.store(target + DIM // 2, high.to(kv_ptr.dtype.element_ty), mask=inside & (h >= heads))


def rope_write(
    qkv: Tensor, kv: Tensor, pages: Tensor, slots: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate queries and keys by their positions, and write keys and values into the cache."""
    kv_heads, dim = kv.shape[2], kv.shape[4]
    all_heads = qkv.shape[1] // dim
    block = 8
    _rope_write[(qkv.shape[0], triton.cdiv(all_heads, block))](
        qkv, kv, pages, slots, positions, cos, sin, all_heads - 2 * kv_heads, kv_heads, pages.shape[1], kv.stride(0),
        PAGE=PAGE, DIM=dim, BLOCK_H=block, num_warps=2, **overlapping(qkv.device),
    )  # fmt: skip


@triton.jit
def _argmax(logits_ptr, out_ptr, vocab, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    take_turn(OVERLAP)
    m = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), float("-inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + m * vocab + v, mask=v < vocab, other=float("-inf")).to(tl.float32)
        where = tl.where(x > best, v, where)
        best = tl.maximum(best, x)
    top = tl.max(best, 0)
    tl.store(out_ptr + m, tl.min(tl.where(best == top, where, vocab), 0))


def argmax(logits: Tensor) -> Tensor:
    """The most likely token of every row."""
    out = torch.empty(logits.shape[0], dtype=torch.int32, device=logits.device)
    _argmax[(logits.shape[0],)](logits, out, logits.shape[1], BLOCK=4096, num_warps=16, **overlapping(logits.device))
    return out


@triton.jit
def _append(ids_ptr, tokens_ptr, slots_ptr, positions_ptr, rows, capacity, BLOCK: tl.constexpr, OVERLAP: tl.constexpr):
    take_turn(OVERLAP)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = r < rows
    at = tl.load(slots_ptr + r, mask=inside, other=0).to(tl.int64) * capacity
    at += tl.load(positions_ptr + r, mask=inside, other=0) + 1
    tl.store(tokens_ptr + at, tl.load(ids_ptr + r, mask=inside, other=0), mask=inside)


def append(ids: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Append each row's new token to its sequence."""
    rows = ids.shape[0]
    _append[(triton.cdiv(rows, 128),)](
        ids, tokens, slots, positions, rows, tokens.shape[1], BLOCK=128, num_warps=1, **overlapping(ids.device)
    )


@triton.jit
def _settle(
    agreed_ptr, chosen_ptr, row_slots_ptr, limits_ptr, pins_ptr, tokens_ptr, length_ptr, out_ptr,
    scratch, capacity, width, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    take_turn(OVERLAP)
    r = tl.program_id(0)
    slot = tl.load(row_slots_ptr + r)
    start = tl.load(length_ptr + slot)
    pin = tl.load(pins_ptr + r)
    accepted = tl.where(pin >= 0, pin, tl.load(agreed_ptr + r))
    accepted = tl.minimum(tl.minimum(accepted, tl.load(limits_ptr + r)), width - 1)
    accepted = tl.maximum(accepted, 0)
    follow = tl.load(chosen_ptr + r * width + accepted)
    column = tl.arange(0, BLOCK)
    row_tokens = tokens_ptr + slot.to(tl.int64) * capacity + start
    drafts = tl.load(row_tokens + column, mask=column < accepted, other=-1)
    new = tl.where(column == accepted, follow, drafts)
    tl.store(out_ptr + r * (width + 1), accepted)
    tl.store(out_ptr + r * (width + 1) + 1 + column, new, mask=column < width)
    tl.store(row_tokens + accepted, follow)
    tl.store(length_ptr + slot, start + accepted + 1, mask=slot != scratch)


def settle(
    agreed: Tensor, chosen: Tensor, batch: ForwardBatch, limits: Tensor, pins: Tensor, tokens: Tensor, length: Tensor
) -> Tensor:
    """Accept drafts up to the first that differs, and advance each sequence."""
    width = batch.tokens_per_row
    out = agreed.new_empty(batch.rows, width + 1)
    _settle[(batch.rows,)](
        agreed, chosen, batch.row_slots, limits, pins, tokens, length, out, batch.scratch, tokens.shape[1], width,
        BLOCK=triton.next_power_of_2(width), num_warps=1, **overlapping(out.device),
    )  # fmt: skip
    return out
