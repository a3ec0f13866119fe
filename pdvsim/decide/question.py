"""The question of `pdvsim advise`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.goal import Goal
from pdvsim.decide.options import BUDGET
from pdvsim.decide.race import check_seeds
from pdvsim.decide.space import Space, settings_text
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.limits import Budget, GpuHourUsd, Gpus, NumRuns, PartialShare, Range, check_ranges
from pdvsim.sim.relevance import vet


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
    gpus: Gpus | None = None  # that there are, if given
    by_cost: bool = False  # the cheapest of the contenders that meet the goal is chosen

    def __post_init__(self) -> None:
        check_seeds(self.num_runs)
        check_ranges(self)
        space, base = self.space, self.base
        starts = [start for one in self.contenders for start in space.starts(one.of(base), (one.arch,))]
        starts = starts or space.starts(base)
        vet(one for start in starts for one in (*space.drafts(start), *space.varied(start)))

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
        return self.gpus_of(candidate) * (self.gpu_hour_usd or 1.0)

    @staticmethod
    def gpus_of(candidate: Experiment) -> int:
        """GPUs of all its servers."""
        return candidate.hardware.replicas * candidate.gpus

    @property
    def cheaper(self) -> frozenset[str]:
        """Fleets that cost less than others."""
        costs = {fleet.name: self.hourly(fleet.of(self.base)) for fleet in self.fleets}
        return frozenset(name for name, cost in costs.items() if cost < max(costs.values()))
