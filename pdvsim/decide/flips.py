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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.stats import Interval
from pdvsim.decide.bracket import Ends, find_edge
from pdvsim.decide.contest import contest, corrected, enough
from pdvsim.decide.error import lead_error
from pdvsim.decide.runs import Bench, load_axis, shortened
from pdvsim.decide.space import with_best_length
from pdvsim.decide.tune import SEEDS, Search, tuned
from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.steady import LEAST, Length, first_uses

EDGE_CELLS = 8  # an edge is found to this share of the distance between two places
RUN_SHARE = 0.5  # of what a final run measures

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
    falls: float | None = None
    challenger: str | None = None
    lead: float = math.nan
    reason: str = "not found"  # "beaten", "nobody is able", "not found" within the places tested, or "no budget"


@dataclass
class Flips:
    """An axis: all places tested, and an edge on either side."""

    axis: str
    here: float
    probes: dict[float, Probe] = field(default_factory=dict)
    below: Edge | None = None
    above: Edge | None = None

    def between(self, a: float, b: float, share: float) -> float:
        """The place at a share of the way from one to another; numbers of requests are whole."""
        if self.axis == "acceptance":
            return a + share * (b - a)
        place = a * (b / a) ** share
        return place if self.axis == "load" else float(round(place))

    @property
    def lines(self) -> list[str]:
        """One sentence for each side."""
        sides = ((self.below, "below", "down", "lowest"), (self.above, "above", "up", "highest"))
        return [self._sentence(edge, *words) for edge, *words in sides if edge is not None]

    def _sentence(self, edge: Edge, side: str, way: str, last: str) -> str:
        unit = {"load": " req/s", "requests": " requests"}.get(self.axis, "")
        name = f"{self.axis} {side} {self.here:.3g}{unit}: "
        unchanged = f"{name}unchanged {way} to {edge.stands:.3g}{unit}"
        spent = edge.reason == "no budget"
        if edge.falls is None and edge.stands == self.here:
            return f"{name}not tested{' (raise --budget)' if spent else ''}"
        if edge.falls is None:
            return f"{unchanged} ({'raise --budget to test more' if spent else f'{last} tested'})"
        at = f"{unchanged}; at {edge.falls:.3g}{unit} "
        if edge.reason == "nobody is able":
            return at + "no finalist meets the goal"
        return at + f"{edge.challenger} leads" + ("" if math.isnan(edge.lead) else f" by {edge.lead:.1%}")


@dataclass(frozen=True)
class Rivalry:
    """The recommendation, its rivals and the search that tuned them."""

    recommended: Experiment
    rivals: tuple[Experiment, ...]
    search: Search  # each uses the best of its draft lengths at a place
    num_runs: int
    comparisons: int  # number that share the 5% chance of error

    @property
    def finalists(self) -> dict[str, Experiment]:
        """The recommendation, then its rivals, by name."""
        return {self.search.name(candidate): candidate for candidate in (self.recommended, *self.rivals)}

    @property
    def best(self) -> str:
        """Name of the recommendation."""
        return self.search.name(self.recommended)

    @property
    def runs(self) -> int:
        """Simulations at one place."""
        return (1 + len(self.rivals)) * self.num_runs

    def placed(self, candidate: Experiment, drafting: bool = False) -> Experiment:
        """A candidate at another place: with the best draft length there, above 0 if `drafting`, in a shorter run."""
        lengths = [k for k in self.search.space.draft_lengths if k or not drafting]
        if candidate.server.controller == "fixed":
            candidate = with_best_length(candidate, lengths)
        whole = load_axis(candidate.traffic) == "requests"  # a shorter job would be a different load
        return candidate if whole else shortened(candidate, RUN_SHARE)


@dataclass(frozen=True)
class _Walk:
    """The tests of one axis, within a budget of simulations."""

    flips: Flips
    move: Move
    rivalry: Rivalry
    bench: Bench
    budget: int

    def outward(self, places: Sequence[float]) -> Generator[None, None, Edge]:
        """Test the places until one has a challenger, then bisect; yields after each place."""
        stands = self.flips.here
        for place in places:
            probe = self._test(place, self.rivalry)
            yield
            if probe is None:
                return Edge(stands, reason="no budget")
            if not self._changed(probe):
                stands = place
                continue
            return (yield from self._narrowed(stands, probe))
        return Edge(stands)

    def _narrowed(self, near: float, falls: Probe) -> Generator[None, None, Edge]:
        """The edge between a place where the decision stands and one where it falls, as far as the budget lasts."""
        far, stands = falls.at, near
        cells = find_edge(EDGE_CELLS // 2, Ends(0, EDGE_CELLS))
        cell = next(cells)
        with suppress(StopIteration):
            while True:
                rivals = [r for r in self.rivalry.rivals if falls.challenger in (None, self.rivalry.search.name(r))]
                only = replace(self.rivalry, rivals=tuple(rivals))  # at the significance level of all
                between = self._test(self.flips.between(near, far, cell / EDGE_CELLS), only)
                yield
                if between is None:
                    break
                changed = self._changed(between)
                falls, stands = (between, stands) if changed else (falls, between.at)
                cell = cells.send(-1 if changed else 1)
        reason = "beaten" if falls.challenger else "nobody is able"
        return Edge(stands, falls.at, falls.challenger, falls.lead, reason)

    def _changed(self, probe: Probe) -> bool:
        """Whether there is a challenger, or nobody meets the goal although some did at the given place."""
        return probe.challenger is not None or bool(self.flips.probes[self.flips.here].able and not probe.able)

    def _test(self, at: float, rivalry: Rivalry) -> Probe | None:
        """Run all finalists at one place, then a challenger and the recommendation again, both tuned there.

        None without budget for that.
        """
        if self.bench.runs + self.rivalry.runs > self.budget:
            return None
        left = self.budget - rivalry.runs  # after they have been tuned
        finalists = {name: self._moved(candidate, at) for name, candidate in rivalry.finalists.items()}
        there = self.bench.lengthened({name: rivalry.placed(c) for name, c in finalists.items()}, RUN_SHARE)
        probe = self._settled(at, there, rivalry)
        if probe.challenger is not None and rivalry.search.space.steps():
            if self.bench.runs + 2 * SEEDS > left:
                return None
            for name in (rivalry.best, probe.challenger):
                server = self._retuned(finalists[name], left).server
                there[name] = replace(there[name], server=server)
            probe = self._settled(at, there, rivalry)
        self.flips.probes[at] = probe
        return probe

    def _moved(self, candidate: Experiment, at: float) -> Experiment:
        """A candidate at another place; at another request rate in runs that last as long, as a first guess."""
        moved, length = self.move(candidate, at), length_of(candidate)
        if not candidate.scoring.steady:
            return moved
        if self.bench.prompts is not None or load_axis(moved.traffic) == "concurrency":
            return self.bench.sized(moved)
        times = moved.traffic.request_rate / candidate.traffic.request_rate
        start, measured = (math.ceil(times * part) for part in length)
        return with_length(moved, Length(max(start, math.ceil(first_uses(moved.traffic))), max(measured, LEAST)))

    def _retuned(self, candidate: Experiment, budget: int) -> Experiment:
        """A candidate's architecture tuned at another place."""
        search = self.rivalry.search
        space = replace(search.space, archs=(candidate.arch,))
        again = Search(search.goal, space, search.indifference, budget)
        return tuned(again, [candidate], self.bench)[0][candidate.arch]

    def _settled(self, at: float, finalists: Mapping[str, Experiment], rivalry: Rivalry) -> Probe:
        """Run all finalists on a few seeds, and on all seeds if those do not decide."""
        few = enough(rivalry.num_runs, corrected(rivalry.comparisons))
        probe = _probe(at, finalists, rivalry, self.bench, few)
        return _probe(at, finalists, rivalry, self.bench, rivalry.num_runs) if probe.open else probe


def find_flips(
    axis: str, here: float, places: Sequence[float], move: Move, rivalry: Rivalry, bench: Bench, budget: int
) -> Flips:
    """Test the places from `here` outward in both directions, while the budget lasts."""
    flips = Flips(axis, here)
    flips.probes[here] = _probe(here, rivalry.finalists, rivalry, bench, rivalry.num_runs)  # as they were decided
    walk = _Walk(flips, move, rivalry, bench, budget)
    sides = {
        "above": walk.outward(sorted(p for p in places if p > here)),
        "below": walk.outward(sorted((p for p in places if p < here), reverse=True)),
    }
    while sides:  # alternately, so that a limited budget affects both sides equally
        for side, steps in list(sides.items()):
            try:
                next(steps)
            except StopIteration as end:
                setattr(flips, side, end.value)
                del sides[side]
    return flips


def _probe(at: float, finalists: Mapping[str, Experiment], rivalry: Rivalry, bench: Bench, seeds: int) -> Probe:
    goal, mine, few = rivalry.search.goal, rivalry.best, seeds < rivalry.num_runs
    rows = bench.replicated(finalists, seeds)
    figures = {name: [goal.value(row) for row in runs] for name, runs in rows.items()}
    able = tuple(name for name, runs in rows.items() if goal.met(runs))
    challenger, lead = None, math.nan
    still_open = few and not all(goal.met([row]) for row in rows[mine])
    held = contest(figures, goal.sign)
    for rival in sorted(figures, key=lambda name: -goal.sign * held.values[name].mean):
        if rival == mine or (able and rival not in able):
            continue
        errors = {name: lead_error(finalists[name], goal.error_metric(rows[name])) for name in (mine, rival)}
        two = {name: figures[name] for name in errors}
        pair = contest(two, goal.sign, rivalry.comparisons, rivalry.search.indifference, errors)
        still_open |= few and pair.best == rival and pair.margin > pair.thresholds[mine]
        if (pair.best == rival and pair.sure) or (able and mine not in able):
            challenger, lead = rival, pair.leads[mine].mean if pair.best == rival else math.nan
            break
    return Probe(at, held.values, able, challenger, lead, still_open)
