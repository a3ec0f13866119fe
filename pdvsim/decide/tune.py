"""Tune every architecture wherever architectures are compared.

At each place (a load, a pair, a GPU) the search first tests the draft lengths that the formula ranks best, and further
ones while shorter or longer is better. Then come the controllers, batch limits, prompt tokens per forward (the next
fewer and more, and further ones while that is better), and settings that only this architecture has. Draft lengths and
batch limits depend on each other, so the best two are kept between these. Runs are short and share their requests.
Their seeds are used for nothing else, because the best of many looks too good on the seeds that selected it. Settings
far worse than the best of their kind on the first seed get no second one. Among settings within the indifference the
simpler is kept.

Limits: the search tests one kind of setting after another, so it can miss settings that are good only together.
Settings skipped for lack of budget are counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pdvsim.bench.stats import interval
from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, one_server, replications, shortened, without_band
from pdvsim.decide.space import PROMISING, Space, complexity
from pdvsim.sim.config import Experiment

FAR = 2.0  # architectures this many times worse than the best are not tuned further
FAR_CONTENDER = 1.25  # the same for fleets and drafters that are not always kept
NEAR_CONTENDER = 1.1  # the same once draft lengths and batch limits are tuned: what is left to tune changes less
BEHIND = 1.05  # settings this many times worse than the best on the first seed get no other
KEPT_SETTINGS = 2  # of an architecture, with their draft lengths
CLIMBED = {"drafts": "num_speculative_tokens", "prompts": "max_num_batched_tokens"}  # kinds tested from best to next
SEEDS = 2
APART = 100_000  # offset of search seeds from those of the replications
SEARCH_RUN_SHARE = 0.25  # of what a final run measures

PlaceAndName = tuple[int, str]  # number of a place, name of a contender


@dataclass
class Search:
    """Candidates with their values in short runs."""

    goal: Goal
    space: Space
    indifference: float = 0.01
    budget: int | None = None  # simulations; None: unlimited
    contenders: tuple[Contender, ...] = ()  # compared instead of architectures
    always_finalists: frozenset[str] = frozenset()  # fleets that are always tuned and replicated
    figures: dict[Experiment, float] = field(default_factory=dict)
    firsts: dict[Experiment, float] = field(default_factory=dict)  # values on the first seed
    peaks: dict[Experiment, int] = field(default_factory=dict)  # most concurrent requests in the system
    skipped: int = 0

    def name(self, candidate: Experiment) -> str:
        """Name of the contender with these settings."""
        return contender_name(candidate, self.contenders)

    def starts(self, base: Experiment) -> list[Experiment]:
        """All contenders with their initial settings."""
        if not self.contenders:
            return self.space.starts(base)
        spaces = ((one, replace(self.space, archs=(one.arch,))) for one in self.contenders)
        return [start for one, space in spaces for start in space.starts(one.of(base))]

    def ranked(self, candidates: Sequence[Experiment], base: Experiment) -> list[Experiment]:
        """The candidates that have run, best first; simplest first within the indifference."""
        run = [candidate for candidate in dict.fromkeys(candidates) if candidate in self.figures]
        best = sorted(run, key=lambda c: -self.goal.sign * self.figures[c])
        order: list[Experiment] = []
        while best:
            top = self.figures[best[0]]
            alike = [c for c in best if abs(self.figures[c] - top) <= self.indifference * abs(top)]
            order += sorted(alike, key=lambda c: complexity(c, base))
            best = best[len(alike) :]
        return order

    def best(self, figures: Mapping[Experiment, float], candidates: Sequence[Experiment]) -> Experiment:
        """The candidate with the best of these values."""
        return max((c for c in candidates if c in figures), key=lambda c: self.goal.sign * figures[c])

    def worse(self, mine: float, best: float) -> float:
        """How many times worse a value is than the best."""
        more, less = (best, mine) if self.goal.sign > 0 else (mine, best)
        return 1.0 if mine == best else more / less if less > 0 else float("inf")


def most_runs(space: Space, places: int, contenders: int | None = None) -> int:
    """Estimated upper limit of simulations for tuning at `places`, for all architectures or that many `contenders`."""
    variants = PROMISING + len(space.controllers) if "drafts" in space.steps() else 1
    variants += KEPT_SETTINGS * (len(space.max_num_seqs) + len(space.max_num_batched_tokens) + 3 * space.own)
    return SEEDS * places * (contenders or len(space.archs)) * variants


def tuned(
    search: Search, places: Sequence[Experiment], bench: Bench, alone: bool = False
) -> list[dict[str, Experiment]]:
    """The tuned contenders of each place that can run there, by name, best first.

    With `alone` only the architecture of the place's experiment.
    """
    active: dict[PlaceAndName, list[Experiment]] = {}
    for at, base in enumerate(places):
        starts = replace(search.space, archs=(base.arch,)).starts(base) if alone else search.starts(base)
        if not starts:
            raise ValueError("no architecture can run with these options")
        active |= {(at, search.name(start)): [start] for start in starts}
    far = FAR_CONTENDER if search.contenders else FAR
    _start(search, active, bench, far)
    for step in search.space.steps():
        tried = {
            key: list(dict.fromkeys(variant for candidate in mine for variant in _variants(search, step, candidate)))
            for key, mine in active.items()
            if not _far(search, active, key, far)
        }
        _try(search, [[*active[key], *variants] for key, variants in tried.items()], bench, BEHIND)
        if step in CLIMBED:
            _climb(search, step, tried, bench)
        most = KEPT_SETTINGS if step == "drafts" else 1
        for key, variants in tried.items():
            active[key] = search.ranked([*active[key], *variants], places[key[0]])[:most] or active[key]
        if search.contenders and step != "drafts":
            far = NEAR_CONTENDER
    best: list[dict[str, Experiment]] = []
    for at, base in enumerate(places):
        mine = [candidates[0] for (where, _), candidates in active.items() if where == at]
        order = [*search.ranked(mine, base), *(c for c in mine if c not in search.figures)]
        best.append({search.name(candidate): candidate for candidate in order})
    return best


def _start(search: Search, active: dict[PlaceAndName, list[Experiment]], bench: Bench, far: float) -> None:
    """Run the initial settings; contenders that are far worse also test the shortest draft length."""
    _try(search, _by_place(active), bench, far)
    distant = [key for key in active if "drafts" in search.space.steps() and _far(search, active, key, FAR)]
    fewer = {key: search.space.fewest(active[key][0]) for key in distant if active[key][0] in search.figures}
    _try(search, _by_place({key: [*active[key], *fewer.get(key, [])] for key in active}), bench, far)
    for key, variants in fewer.items():
        active[key] = [search.best(search.figures, [*active[key], *variants])]


def _by_place(active: Mapping[PlaceAndName, Sequence[Experiment]]) -> list[list[Experiment]]:
    places = dict.fromkeys(at for at, _ in active)
    return [[c for (where, _), mine in active.items() if where == at for c in mine] for at in places]


def _variants(search: Search, step: str, candidate: Experiment) -> list[Experiment]:
    variants: list[Experiment] = getattr(search.space, step)(candidate)
    if step == "batches":  # limits that are never reached make no difference
        peak, limit = search.peaks.get(candidate, 0), candidate.server.max_num_seqs
        variants = (
            variants if peak >= limit else [variant for variant in variants if variant.server.max_num_seqs < peak]
        )
    return variants


def _climb(search: Search, step: str, tried: dict[PlaceAndName, list[Experiment]], bench: Bench) -> None:
    """Test neighbours of the best setting of a kind until all have been tested; adds to `tried`."""
    while True:
        further = {}
        for key, variants in tried.items():
            fixed = [
                w for w in variants if w in search.figures and (step != "drafts" or w.server.controller == "fixed")
            ]
            if fixed:
                best = search.best(search.figures, fixed)
                further[key] = [
                    variant for variant in search.space.neighbours(best, CLIMBED[step]) if variant not in variants
                ]
        if not any(further.values()):
            return
        _try(search, [[*tried[key], *variants] for key, variants in further.items()], bench, BEHIND)
        for key, variants in further.items():
            tried[key] += variants


def _far(search: Search, active: Mapping[PlaceAndName, Sequence[Experiment]], key: PlaceAndName, limit: float) -> bool:
    """Whether a contender is more than `limit` times worse than the best at its place."""
    if key[1] in search.always_finalists:
        return False
    rivals = [mine[0] for (at, _), mine in active.items() if at == key[0] and mine[0] in search.figures]
    mine = active[key][0]
    if mine not in search.figures or not rivals:
        return True
    return search.worse(search.figures[mine], search.figures[search.best(search.figures, rivals)]) > limit


def _try(search: Search, groups: Sequence[Sequence[Experiment]], bench: Bench, behind: float) -> None:
    """Run candidates without a value, within the budget; the first is always run.

    All run on the first seed. Those more than `behind` times worse than the best of their group get no further seeds:
    their value is the best's, worse by the same factor.
    """
    # alternately, so that a limited budget affects every group equally
    turns = dict.fromkeys(c for turn in zip_longest(*groups) for c in turn if c is not None)
    new = [candidate for candidate in turns if candidate not in search.figures]
    if search.budget is not None:
        room = max(0 if search.figures else 1, (search.budget - bench.runs) // SEEDS)
        new, left = new[:room], new[room:]
        search.skipped += len(left)
    for candidate, row in zip(new, bench.rows([_short(c)[0] for c in new]), strict=True):
        search.firsts[candidate] = search.goal.value(row)
        search.peaks[candidate] = int(row["max_concurrent_requests"])
    best = {c: search.best(search.firsts, group) for group in groups for c in group if c in search.firsts}
    near = [c for c in new if search.worse(search.firsts[c], search.firsts[best[c]]) <= behind]
    rest = bench.rows([run for c in near for run in _short(c)[1:]])
    for at, c in enumerate(near):
        others = rest[at * (SEEDS - 1) : (at + 1) * (SEEDS - 1)]
        search.figures[c] = interval([search.firsts[c], *map(search.goal.value, others)]).mean
        search.peaks[c] = max(search.peaks[c], *(int(row["max_concurrent_requests"]) for row in others))
    for c in new:
        if c not in near:
            search.figures[c] = search.figures[best[c]] * search.firsts[c] / search.firsts[best[c]]


def _short(candidate: Experiment) -> list[Experiment]:
    """A candidate's runs in the search."""
    short = shortened(one_server(candidate), SEARCH_RUN_SHARE)
    other = replace(short, traffic=replace(short.traffic, seed=short.traffic.seed + APART))
    return replications(without_band(other), SEEDS)
