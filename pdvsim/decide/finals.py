"""Replications of the best settings on seeds the search has not seen, more of them while that would tell.

Where the best leads another by more than what does not count, but seeds scatter too much to be sure, seeds are added:
as many again, up to `MOST_TIMES` those asked for. A lead that is too small to count gets no more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdvsim.common.outcomes import Row
from pdvsim.decide.contest import Contest, contest
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, replications
from pdvsim.sim.config import Experiment

MOST_TIMES = 4


@dataclass(frozen=True)
class Finals:
    """Everyone's replications, and the contest among those that could be chosen."""

    rows: dict[Experiment, list[Row]]
    held: Contest

    def tied(self) -> list[Experiment]:
        """The best, and whoever is not told apart from it."""
        return [candidate for candidate in self.rows if candidate.arch in (self.held.best, *self.held.unsure)]


def replicated(
    candidates: Sequence[Experiment],
    goal: Goal,
    bench: Bench,
    num_runs: int,
    threshold: float,
    budget: int | None = None,
) -> Finals:
    """Run every candidate, one of each architecture, on the same seeds, and compare; `budget` is of simulations."""
    seeds = num_runs
    while True:
        rows = bench.rows([run for candidate in candidates for run in replications(candidate, seeds)])
        found = {c: rows[i * seeds : (i + 1) * seeds] for i, c in enumerate(candidates)}
        able = {c: mine for c, mine in found.items() if goal.met(mine)} or found
        figures = {str(c.arch): [goal.value(row) for row in mine] for c, mine in able.items()}
        held = contest(figures, goal.sign, threshold=threshold)
        finals = Finals(found, held)
        more = len(candidates) * seeds
        would_tell = any(held.leads[other].mean > threshold for other in held.unsure)
        if not would_tell or 2 * seeds > MOST_TIMES * num_runs or (budget is not None and bench.runs + more > budget):
            return finals
        seeds *= 2
