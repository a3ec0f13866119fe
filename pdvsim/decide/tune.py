"""Tune every architecture wherever architectures are compared: formula first, then simulations of what it leaves.

All commands decide by `decided`: tune every contender, then race the best on seeds that the search did not use.

At each place (a load, a pair, a GPU) every contender runs with the draft length that the formula ranks best. Those that
can still win try, in one batch, the lengths that the formula's error cannot exclude, and those next to the best. Then
come the controllers, batch limits and prompt tokens per forward (the next fewer and more, and further ones while that
is better), and settings that only this architecture has. Runs are short and share their requests. Settings close to the
best of their contender get a second seed. These seeds are used for nothing else, because the best of many looks too
good on the seeds that selected it. Among settings within the indifference the simpler is kept.

Limits: the search tests one kind of setting after another, so it can miss settings that are good only together.
Settings skipped for lack of budget are counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pdvsim.bench.length import length_of, mean_turns, with_length
from pdvsim.bench.pool import Row
from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import Finals, race
from pdvsim.decide.runs import Bench, load_axis, one_server, replications, shortened, without_band
from pdvsim.decide.space import PROMISING, Space, complexity
from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.steady import rate_length

FAR = 2.0  # architectures this many times worse than the best are not tuned further
FAR_CONTENDER = 1.25  # the same for fleets and drafters that are not always kept
NEAR_CONTENDER = 1.1  # the same once draft lengths are tuned: what is left to tune changes less
CLOSE = 1.02  # settings this many times worse than the best of their contender get a second seed
CLIMBED = {  # kinds tested from best to next
    "drafts": "num_speculative_tokens", "batches": "max_num_seqs", "prompts": "max_num_batched_tokens",
}  # fmt: skip
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
        self, candidates: Sequence[Experiment], base: Experiment, figures: Mapping[Experiment, float] | None = None
    ) -> list[Experiment]:
        """The candidates that have run, best first by `figures`; simplest first within the indifference."""
        figures = self.figures if figures is None else figures
        best = sorted(
            filter(figures.__contains__, dict.fromkeys(candidates)), key=lambda c: -self.goal.sign * figures[c]
        )
        order: list[Experiment] = []
        while best:
            top = figures[best[0]]
            alike = [c for c in best if abs(figures[c] - top) <= self.indifference * abs(top)]
            order += sorted(alike, key=lambda c: complexity(c, base))
            best = best[len(alike) :]
        return order

    def best(self, candidates: Sequence[Experiment]) -> Experiment | None:
        """The candidate with the best value; None if none has run."""
        run = [candidate for candidate in candidates if candidate in self.figures]
        return max(run, key=lambda c: self.goal.sign * self.figures[c], default=None)

    def worse(self, mine: Experiment, best: Experiment) -> float:
        """How many times worse a candidate is than the best."""
        sides = self.figures[mine], self.figures[best]
        less, more = sides if self.goal.sign > 0 else sides[::-1]
        return 1.0 if less == more else more / less if less > 0 else float("inf")

    def far(self, mine: Experiment, best: Experiment) -> bool:
        """Whether a candidate is too far from the best to be tuned further, or has not run."""
        known = mine in self.figures and best in self.figures
        return not known or self.worse(mine, best) > (FAR_CONTENDER if self.contenders else FAR)


def most_runs(space: Space, places: int, contenders: int | None = None) -> int:
    """Estimated upper limit of simulations for tuning at `places`, for all architectures or that many `contenders`."""
    variants = PROMISING + len(space.controllers) if "drafts" in space.steps() else 1
    variants += len(space.max_num_seqs) + len(space.max_num_batched_tokens) + 3 * space.own
    return SEEDS * places * (contenders or len(space.archs)) * variants


def tuned(
    search: Search, places: Sequence[Experiment], bench: Bench, alone: bool = False
) -> list[dict[str, Experiment]]:
    """The tuned contenders of each place that can run there, by name, best first.

    With `alone` only the architecture of the place's experiment.
    """
    tried: dict[PlaceAndName, list[Experiment]] = {}  # the setting that leads its contender comes first
    for at, base in enumerate(places):
        starts = search.space.starts(base, (base.arch,)) if alone else search.starts(base)
        if not starts:
            raise ValueError("no architecture can run with these options")
        tried |= {(at, search.name(start)): [start] for start in starts}
    far = FAR_CONTENDER if search.contenders else FAR
    _run(search, tried, bench)
    if "drafts" in search.space.steps():  # those that the formula gave too many drafts are not out yet
        fewest = {key: search.space.fewest(mine[0]) for key, mine in tried.items() if _far(search, tried, key, far)}
        _extend(search, tried, fewest, places, bench)
    for step in search.space.steps():
        near = [key for key in tried if not _far(search, tried, key, far)]
        _extend(search, tried, {key: _variants(search, step, tried[key][0]) for key in near}, places, bench)
        while step in CLIMBED:
            further = {key: _further(search, step, tried[key]) for key in near if tried[key][0] in search.figures}
            if not _extend(search, tried, further, places, bench):
                break
        far = NEAR_CONTENDER if search.contenders else far
    _settle(search, tried, places, bench)
    best: list[dict[str, Experiment]] = []
    for at, base in enumerate(places):
        mine = [candidates[0] for (where, _), candidates in tried.items() if where == at]
        order = [*search.ranked(mine, base), *(c for c in mine if c not in search.figures)]
        best.append({search.name(candidate): candidate for candidate in order})
    return best


def _extend(
    search: Search,
    tried: dict[PlaceAndName, list[Experiment]],
    variants: Mapping[PlaceAndName, Sequence[Experiment]],
    places: Sequence[Experiment],
    bench: Bench,
) -> bool:
    """Run further settings of contenders, and put the best of each first; returns whether any setting is new."""
    new = {key: [v for v in dict.fromkeys(mine) if v not in tried[key]] for key, mine in variants.items()}
    if not any(new.values()):
        return False
    _run(search, new, bench)
    for key, mine in new.items():
        tried[key] += mine
        order = search.ranked(tried[key], places[key[0]])
        tried[key] = [*order, *(c for c in tried[key] if c not in search.figures)]
    return True


def _variants(search: Search, step: str, candidate: Experiment) -> list[Experiment]:
    if step in ("batches", "prompts"):
        return _further(search, step, [candidate])
    variants: list[Experiment] = getattr(search.space, step)(candidate)
    return variants


def _further(search: Search, step: str, tried: Sequence[Experiment]) -> list[Experiment]:
    """The settings of a kind next to the best one that ran; no batch limit that is never reached."""
    best = search.best([c for c in tried if step != "drafts" or c.server.controller == "fixed"])
    if best is None:
        return []
    next_ones = search.space.neighbours(best, CLIMBED[step])
    peak = int(search.rows[best]["max_concurrent_requests"])
    if step != "batches" or peak >= best.server.max_num_seqs:
        return next_ones
    return [one for one in next_ones if one.server.max_num_seqs < peak]


def _far(search: Search, tried: Mapping[PlaceAndName, Sequence[Experiment]], key: PlaceAndName, limit: float) -> bool:
    """Whether a contender is more than `limit` times worse than the best at its place."""
    if key[1] in search.always_finalists:
        return False
    mine, best = tried[key][0], search.best([c for (at, _), rivals in tried.items() if at == key[0] for c in rivals])
    return mine not in search.figures or best is None or search.worse(mine, best) > limit


def _run(search: Search, groups: Mapping[PlaceAndName, Sequence[Experiment]], bench: Bench) -> None:
    """Run candidates without a value on the first seed, within the budget; the first is always run."""
    # alternately, so that a limited budget affects every group equally
    turns = dict.fromkeys(c for turn in zip_longest(*groups.values()) for c in turn if c is not None)
    new = [candidate for candidate in turns if candidate not in search.figures]
    if search.budget is not None:
        room = max(0 if search.figures else 1, search.budget - bench.runs)
        new, left = new[:room], new[room:]
        search.skipped += len(left)
    for candidate, row in zip(new, bench.rows([_short(c)[0] for c in new]), strict=True):
        search.figures[candidate] = search.goal.value(row)
        search.rows[candidate] = row


def _settle(
    search: Search, tried: dict[PlaceAndName, list[Experiment]], places: Sequence[Experiment], bench: Bench
) -> None:
    """Put the best of each contender first, by all seeds where several are close on the first."""
    close: dict[PlaceAndName, list[Experiment]] = {}
    for key, mine in tried.items():
        best = search.best(mine)
        if best is not None and not _far(search, tried, key, NEAR_CONTENDER):
            close[key] = [c for c in mine if c in search.figures and search.worse(c, best) <= CLOSE][:MOST_CLOSE]
    rivals = {key: mine for key, mine in close.items() if len(mine) > 1}
    again = dict.fromkeys(c for mine in rivals.values() for c in mine)
    if search.budget is not None and bench.runs + (SEEDS - 1) * len(again) > search.budget:
        return
    rows = iter(bench.rows([run for c in again for run in _short(c)[1:]]))
    means = {
        c: (search.figures[c] + sum(search.goal.value(next(rows)) for _ in range(SEEDS - 1))) / SEEDS for c in again
    }
    for key, mine in rivals.items():
        best = search.ranked(mine, places[key[0]], means)[0]
        tried[key] = [best, *(c for c in tried[key] if c != best)]


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
