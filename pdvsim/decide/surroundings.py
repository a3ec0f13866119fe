"""What surrounds a recommendation: where it changes with the load, and with the acceptance of drafts.

From the given place outward, the recommendation and the other finalists run the same seeds, each with the draft length
that the formula predicts to be best there, and otherwise the settings tuned for the given load. A rival is a challenger
if its paired interval against the recommendation lies above the threshold, corrected for the number of rivals; or if it
meets the service levels and keeps up while the recommendation does not. Before a challenger counts at another load,
both are tuned there and run again. If a few seeds show that no rival can become a challenger (`race.enough`), and the
recommendation meets the goal in all of them, the remaining seeds are skipped. Where the decision changed, the place is
narrowed (`find_edge`).

Not covered: a decision that changes and changes back before the last place, what pdvsim does not model (docs/model.md),
and changes in the lengths or burstiness of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.edge import Bracketing, Ends, find_edge, lockstep
from pdvsim.decide.formula import RATES
from pdvsim.decide.race import race
from pdvsim.decide.runs import Bench, Spent, load_axis, shortened
from pdvsim.decide.space import with_best_length
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.workload.acceptance import expected_tokens

CELLS = 8  # an edge is found to this share of the distance between two places
RUN_SHARE = 0.3  # of what a final run measures

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
    of: str = ""  # the contender whose acceptance it is
    leader: str = ""  # who leads on average with the given acceptance
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
        return {"axis": self.axis, "of": self.of, "here": self.here, "spent": self.spent, **ends, "probes": probes}

    def sentence(self, side: int) -> str:
        """What changes on a side."""
        where, way, last = ("above", "up", "highest") if side > 0 else ("below", "down", "lowest")
        unit = {"load": " req/s", "requests": " requests"}.get(self.axis, "")
        axis = f"{self.axis} of {self.of}" if self.of else self.axis
        name, stands, probe = f"{axis} {where} {self.here:.3g}{unit}: ", self.stands(side), self.falls(side)
        stays = f"{self.leader} leads on average" if self.leader else "unchanged"
        unchanged = f"{name}{stays} {way} to {stands:.3g}{unit}"
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

    def placed(self, candidate: Experiment) -> Experiment:
        """A candidate at another place: with the best draft length there, in a shorter run."""
        if candidate.server.controller == "fixed":
            candidate = with_best_length(candidate, self.search.space.lengths(candidate))
        whole = load_axis(candidate.traffic) == "requests"  # a shorter job would be a different load
        return candidate if whole else shortened(candidate, RUN_SHARE)

    def probe(self, at: float, there: dict[str, Experiment], sure: bool = True) -> Probe:
        """The finalists at a place, and whether one of them beats the recommendation, for `sure` or on average."""
        goal, mine = self.search.goal, next(iter(there))
        *_, state = race(there, goal, self.bench, self.num_runs, self.search.indifference, 0, holder=mine)
        values = {name: interval(map(goal.value, rows)) for name, rows in state.rows.items()}
        able, result = tuple(name for name, rows in state.rows.items() if goal.met(rows)), state.contest
        lead = result.leads[mine].mean if mine in result.leads else math.nan
        open_ = mine in result.unsure if sure else lead <= self.search.indifference
        beaten = result.best != mine and not open_
        lead = lead if beaten else math.nan
        return Probe(at, values, able, result.best if beaten else None, lead)

    def tested(self, at: float, move: Move, sure: bool) -> Probe:
        """All finalists at one place, then to be sure a challenger and the recommendation again, both tuned there."""
        moved = {name: move(candidate, at) for name, candidate in self.finalists.items()}
        if next(iter(moved.values())).scoring.steady:  # all have the same requests
            sized = [self.bench.sized(mine) for mine in moved.values()]
            longest = max(map(length_of, sized), key=lambda length: length.total)
            moved = {name: with_length(mine, longest) for name, mine in moved.items()}
        there = self.bench.lengthened({name: self.placed(mine) for name, mine in moved.items()}, RUN_SHARE)
        probe = self.probe(at, there, sure)
        if sure and probe.challenger is not None and self.search.space.kinds():
            for name in (next(iter(there)), probe.challenger):
                again = Search(self.search.goal, self.search.space, self.search.indifference)
                best = tuned(again, [moved[name]], self.bench, alone=True)[0][moved[name].arch]
                there[name] = replace(there[name], server=best.server)
            probe = self.probe(at, there)
        return probe

    def flips(
        self, axis: str, here: float, places: Sequence[float], move: Move, starts: Mapping[int, float] | None = None
    ) -> Flips:
        """Find where the decision changes between `here` and the first and the last place, while the budget lasts.

        Each side is tested at its end first; with an acceptance, which is known less well than a load, where a flip on
        average is predicted (`starts`). Both advance together, so that a limited budget affects them equally.
        """
        cells = CELLS if starts is None else 2 * CELLS
        ends = {-1: min(places, default=here), 1: max(places, default=here)}
        flips = Flips(axis, here, sides=tuple(side for side, end in ends.items() if side * end > side * here))

        def place(side: int, cell: int) -> float:
            if starts is not None:
                return here + (ends[side] - here) * cell / cells
            at = here * (ends[side] / here) ** (cell / cells)
            return at if axis == "load" else float(round(at))

        def judge(asked: dict[int, int]) -> Iterator[float]:
            for side, cell in asked.items():
                if (at := place(side, cell)) not in flips.probes:
                    flips.probes[at] = self.tested(at, move, starts is None)
                yield -1 if flips.changed(flips.probes[at]) else 1

        def search(side: int) -> Bracketing:
            if starts is None:
                return find_edge(cells, Ends(0, cells + 1), cells // 2, 1, far=0)
            start = min(range(1, cells + 1), key=lambda cell: abs(place(side, cell) - starts[side]))
            return find_edge(start, Ends(0, cells + 1), 1, 2, far=0)

        try:
            flips.probes[here] = self.probe(here, self.finalists)  # as they were decided
            lockstep({side: search(side) for side in flips.sides}, judge, {})
        except Spent:
            flips.spent = True
        return flips


def has_rate(candidate: Experiment) -> bool:
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
