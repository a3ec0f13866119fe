"""Searches for the rates that architectures hold: all cases in parallel, one rate at a time each.

A search is a generator that yields rates and is sent the verdict on each. The next rate is guessed from the head-room
at the rates tested. The guess affects the number of runs, not the result.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pdvsim.common.outcomes import Row
from pdvsim.decide.capacity import Capacities, Case, Plan
from pdvsim.decide.formula import Formula
from pdvsim.decide.goal import attained
from pdvsim.decide.runs import Bench, conversation_output_tokens, keeps_up, mean_output_tokens, saturated
from pdvsim.decide.space import Space
from pdvsim.decide.tune import SHORT, Search, tuned
from pdvsim.sim.config import Arch

WIDE_STEP = 1.25  # largest first step of a search; each later one may be the square of the one before
COARSE = 0.1  # tolerance of the search before tuning
NARROW_STEP = (
    1.06  # the same if the capacity of another seed or of shorter runs is known: these differ by a few percent
)
FILLING = 3  # requests per run for each slot of a larger batch; with fewer the batch would never fill
COARSE_LONG = 0.25  # run length for tuning, as a share of the full length
REACH = 500.0  # search range, as a factor from the starting rate; below it requests hardly overlap
STEEPNESS = 2.0  # head-room falls with about this power of the rate; used until two rates are known
FAR_OFF = 0.3  # beyond this logarithm a head-room tells only the direction
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
    first = at = round(math.log(start) / grid)
    stride = max(1, round(math.log(step) / grid))
    rooms: dict[int, float] = {}
    held: int | None = None
    failed: int | None = None
    guesses = GUESSES
    while True:
        verdict = yield math.exp(at * grid)
        rooms[at] = _side(verdict)
        held, failed = (at, failed) if verdict.holds else (held, at)
        if held is not None and failed is not None:
            if failed - held == 1:
                break
            share = rooms[held] / (rooms[held] - rooms[failed]) if guesses else 0.5
            at = min(max(held + int(share * (failed - held)), held + 1), failed - 1)
            guesses -= guesses > 0
        elif abs(at - first) * grid > math.log(REACH):
            break
        else:
            guess = math.ceil(abs(rooms[at]) / (STEEPNESS * grid))
            jump = min(guess, stride) if len(rooms) <= GUESSES else stride
            at, stride = at + (jump if verdict.holds else -jump), 2 * stride
    return Bracket(
        0.0 if held is None else math.exp(held * grid),
        math.inf if failed is None else math.exp(failed * grid),
        tuple((at * grid, room) for at, room in rooms.items() if held is not None and abs(at - held) * grid < NEAR),
    )


def steepness(brackets: Iterable[Bracket]) -> float:
    """The power of the rate with which head-room falls near the held rate, from the searches of several seeds.

    A relative error of a latency changes the rate by that error divided by this power. To allow for noise it is the
    slope minus two standard errors, at least `LEAST_STEEP`; 1 with too few runs.
    """
    x, y, seeds = list[float](), list[float](), 0
    for bracket in brackets:
        if len(bracket.rooms) > 1:
            means = [sum(part) / len(bracket.rooms) for part in zip(*bracket.rooms, strict=True)]
            x += [rate - means[0] for rate, _ in bracket.rooms]
            y += [room - means[1] for _, room in bracket.rooms]
            seeds += 1
    free, spread = len(x) - seeds - 1, sum(rate * rate for rate in x)
    if free < 1:
        return 1.0
    slope = sum(rate * room for rate, room in zip(x, y, strict=True)) / spread
    left = sum((room - slope * rate) ** 2 for rate, room in zip(x, y, strict=True))
    return max(LEAST_STEEP, -slope - 2 * math.sqrt(left / free / spread))


def _side(verdict: Held) -> float:
    """Logarithm of the head-room at a rate: positive if the rate holds."""
    room = math.log(min(max(verdict.room, 1e-9), 1e9))
    return min(max(room, 1e-3), FAR_OFF) if verdict.holds else -min(max(-room, 1e-3), FAR_OFF)


def find_capacities(plan: Plan, bench: Bench, gpu_hour_usd: float | None = None) -> Capacities:
    """Search all cases in parallel, one rate at a time each, starting from what earlier searches suggest.

    Ctrl-C keeps the searches that have finished.
    """
    found = Capacities(plan, gpu_hour_usd)
    brackets: dict[Case, Bracket] = {}
    before = bench.runs
    try:
        first = plan.base.traffic.seed
        rates = {arch: _most_held(plan, (arch, first), bench) for arch in plan.archs}
        if plan.space is not None and plan.space.steps_of(plan.archs):
            plan = found.plan = _tuned_near(plan, plan.space, rates, bench)
        starts = {(arch, first): rates[arch] for arch in plan.archs}
        step = WIDE_STEP
        while starts:
            plan, brackets = _settled(plan, starts, step, plan.tolerance, bench, brackets)
            found.plan, starts, step = plan, {}, NARROW_STEP
            if plan.space is not None and "batches" in plan.space.steps():
                plan, starts = _with_larger_batches(plan, plan.space, bench, brackets)
                for case in starts:
                    del brackets[case]
        for (arch, _), bracket in brackets.items():
            rates[arch] = bracket.held or rates[arch]
        for archs in (plan.archs[:1], plan.archs[1:]):
            rest = [case for case in plan.cases() if case[0] in archs and case not in brackets]
            searches = {case: search(_near(case, rates, brackets), NARROW_STEP, plan.tolerance) for case in rest}
            lockstep(plan, searches, bench, brackets)
    except KeyboardInterrupt:
        found.interrupted = True
    steep = {arch: steepness(of for case, of in brackets.items() if case[0] == arch) for arch in plan.archs}
    found.rows = [
        _row(plan, case, brackets[case], bench, gpu_hour_usd) | {"steepness": steep[case[0]]}
        for case in plan.cases()
        if case in brackets
    ]
    found.runs = bench.runs - before
    return found


def _near(case: Case, starts: dict[Arch, float], brackets: Mapping[Case, Bracket]) -> float:
    """Starting rate: that of the first seed, scaled as the first architecture's rate changes with this seed."""
    arch, seed = case
    leader = next(iter(starts))
    known = brackets.get((leader, seed), Bracket(0.0, math.inf)).held
    return starts[arch] * (known / starts[leader] if known else 1.0)


def _settled(
    plan: Plan,
    starts: dict[Case, float],
    step: float,
    tolerance: float,
    bench: Bench,
    known: dict[Case, Bracket],
    long: float = 1.0,
) -> tuple[Plan, dict[Case, Bracket]]:
    """Search, and repeat in longer runs if those at a held rate were too short; all runs have one length.

    `known` are brackets from earlier searches with the plan's runs; `long` is the sufficient share of the full length.
    Returns the plan with sufficiently long runs, and all brackets.
    """
    brackets = dict(known)
    while True:
        lockstep(plan, {case: search(start, step, tolerance) for case, start in starts.items()}, bench, brackets, True)
        held = {case: bracket.held for case, bracket in brackets.items() if bracket.held}
        rows = bench.rows([plan.experiment(case, rate) for case, rate in held.items()])
        needed = int(long * max(map(plan.needed, rows), default=0))
        if needed <= plan.base.traffic.num_prompts:
            return plan, brackets
        plan, step = plan.with_prompts(needed), NARROW_STEP
        starts = {case: bracket.held or bracket.failed for case, bracket in brackets.items()}


def _tuned_near(plan: Plan, space: Space, rates: dict[Arch, float], bench: Bench) -> Plan:
    """Tune each architecture at about the rate that it holds; updates `rates`.

    The rate is first searched coarsely, in shorter runs, with the draft length that the formula predicts.
    """
    guesses = {}
    cases = [(arch, plan.base.traffic.seed) for arch in plan.archs]
    for case in cases:
        at = plan.experiment(case, rates[case[0]])
        best = Formula(at).ranked(space.draft_lengths)[0].k if at.speculates and len(space.draft_lengths) > 1 else None
        server = at.server if best is None else replace(at.server, num_speculative_tokens=best)
        guesses[case[0]] = server if "fixed" in space.controllers or not at.speculates else plan.base.server
    short = replace(plan, servers=guesses)
    short = short.with_prompts(max(1, plan.base.traffic.num_prompts // 2))
    starts = {case: rates[case[0]] for case in cases}
    short, brackets = _settled(short, starts, WIDE_STEP, COARSE, bench, {}, COARSE_LONG)
    # runs as long as those of the search: in shorter ones a batch would not fill at that rate
    few = short.base.traffic.num_prompts
    longer = short.with_prompts(int(few / SHORT))
    for case in cases:
        rates[case[0]] = brackets[case].held or rates[case[0]]
    places = [longer.experiment(case, rates[case[0]]) for case in cases]
    found = Search(replace(plan.goal, objective="headroom"), space, plan.warmup_share, plan.tolerance)
    winners = tuned(found, places, bench, alone=True)
    servers = {arch: winners[at][arch].server for at, arch in enumerate(plan.archs)}
    return replace(plan, servers=servers)


def _with_larger_batches(
    plan: Plan, space: Space, bench: Bench, brackets: Mapping[Case, Bracket]
) -> tuple[Plan, dict[Case, float]]:
    """Test larger batches at the first rate that did not hold.

    Settings were tuned at a lower rate, where the batch limit may not be reached. Returns the plan with the batches
    that have more head-room, and the rates to continue from.
    """
    full = {}
    for case, bracket in brackets.items():
        if bracket.failed < math.inf:
            at = plan.experiment(case, bracket.failed)
            [row] = bench.rows([at])
            if int(row["max_concurrent_requests"]) >= at.hardware.replicas * at.server.max_num_seqs:
                limits = [way.server.max_num_seqs for way in space.batches(at)]
                longer = plan.with_prompts(max(plan.base.traffic.num_prompts, *(FILLING * rows for rows in limits)))
                at = longer.experiment(case, bracket.failed)
                larger = (way for way in space.batches(at) if way.server.max_num_seqs > at.server.max_num_seqs)
                full[case] = [at, *larger]
    rows = iter(bench.rows([way for ways in full.values() for way in ways]))
    servers, starts = dict(plan.servers), {}
    for case, ways in full.items():
        rooms = [min(plan.goal.headrooms(next(rows)).values()) for _ in ways]
        if max(rooms) > (1 + plan.tolerance) * rooms[0]:
            servers[case[0]] = ways[rooms.index(max(rooms))].server
            starts[case] = brackets[case].failed
    return replace(plan, servers=servers), starts


def lockstep(
    plan: Plan,
    searches: dict[Case, Bisection],
    bench: Bench,
    brackets: dict[Case, Bracket],
    shorter: bool = False,
) -> None:
    """Complete all searches, filling `brackets`; every step is one batch of runs.

    With `shorter` an inconclusive run that is too short counts as held for now.
    """
    asked = {case: next(steps) for case, steps in searches.items()}
    while asked:
        rows = bench.rows([plan.experiment(case, rate) for case, rate in asked.items()])
        for case, row in list(zip(asked, rows, strict=True)):
            unclear = shorter and plan.needed(row) > plan.base.traffic.num_prompts and keeps_up(row)
            stable = unclear or row["stability"] == "stable"
            holds = stable and plan.goal.attains(row) and asked[case] <= _most_held(plan, case, bench)
            try:
                asked[case] = searches[case].send(Held(holds, min(plan.goal.headrooms(row).values())))
            except StopIteration as end:
                brackets[case] = end.value
                del asked[case]


def _most_held(plan: Plan, case: Case, bench: Bench) -> float:
    """The throughput of a case's servers when saturated: no higher rate can be held, whatever a run shows.

    It is measured in output tokens, which one run gives more precisely than requests, as their lengths vary.
    """
    [row] = bench.rows([saturated(plan.experiment((case[0], plan.base.traffic.seed), 1.0))])
    return float(row["output_throughput"]) / mean_output_tokens(plan.experiment(case, 1.0).traffic)


def _row(plan: Plan, case: Case, bracket: Bracket, bench: Bench, gpu_hour_usd: float | None) -> Row:
    arch, seed = case
    at = bracket.held or bracket.failed
    experiment = plan.experiment(case, at)
    [run] = bench.rows([experiment])
    tokens_per_s = float(run["steady_output_throughput"]) if bracket.held else 0.0
    below, limit = bracket.held, "nothing"
    if bracket.failed < math.inf:
        below, limit = _beyond(plan, case, bracket.failed, bench)
    usd = math.nan
    if gpu_hour_usd is not None and tokens_per_s:
        usd = gpu_hour_usd * plan.gpus / (tokens_per_s * 3600) * 1e6
    talk = {}
    if experiment.traffic.converses:
        talk["usd_per_conversation"] = usd / 1e6 * conversation_output_tokens(experiment.traffic)
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
        **talk,
        "profile": run["profile"],
        "foundation": run["foundation"],
        "forward_error_bar": run.get("forward_error_bar"),
        **{name: value for name, value in run.items() if name.startswith("outside_measured")},
    }


def _beyond(plan: Plan, case: Case, failed: float, bench: Bench) -> tuple[float, str]:
    """Upper limit of the capacity, and why the first rate that did not hold failed.

    The limit is that rate, or the saturated one if the run was inconclusive.
    """
    [run] = bench.rows([plan.experiment(case, failed)])
    attains = plan.goal.attains(run)
    unclear = attains and run["stability"] == "inconclusive"
    missed = "+".join(name for name, room in plan.goal.headrooms(run).items() if room < 1)
    below = max(failed, _most_held(plan, case, bench)) if unclear else failed
    return below, missed or ("queue" if attains else "levels together")
