"""A search for good settings within a time: short runs first, the worst dropped, one kind of setting at a time.

Every architecture runs with the settings given; one whose figure is more than FAR times worse than the best is dropped.
The rest try all draft lengths and controllers, then batch limits, then prompt tokens a forward; after each step the
best KEPT of each architecture go on. All meet the same requests, of seeds that no later figure uses: picking the best
of many flatters it, on those seeds only.

What it does not promise: the best of all combinations. Settings are tried one kind after another, so a pair of settings
that is good only together can be missed; and when the time is up, what was not tried is left out and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, replications
from pdvsim.decide.space import Space, complexity
from pdvsim.sim.config import Arch, Experiment
from pdvsim.study.backends import cores
from pdvsim.study.stats import interval

FAR = 2.0
KEPT = 2
SEEDS = 2
APART = 100_000  # search seeds are this far from those of the replications
AT_ONCE = 4  # runs a core between two looks at the clock
SHORT = 0.25  # length of a search run, as a share of the final ones


@dataclass
class Race:
    """Candidates with their figures, and what there was no time for."""

    base: Experiment
    goal: Goal
    warmup_share: float
    indifference: float  # figures this near to each other, as a share, are alike, and the simpler settings go on
    figures: dict[Experiment, float] = field(default_factory=dict)
    peaks: dict[Experiment, int] = field(default_factory=dict)  # most requests in the system at once
    skipped: int = 0

    def ranked(self, candidates: Sequence[Experiment]) -> list[Experiment]:
        """Those of the candidates that have run, best first; of those alike the simplest first."""
        run = [candidate for candidate in dict.fromkeys(candidates) if candidate in self.figures]
        best = sorted(run, key=lambda c: -self.goal.sign * self.figures[c])
        order: list[Experiment] = []
        while best:
            top = self.figures[best[0]]
            alike = [c for c in best if abs(self.figures[c] - top) <= self.indifference * abs(top)]
            order += sorted(alike, key=lambda c: complexity(c, self.base))
            best = best[len(alike) :]
        return order

    def worse(self, candidate: Experiment, best: Experiment) -> float:
        """How many times worse a candidate's figure is than the best's."""
        mine, theirs = self.figures[candidate], self.figures[best]
        better, poorer = (theirs, mine) if self.goal.sign > 0 else (mine, theirs)
        return better / poorer if poorer > 0 else float("inf")


def race(found: Race, space: Space, bench: Bench, until_s: float) -> None:
    """Search until done, or until the monotonic clock reads `until_s`; at least the first batch is run."""
    starts = space.starts(found.base)
    if not starts:
        raise ValueError("no architecture can run with these options")
    _try(found, starts, bench, until_s)
    order = found.ranked(starts)
    going = {c.arch: [c] for c in order if found.worse(c, order[0]) <= FAR}
    step: Callable[[Experiment], list[Experiment]]
    for step in (space.drafts, lambda c: _felt(found, c, space.batches(c)), space.prompts):
        tried = {arch: [way for c in kept for way in step(c)] for arch, kept in going.items()}
        # by turns, so that time that runs out costs every architecture alike
        longest = max(map(len, tried.values()), default=0)
        _try(found, [ways[i] for i in range(longest) for ways in tried.values() if i < len(ways)], bench, until_s)
        going = {arch: found.ranked([*going[arch], *tried[arch]])[:KEPT] for arch in going}


def finalists(found: Race, most: int) -> list[Experiment]:
    """The best settings of each of the `most` best architectures, and of plain decoding, the yardstick."""
    best: dict[Arch, Experiment] = {}
    for candidate in found.ranked(list(found.figures)):
        best.setdefault(candidate.arch, candidate)
    chosen = list(best.values())[:most]
    yardstick = best.get("autoregressive")
    return [*chosen, yardstick] if yardstick is not None and yardstick not in chosen else chosen


def _try(found: Race, candidates: Sequence[Experiment], bench: Bench, until_s: float) -> None:
    """Run what has no figure yet, a few at a time, while there is time."""
    new = [candidate for candidate in dict.fromkeys(candidates) if candidate not in found.figures]
    at_once = max(1, AT_ONCE * (bench.jobs or cores()) // SEEDS)
    while new and (not found.figures or time.monotonic() < until_s):
        batch, new = new[:at_once], new[at_once:]
        runs = [run for candidate in batch for run in _short(found, candidate)]
        rows = bench.rows(runs)
        for at, candidate in enumerate(batch):
            mine = rows[at * SEEDS : (at + 1) * SEEDS]
            found.figures[candidate] = interval(map(found.goal.value, mine)).mean
            found.peaks[candidate] = max(int(row["max_concurrent_requests"]) for row in mine)
    found.skipped += len(new)


def _felt(found: Race, candidate: Experiment, ways: list[Experiment]) -> list[Experiment]:
    """The batch limits that could change anything: between limits that are never reached there is no difference."""
    peak, limit = found.peaks.get(candidate, 0), candidate.server.max_num_seqs
    return ways if peak >= limit else [way for way in ways if way.server.max_num_seqs < peak]


def _short(found: Race, candidate: Experiment) -> list[Experiment]:
    traffic = candidate.traffic
    short = replace(traffic, num_prompts=max(1, int(SHORT * traffic.num_prompts)), seed=traffic.seed + APART)
    return replications(found.goal.prepared(replace(candidate, traffic=short), found.warmup_share), SEEDS)
