"""Every architecture at its own best settings, wherever architectures are compared.

At each place (a load, a pair, a card) an architecture tries the draft lengths that the formula finds most promising,
and on from there while shorter or longer ones are better; the controllers; then batch limits, then prompt tokens a
forward, then what it alone has. After each kind the best two go on. Runs are short, and all meet the same requests, of
seeds that no later figure uses: picking the best of many flatters it, on those seeds only. What is far behind the best
of its kind on the first seed runs no second. Figures nearer than the indifference are alike, and the simpler settings
go on.

What it does not promise: the best of all combinations. Settings are tried one kind after another, so a pair of settings
that is good only together can be missed. What a budget of simulations leaves no room for is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from pdvsim.decide.drafters import Drafted
from pdvsim.decide.fleet import Fleet, contender
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, least_prompts, replications, without_band
from pdvsim.decide.space import PROMISING, Space, complexity
from pdvsim.sim.config import Experiment
from pdvsim.study.stats import interval

FAR = 2.0  # an architecture this many times worse than the best is not tuned any further
FAR_WAY = 1.25  # the same of a fleet or a drafter, unless it stays in
BEHIND = 1.1  # settings this many times worse than the best of their kind on the first seed run no other
KEPT = 2  # settings of an architecture that go on from one kind to the next
SEEDS = 2
APART = 100_000  # search seeds are this far from those of the replications
SHORT = 0.25  # length of a search run, as a share of the final ones

Seated = tuple[int, str]  # the number of a place, and who competes there


@dataclass
class Search:
    """Candidates with their figures in short runs."""

    goal: Goal
    space: Space
    warmup_share: float
    indifference: float = 0.01
    budget: int | None = None  # simulations; None: as many as it takes
    ways: tuple[Fleet | Drafted, ...] = ()  # who competes in place of architectures
    staying: frozenset[str] = frozenset()  # fleets that are tuned and replicated however far behind they are
    figures: dict[Experiment, float] = field(default_factory=dict)
    firsts: dict[Experiment, float] = field(default_factory=dict)  # on the first seed alone
    peaks: dict[Experiment, int] = field(default_factory=dict)  # most requests in the system at once
    skipped: int = 0

    def name(self, candidate: Experiment) -> str:
        """Who competes with these settings."""
        return contender(candidate, self.ways)

    def starts(self, base: Experiment) -> list[Experiment]:
        """Everyone who competes, with the settings to start from."""
        if not self.ways:
            return self.space.starts(base)
        spaces = ((way, replace(self.space, archs=(way.arch,))) for way in self.ways)
        return [start for way, space in spaces for start in space.starts(way.of(base))]

    def ranked(self, candidates: Sequence[Experiment], base: Experiment) -> list[Experiment]:
        """Those of the candidates that have run, best first; of those alike the simplest first."""
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
        """The one of the candidates with the best of these figures."""
        return max((c for c in candidates if c in figures), key=lambda c: self.goal.sign * figures[c])

    def worse(self, mine: float, best: float) -> float:
        """How many times worse a figure is than the best."""
        more, less = (best, mine) if self.goal.sign > 0 else (mine, best)
        return 1.0 if mine == best else more / less if less > 0 else float("inf")


def most_runs(space: Space, places: int, contenders: int | None = None) -> int:
    """Simulations that tuning at so many places takes, more or less at the most; of all architectures or so many."""
    ways = PROMISING + len(space.controllers) if "drafts" in space.steps() else 1
    ways += KEPT * (len(space.max_num_seqs) + len(space.max_num_batched_tokens) + 3 * space.own)
    return SEEDS * places * (contenders or len(space.archs)) * ways


def tuned(
    found: Search, places: Sequence[Experiment], bench: Bench, alone: bool = False
) -> list[dict[str, Experiment]]:
    """For each place, everyone who can run there at its best, by name, the best first.

    `alone`: at each place only the architecture that its experiment has.
    """
    going: dict[Seated, list[Experiment]] = {}
    for at, base in enumerate(places):
        starts = replace(found.space, archs=(base.arch,)).starts(base) if alone else found.starts(base)
        if not starts:
            raise ValueError("no architecture can run with these options")
        going |= {(at, found.name(start)): [start] for start in starts}
    _start(found, going, bench)
    far = FAR_WAY if found.ways else FAR
    for step in found.space.steps():
        tried = {
            key: list(dict.fromkeys(way for candidate in mine for way in _ways(found, step, candidate)))
            for key, mine in going.items()
            if not _far(found, going, key, far)
        }
        _try(found, [[*going[key], *ways] for key, ways in tried.items()], bench, BEHIND)
        if step == "drafts":
            _climb(found, tried, bench)
        for key, ways in tried.items():
            going[key] = found.ranked([*going[key], *ways], places[key[0]])[:KEPT] or going[key]
    best: list[dict[str, Experiment]] = []
    for at, base in enumerate(places):
        mine = [candidates[0] for (where, _), candidates in going.items() if where == at]
        order = [*found.ranked(mine, base), *(c for c in mine if c not in found.figures)]
        best.append({found.name(candidate): candidate for candidate in order})
    return best


def _start(found: Search, going: dict[Seated, list[Experiment]], bench: Bench) -> None:
    """Run the starts; who is far behind with the drafts of the formula starts with the fewest, if those are better."""
    _try(found, _by_place(going), bench, FAR)
    behind = [key for key in going if "drafts" in found.space.steps() and _far(found, going, key, FAR)]
    fewer = {key: found.space.fewest(going[key][0]) for key in behind if going[key][0] in found.figures}
    _try(found, _by_place({key: [*going[key], *fewer.get(key, [])] for key in going}), bench, FAR)
    for key, ways in fewer.items():
        going[key] = [found.best(found.figures, [*going[key], *ways])]


def _by_place(going: Mapping[Seated, Sequence[Experiment]]) -> list[list[Experiment]]:
    places = dict.fromkeys(at for at, _ in going)
    return [[c for (where, _), mine in going.items() if where == at for c in mine] for at in places]


def _ways(found: Search, step: str, candidate: Experiment) -> list[Experiment]:
    ways: list[Experiment] = getattr(found.space, step)(candidate)
    if step == "batches":  # between limits that are never reached there is no difference
        peak, limit = found.peaks.get(candidate, 0), candidate.server.max_num_seqs
        ways = ways if peak >= limit else [way for way in ways if way.server.max_num_seqs < peak]
    return ways


def _climb(found: Search, tried: dict[Seated, list[Experiment]], bench: Bench) -> None:
    """While the best draft length of an architecture has a neighbour that was not tried, try that: adds to `tried`."""
    while True:
        further = {}
        for key, ways in tried.items():
            fixed = [way for way in ways if way in found.figures and way.server.controller == "fixed"]
            if fixed:
                best = found.best(found.figures, fixed)
                further[key] = [way for way in found.space.beside(best) if way not in ways]
        if not any(further.values()):
            return
        _try(found, [[*tried[key], *ways] for key, ways in further.items()], bench, BEHIND)
        for key, ways in further.items():
            tried[key] += ways


def _far(found: Search, going: Mapping[Seated, Sequence[Experiment]], key: Seated, limit: float) -> bool:
    """Whether someone is out of the running at its place: so many times worse than the best."""
    if key[1] in found.staying:
        return False
    rivals = [mine[0] for (at, _), mine in going.items() if at == key[0] and mine[0] in found.figures]
    mine = going[key][0]
    if mine not in found.figures or not rivals:
        return True
    return found.worse(found.figures[mine], found.figures[found.best(found.figures, rivals)]) > limit


def _try(found: Search, groups: Sequence[Sequence[Experiment]], bench: Bench, behind: float) -> None:
    """Run what has no figure yet, as far as the budget goes; the first of all is always run.

    On the first seed everyone runs. Who is then more than `behind` times worse than the best of its group is left at
    that: its figure is the best's, worse by as much as it was there.
    """
    # by turns, so that a budget that runs out costs every group alike
    turns = dict.fromkeys(c for turn in zip_longest(*groups) for c in turn if c is not None)
    new = [candidate for candidate in turns if candidate not in found.figures]
    if found.budget is not None:
        room = max(0 if found.figures else 1, (found.budget - bench.runs) // SEEDS)
        new, left = new[:room], new[room:]
        found.skipped += len(left)
    for candidate, row in zip(new, bench.rows([_short(found, c)[0] for c in new]), strict=True):
        found.firsts[candidate] = found.goal.value(row)
        found.peaks[candidate] = int(row["max_concurrent_requests"])
    best = {c: found.best(found.firsts, group) for group in groups for c in group if c in found.firsts}
    near = [c for c in new if found.worse(found.firsts[c], found.firsts[best[c]]) <= behind]
    rest = bench.rows([run for c in near for run in _short(found, c)[1:]])
    for at, c in enumerate(near):
        others = rest[at * (SEEDS - 1) : (at + 1) * (SEEDS - 1)]
        found.figures[c] = interval([found.firsts[c], *map(found.goal.value, others)]).mean
        found.peaks[c] = max(found.peaks[c], *(int(row["max_concurrent_requests"]) for row in others))
    for c in new:
        if c not in near:
            found.figures[c] = found.figures[best[c]] * found.firsts[c] / found.firsts[best[c]]


def _short(found: Search, candidate: Experiment) -> list[Experiment]:
    """A candidate's runs in the search."""
    traffic = candidate.traffic
    few = least_prompts(traffic, int(SHORT * traffic.num_prompts))
    short = replace(traffic, num_prompts=few, seed=traffic.seed + APART)
    whole = replace(candidate, traffic=short, scoring=replace(candidate.scoring, warmup_requests=0))
    scored = found.goal.prepared(whole, found.warmup_share)
    return replications(without_band(scored), SEEDS)
