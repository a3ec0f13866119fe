"""A comparison over pairs and cards with every architecture at its own best settings, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pdvsim.common.outcomes import Row
from pdvsim.decide.contest import Contest, corrected, exceeds
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import NAMES, Goal
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.text import lead_text, positive, threshold_text
from pdvsim.decide.tune import Search, tuned
from pdvsim.decide.verdict import chosen, judged
from pdvsim.sim.config import Experiment
from pdvsim.study.compare import Comparison, Seat, differences
from pdvsim.study.stats import Interval
from pdvsim.view.table import grid

if TYPE_CHECKING:
    import pandas as pd

Spot = tuple[str, str, float]  # pair, card, load


def at_their_best(
    comparison: Comparison, space: Space, goal: Goal, bench: Bench, warmup_share: float, indifference: float
) -> Comparison:
    """The same comparison with each architecture's best settings at each pair, card and load."""
    places = {seat[:3]: experiment for seat, experiment in _seats(comparison).items()}
    best = tuned(Search(goal, space, warmup_share, indifference), list(places.values()), bench)
    servers = {
        (*place, arch): mine.server for place, here in zip(places, best, strict=True) for arch, mine in here.items()
    }
    return replace(comparison, servers=servers)


def settings(comparison: Comparison) -> dict[Seat, str]:
    """What each architecture runs with, in words."""
    return {seat: ", ".join(settings_text(experiment)) for seat, experiment in _seats(comparison).items()}


def contests(
    comparison: Comparison, frame: pd.DataFrame, goal: Goal, indifference: float
) -> dict[Spot, tuple[str, Contest]]:
    """At each pair, card and load where all ran: which architecture to take for the goal, and how sure that is."""
    if not len(frame):
        return {}
    seats = _seats(comparison)
    spots = list(dict.fromkeys(seat[:3] for seat in seats))
    comparisons = len(spots) * (len(comparison.archs) - 1)
    found = {}
    for spot in spots:
        pair, gpu, load = spot
        here = frame[(frame["pair"] == pair) & (frame["gpu"] == gpu) & (frame["load"] == load)]
        rows: dict[str, list[Row]] = {}
        for row in here.to_dict("records"):
            rows.setdefault(row["arch"], []).append({str(name): value for name, value in row.items()})
        candidates = {arch: seats[*spot, arch] for arch in rows}
        if len(here) == len(comparison.archs) * comparison.num_runs and len(rows) > 1:
            held = judged(rows, goal, seats[*spot, comparison.archs[0]], indifference, comparisons)
            found[spot] = chosen(held, candidates, comparison.base), held
    return found


def paired(comparison: Comparison, frame: pd.DataFrame, metrics: Sequence[str]) -> list[dict[str, Any]]:
    """Differences against the first architecture, and whether each counts: the chance of error is spread over all."""
    if len(comparison.archs) < 2 or not len(frame):
        return []
    seats = _seats(comparison)
    spots = {seat[:3] for seat in seats}
    confidence = corrected(len(metrics) * len(spots) * (len(comparison.archs) - 1))
    found = []
    for difference in differences(frame, metrics, comparison.archs[0], confidence):
        here = seats[difference["pair"], difference["gpu"], difference["load"], difference["arch"]]
        error, apart = lead_error(here, difference["metric"]), difference["relative"]
        told = exceeds(Interval(abs(apart.mean), apart.half_width, apart.n), error)
        found.append(difference | {"error": error, "confidence": confidence, "told_apart": told})
    return found


def best_text(found: Mapping[Spot, tuple[str, Contest]], goal: Goal, indifference: float) -> str:
    """A row a pair, card and load: which architecture to take for the goal, and how sure that is."""
    rows = []
    for (pair, gpu, load), (arch, held) in found.items():
        behind = (
            "" if held.second is None or arch != held.best else f"{lead_text(held, held.second)} over {held.second}"
        )
        alike = [name for name in (held.best, *held.unsure) if name != arch]
        state = f"not told apart from {', '.join(alike)}" if held.unsure else ""
        rows.append([pair, gpu, f"{load:g}", arch, positive(held.values[arch]), behind, state])
    confidence = next(iter(found.values()))[1].confidence
    return "\n".join(
        [
            f"Best by {NAMES[goal.objective]}",
            grid(["pair", "gpu", "load", "arch", NAMES[goal.objective], "ahead by", ""], rows),
            f"paired by seed, {confidence:.2%} confidence each, 95% for all together; "
            + threshold_text((held for _, held in found.values()), indifference),
        ]
    )


def _seats(comparison: Comparison) -> dict[Seat, Experiment]:
    """The first run of everyone everywhere."""
    return {
        (pair, gpu, point.load, point.experiment.arch): point.experiment
        for pair, gpu in comparison.places()
        for point in comparison.points(pair, gpu)
        if point.run == 0
    }
