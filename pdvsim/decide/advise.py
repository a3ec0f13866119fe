"""What to run for a load: search the settings, replicate the best, decide, and find where the decision would change.

The decision: of the finalists that meet the service levels and keep up (all of them where none does), the one with the
best figure of the objective; but if others are not told apart from it, by paired differences over replications, the
simplest of these. Time goes to what matters first; what there was no time for is named. What a step will take is
estimated from the runs so far, by their requests.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from pdvsim.decide import hazards
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.contest import Contest, contest
from pdvsim.decide.flips import Flips, Rivalry, find_flips
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import SHORT, Race, finalists, race
from pdvsim.decide.runs import Bench, at_acceptance, at_rate, replications
from pdvsim.decide.space import Space, complexity
from pdvsim.sim.config import Experiment
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.relevance import vet
from pdvsim.study.backends import Row

FINALISTS, FEWEST = 4, 2  # beside plain decoding; the fewest where there is hardly time for any
SEARCH_SHARE, FINALS_SHARE, LOAD_SHARE, ACCEPTANCE_SHARE = 0.35, 0.7, 0.7, 0.9  # of the budget: when each is to be done
CAPACITY_SHARE = 0.25  # of the budget: the most that is set aside for the distance to capacity
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
        check_ranges(self)
        vet(self.space.candidates(self.base))

    @property
    def varies_acceptance(self) -> bool:
        """Whether acceptance is one rate, that can be another."""
        given = self.base.acceptance
        return not given.synthetic_acceptance_rates and given.acceptance_trace is None


@dataclass(repr=False)
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

    def __repr__(self) -> str:
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
    """Answer within the budget, more or less: a few finals are always run, and what has begun is finished."""
    started_s = time.monotonic()
    advice = Advice(question, Race(question.base, question.goal, question.warmup_share, question.indifference))
    try:
        race(advice.search, question.space, bench, started_s + SEARCH_SHARE * question.budget_s)
        _finals(advice, bench, started_s + FINALS_SHARE * question.budget_s)
        _surroundings(advice, bench, started_s)
    except KeyboardInterrupt:
        advice.interrupted = True
    advice.runs, advice.spent_s = bench.runs, time.monotonic() - started_s
    return advice


def _finals(advice: Advice, bench: Bench, until_s: float) -> None:
    """Replicate the finalists on seeds the search has not seen, and decide."""
    ask, found = advice.question, finalists(advice.search, FINALISTS)
    left_s = until_s - time.monotonic()
    if bench.seconds(int(2 * SHORT * ask.base.traffic.num_prompts * len(found))) > left_s:
        found = finalists(advice.search, FEWEST)
    num_runs, num_prompts = _affordable(ask, len(found), bench, left_s)
    sized = [replace(c, traffic=replace(c.traffic, num_prompts=num_prompts)) for c in found]
    chosen = [ask.goal.prepared(c, ask.warmup_share) for c in sized]
    rows = bench.rows([run for candidate in chosen for run in replications(candidate, num_runs)])
    advice.finals = {c: rows[i * num_runs : (i + 1) * num_runs] for i, c in enumerate(chosen)}
    able = {c: mine for c, mine in advice.finals.items() if ask.goal.met(mine)} or advice.finals
    figures = {str(c.arch): [ask.goal.value(row) for row in mine] for c, mine in able.items()}
    held = advice.held = contest(figures, ask.goal.sign, indifference=ask.indifference)
    tied = [advice.finalist(arch) for arch in (held.best, *held.unsure)]
    advice.recommended = min(tied, key=lambda c: complexity(c, ask.base))


def _affordable(ask: Question, entrants: int, bench: Bench, left_s: float) -> tuple[int, int]:
    """Replications and requests of a final run: those asked for, or what the time left allows.

    Fewer replications first: they only widen the intervals, while a shorter run also starts emptier than it ends. At
    least two, of runs as short as those of the search.
    """
    num_prompts = ask.base.traffic.num_prompts
    run_s = bench.seconds(entrants * num_prompts)  # a replication of everyone
    if ask.num_runs * run_s <= left_s:
        return ask.num_runs, num_prompts
    num_runs = max(2, int(left_s / run_s))
    share = min(1.0, max(SHORT, left_s / (num_runs * run_s)))
    return num_runs, max(1, int(share * num_prompts))


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
    who = Rivalry(best, rivals, ask.goal, len(advice.rows), ask.indifference, max(1, len(rivals)))
    advice.memory = hazards.memory(best)
    if drafting is not None:
        advice.balance = hazards.balance(drafting, advice.finals[drafting])

    def until_s(share: float) -> float:
        return started_s + share * ask.budget_s - aside_s

    def in_time(what: str, requests: int, share: float = 1.0) -> bool:
        if time.monotonic() + bench.seconds(requests) < until_s(share):
            return True
        advice.left_out.append(what)
        return False

    def capacity() -> None:
        gpus = best.hardware.replicas * (1 + best.hardware.verify_gpu)
        advice.capacity = hazards.saturation(who, gpus, bench, ask.warmup_share, ask.gpu_hour_usd)
        if advice.capacity.interrupted:
            raise KeyboardInterrupt

    aside_s, to_capacity = 0.0, hazards.saturation_requests(who)
    if ask.goal.levels and advice.met:
        capacity_s = bench.seconds(to_capacity)
        aside_s = capacity_s if capacity_s <= CAPACITY_SHARE * ask.budget_s else 0.0
    elif ask.goal.levels and in_time("distance to capacity", to_capacity):
        capacity()  # how many GPUs it takes is then the first question
    if in_time("one request at a time", hazards.alone_requests(who)):
        advice.alone = hazards.alone(who, bench)
    if (
        ask.varies_acceptance
        and drafting
        and plain
        and in_time("break-even acceptance", hazards.break_even_requests(who))
    ):
        advice.break_even = hazards.break_even(drafting, plain, who, bench)
    if rivals and in_time("flips with the load", who.requests, LOAD_SHARE):
        here, places = best.traffic.request_rate, [best.traffic.request_rate * x for x in LOADS]
        advice.flips.append(find_flips("load", here, places, at_rate, who, bench, until_s(LOAD_SHARE)))
    if rivals and ask.varies_acceptance and in_time("flips with acceptance", who.requests, ACCEPTANCE_SHARE):
        here, last_s = best.acceptance.acceptance_rate, until_s(ACCEPTANCE_SHARE)
        advice.flips.append(find_flips("acceptance", here, ACCEPTANCES, at_acceptance, who, bench, last_s))
    aside_s = 0.0
    if ask.goal.levels and advice.met and in_time("distance to capacity", to_capacity):
        capacity()
