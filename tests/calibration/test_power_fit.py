"""The power fit: figures that made launches come back from them."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

import pdvsim.calibration
from pdvsim.calibration.fit.points import price
from pdvsim.calibration.fit.power import fit_power
from pdvsim.profiler.grid import GridPoint
from pdvsim.profiler.heat import groups
from pdvsim.profiler.samples import load
from pdvsim.sim.models.presets import MODELS
from pdvsim.sim.models.presets import model as named
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.power import Power, PowerFit

H200 = GPUS["h200"]
TRUE = PowerFit(
    rest_w=190.0, weight_j=8e-11, cache_j=1.1e-10, flop_j=1.1e-12, limit_w=720.0, slope=0.4, calm=0.6, settle_s=0.03
)


def heated(name: str, drafter: bool, rng: np.random.Generator, flop8: float = 1.0) -> pd.DataFrame:
    """The heat section of one model on a card with the true figures."""
    spec, power = named(name), Power(TRUE, H200.bandwidth_bytes_per_s)
    latency = CostModel(spec, ForwardTerms.roofline(spec, H200))
    rows = []
    for group, (point,) in enumerate(groups(drafter)[: 5 if drafter else 12]):
        context = point.rows * point.context
        shape = pd.Series(point.as_dict())
        alone = price(latency, shape).at(context)
        cold_s = (1.1 + rng.random()) * max(alone.bytes / H200.bandwidth_bytes_per_s, alone.flops / H200.flops_per_s)
        draw = power.draw(alone._replace(seconds=cold_s), flop8)
        mean_w, since_s, repeat = TRUE.rest_w, 0.0, 0
        while since_s < 0.6:
            taken_s = power.taken_s(mean_w, draw, cold_s) * float(np.exp(0.002 * rng.standard_normal()))
            mean_w = power.mean_w(mean_w, taken_s, draw.watts)
            mhz = 1980.0 if mean_w <= TRUE.limit_w else 1980 * TRUE.limit_w / mean_w
            rows.append(
                point.as_dict() | {"section": "heat", "model": name, "group": group, "member": 0, "repeat": repeat,
                                   "context_total": context, "seconds": taken_s, "start_s": since_s, "sm_mhz": mhz,
                                   "power_w": min(mean_w, TRUE.limit_w)}
            )  # fmt: skip
            since_s, repeat = since_s + taken_s, repeat + 1
    return pd.DataFrame(rows)


def three_heated(rng: np.random.Generator) -> tuple[pd.DataFrame, dict[str, CostModel]]:
    """Samples of three models, one of them a drafter, and their costs."""
    names = {"llama-2-7b": False, "tinyllama-1.1b": True, "llama-3.1-8b": False}
    frame = pd.concat([heated(name, drafter, rng) for name, drafter in names.items()])
    return frame, {name: CostModel(MODELS[name], ForwardTerms.roofline(MODELS[name], H200)) for name in names}


def test_the_figures_come_back() -> None:
    frame, models = three_heated(np.random.default_rng(0))
    power = fit_power(frame, H200, models)
    for name in ("rest_w", "weight_j", "flop_j", "limit_w", "slope", "settle_s"):
        assert getattr(power.fit, name) == pytest.approx(getattr(TRUE, name), rel=0.1), name
    assert np.median(np.abs(power.time_error)) < 0.005


def test_the_shipped_samples_know_groups_by_their_numbers() -> None:
    """A part is resumed by them, so none may ever stand for something else; of some parts the last ones are missing."""
    frame = load(Path(pdvsim.calibration.__file__).parent / "data" / "h200").frame
    heat = frame[frame["section"] == "heat"]
    names = [part.name for part in fields(GridPoint)]
    most = {}
    for model, part in heat.groupby("model", observed=True):
        planned = groups(drafter=bool((part["kind"] == "draft").any()))
        for (group, member), rows in part.groupby(["group", "member"]):
            assert GridPoint(**{name: rows[name].iloc[0] for name in names}) == planned[group][member]
        most[model] = part["group"].max() + 1 == len(planned)
    assert sum(most.values()) >= 9


def test_the_energy_of_8_bit_flops_comes_back() -> None:
    """From launches of a model with 8-bit weights, whose flops take 0.6 of the energy; the rest is as without them."""
    rng = np.random.default_rng(0)
    frame, models = three_heated(rng)
    eight_bits = heated("llama-3.1-8b-fp8", False, rng, flop8=0.6)
    spec = named("llama-3.1-8b-fp8")
    models[spec.name] = CostModel(spec, ForwardTerms.roofline(spec, H200))
    without, power = fit_power(frame, H200, models), fit_power(pd.concat([frame, eight_bits]), H200, models)
    assert power.fit.flop8 == pytest.approx(0.6, abs=0.05)
    assert without.fit == replace(power.fit, flop8=1.0)
