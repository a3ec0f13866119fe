"""Flags shared by the decision commands; those that a command sets itself are omitted or open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar

from pdvsim.common.console import say
from pdvsim.common.presets import ExperimentOptions
from pdvsim.decide.contest import LEAST_SEEDS
from pdvsim.decide.fleet import ARCHS as FLEET_ARCHS
from pdvsim.decide.goal import ATTAINMENT, Goal, Objective
from pdvsim.decide.space import LENGTHS, LONG_LENGTHS, Space
from pdvsim.sim.config import Acceptance, Arch, ControllerName, Server, Traffic
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.metrics.steady import LEAST
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.sim.workload.options import ALL, BY_SEED, OPEN
from pdvsim.sim.workload.requests import Workload, trace_rate

BUDGET = 1500  # simulations per answer of `advise`
SPREAD = 0.3  # of given lengths; leads do not depend on larger spreads


@dataclass(frozen=True)
class VariedTraffic(Traffic):
    """Traffic; given lengths vary, so that the requests of a closed loop do not run in step."""

    num_prompts: int | None = None  # type: ignore[assignment]
    """Requests per run, a fifth of which is the start and excluded (capacity: at least so many measured). Default: all
    of the window if a file is replayed, else as many as the load needs. advise without a load: a batch job, all of
    whose requests arrive at the start."""
    random_range_ratio: float | None = None  # type: ignore[assignment]
    """Spread of --input-len and --output-len: uniform in [len*(1-ratio), len*(1+ratio)]. Default: 0.3, less if the
    context is too short, 0 for --output-len 1. With 0, requests of a closed loop start and end together."""

    use_trace_timestamps: bool | None = None  # type: ignore[assignment]
    """Replay the file's arrival times, scaled to the rate; default: if it has any and no other arrivals are given."""
    window: str | None = None  # type: ignore[assignment]
    """Part of a replayed file: all, peak (the busiest window), N (the Nth busiest), or by-seed (seed 0 the busiest,
    seed 1 the next, and so on); default: by-seed. A file of at most 5,000 requests is one window."""

    @property
    def replays(self) -> bool:
        """Whether arrivals are the file's: as given, else if it has any and no option makes others."""
        if self.use_trace_timestamps is not None:
            return self.use_trace_timestamps
        if self.dataset_path is None or self._makes_arrivals:
            return False
        file = Traffic(self.dataset_name, self.dataset_path, self.tokenizer, columns=self.columns)
        return trace_rate(file) is not None

    @property
    def _makes_arrivals(self) -> bool:
        usual = (Traffic.burstiness, Traffic.num_turns, Traffic.think_time_s)
        return (self.burstiness, self.num_turns, self.think_time_s) != usual

    def asked(self, server: Server, *pairs: str, replays: bool = False, **load: Any) -> Traffic:
        """The traffic for a server and further pairs, with the defaults of the settings that are not given.

        A replay has all requests of its window, as often as it takes to measure enough of them.
        """
        if self.window is not None and not replays:
            raise ValueError("--window is a part of a replayed file: it needs arrival times, and no other load")
        given = {f.name: getattr(self, f.name) for f in fields(Traffic)} | load
        given |= {"use_trace_timestamps": replays, "window": (self.window or BY_SEED) if replays else ALL}
        given["num_prompts"] = self.num_prompts or OPEN
        ratio = 0.0 if self.random_range_ratio is None else self.random_range_ratio
        traffic = Traffic(**given | {"random_range_ratio": ratio})
        if replays and self.num_prompts is None:
            traffic = traffic.about(LEAST)
        if self.random_range_ratio is not None or not traffic.fixed_lengths:
            return traffic
        return replace(traffic, random_range_ratio=_spread(traffic, server, pairs))


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
class TunedServer(Server):
    """The server; settings that are not given are tuned for each architecture."""

    num_speculative_tokens: int | None = None  # type: ignore[assignment]
    """Draft length k for every architecture; default: the best of each, from 0 (no drafts) to 8."""
    controller: ControllerName | None = None  # type: ignore[assignment]
    """How the draft length is chosen: fixed, goodput or feedback; default: the best of each, or fixed if k is given."""
    max_num_seqs: int | None = None  # type: ignore[assignment]
    """Batch limit; default: the best of 32, 64, 128 and 256 for each architecture."""
    max_num_batched_tokens: int | None = None  # type: ignore[assignment]
    """Prompt tokens per forward (the chunk); default: the best of 256, 512, 2048 and 8192 for each architecture."""

    def __post_init__(self) -> None:
        self.given()

    def given(self) -> Server:
        """The settings with default values for open ones; a ValueError if invalid."""
        values = {f.name: getattr(self, f.name) for f in fields(Server)}
        opened = ("num_speculative_tokens", "controller", "max_num_seqs", "max_num_batched_tokens")
        return Server(**{k: getattr(Server, k) if v is None and k in opened else v for k, v in values.items()})

    def space(self, archs: tuple[Arch, ...]) -> Space:
        """The settings to tune over: those that are not given."""
        k, controller = self.num_speculative_tokens, self.controller
        fixed: dict[str, tuple[object, ...]] = {}
        if k is not None:
            fixed = {"draft_lengths": (k,), "controllers": (controller or "fixed",)}
        elif controller is not None:
            fixed = {"controllers": (controller,)}
            if controller != "fixed":
                fixed |= {"draft_lengths": (Server.num_speculative_tokens,)}
        if k is None and controller in (None, "fixed") and named_pair(self.given().pair).draft.drafts_long:
            fixed["draft_lengths"] = (*LENGTHS, *LONG_LENGTHS)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if (value := getattr(self, name)) is not None:
                fixed[name] = (value,)
        return Space(archs, **fixed)  # type: ignore[arg-type]


@dataclass(frozen=True)
class DecisionOptions(ExperimentOptions):
    """What architectures are compared on, by every decision command."""

    without: ClassVar[tuple[str, ...]] = ("max_concurrency", "warmup_requests", "steady", "band", "detailed")

    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Serving architectures to compare."""
    attainment: float = ATTAINMENT
    """Share of the requests that must meet every --goodput level."""
    num_runs: int = 5
    """Replications of each result; replication i has seed --seed + i, the same for every architecture."""
    jobs: int | None = None
    """Concurrent simulations; default: one per core."""
    traffic: VariedTraffic = field(default_factory=VariedTraffic)
    server: TunedServer = field(default_factory=TunedServer)

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True)
class ChoiceOptions(DecisionOptions):
    """By what `advise` and `map` choose."""

    gpus: int = 1
    """Number of GPUs. Replicas, tensor parallelism and split lanes are compared, each tuned."""
    objective: Objective | None = None
    """What to optimise; default: headroom with --goodput, else e2el at a request rate and throughput otherwise."""
    indifference: float = 0.01
    """Relative leads below this are ignored, even if significant: the simpler choice is taken."""

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The architectures that are named, else the default for the number of GPUs."""
        return FLEET_ARCHS if self.gpus > 1 and self.arch == USUAL_ARCHS else self.arch

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
        runs = "run" if num_runs == 1 else "runs"
        say(
            "pdvsim",
            f"{num_runs} {runs} per point: no difference can be significant; use at least --num-runs {LEAST_SEEDS}",
        )
