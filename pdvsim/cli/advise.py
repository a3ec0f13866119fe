"""`pdvsim advise`: which architecture and settings to run for a load, with confidence, and where that changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from pdvsim.cli.page import AnswerCommand
from pdvsim.common.console import say
from pdvsim.decide.advice import Advice, Question
from pdvsim.decide.advise import advise, usual_runs
from pdvsim.decide.figures import advice_pictures
from pdvsim.decide.fleet import Contender, chosen, drafters, fleets
from pdvsim.decide.options import BUDGET, DecisionOptions, forewarn_few, own_rate
from pdvsim.decide.runs import Bench, load_axis
from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import SHARDED, Arch, Experiment, Server, Traffic
from pdvsim.sim.limits import Budget, GpuHourUsd, Gpus, Redefined, RequestRate, Requests
from pdvsim.sim.models.presets import can_load

MOST_GPUS = 64  # of a fleet, if no limit is given


@dataclass(frozen=True)
class AdviseCommand(AnswerCommand, DecisionOptions):
    """Recommend an architecture and settings for a load, with confidence and where the answer changes."""

    written = ("advice.json", "advice.png")

    request_rate: RequestRate = math.inf
    """Load in requests per second; default: the trace's own rate, replayed."""
    concurrency: Requests | None = None
    """Load as concurrent requests (closed loop)."""
    gpus: Gpus | None = None
    """Most GPUs. With --goodput at a request rate: up to which the smallest and cheapest fleet that meets the levels is
    found (default: 64, if the placement is not given). Otherwise all of them are used, each way tuned (default: 1)."""
    pair: Redefined[str] = Server.pair  # as given: the server's is a pair also where this is a target alone
    budget: Budget = BUDGET
    """Maximum number of simulations; steps that do not fit are listed."""
    gpu_hour_usd: GpuHourUsd | None = None
    """Price of a GPU per hour; adds the cost per million output tokens. With --gpus one GPU is compared too."""
    output: str | None = None
    """Folder for advice.json and advice.png; default: nothing is saved."""

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The architectures that are named, else the default for the number of GPUs."""
        several = self.gpus is not None and self.gpus > 1 and not self._sized
        return self.fleet_archs if several else super().archs

    @property
    def _sized(self) -> bool:
        """Whether the number of GPUs is found, not given."""
        given = self.hardware
        timed = self.request_rate < math.inf or self.traffic.dataset_path is not None
        open_size = self.concurrency is None and self.gpus != 1 and not chosen(given)
        return bool(self.scoring.goodput) and timed and open_size

    def _fitting(self, base: Experiment) -> Experiment:
        """The experiment on the fewest GPUs of a group that hold its models, if that number is to be found."""
        for size in SHARDED if self._sized else ():
            with suppress(ValueError):  # models that cannot be divided so
                wider = base.with_settings(tensor_parallel_size=size)
                if ServerParts(wider).kv_capacity > 0 and size <= (self.gpus or MOST_GPUS):
                    return wider
        return base

    def question(self) -> Question:
        traffic = self._traffic()
        base = self._fitting(self._base(traffic))
        drafted = ways = self._drafters(base)
        if traffic.dataset_path is not None and traffic.max_model_len is None:  # the same requests for all drafters
            contexts = [way.of(base).context for way in drafted]
            shortest = min((context for context in (base.context, *contexts) if context is not None), default=None)
            base = base.with_settings(max_model_len=shortest)
        if not self._sized and self.gpus not in (None, 1):  # ways to use them
            ways = fleets(base, self.archs, self.gpus, bool(self.gpu_hour_usd), drafted)
        return Question(
            base,
            self.space(self.archs),
            self.goal(load_axis(traffic) == "load"),
            self.num_runs,
            self.indifference,
            self.budget,
            self.gpu_hour_usd,
            ways,
            (self.gpus or MOST_GPUS) if self._sized else 0,
            self.fleet_archs,
            self.gpus,
        )

    def _traffic(self) -> Traffic:
        """The traffic at the given load; a trace without one is replayed at its own rate."""
        rate, concurrency = self.request_rate, self.concurrency
        if rate < math.inf and concurrency is not None:
            raise ValueError("give one of --request-rate and --concurrency")
        replays = self.replays(concurrency is not None)
        load = {"request_rate": rate, "max_concurrency": concurrency}
        traffic = self.compared_traffic(replays=replays, **load)
        if replays and math.isinf(rate):
            rate = own_rate(traffic)
            say("pdvsim", f"{traffic.dataset_path} is replayed at its own rate of {rate:.3g} requests per second")
            return replace(traffic, request_rate=rate)
        if load_axis(traffic) == "requests" and self.num_prompts is None:
            raise ValueError(
                "advise needs a load: give --request-rate, --concurrency, or --num-prompts alone for a batch job"
            )
        return traffic

    def _drafters(self, base: Experiment) -> tuple[Contender, ...]:
        """Drafters for a model that is given alone."""
        if ":" in self.pair or self.server.drafter is not None:
            return ()
        if self.acceptance_from is not None:
            raise ValueError("--acceptance-from describes one drafter: name it with --drafter model, eagle3 or ngram")
        target = self.pair
        if not can_load("eagle3", target):
            say("pdvsim", f"no published EAGLE-3 head of {target} is known: none is compared (--drafter eagle3 does)")
        return drafters(base, target, self.archs, None if self.acceptance_open else base.acceptance)

    def _base(self, traffic: Traffic) -> Experiment:
        """The experiment with the first architecture that accepts the options; if none does, its error."""
        refused = ValueError("arch needs at least one value")
        for arch in self.archs:
            try:
                return self.experiment(arch, traffic)
            except ValueError as error:
                refused = error
        raise refused

    def expected_runs(self, question: Question) -> int:
        """Estimated simulations; warns if there are too few replications."""
        forewarn_few(question.num_runs, len(question.space.archs))
        return usual_runs(question)

    def answer(self, question: Question | None = None, progress: Callable[[int], None] | None = None) -> Advice:
        bench, tell = Bench(self.jobs, progress, prompts=self.num_prompts), say if progress else None
        advice = advise(question or self.question(), bench, tell)
        advice.drawn_by = advice_pictures
        return advice
