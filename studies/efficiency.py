"""Fit how forward times follow from a GPU's peak rates and a model's sizes, and test the fit.

`python studies/efficiency.py [FILE.json]` fits the efficiencies of `sim.prices.transfer` to the H200's samples, and
prints the errors on each model when it is left out of the fit. Dense models of 16 bits give all figures but two, which
mixtures of experts and 8-bit models add. With a file it also writes the efficiencies: sim/prices/data/transfer.json
is such a file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.calibration.fit.build import gpu_spec
from pdvsim.calibration.fit.forward import Traced, traced_times
from pdvsim.calibration.fit.points import Floats, medians, price_s, tokens_of
from pdvsim.common.files import write_whole
from pdvsim.profiler.samples import Samples, load
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, ROW_BUCKETS, SMALL_BYTES, SMALL_TOKENS
from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.transfer import (
    COMPUTE_TOKENS,
    Coefficients,
    EngineLimits,
    Prices,
    Transfer,
)

if TYPE_CHECKING:
    import pandas as pd

DATA_SHEET_BANDWIDTH, DATA_SHEET_FLOPS = 4.8e12, 989.4e12  # H200 SXM, "NVIDIA H200 Tensor Core GPU" data sheet, 2024
ENGINE = EngineLimits(SMALL_TOKENS, SMALL_BYTES, ROW_BUCKETS, CHUNK_BUCKETS)
# holds 95% of |log(predicted / published)| over the layers of Vidur's A100 and H100 files, predicted from the cards'
# data sheets alone
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
# strength of the prior on each logarithm: shares of a bandwidth are near 1, the others are almost free
PRIOR = {name: 0.3 if name.endswith("_bandwidth") else 0.05 for name in NAMES}
LATER = ("qwen3-0.6b",)  # dense models that were measured after the shipped figures were learned
STEPS = 60  # at most; the search needs 10 to 30
ROBUST = 0.05  # relative error beyond which a point has less weight


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
    frame: pd.DataFrame

    @property
    def seconds(self) -> Floats:
        return self.frame["seconds"].to_numpy(float)


def measured_models(samples: Samples) -> dict[str, Measured]:
    """Every model that was measured alone; heads are predicted, not fitted."""
    specs, frame = samples.header.specs(), samples.frame
    solo = frame[frame["section"] == "solo"].groupby("model", sort=True, observed=True)
    models = {str(name): rows for name, rows in solo if not specs[str(name)].is_head}
    return {name: Measured(specs[name], medians(rows)) for name, rows in models.items()}


def learned_from(models: Mapping[str, Measured]) -> dict[str, Measured]:
    """The dense models of 16 bits, without later measurements."""
    dense = {name: model for name, model in models.items() if model.spec.experts is None}
    return {name: model for name, model in dense.items() if not model.spec.is_quantised and name not in LATER}


class PredictedTimes:
    """A model's predicted times at the sizes of its measured points."""

    def __init__(self, model: Measured, sms: int) -> None:
        frame, self._spec = model.frame, model.spec
        self._tokens = sorted({*tokens_of(frame), *(int(rows) for rows in frame["bucket_rows"] if rows)})
        self._widths = range(1, int(frame["tokens"].max()) + 1)
        free = iter(Traced.figures(len(self._tokens) + 2 * len(self._widths) + 6))
        figures: dict[str, Any] = {
            f"{name}_knots": tuple((at, next(free)) for at in sizes)
            for name, sizes in (("layer", self._tokens), ("kv", self._widths), ("width", self._widths))
        }
        names = ("head_weights_s", "head_token_s", "row_s", "prompt_wave_s", "mixed_s", "draft_ratio")
        figures |= dict(zip(names, free, strict=True)) | {"prompt_sms": sms}
        figures |= {"row_buckets": ENGINE.row_buckets, "chunk_buckets": ENGINE.chunk_buckets}
        self._times = traced_times(model.spec, ForwardTerms.read(figures), frame)

    def seconds(self, transfer: Transfer, gpu: GpuSpec) -> Floats:
        prices, widths = Prices(self._spec, gpu, transfer.sms, transfer), np.array(self._widths, float)
        parts = (prices.layers(np.array(self._tokens, float)), prices.kv(widths), prices.width(widths), prices.head())
        rest = (prices.row(), prices.prompt_wave(), prices.s.caching_layers * prices.c.mixed_s, prices.c.draft_ratio)
        return self._times.seconds(np.concatenate([*parts, rest]))


def learn(models: Iterable[Measured], gpu: GpuSpec, sms: int, start: Coefficients = START) -> Transfer:
    """Efficiencies with the least relative errors over all points, robust to outliers."""
    from scipy.optimize import least_squares

    models = list(models)
    predictions = [PredictedTimes(model, sms) for model in models]
    counts = [len(model.frame) for model in models]
    weight = np.repeat(np.sqrt(np.mean(counts) / np.array(counts)), counts)  # every model has the same weight
    measured = np.concatenate([model.seconds for model in models])
    base = Transfer(
        coefficients=start,
        engine=ENGINE,
        sms=sms,
        bandwidth_share=gpu.bandwidth_bytes_per_s / DATA_SHEET_BANDWIDTH,
        flops_share=gpu.flops_per_s / DATA_SHEET_FLOPS,
        expert_compute=1.0,
        eight_bit=1.0,
        model_bar=0.0,
        other_bar=0.0,
        card_bar=CARD_BAR,
        source=gpu.source,
    )
    held = np.array([*(PRIOR[name] for name in NAMES), *(0.05 for _ in COMPUTE_TOKENS)])
    middle = packed(START)

    def residuals(x: Floats) -> Floats:
        transfer = replace(base, coefficients=unpacked(x))
        predicted = np.concatenate([model.seconds(transfer, gpu) for model in predictions])
        return np.concatenate([weight * np.log(predicted / measured), held * (x - middle)])

    best = least_squares(residuals, packed(start), loss="soft_l1", f_scale=ROBUST, max_nfev=STEPS)
    return replace(base, coefficients=unpacked(best.x))


def errors_of(transfer: Transfer, model: Measured, gpu: GpuSpec) -> Floats:
    """Relative errors (predicted / measured - 1), predicted as in the simulator."""
    latency = CostModel(model.spec, transfer.fit(model.spec, gpu))
    predicted = [price_s(latency, point) for point in model.frame.to_dict("records")]
    return np.asarray(predicted / model.seconds - 1)


def leave_one_out(
    models: Mapping[str, Measured], gpu: GpuSpec, sms: int, start: Coefficients, names: Iterable[str]
) -> dict[str, Floats]:
    """Errors on each named model, fitted to all the others."""
    errors = {}
    for name in names:
        others = [model for other, model in models.items() if other != name]
        errors[name] = errors_of(learn(others, gpu, sms, start), models[name], gpu)
    return errors


def with_others(dense: Transfer, models: Sequence[Measured], gpu: GpuSpec) -> Transfer:
    """Efficiencies with the figures of experts and of 8-bit products, each fitted where it stands alone."""
    experts = [model for model in models if model.spec.experts is not None and not model.spec.is_quantised]
    shares = [replace(dense, expert_compute=float(value)) for value in np.geomspace(0.25, 1.0, 29)]
    best = _best(shares, experts, gpu) if experts else dense
    eight = [model for model in models if model.spec.experts is None and model.spec.is_quantised]
    slower = [replace(best, eight_bit=float(value)) for value in np.geomspace(1.0, 2.0, 29)]
    return _best(slower, eight, gpu) if eight else best


def _best(tried: Sequence[Transfer], models: Sequence[Measured], gpu: GpuSpec) -> Transfer:
    """The one with the least mean error, every model having the same weight."""
    sizes = [np.mean([np.mean(np.abs(np.log1p(errors_of(one, model, gpu)))) for model in models]) for one in tried]
    return tried[int(np.argmin(sizes))]


def spread(errors: Floats) -> tuple[float, float, float]:
    """Median and 95th percentile of the absolute errors, and the median error with its sign."""
    size = np.abs(errors)
    return float(np.median(size)), float(np.percentile(size, 95)), float(np.median(errors))


def main(argv: Sequence[str]) -> None:
    """Fit, print the errors by model left out, and write the efficiencies if a file is named."""
    samples = load(Path(__file__).parents[1] / "calibration/data/h200")
    gpu, sms = gpu_spec(samples.header, "h200"), samples.header.device.multiprocessors
    assert sms is not None
    every_model = measured_models(samples)
    models = learned_from(every_model)
    whole = learn(models.values(), gpu, sms)
    left = leave_one_out(models, gpu, sms, whole.coefficients, models)
    every = np.concatenate(list(left.values()))
    others = {name: model for name, model in every_model.items() if name not in (*models, *LATER)}
    apart = {
        name: errors_of(with_others(whole, [m for other, m in others.items() if other != name], gpu), model, gpu)
        for name, model in others.items()
    }
    if argv:
        known = with_others(whole, list(others.values()), gpu)
        bar, other_bar = (
            float(np.percentile(np.abs(np.log1p(x)), 95)) for x in (every, np.concatenate([*apart.values()]))
        )
        text = json.dumps(asdict(replace(known, model_bar=bar, other_bar=other_bar)), indent=1)
        write_whole(Path(argv[0]), f"{text}\n".encode())
    print(f"{'left out':16} {'points':>6} {'median':>8} {'p95':>8} {'bias':>8}   learned from it too: median, p95")
    for name, errors in left.items():
        middle, high, bias = spread(errors)
        inside = spread(errors_of(whole, models[name], gpu))
        print(f"{name:16} {len(errors):6} {middle:8.1%} {high:8.1%} {bias:+8.1%}   {inside[0]:8.1%} {inside[1]:8.1%}")
    middle, high, bias = spread(every)
    print(f"{'all':16} {len(every):6} {middle:8.1%} {high:8.1%} {bias:+8.1%}")
    later = {name: errors_of(whole, every_model[name], gpu) for name in LATER}
    for name, errors in (apart | later | {"mixtures, 8 bits": np.concatenate([*apart.values()])}).items():
        middle, high, bias = spread(errors)
        print(f"{name:21} {len(errors):4} {middle:8.1%} {high:8.1%} {bias:+8.1%}")


if __name__ == "__main__":
    main(sys.argv[1:])
