"""Tune every architecture wherever architectures are compared: formula first, then simulations of what it leaves.

All commands decide by `decided`: tune every contender, then race the best on seeds that the search did not use.

At each place (a load, a pair, a GPU) every contender runs with the draft length that the formula ranks best. Those that
can still win go on, one kind of setting after the other: draft length, controller, batch limit, prompt tokens per
forward, and what only this architecture has. Of each kind the values next to the best are run (`Space.others`), until
none of them is better. Runs are short and share their requests. Settings close to the best of their contender get a
second seed. These seeds are used for nothing else, because the best of many looks too good on the seeds that selected
it. Among settings within the indifference the simpler is kept.

Limits: the search tests one kind of setting after another, so it can miss settings that are good only together.
Settings skipped for lack of budget are counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import Finals, race
from pdvsim.decide.runs import Bench, one_server, replications, shortened, without_band
from pdvsim.decide.space import PROMISING, Space, complexity
from pdvsim.sim.config import Experiment

FAR = 2.0  # architectures this many times worse than the best are not tuned further
FAR_CONTENDER = 1.25  # the same for fleets and drafters that are not always kept
NEAR_CONTENDER = 1.1  # the same once draft lengths are tuned: what is left to tune changes less
CLOSE = 1.02  # settings this many times worse than the best of their contender get a second seed
MOST_CLOSE = 3
SEEDS = 2
APART = 100_000  # offset of search seeds from those of the replications
SEARCH_RUN_SHARE = 0.25  # of what a final run measures

FINALISTS = 4  # architectures replicated, in addition to plain decoding
LENGTHENED = 2  # times that finalists may turn out to need longer runs

PlaceAndName = tuple[int, str]  # number of a place, name of a contender


@dataclass
class Search:
    """Candidates with their values in short runs of one seed."""

    goal: Goal
    space: Space
    indifference: float = 0.01
    budget: int | None = None  # simulations; None: unlimited
    contenders: tuple[Contender, ...] = ()  # compared instead of architectures
    always_finalists: frozenset[str] = frozenset()  # fleets that are always tuned and replicated
    figures: dict[Experiment, float] = field(default_factory=dict)
    rows: dict[Experiment, Row] = field(default_factory=dict)  # of the first seed
    skipped: int = 0

    def name(self, candidate: Experiment) -> str:
        """Name of the contender with these settings."""
        return contender_name(candidate, self.contenders)

    def starts(self, base: Experiment) -> list[Experiment]:
        """All contenders with their initial settings."""
        if not self.contenders:
            return self.space.starts(base)
        return [start for one in self.contenders for start in self.space.starts(one.of(base), (one.arch,))]

    def ranked(
        self, candidates: Iterable[Experiment], base: Experiment, figures: Mapping[Experiment, float] | None = None
    ) -> list[Experiment]:
        """The candidates, best first by `figures`, the simplest within the indifference; then those without."""
        figures, order = self.figures if figures is None else figures, list[Experiment]()
        every = dict.fromkeys(candidates)
        best = sorted(filter(figures.__contains__, every), key=lambda c: -self.goal.sign * figures[c])
        while best:
            top = figures[best[0]]
            alike = [c for c in best if abs(figures[c] - top) <= self.indifference * abs(top)]
            order += sorted(alike, key=lambda c: complexity(c, base))
            best = best[len(alike) :]
        return [*order, *(c for c in every if c not in figures)]

    def order(self, base: Experiment) -> list[Experiment]:
        """All candidates that have run, best first."""
        return self.ranked(self.figures, base)

    def best(self, candidates: Iterable[Experiment]) -> Experiment | None:
        """The candidate with the best value; None if none has run."""
        run = filter(self.figures.__contains__, candidates)
        return max(run, key=lambda c: self.goal.sign * self.figures[c], default=None)

    def worse(self, mine: Experiment, best: Experiment | None) -> float:
        """How many times worse a candidate is than the best; infinitely, if either has not run."""
        if best is None or mine not in self.figures or best not in self.figures:
            return math.inf
        sides = self.figures[mine], self.figures[best]
        less, more = sides if self.goal.sign > 0 else sides[::-1]
        return 1.0 if less == more else more / less if less > 0 else math.inf

    @property
    def far(self) -> float:
        """Contenders this many times worse than the best are not tuned further."""
        return FAR_CONTENDER if self.contenders else FAR


def most_runs(space: Space, places: int, contenders: int | None = None) -> int:
    """Estimated upper limit of simulations for tuning at `places`, for all architectures or that many `contenders`."""
    variants = PROMISING + len(space.controllers) if "num_speculative_tokens" in space.kinds() else 1
    variants += len(space.max_num_seqs) + len(space.max_num_batched_tokens) + 3 * space.own
    return SEEDS * places * (contenders or len(space.archs)) * variants


@dataclass
class _Tuning:
    """The settings tried of each contender at each place, the best so far first."""

    search: Search
    places: Sequence[Experiment]
    bench: Bench
    tried: dict[PlaceAndName, list[Experiment]] = field(default_factory=dict)

    def run(self, variants: Mapping[PlaceAndName, Sequence[Experiment]]) -> bool:
        """Run further settings on the first seed, within the budget; returns whether any is new."""
        search = self.search
        new = {
            key: [v for v in dict.fromkeys(mine) if v not in self.tried.get(key, ())] for key, mine in variants.items()
        }
        if not any(new.values()):
            return False
        # alternately, so that a limited budget affects every contender equally
        turns = dict.fromkeys(c for turn in zip_longest(*new.values()) for c in turn if c is not None)
        runs = [candidate for candidate in turns if candidate not in search.figures]
        if search.budget is not None:  # the first is always run
            room = max(0 if search.figures else 1, search.budget - self.bench.runs)
            search.skipped += len(runs[room:])
            runs = runs[:room]
        for candidate, row in zip(runs, self.bench.rows([_short(c)[0] for c in runs]), strict=True):
            search.figures[candidate], search.rows[candidate] = search.goal.value(row), row
        for key, mine in new.items():
            self.tried[key] = search.ranked([*self.tried.get(key, ()), *mine], self.places[key[0]])
        return True

    def near(self, limit: float) -> list[PlaceAndName]:
        """The contenders at most `limit` times worse than the best at their place, and those that are always kept."""
        every = [
            [c for (at, _), mine in self.tried.items() if at == here for c in mine] for here in range(len(self.places))
        ]
        best, always = list(map(self.search.best, every)), self.search.always_finalists
        return [
            (at, name)
            for (at, name), mine in self.tried.items()
            if name in always or self.search.worse(mine[0], best[at]) <= limit
        ]

    def variants(self, settings: Sequence[Experiment], kind: str) -> list[Experiment]:
        """Settings of a kind next to the best of some; no batch limit that is never reached."""
        best = self.search.best(settings)
        if best is None:
            return []
        others = self.search.space.others(best, kind)
        if kind == "max_num_seqs":
            peak = int(self.search.rows[best]["max_concurrent_requests"])
            others = others if peak >= best.server.max_num_seqs else [c for c in others if c.server.max_num_seqs < peak]
        return others

    def settle(self) -> None:
        """Put the best of each contender first, by all seeds where several are close on the first."""
        search, close = self.search, dict[PlaceAndName, list[Experiment]]()
        for key in self.near(NEAR_CONTENDER):
            best = search.best(self.tried[key])
            mine = [c for c in self.tried[key] if search.worse(c, best) <= CLOSE][:MOST_CLOSE]
            close |= {key: mine} if len(mine) > 1 else {}
        again = dict.fromkeys(c for mine in close.values() for c in mine)
        if search.budget is not None and self.bench.runs + len(again) > search.budget:
            return
        rows = self.bench.rows([_short(c)[1] for c in again])
        second = {c: search.goal.value(row) for c, row in zip(again, rows, strict=True)}
        means = {c: (search.figures[c] + value) / SEEDS for c, value in second.items()}
        for key, mine in close.items():
            best = search.ranked(mine, self.places[key[0]], means)[0]
            self.tried[key] = [best, *(c for c in self.tried[key] if c != best)]


def tuned(
    search: Search, places: Sequence[Experiment], bench: Bench, alone: bool = False
) -> list[dict[str, Experiment]]:
    """The tuned contenders of each place that can run there, by name, best first.

    With `alone` only the architecture of the place's experiment.
    """
    tuning, starts = _Tuning(search, places, bench), dict[PlaceAndName, list[Experiment]]()
    for at, base in enumerate(places):
        here = search.space.starts(base, (base.arch,)) if alone else search.starts(base)
        if not here:
            raise ValueError("no architecture can run with these options")
        starts |= {(at, search.name(start)): [start] for start in here}
    tuning.run(starts)
    kinds, far = search.space.kinds(), search.far
    if "num_speculative_tokens" in kinds:  # those that the formula gave too many drafts are not out yet
        near = tuning.near(far)
        tuning.run({key: search.space.fewest(mine[0]) for key, mine in tuning.tried.items() if key not in near})
    for kind in kinds:
        ahead = {key: tuning.tried[key][:1] for key in tuning.near(far)}
        while tuning.run({key: tuning.variants(mine, kind) for key, mine in ahead.items()}):
            ahead = {key: tuning.tried[key] for key in ahead}
        far = NEAR_CONTENDER if search.contenders else far
    tuning.settle()
    best: list[dict[str, Experiment]] = []
    for at, base in enumerate(places):
        mine = [candidates[0] for (where, _), candidates in tuning.tried.items() if where == at]
        best.append({search.name(candidate): candidate for candidate in search.ranked(mine, base)})
    return best


def _short(candidate: Experiment) -> list[Experiment]:
    """A candidate's runs in the search."""
    short = shortened(one_server(candidate), SEARCH_RUN_SHARE)
    other = replace(short, traffic=replace(short.traffic, seed=short.traffic.seed + APART))
    return replications(without_band(other), SEEDS)


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
    sized = []
    for place in map(search.goal.prepared, places):  # with the length that the first contender needs by formula
        one = next((bench.sized(start) for start in search.starts(place)), place)
        sized.append(with_length(place, length_of(one)) if one.scoring.steady else place)
    best = tuned(search, sized, bench)
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


def _finalists(search: Search, best: Mapping[str, Experiment], all_compete: bool) -> dict[str, Experiment]:
    """The best few that are near enough to be tuned, plain decoding at its best, and fleets that are kept; or all."""
    plain = [name for name, candidate in best.items() if candidate.arch == "autoregressive"]
    first = next(iter(best))
    near = [name for name in best if name == first or search.worse(best[name], best[first]) <= search.far]
    names = dict.fromkeys([*(best if all_compete else near[:FINALISTS]), *plain[:1]])
    names |= dict.fromkeys(name for name in best if name in search.always_finalists)
    return {name: best[name] for name in names}
