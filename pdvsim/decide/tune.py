"""Every architecture at its own best settings, wherever architectures are compared.

At each place (a load, a pair, a card) an architecture tries the draft lengths that the formula finds most promising,
and on from there while shorter or longer ones are better; the controllers; then batch limits, then prompt tokens a
forward, then what it alone has. After each kind the best go on. Runs are short, and all meet the same requests, of
seeds that no later figure uses: picking the best of many flatters it, on those seeds only. Figures nearer than the
indifference are alike, and the simpler settings go on.

What it does not promise: the best of all combinations. Settings are tried one kind after another, so a pair of settings
that is good only together can be missed. What a budget of simulations leaves no room for is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, replications
from pdvsim.decide.space import PROMISING, Space, complexity
from pdvsim.sim.config import Arch, Experiment
from pdvsim.study.stats import interval

FAR = 2.0  # an architecture this many times worse than the best is not tuned any further
SEEDS = 2
APART = 100_000  # search seeds are this far from those of the replications
SHORT = 0.25  # length of a search run, as a share of the final ones
TURNS = 2  # requests of a search run for each that may be in the system at once, at the least


@dataclass
class Search:
    """Candidates with their figures in short runs."""

    goal: Goal
    space: Space
    warmup_share: float
    indifference: float = 0.01
    budget: int | None = None  # simulations; None: as many as it takes
    figures: dict[Experiment, float] = field(default_factory=dict)
    peaks: dict[Experiment, int] = field(default_factory=dict)  # most requests in the system at once
    skipped: int = 0

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

    def worse(self, candidate: Experiment, best: Experiment) -> float:
        """How many times worse a candidate's figure is than the best's."""
        mine, theirs = self.figures[candidate], self.figures[best]
        better, poorer = (theirs, mine) if self.goal.sign > 0 else (mine, theirs)
        return better / poorer if poorer > 0 else float("inf")


def most_runs(space: Space, places: int, contenders: int | None = None) -> int:
    """Simulations that tuning at so many places takes, more or less, with one kept; of all architectures or so many."""
    ways = PROMISING + len(space.controllers) if "drafts" in space.steps() else 1
    ways += len(space.max_num_seqs) + len(space.max_num_batched_tokens) + 3 * space.own
    return SEEDS * places * (contenders or len(space.archs)) * ways


def tuned(found: Search, places: Sequence[Experiment], bench: Bench, kept: int = 1) -> list[dict[Arch, Experiment]]:
    """For each place, every architecture that can run there at its best, the best architecture first.

    `kept` is how many settings of an architecture go on from one kind to the next.
    """
    going: dict[tuple[int, Arch], list[Experiment]] = {}
    for at, base in enumerate(places):
        starts = found.space.starts(base)
        if not starts:
            raise ValueError("no architecture can run with these options")
        going |= {(at, start.arch): [start] for start in starts}
    _try(found, [mine[0] for mine in going.values()], bench)
    for step in found.space.steps():
        tried = {
            key: list(dict.fromkeys(way for candidate in mine for way in _ways(found, step, candidate)))
            for key, mine in going.items()
            if not _far(found, going, key)
        }
        # by turns, so that a budget that runs out costs every architecture alike
        longest = max(map(len, tried.values()), default=0)
        _try(found, [ways[i] for i in range(longest) for ways in tried.values() if i < len(ways)], bench)
        if step == "drafts":
            _climb(found, tried, bench)
        for (at, arch), ways in tried.items():
            going[at, arch] = found.ranked([*going[at, arch], *ways], places[at])[:kept] or going[at, arch]
    best: list[dict[Arch, Experiment]] = []
    for at, base in enumerate(places):
        mine = [candidates[0] for (where, _), candidates in going.items() if where == at]
        order = [*found.ranked(mine, base), *(c for c in mine if c not in found.figures)]
        best.append({candidate.arch: candidate for candidate in order})
    return best


def _ways(found: Search, step: str, candidate: Experiment) -> list[Experiment]:
    ways: list[Experiment] = getattr(found.space, step)(candidate)
    if step == "batches":  # between limits that are never reached there is no difference
        peak, limit = found.peaks.get(candidate, 0), candidate.server.max_num_seqs
        ways = ways if peak >= limit else [way for way in ways if way.server.max_num_seqs < peak]
    return ways


def _climb(found: Search, tried: dict[tuple[int, Arch], list[Experiment]], bench: Bench) -> None:
    """While the best draft length of an architecture has a neighbour that was not tried, try that: adds to `tried`."""
    while True:
        further = {}
        for key, ways in tried.items():
            fixed = [way for way in ways if way in found.figures and way.server.controller == "fixed"]
            if fixed:
                best = max(fixed, key=lambda way: found.goal.sign * found.figures[way])
                further[key] = [way for way in found.space.beside(best) if way not in ways]
        new = [way for ways in further.values() for way in ways]
        if not new:
            return
        _try(found, new, bench)
        for key, ways in further.items():
            tried[key] += ways


def _far(found: Search, going: dict[tuple[int, Arch], list[Experiment]], key: tuple[int, Arch]) -> bool:
    """Whether an architecture is out of the running at its place."""
    rivals = [mine[0] for (at, _), mine in going.items() if at == key[0] and mine[0] in found.figures]
    mine = going[key][0]
    if mine not in found.figures or not rivals:
        return True
    best = max(rivals, key=lambda c: found.goal.sign * found.figures[c])
    return found.worse(mine, best) > FAR


def _try(found: Search, candidates: Sequence[Experiment], bench: Bench) -> None:
    """Run what has no figure yet, as far as the budget goes; the first of all is always run."""
    new = [candidate for candidate in dict.fromkeys(candidates) if candidate not in found.figures]
    if found.budget is not None:
        room = max(0 if found.figures else 1, (found.budget - bench.runs) // SEEDS)
        new, left = new[:room], new[room:]
        found.skipped += len(left)
    rows = bench.rows([run for candidate in new for run in _short(found, candidate)])
    for at, candidate in enumerate(new):
        mine = rows[at * SEEDS : (at + 1) * SEEDS]
        found.figures[candidate] = interval(map(found.goal.value, mine)).mean
        found.peaks[candidate] = max(int(row["max_concurrent_requests"]) for row in mine)


def _short(found: Search, candidate: Experiment) -> list[Experiment]:
    traffic = candidate.traffic
    few = max(int(SHORT * traffic.num_prompts), TURNS * (traffic.max_concurrency or 0), 1)
    short = replace(traffic, num_prompts=min(few, traffic.num_prompts), seed=traffic.seed + APART)
    return replications(found.goal.prepared(replace(candidate, traffic=short), found.warmup_share), SEEDS)
