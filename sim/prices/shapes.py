"""Between the shapes that kernels were timed at: rooflines and gaps.

Matrix products and experts are interpolated as a share of the card's roofline, in the logarithms of their sizes,
because that share changes slowly where times do not.

Not modelled: sizes between those timed at which a library picks another kernel.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.models.specs import GpuSpec

Floats = NDArray[np.float64]

UNIT = 1000  # a stored value is 1000 times the logarithm of microseconds: steps of 0.1%
MISSING = np.iinfo(np.int16).min
KERNEL_S = 5e-6  # of a kernel that has next to nothing to do
BANDWIDTH_SHARE, FLOPS_SHARE = 0.85, 0.75  # of the data sheet, which good kernels reach
ITEM_BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8_block": 1.0, "nvfp4": 0.5625, "w4a16_mxfp4": 0.53125,
              "w4a8_mxfp4_mxfp8": 0.53125, "int4_wo": 0.5625}  # fmt: skip
# times the arithmetic of 16 bits, on cards that have such units
RATE = {"fp8": 2.0, "fp8_block": 2.0, "nvfp4": 4.0, "w4a8_mxfp4_mxfp8": 2.0}


def packed(seconds: Floats) -> NDArray[np.int16]:
    """Times as they are stored; no number where there is no time."""
    with np.errstate(invalid="ignore", divide="ignore"):
        logs = np.round(UNIT * np.log(seconds * 1e6))
    return np.where(np.isfinite(logs), logs, MISSING).astype(np.int16)


def unpacked(values: NDArray[np.int16]) -> Floats:
    """Logarithms of seconds."""
    logs = np.where(values == MISSING, np.nan, values / UNIT)
    return np.asarray(logs + np.log(1e-6))


def rising(at: Floats, times: Floats, sizes: Floats) -> Floats:
    """Times between those timed; a larger size is never faster, and beyond the largest times are in proportion."""
    times = np.minimum.accumulate(times[::-1])[::-1]
    return np.where(sizes > at[-1], times[-1] * sizes / at[-1], np.interp(sizes, at, times))


def roofline(gpu: GpuSpec, kind: str, m: Floats, n: Floats, k: Floats, item: float | None = None) -> Floats:
    """Seconds of a product at the shares of the data sheet that good kernels reach; weights of `item` bytes."""
    usual = ITEM_BYTES.get(kind, 2.0)
    moved = n * k * (usual if item is None else item) + m * k * usual + 2 * m * n
    return _roof(gpu, kind, moved, 2 * m * n * k)


def experts_roofline(
    gpu: GpuSpec, kind: str, tokens: Floats, hidden: float, inner: float, per_token: float, count: float
) -> Floats:
    """Return the same of a layer's experts, of which `tokens` take distinct ones at random."""
    read = count * (1 - (1 - per_token / count) ** tokens)
    weights = 3 * hidden * inner
    moved = read * weights * ITEM_BYTES.get(kind, 2.0) + 2 * tokens * per_token * (2 * hidden + 3 * inner)
    return _roof(gpu, kind, moved, 2 * weights * per_token * tokens)


def _roof(gpu: GpuSpec, kind: str, moved: Floats, flops: Floats) -> Floats:
    reading = moved / (gpu.bandwidth_bytes_per_s * BANDWIDTH_SHARE)
    multiplying = flops / (gpu.flops_per_s * RATE.get(kind, 1.0) * FLOPS_SHARE)
    return np.asarray(KERNEL_S + np.cbrt(reading**3 + multiplying**3))


def between(values: Floats, axes: list[NDArray[Any]], at: tuple[Floats, ...]) -> Floats:
    """Multilinear interpolation in the logarithms of the axes; the value at the edge beyond them."""
    total = np.zeros(at[0].shape)
    places = []
    for axis, wanted in zip(axes, at, strict=True):
        logs, here = np.log(axis.astype(float)), np.log(wanted)
        right = np.clip(np.searchsorted(logs, here), 1, len(logs) - 1)
        share = np.clip((here - logs[right - 1]) / (logs[right] - logs[right - 1]), 0, 1)
        places.append((right, share))
    for corner in np.ndindex(*([2] * len(axes))):
        weight, index = np.ones(at[0].shape), []
        for side, (right, share) in zip(corner, places, strict=True):
            weight = weight * (share if side else 1 - share)
            index.append(right - 1 + side)
        total += weight * values[tuple(index)]
    return total


def from_neighbours(shares: Floats, axes: list[NDArray[Any]]) -> Floats:
    """Each point from those around it: the mean of straight lines along outputs and inputs, in logarithms.

    No number where neither axis has a neighbour on both sides.
    """
    guesses = []
    for axis in (1, 2):
        logs = np.log(axes[axis].astype(float))
        place = np.arange(1, len(logs) - 1)
        share = (logs[place] - logs[place - 1]) / (logs[place + 1] - logs[place - 1])
        share = share.reshape([-1 if one == axis else 1 for one in range(3)])
        line = (1 - share) * np.take(shares, place - 1, axis) + share * np.take(shares, place + 1, axis)
        guess = np.full(shares.shape, np.nan)
        index: list[Any] = [slice(None)] * 3
        index[axis] = place
        guess[tuple(index)] = line
        guesses.append(guess)
    both = np.stack(guesses)
    known = np.isfinite(both)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(known, both, 0.0).sum(axis=0) / known.sum(axis=0))


def filled(values: Floats, axes: list[NDArray[Any]]) -> Floats:
    """Gaps from the points around them, else from the nearest smaller size, else from the nearest larger one."""
    result = np.where(np.isfinite(values), values, from_neighbours(values, axes))
    for larger in (False, True):
        for axis in (2, 1, 0):
            line = np.flip(result, axis) if larger else result
            place = np.arange(line.shape[axis]).reshape([-1 if one == axis else 1 for one in range(3)])
            line = np.take_along_axis(line, np.maximum.accumulate(np.where(np.isnan(line), 0, place), axis), axis)
            result = np.flip(line, axis) if larger else line
    return result
