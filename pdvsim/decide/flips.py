"""Where a decision changes: from the given load and acceptance outward, until another choice is significantly better.

At each place the recommendation and the other finalists run the same seeds, each with the draft length that the formula
predicts to be best there, and otherwise the settings tuned for the given load. A rival is a challenger if its paired
interval against the recommendation lies above the threshold, corrected for the number of rivals; or if it meets the
service levels and keeps up while the recommendation does not. Before a challenger counts, both are tuned at that place
and run again. If a few seeds show that no rival can become a challenger (`contest.enough`), and the recommendation
meets the goal in all of them, the remaining seeds are skipped. The edge is then narrowed by bisection between the last
place without a challenger and the first with one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace

from pdvsim.decide.contest import contest, corrected, enough
from pdvsim.decide.error import lead_error
from pdvsim.decide.fleet import Way, contender
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, least_prompts, load_axis, replications
from pdvsim.decide.space import Space
from pdvsim.decide.tune import SEEDS, Search, tuned
from pdvsim.sim.config import Experiment
from pdvsim.study.stats import Interval

STEPS = 3  # of bisection
PROMPTS = 200  # requests per run: fewer than in the finals

_MIDDLES = {"load": lambda a, b: math.sqrt(a * b), "acceptance": lambda a, b: (a + b) / 2}  # others: whole numbers

Move = Callable[[Experiment, float], Experiment]


@dataclass(frozen=True)
class Probe:
    """Results of the finalists at one place."""

    at: float
    values: dict[str, Interval]  # by name
    able: tuple[str, ...]  # those that meet the service levels and keep up
    challenger: str | None
    lead: float  # the challenger's relative lead; nan without one
    open: bool = False  # whether more seeds could make a rival a challenger


@dataclass(frozen=True)
class Edge:
    """The decision is unchanged up to `stands` and changes at `falls`, where the challenger leads; None: not found."""

    stands: float
    falls: float | None
    challenger: str | None
    lead: float
    reason: str  # "beaten", "nobody is able", "not found" within the places tested, or "no budget"


@dataclass
class Flips:
    """An axis: all places tested, and an edge on either side."""

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
    indifference: float  # leads up to this, or within the profile's error, do not count
    comparisons: int  # number that share the 5% chance of error
    draft_lengths: tuple[int, ...]  # each uses the best of these at a place
    space: Space | None = None  # settings to tune before a challenger counts; None: no tuning
    ways: tuple[Way, ...] = ()  # compared instead of architectures

    def name(self, candidate: Experiment) -> str:
        """Name of a candidate."""
        return contender(candidate, self.ways)

    @property
    def runs(self) -> int:
        """At one place."""
        return (1 + len(self.rivals)) * self.num_runs

    def placed(self, candidate: Experiment) -> Experiment:
        """A candidate at another place: with the best draft length there, in a shorter run."""
        server, traffic = candidate.server, candidate.traffic
        if candidate.has_drafter and server.controller == "fixed" and len(self.draft_lengths) > 1:
            best = Formula(candidate).ranked(self.draft_lengths)[0].k
            server = replace(server, num_speculative_tokens=best)
        whole = load_axis(traffic) == "requests"  # a shorter job would be a different load
        few = traffic.num_prompts if whole else least_prompts(traffic, PROMPTS)
        warmup = candidate.scoring.warmup_requests * few // traffic.num_prompts
        scoring = replace(candidate.scoring, warmup_requests=warmup)
        return replace(candidate, server=server, traffic=replace(traffic, num_prompts=few), scoring=scoring)

    def only(self, name: str | None) -> Rivalry:
        """The same with one rival, at the significance level of all."""
        return self if name is None else replace(self, rivals=tuple(r for r in self.rivals if self.name(r) == name))


def find_flips(
    axis: str, here: float, places: Sequence[float], move: Move, who: Rivalry, bench: Bench, budget: int
) -> Flips:
    """Test the places from `here` outward in both directions, while the budget lasts."""
    found = Flips(axis, here)
    found.probes[here] = _probe(here, (who.recommended, *who.rivals), who, bench, who.num_runs)  # as they were decided
    middle = _MIDDLES.get(axis, lambda a, b: float(round(math.sqrt(a * b))))
    lower, higher = sorted((p for p in places if p < here), reverse=True), sorted(p for p in places if p > here)
    sides = {
        "above": _outward(found, higher, move, middle, who, bench, budget),
        "below": _outward(found, lower, move, middle, who, bench, budget),
    }
    while sides:  # alternately, so that a limited budget affects both sides equally
        for side, steps in list(sides.items()):
            try:
                next(steps)
            except StopIteration as end:
                setattr(found, side, end.value)
                del sides[side]
    return found


def look(found: Flips, at: float, move: Move, who: Rivalry, bench: Bench, budget: int) -> Probe | None:
    """Run all finalists at one place, then a challenger and the recommendation again, both tuned there.

    None if there is a challenger but no budget to tune both.
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
    """A candidate's architecture tuned at another place."""
    share = candidate.scoring.warmup_requests / candidate.traffic.num_prompts
    found = Search(who.goal, replace(space, archs=(candidate.arch,)), share, who.indifference, budget)
    return tuned(found, [candidate], bench)[0][candidate.arch]


def _settled(at: float, everyone: Sequence[Experiment], who: Rivalry, bench: Bench) -> Probe:
    """Run all finalists on a few seeds, and on all seeds if those do not decide."""
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
    """Test the places until one has a challenger, then bisect; yields after each place."""
    stands, hopeless = found.here, not found.probes[found.here].able

    def spent() -> bool:
        return bench.runs + who.runs > budget

    def unchallenged(probe: Probe) -> bool:
        return probe.challenger is None and (
            bool(probe.able) or hopeless
        )  # if none met the goal before, that is no change

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
