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
from collections.abc import Container, Sequence
from importlib.resources import files

from pdvsim.sim.assembly import ServerParts, link_of, profile_of
from pdvsim.sim.config import Experiment, Hardware
from pdvsim.sim.prices.composed import ComposedProfile
from pdvsim.sim.trust import errors_of

PERCENTS = {"median": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0}


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


def gain_note(experiment: Experiment, gains: Sequence[float]) -> list[str]:
    """How far off such gains by drafting were on held-out pairs of its engine, as a line; none if not measured."""
    held_out = json.loads((files("pdvsim.calibration") / "data" / "speculation" / "ratios.json").read_text("utf-8"))
    name = f"{experiment.hardware.predicted_engine} {experiment.server.drafted_by}"
    if not gains or name not in held_out:
        return []
    low, high = held_out[name]["ratio_range"]
    doubt = "; the sign is not certain" if any(low <= gain <= high for gain in gains) else ""
    pairs = f"{held_out[name]['pairs']} held-out pairs of servers ({name})"
    return [f"gains by drafting, predicted over measured: {low:.2f} to {high:.2f} in 90% of {pairs}{doubt}"]


def _nearest_measured(metric: str, known: Container[str]) -> str:
    """The metric itself, or the nearest percentile whose error was measured."""
    which, _, rest = metric.partition("_")
    if metric in known or not which.startswith("p"):
        return metric
    percent = float(which[1:])
    return f"{min(PERCENTS, key=lambda name: abs(PERCENTS[name] - percent))}_{rest}"
