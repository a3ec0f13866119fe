"""Flags shared by the decision commands; those that a command chooses itself are left out, or may be left open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from pdvsim.common.console import say
from pdvsim.common.presets import ExperimentOptions
from pdvsim.decide.fleet import ARCHS as FLEET_ARCHS
from pdvsim.decide.goal import ATTAINMENT, Goal, Objective
from pdvsim.decide.race import LEAST_SEEDS
from pdvsim.decide.report import plural
from pdvsim.decide.space import ADAPTIVE, CONTROLLERS, LENGTHS, LONG_LENGTHS, Space
from pdvsim.sim.config import Acceptance, Arch, ControllerName, Server, Traffic
from pdvsim.sim.limits import (
    BatchLimit,
    DraftLength,
    Jobs,
    LeastShare,
    NumRuns,
    PartialShare,
    Redefined,
    Requests,
    Tokens,
)
from pdvsim.sim.metrics.steady import LEAST
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.sim.workload.options import ALL, BY_SEED, OPEN
from pdvsim.sim.workload.requests import Workload, trace_rate

BUDGET = 1500  # simulations per answer of `advise`
SPREAD = 0.3  # of given lengths; leads do not depend on larger spreads


@dataclass(frozen=True)
class VariedOptions(ExperimentOptions):
    """Traffic whose given lengths vary, so that the requests of a closed loop do not run in step."""

    num_prompts: Redefined[Requests | None] = None
    """Requests per run, a fifth of which is the start and excluded (capacity: the least number measured). Default: all
    of the window if a file is replayed, else as many as the load needs. advise without a load: a batch job, all of
    whose requests arrive at the start."""
    random_range_ratio: Redefined[PartialShare | None] = None
    """Spread of --input-len and --output-len: uniform in [len*(1-ratio), len*(1+ratio)]. Default: 0.3, less if the
    context is too short, 0 for --output-len 1. With 0, requests of a closed loop start and end together."""

    def varied_traffic(self, *pairs: str, **load: Any) -> Traffic:
        """The traffic, with the default spread of lengths for the server and further pairs."""
        traffic = replace(self.traffic, **load)
        if self.random_range_ratio is not None or not traffic.fixed_lengths:
            return traffic
        return replace(traffic, random_range_ratio=_spread(traffic, self.server, pairs))


def _spread(equal: Traffic, server: Server, pairs: Sequence[str]) -> float:
    """The default spread of lengths, or the largest with which every request fits in every context.

    An output of one token does not vary: some outputs would have two, and so a TPOT.
    """
    if equal.output_len == 1:
        return 0.0
    known_pairs = [named_pair(replace(server, pair=name).pair) for name in pairs or (server.pair,)]
    models = [model for pair in known_pairs for model in (pair.draft, pair.target)]
    contexts = [model.max_position_embeddings for model in models if model.max_position_embeddings is not None]
    if not contexts:
        return SPREAD
    longest = Workload(replace(equal, num_turns=1), Acceptance()).largest()  # a conversation ends before the context
    room = min(contexts) - longest.prompt_tokens - longest.output_tokens - len(equal.fixed_lengths)  # rounded up
    return max(0.0, min(SPREAD, math.floor(100 * room / sum(equal.fixed_lengths)) / 100))


@dataclass(frozen=True)
class DecisionOptions(VariedOptions):
    """What architectures are compared on, by every decision command. Settings not given are tuned for each of them."""

    without: ClassVar[tuple[str, ...]] = ("max_concurrency", "warmup_requests", "steady", "band", "detailed")

    arch: tuple[Arch, ...] = ()
    """Serving architectures to compare; default: autoregressive and colocated, which engines serve, and with --engine
    pdvsim, the only one that has lanes, pd and pdv."""
    attainment: LeastShare = ATTAINMENT
    """Share of the requests that must meet every --goodput level."""
    num_runs: NumRuns = 5
    """Replications of each result; replication i has seed --seed + i, the same for every architecture."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""
    use_trace_timestamps: Redefined[bool | None] = None
    """Replay the file's arrival times, scaled to the rate; default: if it has any and no other arrivals are given."""
    window: Redefined[str | None] = None
    """Part of a replayed file: all, peak (the busiest window), N (the Nth busiest), or by-seed (seed 0 the busiest,
    seed 1 the next, and so on); default: by-seed. A file of at most 5,000 requests is one window."""
    num_speculative_tokens: Redefined[DraftLength | None] = None
    """Draft length k for every architecture; default: the best of each, from 0 (no drafts) to 8."""
    controller: Redefined[ControllerName | None] = None
    """How the draft length is chosen: fixed, goodput, feedback or adaptive-verification; default: fixed if k is given,
    else the best of those that the engine has (goodput and feedback: pdvsim's; the last with heads and parallel
    drafters)."""
    max_num_seqs: Redefined[BatchLimit | None] = None
    """Batch limit; default: the best of 32, 64, 128 and 256 for each architecture."""
    max_num_batched_tokens: Redefined[Tokens | None] = None
    """Prompt tokens per forward (the chunk); default: the best of 256, 512, 2048 and 8192 for each architecture."""
    objective: Objective | None = None
    """What to optimise; default: headroom with --goodput, else e2el at a request rate and throughput otherwise."""
    indifference: PartialShare = 0.01
    """Relative leads below this are ignored, even if significant: the simpler choice is taken."""

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The architectures that are named, else those that the engine can serve on one GPU."""
        return self.named or (USUAL_ARCHS if self.hardware.is_own else USUAL_ARCHS[:2])

    @property
    def fleet_archs(self) -> tuple[Arch, ...]:
        """The architectures on several GPUs: other engines than pdvsim's can also prefill apart."""
        return self.named or (FLEET_ARCHS if self.hardware.is_own else (*USUAL_ARCHS[:2], "pd"))

    def replays(self, closed_loop: bool = False) -> bool:
        """Whether arrivals are the file's: as given, else if it has any and no option makes others."""
        if closed_loop:
            if self.use_trace_timestamps:
                raise ValueError("--use-trace-timestamps replays arrivals: give --request-rate, not --concurrency")
            return False
        if self.use_trace_timestamps is not None:
            return self.use_trace_timestamps
        traffic = self.traffic
        synthetic = (traffic.burstiness, traffic.num_turns, traffic.think_time_s)
        if traffic.dataset_path is None or synthetic != (Traffic.burstiness, Traffic.num_turns, Traffic.think_time_s):
            return False
        file = Traffic(traffic.dataset_name, traffic.dataset_path, traffic.tokenizer, columns=traffic.columns)
        return trace_rate(file) is not None

    def compared_traffic(self, *pairs: str, replays: bool, **load: Any) -> Traffic:
        """The traffic for the server and further pairs, with the defaults of the settings that are not given.

        A replay has all requests of its window, as often as it takes to measure enough of them.
        """
        if self.window is not None and not replays:
            raise ValueError("--window is a part of a replayed file: it needs arrival times, and no other load")
        load |= {"use_trace_timestamps": replays, "window": (self.window or BY_SEED) if replays else ALL}
        traffic = self.varied_traffic(*pairs, num_prompts=self.num_prompts or OPEN, **load)
        return traffic.about(LEAST) if replays and self.num_prompts is None else traffic

    def space(self, archs: tuple[Arch, ...]) -> Space:
        """The settings to tune over: those that are not given."""
        if self.controller == "table":
            raise ValueError("--controller table is for pdvsim run and realrun; pdvsim draft-table finds a table")
        k, controller, drafter = self.num_speculative_tokens, self.controller, named_pair(self.server.pair).draft
        limits = {name: getattr(self, name) for name in ("max_num_seqs", "max_num_batched_tokens")}
        fixed: dict[str, Any] = {name: (limit,) for name, limit in limits.items() if limit is not None}
        own = self.hardware.serving({*archs[:1], *self.named}).predicted_engine == "pdvsim"
        usual = CONTROLLERS if own else CONTROLLERS[:1]  # no other engine has those that vary the length themselves
        if k is not None or controller is not None:
            usual = (controller or "fixed",)
        elif drafter.parallel or drafter.is_head:
            usual = (*usual, ADAPTIVE)
        fixed["controllers"] = usual
        if k is not None:
            fixed["draft_lengths"] = (k,)
        elif controller in ("goodput", "feedback"):
            fixed["draft_lengths"] = (Server.num_speculative_tokens,)
        elif controller in (None, "fixed") and drafter.drafts_long:
            fixed["draft_lengths"] = (*LENGTHS, *LONG_LENGTHS)
        return Space(archs, **fixed)

    def goal(self, at_rate: bool) -> Goal:
        """The given or default objective, at a request rate or not."""
        usual: Objective = "headroom" if self.scoring.goodput else "e2el" if at_rate else "throughput"
        return Goal(self.objective or usual, self.scoring.goodput, self.attainment)


def own_rate(traffic: Traffic) -> float:
    """Mean request rate of a trace; a ValueError if it has no times."""
    rate = trace_rate(traffic)
    if rate is None:
        raise ValueError(f"--use-trace-timestamps: {traffic.dataset_path} has no arrival times to replay")
    return rate


def forewarn_few(num_runs: int, contenders: int) -> None:
    """Warn before the first run that so few replications cannot show a significant difference."""
    if num_runs < LEAST_SEEDS and contenders > 1:
        use = f"use at least --num-runs {LEAST_SEEDS}"
        say("pdvsim", f"{plural(num_runs, 'run')} per point: no difference can be significant; {use}")
