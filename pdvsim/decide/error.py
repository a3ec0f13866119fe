"""Error of a predicted lead of one architecture over another, beyond the spread over seeds.

It was measured as the ratio of two servers' metrics, predicted over real, for all pairs on the same requests in a
closed loop. `pdvsim validate` prints it, and how often the order was right; `--write` stores it with the profile. A
lead must exceed the 95th percentile, rounded up to a tenth of a percent. A profile that was not validated uses the
H200's. Under service levels the error is that of the metric whose level binds.

If forward times are predicted, a lead within their error bar is not significant either. On the profile of an engine the
error of a lead is that of the ratio of two measured servers of one card, engine and model (`prices.steps`): most of
the error of either is in both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Sequence
from importlib.resources import files
from typing import Any, NamedTuple

from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.sim.assembly import ServerParts, link_of, profile_of
from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.prices.composed import ComposedProfile
from pdvsim.sim.trust import errors_of, groups

PERCENTS = {"median": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


class Ranged(NamedTuple):
    """A predicted figure, and the ends between which seeds and the model's error together leave it."""

    mean: float
    low: float
    high: float

    def text(self, unit: str = "", decimals: int = 1) -> str:
        """`9.1 ms (7.7 to 10.9)`; the mean alone where nothing is uncertain."""
        if math.isnan(self.mean):
            return "-"
        mean, *ends = (f"{end:.{decimals}f}" for end in self)
        mean += f" {unit}" if unit else ""
        return mean if ends[0] == ends[1] else f"{mean} ({ends[0]} to {ends[1]})"


def ranged(mean: float, half_width: float, error: float) -> Ranged:
    """The range of a figure that is not negative, from independent errors: over seeds, and of the model."""
    off = math.hypot(0.0 if math.isnan(half_width) else half_width, error * mean)
    return Ranged(mean, max(0.0, mean - off), mean + off)


def ranged_of(experiment: Experiment, rows: Sequence[Row], metric: str) -> Ranged:
    """The range of a metric over replications."""
    held = interval((row[metric] for row in rows), within=(r[f"{metric}_se"] for r in rows if f"{metric}_se" in r))
    return ranged(held.mean, held.half_width, model_error(experiment, rows, metric))


def model_error(experiment: Experiment, rows: Sequence[Row], metric: str) -> float:
    """Relative error of a predicted metric: of comparable real runs, and of forward times that are predicted."""
    errors, row = errors_of(experiment.hardware), rows[0]
    alike = groups(
        experiment,
        float(row["total_input_tokens"]) / max(float(row["completed"]), 1e-9),
        float(row.get("outside_measured_share", 0.0) or 0.0),
    )
    real = errors.bar("any machine", alike, metric) if errors is not None else None
    return math.hypot(real or 0.0, ServerParts(experiment).bar)


def lead_error(experiment: Experiment, metric: str) -> float:
    """Relative lead in a metric that must be exceeded on the experiment's GPU."""
    errors = errors_of(experiment.hardware)
    if errors is None or _nearest_measured(metric, errors.leads) not in errors.leads:
        errors = errors_of(Hardware())
    assert errors is not None, "the H200's errors are shipped"
    pair, profile = experiment.pair, profile_of(experiment)
    off = errors.leads[_nearest_measured(metric, errors.leads)]
    if isinstance(profile, ComposedProfile) and profile.error is not None:
        return max(off, profile.error.ratio)
    # of both models: even if it does not draft, others do
    known = profile.covering(pair, link_of(experiment))
    if experiment.hardware.cards:
        off = max(off, ServerParts(experiment).bar)
    return max(off, *(known.bar(model) for model in (pair.draft, pair.target)))


def held_out_gains(experiment: Experiment) -> dict[str, Any] | None:
    """How far off the gains of such drafts were on held-out pairs of its engine; None if they were not measured."""
    known = json.loads((files("pdvsim.calibration") / "data" / "speculation" / "ratios.json").read_text("utf-8"))
    name = f"{experiment.hardware.predicted_engine} {experiment.server.drafted_by}"
    return {"name": name, **known[name]} if name in known else None


def gain_ranged(experiment: Experiment, gain: Interval) -> Ranged:
    """The range of a gain by drafting: over seeds, and by held-out pairs, else by the error of leads."""
    known, off = held_out_gains(experiment), lead_error(experiment, "output_throughput")
    low, high = (1 - off, 1 + off) if known is None else known["ratio_range"]
    seeds = 0.0 if math.isnan(gain.half_width) else gain.half_width / gain.mean
    down, up = (math.hypot(seeds, max(0.0, math.log(end))) for end in (high, 1 / low))
    return Ranged(gain.mean, gain.mean * math.exp(-down), gain.mean * math.exp(up))


def gain_note(experiment: Experiment, gains: Sequence[float]) -> list[str]:
    """How far off such gains by drafting were on held-out pairs of its engine, as a line; none if not measured."""
    known = held_out_gains(experiment)
    if known is None and gains and experiment.hardware.predicted_engine != "pdvsim":
        return ["gains by such drafts were not tested on held-out pairs of servers: the range is that of other leads"]
    if not gains or known is None:
        return []
    low, high = known["ratio_range"]
    doubt = "; the sign is not certain" if any(low <= gain <= high for gain in gains) else ""
    pairs = f"{known['pairs']} held-out pairs of servers ({known['name']})"
    return [f"gains by drafting, predicted over measured: {low:.2f} to {high:.2f} in 90% of {pairs}{doubt}"]


def _nearest_measured(metric: str, known: Container[str]) -> str:
    """The metric itself, or the nearest percentile whose error was measured."""
    which, _, rest = metric.partition("_")
    if metric in known or not which.startswith("p"):
        return metric
    percent = float(which[1:])
    return f"{min(PERCENTS, key=lambda name: abs(PERCENTS[name] - percent))}_{rest}"
