"""Attention on the GPU: a few new tokens per row over ragged cached contexts, and prompt chunks over theirs.

Decode: the query heads that share a kv head, and a row's new tokens, are packed into one tile, so each key is read
once. Contexts are cut into stretches of about the same length, so that a long row takes more programs and not more
time: what each program reads is planned once per forward, for all layers. Where rows have few programs, the last to
finish joins their outputs; where they have many, a second kernel does. The kernel also turns q and k and writes the
cache: each program writes the positions it owns. Where a position lies is read from the page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pdvsim.realrun.engine.batch import ForwardBatch
from pdvsim.realrun.engine.buckets import PROGRAMS_PER_SM, query_tile
from pdvsim.realrun.engine.cache import PAGE
from pdvsim.realrun.engine.kernels import card, counters, overlapping, take_turn
from pdvsim.sim.prices.forward import cuts

ENTRY = 8  # figures of a program in the plan
BLOCK = 64  # positions that a program reads per step, two or four pages; half as many of long heads
LOG2_E = 1.4426950408889634  # kernels use exp2, which the hardware has


STAGES, WARPS = 3, 4  # of decode attention
JOIN_ALONE = 2  # with more programs per row, a separate kernel joins their outputs
PREFILL_BLOCKS = (128, 64, 8)  # queries and keys per block, warps


@triton.jit
def _turned(base, row, d, c, s, inside, DIM: tl.constexpr):
    """Rows of `base` (row, DIM) turned by angles whose cosines and sines are `c` and `s`, in float32."""
    partner = tl.where(d < DIM // 2, d + DIM // 2, d - DIM // 2)
    x = tl.load(base + row + d, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(base + row + partner, mask=inside, other=0.0).to(tl.float32)
    return x * c + tl.where(d < DIM // 2, -y, y) * s


@triton.jit
def _places(pages, position, inside, head, kv_heads, PAGE: tl.constexpr):
    """Rows of a cache that hold a slot's positions: its `pages`, then the head, then the place in the page."""
    page = tl.load(pages + position // PAGE, mask=inside, other=0)
    return (page * kv_heads + head) * PAGE + position % PAGE


@triton.jit
def _pages_of(pages, start, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """The pages of a block of positions from `start`, a multiple of its length: two or four."""
    at = pages + start // PAGE
    p0, p1 = tl.load(at), tl.load(at + 1)
    p2, p3 = p0, p1
    if BLOCK > 2 * PAGE:
        p2, p3 = tl.load(at + 2), tl.load(at + 3)
    return p0, p1, p2, p3


@triton.jit
def _block_places(p0, p1, p2, p3, head, kv_heads, PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Rows of a cache that hold a block whose pages are these."""
    j = tl.arange(0, BLOCK)
    page = tl.where(j < PAGE, p0, p1)
    if BLOCK > 2 * PAGE:
        page = tl.where(j < 2 * PAGE, page, tl.where(j < 3 * PAGE, p2, p3))
    return (page * kv_heads + head) * PAGE + j % PAGE


@triton.jit(do_not_specialize=["rows", "cuts", "programs", "pages_width", "tokens"])
def _plan(
    positions_ptr, row_slots_ptr, plan_ptr, rows, cuts, programs, pages_width, tokens,
    BLOCK: tl.constexpr, ENTRY: tl.constexpr, ROWS: tl.constexpr, PROGRAMS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    take_turn(OVERLAP)
    r = tl.arange(0, ROWS)
    first = tl.load(positions_ptr + r * tokens, mask=r < rows, other=0)
    total = tl.where(r < rows, first + tokens, 0)
    share = tl.cdiv(tl.cdiv(tl.sum(total, 0) * 5, rows * cuts * 4), BLOCK) * BLOCK
    parts = tl.cdiv(total, share)
    span = tl.cdiv(tl.cdiv(total, tl.maximum(parts, 1)), BLOCK) * BLOCK
    program = tl.cumsum(parts, 0) - parts
    tl.store(plan_ptr + r, program, mask=r < rows)
    tl.store(plan_ptr + rows + r, parts, mask=r < rows)
    entries_ptr = plan_ptr + tl.cdiv(2 * rows, ENTRY) * ENTRY
    p = tl.arange(0, PROGRAMS)
    tl.store(entries_ptr + p * ENTRY, tl.full((PROGRAMS,), -1, tl.int32), mask=p < programs)
    tl.debug_barrier()  # other threads overwrite these
    pages = tl.load(row_slots_ptr + r, mask=r < rows, other=0) * pages_width
    for part in range(tl.max(parts, 0)):
        here = part < parts
        entry = entries_ptr + (program + part) * ENTRY
        tl.store(entry, r, mask=here)
        tl.store(entry + 1, first, mask=here)
        tl.store(entry + 2, part * span, mask=here)
        tl.store(entry + 3, tl.minimum(part * span + span, total), mask=here)
        tl.store(entry + 4, pages, mask=here)
        tl.store(entry + 5, parts, mask=here)
        tl.store(entry + 6, program, mask=here)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What each program reads in the rows' attention.

    `table` holds each row's first program, each row's number of programs, then an entry a program: row, first new
    position, where its stretch begins and ends, where the row's pages stand in their table, the row's number of
    programs and its first. The row is -1 where there is nothing to do.
    """

    table: Tensor
    programs: int
    even: int  # programs a row would have if all were as long


def plan(batch: ForwardBatch, positions: Tensor, kv_heads: int) -> AttentionPlan:
    """Cut the rows' contexts into stretches of about the same length.

    Attention must not be the next kernel: it reads the plan while the one ahead of it may still run.
    """
    rows = batch.rows
    even = cuts(rows * kv_heads, PROGRAMS_PER_SM * card(positions.device)[0])
    programs = rows + 4 * rows * even // 5  # a fair share and a bit each, and what is left over in every row
    table = positions.new_empty(-(-2 * rows // ENTRY) * ENTRY + programs * ENTRY)
    _plan[(1,)](
        positions, batch.row_slots, table, rows, even, programs, batch.pages.shape[1], batch.tokens_per_row,
        BLOCK=BLOCK, ENTRY=ENTRY, ROWS=triton.next_power_of_2(rows), PROGRAMS=triton.next_power_of_2(programs),
        num_warps=4, **overlapping(positions.device),
    )  # fmt: skip
    return AttentionPlan(table, programs, even)


@triton.jit
def _joined(part_ptr, lse_ptr, first, parts, i, d, real, apart, DIM: tl.constexpr, BLOCK_Q: tl.constexpr):
    """The outputs of the programs of one row's head, weighted by the sums of their weights."""
    top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total_weight = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
    for part in range(parts):
        row = first + part * apart + i
        # past the multiprocessor's own cache: others wrote these
        lse = tl.load(lse_ptr + row, mask=real, other=float("-inf"), cache_modifier=".cg")
        output = tl.load(part_ptr + row[:, None] * DIM + d, mask=real[:, None], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, lse)
        safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
        shrink, weight = tl.exp2(top - safe_top), tl.exp2(lse - safe_top)
        total_weight = total_weight * shrink + weight
        acc = acc * shrink[:, None] + output * weight[:, None]
        top = new_top
    return acc / tl.where(total_weight == 0.0, 1.0, total_weight)[:, None]


@triton.jit(do_not_specialize=["rows"])
def _decode(
    qkv_ptr, kv_ptr, pages_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, lse_ptr, done_ptr, plan_ptr,
    rows, heads, kv_heads, value_offset, scale,
    PAGE: tl.constexpr, ENTRY: tl.constexpr, TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr, JOIN: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    # the plan and all it needs may be read before the turn: the kernel ahead makes only q, k and v
    head, program = tl.program_id(0), tl.program_id(1)
    entry = plan_ptr + tl.cdiv(2 * rows, ENTRY) * ENTRY + program * ENTRY
    r = tl.load(entry)
    if r >= 0:
        first = tl.load(entry + 1)
        begin, end = tl.load(entry + 2), tl.load(entry + 3)
        pages = pages_ptr + tl.load(entry + 4)
        parts, first_program = tl.load(entry + 5), tl.load(entry + 6)
        width = (heads + 2 * kv_heads) * DIM
        d = tl.arange(0, DIM)[None, :]
        values_ptr = kv_ptr + value_offset
        half = d % (DIM // 2)
        tokens = qkv_ptr + r.to(tl.int64) * TOKENS * width
        i = tl.arange(0, BLOCK_Q)
        query = first + i // GROUP  # negative ahead of a prompt: sees nothing
        real = i < TOKENS * GROUP
        angle = tl.maximum(query, 0)[:, None] * (DIM // 2) + half
        c = tl.load(cos_ptr + angle, mask=real[:, None], other=0.0)
        s = tl.load(sin_ptr + angle, mask=real[:, None], other=0.0)
        take_turn(OVERLAP)
        if end > first:
            t = tl.arange(0, BLOCK_T)[:, None]
            mine = (t < TOKENS) & (first + t >= begin) & (first + t < end)
            c_new = tl.load(cos_ptr + (first + t) * (DIM // 2) + half, mask=mine, other=0.0)
            s_new = tl.load(sin_ptr + (first + t) * (DIM // 2) + half, mask=mine, other=0.0)
            new_key = _turned(tokens, t * width + (heads + head) * DIM, d, c_new, s_new, mine, DIM)
            new_value = tl.load(tokens + t * width + (heads + kv_heads + head) * DIM + d, mask=mine, other=0.0)
            new_at = _places(pages, first + t, mine, head, kv_heads, PAGE) * DIM + d
            tl.store(kv_ptr + new_at, new_key.to(kv_ptr.dtype.element_ty), mask=mine)
            tl.store(values_ptr + new_at, new_value.to(kv_ptr.dtype.element_ty), mask=mine)
            tl.debug_barrier()  # the loop below reads these positions back through other threads
        at = (i // GROUP) * width + (head * GROUP + i % GROUP) * DIM
        q = _turned(tokens, at[:, None], d, c, s, real[:, None], DIM).to(qkv_ptr.dtype.element_ty)

        top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total_weight = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
        j = tl.arange(0, BLOCK)
        # a block's pages are looked up while the one before is worked on
        p0, p1, p2, p3 = _pages_of(pages, begin, PAGE, BLOCK)
        for start in range(begin, end, BLOCK):
            position = start + j
            inside = position < end
            place = _block_places(p0, p1, p2, p3, head, kv_heads, PAGE, BLOCK) * DIM
            p0, p1, p2, p3 = _pages_of(pages, start + BLOCK, PAGE, BLOCK)
            k = tl.load(kv_ptr + place[None, :] + tl.arange(0, DIM)[:, None], mask=inside[None, :], other=0.0)
            score = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            seen = inside[None, :] & (position[None, :] <= query[:, None])
            score = tl.where(seen, score, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - safe_top[:, None])
            shrink = tl.exp2(top - safe_top)
            v = tl.load(values_ptr + place[:, None] + d, mask=inside[:, None], other=0.0).to(q.dtype)
            total_weight = total_weight * shrink + tl.sum(weight, 1)
            acc = tl.dot(weight.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            top = new_top

        token = r.to(tl.int64) * TOKENS + i // GROUP
        out = out_ptr + (token * heads + head * GROUP + i % GROUP)[:, None] * DIM + d
        safe_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
        acc = acc / safe_weight[:, None]
        if parts == 1:
            tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=real[:, None])
        else:
            row = (program.to(tl.int64) * kv_heads + head) * (TOKENS * GROUP) + i
            tl.store(part_ptr + row[:, None] * DIM + d, acc, mask=real[:, None])
            lse = tl.where(total_weight == 0.0, float("-inf"), top + tl.log2(safe_weight))
            tl.store(lse_ptr + row, lse, mask=real)
            if JOIN:
                tl.debug_barrier()  # all threads have written before one of them says so
                done = done_ptr + r * kv_heads + head
                if tl.atomic_add(done, 1, sem="acq_rel") == parts - 1:
                    tl.store(done, 0)  # for the next layer
                    row_first = (first_program.to(tl.int64) * kv_heads + head) * (TOKENS * GROUP)
                    apart = kv_heads * (TOKENS * GROUP)
                    joined = _joined(part_ptr, lse_ptr, row_first, parts, i, d, real, apart, DIM, BLOCK_Q)
                    tl.store(out, joined.to(out_ptr.dtype.element_ty), mask=real[:, None])


@triton.jit(do_not_specialize=["rows"])
def _join(
    part_ptr, lse_ptr, plan_ptr, out_ptr, rows, heads, kv_heads,
    TOKENS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    i, head, r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first, parts = tl.load(plan_ptr + r).to(tl.int64), tl.load(plan_ptr + rows + r)
    take_turn(OVERLAP)
    if parts > 1:
        s = tl.arange(0, BLOCK)
        d = tl.arange(0, DIM)
        top = tl.full((1,), float("-inf"), tl.float32)
        total_weight = tl.zeros((1,), tl.float32)
        acc = tl.zeros((DIM,), tl.float32)
        for start in range(0, parts, BLOCK):
            row = ((first + start + s) * kv_heads + head) * (TOKENS * GROUP) + i
            lse = tl.load(lse_ptr + row, mask=start + s < parts, other=float("-inf"))
            new_top = tl.maximum(top, tl.max(lse, 0))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            shrink, weight = tl.exp2(top - safe_top), tl.exp2(lse - safe_top)
            output = tl.load(part_ptr + row[:, None] * DIM + d[None, :], mask=(weight > 0.0)[:, None], other=0.0)
            total_weight = total_weight * shrink + tl.sum(weight, 0)
            acc = acc * shrink + tl.sum(output * weight[:, None], 0)
            top = new_top
        token = r.to(tl.int64) * TOKENS + i // GROUP
        at = out_ptr + (token * heads + head * GROUP + i % GROUP) * DIM + d
        safe_weight = tl.where(total_weight == 0.0, 1.0, total_weight)
        tl.store(at, (acc / safe_weight).to(out_ptr.dtype.element_ty))


def decode_attention(
    qkv: Tensor, kv: Tensor, batch: ForwardBatch, planned: AttentionPlan, positions: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Attention of a few new tokens per row over its cache."""
    kv_heads, dim = kv.shape[2], kv.shape[4]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    group, tokens, rows = heads // kv_heads, batch.tokens_per_row, batch.rows
    out = qkv.new_empty(rows * tokens, heads * dim)
    part = qkv.new_empty((planned.programs * kv_heads * tokens * group, dim), dtype=torch.float32)
    lse = part.new_empty(part.shape[0], dtype=torch.float32)
    few, launch = planned.even <= JOIN_ALONE, overlapping(qkv.device)
    # in the order of the plan, whose empty places come last
    _decode[(kv_heads, planned.programs)](
        qkv, kv, batch.pages, cos, sin, out, part, lse, counters(qkv.device), planned.table,
        rows, heads, kv_heads, kv.stride(0), dim**-0.5 * LOG2_E,
        PAGE=PAGE, ENTRY=ENTRY, TOKENS=tokens, GROUP=group, DIM=dim, BLOCK_Q=query_tile(tokens * group),
        BLOCK_T=triton.next_power_of_2(tokens), BLOCK=BLOCK if dim * qkv.element_size() <= 256 else BLOCK // 2,
        JOIN=few, num_warps=WARPS, num_stages=STAGES, **launch,
    )  # fmt: skip
    if not few:
        _join[(tokens * group, kv_heads, rows)](
            part, lse, planned.table, out, rows, heads, kv_heads, TOKENS=tokens, GROUP=group, DIM=dim,
            BLOCK=min(32, triton.next_power_of_2(planned.programs)), num_warps=2, **launch,
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["pages_width", "stretches"])
def _prefill(
    qkv_ptr, kv_ptr, pages_ptr, slots_ptr, starts_ptr, bounds_ptr, out_ptr,
    heads, kv_heads, pages_width, value_offset, scale, stretches,
    PAGE: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    take_turn(OVERLAP)
    c = tl.arange(0, CHUNKS)
    lows = tl.load(bounds_ptr + c, mask=c < stretches, other=0)
    blocks = tl.cdiv(tl.load(bounds_ptr + 1 + c, mask=c < stretches, other=0) - lows, BLOCK_Q)
    # a stretch's last blocks go first: they have the longest contexts, and short ones fill the end; programs without a
    # block go last: among the others they would leave multiprocessors with two of those, and some with none
    number = tl.sum(blocks, 0) - 1 - tl.program_id(1)
    if number >= 0:
        stretch = tl.sum((tl.cumsum(blocks, 0) <= number).to(tl.int32), 0)
        block = number - tl.sum(tl.where(c < stretch, blocks, 0), 0)
        low = tl.load(bounds_ptr + stretch)
        count = tl.load(bounds_ptr + stretch + 1) - low
        pages = pages_ptr + tl.load(slots_ptr + stretch) * pages_width
        first = tl.load(starts_ptr + stretch) + block * BLOCK_Q
        i = block * BLOCK_Q + tl.arange(0, BLOCK_Q)
        d = tl.arange(0, DIM)
        real = (i < count)[:, None]
        token = (low + i).to(tl.int64)
        q_rows = (token * (heads + 2 * kv_heads) + head)[:, None] * DIM + d[None, :]
        q = tl.load(qkv_ptr + q_rows, mask=real, other=0.0)
        query = first + tl.arange(0, BLOCK_Q)
        j = tl.arange(0, BLOCK)
        values_ptr = kv_ptr + value_offset
        top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
        total_weight = tl.zeros((BLOCK_Q,), tl.float32)
        acc = tl.zeros((BLOCK_Q, DIM), tl.float32)
        seen_by_all = (first + 1) // BLOCK * BLOCK
        end = tl.minimum(first + BLOCK_Q, first - block * BLOCK_Q + count)
        p0, p1, p2, p3 = _pages_of(pages, 0, PAGE, BLOCK)
        for start in range(0, seen_by_all, BLOCK):
            place = _block_places(p0, p1, p2, p3, head // GROUP, kv_heads, PAGE, BLOCK) * DIM
            p0, p1, p2, p3 = _pages_of(pages, start + BLOCK, PAGE, BLOCK)
            k = tl.load(kv_ptr + place[None, :] + d[:, None])
            score = tl.dot(q, k.to(q.dtype), input_precision="ieee") * scale
            new_top = tl.maximum(top, tl.max(score, 1))
            weight = tl.exp2(score - new_top[:, None])
            shrink = tl.exp2(top - new_top)
            total_weight = total_weight * shrink + tl.sum(weight, 1)
            values = tl.load(values_ptr + place[:, None] + d[None, :]).to(q.dtype)
            acc = tl.dot(weight.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        for start in range(seen_by_all, end, BLOCK):
            inside = start + j < end
            place = _block_places(p0, p1, p2, p3, head // GROUP, kv_heads, PAGE, BLOCK) * DIM
            p0, p1, p2, p3 = _pages_of(pages, start + BLOCK, PAGE, BLOCK)
            k = tl.load(kv_ptr + place[None, :] + d[:, None], mask=inside[None, :], other=0.0)
            score = tl.dot(q, k.to(q.dtype), input_precision="ieee")
            score = tl.where((start + j)[None, :] <= query[:, None], score * scale, float("-inf"))
            new_top = tl.maximum(top, tl.max(score, 1))
            safe_top = tl.where(new_top == float("-inf"), 0.0, new_top)
            weight = tl.exp2(score - safe_top[:, None])
            shrink = tl.exp2(top - safe_top)
            total_weight = total_weight * shrink + tl.sum(weight, 1)
            values = tl.load(values_ptr + place[:, None] + d[None, :], mask=inside[:, None], other=0.0).to(q.dtype)
            acc = tl.dot(weight.to(values.dtype), values, acc * shrink[:, None], input_precision="ieee")
            top = new_top
        out = out_ptr + (token * heads + head)[:, None] * DIM + d[None, :]
        tl.store(out, (acc / total_weight[:, None]).to(out_ptr.dtype.element_ty), mask=real)


def prefill_attention(qkv: Tensor, kv: Tensor, batch: ForwardBatch, slots: Tensor, positions: Tensor) -> Tensor:
    """Attention of the chunk part, already rotated and written; padding tokens are left unset."""
    kv_heads, dim = kv.shape[2], kv.shape[4]
    heads = qkv.shape[1] // dim - 2 * kv_heads
    out = qkv.new_empty(batch.chunk, heads * dim)
    half = qkv.element_size() == 2
    block_q, block, warps = PREFILL_BLOCKS if half else (32, 32, 4)
    if dim > 128:
        block_q, block = min(block_q, 64), min(block, 32)
    block_q = min(block_q, max(16, triton.next_power_of_2(batch.chunk)))
    stretches = len(batch.chunk_slots)
    _prefill[(heads, batch.chunk // block_q + min(stretches, batch.chunk))](
        qkv, kv, batch.pages, batch.chunk_slots, batch.chunk_starts, batch.chunk_bounds, out,
        heads, kv_heads, batch.pages.shape[1], kv.stride(0), dim**-0.5 * LOG2_E, stretches,
        PAGE=PAGE, GROUP=heads // kv_heads, DIM=dim, BLOCK_Q=block_q, BLOCK=block,
        CHUNKS=max(64, triton.next_power_of_2(stretches)), num_warps=warps, num_stages=3 if dim <= 128 else 2,
        **overlapping(qkv.device),
    )  # fmt: skip
    return out
