"""The simulated servers of one experiment: its profile, host, links, KV cache and policies, put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from simpy.events import Event

from pdvsim.sim.config import SHARDED, Experiment, Hardware, Server
from pdvsim.sim.core import LOOKED_UP, ModelSpec, Pair, Request, Role
from pdvsim.sim.hardware.composed import TABLES, engine_profile, tables_file
from pdvsim.sim.hardware.contention import Sharing
from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.hardware.host import HostTimes, SimulatedHost, WatchedHost
from pdvsim.sim.hardware.links import LINKS, Fabric, LinkSpec
from pdvsim.sim.hardware.models import HEADS, gpu
from pdvsim.sim.hardware.pace import read_pace
from pdvsim.sim.hardware.profile import Profile, builtin, load, roofline
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import SimulatedGPU
from pdvsim.sim.machine.fastforward import FastForwardGPU
from pdvsim.sim.machine.kv import KvCache, capacity_tokens, windows_of
from pdvsim.sim.machine.node import Device, Node
from pdvsim.sim.machine.prefix import Reuse
from pdvsim.sim.policies import archs_where, own_errors, policy_of
from pdvsim.sim.policies.base import Context, Policy
from pdvsim.sim.policies.controllers import ByBatchSize, Controller, Feedback, Goodput
from pdvsim.sim.policies.planner import Planner, RemoteDrafter, StepCosts
from pdvsim.sim.policies.verification import AdaptiveVerification
from pdvsim.sim.records import Log
from pdvsim.sim.workload.lookup import lookup_of

UNEVEN = 64  # requests that a prefix-aware router lets one server have more than another, or half as many again


def profile_of(experiment: Experiment) -> Profile:
    """The profile an experiment runs on; of several cards, that of the target's."""
    hardware = experiment.hardware
    card = hardware.cards[experiment.placement.verify] if hardware.cards else hardware.gpu
    if hardware.profile == "roofline":
        return roofline(gpu(card))
    if not hardware.profile:
        return card_profile(hardware, card)
    if hardware.profile.endswith(TABLES):
        return tables_file(Path(hardware.profile), gpu(card))
    profile = load(hardware.profile)
    if hardware.gpu not in (Hardware.gpu, profile.gpu.name):
        raise ValueError(f"--profile {hardware.profile} is for {profile.gpu.name}, not for --gpu {hardware.gpu}")
    return profile


def card_profile(hardware: Hardware, card: str) -> Profile:
    """The profile of the chosen engine on a card."""
    engine = hardware.engine_on(card)
    return builtin(card) if engine == "pdvsim" else engine_profile(engine, card)


def covering_profile(experiment: Experiment) -> Profile:
    """The same with both models of the pair, predicted where the profile lacks them."""
    pair = experiment.pair
    if not experiment.speculates:
        pair = Pair(pair.target, pair.target)  # its drafter is never run
    profile = profile_of(experiment)
    if profile.whole_steps:
        if not policy_of(experiment.arch).in_steps():
            fitting = archs_where(lambda policy: policy.in_steps())
            raise ValueError(
                f"profile {profile.name} has {profile.foundation}: it supports {' and '.join(fitting)}, but not the "
                f"concurrent lanes of {experiment.arch}"
            )
        for spec in (pair.draft, pair.target):
            profile.cost_model(spec)  # a step of a model that was not in it cannot be told from the others'
    whole = profile.covering(pair, link_of(experiment)).padded(experiment.hardware.padding)
    machine = experiment.hardware.machine
    return whole if machine is None else read_pace(machine).applied(whole, pair)


def profiles_of(experiment: Experiment, profile: Profile, end: int = 0) -> list[Profile]:
    """The profile of each GPU of a server, where `profile` is that of the target's; at an end of their error bar."""
    cards, placement = experiment.hardware.cards, experiment.placement
    profiles = [profile] * placement.gpus
    for at, card in enumerate(cards):
        if card != cards[placement.verify]:
            bound = experiment.hardware.profile == "roofline"
            own = roofline(gpu(card)) if bound else card_profile(experiment.hardware, card)
            profiles[at] = own.covering(experiment.pair, link_of(experiment)).padded(experiment.hardware.padding)
    return [one.at_bar(end) for one in profiles] if end else profiles


def bar_of(experiment: Experiment, profile: Profile) -> float:
    """The error bar of an experiment's forward times: the widest of its models'; 0 where all were measured."""
    placed = models_on(experiment)
    profiles = profiles_of(experiment, profile)
    return max(profiles[at].bar(model) for at, models in enumerate(placed) for model in models.values())


def models_on(experiment: Experiment) -> list[dict[Role, ModelSpec]]:
    """The models on each GPU of a server that lanes are placed on."""
    placement, pair = experiment.placement, experiment.pair
    models: list[dict[Role, ModelSpec]] = [{} for _ in range(placement.gpus)]
    for at in (placement.verify, *placement.prefill):
        models[at]["target"] = pair.target
    for at in placement.draft if experiment.speculates else ():
        models[at]["draft"] = pair.draft
    return models


def cost_models(experiment: Experiment, profiles: Sequence[Profile]) -> list[dict[Role, CostModel]]:
    """The cost models of each GPU of a server, by its profile."""
    placed = zip(profiles, models_on(experiment), strict=True)
    return [{role: profile.cost_model(spec) for role, spec in models.items()} for profile, models in placed]


def models_of(experiment: Experiment) -> list[ModelSpec]:
    """The models that an experiment runs."""
    pair = experiment.pair
    return [pair.draft, pair.target] if experiment.speculates and not pair.draft.on_host else [pair.target]


def host_times(experiment: Experiment, profile: Profile) -> HostTimes:
    """The host's costs: the experiment's own figures, else the profile's."""
    host, measured = experiment.host, profile.host
    return HostTimes(
        launch_s=measured.launch_s if host.launch_s is None else host.launch_s,
        completion_s=measured.completion_s if host.completion_s is None else host.completion_s,
        handoff_s=measured.handoff_s if host.handoff_s is None else host.handoff_s,
        idle_poll_s=host.idle_poll_s,
        idle_poll_cost_s=host.idle_poll_cost_s,
        notify_s=host.notify_s,
        row_s=measured.row_s if host.completion_s is None else 0.0,
        request_s=measured.request_s,
        prompt_token_s=measured.prompt_token_s,
    )


def engine_settings(experiment: Experiment) -> Server:
    """The server's settings, scheduled as the chosen engine does."""
    server, separate = experiment.server, experiment.hardware.predicted_engine == "sglang"
    return server if server.separate_prefill == separate else replace(server, separate_prefill=separate)


def make_controller(settings: Server, planner: Planner) -> Controller:
    """The draft-length controller that the settings name."""
    if settings.controller == "feedback":
        return Feedback(settings)
    if settings.controller == "goodput":
        return Goodput(settings, planner)
    if settings.controller == "table":
        return ByBatchSize(settings)
    if settings.controller == "adaptive-verification":
        k, rows = settings.longest_draft, settings.max_num_seqs
        costs = StepCosts(planner, k, rows, settings.adaptive_verification_profile_context_len)
        return AdaptiveVerification(settings, costs)
    return Controller(settings)


def make_planner(
    experiment: Experiment, profile: Profile, placed: Sequence[dict[Role, CostModel]] | None = None
) -> Planner:
    """What an experiment plans with; `placed` are the cost models of its GPUs, where they are known already."""
    if experiment.server.priority == "partition":
        raise ValueError(
            "--priority partition is not simulated: the slowdown of kernels on part of a GPU was not measured; "
            "realrun serves with it"
        )
    placement = experiment.placement
    placed = placed or cost_models(experiment, profiles_of(experiment, profile))
    models: dict[Role, CostModel] = {"target": placed[placement.verify]["target"]}
    if experiment.speculates:
        models["draft"] = placed[placement.draft[0]]["draft"]
    remote = None
    if placement.apart:
        remote = RemoteDrafter(Fabric(link_of(experiment), placement.gpus), len(placement.draft))
    policy = policy_of(experiment.arch)
    sharing = Sharing(experiment.hardware.contention, experiment.server.priority, profile.contention)
    return Planner(
        models, sharing, profile.gpu.peak, host_times(experiment, profile),
        policy.hands_over(), remote, lookup_of(experiment.server.drafted_by, experiment.acceptance),
        not experiment.server.pad_drafts,
        policy.prefill_lane == policy.verify_lane,
    )  # fmt: skip


def bandwidths(experiment: Experiment, profile: Profile) -> list[float]:
    """Bytes per second of each GPU of a server."""
    return [one.gpu.bandwidth_bytes_per_s for one in profiles_of(experiment, profile)]


def link_of(experiment: Experiment) -> LinkSpec:
    """The link between the GPUs of a server."""
    return LINKS[experiment.hardware.link]


def kv_capacities(experiment: Experiment, profile: Profile) -> list[int]:
    """Tokens of KV cache that each GPU of a server has room for, of all models on it; of a group, the fullest."""
    hardware = experiment.hardware
    if hardware.kv_capacity_tokens is not None:
        return [hardware.kv_capacity_tokens] * experiment.placement.gpus
    return [
        capacity_tokens(one.gpu, list(models.values()), hardware.gpu_memory_utilization) if models else 0
        for one, models in zip(profiles_of(experiment, profile), models_on(experiment), strict=True)
    ]


def kv_capacity(experiment: Experiment, profile: Profile) -> int:
    """Tokens of KV cache that a server has: of the part with the least room, of those that hold a request to its end.

    Several GPUs that draft hold their requests' among them.
    """
    placement, capacities = experiment.placement, kv_capacities(experiment, profile)
    verify = capacities[placement.verify]
    return min(verify, sum(capacities[at] for at in placement.draft)) if experiment.speculates else verify


def reuse_of(experiment: Experiment) -> Reuse | None:
    """What a server may use of cached prefixes; None: prefixes are not cached."""
    server, placement = experiment.server, experiment.placement
    if not (server.enable_prefix_caching and experiment.paged):
        return None
    return Reuse(
        lost_blocks=1 if experiment.speculates and server.drafted_by in HEADS else 0,
        answers=placement.prefill == (placement.verify,),
        drafter=experiment.speculates and server.drafted_by not in LOOKED_UP,
    )


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


def drawn_verdict(launch: Launch) -> Sequence[int] | None:
    """How many of each row's drafts the target accepts, as drawn before the run."""
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
            wider = replace(hardware, tensor_parallel_size=size, draft_tensor_parallel_size=drafters)
            with suppress(ValueError):  # models that cannot be divided so
                if kv_capacity(replace(experiment, hardware=wider), profile) >= tokens:
                    return f", or give --tensor-parallel-size {size}"
    return ""


class Cluster:
    """The servers behind the router."""

    def __init__(
        self, env: Clock, experiment: Experiment, profile: Profile, log: Log, end: int = 0, blocks: bool = True
    ) -> None:
        self.env = env
        self.blocks = blocks  # several rounds may be simulated in one step
        self.experiment = experiment
        self.profile = profile
        self._profiles = profiles_of(experiment, profile, end)
        self._models = cost_models(experiment, self._profiles)
        self.log = log
        self.pair = experiment.pair
        self.capacity_tokens = kv_capacity(experiment, profile)
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.servers: list[Policy] = []
        self.gpus: list[SimulatedGPU] = []
        self.fabrics: list[Fabric] = []
        self._turn = 0
        self._rng = np.random.default_rng([experiment.traffic.seed, 7])
        self._host_times = host_times(experiment, profile)
        self._read_at_s = 0.0  # when the host has read all requests that arrived
        # requests that were sent together do not arrive together: equal ones would finish in one step for ever
        self._lateness = np.random.default_rng([experiment.traffic.seed, 8])
        for replica in range(experiment.hardware.replicas):
            self.servers.append(self._server(env, replica))

    def _server(self, env: Clock, replica: int) -> Policy:
        experiment = self.experiment
        settings, placement = engine_settings(experiment), experiment.placement
        planner = make_planner(experiment, self.profile, self._models)
        times, host = self._host_times, SimulatedHost(self._host_times)
        if (spans := self.log.host) is not None:
            host = WatchedHost(times, lambda what, start_s, end_s: spans.append((replica, what, start_s, end_s)))
        looked_up = experiment.server.drafted_by in LOOKED_UP
        gpus = []
        for at, (one, models) in enumerate(zip(self._profiles, self._models, strict=True)):
            sharing = Sharing(experiment.hardware.contention, settings.priority, one.contention)
            gpus.append(
                FastForwardGPU(
                    env, host, models, sharing, self.log.launches, drawn_verdict, one.gpu.peak, replica, at, one.power,
                    planner.lookup if looked_up else None, blocks=self.blocks,
                )
            )  # fmt: skip
        self.gpus += gpus
        device: Device = gpus[0]
        if len(gpus) > 1:
            self.fabrics.append(fabric := Fabric(link_of(experiment), placement.gpus))
            device = Node(env, host, gpus, placement, fabric, self.pair.target.kv_bytes_per_token)
        verifying = self._models[placement.verify]
        context = Context(
            env=env,
            device=device,
            settings=settings,
            controller=make_controller(settings, planner),
            planner=planner,
            kv=KvCache(
                self.capacity_tokens,
                experiment.longest_draft,
                experiment.paged,
                reuse_of(experiment),
                () if experiment.traffic.shares else windows_of([model.spec for model in verifying.values()]),
            ),
            deliveries=self.log.deliveries,
            prefill_workers=len(placement.prefill),
            on_finish=lambda request: self.on_finish(request),
        )
        with own_errors(experiment.arch):
            policy: Policy = policy_of(experiment.arch)(context)
            for process in policy.processes():
                env.process(process)
        return policy

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what could never be served."""
        check_context(models_of(self.experiment), requests)
        check_kv(self.servers[0].kv, requests, partial(sharded_hint, self.experiment, self.profile))
        self._check_sharing(requests)
        room = kv_capacities(self.experiment, self.profile)[self.experiment.placement.prefill[0]]
        longest = max(requests, key=lambda request: request.prompt_tokens)
        if longest.prompt_tokens > room:
            raise ValueError(
                f"request {longest.id} has {longest.prompt_tokens} prompt tokens and the GPU of the prefill lane has "
                f"room for {room}: lower --input-len, or give that lane a larger card"
            )

    def _check_sharing(self, requests: Sequence[Request]) -> None:
        """Refuse shared prefixes where a lane is on several GPUs: each would hold others."""
        placement = self.experiment.placement
        several = len(placement.prefill) > 1 or len(placement.draft) > 1
        if several and self.servers[0].kv.reuse is not None and any(request.chain for request in requests):
            raise ValueError(
                "--place: a lane on several GPUs cannot share prefixes, as each GPU would hold others: give "
                "--no-enable-prefix-caching"
            )

    def receive(self, request: Request) -> None:
        """A request reaches the server that takes it once its host has read it, which reads one after the other."""
        times = self._host_times
        if times.request_s or times.prompt_token_s:
            self._read_at_s = max(self.env.now, self._read_at_s) + times.prompt_token_s * request.prompt_tokens
            late_s = self._lateness.uniform(0, 2 * times.request_s)
            arrived = self.env.at(self._read_at_s + late_s, Event(self.env), first=True)
            arrived.callbacks.append(lambda _: self.route(request).submit(request))
        else:
            self.route(request).submit(request)

    def route(self, request: Request) -> Policy:
        """The server that takes a request."""
        servers, router = self.servers, self.experiment.hardware.router
        if len(servers) == 1:
            at = 0
        elif router in ("least-loaded", "prefix-aware"):
            loads = [server.in_flight + len(server.waiting) for server in servers]
            cached = [0] * len(servers)
            if router == "prefix-aware" and max(loads) - min(loads) <= max(UNEVEN, min(loads) // 2):
                cached = [server.kv.cached(request) for server in servers]
            at = min(range(len(servers)), key=lambda i: (-cached[i], loads[i]))
        elif router == "random":
            at = int(self._rng.integers(len(servers)))
        else:
            at, self._turn = self._turn, (self._turn + 1) % len(servers)
        request.taken.replica = at
        return servers[at]

    def settled_s(self) -> float:
        """Until when every launch that began is in the log."""
        running = (job.start_s for gpu in self.gpus for job in gpu.running if job.start_s >= 0)
        now_s: float = self.env.now
        return min(now_s, *running, math.inf)

    def meta(self) -> dict[str, Any]:
        """Where the records came from."""
        gpu = self.profile.gpu
        return {
            "clock": "simulated",
            "profile": self.profile.name,
            "foundation": self.profile.foundation,
            "provenance": self.profile.provenance,
            **({"forward_error_bar": bar} if (bar := bar_of(self.experiment, self.profile)) else {}),
            "gpu": gpu.name,
            "gpus": self.experiment.hardware.replicas * self.experiment.gpus,
            "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
            "bandwidths_bytes_per_s": bandwidths(self.experiment, self.profile),
            "flops_per_s": gpu.flops_per_s,
            "kv_capacity_tokens": self.capacity_tokens,
            "kv_peak_tokens": max(server.kv.peak_tokens for server in self.servers),
            **cached_facts([server.kv for server in self.servers]),
            "reaches": self.profile.reaches(self.pair),
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
