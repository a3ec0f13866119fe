"""The decision at every place: tune every contender, race the best on seeds that the search did not use.

All commands use `decided`, so that the same question has the same answer in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pdvsim.bench.length import length_of, mean_turns, with_length
from pdvsim.decide.formula import Formula
from pdvsim.decide.race import Finals, race
from pdvsim.decide.runs import Bench, load_axis, replications
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.steady import rate_length

FINALISTS = 4  # architectures replicated, in addition to plain decoding
LENGTHENED = 2  # times that finalists may turn out to need longer runs


def decided(
    search: Search,
    places: Sequence[Experiment],
    bench: Bench,
    num_runs: int,
    budget: int | None = None,
    all_compete: bool = False,
) -> Iterator[tuple[int, dict[str, Experiment], Finals]]:
    """Yields the number of a place with all tuned settings and the verdict, again after seeds were added.

    `budget` limits the simulations for added seeds. With `all_compete` all contenders are finalists with the same
    number of seeds. On Ctrl-C the finished runs are decided, then it is raised.
    """
    best = tuned(search, [_sized(search, place, bench) for place in places], bench)
    finals = [_finalists(search, here, all_compete) for here in best]
    for _ in range(LENGTHENED):
        finals = [bench.lengthened(here) for here in finals]
    interrupted: KeyboardInterrupt | None = None
    try:  # of several places together, so that all cores are busy
        if len(finals) > 1:
            bench.rows([run for here in finals for mine in here.values() for run in replications(mine, num_runs)])
    except KeyboardInterrupt as stop:
        interrupted = stop
    for at, here in enumerate(finals):
        if interrupted is not None:
            if not all(bench.known(replications(mine, num_runs)) for mine in here.values()):
                continue
            budget = 0
        for state in race(here, search.goal, bench, num_runs, search.indifference, budget, all_compete):
            yield at, best[at], state
    if interrupted is not None:
        raise interrupted


def _sized(search: Search, place: Experiment, bench: Bench) -> Experiment:
    """A place with the length that its load needs by formula; at a request rate the finalists' runs lengthen it."""
    place = search.goal.prepared(place)
    starts = search.starts(place)
    sized = formula_sized(starts[0], bench) if starts else place
    return with_length(place, length_of(sized)) if sized.scoring.steady else place


def formula_sized(candidate: Experiment, bench: Bench) -> Experiment:
    """The experiment with the length that its load needs by formula, or the given one."""
    traffic = candidate.traffic
    if bench.prompts is not None or load_axis(traffic) != "load" or traffic.use_trace_timestamps:
        return bench.sized(candidate)
    service_s = Formula(candidate).answer_s(candidate.longest_draft)
    return with_length(candidate, rate_length(traffic, mean_turns(traffic), service_s))


def _finalists(search: Search, best: Mapping[str, Experiment], all_compete: bool) -> dict[str, Experiment]:
    """The best few that are near enough to be tuned, plain decoding at its best, and fleets that are kept; or all."""
    plain = [name for name, candidate in best.items() if candidate.arch == "autoregressive"]
    first = next(iter(best.values()))
    near = [name for name, mine in best.items() if mine == first or not search.far(mine, first)]
    names = dict.fromkeys([*(best if all_compete else near[:FINALISTS]), *plain[:1]])
    names |= dict.fromkeys(name for name in best if name in search.always_finalists)
    return {name: best[name] for name in names}
