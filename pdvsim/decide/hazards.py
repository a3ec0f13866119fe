"""Failure modes near a recommendation, each from runs or from the profile.

Low concurrency, poor acceptance, a draft model too slow for its target, a full KV cache, a load near capacity.

Not covered: what pdvsim does not model (docs/model.md), and changes in the lengths or burstiness of the traffic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.bracket import Ends, find_edge, lockstep
from pdvsim.decide.capacity import Capacities, Plan
from pdvsim.decide.capacity_search import find_capacities
from pdvsim.decide.contest import Contest
from pdvsim.decide.finals import contest_of
from pdvsim.decide.flips import Rivalry
from pdvsim.decide.formula import break_even_rate
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, at_acceptance, at_rate, replications
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Acceptance, Experiment
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.metrics.steady import LEAST
from pdvsim.sim.relevance import applicable
from pdvsim.sim.workload.acceptance import expected_tokens
from pdvsim.view.table import cell

ALONE_PROMPTS = 25
RATE_CELLS = 32
RATE_STEPS = 100  # resolution of an equivalent rate
FEW_RUNS = 3  # replications per step of a bisection
SEARCH_RUNS = 5  # estimated runs of a capacity search, per seed
CLOSE = 0.05  # precision of the distance to capacity: an advice needs no more


@dataclass(frozen=True)
class Alone:
    """Concurrency 1: mean end-to-end latency of all finalists."""

    e2el_ms: Contest
    speculation_gain: Interval | None  # TPOT of plain decoding over the recommendation's; None if it does not draft

    def text(self, best: str) -> str:
        """The recommendation of this name against the other finalists, as text."""
        contest = self.e2el_ms
        text = f"at concurrency 1 E2EL is {cell(contest.values[best], 0)} ms"
        alike = [name for name in contest.tied if name != best]
        if best in contest.tied:
            tied = f" (no significant difference from {', '.join(alike)})" if alike else ""
            text += f", the lowest of the finalists{tied}"
        else:
            lowest = cell(contest.values[contest.best], 0)
            text += f"; {contest.best} is at {lowest} ms ({contest.leads[best].mean:.1%} lower)"
        if self.speculation_gain is not None:
            text += f"; drafting is {cell(self.speculation_gain)} times as fast as plain decoding"
        return text


def alone(rivalry: Rivalry, bench: Bench) -> Alone:
    """All finalists at concurrency 1."""
    finalists = {name: _alone(candidate) for name, candidate in rivalry.finalists.items()}
    rows = bench.replicated(finalists, rivalry.num_runs)
    e2el = contest_of(rows, Goal("e2el"), finalists, rivalry.search.indifference)
    mine = rows[rivalry.best]
    plain = next((rows[name] for name, c in finalists.items() if c.arch == "autoregressive"), None)
    gain = None
    if plain is not None and rivalry.recommended.arch != "autoregressive":
        gain = interval([p["mean_tpot_ms"] / m["mean_tpot_ms"] for p, m in zip(plain, mine, strict=True)])
    return Alone(e2el, gain)


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
    loses_at: float | None  # highest acceptance tested at which plain decoding is better; None: never
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
    k = _mean_draft_length(rows) or 1
    tokens = interval(row["spec_decode_acceptance_length"] for row in rows).mean
    rates = [cell / RATE_STEPS for cell in range(RATE_STEPS + 1)]
    return min(rates, key=lambda rate: abs(expected_tokens(rate, k) - tokens))


def _mean_draft_length(rows: Sequence[Row]) -> int:
    """Mean draft length of a round, at least 1; 0 if nothing was drafted."""
    rounds = sum(float(row.get("spec_decode_num_drafts", 0) or 0) for row in rows)
    return max(1, round(sum(float(row["spec_decode_draft_tokens"]) for row in rows) / rounds)) if rounds > 0 else 0


def break_even(drafting: Experiment, plain: Experiment, rivalry: Rivalry, bench: Bench) -> BreakEven:
    """The cell of a grid of acceptance rates in which drafting starts to pay by the mean of the objective.

    The search starts where the formula predicts it, widens until it has a rate on either side, then narrows. At every
    rate the drafts have the best length from 1 on: where the formula prefers none, drafting may still pay.
    """
    goal, runs = rivalry.search.goal, min(FEW_RUNS, rivalry.num_runs)
    here = drafting.acceptance.acceptance_rate
    if not drafting.acceptance.by_rate:
        here = equivalent_rate(bench.rows(replications(drafting, runs)))
        drafting = replace(drafting, acceptance=Acceptance())

    def value(rows: Sequence[Row]) -> float:
        return goal.sign * interval(map(goal.value, rows)).mean

    def loses(asked: dict[str, int]) -> list[float]:
        """1 where plain decoding is better, else -1; runs the next lower rate too: the two often are the answer."""
        [cell] = asked.values()
        cells = {str(c): at_acceptance(drafting, c / RATE_CELLS) for c in (cell, max(cell - 1, 0))}
        at = {name: rivalry.placed(one, drafting=True) for name, one in cells.items()}
        rows = bench.replicated({"plain": rivalry.placed(plain)} | at, runs)
        return [1 if value(rows["plain"]) >= value(rows[str(cell)]) else -1]

    name, limits = rivalry.search.name(drafting), Ends(-1, RATE_CELLS + 1)
    guess = break_even_rate(drafting, [k for k in rivalry.search.space.draft_lengths if k])
    start = RATE_CELLS if guess is None else round(guess * RATE_CELLS)
    edges: dict[str, Ends] = {}
    lockstep({name: find_edge(start, limits)}, loses, edges)
    losing, winning = (None if cell in limits else cell / RATE_CELLS for cell in edges[name])
    return BreakEven(name, here, losing, winning)


def break_even_runs(rivalry: Rivalry) -> int:
    """Most simulations that `break_even` runs."""
    widened = RATE_CELLS.bit_length()  # pairs until there is a rate on either side; bisection takes at most as many
    return (1 + 4 * widened) * min(FEW_RUNS, rivalry.num_runs)


@dataclass(frozen=True)
class Balance:
    """Cost and yield of the draft model in one round by the profile, ignoring streams and host."""

    arch: str
    rows: int  # mean batch of the runs
    k: int
    draft_s: float  # all k steps
    verify_s: float
    decode_s: float  # plain step of the target for the same rows
    tokens_per_round: float

    @property
    def step_ratio(self) -> float:
        """A draft step over a target step."""
        return self.draft_s / self.k / self.decode_s

    @property
    def speedup(self) -> float:
        """Tokens per second of the round over those of plain steps."""
        return self.tokens_per_round * self.decode_s / (self.draft_s + self.verify_s)

    @property
    def affordable(self) -> float:
        """Factor on the draft's cost at which a round only equals plain steps; 0 or less: it never pays."""
        return (self.tokens_per_round * self.decode_s - self.verify_s) / self.draft_s

    @property
    def text(self) -> str:
        """Cost and yield of the draft model as text."""
        share = self.draft_s / (self.draft_s + self.verify_s)
        text = (
            f"{self.arch} at {self.rows} rows: a draft step costs {self.step_ratio:.2f} of a target step, "
            f"{self.k} of them {share:.0%} of a round; a round of {self.tokens_per_round:.2f} tokens is "
            f"{self.speedup:.2f} times as fast as plain steps"
        )
        if self.affordable > 1:
            return text + f"; it breaks even if the draft costs {self.affordable:.1f} times as much"
        return text + ": the verify alone takes longer" if self.affordable <= 0 else text + ": the draft costs too much"


def balance(drafting: Experiment, rows: Sequence[Row]) -> Balance | None:
    """Cost of the mean round of these runs; None if nothing was drafted."""
    k = _mean_draft_length(rows)
    if not k:
        return None
    batch = max(1, round(interval(row["kinds_verify_mean_batch"] for row in rows).mean))
    tokens_in = sum(float(row["total_input_tokens"]) + float(row["total_output_tokens"]) / 2 for row in rows)
    context = int(batch * tokens_in / sum(float(row["completed"]) for row in rows))
    pair, profile = drafting.pair, covering_profile(drafting)
    draft, target = profile.cost_model(pair.draft), profile.cost_model(pair.target)

    def seconds(model: CostModel, tokens: int, steps: int = 1) -> float:
        return model.price(batch, tokens, steps, context).seconds(context)

    yielded = interval(row["spec_decode_acceptance_length"] for row in rows).mean
    return Balance(drafting.arch, batch, k, seconds(draft, 1, k), seconds(target, k + 1), seconds(target, 1), yielded)


def memory(rows: Sequence[Row]) -> dict[str, int]:
    """Peak use of the KV cache in these runs, and its capacity, in tokens."""
    return {
        "peak_tokens": max(int(row["kv_peak_tokens"]) for row in rows),
        "capacity_tokens": int(rows[0]["kv_capacity_tokens"]),
    }


def saturation(rivalry: Rivalry, bench: Bench, usd: float | None) -> Capacities:
    """The highest rate the recommendation itself holds on the same GPUs, as `pdvsim capacity` finds it."""
    base, runs = applicable(rivalry.recommended), min(FEW_RUNS, rivalry.num_runs)
    plan = Plan(base, (base.arch,), runs, rivalry.search.goal, CLOSE, least=bench.prompts or LEAST)
    return find_capacities(plan, bench, usd)


def saturation_runs(rivalry: Rivalry) -> int:
    """Estimated simulations of `saturation`."""
    return SEARCH_RUNS * min(FEW_RUNS, rivalry.num_runs)
