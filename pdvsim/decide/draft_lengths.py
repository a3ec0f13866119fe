"""The best draft length at each batch size: simulated at a few sizes, and by formula between them.

Closed loops are simulated with prompts, catch-up and power limit, at a few sizes and on both sides of every edge of the
table. Between these sizes the formula (`formula`) is scaled to match the simulations. At k=0 the drafter still runs,
which costs a draft step per token.

Not modelled: vLLM's drafter processes a whole round again before it drafts, rejected tokens included.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.draft_table import PLAIN, Border, DraftQuestion, DraftTable, SizeAndLength, Tier
from pdvsim.decide.edge import Bracketing, Edge, Ends, find_edge, first_where, lockstep
from pdvsim.decide.formula import JOINING_ROUNDS, RATES, SAMPLED_REQUESTS, Formula
from pdvsim.decide.runs import Bench, at_acceptance
from pdvsim.sim.assembly import ServerParts, covering_profile, models_of
from pdvsim.sim.config import Acceptance, Experiment, Server
from pdvsim.sim.prices.profile import Profile

TRIED_SIZES = 16  # of a tier, at these rates
SIZE_RATIO = 8
CLOSE = 0.04  # formula's error between lengths: those within this of the best are simulated too
EDGE_ROUNDS = 3
NEARBY = 0.1  # logarithm of sizes within which one simulation stands for another

LengthPair = tuple[int, int]  # before a border and beyond it


class SizeRange(NamedTuple):
    """Batch sizes with one draft length."""

    first: int
    last: int
    k: int


Logs = NDArray[np.float64]  # log tokens per second: one row per batch size, one column per draft length


class Speeds:
    """Tokens per second of closed loops, by formula, corrected by simulations."""

    def __init__(self, question: DraftQuestion) -> None:
        drafting = question.drafting(question.max_k)
        self.question = question
        self.formula = Formula(replace(drafting, traffic=replace(drafting.traffic, num_prompts=SAMPLED_REQUESTS)))
        self.fits = self.formula.fits(question.max_k)
        self.simulated: dict[SizeAndLength, Interval] = {}
        self._formulas = {drafting.acceptance: self.formula}
        self._offsets: dict[SizeAndLength, float] = {}  # log of simulated over formula

    def learn(self, points: Iterable[SizeAndLength], bench: Bench) -> None:
        """Use simulated points."""
        for rows, k in sorted(points):  # plain decoding first: k=0 depends on it
            if runs := bench.known(self.question.loops(rows, k)):
                speeds = interval(float(row["output_throughput"]) for row in runs)
                self.simulated[rows, k] = speeds
                self._offsets[rows, k] = math.log(speeds.mean) - float(self._by_formula([rows], k)[0])

    def logs(self, sizes: Sequence[int], acceptance: Acceptance | None = None) -> Logs:
        """Log throughput by batch size and draft length from 0 on; minus infinity for lengths the engine lacks."""
        return np.column_stack([self.length(sizes, k, acceptance) for k in range(self.question.max_k + 1)])

    def plain(self, sizes: Sequence[int]) -> Logs:
        """Log throughput by batch size, on a server without a drafter."""
        return self.length(sizes, PLAIN)

    def length(self, sizes: Sequence[int], k: int, acceptance: Acceptance | None = None) -> Logs:
        """Log throughput by batch size, with one draft length."""
        return self._by_formula(sizes, k, acceptance) + self._moves(sizes, k)

    def _by_formula(self, sizes: Sequence[int], k: int, acceptance: Acceptance | None = None) -> Logs:
        if k == 0:
            return self._idle_by_formula(sizes)
        formula = self.formula
        if acceptance is not None:
            changed = replace(formula.experiment, acceptance=acceptance)
            formula = self._formulas.setdefault(acceptance, Formula(changed))
        return np.log([speed for _, speed in formula.loops(max(k, 0), sizes)])

    def _idle_by_formula(self, sizes: Sequence[int]) -> Logs:
        """At k=0: plain decoding, plus the drafter's pass over every token."""
        if self.question.served_by.lowest_k > 0:
            return np.full(len(sizes), -np.inf)
        plain, formula = self.plain(sizes), self.formula
        rounds, drafter, more_s = formula.rounds(0) + JOINING_ROUNDS, formula.planner.models["draft"], []
        for rows in (min(size, self.fits) for size in sizes):
            cached = int(rows * formula.context)
            step = drafter.price(rows, 1, 1, cached)
            prompt_s = drafter.price(rows, 1, 1, cached, [formula.prompt]).seconds_0 - step.seconds_0
            more_s.append((rounds * step.seconds(cached) / rows + prompt_s) / formula.output_tokens)
        return -np.log(np.exp(-plain) + more_s)

    def _moves(self, sizes: Sequence[int], k: int) -> Logs:
        """Simulated over predicted (log) for the nearest simulated length at each size; k=0 and PLAIN have their own.

        Between simulated sizes it is interpolated linearly in the logarithm of the size.
        """
        nearest: dict[int, int] = {}
        for rows, other in self._offsets:
            if np.sign(other) == np.sign(k) and (rows not in nearest or abs(other - k) < abs(nearest[rows] - k)):
                nearest[rows] = other
        if not nearest:
            return np.zeros(len(sizes))
        places = sorted(nearest)
        moved: Logs = np.interp(np.log(sizes), np.log(places), [self._offsets[rows, nearest[rows]] for rows in places])
        return moved


def error_of(profile: Profile, experiment: Experiment) -> float:
    """Threshold for the relative gain of one draft length over another; nan if the profile states no errors.

    For predicted forwards it is their error bar. For measured ones it is the error of two independent rounds, each with
    the larger of the two models' median errors on points held out of the fit.
    """
    if bar := ServerParts(experiment, profile).bar:
        return bar
    held_out = profile.provenance.get("held_out_error", {})
    medians = [held_out.get(model.name, {}).get("median", math.nan) for model in models_of(experiment)]
    return math.nan if any(map(math.isnan, medians)) else math.sqrt(2) * max(medians)


def find_table(question: DraftQuestion, bench: Bench | None = None) -> DraftTable:
    """The table; by formula alone without a bench. Ctrl-C keeps finished runs."""
    started_s = time.monotonic()
    speeds, interrupted = Speeds(question), False
    try:
        if bench is not None:
            _simulate(speeds, bench)
    except KeyboardInterrupt:
        interrupted = True
    table = _table(speeds)
    try:
        if bench is not None and not interrupted and question.engine == "vllm":
            table.borders = _borders(table, bench)
    except KeyboardInterrupt:
        interrupted = True
    table.interrupted, table.runs = interrupted, bench.runs if bench is not None else 0
    table.spent_s = time.monotonic() - started_s
    return table


def usual_runs(question: DraftQuestion) -> int:
    """Estimated simulations of a table: four lengths at each size, two edges that move once, and these in service."""
    return (4 * len(_sizes(question.most)) + 2 * 2 * 3 + 2 * 2) * question.num_runs


def _sizes(most: int) -> list[int]:
    return [min(SIZE_RATIO**step, most) for step in range(math.ceil(math.log(most, SIZE_RATIO)) + 1)]


def _simulate(speeds: Speeds, bench: Bench) -> None:
    """Simulate a few sizes; then find every border as an edge over sizes; then the worst size of each range."""
    most = min(speeds.question.most, speeds.fits)
    _run(speeds, [(rows, k) for rows in _sizes(most) for k in _worth_simulating(speeds, rows)], bench)
    places = list(dict.fromkeys(round(math.exp(NEARBY * step)) for step in range(math.ceil(math.log(most) / NEARBY))))
    places += [most]

    def margins(asked: dict[LengthPair, int]) -> list[float]:
        """Lead of the length before a border over that beyond it, as a logarithm."""
        _run(speeds, [(places[place], k) for lengths, place in asked.items() for k in lengths], bench)
        means = {point: math.log(held.mean) for point, held in speeds.simulated.items()}
        return [means[places[at], before] - means[places[at], after] for (before, after), at in asked.items()]

    ends = dict[LengthPair, Edge]()
    for _ in range(EDGE_ROUNDS):  # simulations may name other lengths
        found = {lengths: size for lengths, size in _crossings(speeds, most).items() if lengths not in ends}
        searches = {lengths: _border_search(speeds, lengths, size, places) for lengths, size in found.items()}
        lockstep(searches, margins, ends)
        logs, plain, tiers = _ranged(speeds, most)
        worst = [(_worst(logs, plain, tier), tier.k) for tier in tiers]
        sides = [(right.first, k) for left, right in pairwise(tiers) for k in (left.k, right.k)]
        both = dict.fromkeys((rows, one) for rows, k in [*worst, *sides] for one in (PLAIN, k))
        new = [(r, k) for r, k in both if not any(k == other and _near(r, size) for size, other in speeds.simulated)]
        _run(speeds, new, bench)
        if not found and not new:
            return


def _border_search(speeds: Speeds, lengths: LengthPair, size: int, places: Sequence[int]) -> Bracketing:
    """The search for the size from which the second length is better, from where it is so far predicted."""
    before, after = (speeds.length(places, k) for k in lengths)
    start = min(range(len(places)), key=lambda place: abs(math.log(places[place] / size)))
    lower, upper = max(start - 1, 0), min(start + 1, len(places) - 1)
    leads = before - after
    slope = max(0.0, float(leads[lower] - leads[upper]) / max(1, upper - lower))
    return find_edge(start, Ends(-1, len(places)), 2, 2, slope, trust=1.0, known=slope > 0)


def _crossings(speeds: Speeds, most: int) -> dict[LengthPair, int]:
    """The lengths before and beyond each border, and that at which a server without a drafter gets faster."""
    logs, plain, tiers = _ranged(speeds, most)
    crossings = {(left.k, right.k): right.first for left, right in pairwise(tiers)}
    first = _plain_from(plain, _chosen(logs, tiers))
    return crossings | {(tier.k, PLAIN): first for tier in tiers if tier.first < first <= tier.last}


def _run(speeds: Speeds, points: Sequence[SizeAndLength], bench: Bench) -> None:
    try:
        bench.rows([run for rows, k in points for run in speeds.question.loops(rows, k)])
    finally:
        speeds.learn(points, bench)


def _worth_simulating(speeds: Speeds, rows: int) -> list[int]:
    """Lengths near the best at a size, the one compared with, and plain decoding."""
    logs = speeds.logs([rows])[0]
    best = max(1, int(logs.argmax()))
    near = {k for k in range(len(logs)) if logs[best] - logs[k] <= CLOSE}
    return list(dict.fromkeys([PLAIN, *sorted(near | {speeds.question.compared})]))


def _near(rows: int, size: int) -> bool:
    """Whether one simulation stands for both sizes."""
    return abs(math.log(size / rows)) <= NEARBY


def _ranged(speeds: Speeds, most: int) -> tuple[Logs, Logs, list[SizeRange]]:
    """Speeds up to a size, with drafts and without, and the ranges: each border where its two lengths are equal."""
    sizes, indifference = range(1, most + 1), speeds.question.indifference
    logs, plain = speeds.logs(sizes), speeds.plain(sizes)
    lengths = sorted({tier.k for tier in _merged(logs, logs.argmax(axis=1).tolist(), indifference)})
    among = np.full_like(logs, -np.inf)
    among[:, lengths] = logs[:, lengths]
    return logs, plain, _merged(among, among.argmax(axis=1).tolist(), indifference, logs.max(axis=1))


def _borders(table: DraftTable, bench: Bench) -> list[Border]:
    """Each border that a batch can reach, where both lengths were simulated, with the table in service."""
    known = table.simulated
    places = []
    for left, right in pairwise(table.tiers):
        both = [rows for rows, k in known if k == left.k and (rows, right.k) in known]
        near = min(both, key=lambda rows: abs(math.log(rows / right.first)), default=None)
        if near is not None and _near(near, right.first):
            places.append((right.first, near, left.k, right.k))
    loops = [_served(table, at) for _, at, *_ in places]
    bench.rows([run for runs in loops for run in runs])
    speeds = [interval(float(row["output_throughput"]) for row in bench.known(runs) or ()).mean for runs in loops]
    crossed = []
    for (first, at, before, after), served in zip(places, speeds, strict=True):
        better = max(known[at, before].mean, known[at, after].mean)
        crossed.append(Border(first, at, before, after, 1 - served / better))
    return crossed


def _served(table: DraftTable, rows: int) -> list[Experiment]:
    """Replications of a closed loop of `rows` requests, with the table in service."""
    tiers = tuple(f"{tier.first}:{tier.k}" for tier in table.tiers)
    usual = table.question.loops(rows, Server.num_speculative_tokens)
    server = replace(usual[0].server, controller="table", num_speculative_tokens_per_batch_size=tiers)
    return [replace(one, server=server) for one in usual]


def _table(speeds: Speeds) -> DraftTable:
    question, formula = speeds.question, speeds.formula
    profile = covering_profile(formula.experiment)
    logs, plain, tiers = _ranged(speeds, question.most)
    best = logs.argmax(axis=1).tolist()
    chosen = _chosen(logs, tiers)
    single, single_lost = _single(logs, plain, chosen)
    first = _plain_from(plain, chosen)
    pair = formula.experiment.pair
    reaches = [reach.rows for m in (pair.draft, pair.target) if (reach := profile.measured.get(m.name)) and reach.rows]
    return DraftTable(
        question,
        [_tier(speeds, logs, plain, span) for span in tiers],
        tuple(best),
        float(np.expm1((logs.max(axis=1) - chosen).max())),
        error_of(profile, formula.experiment),
        single,
        single_lost,
        first if first <= question.most else None,
        formula.context,
        speeds.fits,
        min(reaches, default=None),
        profile.name,
        profile.foundation,
        dict(sorted(speeds.simulated.items())),
    )


def _chosen(logs: Logs, tiers: Sequence[SizeRange]) -> Logs:
    """Speed of the table at each size."""
    return np.concatenate([logs[tier.first - 1 : tier.last, tier.k] for tier in tiers])


def _worst(logs: Logs, plain: Logs, tier: SizeRange) -> int:
    """The size of a range at which its draft length gains least over plain decoding."""
    there = slice(tier.first - 1, tier.last)
    return tier.first + int((logs[there, tier.k] - plain[there]).argmin())


def _plain_from(plain: Logs, chosen: Logs) -> int:
    """The size from which plain decoding is faster than the table; beyond the last size if it never is."""
    slower = np.flatnonzero(plain <= chosen)
    return int(slower[-1]) + 2 if len(slower) else 1


def _merged(logs: Logs, best: Sequence[int], indifference: float, top: Logs | None = None) -> list[SizeRange]:
    """The fewest ranges, then the smallest loss: at most `indifference` at every size against `top`, or the best."""
    starts = np.flatnonzero(np.diff(best, prepend=-1)).tolist()  # where the best length changes
    edges = [*starts, len(best)]
    deficit = (logs.max(axis=1) if top is None else top)[:, np.newaxis] - logs
    lost = np.add.reduceat(deficit, starts)
    will_do = np.expm1(np.maximum.reduceat(deficit, starts)) <= indifference
    cheapest: list[tuple[int, float, int, int]] = [(0, 0.0, 0, 0)]  # up to each edge: ranges, lost, last one's start, k
    for end in range(1, len(edges)):
        choices = []
        for start in range(end - 1, -1, -1):
            able = np.flatnonzero(will_do[start:end].all(axis=0))
            if not len(able):
                break
            costs = lost[start:end, able].sum(axis=0)
            count, before, *_ = cheapest[start]
            choices.append((count + 1, before + float(costs.min()), start, int(able[costs.argmin()])))
        cheapest.append(min(choices))
    ranges = []
    end = len(starts)
    while end:
        _, _, start, k = cheapest[end]
        ranges.append(SizeRange(edges[start] + 1, edges[end], k))
        end = start
    return ranges[::-1]


def _tier(speeds: Speeds, logs: Logs, plain: Logs, span: SizeRange) -> Tier:
    first, last, k = span
    worst = _worst(logs, plain, span)
    there = slice(first - 1, last)
    over = np.expm1(logs[there, k].mean() - logs[there].mean(axis=0))
    rival = min((other for other in range(logs.shape[1]) if other != k), key=lambda other: float(over[other]))
    ends = (first - 1, last - 1)
    return Tier(
        first,
        last,
        k,
        (math.exp(logs[ends[0], k]), math.exp(logs[ends[1], k])),
        (math.expm1(logs[ends[0], k] - plain[ends[0]]), math.expm1(logs[ends[1], k] - plain[ends[1]])),
        worst,
        math.expm1(logs[worst - 1, k] - plain[worst - 1]),
        rival,
        float(over[rival]),
        float(over[speeds.question.compared]),
        _acceptances(speeds, first, last, k),
        _break_even(speeds, first, last, k),
    )


def _acceptances(speeds: Speeds, first: int, last: int, k: int) -> tuple[float, float] | None:
    """The acceptance rates, around the given one, between which a draft length stays best, ignoring small gains."""
    base, indifference = speeds.question.base, speeds.question.indifference
    if not base.acceptance.by_rate:
        return None
    here, sizes = base.acceptance.acceptance_rate, _tried_sizes(first, last)

    def stays_best(rate: float) -> bool:
        means = speeds.logs(sizes, at_acceptance(base, rate).acceptance).mean(axis=0)
        return bool(np.expm1(means.max() - means[k]) <= indifference)

    *_, least = [here, *takewhile(stays_best, (rate for rate in reversed(RATES) if rate < here))]
    *_, most = [here, *takewhile(stays_best, (rate for rate in RATES if rate > here))]
    return least, most


def _tried_sizes(first: int, last: int) -> list[int]:
    return sorted(set(np.linspace(first, last, min(TRIED_SIZES, last - first + 1)).astype(int).tolist()))


def _break_even(speeds: Speeds, first: int, last: int, k: int) -> float | None:
    """The lowest acceptance rate at which a draft length is as fast as a server without a drafter; None: at no rate."""
    base, sizes = speeds.question.base, _tried_sizes(first, last)
    if not base.acceptance.by_rate or not k:
        return None
    plain = speeds.plain(sizes).mean()
    return first_where(
        RATES, lambda rate: bool(speeds.length(sizes, k, at_acceptance(base, rate).acceptance).mean() >= plain)
    )


def _single(logs: Logs, plain: Logs, chosen: Logs) -> tuple[int, float]:
    """The single draft length closest to the table (0: no drafter), and its loss."""
    fixed = np.column_stack([plain, logs[:, 1:]])
    weights = 1 / np.arange(1, len(chosen) + 1)
    costs = -np.expm1(np.average(fixed - chosen[:, None], axis=0, weights=weights))
    k = int(costs.argmin())
    return k, float(costs[k])
