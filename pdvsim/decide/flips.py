"""Where a decision flips: from the load and acceptance asked about outward, until another choice is surely better.

At each place the recommendation and the other finalists run the same seeds, each with the draft length that the formula
finds best there and the other settings found for the load asked about. A challenger counts if its paired interval
against the recommendation lies above what does not count, with the number of rivals paid for; or if it meets the
service levels and keeps up, and the recommendation does not. Nobody is beaten for want of tuning: before a challenger
counts, both find their best settings at that place, and run again. Where a few seeds show that the others could not
make a challenger of anyone (`contest.enough`), and the recommendation holds in all of them, the others are not run. The
edge is then narrowed by bisection between the last place without a challenger and the first with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from pdvsim.decide.contest import contest, corrected, enough
from pdvsim.decide.drafters import Drafted
from pdvsim.decide.error import lead_error
from pdvsim.decide.fleet import Fleet, contender
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, least_prompts, load_axis, replications
from pdvsim.decide.space import Space
from pdvsim.decide.tune import SEEDS, Search, tuned
from pdvsim.sim.config import Experiment
from pdvsim.study.stats import Interval

STEPS = 3  # of bisection
PROMPTS = 200  # of a run at a place: shorter than a final one

_MIDDLES = {"load": lambda a, b: math.sqrt(a * b), "acceptance": lambda a, b: (a + b) / 2}  # others: whole numbers

Move = Callable[[Experiment, float], Experiment]


@dataclass(frozen=True)
class Probe:
    """What the finalists did at one place."""

    at: float
    values: dict[str, Interval]  # by name
    able: tuple[str, ...]  # who meets the service levels and keeps up
    challenger: str | None
    lead: float  # the challenger's, as a share of the recommendation's figure; nan without one
    open: bool = False  # whether more seeds could make a challenger of a rival


@dataclass(frozen=True)
class Edge:
    """The decision stands at `stands` and no more at `falls`, where the challenger leads; `falls` None: not found."""

    stands: float
    falls: float | None
    challenger: str | None
    lead: float
    reason: str  # "beaten", "nobody is able", "not found" within the places looked at, or "no budget"


@dataclass
class Flips:
    """An axis: all places looked at, and an edge on either side."""

    axis: str
    here: float
    probes: dict[float, Probe] = field(default_factory=dict)
    below: Edge | None = None
    above: Edge | None = None


@dataclass(frozen=True)
class Rivalry:
    """The recommendation and its rivals, and how they are compared."""

    recommended: Experiment
    rivals: tuple[Experiment, ...]
    goal: Goal
    num_runs: int
    indifference: float  # a lead up to this, or inside the profile's own error, does not count
    comparisons: int  # over how many the 5% chance of error is spread
    draft_lengths: tuple[int, ...]  # of which each takes the best where it is looked at
    space: Space | None = None  # all that may be tried where a challenger is about to count; None: nothing
    ways: tuple[Fleet | Drafted, ...] = ()  # that compete in place of architectures

    def name(self, candidate: Experiment) -> str:
        """Who it is among these."""
        return contender(candidate, self.ways)

    @property
    def runs(self) -> int:
        """At one place."""
        return (1 + len(self.rivals)) * self.num_runs

    def placed(self, candidate: Experiment) -> Experiment:
        """A candidate that has been moved: with the draft length that is best there, in a run of a place's length."""
        server, traffic = candidate.server, candidate.traffic
        if candidate.has_drafter and server.controller == "fixed" and len(self.draft_lengths) > 1:
            best = Formula(candidate).ranked(self.draft_lengths)[0].k
            server = replace(server, num_speculative_tokens=best)
        whole = load_axis(traffic) == "requests"  # a shorter job would be another load
        few = traffic.num_prompts if whole else least_prompts(traffic, PROMPTS)
        warmup = candidate.scoring.warmup_requests * few // traffic.num_prompts
        scoring = replace(candidate.scoring, warmup_requests=warmup)
        return replace(candidate, server=server, traffic=replace(traffic, num_prompts=few), scoring=scoring)

    def only(self, name: str | None) -> Rivalry:
        """Without the rivals but one, at the price of all."""
        return self if name is None else replace(self, rivals=tuple(r for r in self.rivals if self.name(r) == name))


def find_flips(
    axis: str, here: float, places: Sequence[float], move: Move, who: Rivalry, bench: Bench, budget: int
) -> Flips:
    """Look at the places from `here` outward in both directions, while simulations are left of the budget."""
    found = Flips(axis, here)
    found.probes[here] = _probe(here, (who.recommended, *who.rivals), who, bench, who.num_runs)  # as they were decided
    middle = _MIDDLES.get(axis, lambda a, b: float(round(math.sqrt(a * b))))
    lower, higher = sorted((p for p in places if p < here), reverse=True), sorted(p for p in places if p > here)
    sides = {
        "above": _outward(found, higher, move, middle, who, bench, budget),
        "below": _outward(found, lower, move, middle, who, bench, budget),
    }
    while sides:  # by turns, so that a budget that runs out costs both sides alike
        for side, steps in list(sides.items()):
            try:
                next(steps)
            except StopIteration as end:
                setattr(found, side, end.value)
                del sides[side]
    return found


def look(found: Flips, at: float, move: Move, who: Rivalry, bench: Bench, budget: int) -> Probe | None:
    """Run everyone at one place; a challenger and the recommendation once more, each at its best there.

    None where there is a challenger, and no budget to tune it and the recommendation.
    """
    left = budget - who.runs  # after they have been tuned
    everyone = [move(candidate, at) for candidate in (who.recommended, *who.rivals)]
    probe = _settled(at, [who.placed(candidate) for candidate in everyone], who, bench)
    if probe.challenger is not None and who.space is not None:
        if bench.runs + 2 * SEEDS > left:
            return None
        two = (who.name(who.recommended), probe.challenger)
        best = [
            replace(who.placed(c), server=_retuned(c, who, who.space, bench, left).server)
            if who.name(c) in two
            else who.placed(c)
            for c in everyone
        ]
        probe = _settled(at, best, who, bench)
    found.probes[at] = probe
    return probe


def _retuned(candidate: Experiment, who: Rivalry, space: Space, bench: Bench, budget: int) -> Experiment:
    """A candidate's architecture at its best where the candidate has been moved to."""
    share = candidate.scoring.warmup_requests / candidate.traffic.num_prompts
    found = Search(who.goal, replace(space, archs=(candidate.arch,)), share, who.indifference, budget)
    return tuned(found, [candidate], bench)[0][candidate.arch]


def _settled(at: float, everyone: Sequence[Experiment], who: Rivalry, bench: Bench) -> Probe:
    """Run everyone on a few seeds, and on all of them where those do not settle it."""
    probe = _probe(at, everyone, who, bench, enough(who.num_runs, corrected(who.comparisons)))
    return _probe(at, everyone, who, bench, who.num_runs) if probe.open else probe


def _probe(at: float, everyone: Sequence[Experiment], who: Rivalry, bench: Bench, seeds: int) -> Probe:
    runs = [replications(candidate, seeds) for candidate in everyone]
    rows = bench.rows([run for mine in runs for run in mine])
    named = {who.name(candidate): candidate for candidate in everyone}
    by_name = {name: rows[i * seeds : (i + 1) * seeds] for i, name in enumerate(named)}
    figures = {name: [who.goal.value(row) for row in mine] for name, mine in by_name.items()}
    able = tuple(name for name, mine in by_name.items() if who.goal.met(mine))
    mine = who.name(who.recommended)
    challenger, lead = None, math.nan
    still_open = seeds < who.num_runs and not all(map(who.goal.holds, by_name[mine]))
    held = contest(figures, who.goal.sign)
    for rival in sorted(figures, key=lambda name: -who.goal.sign * held.values[name].mean):
        if rival == mine or (able and rival not in able):
            continue
        two = {mine: figures[mine], rival: figures[rival]}
        errors = {name: lead_error(named[name], who.goal.told_by(by_name[name])) for name in two}
        pair = contest(two, who.goal.sign, who.comparisons, who.indifference, errors)
        still_open |= seeds < who.num_runs and pair.best == rival and pair.margin > pair.thresholds[mine]
        if (pair.best == rival and pair.sure) or (able and mine not in able):
            challenger, lead = rival, pair.leads[mine].mean if pair.best == rival else math.nan
            break
    return Probe(at, held.values, able, challenger, lead, still_open)


def _outward(
    found: Flips,
    places: Sequence[float],
    move: Move,
    middle: Callable[[float, float], float],
    who: Rivalry,
    bench: Bench,
    budget: int,
) -> Generator[None, None, Edge]:
    """Look at the places until one has a challenger, then narrow it down; a step a place."""
    stands, hopeless = found.here, not found.probes[found.here].able

    def spent() -> bool:
        return bench.runs + who.runs > budget

    def unchallenged(probe: Probe) -> bool:
        return probe.challenger is None and (bool(probe.able) or hopeless)  # where none was able, that is no change

    for place in places:
        if spent():
            return Edge(stands, None, None, math.nan, "no budget")
        probe = look(found, place, move, who, bench, budget)
        yield
        if probe is None:
            return Edge(stands, None, None, math.nan, "no budget")
        if unchallenged(probe):
            stands = place
            continue
        falls = probe
        for _ in range(STEPS):
            if spent():
                break
            between = look(found, middle(stands, falls.at), move, who.only(falls.challenger), bench, budget)
            yield
            if between is None:
                break
            if unchallenged(between):
                stands = between.at
            else:
                falls = between
        reason = "beaten" if falls.challenger else "nobody is able"
        return Edge(stands, falls.at, falls.challenger, falls.lead, reason)
    return Edge(stands, None, None, math.nan, "not found")
