"""A comparison over pairs and cards with every architecture at its own best settings, place by place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdvsim.decide.contest import LEAST_SEEDS, Contest, corrected, exceeds
from pdvsim.decide.error import lead_error
from pdvsim.decide.finals import Decision, decided
from pdvsim.decide.goal import NAMES, Goal
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.text import lead_text, positive, threshold_text
from pdvsim.decide.tune import Search
from pdvsim.decide.verdict import judged
from pdvsim.sim.config import Experiment
from pdvsim.study.compare import Comparison, Seat, Spot, differences, run_comparison
from pdvsim.study.stats import Interval
from pdvsim.view.table import grid

if TYPE_CHECKING:
    import pandas as pd


@dataclass
class Compared:
    """A comparison with each architecture's best settings, as far as it got, and who is best at each place."""

    comparison: Comparison
    goal: Goal
    indifference: float
    decisions: dict[Spot, Decision] = field(default_factory=dict)
    frame: pd.DataFrame | None = None  # one row a run; None where nothing was decided
    interrupted: bool = False

    def contests(self) -> dict[Spot, tuple[str, Contest]]:
        """Which architecture to take for the goal, and how sure that is; the chance of error is spread over all."""
        comparisons = len(_spots(self.comparison)) * (len(self.comparison.archs) - 1)
        found = {}
        for spot, decision in self.decisions.items():
            rows = {str(candidate.arch): mine for candidate, mine in decision.finals.rows.items()}
            if len(rows) > 1:
                held = judged(rows, self.goal, decision.place, self.indifference, comparisons)
                found[spot] = str(decision.chosen.arch), held
        return found


def compare(
    comparison: Comparison, space: Space, goal: Goal, bench: Bench, warmup_share: float, indifference: float
) -> Compared:
    """Hold the contest at each pair, card and load, and run whoever is not in it too. Ctrl-C keeps what is done."""
    found = Compared(comparison, goal, indifference)
    places = _spots(comparison)
    search = Search(goal, space, warmup_share, indifference)
    try:
        for at, decision in decided(search, list(places.values()), bench, comparison.num_runs):
            found.decisions[list(places)[at]] = decision
            found.comparison = _with_settings(comparison, found.decisions)
        bench.rows([point.experiment for place in comparison.places() for point in found.comparison.points(*place)])
    except KeyboardInterrupt:
        found.interrupted = True
    if found.decisions:
        found.frame = run_comparison(found.comparison, bench.frame, settings(found.comparison))
    return found


def _with_settings(comparison: Comparison, decisions: Mapping[Spot, Decision]) -> Comparison:
    servers = {(*spot, arch): mine.server for spot, d in decisions.items() for arch, mine in d.settings.items()}
    seeds = {spot: len(next(iter(d.finals.rows.values()))) for spot, d in decisions.items()}
    return replace(comparison, servers=servers, seeds=seeds)


def settings(comparison: Comparison) -> dict[Seat, str]:
    """What each architecture runs with, in words."""
    return {seat: ", ".join(settings_text(experiment)) for seat, experiment in _seats(comparison).items()}


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
        verdict = {"told_apart": told, "enough_runs": apart.n >= LEAST_SEEDS}
        found.append(difference | {"error": error, "confidence": confidence} | verdict)
    return found


def best_text(found: Mapping[Spot, tuple[str, Contest]], goal: Goal, indifference: float) -> str:
    """A row a pair, card and load: which architecture to take for the goal, and how sure that is."""
    rows = []
    for (pair, gpu, load), (arch, held) in found.items():
        behind = (
            "" if held.second is None or arch != held.best else f"{lead_text(held, held.second)} over {held.second}"
        )
        alike = [name for name in (held.best, *held.unsure) if name != arch]
        state = f"not told apart from {', '.join(alike)}" if held.unsure and held.seeds >= LEAST_SEEDS else ""
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


def _spots(comparison: Comparison) -> dict[Spot, Experiment]:
    """Every pair, card and load."""
    return {seat[:3]: experiment for seat, experiment in _seats(comparison).items()}


def _seats(comparison: Comparison) -> dict[Seat, Experiment]:
    """The first run of everyone everywhere."""
    return {
        (pair, gpu, point.load, point.experiment.arch): point.experiment
        for pair, gpu in comparison.places()
        for point in comparison.points(pair, gpu)
        if point.run == 0
    }
