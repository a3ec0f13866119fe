"""A comparison over pairs and cards with every architecture at its own best settings, place by place."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pdvsim.decide.contest import LEAST_SEEDS
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal, Objective
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.tune import Search, tuned
from pdvsim.study.compare import Comparison, Seat
from pdvsim.study.sweep import Point

TOLD_BY: dict[str, Objective] = {"output_throughput": "throughput", "mean_e2el_ms": "e2el"}  # tails as the mean


def at_their_best(comparison: Comparison, space: Space, goal: Goal, bench: Bench) -> Comparison:
    """The same comparison with each architecture's best settings at each pair, card and load."""
    places = {seat[:3]: point.experiment for seat, point in _seats(comparison)}
    found = Search(goal, space, 0.0)
    best = tuned(found, list(places.values()), bench)
    servers = {
        (*place, arch): mine.server for place, here in zip(places, best, strict=True) for arch, mine in here.items()
    }
    return replace(comparison, servers=servers)


def settings(comparison: Comparison) -> dict[Seat, str]:
    """What each architecture runs with, in words."""
    return {seat: ", ".join(settings_text(point.experiment)) for seat, point in _seats(comparison)}


def judged(comparison: Comparison, difference: dict[str, Any]) -> dict[str, Any]:
    """A paired difference with whether it counts: enough seeds, and more than the profile's own error."""
    [(_, point), *_] = [
        found for found in _seats(comparison) if found[0][:2] == (difference["pair"], difference["gpu"])
    ]
    error = lead_error(point.experiment, TOLD_BY.get(difference["metric"], "e2el"))
    apart = difference["relative"]
    counts = comparison.num_runs >= LEAST_SEEDS and abs(apart.mean) - apart.half_width > error
    return difference | {"error": error, "told_apart": bool(counts and not math.isnan(apart.half_width))}


def _seats(comparison: Comparison) -> list[tuple[Seat, Point]]:
    """The first run of everyone everywhere."""
    return [
        ((pair, gpu, point.load, point.experiment.arch), point)
        for pair, gpu in comparison.places()
        for point in comparison.points(pair, gpu)
        if point.run == 0
    ]
