"""Fit of the power model, from launches without a pause: the draw of launches and the slowdown above the limit.

The draw, the limit and what exceeding it costs are fitted together: to how the times of launches grow, each predicted
from the draw of those before it, and to the power read where the clock stayed at its highest. Then, with these, the
energy of an 8-bit flop is fitted to the launches of models with 8-bit weights. Nothing is fitted on serving runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pdvsim.calibration.fit.points import Floats, price
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices.costs import CostModel, Price
from pdvsim.sim.prices.power import Draw, Power, PowerFit

if TYPE_CHECKING:
    import pandas as pd

FULL_CLOCK_SHARE = 0.995
SETTLING_S = 0.3
COLD_S = 0.025  # of work after a rest, in which the clock has not fallen yet
START = (700.0, 0.4, 0.5, 0.04)  # limit_w, slope, calm, settle_s
DRAWING = ("weight_bytes", "cache_bytes", "flops")
WATTS_WEIGHT = 0.1  # relative to the weight of an error in time


@dataclass(frozen=True)
class HeatedLaunch:
    """One launch of a run without a pause: its price, with the time alone on a cool GPU, and when it began."""

    price: Price
    seconds: float
    start_s: float
    mhz: float
    watts: float


def runs_of(frame: pd.DataFrame, models: dict[str, CostModel], eight_bits: bool = False) -> list[list[HeatedLaunch]]:
    """The heat section's groups of dense models with 16-bit or 8-bit weights, each in the order of its launches.

    Mixtures, whose bytes take less energy, are left out.
    """
    specs = {name: of.spec for name, of in models.items() if of.spec.experts is None}
    names = [n for n, s in specs.items() if (s.multiplies_8_bits if eight_bits else s.layer_bytes is None)]
    heat = frame[(frame["section"] == "heat") & frame["sm_mhz"].notna() & frame["model"].isin(names)]
    runs = []
    for (model, _), group in heat.groupby(["model", "group"], sort=True, observed=True):
        launches = [
            launch for _, part in group.groupby("member", sort=True) for launch in _launches(part, models[str(model)])
        ]
        runs.append(sorted(launches, key=lambda launch: launch.start_s))
    return runs


def _launches(part: pd.DataFrame, model: CostModel) -> Iterator[HeatedLaunch]:
    part = part.sort_values("repeat")
    seconds = part["seconds"].to_numpy(float)
    before_s = np.cumsum(seconds) - seconds
    cold_s = float(np.median(seconds[: max(1, int((before_s < COLD_S).sum()))]))
    cold = price(model, part.iloc[0]).at(float(part["context_total"].mean()))._replace(seconds=cold_s)
    columns = (part[name].to_numpy(float) for name in ("seconds", "start_s", "sm_mhz", "power_w"))
    for took_s, start_s, mhz, watts in zip(*columns, strict=True):
        yield HeatedLaunch(cold, float(took_s), float(start_s), float(mhz), float(watts))


def at_full_clock(points: pd.DataFrame, model: CostModel, power: Power) -> pd.DataFrame:
    """Points measured on a cool GPU with the `seconds` they would take if long ones did not lower the clock."""
    factor = power.fit.flop_factor(model.spec)
    seconds = [
        power.full_clock_s(
            price(model, point).at(float(point["context_total"]))._replace(seconds=point["seconds"]), factor
        )
        for point in points.to_dict("records")
    ]
    return points.assign(seconds=seconds)


@dataclass(frozen=True)
class PowerCalibration:
    """The fitted figures, how far the power read is off the draw, and how far settled launches are off their times."""

    fit: PowerFit
    power_error: Floats
    time_error: Floats


def fit_power(frame: pd.DataFrame, gpu: GpuSpec, models: dict[str, CostModel]) -> PowerCalibration | None:
    """The card's power, where samples determine it."""
    from scipy.optimize import least_squares, nnls

    runs = runs_of(frame, models)
    if not runs:
        return None
    highest = max(launch.mhz for run in runs for launch in run)
    steady = [run for run in runs if len({launch.price.flops for launch in run}) == 1]
    light = [late for run in steady if (late := _full_clock(run, highest))]
    if len(light) < 4:
        return None
    prices = [run[0].price for run in light]
    rates = np.array([[1.0, *(getattr(each, name) / each.seconds for name in DRAWING)] for each in prices])
    read_w = np.array([np.mean([launch.watts for launch in run]) for run in light])
    scale = rates.max(0)
    first = nnls(rates / scale, read_w)[0] / scale
    unit = np.maximum(first, 1.0 / scale)  # a watt at least

    def fitted(values: Floats) -> PowerFit:
        return PowerFit(*map(float, values[:4] * unit), *map(float, values[4:]))

    took_s = [np.array([launch.seconds for launch in run]) for run in runs]

    def residuals(values: Floats) -> Floats:
        power = Power(fitted(values), gpu.bandwidth_bytes_per_s)
        times = [np.log(_predicted(run, power) / s) / len(run) ** 0.5 for run, s in zip(runs, took_s, strict=True)]
        return np.concatenate([*times, WATTS_WEIGHT * np.log(rates @ (values[:4] * unit) / read_w)])

    start = np.array([*first / unit, *START])
    low, high = [0.0] * 4 + [1.0, 0.0, 0.0, 1e-3], [np.inf] * 4 + [1e5, 10.0, 1.0, 10.0]
    best = least_squares(
        residuals, np.clip(start, 1e-6, None), bounds=(low, high), x_scale=np.clip(start, 0.1, None), loss="soft_l1",
        f_scale=0.01, diff_step=[1e-3] * len(start),
    )  # fmt: skip
    fit = replace(fitted(best.x), flop8=_fit_8_bits(runs_of(frame, models, eight_bits=True), fitted(best.x), gpu))
    power = Power(fit, gpu.bandwidth_bytes_per_s)
    late = []
    for run in runs:
        settled = [i for i, launch in enumerate(run) if launch.start_s > SETTLING_S]
        predicted = _predicted(run, power)
        if settled:
            late.append(predicted[settled].sum() / sum(run[i].seconds for i in settled) - 1)
    return PowerCalibration(fit, rates @ (best.x[:4] * unit) / read_w - 1, np.array(late))


def _fit_8_bits(runs: Sequence[Sequence[HeatedLaunch]], fit: PowerFit, gpu: GpuSpec) -> float:
    """Energy of an 8-bit flop over that of a 16-bit one, by least mean errors in time; 1 without such runs."""
    from scipy.optimize import minimize_scalar

    if not runs:
        return 1.0
    power = Power(fit, gpu.bandwidth_bytes_per_s)

    def loss(factor: float) -> float:
        ratios = [_predicted(run, power, factor) / [launch.seconds for launch in run] for run in runs]
        return float(np.mean([np.mean(np.abs(np.log(ratio))) for ratio in ratios]))

    return float(minimize_scalar(loss, bounds=(0.1, 1.5), method="bounded").x)


def _full_clock(run: Sequence[HeatedLaunch], highest: float) -> list[HeatedLaunch]:
    """The settled launches of a run that never left the highest clock, else none."""
    late = [launch for launch in run if launch.start_s > SETTLING_S]
    return late if late and min(launch.mhz for launch in late) >= FULL_CLOCK_SHARE * highest else []


def _predicted(run: Sequence[HeatedLaunch], power: Power, flop_factor: float = 1.0) -> Floats:
    """Each launch's time, from those before it; its flops take `flop_factor` times the energy of 16-bit ones."""
    mean_w, seconds, price = power.fit.rest_w, list[float](), None
    draws: dict[int, tuple[float, Draw]] = {}  # of a run's one or two prices, with their seconds at full clock
    for launch in run:
        if launch.price is not price:
            price = launch.price
            if id(price) not in draws:
                solo_s = power.full_clock_s(price, flop_factor)
                draws[id(price)] = solo_s, power.draw(price._replace(seconds=solo_s), flop_factor)
            solo_s, draw = draws[id(price)]
        taken_s = power.taken_s(mean_w, draw, solo_s)
        seconds.append(taken_s)
        mean_w = power.mean_w(mean_w, taken_s, draw.watts)
    return np.array(seconds)
