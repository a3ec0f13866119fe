"""Searches for the rates that architectures hold: all cases in parallel, one rate at a time each.

The next rate is guessed from the head-room at the rates tested (`find_edge`). The guess affects the number of runs, not
the result.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from pdvsim.bench.length import service_s
from pdvsim.bench.pool import Row
from pdvsim.decide.bracket import Ends, find_edge, lockstep
from pdvsim.decide.capacity import Capacities, Case, Plan
from pdvsim.decide.goal import attained
from pdvsim.decide.runs import (
    Bench,
    conversation_output_tokens,
    delivered_tokens_per_s,
    keeps_up,
    mean_output_tokens,
    saturated,
)
from pdvsim.decide.space import Space, with_best_length
from pdvsim.decide.tune import Search, tuned
from pdvsim.sim.config import Arch

WIDE_STEP = 1.25  # largest first step of a search; each later one may be the square of the one before
COARSE = 0.1  # tolerance of the search before tuning
NARROW_STEP = 1.06  # the same if the capacity of another seed or of shorter runs is known, which differs little
COARSE_SHARE = 0.25  # of what a run measures, for tuning
FIRST_GUESS = 0.5  # time in service, relative to that of a saturated server
ROUNDS = 4  # searches in longer and longer runs
REACH = 500.0  # search range, as a factor from the starting rate; below it requests hardly overlap
STEEPNESS = 2.0  # head-room falls with about this power of the rate; used until two rates are known
FAR_OFF = 0.3  # beyond this logarithm a head-room gives only the direction
LEAST_STEEP = 0.5
NEAR = 0.1  # largest logarithm of a rate over the held one at which head-rooms are used for the slope
GUESSES = 3  # rates guessed from head-rooms before and within the bracket; then fixed steps and bisection

Bisection = Generator[float, "Held", "Bracket"]


@dataclass(frozen=True)
class Bracket:
    """The highest rate that held (0: none did) and the lowest above it that did not (inf: all did)."""

    held: float
    failed: float
    rooms: tuple[tuple[float, float], ...] = field(default=(), compare=False)  # logarithms of rates and head-rooms


class Held(NamedTuple):
    """Verdict on a run at one rate."""

    holds: bool
    room: float  # smallest over the levels; the rate that just holds is guessed from it


def search(start: float, step: float, tolerance: float) -> Bisection:
    """Yields rates and is sent the verdict on each; returns the highest that holds and the next, which does not.

    Rates are powers of 1 + `tolerance`. So the result does not depend on the starting rate, and searches that need the
    same run share it. The first step is at most `step`.
    """
    grid = math.log1p(tolerance)
    first, reach = round(math.log(start) / grid), math.ceil(math.log(REACH) / grid) + 2
    limits = Ends(first - reach, first + reach)
    steps = find_edge(first, limits, max(1, round(math.log(step) / grid)), guesses=GUESSES)
    rooms: dict[int, float] = {}
    at = next(steps)
    while True:
        verdict = yield math.exp(at * grid)
        room = math.log(min(max(verdict.room, 1e-9), 1e9))  # positive if the rate holds
        rooms[at] = min(max(room, 1e-3), FAR_OFF) if verdict.holds else -min(max(-room, 1e-3), FAR_OFF)
        try:
            at = steps.send(rooms[at] / (STEEPNESS * grid))
        except StopIteration as end:
            low, high = end.value
            break
    return Bracket(
        math.exp(low * grid) if low in rooms else 0.0,
        math.exp(high * grid) if high in rooms else math.inf,
        tuple((at * grid, room) for at, room in rooms.items() if low in rooms and abs(at - low) * grid < NEAR),
    )


def steepness(brackets: Iterable[Bracket]) -> float:
    """The power of the rate with which head-room falls near the held rate, from the searches of several seeds.

    A relative error of a latency changes the rate by that error divided by this power. To allow for noise it is the
    slope minus two standard errors, at least `LEAST_STEEP`; 1 with too few runs.
    """
    centred = [np.subtract(b.rooms, np.mean(b.rooms, axis=0)) for b in brackets if len(b.rooms) > 1]
    free = sum(map(len, centred)) - len(centred) - 1
    if free < 1:
        return 1.0
    rates, rooms = np.concatenate(centred).T
    slope = rates @ rooms / (rates @ rates)
    left = rooms - slope * rates
    return float(max(LEAST_STEEP, -slope - 2 * np.sqrt(left @ left / free / (rates @ rates))))


def find_capacities(plan: Plan, bench: Bench, gpu_hour_usd: float | None = None) -> Capacities:
    """Search all cases in parallel, one rate at a time each, starting from what earlier searches suggest.

    Ctrl-C keeps the searches that have finished.
    """
    searches, before, interrupted = _Searches(plan, bench), bench.runs, False
    try:
        searches.run()
    except KeyboardInterrupt:
        interrupted = True
    brackets, plan = searches.brackets, searches.plan
    steep = {arch: steepness(of for case, of in brackets.items() if case[0] == arch) for arch in plan.archs}
    rows = [
        searches.row(case, brackets[case], gpu_hour_usd) | {"steepness": steep[case[0]]}
        for case in plan.cases()
        if case in brackets
    ]
    return Capacities(plan, gpu_hour_usd, rows, bench.runs - before, interrupted)


@dataclass
class _Searches:
    """The searches of a plan, and the brackets of those that have finished."""

    plan: Plan
    bench: Bench
    brackets: dict[Case, Bracket] = field(default_factory=dict)

    def run(self) -> None:
        """Tune, search the first seed of every architecture, then the other seeds."""
        plan, first = self.plan, self.plan.base.traffic.seed
        guess_s = FIRST_GUESS * min(service_s(self._saturated(arch)) for arch in plan.archs)
        self.plan = plan = replace(plan, service_s=max(plan.service_s, guess_s))
        rates = {arch: self._most_held((arch, first), 1.0) for arch in plan.archs}
        if plan.space is not None and plan.space.steps_of(plan.archs):
            self._tune(plan.space, rates)
        starts, step = {(arch, first): rates[arch] for arch in plan.archs}, WIDE_STEP
        while starts:
            self._settle(starts, step, plan.tolerance)
            starts, step = self._larger_batches(), NARROW_STEP
        for (arch, _), bracket in self.brackets.items():
            rates[arch] = bracket.held or rates[arch]
        for archs in (plan.archs[:1], plan.archs[1:]):
            rest = [case for case in plan.cases() if case[0] in archs and case not in self.brackets]
            started = {case: search(self._near(case, rates), NARROW_STEP, plan.tolerance) for case in rest}
            self._lockstep(started, self.brackets)

    def _near(self, case: Case, starts: dict[Arch, float]) -> float:
        """Starting rate: that of the first seed, scaled as the first architecture's rate changes with this seed."""
        arch, seed = case
        leader = next(iter(starts))
        known = self.brackets.get((leader, seed), Bracket(0.0, math.inf)).held
        return starts[arch] * (known / starts[leader] if known else 1.0)

    def _settle(self, starts: dict[Case, float], step: float, tolerance: float) -> None:
        """Search, and repeat all searches in longer runs if those at a held rate were too short.

        Where caches start cold, runs at the first rate that did not hold must be long enough too: it may have failed by
        the queue of the start. All runs at a rate have one length.
        """
        brackets = dict(self.brackets)
        for last in (*[False] * (ROUNDS - 1), True):
            searches = {case: search(start, step, tolerance) for case, start in starts.items()}
            self._lockstep(searches, brackets, shorter=not last)
            ends = [(case, rate) for case, of in brackets.items() for rate in self._deciding(of)]
            rows = self.bench.rows([self.plan.experiment(*end) for end in ends])
            if all(map(self.plan.suffices, rows)):
                break
            self.plan, step = self.plan.lengthened(rows), NARROW_STEP
            starts = {case: bracket.held or bracket.failed for case, bracket in brackets.items()}
            ends = [(case, rate) for case, of in brackets.items() for rate in (of.held, of.failed)]
            self.bench.rows([self.plan.experiment(*end) for end in ends if 0 < end[1] < math.inf])  # in parallel
        self.brackets = brackets

    def _deciding(self, bracket: Bracket) -> Iterator[float]:
        """The rates whose runs must be long enough."""
        if bracket.held:
            yield bracket.held
        if self.plan.starts_cold and bracket.failed < math.inf:
            yield bracket.failed

    def _tune(self, space: Space, rates: dict[Arch, float]) -> None:
        """Tune each architecture at about the rate that it holds; updates `rates`.

        The rate is first searched coarsely, in shorter runs, with the draft length that the formula predicts.
        """
        plan = self.plan
        starts = {(arch, plan.base.traffic.seed): rates[arch] for arch in plan.archs}
        placed = {case[0]: plan.experiment(case, rate) for case, rate in starts.items()}
        guesses = {arch: with_best_length(at, space.draft_lengths).server for arch, at in placed.items()}
        coarse = _Searches(replace(plan, servers=guesses, share=COARSE_SHARE), self.bench)
        coarse._settle(starts, WIDE_STEP, COARSE)
        for case, bracket in coarse.brackets.items():
            rates[case[0]] = bracket.held or rates[case[0]]
        longer = replace(coarse.plan, share=1.0)
        places = [longer.experiment(case, rates[case[0]]) for case in starts]
        tuning = Search(replace(plan.goal, objective="headroom"), space, plan.tolerance)
        best = tuned(tuning, places, self.bench, alone=True)
        self.plan = replace(longer, servers={arch: best[at][arch].server for at, arch in enumerate(plan.archs)})

    def _larger_batches(self) -> dict[Case, float]:
        """Test larger batches at the first rate that did not hold.

        Settings were tuned at a lower rate, where the batch limit may not be reached. Batches with more head-room
        become those of the plan; returns the rates from which their searches continue.
        """
        plan, space = self.plan, self.plan.space
        if space is None or "batches" not in space.steps():
            return {}
        full = {}
        for case, bracket in self.brackets.items():
            if bracket.failed < math.inf:
                at = plan.experiment(case, bracket.failed)
                [row] = self.bench.rows([at])
                if int(row["max_concurrent_requests"]) >= at.batches * at.server.max_num_seqs:
                    larger = (one for one in space.batches(at) if one.server.max_num_seqs > at.server.max_num_seqs)
                    full[case] = [at, *larger]
        rows = iter(self.bench.rows([one for variants in full.values() for one in variants]))
        servers, starts = dict(plan.servers), {}
        for case, variants in full.items():
            rooms = [min(plan.goal.headrooms(next(rows)).values()) for _ in variants]
            if max(rooms) > (1 + plan.tolerance) * rooms[0]:
                servers[case[0]] = variants[rooms.index(max(rooms))].server
                starts[case] = self.brackets.pop(case).failed
        self.plan = replace(plan, servers=servers)
        return starts

    def _lockstep(self, searches: dict[Case, Bisection], brackets: dict[Case, Bracket], shorter: bool = False) -> None:
        """Complete all searches, filling `brackets`; every step is one batch of runs.

        With `shorter` an inconclusive run that is too short counts as held for now.
        """
        plan = self.plan

        def judge(asked: dict[Case, float]) -> Iterator[Held]:
            rows = self.bench.rows([plan.experiment(case, rate) for case, rate in asked.items()])
            for (case, rate), row in zip(asked.items(), rows, strict=True):
                unclear = shorter and not plan.suffices(row) and keeps_up(row)
                stable = unclear or row["stability"] == "stable"
                holds = stable and plan.goal.attains(row) and rate <= self._most_held(case, rate)
                yield Held(holds, min(plan.goal.headrooms(row).values()))

        lockstep(searches, judge, brackets)

    def _saturated(self, arch: Arch) -> Row:
        """A run of an architecture's servers with requests always waiting."""
        return self.bench.rows([saturated(self.plan.goal.prepared(self.plan.server_of(arch)))])[0]

    def _most_held(self, case: Case, rate: float) -> float:
        """The throughput of a case's servers when saturated: no higher rate can be held, whatever a run shows.

        It is measured in output tokens, which one run gives more precisely than requests, as their lengths vary: those
        of the run at `rate`.
        """
        tokens_per_s = float(self._saturated(case[0])["output_throughput"])
        return tokens_per_s / mean_output_tokens(self.plan.experiment(case, rate).traffic)

    def row(self, case: Case, bracket: Bracket, gpu_hour_usd: float | None) -> Row:
        """The result of a search, with the metrics and the cost at the rate held."""
        plan, (arch, seed) = self.plan, case
        experiment = plan.experiment(case, bracket.held or bracket.failed)
        [run] = self.bench.rows([experiment])
        tokens_per_s = delivered_tokens_per_s(experiment, run) if bracket.held else 0.0
        failed = bracket.failed < math.inf
        below, limit = self._beyond(case, bracket.failed) if failed else (bracket.held, "nothing")
        hourly_usd, traffic = gpu_hour_usd and gpu_hour_usd * plan.gpus, experiment.traffic
        usd = hourly_usd / (tokens_per_s * 3600) * 1e6 if hourly_usd and tokens_per_s else math.nan
        per_talk = (
            {"usd_per_conversation": usd / 1e6 * conversation_output_tokens(traffic)} if traffic.converses else {}
        )
        return {
            "arch": arch,
            "gpus": plan.gpus,
            "seed": seed,
            "rate": bracket.held,
            "failed_rate": bracket.failed,
            "may_hold": below,
            "attainment": attained(run),
            "limited_by": limit,
            "output_tokens_per_s": tokens_per_s,
            "usd_per_million_output_tokens": usd,
            **per_talk,
            "profile": run["profile"],
            "foundation": run["foundation"],
            "forward_error_bar": run.get("forward_error_bar"),
            **{name: value for name, value in run.items() if name.startswith("outside_measured")},
        }

    def _beyond(self, case: Case, failed: float) -> tuple[float, str]:
        """Upper limit of the capacity, and why the first rate that did not hold failed.

        The limit is that rate, or the saturated one if the run was inconclusive.
        """
        [run] = self.bench.rows([self.plan.experiment(case, failed)])
        goal = self.plan.goal
        unclear = goal.attains(run) and run["stability"] == "inconclusive"
        missed = "+".join(name for name, room in goal.headrooms(run).items() if room < 1)
        below = max(failed, self._most_held(case, failed)) if unclear else failed
        return below, missed or ("queue" if goal.attains(run) else "levels together")
