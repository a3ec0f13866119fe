"""The options of the hardware: the GPUs, how they are modelled, and what the host costs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Literal, get_args

from pdvsim.sim.core import ServingEngine
from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.links import LinkName
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.hardware.padding import Padding
from pdvsim.sim.limits import Gpus, HostSeconds, Internal, LeastShare, Range, Shards, check_ranges
from pdvsim.sim.reading import read_json

Priority = Literal["none", "stream", "dynamic", "preemptive", "partition"]
Contention = Literal["fluid", "serial", "max"]
Router = Literal["round-robin", "least-loaded", "random", "prefix-aware"]
HostKind = Literal["measured", "polling", "python-threads"]

HOSTS: dict[HostKind, dict[str, float]] = {  # what each sets of `Host`
    "measured": {},
    "polling": {"idle_poll_s": 1e-3},
    "python-threads": {"notify_s": 50e-6},
}

VLLM_CARDS = ("a100-80gb", "h100-sxm", "b200", "l40s")  # whose default engine is vLLM; the H200 has pdvsim's, measured
MOST_GPUS = 8  # of one server that lanes are placed on
SHARDED = (1, 2, 4, 8)  # GPUs that a model may be sharded over


@dataclass(frozen=True)
class Hardware:
    """GPUs: their number and how they are modelled."""

    gpu: str = "h200"
    """A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md)."""
    profile: str | None = None
    """Profile file (JSON) instead of the built-in one of --gpu, or `roofline`, a bound from the data sheet alone."""
    machine: str | None = None
    """Result of realrun on your machine, or of `calibrate --from-bench` for your engine (JSON). Forward and host times
    are scaled to the speed it measured."""
    engine: ServingEngine | None = None
    """Serving engine whose forward and step times are predicted: pdvsim (the engine of realrun), vllm, sglang or trtllm
    (from their kernels, see pdvsim profile --list). Default: the one that --machine was fitted for; else vllm on cards
    that it has a profile of, but pdvsim on the H200, on all others, and with --profile."""
    band: bool = True
    """Report no error ranges. They are from comparable real runs or, where forward times are predicted, from
    simulations at the ends of their error bar."""
    contention: Contention = "fluid"
    """How streams share a GPU: fluid (bandwidth and compute), or as ablations serial (no overlap) and max (no cost)."""
    padding: Padding = "profile"
    """How forwards are padded to CUDA graphs: profile (as measured), vllm (by tokens per step), sglang or tensorrt-llm
    (by requests per step)."""
    gpu_memory_utilization: LeastShare = 0.9
    """Share of the GPU's memory for weights and KV cache."""
    kv_capacity_tokens: Annotated[int, Range(1, 10**12)] | None = None
    """KV cache size in tokens; default: what fits into the memory."""
    tensor_parallel_size: Shards = 1
    """Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds the target is a group
    of this size."""
    draft_tensor_parallel_size: Shards | None = None
    """Number of GPUs the drafter is sharded over: 1 or as many as the target. Default: as the target, or 1 if the
    drafter has a GPU of its own."""
    place: tuple[str, ...] = ()
    """GPU of each lane, as lane=number; default: GPU 0. prefill=1 verify=1 leaves GPU 0 to the drafter. prefill=0+1
    prefills on two GPUs; decode=0+1 drafts on two (pdv and variants). KV moves from prefill to where the target
    decodes."""
    cards: tuple[str, ...] = ()
    """Type of each GPU if --place uses several, e.g. l4 h200; default: --gpu for all."""
    link: LinkName = "nvlink4"
    """Link between the GPUs of a server: nvlink4, pcie5, pcie4 (16 lanes), 400gbe, 100gbe."""
    replicas: Gpus = 1
    """Independent copies of the whole server behind a router."""
    router: Router = "round-robin"
    """How the router picks a replica. prefix-aware: the one that has most of the prompt cached, and of these the least
    loaded; the least loaded of all while loads are uneven."""

    def __post_init__(self) -> None:
        check_ranges(self)
        object.__setattr__(self, "gpu", card_name(self.gpu, GPUS))
        object.__setattr__(self, "cards", tuple(card_name(card, GPUS) for card in self.cards))
        sizes = (self.tensor_parallel_size, self.draft_tensor_parallel_size or 1)
        for name, size in zip(("tensor-parallel-size", "draft-tensor-parallel-size"), sizes, strict=True):
            if size not in SHARDED:
                raise ValueError(f"{name} must be one of {', '.join(map(str, SHARDED))}, got {size}")
        if sizes[1] not in (1, sizes[0]):
            raise ValueError(
                f"draft-tensor-parallel-size must be 1 or tensor-parallel-size, {sizes[0]}, got {sizes[1]}"
            )
        if self.engine not in (None, "pdvsim") and self.profile is not None:
            raise ValueError(f"--engine {self.engine}: leave out --profile, which names what is predicted")
        fitted = fitted_engine(self.machine) if self.machine is not None else None
        if fitted is not None:
            if self.engine not in (None, fitted):
                raise ValueError(f"--engine {self.engine}: --machine {self.machine} was fitted for {fitted}")
            if self.profile is not None and fitted != "pdvsim":
                raise ValueError(f"--machine {self.machine} was fitted for {fitted}: leave out --profile")
            object.__setattr__(self, "engine", fitted)
        self.placed()

    @property
    def predicted_engine(self) -> ServingEngine:
        """The engine whose times are predicted; of several cards, that of the usual one."""
        return self.engine_on(self.gpu)

    def engine_on(self, card: str) -> ServingEngine:
        """The engine whose times are predicted on a card."""
        if self.engine is not None:
            return self.engine
        own = self.profile is not None or self.machine is not None
        return "vllm" if card in VLLM_CARDS and not own else "pdvsim"

    def placed(self) -> dict[str, tuple[int, ...]]:
        """GPUs of each lane that --place names."""
        placed: dict[str, tuple[int, ...]] = {}
        for text in self.place:
            lane, _, numbers = text.partition("=")
            known = lane in ("prefill", "decode", "verify")
            if not known or not all(n.isdecimal() and int(n) < MOST_GPUS for n in numbers.split("+")):
                raise ValueError(f"place: {text!r} must be lane=GPU: prefill, decode or verify, 0 to {MOST_GPUS - 1}")
            if lane in placed:
                raise ValueError(f"place names {lane} twice")
            placed[lane] = gpus = tuple(map(int, numbers.split("+")))
            if len(set(gpus)) < len(gpus):
                raise ValueError(f"place: {text!r} names a GPU twice")
        if len(placed.get("verify", ())) > 1:
            raise ValueError("place: a target verifies on one GPU; use --replicas for more targets")
        return placed


def fitted_engine(machine: str) -> ServingEngine | None:
    """The engine that a correction was fitted for; None where its file does not say.

    A file that cannot be read is refused where its figures are needed.
    """
    try:
        return _engine_in(machine, os.stat(machine).st_mtime_ns)
    except (OSError, ValueError):
        return None


@lru_cache(maxsize=16)
def _engine_in(path: str, _changed_ns: int) -> ServingEngine | None:
    document = read_json(path)
    named = document.get("pace_engine") if isinstance(document, dict) else None
    return named if named in get_args(ServingEngine) else None


@dataclass(frozen=True)
class Host:
    """Costs of the host thread; the default of each is the profile's."""

    host: HostKind = "measured"
    """How an idle lane is notified of work: measured (immediately, as in realrun's event loop), polling (every 1 ms) or
    python-threads (a thread that wakes in 50 µs; assumed)."""
    launch_s: HostSeconds | None = None
    """Host time per launch."""
    completion_s: HostSeconds | None = None
    """Host time to notice a completion and read its result back."""
    handoff_s: HostSeconds | None = None
    """Host time to pass requests from one lane to another."""
    idle_poll_s: Internal[HostSeconds] = 0.0  # period at which an idle lane looks for work; 0: it is told
    idle_poll_cost_s: Internal[HostSeconds] = 1e-6  # host time of one look, taken from the others
    notify_s: Internal[HostSeconds] = 0.0  # time until an idle lane that is told of work is awake

    def __post_init__(self) -> None:
        for name, value in HOSTS[self.host].items():
            object.__setattr__(self, name, value)
        check_ranges(self)
        if 0 < self.idle_poll_s < 1e-9:
            raise ValueError(f"idle-poll-s must be 0, or at least 1e-09, got {self.idle_poll_s}")
