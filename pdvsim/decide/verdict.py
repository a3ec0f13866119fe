"""One rule for every command: who could be chosen, who of them is best and how sure, and which one to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pdvsim.common.outcomes import Row
from pdvsim.decide.contest import Contest, contest
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import kept_up
from pdvsim.decide.space import complexity
from pdvsim.sim.config import Experiment


def judged(
    rows: Mapping[str, Sequence[Row]],
    goal: Goal,
    place: Experiment | Mapping[str, Experiment],
    indifference: float,
    comparisons: int | None = None,
    costs: Mapping[str, float] | None = None,
) -> Contest:
    """The contest by the goal's figure of those who could be chosen: they meet the levels and keep up.

    Where nobody meets the levels, all who keep up; where nobody does, all. `place` gives the pair and the card, or
    each contender's own. With `costs` the figure counts by what each costs.
    """
    up = {name: mine for name, mine in rows.items() if kept_up(mine)}
    able = {name: mine for name, mine in up.items() if goal.met(mine)} or up or rows
    values = {name: [goal.value(row) / (costs[name] if costs else 1.0) for row in mine] for name, mine in able.items()}
    places = place if isinstance(place, Mapping) else dict.fromkeys(able, place)
    errors = {name: lead_error(places[name], goal.told_by(mine)) for name, mine in able.items()}
    return contest(values, goal.sign, comparisons, indifference, errors)


def chosen(held: Contest, candidates: Mapping[str, Experiment], base: Experiment) -> str:
    """The best, or the simplest of those that are alike by seeds and indifference.

    The profile's error is no reason to pass over the best: it may err either way.
    """
    return min((held.best, *held.alike), key=lambda name: complexity(candidates[name], base))
