"""`pdvsim capacity`: the highest request rate that each architecture holds within the service levels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

from pdvsim.bench.inputs import forewarn
from pdvsim.cli.page import AnswerCommand
from pdvsim.decide.capacity import Capacities, Plan
from pdvsim.decide.capacity_search import find_capacities
from pdvsim.decide.figures import capacity_pictures
from pdvsim.decide.goal import Goal
from pdvsim.decide.options import DecisionOptions, forewarn_few
from pdvsim.decide.runs import Bench, saturated, without_band
from pdvsim.decide.tune import most_runs
from pdvsim.sim.config import Experiment
from pdvsim.sim.limits import GpuHourUsd, Tolerance
from pdvsim.sim.metrics.steady import LEAST
from pdvsim.sim.relevance import applicable

ESTIMATED_RUNS = 4  # of a search, for the progress bar


@dataclass(frozen=True)
class CapacityCommand(AnswerCommand, DecisionOptions):
    """Find the highest request rate each architecture holds within its service levels, with intervals over seeds."""

    without: ClassVar[tuple[str, ...]] = (*DecisionOptions.without, "request_rate", "objective", "indifference")
    unit, dated = "runs", True
    written = ("capacity.parquet", "capacity.json", "capacity.png")

    gpu_hour_usd: GpuHourUsd | None = None
    """Price of a GPU per hour; adds the cost per million output tokens."""
    tolerance: Tolerance = 0.02
    """Relative width of the final bracket: the search ends this close to the first rate that fails."""
    output: str | None = None
    """Folder for capacity.parquet, capacity.json and capacity.png; default: results/capacity-DATE-TIME."""

    def question(self) -> Plan:
        traffic = self.compared_traffic(replays=self.replays())
        arch = self.archs[0] if self.archs else Experiment.arch
        base = self.experiment(arch, traffic)
        goal = Goal("throughput", self.scoring.goodput, self.attainment)
        space = self.space(self.archs) if self.archs else None
        return Plan(base, self.archs, self.num_runs, goal, self.tolerance, space, least=self.num_prompts or LEAST)

    def expected_runs(self, plan: Plan) -> int:
        """Estimated simulations; warns before runs that are long or too few."""
        one = replace(plan.goal.prepared(plan.base), arch=plan.archs[0])
        runs = [applicable(without_band(saturated(one)))] * len(plan.cases()) * ESTIMATED_RUNS
        forewarn_few(plan.num_runs, len(plan.archs))
        forewarn(runs, self.jobs)
        tunes = plan.space is not None and plan.space.kinds(plan.archs)
        return len(runs) + (most_runs(plan.space, 1, len(plan.archs)) // 2 if tunes and plan.space else 0)

    def answer(self, plan: Plan | None = None, progress: Callable[[int], None] | None = None) -> Capacities:
        capacities = find_capacities(plan or self.question(), Bench(self.jobs, progress), self.gpu_hour_usd)
        capacities.drawn_by = capacity_pictures
        return capacities
