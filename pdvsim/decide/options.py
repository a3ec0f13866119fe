"""Flags shared by the decision commands; those that a command sets itself are omitted or open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from pdvsim.common.console import say
from pdvsim.decide.contest import LEAST_SEEDS
from pdvsim.decide.space import Space
from pdvsim.sim.config import Acceptance, Arch, ControllerName, Internal, Scoring, Server, Traffic
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.workload.requests import Workload, trace_rate

BUDGET = 1500  # simulations per answer of `advise`
WARMUP_SHARE = 0.2  # the server starts empty
SPREAD = 0.3  # of given lengths; leads do not depend on larger spreads
PROMPTS, LOOP_PROMPTS = 500, 200  # requests per run: more at a request rate, where results vary more


@dataclass(frozen=True)
class VariedTraffic(Traffic):
    """Traffic; given lengths vary, so that the requests of a closed loop do not run in step."""

    random_range_ratio: float | None = None  # type: ignore[assignment]
    """Spread of --input-len and --output-len: uniform in [len*(1-ratio), len*(1+ratio)]. Default: 0.3, less if the
    context is too short, 0 for --output-len 1. With 0, requests of a closed loop start and end together."""

    def asked(self, server: Server, *pairs: str) -> Traffic:
        """The traffic for a server and further pairs, with the default spread of lengths if none is given."""
        given = {f.name: getattr(self, f.name) for f in fields(Traffic)}
        if self.random_range_ratio is not None:
            return Traffic(**given)
        equal = Traffic(**given | {"random_range_ratio": 0.0})
        return replace(equal, random_range_ratio=_spread(equal, server, pairs)) if equal.fixed_lengths else equal


def _spread(equal: Traffic, server: Server, pairs: Sequence[str]) -> float:
    """The default spread of lengths, or the largest with which every request fits in every context.

    An output of one token does not vary: some outputs would have two, and so a TPOT.
    """
    if equal.output_len == 1:
        return 0.0
    found = [named_pair(replace(server, pair=name).pair) for name in pairs or (server.pair,)]
    models = [model for pair in found for model in (pair.draft, pair.target)]
    contexts = [model.max_position_embeddings for model in models if model.max_position_embeddings is not None]
    if not contexts:
        return SPREAD
    longest = Workload(replace(equal, num_turns=1), Acceptance()).largest()  # a conversation ends before the context
    room = min(contexts) - longest.prompt_tokens - longest.output_tokens - len(equal.fixed_lengths)  # rounded up
    return max(0.0, min(SPREAD, math.floor(100 * room / sum(equal.fixed_lengths)) / 100))


@dataclass(frozen=True)
class OpenTraffic(VariedTraffic):
    """Traffic: the requests."""

    num_prompts: int = Traffic.usual_prompts
    """Requests per run; a replayed trace starts at another point for each seed."""
    request_rate: Internal[float] = math.inf
    max_concurrency: Internal[int | None] = None


@dataclass(frozen=True)
class TrimmedScoring(Scoring):
    """Metrics of a run; the warm-up is a share of the requests."""

    warmup_requests: Internal[int] = 0


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

    def space(self, archs: tuple[Arch, ...], **tried: tuple[int, ...] | tuple[ControllerName, ...]) -> Space:
        """The settings to tune over: `tried` by name, else all of the space, except given ones."""
        k, controller = self.num_speculative_tokens, self.controller
        fixed: dict[str, tuple[object, ...]] = {}
        if k is not None:
            fixed = {"draft_lengths": (k,), "controllers": (controller or "fixed",)}
        elif controller is not None:
            fixed = {"controllers": (controller,)}
            if controller != "fixed":
                fixed |= {"draft_lengths": (Server.num_speculative_tokens,)}
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            if (value := getattr(self, name)) is not None:
                fixed[name] = (value,)
        for name in fixed:
            if tried.get(name, getattr(Space, name)) != getattr(Space, name):
                raise ValueError(f"--try-{name.replace('_', '-')} has no effect: the given settings fix it")
        return Space(archs, **(tried | fixed))  # type: ignore[arg-type]


@dataclass(frozen=True)
class CountedTraffic(VariedTraffic):
    """Traffic: the requests and their arrival times."""

    request_rate: Internal[float] = math.inf
    num_prompts: int | None = None  # type: ignore[assignment]
    """Requests per run; default: 500 at a request rate, 200 in a closed loop."""

    def at(self, request_rate: tuple[float, ...], server: Server, *pairs: str) -> Traffic:
        """The traffic at these rates, or of closed loops if there are none."""
        usual = PROMPTS if request_rate else LOOP_PROMPTS
        return (self if self.num_prompts is not None else replace(self, num_prompts=usual)).asked(server, *pairs)


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
