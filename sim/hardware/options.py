"""The options of the hardware: the GPUs, how they are modelled, and what the host costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.links import DraftProbs, LinkName
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.hardware.padding import Padding
from pdvsim.sim.limits import Internal, check_ranges

Priority = Literal["none", "stream", "dynamic", "preemptive", "partition"]
Contention = Literal["fluid", "serial", "max"]
Router = Literal["round-robin", "least-loaded", "random"]
HostKind = Literal["measured", "polling", "python-threads"]

HOSTS: dict[HostKind, dict[str, float]] = {  # what each sets of `Host`
    "measured": {},
    "polling": {"idle_poll_s": 1e-3},
    "python-threads": {"notify_s": 50e-6},
}

MOST_GPUS = 8  # of one server that lanes are placed on
SHARDED = (1, 2, 4, 8)  # GPUs that a model may be sharded over


@dataclass(frozen=True)
class Hardware:
    """The GPU, how it is modelled, and how many there are."""

    gpu: str = "h200"
    """Card, of those in `pdvsim profile --list`, or a TOML file with one of your own (docs/cards.md)."""
    profile: str | None = None
    """A profile file (JSON) instead of the built-in one for --gpu; `roofline` for what the card's ceilings allow."""
    machine: str | None = None
    """A result of realrun on your machine (JSON): forwards and host are as much slower or faster as it measured."""
    band: bool = True
    """Say how far a prediction may be off: as real runs were; where forward times are predicted, at both ends of their
    error bar, which are simulated as well."""
    contention: Contention = "fluid"
    """How streams share a GPU: fluid (bandwidth and compute), or the ablations serial (no overlap) and max (free)."""
    padding: Padding = "profile"
    """How forwards are padded to CUDA graphs: profile (as measured), vllm (the tokens of a step), sglang or
    tensorrt-llm (its requests)."""
    gpu_memory_utilization: float = 0.9
    """Share of the GPU's memory for weights and KV cache."""
    kv_capacity_tokens: int | None = None
    """KV cache size in tokens, instead of what the memory leaves room for."""
    tensor_parallel_size: int = 1
    """GPUs that the target is sharded over: 1, 2, 4 or 8. Where lanes are placed, each GPU with the target on it is a
    group of so many."""
    draft_tensor_parallel_size: int | None = None
    """GPUs that the drafter is sharded over: 1 or as many as the target; default: as the target, and 1 where the
    drafter is apart from it."""
    place: tuple[str, ...] = ()
    """Lanes on GPUs as lane=number; those not named are on 0. prefill=1 verify=1 leaves GPU 0 to the drafter;
    prefill=0+1 prefills on two GPUs, decode=0+1 drafts on two (pdv and its like). KV moves from prefill to where the
    target decodes."""
    cards: tuple[str, ...] = ()
    """Card of each GPU where --place makes several, e.g. l4 h200; default: all are --gpu."""
    link: LinkName = "nvlink4"
    """Link between the GPUs of a server: nvlink4, pcie5, pcie4 (16 lanes), 400gbe, 100gbe."""
    link_latency_s: Internal[float | None] = None  # instead of the link's
    link_bytes_per_s: Internal[float | None] = None  # each way, instead of the link's
    draft_probs: Internal[DraftProbs] = (
        "none"  # what goes with a draft token to another GPU: rejection sampling needs it
    )
    replicas: int = 1
    """Independent copies of the whole server behind a router."""
    router: Router = "round-robin"
    """How the router picks a replica."""

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
        self.placed()

    def placed(self) -> dict[str, tuple[int, ...]]:
        """GPUs of each lane that --place names."""
        found: dict[str, tuple[int, ...]] = {}
        for text in self.place:
            lane, _, numbers = text.partition("=")
            known = lane in ("prefill", "decode", "verify")
            if not known or not all(n.isdecimal() and int(n) < MOST_GPUS for n in numbers.split("+")):
                raise ValueError(f"place: {text!r} must be lane=GPU: prefill, decode or verify, 0 to {MOST_GPUS - 1}")
            if lane in found:
                raise ValueError(f"place names {lane} twice")
            found[lane] = gpus = tuple(map(int, numbers.split("+")))
            if len(set(gpus)) < len(gpus):
                raise ValueError(f"place: {text!r} names a GPU twice")
        if len(found.get("verify", ())) > 1:
            raise ValueError("place: a target verifies on one GPU; --replicas makes more of it")
        return found


@dataclass(frozen=True)
class Host:
    """What the one host thread costs. None takes the profile's figure."""

    host: HostKind = "measured"
    """How an idle lane learns of work: measured (as realrun's event loop, immediately), polling (it looks every 1 ms),
    python-threads (a thread that wakes in 50 µs; assumed)."""
    launch_s: float | None = None
    """Host time per launch."""
    completion_s: float | None = None
    """Host time to notice a completion and read its result back."""
    handoff_s: float | None = None
    """Host time to pass requests from one lane to another."""
    idle_poll_s: Internal[float] = 0.0  # period at which an idle lane looks for work; 0: it is told
    idle_poll_cost_s: Internal[float] = 1e-6  # host time of one such look, which every idle lane takes from the others
    notify_s: Internal[float] = 0.0  # time until an idle lane that is told of work is awake

    def __post_init__(self) -> None:
        for name, value in HOSTS[self.host].items():
            object.__setattr__(self, name, value)
        check_ranges(self)
        if 0 < self.idle_poll_s < 1e-9:
            raise ValueError(f"idle-poll-s must be 0, or at least 1e-09, got {self.idle_poll_s}")
