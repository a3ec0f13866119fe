"""The options of the hardware: the GPUs, how they are modelled, and what the host costs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Annotated, Literal, get_args

from pdvsim.sim.core import Contention, ServingEngine
from pdvsim.sim.limits import (
    RANKED,
    SHARDED,
    Fact,
    Gigabytes,
    Gpus,
    HostSeconds,
    Internal,
    LeastShare,
    Range,
    Ranks,
    Shards,
    check_ranges,
    of,
)
from pdvsim.sim.models.layers import All2All
from pdvsim.sim.models.names import card_name
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.links import NVLINK5_CARDS, LinkName, nvlink_of
from pdvsim.sim.reading import read_json

Router = Literal["round-robin", "least-loaded", "random", "prefix-aware"]
HostKind = Literal["measured", "polling", "python-threads"]
KvTransfer = Literal["layers", "prompt"]
DraftKv = Literal["sent", "recomputed"]
HostLink = Literal["pcie5", "pcie4"]
Padding = Literal["profile", "vllm", "sglang", "tensorrt-llm"]

ENGINE = re.compile(r"pdvsim|(vllm|sglang|trtllm)(==\d{1,4}(\.\d{1,4}){1,3}(rc\d{1,3})?(\.post\d{1,3})?)?", re.ASCII)
HOSTS: dict[HostKind, dict[str, float]] = {  # what each sets of `Host`
    "measured": {},
    "polling": {"idle_poll_s": 1e-3},
    "python-threads": {"notify_s": 50e-6},
}

SERVED = frozenset({"autoregressive", "colocated"})  # architectures that engines other than pdvsim's serve on one GPU
MOST_GPUS = 8  # of one server that lanes are placed on
MOST_GROUPS = 64  # of each kind in a disaggregated server


@dataclass(frozen=True)
class Hardware:
    """GPUs: their number and how they are modelled."""

    gpu: str = "h200"
    """A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md)."""
    profile: Annotated[str | None, of(engine=(None, "pdvsim"))] = None
    """Profile file (JSON) instead of the built-in one of --gpu, or `roofline`, a bound from the data sheet alone."""
    machine: str | None = None
    """Result of realrun on your machine, or of `calibrate --from-bench` for your engine (JSON). Forward and host times
    are scaled to the speed it measured."""
    engine: str | None = None
    """Serving engine whose forward and step times are predicted: pdvsim (the engine of realrun), vllm, sglang or trtllm
    (from their kernels, see pdvsim profile --list), or one version of these, as vllm==0.22.1. Default: the one that
    --machine was fitted for, and pdvsim with --profile; else, on every card, vllm where it serves all architectures
    that are asked for (autoregressive, colocated, --disaggregate), and pdvsim where one has lanes."""
    band: bool = True
    """Report no error ranges. They are from comparable real runs or, where forward times are predicted, from
    simulations at the ends of their error bar."""
    contention: Annotated[Contention, of(Fact.STREAMS)] = "fluid"
    """How streams share a GPU: fluid (bandwidth and compute), or as ablations serial (no overlap) and max (no cost)."""
    padding: Padding = "profile"
    """How forwards are padded to CUDA graphs: profile (as measured), vllm (by tokens per step), sglang or tensorrt-llm
    (by requests per step)."""
    gpu_memory_utilization: Annotated[LeastShare, of(without=["kv_capacity_tokens"])] = 0.9
    """Share of the GPU's memory for weights and KV cache."""
    kv_capacity_tokens: Annotated[int, Range(1, 10**12)] | None = None
    """KV cache size in tokens; default: what fits into the memory."""
    kv_offload_gb: Annotated[Gigabytes, of(Fact.OFFLOADS)] = 0.0
    """Host memory of a server for prefixes evicted from the GPU's KV cache, in GB. They are fetched from there where
    that is faster than their prefill. A TP group shares it."""
    kv_offload_ssd_gb: Annotated[Gigabytes, of(Fact.OFFLOADS)] = 0.0
    """SSD of a server for prefixes evicted from the host memory, in GB, read at 6.9 GB/s."""
    kv_offload_link: Annotated[HostLink, of("kv_offload_gb")] = "pcie5"
    """Link between the host memory and each GPU: pcie5 or pcie4 (16 lanes)."""
    tensor_parallel_size: Shards = 1
    """Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds the target is a group
    of this size."""
    draft_tensor_parallel_size: Annotated[Shards | None, of("tensor_parallel_size", Fact.DRAFTS)] = None
    """Number of GPUs the drafter is sharded over: 1 or as many as the target. Default: as the target, or 1 if the
    drafter has a GPU of its own."""
    data_parallel_size: Ranks = 1
    """Number of groups of --tensor-parallel-size GPUs that have attention, KV cache and requests of their own: 1, 2, 4,
    8, 16, 24, 32, 48, 64 or 72. They step together, and the experts of each layer are divided over all GPUs, 72 at
    most. For mixtures of experts."""
    enable_expert_parallel: Annotated[bool, of(Fact.SPLIT_EXPERTS)] = False
    """Divide whole experts among the GPUs of a server instead of a share of every expert."""
    all2all_backend: Annotated[All2All | None, of("data_parallel_size", "enable_expert_parallel")] = None
    """How tokens of data-parallel groups reach experts on other GPUs: allgather_reducescatter, deepep_low_latency,
    deepep_high_throughput or flashinfer_nvlink_two_sided (TensorRT-LLM's kernels, for GPUs of one NVLink). Default: the
    last for trtllm on Blackwell, elsewhere the first."""
    enable_eplb: Annotated[bool, of("enable_expert_parallel")] = False
    """Place experts by their load (EPLB), so that every GPU has as many tokens."""
    num_redundant_experts: Annotated[int, Range(0, 1024), of("enable_eplb")] = 0
    """Copies of popular experts . Experts and copies are divided among the GPUs: 32 copies divide the
    256 experts of DeepSeek among 24, 48 or 72."""
    place: tuple[str, ...] = ()
    """GPU of each lane, as lane=number; default: GPU 0. prefill=1 verify=1 leaves GPU 0 to the drafter. prefill=0+1
    prefills on two GPUs; decode=0+1 drafts on two (pdv and variants). KV moves from prefill to where the target
    decodes."""
    disaggregate: str | None = None
    """pd as engines serve it: prefill and decode engines, each with its own GPUs, host, batch and KV cache. 2p1d: two
    that prefill and one that decodes (docs/large-models.md)."""
    prefill_tensor_parallel_size: Annotated[Shards | None, of("disaggregate")] = None
    """Number of GPUs of each prefill engine; default: --tensor-parallel-size."""
    prefill_data_parallel_size: Annotated[Ranks | None, of("disaggregate")] = None
    """Number of data-parallel groups of each prefill engine; default: --data-parallel-size."""
    kv_link: Annotated[LinkName | None, of("disaggregate")] = None
    """Link between prefill and decode engines, one per GPU; RDMA is 400gbe. Default: --link."""
    kv_transfer: Annotated[KvTransfer, of("disaggregate")] = "layers"
    """When the KV cache of a prompt is sent: layers (each layer as it is computed) or prompt (all
    after the prefill, as vLLM's NixlConnector)."""
    draft_kv: Annotated[DraftKv, of("disaggregate", Fact.DRAFTS_ON_GPU)] = "sent"
    """KV cache of the drafter: sent with the target's, or recomputed where it decodes."""
    cards: Annotated[tuple[str, ...], of("place"), of("disaggregate")] = ()
    """Type of each GPU if --place uses several, e.g. l4 h200; default: --gpu for all. With --disaggregate, of prefill
    and decode engines."""
    link: Annotated[LinkName, of(Fact.SEVERAL_GPUS)] = "nvlink4"
    """Link between the GPUs of a server: nvlink4, nvlink5 (Blackwell), pcie5, pcie4 (16 lanes), infiniband-xdr (one
    adapter of 800 Gb/s per GPU), 400gbe, 100gbe. All-reduces over NVLink take the profile's times."""
    replicas: Gpus = 1
    """Number of independent copies of the whole server, with a router."""
    router: Annotated[Router, of("replicas"), of(Fact.PREFILL_ENGINES, router="prefix-aware")] = "round-robin"
    """How the router picks a replica. prefix-aware: the one that has most of the prompt cached, and of these the least
    loaded; the least loaded of all while loads are uneven."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.engine is not None and ENGINE.fullmatch(self.engine) is None:
            known = ", ".join(get_args(ServingEngine))
            raise ValueError(f"--engine: invalid choice {self.engine!r}; one of {known}, or as vllm==0.22.1")
        object.__setattr__(self, "gpu", card_name(self.gpu, GPUS))
        object.__setattr__(self, "cards", tuple(card_name(card, GPUS) for card in self.cards))
        sizes = (self.tensor_parallel_size, self.draft_tensor_parallel_size or 1)
        every = sizes[0] * self.data_parallel_size
        if every > (RANKED if self.enable_expert_parallel else SHARDED)[-1]:
            spread = f"a server has {RANKED[-1]} at most"
            sharded = f"more than {SHARDED[-1]} need --enable-expert-parallel"
            raise ValueError(
                f"data-parallel-size {self.data_parallel_size} x tensor-parallel-size {sizes[0]} are {every} GPUs: "
                f"{spread if every > RANKED[-1] else sharded}"
            )
        joined = nvlink_of(self.gpu)[1] if self.gpu in NVLINK5_CARDS else 0
        if self.all2all_backend == "flashinfer_nvlink_two_sided" and every > joined:
            known = f"{joined} GPUs of {self.gpu}" if joined else f"no {self.gpu}"
            raise ValueError(f"all2all-backend {self.all2all_backend}: its NVLink joins {known}, and not {every}")
        if self.data_parallel_size > 1 and (self.place or self.cards):
            raise ValueError("data-parallel-size: all groups do the same work; leave out --place and --cards")
        if sizes[1] not in (1, sizes[0]):
            raise ValueError(
                f"draft-tensor-parallel-size must be 1 or tensor-parallel-size, {sizes[0]}, got {sizes[1]}"
            )
        fitted = fitted_engine(self.machine) if self.machine is not None else None
        if fitted is not None:
            if self.engine is not None and self.predicted_engine != fitted:
                raise ValueError(f"--engine {self.engine}: --machine {self.machine} was fitted for {fitted}")
            object.__setattr__(self, "engine", self.engine or fitted)
        if self.disaggregate is not None and self.place:
            raise ValueError("--disaggregate places the engines: leave out --place")
        self.placed()
        self.groups()

    @property
    def predicted_engine(self) -> ServingEngine:
        """The engine whose times are predicted."""
        return (self.engine or "pdvsim").partition("==")[0]  # type: ignore[return-value]

    @property
    def is_own(self) -> bool:
        """Whether pdvsim's engine is asked for, by its name or by what was measured of it."""
        return self.engine == "pdvsim" or (self.engine is None and bool(self.profile or self.machine))

    def serving(self, archs: Iterable[str]) -> Hardware:
        """With the engine whose figures a question about these architectures has, whatever the card; None: pdvsim's."""
        if self.engine is not None or self.is_own:
            return replace(self, engine=None) if self.engine == "pdvsim" and self.machine is None else self
        served = self.disaggregate is not None or SERVED.issuperset(archs)
        return replace(self, engine="vllm") if served else self

    @property
    def engine_version(self) -> str:
        """The engine's version that is predicted; empty: the newest that is known."""
        return (self.engine or "").partition("==")[2]

    @property
    def exchange(self) -> All2All:
        """How tokens of data-parallel groups reach experts: as asked, else as the engine does it by default."""
        if self.all2all_backend is not None:
            return self.all2all_backend
        own = self.predicted_engine == "trtllm" and self.enable_expert_parallel and self.gpu in NVLINK5_CARDS
        joined = self.tensor_parallel_size * self.data_parallel_size <= nvlink_of(self.gpu)[1]
        return "flashinfer_nvlink_two_sided" if own and joined else "allgather_reducescatter"

    def groups(self) -> tuple[int, int]:
        """Prefill and decode engines of a disaggregated server; none of either without --disaggregate."""
        if self.disaggregate is None:
            return 0, 0
        numbers = re.fullmatch(r"(\d{1,3})p(\d{1,3})d", self.disaggregate.lower(), re.ASCII)
        prefill, decode = (int(number) for number in numbers.groups()) if numbers else (0, 0)
        if not (1 <= prefill <= MOST_GROUPS and 1 <= decode <= MOST_GROUPS):
            known = f"as 2p1d, with 1 to {MOST_GROUPS} engines of each kind"
            raise ValueError(f"disaggregate: {self.disaggregate!r} must be prefill and decode engines {known}")
        return prefill, decode

    def placed(self) -> dict[str, tuple[int, ...]]:
        """GPUs of each lane that --place names."""
        placed: dict[str, tuple[int, ...]] = {}
        for text in self.place:
            lane, _, numbers = text.partition("=")
            gpus = tuple(int(n) if n.isascii() and n.isdecimal() else MOST_GPUS for n in numbers.split("+"))
            if lane not in ("prefill", "decode", "verify") or max(gpus) >= MOST_GPUS:
                raise ValueError(f"place: {text!r} must be lane=GPU: prefill, decode or verify, 0 to {MOST_GPUS - 1}")
            if lane in placed:
                raise ValueError(f"place names {lane} twice")
            placed[lane] = gpus
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
        document = read_json(machine)
    except (OSError, ValueError):
        return None
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
    idle_poll_s: Internal[HostSeconds] = 0.0  # period at which an idle lane looks for work; 0: it is notified
    idle_poll_cost_s: Internal[HostSeconds] = 1e-6  # host time of one look, taken from the others
    notify_s: Internal[HostSeconds] = 0.0  # time until an idle lane that is notified of work is awake

    def __post_init__(self) -> None:
        for name, value in HOSTS[self.host].items():
            object.__setattr__(self, name, value)
        check_ranges(self)
        if 0 < self.idle_poll_s < 1e-9:
            raise ValueError(f"idle-poll-s must be 0, or at least 1e-09, got {self.idle_poll_s}")
