"""Replications of the best settings on seeds the search has not seen, more of them while that would tell.

Where the best leads another by more than what does not count, but seeds scatter too much to be sure, seeds are added:
as many again, up to `MOST_TIMES` those asked for. So they are where a lead over the indifference leaves open which one
to take. A lead that is too small to count gets no more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdvsim.common.outcomes import Row
from pdvsim.decide.contest import Contest
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, replications
from pdvsim.decide.verdict import chosen, judged
from pdvsim.sim.config import Experiment

MOST_TIMES = 4


@dataclass(frozen=True)
class Finals:
    """Everyone's replications, and the contest among those that could be chosen."""

    rows: dict[Experiment, list[Row]]
    held: Contest

    def chosen(self, base: Experiment) -> Experiment:
        """The one to take."""
        candidates = {str(candidate.arch): candidate for candidate in self.rows}
        return candidates[chosen(self.held, candidates, base)]


def replicated(
    candidates: Sequence[Experiment],
    goal: Goal,
    bench: Bench,
    num_runs: int,
    indifference: float,
    budget: int | None = None,
) -> Finals:
    """Run every candidate, one of each architecture, on the same seeds, and compare; `budget` is of simulations."""
    seeds = num_runs
    while True:
        rows = bench.rows([run for candidate in candidates for run in replications(candidate, seeds)])
        found = {c: rows[i * seeds : (i + 1) * seeds] for i, c in enumerate(candidates)}
        held = judged({str(c.arch): mine for c, mine in found.items()}, goal, candidates[0], indifference)
        more = len(candidates) * seeds
        would_tell = any(held.leads[other].mean > held.thresholds[other] for other in held.unsure)
        would_tell |= any(held.leads[other].mean > indifference for other in held.alike)
        if not would_tell or 2 * seeds > MOST_TIMES * num_runs or (budget is not None and bench.runs + more > budget):
            return Finals(found, held)
        seeds *= 2
