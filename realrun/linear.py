# mypy: disable-error-code="no-untyped-def, untyped-decorator"
# (Triton kernels take pointers and compile-time constants that Python's types do not describe.)
"""Matrix products of a few tokens, fused with the norm before them and the activation or residual sum after them.

With few tokens a product only streams its weights, so each program owns some outputs, reads their weights once, and
has every token in one tile. There is no split over inputs: sums keep one order, and runs repeat bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pdvsim.realrun.arch import Activation
from pdvsim.realrun.kernels import ACTIVATION_CODES, activate, gated, rms_norm


@dataclass(slots=True)
class Tuning:
    """How narrow products run; one object so that a benchmark can try others."""

    widest: int = 64  # tokens from which the library takes over
    block_n: int = 16
    block_k: int = 256
    stages: int = 4
    warps: int = 4
    overlap: bool = False  # programmatic dependent launch: fetch weights while the kernel before still runs


TUNING = Tuning()


@triton.jit
def _fetch(pointers):
    """Ask L2 for the lines at `pointers`; nothing waits."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize=["tokens"])
def _linear(
    x_ptr, weight_ptr, norm_ptr, bias_ptr, residual_ptr, out_ptr, tokens, outputs, inputs, x_stride, eps,
    NORM: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr, RESIDUAL: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    n_in = n < outputs
    rows = tl.where(n_in, n, 0).to(tl.int64) * inputs  # past the end, row 0 is read and never stored
    weight = weight_ptr + rows[:, None] + k[None, :]
    up_offset = outputs.to(tl.int64) * inputs
    x = x_ptr + m[None, :] * x_stride + k[:, None]
    m_in = (m < tokens)[None, :]
    if OVERLAP:
        gdc_launch_dependents()
        line = tl.arange(0, BLOCK_K // 64) * 64
        for start in range(0, inputs, BLOCK_K):
            _fetch(weight_ptr + rows[:, None] + start + line[None, :])
            if ACT:
                _fetch(weight_ptr + up_offset + rows[:, None] + start + line[None, :])
        gdc_wait()
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    acc_up = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    squares = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, inputs, BLOCK_K):
        if EVEN:
            xs = tl.load(x + start, mask=m_in, other=0.0)
            w = tl.load(weight + start)
        else:
            k_in = start + k < inputs
            xs = tl.load(x + start, mask=m_in & k_in[:, None], other=0.0)
            w = tl.load(weight + start, mask=k_in[None, :], other=0.0)
        if NORM:
            wide = xs.to(tl.float32)
            squares += tl.sum(wide * wide, 0)
            scale = tl.load(norm_ptr + start + k, mask=start + k < inputs, other=0.0)
            xs = (wide * scale[:, None]).to(xs.dtype)
        acc = tl.dot(w, xs, acc, input_precision="ieee")
        if ACT:
            if EVEN:
                w_up = tl.load(weight + up_offset + start)
            else:
                w_up = tl.load(weight + up_offset + start, mask=(start + k < inputs)[None, :], other=0.0)
            acc_up = tl.dot(w_up, xs, acc_up, input_precision="ieee")
    if NORM:
        scale = tl.rsqrt(squares / inputs + eps)[None, :]
        acc *= scale
        acc_up *= scale
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n_in, other=0.0).to(tl.float32)[:, None]
    if ACT:
        acc = activate(acc, ACT) * acc_up
    at = m[None, :].to(tl.int64) * outputs + n[:, None]
    inside = m_in & n_in[:, None]
    if RESIDUAL:
        acc += tl.load(residual_ptr + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)


def narrow_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
    tuning: Tuning = TUNING,
) -> Tensor:
    """`linear` in one kernel, all tokens in one tile."""
    tokens, inputs = x.shape
    outputs = weight.shape[0] // (1 if activation is None else 2)
    out = x.new_empty(tokens, outputs) if residual is None else residual
    block_k = min(tuning.block_k, triton.next_power_of_2(inputs))
    while block_k > 64 and inputs % block_k:
        block_k //= 2
    launch = {"launch_pdl": True} if tuning.overlap else {}
    _linear[(triton.cdiv(outputs, tuning.block_n),)](
        x, weight, norm, bias, residual, out, tokens, outputs, inputs, x.stride(0), eps,
        NORM=norm is not None, BIAS=bias is not None, ACT=ACTIVATION_CODES[activation] if activation else 0,
        RESIDUAL=residual is not None, EVEN=inputs % block_k == 0,
        BLOCK_M=max(16, triton.next_power_of_2(tokens)), BLOCK_N=tuning.block_n, BLOCK_K=block_k,
        OVERLAP=tuning.overlap, num_warps=tuning.warps, num_stages=tuning.stages, **launch,
    )  # fmt: skip
    return out


def wide_linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """`linear` through the matrix library, norm and activation in kernels of their own."""
    x = x if norm is None else rms_norm(x, norm, eps)
    if residual is not None:
        return residual.addmm_(x, weight.t())
    y = F.linear(x, weight, bias)
    return y if activation is None else gated(y, activation)


def linear(
    x: Tensor,
    weight: Tensor,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x @ weight.T with norm, bias, gated activation or in-place residual sum; see `twins.linear`."""
    run = narrow_linear if x.shape[0] <= TUNING.widest else wide_linear
    return run(x, weight, norm=norm, eps=eps, bias=bias, activation=activation, residual=residual)
