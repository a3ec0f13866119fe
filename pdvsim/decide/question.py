"""The question of `pdvsim advise`, and the findings: finalists, their costs, the recommendation, its surroundings."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from pdvsim.common.outcomes import Row
from pdvsim.decide import hazards
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.contest import Contest
from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.flips import Flips
from pdvsim.decide.goal import Goal
from pdvsim.decide.options import BUDGET
from pdvsim.decide.report import Answer
from pdvsim.decide.runs import conversation_output_tokens, delivered_tokens_per_s, replications
from pdvsim.decide.served import Block
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.tune import Search
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.limits import Budget, GpuHourUsd, NumRuns, PartialShare, Range, check_ranges
from pdvsim.sim.relevance import vet
from pdvsim.study.stats import Interval, interval

if TYPE_CHECKING:
    import pandas as pd

MILLION = 1e6


@dataclass(frozen=True)
class Question:
    """The question, and the budget of simulations for the answer."""

    base: Experiment
    space: Space
    goal: Goal
    num_runs: NumRuns = 5
    indifference: PartialShare = 0.01
    budget: Budget = BUDGET
    gpu_hour_usd: GpuHourUsd | None = None
    contenders: tuple[Contender, ...] = ()  # compared instead of architectures
    # up to which the smallest fleet is found if one server does not meet the goal; 0: none is
    most_gpus: Annotated[int, Range(0, 1024)] = 0
    fleet_archs: tuple[Arch, ...] = ()  # architectures of such fleets
    by_cost: bool = False  # the cheapest of the contenders that meet the goal is chosen

    def __post_init__(self) -> None:
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed gives no significance, got {self.num_runs}")
        check_ranges(self)
        vet(variant for start in self.space.starts(self.base) for variant in self.space.drafts(start))

    def name(self, candidate: Experiment) -> str:
        """Name of the contender with these settings."""
        return contender_name(candidate, self.contenders)

    @property
    def fleets(self) -> tuple[Contender, ...]:
        """Ways to use several GPUs."""
        return tuple(one for one in self.contenders if one.hardware is not None)

    @property
    def drafters(self) -> tuple[Contender, ...]:
        """Architectures with drafters."""
        return tuple(one for one in self.contenders if one.pair is not None)

    def described(self, candidate: Experiment) -> str:
        """Short description of a candidate."""
        return ", ".join([self.name(candidate), *settings_text(candidate)])

    def hourly(self, candidate: Experiment) -> float:
        """Hourly cost of a fleet: dollars, or GPUs if no price is given."""
        return candidate.hardware.replicas * candidate.gpus * (self.gpu_hour_usd or 1.0)

    @property
    def cheaper(self) -> frozenset[str]:
        """Fleets that cost less than others."""
        costs = {fleet.name: self.hourly(fleet.of(self.base)) for fleet in self.fleets}
        return frozenset(name for name, cost in costs.items() if cost < max(costs.values()))


@dataclass(repr=False)
class Findings(Answer):
    """The finalists, the recommendation and its surroundings, possibly interrupted."""

    question: Question
    search: Search
    finals: dict[Experiment, list[Row]] = field(default_factory=dict)
    contest: Contest | None = None  # among the finalists that can be chosen
    recommended: Experiment | None = None
    flips: list[Flips] = field(default_factory=list)
    alone: hazards.Alone | None = None
    break_even: hazards.BreakEven | None = None
    balance: hazards.Balance | None = None
    memory: dict[str, int] | None = None
    capacity: Capacities | None = None
    deployment: list[Block] = field(default_factory=list)  # commands to start it
    left_out: list[str] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # fleets that are not among the finalists, and why

    @property
    def rows(self) -> list[Row]:
        """The recommendation's replications."""
        assert self.recommended is not None
        return self.finals[self.recommended]

    @property
    def met(self) -> bool:
        """Whether the recommendation meets the service levels and keeps up; the capacity search overrules its runs."""
        held, load = self.held_rate, self.question.base.traffic.request_rate
        return self.question.goal.met(self.rows) and (held is None or load <= held.mean + held.half_width)

    @property
    def held_rate(self) -> Interval | None:
        """The rate that the recommendation holds; None if it was not searched."""
        rate: Interval | None = self.capacity.summary()[0]["rate"] if self.capacity and self.capacity.rows else None
        return rate

    def finalist(self, name: str) -> Experiment:
        return next(candidate for candidate in self.finals if self.question.name(candidate) == name)

    @property
    def able(self) -> list[Experiment]:
        """The finalists that meet the service levels and keep up."""
        return [candidate for candidate, rows in self.finals.items() if self.question.goal.met(rows)]

    @property
    def cheapest(self) -> Experiment | None:
        """The cheapest fleet that meets the service levels and keeps up."""
        return min(self.able if self.question.fleets else [], key=self.question.hourly, default=None)

    @property
    def priced(self) -> bool:
        """Whether costs are shown."""
        return bool(self.question.fleets or self.question.gpu_hour_usd)

    def per_million(self, candidate: Experiment) -> Interval:
        """Cost of a million output tokens on a fleet at this load: dollars or GPU-hours."""
        return self._cost_of(candidate, MILLION)

    def per_conversation(self, candidate: Experiment) -> Interval:
        """Cost of a conversation on a fleet at this load, all its turns, in the same unit."""
        return self._cost_of(candidate, conversation_output_tokens(self.question.base.traffic))

    def _cost_of(self, candidate: Experiment, tokens: float) -> Interval:
        """The price over what is delivered in the steady state: the one figure of cost in all lines."""
        price, rows = self.question.hourly(candidate), self.finals[candidate]
        runs = replications(candidate, len(rows))
        rates = (delivered_tokens_per_s(run, row) for run, row in zip(runs, rows, strict=True))
        return interval(price * tokens / (rate * 3600) for rate in rates)

    def expects(self, key: str) -> Interval:
        """A metric of the recommendation."""
        within = (row[f"{key}_se"] for row in self.rows if f"{key}_se" in row)
        return interval((row.get(key, math.nan) for row in self.rows), within=within)

    @property
    def points(self) -> pd.DataFrame:
        """One row per run of the finals: finalist, settings, seed and metrics."""
        import pandas as pd

        ask, best = self.question, self.recommended
        return pd.DataFrame(
            {"finalist": ask.name(c), "settings": ", ".join(settings_text(c)), "recommended": c == best} | row
            for c, rows in self.finals.items()
            for row in rows
        )

    @property
    def flips_drawn(self) -> list[Flips]:
        """The axes on which more than the given load was tested."""
        return [flips for flips in self.flips if len(flips.probes) > 1]
