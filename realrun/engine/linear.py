"""Matrix products on the residual stream: read it normed, or add to it in place.

Products of few tokens only stream their weights. Their kernel takes all tokens in one tile, splits the inputs of an
output tile over several programs so that the whole GPU reads concurrently, and lets the last of them to finish add the
parts up, always in the same order: runs repeat bit for bit. Wider products go to the library.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pdvsim.realrun.engine.batch import Gate, Residual
from pdvsim.realrun.engine.buckets import SMALL_BYTES, SMALL_TOKENS
from pdvsim.realrun.engine.fp8 import E4M3, LARGEST_E4M3, Fp8, Matrix, operands
from pdvsim.realrun.engine.kernels import (
    ACTIVATION_CODES,
    activate,
    card,
    counters,
    gated,
    overlapping,
    take_turn,
    unit_norm,
)

# narrow products: the tile of a program, its warps, and how many a multiprocessor outputs are split into programs for
BLOCK_N, BLOCK_K, WARPS, PROGRAMS_PER_SM = 64, 64, 4, 1.0


def takes(x: Tensor, weight: Matrix) -> bool:
    """Return whether the kernel rather than the library multiplies these: larger products hide its fixed costs."""
    return x.shape[0] <= SMALL_TOKENS and (isinstance(weight, Fp8) or weight.nbytes <= SMALL_BYTES)


@triton.jit(do_not_specialize=["tokens"])
def _narrow(
    x_ptr, weight_ptr, x_scales_ptr, scales_ptr, bias_ptr, squares_ptr, part_ptr, counter_ptr, out_ptr, sums_ptr,
    tokens, outputs, inputs, x_stride, span, splits, squares_tiles, eps,
    QUANTISED: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, GATE: tl.constexpr,
    RESIDUAL: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    split, tile = tl.program_id(0), tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    m_in = m < tokens
    begin = split * span
    end = tl.minimum(begin + span, inputs)
    rows = tl.where(n < outputs, n, 0).to(tl.int64) * inputs  # past the end, row 0 is read and never stored
    weight = weight_ptr + rows[:, None] + k[None, :]
    x = x_ptr + m[None, :] * x_stride + k[:, None]
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    take_turn(OVERLAP)
    for start in range(begin, end, BLOCK_K):
        if EVEN:
            xs = tl.load(x + start, mask=m_in[None, :], other=0.0)
            w = tl.load(weight + start)
        else:
            k_in = start + k < end
            xs = tl.load(x + start, mask=m_in[None, :] & k_in[:, None], other=0.0)
            w = tl.load(weight + start, mask=k_in[None, :], other=0.0)
        acc = tl.dot(w, xs, acc, input_precision="ieee")

    last = True
    if SPLIT:
        size: tl.constexpr = BLOCK_N * BLOCK_M
        place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        part = part_ptr + tile.to(tl.int64) * splits * size + place
        tl.store(part + split * size, acc)
        tl.debug_barrier()  # every thread's part is written before one of them counts it
        last = tl.atomic_add(counter_ptr + tile, 1, sem="acq_rel") == splits - 1
        if last:
            tl.store(counter_ptr + tile, 0)
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for s in range(splits):
                acc += tl.load(part + s * size, cache_modifier=".cg")
    if last:
        if QUANTISED:
            acc *= tl.load(scales_ptr + n, mask=n < outputs, other=0.0)[:, None]
            acc *= tl.load(x_scales_ptr + m, mask=m_in, other=0.0)[None, :]
        if NORM:
            s = tl.arange(0, BLOCK_S)
            held = (s < squares_tiles)[:, None] & m_in[None, :]
            squares = tl.load(squares_ptr + s[:, None] * tokens + m[None, :], mask=held, other=0.0)
            acc *= tl.rsqrt(tl.sum(squares, 0) / inputs + eps)[None, :]
        if BIAS:
            acc += tl.load(bias_ptr + n, mask=n < outputs, other=0.0).to(tl.float32)[:, None]
        if ACT:
            pairs = tl.reshape(acc, (BLOCK_N // (2 * GATE), 2, GATE, BLOCK_M))
            gates, values = tl.split(tl.permute(pairs, (0, 2, 3, 1)))
            half = tl.reshape(activate(gates, ACT) * values, (BLOCK_N // 2, BLOCK_M))
            column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            at = m[None, :].to(tl.int64) * (outputs // 2) + column[:, None]
            inside = m_in[None, :] & (column < outputs // 2)[:, None]
            tl.store(out_ptr + at, half.to(out_ptr.dtype.element_ty), mask=inside)
        else:
            at = m[None, :].to(tl.int64) * outputs + n[:, None]
            inside = m_in[None, :] & (n < outputs)[:, None]
            if RESIDUAL:
                acc += tl.load(out_ptr + at, mask=inside, other=0.0).to(tl.float32)
            result = acc.to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + at, result, mask=inside)
            if RESIDUAL:
                masked = tl.where(inside, result.to(tl.float32), 0.0)
                tl.store(sums_ptr + tile * tokens + m, tl.sum(masked * masked, 0), mask=m_in)


def _run_narrow(
    given: Matrix,
    weight: Matrix,
    out: Tensor,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    gate: Gate | None = None,
    sums: Tensor | None = None,
) -> None:
    x, values, x_scales, scales = operands(given, weight)
    tokens, inputs = x.shape
    outputs = weight.shape[0]
    sms, shared = card(x.device)
    block_m = max(16, triton.next_power_of_2(tokens))
    block_k = min(BLOCK_K * 2 // x.element_size(), max(32, triton.next_power_of_2(inputs)))
    # as many stages as let three programs share a multiprocessor
    stages = max(3, min(6, shared // 3 // ((block_m + BLOCK_N) * block_k * x.element_size())))
    tiles = triton.cdiv(outputs, BLOCK_N)
    blocks = triton.cdiv(inputs, block_k)
    wanted = max(1, min(8, blocks, round(PROGRAMS_PER_SM * sms / tiles)))
    span = triton.cdiv(blocks, wanted) * block_k
    splits = triton.cdiv(inputs, span)
    part, counter = x, x
    if splits > 1:
        part = out.new_empty(tiles * splits * BLOCK_N * block_m, dtype=torch.float32)
        counter = counters(x.device)
    _narrow[(splits, tiles)](
        x, values, x_scales, scales, bias, squares, part, counter, out, sums,
        tokens, outputs, inputs, x.stride(0), span, splits, squares.shape[0] if squares is not None else 0, eps,
        QUANTISED=scales is not None, NORM=squares is not None, BIAS=bias is not None,
        ACT=ACTIVATION_CODES[gate.activation] if gate else 0, GATE=gate.block if gate else 1,
        RESIDUAL=sums is not None, EVEN=inputs % block_k == 0, SPLIT=splits > 1,
        BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_K=block_k,
        BLOCK_S=triton.next_power_of_2(squares.shape[0]) if squares is not None else 1,
        num_warps=WARPS, num_stages=stages, **overlapping(x.device),
    )  # fmt: skip


@triton.jit
def _to_fp8(
    x_ptr, values_ptr, scales_ptr, width, stride, eps,
    NORM: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    take_turn(OVERLAP)
    x = tl.load(x_ptr + m * stride + d, mask=d < width, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / MOST, 1e-12)
    tl.store(values_ptr + m * width + d, (x / scale).to(values_ptr.dtype.element_ty), mask=d < width)
    if NORM:
        scale *= tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(scales_ptr + m, scale)


def to_fp8(x: Tensor, eps: float | None = None) -> Fp8:
    """x, or with `eps` its RMS norm, quantised token by token."""
    tokens, width = x.shape
    fp8 = Fp8(x.new_empty(tokens, width, dtype=E4M3), x.new_empty(tokens, dtype=torch.float32))
    block = triton.next_power_of_2(width)
    _to_fp8[(tokens,)](
        x, fp8.values, fp8.scales, width, x.stride(0), eps or 0.0, NORM=eps is not None, MOST=LARGEST_E4M3, BLOCK=block,
        num_warps=min(16, max(1, block // 512)), **overlapping(x.device),
    )  # fmt: skip
    return fp8


def _wide_fp8(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    """The product of quantised matrices, by the library."""
    return torch._scaled_mm(
        x.values, weight.values.t(), scale_a=x.scales[:, None], scale_b=weight.scales[None], out_dtype=dtype,
        use_fast_accum=True,
    )  # fmt: skip


def normed(
    stream: Residual,
    weight: Matrix,
    eps: float,
    *,
    bias: Tensor | None = None,
    gate: Gate | None = None,
) -> Tensor:
    """norm(stream) @ weight.T, then bias, then gated activation; see `reference_ops.normed`."""
    x = stream.x
    if takes(x, weight) and (isinstance(weight, Fp8) or stream.squares is not None):
        out = x.new_empty(x.shape[0], weight.shape[0] // (2 if gate else 1))
        given, squares = (to_fp8(x, eps), None) if isinstance(weight, Fp8) else (x, stream.squares)
        _run_narrow(given, weight, out, squares=squares, eps=eps, bias=bias, gate=gate)
        return out
    if isinstance(weight, Fp8):
        y = _wide_fp8(to_fp8(x, eps), weight, x.dtype)
        y = y if bias is None else y.add_(bias)
    else:
        y = F.linear(unit_norm(x, eps), weight, bias)
    return gated(y, gate) if gate else y


def added(y: Tensor, weight: Matrix, stream: Residual) -> Residual:
    """Add y @ weight.T to the stream in place; see `reference_ops.added`."""
    if not takes(y, weight):
        if isinstance(weight, Fp8):
            return Residual(stream.x.add_(_wide_fp8(to_fp8(y), weight, y.dtype)), None)
        return Residual(stream.x.addmm_(y, weight.t()), None)
    tiles = triton.cdiv(weight.shape[0], BLOCK_N)
    sums = y.new_empty(tiles, y.shape[0], dtype=torch.float32)
    _run_narrow(to_fp8(y) if isinstance(weight, Fp8) else y, weight, stream.x, sums=sums)
    return Residual(stream.x, sums)
