"""What to run for a load: search the settings, replicate the best, decide, and find where the decision would change.

The decision: of the finalists that meet the service levels and keep up (all of them where none does), the one with the
best figure of the objective; but if others are not told apart from it, by paired differences over replications, the
simplest of these. Time goes to what matters first; what there was no time for is named.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pdvsim.decide import hazards
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.contest import Contest, contest
from pdvsim.decide.flips import Flips, Rivalry, find_flips
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import Race, finalists, race
from pdvsim.decide.runs import Bench, at_acceptance, at_rate, replications
from pdvsim.decide.space import Space, complexity
from pdvsim.sim.backends import Row
from pdvsim.sim.config import Experiment

FINALISTS = 4
SEARCH_SHARE, LOAD_SHARE, ACCEPTANCE_SHARE = 0.35, 0.7, 0.9  # of the budget: when each should be done
RIVALS = 2  # best other finalists to look for flips to, beside plain decoding
LOADS = (0.25, 0.5, 2.0, 4.0)  # times the rate asked about
ACCEPTANCES = (0.3, 0.45, 0.6, 0.75, 0.9)


@dataclass(frozen=True)
class Question:
    """What is asked, and what the answer may cost."""

    base: Experiment
    space: Space
    goal: Goal
    num_runs: int = 5
    indifference: float = 0.01
    warmup_share: float = 0.2
    budget_s: float = 60.0
    gpu_hour_usd: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.base.traffic.request_rate < float("inf"):
            raise ValueError("advice is for a load: give --request-rate, in requests per second")
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed tells nothing for sure, got {self.num_runs}")
        if not 0 <= self.indifference < 1:
            raise ValueError(f"indifference must be in [0, 1), got {self.indifference}")
        if not 0 <= self.warmup_share < 1:
            raise ValueError(f"warmup-share must be in [0, 1), got {self.warmup_share}")
        if not 0 < self.budget_s < float("inf"):
            raise ValueError(f"budget-s must be greater than 0, got {self.budget_s}")

    @property
    def varies_acceptance(self) -> bool:
        """Whether acceptance is one rate, that can be another."""
        given = self.base.acceptance
        return not given.synthetic_acceptance_rates and given.acceptance_trace is None


@dataclass
class Advice:
    """The answer, as far as it got."""

    question: Question
    search: Race
    finals: dict[Experiment, list[Row]] = field(default_factory=dict)
    held: Contest | None = None  # among the finalists that could be chosen
    recommended: Experiment | None = None
    flips: list[Flips] = field(default_factory=list)
    alone: hazards.Alone | None = None
    break_even: hazards.BreakEven | None = None
    balance: hazards.Balance | None = None
    memory: hazards.Memory | None = None
    capacity: Capacities | None = None
    left_out: list[str] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False

    def __str__(self) -> str:
        from pdvsim.decide.advice import advice_text

        return advice_text(self)

    @property
    def rows(self) -> list[Row]:
        """The recommendation's replications."""
        assert self.recommended is not None
        return self.finals[self.recommended]

    @property
    def met(self) -> bool:
        """Whether the recommendation meets the service levels and keeps up."""
        return self.question.goal.met(self.rows)

    def finalist(self, arch: str) -> Experiment:
        """The finalist of an architecture."""
        return next(candidate for candidate in self.finals if candidate.arch == arch)


def advise(question: Question, bench: Bench) -> Advice:
    """Answer within the budget, more or less: the finals are always run, and what has begun is finished."""
    started_s = time.monotonic()
    advice = Advice(question, Race(question.base, question.goal, question.warmup_share, question.indifference))
    try:
        race(advice.search, question.space, bench, started_s + SEARCH_SHARE * question.budget_s)
        _finals(advice, bench)
        _surroundings(advice, bench, started_s)
    except KeyboardInterrupt:
        advice.interrupted = True
    advice.runs, advice.spent_s = bench.runs, time.monotonic() - started_s
    return advice


def _finals(advice: Advice, bench: Bench) -> None:
    """Replicate the finalists on seeds the search has not seen, and decide."""
    ask = advice.question
    chosen = [ask.goal.prepared(c, ask.warmup_share) for c in finalists(advice.search, FINALISTS)]
    rows = bench.rows([run for candidate in chosen for run in replications(candidate, ask.num_runs)])
    advice.finals = {c: rows[i * ask.num_runs : (i + 1) * ask.num_runs] for i, c in enumerate(chosen)}
    able = {c: mine for c, mine in advice.finals.items() if ask.goal.met(mine)} or advice.finals
    figures = {str(c.arch): [ask.goal.value(row) for row in mine] for c, mine in able.items()}
    held = advice.held = contest(figures, ask.goal.sign, indifference=ask.indifference)
    tied = [advice.finalist(arch) for arch in (held.best, *held.unsure)]
    advice.recommended = min(tied, key=lambda c: complexity(c, ask.base))


def _surroundings(advice: Advice, bench: Bench, started_s: float) -> None:
    """Failure modes near the recommendation and where it flips: cheap things first, each while its time lasts."""
    ask, best = advice.question, advice.recommended
    assert best is not None
    assert advice.held is not None
    order = [advice.finalist(arch) for arch in (advice.held.best, *advice.held.behind)]
    others = [c for c in (*order, *advice.finals) if c != best]
    drafting = next((c for c in (best, *others) if c.arch != "autoregressive"), None)
    plain = next((c for c in (best, *others) if c.arch == "autoregressive"), None)
    rivals = tuple(dict.fromkeys([*others[:RIVALS], *([plain] if plain not in (None, best) else [])]))
    who = Rivalry(best, rivals, ask.goal, ask.num_runs, ask.indifference, max(1, len(rivals)))
    advice.memory = hazards.memory(best)
    if drafting is not None:
        advice.balance = hazards.balance(drafting, advice.finals[drafting])

    def in_time(what: str, share: float = 1.0) -> bool:
        if time.monotonic() < started_s + share * ask.budget_s:
            return True
        advice.left_out.append(what)
        return False

    def capacity() -> None:
        gpus = best.hardware.replicas * (1 + best.hardware.verify_gpu)
        advice.capacity = hazards.saturation(who, gpus, bench, ask.warmup_share, ask.gpu_hour_usd)
        if advice.capacity.interrupted:
            raise KeyboardInterrupt

    if ask.goal.levels and not advice.met:  # how many GPUs it takes is then the first question
        capacity()
    if in_time("one request at a time"):
        advice.alone = hazards.alone(who, bench)
    if ask.varies_acceptance and drafting and plain and in_time("break-even acceptance"):
        advice.break_even = hazards.break_even(drafting, plain, who, bench)
    if rivals and in_time("flips with the load", LOAD_SHARE):
        here, until_s = best.traffic.request_rate, started_s + LOAD_SHARE * ask.budget_s
        advice.flips.append(find_flips("load", here, [here * x for x in LOADS], at_rate, who, bench, until_s))
    if rivals and ask.varies_acceptance and in_time("flips with acceptance", ACCEPTANCE_SHARE):
        here, until_s = best.acceptance.acceptance_rate, started_s + ACCEPTANCE_SHARE * ask.budget_s
        advice.flips.append(find_flips("acceptance", here, ACCEPTANCES, at_acceptance, who, bench, until_s))
    if ask.goal.levels and advice.capacity is None and in_time("distance to capacity"):
        capacity()
