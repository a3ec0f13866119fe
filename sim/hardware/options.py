"""The options of the hardware: the GPUs, how they are modelled, and what the host costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.links import DraftProbs, LinkName
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.hardware.padding import Padding
from pdvsim.sim.limits import check_ranges

Priority = Literal["none", "stream", "dynamic", "preemptive", "partition"]
Contention = Literal["fluid", "serial", "max"]
Router = Literal["round-robin", "least-loaded", "random"]

MOST_GPUS = 8  # of one server that lanes are placed on
SHARDED = (1, 2, 4, 8)  # GPUs that a model may be sharded over


@dataclass(frozen=True)
class Hardware:
    """The GPU, how it is modelled, and how many there are."""

    gpu: str = "h200"
    """Card, of those in `pdvsim profiles`, or a TOML file with one of your own (docs/cards.md)."""
    profile: str | None = None
    """A profile file (JSON) instead of the built-in one for --gpu; `roofline` for what the card's ceilings allow."""
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
    verify_gpu: int = 0
    """1 places the target model, with its verify and prefill streams, on a second GPU: short for --place prefill=1
    decode=0 verify=1."""
    place: tuple[str, ...] = ()
    """Lanes on GPUs as lane=number, e.g. prefill=0 decode=1; those not named are on 0. prefill=0+1 reads prompts on two
    GPUs, decode=0+1 drafts on two (pdv and its like). The drafter reads prompts where decode is; KV moves from prefill
    to where the target decodes."""
    cards: tuple[str, ...] = ()
    """Card of each GPU where --place or --verify-gpu makes several, e.g. l4 h200; default: all are --gpu."""
    link: LinkName = "nvlink4"
    """Link between the GPUs of a server: nvlink4, pcie5, pcie4 (16 lanes), 400gbe, 100gbe."""
    link_latency_s: float | None = None
    """Latency of a transfer, instead of the link's."""
    link_bytes_per_s: float | None = None
    """Bandwidth each way, instead of the link's."""
    draft_probs: DraftProbs = "none"
    """What goes with each draft token to another GPU: none (greedy verification), or the drafter's distribution over
    the vocabulary, which rejection sampling needs, in bf16 or fp32."""
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
        if self.place and self.verify_gpu:
            raise ValueError("--place says where each lane is: leave out --verify-gpu")

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

    launch_s: float | None = None
    """Host time to launch one work."""
    completion_s: float | None = None
    """Host time to notice a completion and read its result back."""
    handoff_s: float | None = None
    """Host time to pass requests from one lane to another."""
    idle_poll_s: float = 0.0
    """Period at which an idle lane looks for work: 10e-6 spin, 1e-3 sleep, 0.1 time-out of a wait; 0: it is told."""
    idle_poll_cost_s: float = 1e-6
    """Host time of one such look, which every idle lane takes from the others."""
    notify_s: float = 0.0
    """Time until an idle lane that is told of work is awake: 0 one event loop, 50e-6 a thread behind a condition."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if 0 < self.idle_poll_s < 1e-9:
            raise ValueError(f"idle-poll-s must be 0, or at least 1e-09, got {self.idle_poll_s}")
