"""Weights of 8 bits: float8 e4m3 values, and a scale for every output.

Weights are quantised from 16 bits when a model is made or loaded, as engines do for `--quantization fp8`. What they are
multiplied with is quantised as well, each token with its own scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0


@dataclass(frozen=True, slots=True)
class Fp8:
    """A quantised matrix, or one for each expert: `values` times `scales` by output."""

    values: Tensor
    scales: Tensor  # float32

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    @property
    def nbytes(self) -> int:
        return self.values.nbytes


Matrix = Tensor | Fp8


def quantised(matrix: Tensor) -> Fp8:
    """A matrix (..., outputs, inputs) in 8 bits; the largest value of an output becomes the largest of e4m3."""
    scales = (matrix.abs().amax(-1).float() / LARGEST_E4M3).clamp(min=1e-12)
    return Fp8((matrix.float() / scales[..., None]).to(E4M3), scales)


def operands(given: Matrix, weight: Matrix) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The values of two matrices to multiply, and their scales; None where they have 16 bits."""
    if isinstance(given, Fp8) and isinstance(weight, Fp8):
        return given.values, weight.values, given.scales, weight.scales
    assert isinstance(given, Tensor)
    assert isinstance(weight, Tensor)
    return given, weight, None, None


def plain(matrix: Matrix, dtype: torch.dtype) -> Tensor:
    """The matrix with its scales multiplied in."""
    return (matrix.values.float() * matrix.scales[..., None]).to(dtype) if isinstance(matrix, Fp8) else matrix
