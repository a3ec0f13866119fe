"""The simulated servers of an experiment, put together, and the router in front of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from simpy.events import Event

from pdvsim.sim.assembly import ServerParts, link_of, make_controller, models_of, side_profile
from pdvsim.sim.config import SHARDED, Experiment, Sides
from pdvsim.sim.core import LOOKED_UP, Request
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import SimulatedGPU
from pdvsim.sim.machine.fastforward import FastForwardGPU
from pdvsim.sim.machine.kv import KvCache, windows_of
from pdvsim.sim.machine.node import Device, Node
from pdvsim.sim.machine.ranks import RankGPU, RankGroup
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.policies import own_errors, policy_of
from pdvsim.sim.policies.apart import DecodeEngine, Disaggregated, KvShipping, PrefillEngine
from pdvsim.sim.policies.base import Context, Policy
from pdvsim.sim.policies.gates import AllRanks
from pdvsim.sim.prices.contention import Sharing
from pdvsim.sim.prices.host import SimulatedHost
from pdvsim.sim.prices.links import LINKS, Fabric
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.records import Log

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)
UNEVEN = 64  # requests that a prefix-aware router lets one server have more than another, or half as many again


def shipping_of(experiment: Experiment, sides: Sides, fabric: Fabric, handover_s: float = 0.0) -> KvShipping:
    """Return how a disaggregated server sends the KV cache of a prompt.

    Every GPU that decodes receives its shard by its own port; those of a smaller group that prefills send more each.
    """
    hardware, (prefill, decode) = experiment.hardware, (side.hardware for side in sides)
    drafter = sides.prefill.speculates
    models = [sides.decode.pair.target, *([sides.decode.pair.draft] if drafter else [])]
    ports = max(1.0, decode.tensor_parallel_size / prefill.tensor_parallel_size)
    return KvShipping(
        fabric,
        layers=models[0].layers if hardware.kv_transfer == "layers" else 1,
        token_bytes=ports * sum(model.kv_bytes_per_token for model in models),
        windows=() if experiment.traffic.shares else windows_of(models),
        state_bytes=ports * sum(model.kept_bytes for model in models),
        drafter=drafter,
        first_token=ENGINES[hardware.predicted_engine].sends_first_token,
        handover_s=handover_s,
    )


def drawn_verdict(launch: Launch) -> Sequence[int] | None:
    """Return how many of each row's drafts the target accepts, as drawn before the run."""
    return None if launch.role == "draft" else launch.rows.verdict()


def check_context(models: Iterable[ModelSpec], requests: Sequence[Request]) -> None:
    """Refuse a request that is longer than a model's context."""
    known = [(limit, model.name) for model in models if (limit := model.max_position_embeddings) is not None]
    longest = max(requests, key=lambda request: request.prompt_tokens + request.output_tokens)
    tokens = longest.prompt_tokens + longest.output_tokens
    if known and tokens > min(known)[0]:
        limit, name = min(known)
        raise ValueError(
            f"request {longest.id} has {tokens} tokens but the context of {name} ends at {limit}: lower --input-len or "
            "--output-len, or choose a --pair of longer context"
        )


def check_kv(kv: KvCache, requests: Sequence[Request], sharded: Callable[[int], str] = lambda tokens: "") -> None:
    """Refuse a request that the KV cache could never hold; `sharded` says over how many GPUs it would."""
    largest = max(requests, key=kv.need)
    need = kv.need(largest)
    if not kv.capacity_tokens:
        raise ValueError(
            "the models' weights leave no room for a KV cache on this GPU: choose a larger card or smaller models"
            f"{sharded(need)}"
        )
    if need > kv.capacity_tokens:
        raise ValueError(
            f"request {largest.id} needs {need} tokens of KV cache and the server has {kv.capacity_tokens}: "
            f"lower --input-len or --output-len, or raise --gpu-memory-utilization{sharded(need)}"
        )


def sharded_hint(experiment: Experiment, profile: Profile, tokens: int) -> str:
    """The least GPUs to shard the target over so that a server holds `tokens`, as an advice; nothing if none does."""
    hardware = experiment.hardware
    if hardware.kv_capacity_tokens is not None:
        return ""
    for size in (size for size in SHARDED if size > hardware.tensor_parallel_size):
        for drafters in (None, 1):
            with suppress(ValueError):  # models that cannot be divided so, or too many GPUs for a server
                wider = replace(hardware, tensor_parallel_size=size, draft_tensor_parallel_size=drafters)
                if ServerParts(replace(experiment, hardware=wider), profile).kv_capacity >= tokens:
                    return f", or give --tensor-parallel-size {size}"
    return ""


class Cluster:
    """The servers that the router dispatches to."""

    def __init__(
        self, env: Clock, experiment: Experiment, profile: Profile, log: Log, end: int = 0, blocks: bool = True
    ) -> None:
        self.env = env
        self.blocks = blocks  # several rounds may be simulated in one step
        self.experiment = experiment
        self.log = log
        self.parts = ServerParts(experiment, profile, end)
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.servers: list[Policy] = []  # every engine
        self.fronts: list[list[Policy | Disaggregated]] = []  # of each replica its ranks
        self.prompt_caches: list[list[KvCache]] = []  # of each replica, where prompts are prefilled
        self.gpus: list[SimulatedGPU] = []
        self.fabrics: list[Fabric] = []
        self._turn = 0
        self._next_rank = [0] * experiment.hardware.replicas  # by replica
        self._rng = np.random.default_rng([experiment.traffic.seed, 7])
        self._host_times = profile.host.with_options(experiment.host)
        self._read_at_s = 0.0  # when the host has read all requests that arrived
        # requests that were sent together do not arrive together: equal ones would finish in one step for ever
        self._late_s = _drawn(np.random.default_rng([experiment.traffic.seed, 8]), 2 * self._host_times.request_s)
        for replica in range(experiment.hardware.replicas):
            if experiment.sides is None:
                kind: type[Policy] = policy_of(experiment.arch)
                ranks = self._engine(kind, self.parts, replica)
                self.servers += ranks
                self.fronts.append([*ranks])
                self.prompt_caches.append([rank.kv for rank in ranks])
            else:
                front = self._disaggregated(replica, experiment.sides)
                self.fronts.append([front])
                self.prompt_caches.append([engine.kv for engine in front.prefill])

    @property
    def bandwidths(self) -> list[float]:
        """Bytes per second of each GPU of a server, or of each of its data-parallel ranks."""
        return [gpu.bytes_per_s for gpu in self.gpus[: len(self.gpus) // self.experiment.hardware.replicas]]

    def _engine(self, kind: type[AnyPolicy], parts: ServerParts, replica: int, first: int = 0) -> list[AnyPolicy]:
        """The data-parallel ranks of an engine, mostly one, each with its host; its GPUs are numbered from `first`."""
        size, waits = parts.experiment.hardware.data_parallel_size, parts.experiment.server
        group = RankGroup(self.env) if size > 1 else None
        ranks = [self._started(kind, parts, replica, first + number, group) for number in range(size)]
        if group is not None and waits.attention_dp_timeout_iters is not None:
            gate = AllRanks(group, ranks, waits.attention_dp_timeout_iters, waits.attention_dp_batching_wait_iters)
            for policy in ranks:
                policy.gate = gate
        return ranks

    def _disaggregated(self, replica: int, sides: Sides) -> Disaggregated:
        """Engines that prefill and engines that decode, and the ports between them."""
        hardware, (prefills, decodes) = self.experiment.hardware, self.experiment.hardware.groups()
        profile = side_profile(self.experiment, sides.prefill, self.parts.profile)
        parts = ServerParts(sides.prefill, profile, self.parts.end)
        prefill, decode = list[PrefillEngine](), list[DecodeEngine]()
        for _ in range(prefills):
            prefill += self._engine(PrefillEngine, parts, replica, len(prefill))
        for _ in range(decodes):
            decode += self._engine(DecodeEngine, self.parts, replica, len(prefill) + len(decode))
        self.servers += [*decode, *prefill]
        link = LINKS[hardware.kv_link or hardware.link]
        self.fabrics.append(fabric := Fabric(link, len(prefill) + len(decode)))
        shipping = shipping_of(self.experiment, sides, fabric, self.parts.profile.handover_s)
        return Disaggregated(prefill, decode, shipping, hardware.router == "prefix-aware")

    def _host(self, replica: int) -> SimulatedHost:
        if (spans := self.log.host) is None:
            return SimulatedHost(self._host_times)
        return SimulatedHost(
            self._host_times, lambda what, start_s, end_s: spans.append((replica, what, start_s, end_s))
        )

    def _gpu(
        self, parts: ServerParts, at: int, host: SimulatedHost, replica: int, number: int, group: RankGroup | None
    ) -> FastForwardGPU | RankGPU:
        """The GPU `at` of a server with these parts, called `number` in the records."""
        profile, server = parts.profiles[at], parts.experiment.server
        sharing = Sharing(parts.experiment.hardware.contention, server.priority, profile.contention)
        looked_up = parts.planner.lookup if server.drafted_by in LOOKED_UP else None
        arguments = (
            self.env, host, parts.models[at], sharing, self.log.launches, drawn_verdict, profile.gpu.peak, replica,
            number, profile.power, looked_up,
        )  # fmt: skip
        gpu = FastForwardGPU(*arguments, blocks=self.blocks) if group is None else RankGPU(group, *arguments)
        self.gpus.append(gpu)
        return gpu

    def _started(
        self, kind: type[AnyPolicy], parts: ServerParts, replica: int, first: int, group: RankGroup | None
    ) -> AnyPolicy:
        """A policy with its processes under way: a server, or one of its ranks."""
        placement, target, host = parts.experiment.placement, parts.experiment.pair.target, self._host(replica)
        gpus = [self._gpu(parts, at, host, replica, first + at, group) for at in range(placement.gpus)]
        device: Device = gpus[0]
        if len(gpus) > 1:
            self.fabrics.append(fabric := Fabric(link_of(parts.experiment), placement.gpus))
            device = Node(self.env, host, gpus, placement, fabric, target.kv_bytes_per_token, target.kept_bytes)
        context = Context(
            env=self.env,
            device=device,
            settings=parts.settings,
            controller=make_controller(parts.settings, parts.planner),
            planner=parts.planner,
            kv=parts.kv_cache(),
            deliveries=self.log.deliveries,
            prefill_workers=len(parts.experiment.placement.prefill),
            on_finish=lambda request: self.on_finish(request),
        )
        with own_errors(self.experiment.arch):
            policy = kind(context)
            if isinstance(device, FastForwardGPU):
                own = kind.submit is not Policy.submit or kind.wake_prefill is not Policy.wake_prefill
                # what arrives at a user's own may launch right away
                device.serve(policy.kv, self.log.deliveries, policy.rereads, arrivals_queue=not own)
            for process in policy.processes():
                self.env.process(process)
        return policy

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what could never be served."""
        check_context(models_of(self.experiment), requests)
        check_kv(self.servers[0].kv, requests, partial(sharded_hint, self.experiment, self.parts.profile))
        placement = self.experiment.placement
        several = len(placement.prefill) > 1 or len(placement.draft) > 1
        if several and self.servers[0].kv.reuse is not None and any(request.chain for request in requests):
            raise ValueError(
                "--place: a lane on several GPUs cannot share prefixes, as each GPU would hold others: give "
                "--no-enable-prefix-caching"
            )
        if self.experiment.sides is None:
            room = self.parts.kv_capacities[placement.prefill[0]]
        else:
            room = self.servers[-1].kv.capacity_tokens
        longest = max(requests, key=lambda request: request.prompt_tokens)
        if longest.prompt_tokens > room:
            raise ValueError(
                f"request {longest.id} has {longest.prompt_tokens} prompt tokens and the GPU of the prefill lane has "
                f"room for {room}: lower --input-len, or give that lane a larger card"
            )

    def receive(self, request: Request) -> None:
        """A request reaches the server that takes it once its host has read it, which reads one after the other."""
        times = self._host_times
        if times.request_s or times.prompt_token_s:
            self._read_at_s = max(self.env.now, self._read_at_s) + times.prompt_token_s * request.prompt_tokens
            arrived = self.env.at(self._read_at_s + next(self._late_s), Event(self.env), first=True)
            arrived.callbacks.append(lambda _: self.route(request).submit(request))
        else:
            self.route(request).submit(request)

    def route(self, request: Request) -> Policy | Disaggregated:
        """The server that takes a request, and of its data-parallel ranks the one that does."""
        router, replicas = self.experiment.hardware.router, self.fronts
        if len(replicas) == 1:
            at = 0
        elif router in ("least-loaded", "prefix-aware"):
            loads = [sum([rank.load for rank in ranks]) for ranks in replicas]
            cached = [0] * len(replicas)
            if router == "prefix-aware" and max(loads) - min(loads) <= max(UNEVEN, min(loads) // 2):
                cached = [max([kv.cached(request) for kv in caches]) for caches in self.prompt_caches]
            at = min(range(len(replicas)), key=lambda i: (-cached[i], loads[i]))
        elif router == "random":
            at = int(self._rng.integers(len(replicas)))
        else:
            at, self._turn = self._turn, (self._turn + 1) % len(replicas)
        request.taken.replica = at
        fronts = replicas[at]
        return fronts[0] if len(fronts) == 1 else self._rank(at, [rank for rank in fronts if isinstance(rank, Policy)])

    def _rank(self, replica: int, ranks: Sequence[Policy]) -> Policy:
        """The rank that takes a request, as engines deal them by default: the least loaded, or each in turn."""
        weight, first = ENGINES[self.experiment.hardware.predicted_engine].waiting_weight, self._next_rank[replica]
        if weight is not None:
            turns = [*range(first, len(ranks)), *range(first)]  # of equal ones not always the same
            first = min(turns, key=lambda i: ranks[i].in_flight + weight * len(ranks[i].waiting))
        self._next_rank[replica] = (first + 1) % len(ranks)
        return ranks[first]

    def settled_s(self) -> float:
        """Return the time until which every launch that began is in the log."""
        running = (job.start_s for gpu in self.gpus for job in gpu.running if job.start_s >= 0)
        now_s: float = self.env.now
        return min(now_s, *running, math.inf)

    def meta(self) -> dict[str, Any]:
        """Return the provenance of the records."""
        profile, gpu = self.parts.profile, self.parts.profile.gpu
        return {
            "clock": "simulated",
            "profile": profile.name,
            "foundation": profile.foundation,
            "provenance": profile.provenance,
            **({"forward_error_bar": self.parts.bar} if self.parts.bar else {}),
            "gpu": gpu.name,
            "gpus": self.experiment.hardware.replicas * self.experiment.gpus,
            "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
            "bandwidths_bytes_per_s": self.bandwidths,
            "flops_per_s": gpu.flops_per_s,
            "kv_capacity_tokens": self.parts.kv_capacity,
            "kv_peak_tokens": max(server.kv.peak_tokens for server in self.servers),
            **cached_facts([server.kv for server in self.servers]),
            **tier_facts([server.kv for server in self.servers]),
            "reaches": profile.reaches(self.experiment.pair),
            **({"links": self._links()} if self.fabrics else {}),
        }

    def _links(self) -> dict[str, dict[str, float]]:
        """Bytes that went over the links and the time that took, of all servers, by way."""
        ways = sorted({way for fabric in self.fabrics for way in fabric.bytes})
        return {
            f"{source}->{target}": {
                "bytes": sum(fabric.bytes.get((source, target), 0.0) for fabric in self.fabrics),
                "busy_s": sum(fabric.busy_s.get((source, target), 0.0) for fabric in self.fabrics),
            }
            for source, target in ways
        }


def _drawn(rng: np.random.Generator, most: float) -> Iterator[float]:
    """Numbers from 0 to `most`, drawn many together: a call for each would take ten times as long."""
    while True:
        yield from rng.uniform(0, most, 256).tolist()


def tier_facts(caches: Sequence[KvCache]) -> dict[str, float]:
    """Hits by tier of all servers, and what a fetch takes against a prefill; nothing without tiers."""
    facts: dict[str, float] = {}
    for kv in caches:
        for name, value in (kv.tiers.facts() if kv.tiers is not None else {}).items():
            facts[name] = value if name.endswith("_ms") else facts.get(name, 0) + value
    return facts


def cached_facts(caches: Sequence[KvCache]) -> dict[str, int]:
    """KV cache that requests shared at most, what is cached at the end, and evictions; nothing without a chain."""
    for kv in caches:
        kv.evict()
    evictions = sum(kv.prefixes.evictions for kv in caches)
    if not evictions and not any(len(kv.prefixes) for kv in caches):
        return {}
    return {
        "kv_peak_shared_tokens": max(kv.peak_shared_tokens for kv in caches),
        "kv_cached_tokens": sum(kv.cached_tokens for kv in caches),
        "prefix_cache_evictions": evictions,
    }
