"""What surrounds a recommendation: where it changes with the load, and from which acceptance drafting pays.

From the given load outward, the recommendation and the other finalists run the same seeds at the last
place, each with the draft length that the formula predicts to be best there, and otherwise the settings tuned for the
given load. A rival is a challenger if its paired interval against the recommendation lies above the threshold,
corrected for the number of rivals; or if it meets the service levels and keeps up while the recommendation does not.
Before a challenger counts, both are tuned at that place and run again. If a few seeds show that no rival can become a
challenger (`race.enough`), and the recommendation meets the goal in all of them, the remaining seeds are skipped. Where
the decision changed, the place is narrowed between the given one and the last (`find_edge`).

Not covered: a decision that changes and changes back before the last place, what pdvsim does not model (docs/model.md),
and changes in the lengths or burstiness of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.edge import Ends, edge_of, find_edge, lockstep
from pdvsim.decide.formula import RATES, break_even_rate
from pdvsim.decide.race import race
from pdvsim.decide.runs import Bench, Spent, at_acceptance, load_axis, replications, shortened
from pdvsim.decide.space import with_best_length
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.workload.acceptance import expected_tokens

EDGE_CELLS = 8  # an edge is found to this share of the distance between two places
RUN_SHARE = 0.3  # of what a final run measures
RATE_CELLS = 32
FEW_RUNS = 3  # replications per step of a search for an acceptance or a capacity

Move = Callable[[Experiment, float], Experiment]


@dataclass(frozen=True)
class Probe:
    """Results of the finalists at one place."""

    at: float
    values: dict[str, Interval]  # by name
    able: tuple[str, ...]  # those that meet the service levels and keep up
    challenger: str | None
    lead: float  # the challenger's relative lead; nan without one


@dataclass
class Flips:
    """An axis, and all places tested on it."""

    axis: str
    here: float
    probes: dict[float, Probe] = field(default_factory=dict)
    sides: tuple[int, ...] = (-1, 1)  # where places were to be tested: below, above
    spent: bool = False  # whether the budget ended the tests

    def changed(self, probe: Probe) -> bool:
        """Whether there is a challenger, or nobody meets the goal although some did at the given place."""
        return probe.challenger is not None or bool(self.probes[self.here].able and not probe.able)

    def stands(self, side: int) -> float:
        """The furthest place on a side, below (-1) or above (1), up to which the decision is unchanged."""
        falls = self.falls(side)
        kept = (at for at in self.probes if falls is None or side * at < side * falls.at)
        return max((at for at in kept if side * at >= side * self.here), key=lambda at: side * at, default=self.here)

    def falls(self, side: int) -> Probe | None:
        """The nearest place on a side at which the decision changes."""
        beyond = (probe for at, probe in self.probes.items() if side * at > side * self.here and self.changed(probe))
        return min(beyond, key=lambda probe: side * probe.at, default=None)

    def document(self) -> dict[str, Any]:
        """All places, and for each side up to where the decision stands and where it falls."""
        ends = {}
        for side in self.sides:
            probe = self.falls(side)
            beaten = {} if probe is None else {"falls": probe.at, "challenger": probe.challenger, "lead": probe.lead}
            ends["above" if side > 0 else "below"] = {"stands": self.stands(side), **beaten}
        probes = [asdict(probe) for _, probe in sorted(self.probes.items())]
        return {"axis": self.axis, "here": self.here, "spent": self.spent, **ends, "probes": probes}

    def sentence(self, side: int) -> str:
        """What changes on a side."""
        where, way, last = ("above", "up", "highest") if side > 0 else ("below", "down", "lowest")
        unit = {"load": " req/s", "requests": " requests"}.get(self.axis, "")
        name, stands, probe = f"{self.axis} {where} {self.here:.3g}{unit}: ", self.stands(side), self.falls(side)
        unchanged = f"{name}unchanged {way} to {stands:.3g}{unit}"
        if probe is None and stands == self.here:
            return f"{name}not tested{' (raise --budget)' if self.spent else ''}"
        if probe is None:
            return f"{unchanged} ({'raise --budget to test more' if self.spent else f'{last} tested'})"
        at = f"{unchanged}; at {probe.at:.3g}{unit} "
        if probe.challenger is None:
            return at + "no finalist meets the goal"
        return at + f"{probe.challenger} leads" + ("" if math.isnan(probe.lead) else f" by {probe.lead:.1%}")


@dataclass(frozen=True)
class Rivalry:
    """The finalists by name, the recommendation first, and the search that tuned them."""

    finalists: dict[str, Experiment]
    search: Search  # each uses the best of its draft lengths at a place
    num_runs: int
    bench: Bench

    @property
    def few_runs(self) -> int:
        """Replications per step of a search; all for a log, whose days differ."""
        replayed = next(iter(self.finalists.values())).traffic.use_trace_timestamps
        return self.num_runs if replayed else min(FEW_RUNS, self.num_runs)

    def placed(self, candidate: Experiment, drafting: bool = False) -> Experiment:
        """A candidate at another place: with the best draft length there, above 0 if `drafting`, in a shorter run."""
        lengths = [k for k in self.search.space.lengths(candidate) if k or not drafting]
        if candidate.server.controller == "fixed":
            candidate = with_best_length(candidate, lengths)
        whole = load_axis(candidate.traffic) == "requests"  # a shorter job would be a different load
        return candidate if whole else shortened(candidate, RUN_SHARE)

    def probe(self, at: float, there: dict[str, Experiment]) -> Probe:
        """The finalists at a place, and whether one of them beats the recommendation."""
        goal, mine = self.search.goal, next(iter(there))
        *_, state = race(there, goal, self.bench, self.num_runs, self.search.indifference, 0, holder=mine)
        values = {name: interval(map(goal.value, rows)) for name, rows in state.rows.items()}
        able, result = tuple(name for name, rows in state.rows.items() if goal.met(rows)), state.contest
        beaten = result.best != mine and mine not in result.unsure
        lead = result.leads[mine].mean if beaten and mine in result.leads else math.nan
        return Probe(at, values, able, result.best if beaten else None, lead)

    def tested(self, at: float, move: Move) -> Probe:
        """All finalists at one place, then a challenger and the recommendation again, both tuned there."""
        moved = {name: move(candidate, at) for name, candidate in self.finalists.items()}
        if next(iter(moved.values())).scoring.steady:  # all have the same requests
            sized = [self.bench.sized(mine) for mine in moved.values()]
            longest = max(map(length_of, sized), key=lambda length: length.total)
            moved = {name: with_length(mine, longest) for name, mine in moved.items()}
        there = self.bench.lengthened({name: self.placed(mine) for name, mine in moved.items()}, RUN_SHARE)
        probe = self.probe(at, there)
        if probe.challenger is not None and self.search.space.kinds():
            for name in (next(iter(there)), probe.challenger):
                again = Search(self.search.goal, self.search.space, self.search.indifference)
                best = tuned(again, [moved[name]], self.bench, alone=True)[0][moved[name].arch]
                there[name] = replace(there[name], server=best.server)
            probe = self.probe(at, there)
        return probe

    def flips(self, axis: str, here: float, places: Sequence[float], move: Move) -> Flips:
        """Find where the decision changes between `here` and the first and the last place, while the budget lasts.

        Both sides advance together, so that a limited budget affects them equally.
        """
        ends = {-1: min(places, default=here), 1: max(places, default=here)}
        flips = Flips(axis, here, sides=tuple(side for side, end in ends.items() if side * end > side * here))

        def judge(asked: dict[int, int]) -> Iterator[float]:
            for side, cell in asked.items():
                at = here * (ends[side] / here) ** (cell / EDGE_CELLS)
                at = at if axis == "load" else float(round(at))
                if at not in flips.probes:
                    flips.probes[at] = self.tested(at, move)
                yield -1 if flips.changed(flips.probes[at]) else 1

        try:
            flips.probes[here] = self.probe(here, self.finalists)  # as they were decided
            limits, stride = Ends(0, EDGE_CELLS + 1), EDGE_CELLS // 2
            lockstep({side: find_edge(EDGE_CELLS, limits, stride, 1, far=0) for side in flips.sides}, judge, {})
        except Spent:
            flips.spent = True
        return flips

    def break_even(self, drafting: str, plain: str) -> BreakEven:
        """The cell of a grid of acceptance rates in which drafting starts to pay by the mean of the objective.

        The search starts where the formula predicts it. At every rate the drafts have the best length from 1 on: where
        the formula prefers none, drafting may still pay.
        """
        goal, runs, drafts = self.search.goal, self.few_runs, self.finalists[drafting]
        here = drafts.acceptance.acceptance_rate
        if not drafts.acceptance.by_rate:
            here = equivalent_rate(self.bench.rows(replications(drafts, runs)))
            drafts = replace(drafts, acceptance=Acceptance())
        undrafted = self.placed(self.finalists[plain])

        def margin(cell: int) -> float:
            """Relative lead of plain decoding."""
            there = self.placed(at_acceptance(drafts, cell / RATE_CELLS), drafting=True)
            rows = self.bench.replicated({plain: undrafted, drafting: there}, runs)
            plainly, drafted = (interval(map(goal.value, rows[name])).mean for name in (plain, drafting))
            return goal.sign * (plainly - drafted) / max(abs(plainly), 1e-12) or 1e-12

        limits = Ends(-1, RATE_CELLS + 1)
        guess = break_even_rate(drafts, [k for k in self.search.space.draft_lengths if k])
        start = RATE_CELLS if guess is None else round(guess * RATE_CELLS)
        edge = edge_of(find_edge(start, limits, stride=4, slope=1 / RATE_CELLS, trust=0.5), margin)
        low = min(max(math.floor(edge.root), edge.low), edge.high - 1)
        losing, winning = (None if cell in limits else cell / RATE_CELLS for cell in (low, low + 1))
        return BreakEven(drafting, here, losing, winning)


@dataclass(frozen=True)
class BreakEven:
    """The acceptance rate above which drafting beats plain decoding by the objective."""

    who: str  # the drafting finalist
    here: float  # its acceptance rate, or the rate with as many tokens per round as the recording
    loses_at: float | None  # highest acceptance of the grid at which plain decoding is better; None: never
    wins_at: float | None  # lowest at which drafting is better; None: never

    def text(self, best: str) -> str:
        """The acceptance from which drafting pays, for a recommendation of this name, as text."""
        subject = "drafting" if self.who == best else f"drafting ({self.who})"
        if self.wins_at is None:
            return f"{subject} does not beat plain decoding by the objective, even with every draft accepted"
        if self.loses_at is None:
            why = "the gain is not from drafts"
            return f"{subject} beats plain decoding by the objective even with no draft accepted: {why}"
        side = "above" if self.here >= self.wins_at else "below" if self.here <= self.loses_at else "at"
        between = f"at an acceptance between {self.loses_at:.2f} and {self.wins_at:.2f}"
        return f"{subject} breaks even with plain decoding {between}; the {self.here:g} used here is {side} it"


def has_break_even(candidate: Experiment) -> bool:
    """Whether a candidate drafts with an acceptance that a rate can stand for; of look-ups none can."""
    recorded = candidate.acceptance.acceptance_model is not None and candidate.server.drafted_by not in LOOKED_UP
    return candidate.speculates and candidate.has_drafter and (candidate.acceptance.by_rate or recorded)


def equivalent_rate(rows: Sequence[Row]) -> float:
    """The acceptance rate that gives as many tokens per round as these runs had, at their mean draft length."""
    rounds = sum(float(row.get("spec_decode_num_drafts", 0) or 0) for row in rows)
    drafted = sum(float(row["spec_decode_draft_tokens"]) for row in rows)
    k = max(1, round(drafted / rounds)) if rounds > 0 else 1
    tokens = interval(row["spec_decode_acceptance_length"] for row in rows).mean
    return min(RATES, key=lambda rate: abs(expected_tokens(rate, k) - tokens))
