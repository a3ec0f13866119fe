"""The best draft length at each batch size, as vLLM and SGLang take it: by formula, confirmed by short simulations.

A round of k drafts for n rows takes T(n, k) by the calibrated latency model and yields g(k) tokens a row: the best k
has the most n g / T. At k=0 vLLM and SGLang have the drafter read along (`follows`), which costs a draft step for
nothing; pdvsim's own controllers let it rest. So a table for the one is not a table for the other.

Left out of the formula: prompts read beside the rounds (the simulations have them), and the spread of lengths.
Left out of both: vLLM's drafter reads a whole round again before it drafts, rejected tokens too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from pdvsim.decide.contest import shares
from pdvsim.decide.draft_table import DraftQuestion, DraftTable, Simulated, Tier
from pdvsim.decide.formula import SAMPLE, Formula
from pdvsim.decide.runs import Bench, at_acceptance
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.hardware.profile import Profile
from pdvsim.sim.run import bar_of, covering_profile, models_of
from pdvsim.study.stats import interval

Logs = NDArray[np.float64]  # logarithms of tokens per second: a row for each batch size, a column for each draft length

RATES = tuple(i / 50 for i in range(51))  # acceptance rates at which a draft length is tried
TRIED_SIZES = 16  # of a tier, at these rates


class Speeds:
    """Tokens per second of batches, by formula."""

    def __init__(self, question: DraftQuestion) -> None:
        drafting = question.drafting(question.max_k)
        self.question = question
        self.formula = Formula(replace(drafting, traffic=replace(drafting.traffic, num_prompts=SAMPLE)))

    def logs(self, sizes: Sequence[int], acceptance: Acceptance) -> Logs:
        """Of each batch size, by draft length from 0 on."""
        tokens = [self.formula.tokens_a_round(k, acceptance) for k in range(self.question.max_k + 1)]
        first = tokens[1] - 1.0
        rounds_s = [[self._round_s(rows, k, first) for k in range(len(tokens))] for rows in sizes]
        found: Logs = np.log(np.outer(sizes, tokens) / rounds_s)
        return found

    def plain(self, sizes: Sequence[int]) -> Logs:
        """Of each batch size, on a server without a drafter."""
        return np.log([rows / self._turn_s(rows, 0, 0.0) for rows in sizes])

    def _round_s(self, rows: int, k: int, first: float) -> float:
        whole = self._turn_s(rows, k, first)
        if k or not self.question.follows:
            return whole
        step = self.formula.planner.models["draft"].shape(rows, 1)
        return whole + step.solo_0 + step.solo_1 * int(rows * self.formula.context)

    def _turn_s(self, rows: int, k: int, first: float) -> float:
        return self.formula.planner.turn_s(rows, int(rows * self.formula.context), k, first)


def error_of(profile: Profile, experiment: Experiment) -> float:
    """What a gain of one draft length over another must exceed, as a share; nan where the profile states no errors.

    Predicted forwards: their error bar. Measured ones: two rounds are off, each on its own, by the larger of the two
    models' median errors on points held out of the fit.
    """
    if bar := bar_of(experiment, profile):
        return bar
    held_out = profile.provenance.get("held_out_error", {})
    medians = [held_out.get(model.name, {}).get("median", math.nan) for model in models_of(experiment)]
    return math.nan if any(map(math.isnan, medians)) else math.sqrt(2) * max(medians)


def find_table(question: DraftQuestion) -> DraftTable:
    """The table by formula."""
    started_s = time.monotonic()
    drafting = question.drafting(question.max_k)
    profile, speeds = covering_profile(drafting), Speeds(question)
    sizes = range(1, question.most + 1)
    logs, plain = speeds.logs(sizes, question.base.acceptance), speeds.plain(sizes)
    error, top = error_of(profile, drafting), logs.max(axis=1)
    best = logs.argmax(axis=1).tolist()
    tiers = _merged(logs, best, question.indifference)
    chosen = np.concatenate([logs[first - 1 : last, k] for first, last, k in tiers])
    single, single_lost = _single(logs, plain, chosen)
    behind = np.flatnonzero(plain <= chosen)  # sizes at which the table is no slower
    plain_from = int(behind[-1]) + 2 if len(behind) else 1
    pair = drafting.pair
    reaches = [reach.rows for m in (pair.draft, pair.target) if (reach := profile.measured.get(m.name)) and reach.rows]
    return DraftTable(
        question,
        [_tier(speeds, logs, plain, *span) for span in tiers],
        tuple(best),
        float(np.expm1((top - chosen).max())),
        error,
        single,
        single_lost,
        plain_from if plain_from <= question.most else None,
        speeds.formula.fits(question.max_k),
        min(reaches, default=None),
        profile.name,
        profile.foundation,
        spent_s=time.monotonic() - started_s,
    )


def confirm(table: DraftTable, bench: Bench) -> None:
    """Simulate each tier's draft length and its neighbours at the tier's middle size. Ctrl-C keeps what is known."""
    started_s = time.monotonic()
    try:
        bench.rows([run for tier in table.tiers for runs in simulations(table, tier).values() for run in runs])
    except KeyboardInterrupt:
        table.interrupted = True
    for at, tier in enumerate(table.tiers):
        speeds = {}
        for k, runs in simulations(table, tier).items():
            if rows := bench.known(runs):
                speeds[k] = [float(row["output_throughput"]) for row in rows]
        if tier.k in speeds:
            leads = {k: interval(shares(theirs, speeds[tier.k])) for k, theirs in speeds.items() if k != tier.k}
            table.tiers[at] = replace(tier, simulated=Simulated(tier.middle, leads) if leads else None)
    table.runs = bench.runs
    table.spent_s += time.monotonic() - started_s


def simulations(table: DraftTable, tier: Tier) -> dict[int, list[Experiment]]:
    """The runs that confirm a tier, by draft length: its own and those one shorter and longer.

    None where the KV cache never holds such a batch, and not of 0 where the drafter follows: simulated, it rests.
    """
    question = table.question
    least = 1 if question.follows else 0
    if tier.middle > table.fits or tier.k < least:
        return {}
    lengths = [k for k in (tier.k, tier.k - 1, tier.k + 1) if least <= k <= question.max_k]
    return {k: question.at_once(tier.middle, k) for k in lengths}


def _spans(lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Runs of equal draft lengths: first size, last size, draft length."""
    first = 1
    for k, group in groupby(lengths):
        last = first + sum(1 for _ in group) - 1
        yield first, last, k
        first = last + 1


def _merged(logs: Logs, best: Sequence[int], indifference: float) -> list[tuple[int, int, int]]:
    """The fewest spans, then the least lost: over no run of sizes with one best length more than `indifference`."""
    runs = list(_spans(best))
    behind = logs.max(axis=1, keepdims=True) - logs
    lost = np.array([behind[first - 1 : last].sum(axis=0) for first, last, _ in runs])
    count = np.array([last - first + 1 for first, last, _ in runs])
    will_do = np.expm1(lost / count[:, None]) <= indifference
    cheapest: list[tuple[int, float, int, int]] = [(0, 0.0, 0, 0)]  # up to each run: spans, lost, last one's start, k
    for end in range(1, len(runs) + 1):
        ways = []
        for start in range(end - 1, -1, -1):
            able = np.flatnonzero(will_do[start:end].all(axis=0))
            if not len(able):
                break
            costs = lost[start:end, able].sum(axis=0)
            spans, before, *_ = cheapest[start]
            ways.append((spans + 1, before + float(costs.min()), start, int(able[costs.argmin()])))
        cheapest.append(min(ways))
    found = []
    end = len(runs)
    while end:
        _, _, start, k = cheapest[end]
        found.append((runs[start][0], runs[end - 1][1], k))
        end = start
    return found[::-1]


def _tier(speeds: Speeds, logs: Logs, plain: Logs, first: int, last: int, k: int) -> Tier:
    there = slice(first - 1, last)
    over = np.expm1(logs[there, k].mean() - logs[there].mean(axis=0))
    rival = min((other for other in range(logs.shape[1]) if other != k), key=lambda other: float(over[other]))
    return Tier(
        first,
        last,
        k,
        (math.exp(logs[first - 1, k]), math.exp(logs[last - 1, k])),
        rival,
        float(over[rival]),
        float(np.expm1((logs[there, k] - plain[there]).mean())),
        float(over[speeds.question.compared]),
        _acceptances(speeds, first, last, k),
    )


def _acceptances(speeds: Speeds, first: int, last: int, k: int) -> tuple[float, float] | None:
    """Between which acceptance rates, around the one given, a draft length stays the best, smaller gains aside."""
    base, indifference = speeds.question.base, speeds.question.indifference
    if not speeds.question.has_rate:
        return None
    here = base.acceptance.acceptance_rate
    sizes = sorted(set(np.linspace(first, last, min(TRIED_SIZES, last - first + 1)).astype(int).tolist()))

    def reached(rates: Sequence[float]) -> float:
        end = here
        for rate in rates:
            means = speeds.logs(sizes, at_acceptance(base, rate).acceptance).mean(axis=0)
            if np.expm1(means.max() - means[k]) > indifference:
                break
            end = rate
        return end

    return reached([r for r in reversed(RATES) if r < here]), reached([r for r in RATES if r > here])


def _single(logs: Logs, plain: Logs, chosen: Logs) -> tuple[int, float]:
    """The draft length that costs least against the table, 0 being a server without a drafter, and what it costs."""
    fixed = np.column_stack([plain, logs[:, 1:]])
    weights = 1 / np.arange(1, len(chosen) + 1)
    costs = -np.expm1(np.average(fixed - chosen[:, None], axis=0, weights=weights))
    k = int(costs.argmin())
    return k, float(costs[k])
