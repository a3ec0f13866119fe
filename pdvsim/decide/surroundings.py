"""What surrounds a recommendation: where it changes, and failure modes nearby.

From the given load and acceptance outward, the recommendation and the other finalists run the same seeds at the last
place, each with the draft length that the formula predicts to be best there, and otherwise the settings tuned for the
given load. A rival is a challenger if its paired interval against the recommendation lies above the threshold,
corrected for the number of rivals; or if it meets the service levels and keeps up while the recommendation does not.
Before a challenger counts, both are tuned at that place and run again. If a few seeds show that no rival can become a
challenger (`race.enough`), and the recommendation meets the goal in all of them, the remaining seeds are skipped. Where
the decision changed, the place is narrowed between the given one and the last (`find_edge`).

Failure modes are low concurrency, poor acceptance, a full KV cache and a load near capacity. Not covered: a decision
that changes and changes back before the last place, what pdvsim does not model (docs/model.md), and changes in the
lengths or burstiness of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.capacity import Capacities, Plan
from pdvsim.decide.capacity_search import find_capacities
from pdvsim.decide.edge import Ends, edge_of, find_edge
from pdvsim.decide.error import lead_error
from pdvsim.decide.finals import formula_sized
from pdvsim.decide.formula import break_even_rate
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import Contest, contest, contest_of, corrected, enough
from pdvsim.decide.runs import Bench, at_acceptance, at_rate, load_axis, replications, shortened
from pdvsim.decide.space import with_best_length
from pdvsim.decide.tune import SEEDS, Search, tuned
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.metrics.steady import LEAST
from pdvsim.sim.relevance import applicable
from pdvsim.sim.workload.acceptance import expected_tokens

EDGE_CELLS = 8  # an edge is found to this share of the distance between two places
RUN_SHARE = 0.3  # of what a final run measures
ALONE_PROMPTS = 25
RATE_CELLS = 32
RATE_STEPS = 100  # resolution of an equivalent rate
FEW_RUNS = 3  # replications per step of a search
SEARCH_RUNS = 6  # estimated runs per seed of the search for a break-even or a capacity
CLOSE = 0.05  # precision of the distance to capacity: an advice needs no more

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
class Stretch:
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
    below: Stretch | None = None
    above: Stretch | None = None

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
        return [self._sentence(side, *words) for side, *words in sides if side is not None]

    def _sentence(self, side: Stretch, where: str, way: str, last: str) -> str:
        unit = {"load": " req/s", "requests": " requests"}.get(self.axis, "")
        name = f"{self.axis} {where} {self.here:.3g}{unit}: "
        unchanged = f"{name}unchanged {way} to {side.stands:.3g}{unit}"
        spent = side.reason == "no budget"
        if side.falls is None and side.stands == self.here:
            return f"{name}not tested{' (raise --budget)' if spent else ''}"
        if side.falls is None:
            return f"{unchanged} ({'raise --budget to test more' if spent else f'{last} tested'})"
        at = f"{unchanged}; at {side.falls:.3g}{unit} "
        if side.reason == "nobody is able":
            return at + "no finalist meets the goal"
        return at + f"{side.challenger} leads" + ("" if math.isnan(side.lead) else f" by {side.lead:.1%}")


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

    @property
    def few_runs(self) -> int:
        """Replications per step of a search."""
        return min(FEW_RUNS, self.num_runs)

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

    def outward(self, far: float | None) -> Generator[None, None, Stretch]:
        """Test the last place of a side; if the decision changes, narrow down where. Yields after each place."""
        here = stands = self.flips.here
        falls = None if far is None else self._test(far, self.rivalry)
        yield
        if far is None or falls is None:
            return Stretch(here, reason="not found" if far is None else "no budget")
        if not self._changed(falls):
            return Stretch(far)
        cells = find_edge(EDGE_CELLS // 2, Ends(0, EDGE_CELLS), far=0)
        cell = next(cells)
        rivals = [r for r in self.rivalry.rivals if falls.challenger in (None, self.rivalry.search.name(r))]
        only = replace(self.rivalry, rivals=tuple(rivals))  # at the significance level of all
        with suppress(StopIteration):
            while (between := self._test(self.flips.between(here, far, cell / EDGE_CELLS), only)) is not None:
                yield
                changed = self._changed(between)
                falls, stands = (between, stands) if changed else (falls, between.at)
                cell = cells.send(-1 if changed else 1)
        reason = "beaten" if falls.challenger else "nobody is able"
        return Stretch(stands, falls.at, falls.challenger, falls.lead, reason)

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
        moved = {name: self._moved(candidate, at) for name, candidate in rivalry.finalists.items()}
        longest = max(map(length_of, moved.values()), key=lambda length: length.total)
        steady = rivalry.recommended.scoring.steady  # all have the same requests
        finalists = {name: with_length(mine, longest) if steady else mine for name, mine in moved.items()}
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
        """A candidate at another place, in runs that are long enough by formula."""
        moved = self.move(candidate, at)
        return formula_sized(moved, self.bench) if candidate.scoring.steady else moved

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
    """Find where the decision changes between `here` and the first and the last place, while the budget lasts."""
    flips = Flips(axis, here)
    flips.probes[here] = _probe(here, rivalry.finalists, rivalry, bench, rivalry.num_runs)  # as they were decided
    walk = _Walk(flips, move, rivalry, bench, budget)
    sides = {
        "above": walk.outward(max((p for p in places if p > here), default=None)),
        "below": walk.outward(min((p for p in places if p < here), default=None)),
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


def alone(rivalry: Rivalry, bench: Bench) -> tuple[Contest, Interval | None]:
    """Mean end-to-end latency of all finalists at concurrency 1.

    Also how many times as fast as plain decoding the recommendation is, if it drafts and plain decoding is a finalist.
    """
    finalists = {name: _alone(candidate) for name, candidate in rivalry.finalists.items()}
    rows = bench.replicated(finalists, rivalry.num_runs)
    e2el = contest_of(rows, Goal("e2el"), finalists, rivalry.search.indifference)
    plain = next((rows[name] for name, c in finalists.items() if c.arch == "autoregressive"), None)
    if plain is None or rivalry.recommended.arch == "autoregressive":
        return e2el, None
    pairs = zip(plain, rows[rivalry.best], strict=True)
    return e2el, interval(theirs["mean_tpot_ms"] / mine["mean_tpot_ms"] for theirs, mine in pairs)


def _alone(candidate: Experiment) -> Experiment:
    few = min(candidate.traffic.num_prompts, ALONE_PROMPTS)
    traffic = replace(at_rate(candidate, math.inf).traffic, max_concurrency=1, num_prompts=few)
    scoring = replace(candidate.scoring, steady=False, warmup_requests=0)  # each request finds the server idle
    return replace(candidate, traffic=traffic, scoring=scoring)


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
    return candidate.has_drafter and (candidate.acceptance.by_rate or recorded)


def equivalent_rate(rows: Sequence[Row]) -> float:
    """The acceptance rate that gives as many tokens per round as these runs had, at their mean draft length."""
    rounds = sum(float(row.get("spec_decode_num_drafts", 0) or 0) for row in rows)
    drafted = sum(float(row["spec_decode_draft_tokens"]) for row in rows)
    k = max(1, round(drafted / rounds)) if rounds > 0 else 1
    tokens = interval(row["spec_decode_acceptance_length"] for row in rows).mean
    rates = [cell / RATE_STEPS for cell in range(RATE_STEPS + 1)]
    return min(rates, key=lambda rate: abs(expected_tokens(rate, k) - tokens))


def break_even(drafting: Experiment, plain: Experiment, rivalry: Rivalry, bench: Bench) -> BreakEven:
    """The cell of a grid of acceptance rates in which drafting starts to pay by the mean of the objective.

    The search starts where the formula predicts it. At every rate the drafts have the best length from 1 on: where the
    formula prefers none, drafting may still pay.
    """
    goal, runs = rivalry.search.goal, rivalry.few_runs
    here = drafting.acceptance.acceptance_rate
    if not drafting.acceptance.by_rate:
        here = equivalent_rate(bench.rows(replications(drafting, runs)))
        drafting = replace(drafting, acceptance=Acceptance())
    undrafted = rivalry.placed(plain)

    def margin(cell: int) -> float:
        """Relative lead of plain decoding."""
        there = rivalry.placed(at_acceptance(drafting, cell / RATE_CELLS), drafting=True)
        rows = bench.replicated({"plain": undrafted, "drafting": there}, runs)
        plainly, drafted = (interval(map(goal.value, rows[name])).mean for name in ("plain", "drafting"))
        return goal.sign * (plainly - drafted) / max(abs(plainly), 1e-12) or 1e-12

    limits = Ends(-1, RATE_CELLS + 1)
    guess = break_even_rate(drafting, [k for k in rivalry.search.space.draft_lengths if k])
    start = RATE_CELLS if guess is None else round(guess * RATE_CELLS)
    edge = edge_of(find_edge(start, limits, stride=4, slope=1 / RATE_CELLS, trust=0.5), margin)
    low = min(max(math.floor(edge.root), edge.low), edge.high - 1)
    losing, winning = (None if cell in limits else cell / RATE_CELLS for cell in (low, low + 1))
    return BreakEven(rivalry.search.name(drafting), here, losing, winning)


def memory(rows: Sequence[Row]) -> dict[str, int]:
    """Peak use of the KV cache in these runs, and its capacity, in tokens."""
    return {
        "peak_tokens": max(int(row["kv_peak_tokens"]) for row in rows),
        "capacity_tokens": int(rows[0]["kv_capacity_tokens"]),
    }


def saturation(rivalry: Rivalry, bench: Bench, usd: float | None) -> Capacities:
    """The highest rate the recommendation holds on the same GPUs, as `pdvsim capacity` finds it."""
    base = applicable(rivalry.recommended)
    plan = Plan(base, (base.arch,), rivalry.few_runs, rivalry.search.goal, CLOSE, least=bench.prompts or LEAST)
    return find_capacities(plan, bench, usd)
