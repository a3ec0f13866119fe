"""The final comparison: tune every architecture, replicate the best on seeds that the search did not use, choose one.

All commands use `decided`, so that the same question has the same answer in all of them. If the mean lead exceeds the
threshold but its interval is too wide, these two get more seeds: as many again, up to `MOST_TIMES` the requested
number. The same holds if a lead above the indifference leaves the choice open. A lead that is significant or too small
gets no more seeds. Nor do runs with fewer seeds than significance needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.decide.contest import LEAST_SEEDS, Contest, contest
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, kept_up, replications
from pdvsim.decide.space import complexity
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Experiment

MOST_TIMES = 4
FINALISTS = 4  # architectures replicated, in addition to plain decoding


@dataclass(frozen=True)
class Finals:
    """All candidates and their replications by name, and the contest among those that can be chosen."""

    candidates: dict[str, Experiment]
    rows: dict[str, list[Row]]
    contest: Contest


def decided(
    search: Search,
    places: Sequence[Experiment],
    bench: Bench,
    num_runs: int,
    budget: int | None = None,
    all_compete: bool = False,
) -> Iterator[tuple[int, dict[str, Experiment], Finals]]:
    """Yields the number of a place with all tuned settings and the finals, again after seeds were added.

    `budget` limits the simulations for added seeds. With `all_compete` all contenders are finalists with the same
    number of seeds. On Ctrl-C the finished runs are decided, then it is raised.
    """
    best = tuned(search, [_sized(search, place, bench) for place in places], bench)
    finals = [bench.lengthened(_finalists(search, here, all_compete)) for here in best]
    interrupted: KeyboardInterrupt | None = None
    try:
        bench.rows([run for here in finals for mine in here.values() for run in replications(mine, num_runs)])
    except KeyboardInterrupt as stop:
        interrupted = stop
    for at, here in enumerate(finals):
        if interrupted is not None:
            if not all(bench.known(replications(mine, num_runs)) for mine in here.values()):
                continue
            budget = 0
        for state in replicated(here, search.goal, bench, num_runs, search.indifference, budget, all_compete):
            yield at, best[at], state
    if interrupted is not None:
        raise interrupted


def _sized(search: Search, place: Experiment, bench: Bench) -> Experiment:
    """A place with the length that its load needs on the first of the contenders."""
    place = search.goal.prepared(place)
    starts = search.starts(place)
    sized = bench.sized(starts[0]) if starts else place
    return with_length(place, length_of(sized)) if sized.scoring.steady else place


def _finalists(search: Search, best: Mapping[str, Experiment], all_compete: bool) -> dict[str, Experiment]:
    """The best few, plain decoding at its best, and fleets that are always kept; or all."""
    plain = [name for name, candidate in best.items() if candidate.arch == "autoregressive"]
    names = dict.fromkeys([*list(best)[: None if all_compete else FINALISTS], *plain[:1]])
    names |= dict.fromkeys(name for name in best if name in search.always_finalists)
    return {name: best[name] for name in names}


def replicated(
    candidates: dict[str, Experiment],
    goal: Goal,
    bench: Bench,
    num_runs: int,
    indifference: float,
    budget: int | None = None,
    equally: bool = False,
) -> Iterator[Finals]:
    """Run all candidates, by name, on the same seeds and compare; then add seeds where they help.

    The last yield is the answer. `budget` limits the simulations. With `equally` all have the same number of seeds.
    """
    seeds, active = num_runs, candidates
    rows: dict[str, list[Row]] = {}
    while True:
        rows |= bench.replicated(active, seeds)
        result = contest_of(rows, goal, candidates, indifference)
        yield Finals(candidates, dict(rows), result)
        open_ = {other for other in result.unsure if result.leads[other].mean > result.thresholds[other]}
        open_ |= {other for other in result.alike if result.leads[other].mean > indifference}
        active = {name: c for name, c in candidates.items() if equally or name in (result.best, *open_)}
        more = len(active) * seeds
        spent = 2 * seeds > MOST_TIMES * num_runs or (budget is not None and bench.runs + more > budget)
        if not open_ or spent or num_runs < LEAST_SEEDS:
            return
        seeds *= 2


def contest_of(
    rows: Mapping[str, Sequence[Row]],
    goal: Goal,
    places: Mapping[str, Experiment],
    indifference: float,
    comparisons: int | None = None,
) -> Contest:
    """The contest by the goal's metric among the candidates that meet the levels and keep up.

    If none meets the levels, among those that keep up; if none does, among all. `places` give each contender's pair
    and GPU.
    """
    up = {name: mine for name, mine in rows.items() if kept_up(mine)}
    able = {name: mine for name, mine in up.items() if goal.met(mine)} or up or rows
    values = {name: [goal.value(row) for row in mine] for name, mine in able.items()}
    errors = {name: lead_error(places[name], goal.error_metric(mine)) for name, mine in able.items()}
    return contest(values, goal.sign, comparisons, indifference, errors)


def chosen(result: Contest, candidates: Mapping[str, Experiment], base: Experiment) -> str:
    """The best, or the simplest of those without significant difference over seeds and indifference.

    The profile's error is not used here, as it may favour either side.
    """
    return min((result.best, *result.alike), key=lambda name: complexity(candidates[name], base))
