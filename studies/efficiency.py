"""Learn from measured samples how forward times follow from a card's ceilings and a model's sizes, and prove it.

`python studies/efficiency.py [FILE.json]` learns the efficiencies in `sim.hardware.transfer` from the H200's samples,
and prints the errors on each model when it is left out. With a file it writes what was learned: it made
sim/hardware/data/transfer.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from pdvsim.calibration.fit.build import gpu_spec
from pdvsim.calibration.fit.points import Floats, Points, medians, points_of
from pdvsim.common.files import write_whole
from pdvsim.profiler.samples import Samples, load
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, ROW_BUCKETS, SMALL_BYTES, SMALL_TOKENS
from pdvsim.sim.core import GpuSpec, HeadSpec, ModelSpec
from pdvsim.sim.hardware.latency import ForwardFit
from pdvsim.sim.hardware.transfer import COMPUTE_TOKENS, Coefficients, EngineLimits, Prices, Sizes, Transfer, document

DATA_SHEET_BANDWIDTH, DATA_SHEET_FLOPS = 4.8e12, 989.4e12  # H200 SXM, "NVIDIA H200 Tensor Core GPU" data sheet, 2024
ENGINE = EngineLimits(SMALL_TOKENS, SMALL_BYTES, ROW_BUCKETS, CHUNK_BUCKETS)
# holds 95% of |log(predicted / published)| over the layers of Vidur's A100 and H100 files, predicted from the cards'
# data sheets alone: `pdvsim calibrate DIR --from vidur --gpu a100-80gb,h100-sxm` prints it
CARD_BAR = 0.22

START = Coefficients(
    narrow_s=3e-6,
    narrow_bandwidth=0.9,
    narrow_padding=0.1,
    narrow_balance=0.3,
    library_s=5e-6,
    library_bandwidth=0.95,
    library_balance=0.2,
    sharpness=3.0,
    traffic=1.0,
    compute=(0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9),
    kv_bandwidth=0.95,
    kv_compute=0.3,
    attention_s=3e-6,
    tile_s=1e-6,
    row_s=5e-9,
    head_s=1e-5,
    head_bandwidth=0.9,
    head_compute=0.8,
    prompt_compute=0.5,
    prompt_wide=2.0,
    mixed_s=1.2e-5,
    draft_ratio=0.98,
)
NAMES = tuple(f.name for f in fields(Coefficients) if f.name != "compute")
# how strongly a logarithm is held to its start: shares of a bandwidth are near 1, the rest is left to the samples
PRIOR = {name: 0.3 if name.endswith("_bandwidth") else 0.05 for name in NAMES}
STEPS = 60  # of the search, which needs 10 to 30
ROBUST = 0.05  # relative errors beyond which a point pulls less


def packed(c: Coefficients) -> Floats:
    """The free parameters: logarithms."""
    return np.asarray(np.log([*(getattr(c, name) for name in NAMES), *c.compute]))


def unpacked(x: Floats) -> Coefficients:
    """Coefficients from the logarithms that the fit moves."""
    values = np.exp(x).tolist()
    return Coefficients(**dict(zip(NAMES, values, strict=False)), compute=tuple(values[len(NAMES) :]))


@dataclass(frozen=True)
class Measured:
    """One model's medians on the card that was measured."""

    spec: ModelSpec
    points: Points


def measured_models(samples: Samples) -> dict[str, Measured]:
    """Every model that was measured alone; heads are predicted by the formula, and no part of it."""
    specs, frame = samples.header.specs(), samples.frame
    solo = frame[frame["section"] == "solo"].groupby("model", sort=True, observed=True)
    models = {str(name): rows for name, rows in solo if not isinstance(specs[str(name)], HeadSpec)}
    return {name: Measured(specs[name], points_of(medians(rows))) for name, rows in models.items()}


def stacked(models: Iterable[Measured]) -> tuple[Sizes, Points, Floats]:
    """All points of all models as one, with the weight that makes models count alike."""
    models = list(models)
    counts = [len(m.points) for m in models]
    sizes = Sizes(*(np.repeat([float(getattr(m.spec, n)) for m in models], counts) for n in Sizes._fields))
    points = Points(*(np.concatenate([getattr(m.points, f.name) for m in models]) for f in fields(Points)))
    return sizes, points, np.repeat(np.sqrt(np.mean(counts) / np.array(counts)), counts)


class Parts(Protocol):
    """Seconds of the parts of a forward: by the formula (`Prices`), or read from the knots of a fit."""

    def layers(self, tokens: Floats) -> Floats: ...
    def head(self) -> tuple[Floats, Floats]: ...
    def kv(self, width: Floats) -> Floats: ...
    def width(self, width: Floats) -> Floats: ...
    def row(self) -> Floats: ...
    def prompt_wave(self) -> Floats: ...
    def mixed(self) -> Floats: ...


class Knots:
    """The parts as `Latency` reads them from a transferred fit."""

    def __init__(self, fit: ForwardFit) -> None:
        self.fit = fit

    def layers(self, tokens: Floats) -> Floats:
        return _read(self.fit.layer_knots, tokens)

    def head(self) -> tuple[Floats, Floats]:
        return np.asarray(self.fit.head_weights_s), np.asarray(self.fit.head_token_s)

    def kv(self, width: Floats) -> Floats:
        return _read(self.fit.kv_knots, width)

    def width(self, width: Floats) -> Floats:
        return _read(self.fit.width_knots, width)

    def row(self) -> Floats:
        return np.asarray(self.fit.row_s)

    def prompt_wave(self) -> Floats:
        return np.asarray(self.fit.prompt_wave_s)

    def mixed(self) -> Floats:
        return np.asarray(self.fit.mixed_s)


def _read(knots: Sequence[tuple[int, float]], at: Floats) -> Floats:
    return np.asarray(np.interp(at, *np.array(knots).T))


def seconds(parts: Parts, draft_ratio: float, points: Points, waves: Floats) -> Floats:
    """The time of every point, put together from its parts; `waves` are the points' own `in_waves`."""
    rows, padded, later = points.rows, points.padded, points.steps - 1
    reading, multiplying = parts.head()

    def forward(tokens: Floats, logits: Floats) -> Floats:
        top = np.where(logits > 0, np.maximum(reading, multiplying * logits), 0.0)
        return np.asarray(parts.layers(np.maximum(tokens, 1)) + top)

    def attention(width: Floats, context: Floats) -> Floats:
        width = np.maximum(width, 1)
        each = (context + rows * width) * parts.kv(width) + rows * parts.row() + parts.width(width)
        return np.where(rows > 0, each, 0.0)

    one = np.ones_like(rows)
    total = forward(points.tokens, points.logits) + attention(points.width, points.context)
    total += waves * parts.prompt_wave()
    total += np.where((rows > 0) & (points.chunks > 0), parts.mixed(), 0.0)
    grown = points.context + rows * (points.width + (later - 1) / 2)  # mean over the later steps
    total += np.where(later > 0, later * (forward(np.maximum(padded, 1), padded) + attention(one, grown)), 0.0)
    return np.asarray(total * np.where(points.steps > 1, draft_ratio, 1.0))


def learn(models: Iterable[Measured], gpu: GpuSpec, sms: int, start: Coefficients = START) -> Transfer:
    """The figures with the least relative errors over all points; a few far off do not pull."""
    from scipy.optimize import least_squares

    sizes, points, weight = stacked(models)
    base = Transfer(
        coefficients=start,
        engine=ENGINE,
        sms=sms,
        bandwidth_share=gpu.bandwidth_bytes_per_s / DATA_SHEET_BANDWIDTH,
        flops_share=gpu.flops_per_s / DATA_SHEET_FLOPS,
        model_bar=0.0,
        card_bar=CARD_BAR,
        source=gpu.source,
    )
    held = np.array([*(PRIOR[name] for name in NAMES), *(0.05 for _ in COMPUTE_TOKENS)])
    middle = packed(START)
    waves = points.in_waves(sizes.heads, sizes.head_dim, sms)

    def residuals(x: Floats) -> Floats:
        prices = Prices(sizes, gpu, sms, replace(base, coefficients=unpacked(x)))
        errors = weight * np.log(seconds(prices, prices.c.draft_ratio, points, waves) / points.seconds)
        return np.concatenate([errors, held * (x - middle)])

    found = least_squares(residuals, packed(start), loss="soft_l1", f_scale=ROBUST, max_nfev=STEPS)
    return replace(base, coefficients=unpacked(found.x))


def errors_of(transfer: Transfer, model: Measured, gpu: GpuSpec) -> Floats:
    """Predicted over measured, less one, in the form that the simulator uses."""
    fit, spec, points = transfer.fit(model.spec, gpu), model.spec, model.points
    heads, head_dim = (np.full(len(points), size) for size in (spec.heads, spec.head_dim))
    waves = points.in_waves(heads, head_dim, fit.prompt_sms)
    return np.asarray(seconds(Knots(fit), fit.draft_ratio, points, waves) / points.seconds - 1)


def leave_one_out(
    models: Mapping[str, Measured], gpu: GpuSpec, sms: int, start: Coefficients, names: Iterable[str]
) -> dict[str, Floats]:
    """Errors on each named model of figures learned from all the others."""
    found = {}
    for name in names:
        others = [model for other, model in models.items() if other != name]
        found[name] = errors_of(learn(others, gpu, sms, start), models[name], gpu)
    return found


def spread(errors: Floats) -> tuple[float, float, float]:
    """Median and 95th percentile of the absolute errors, and the median error with its sign."""
    size = np.abs(errors)
    return float(np.median(size)), float(np.percentile(size, 95)), float(np.median(errors))


def main(argv: Sequence[str]) -> None:
    """Learn, print the errors by model left out, and write the figures where a file is named."""
    samples = load(Path(__file__).parents[1] / "calibration/data/h200")
    gpu, sms = gpu_spec(samples.header, "h200"), samples.header.device.multiprocessors
    assert sms is not None
    models = measured_models(samples)
    whole = learn(models.values(), gpu, sms)
    left = leave_one_out(models, gpu, sms, whole.coefficients, models)
    every = np.concatenate(list(left.values()))
    if argv:
        bar = float(np.percentile(np.abs(np.log1p(every)), 95))
        text = json.dumps(document(replace(whole, model_bar=bar)), indent=1)
        write_whole(Path(argv[0]), f"{text}\n".encode())
    print(f"{'left out':16} {'points':>6} {'median':>8} {'p95':>8} {'bias':>8}   learned from it too: median, p95")
    for name, errors in left.items():
        middle, high, bias = spread(errors)
        inside = spread(errors_of(whole, models[name], gpu))
        print(f"{name:16} {len(errors):6} {middle:8.1%} {high:8.1%} {bias:+8.1%}   {inside[0]:8.1%} {inside[1]:8.1%}")
    middle, high, bias = spread(every)
    print(f"{'all':16} {len(every):6} {middle:8.1%} {high:8.1%} {bias:+8.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
