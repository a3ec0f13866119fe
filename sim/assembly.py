"""The simulated servers of one experiment: its profile, host, links, KV cache and policies, put together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from simpy.events import Event

from pdvsim.sim.config import SHARDED, Experiment, Hardware, Server, Sides
from pdvsim.sim.core import LOOKED_UP, ModelSpec, Pair, Request, Role
from pdvsim.sim.hardware.composed import TABLES, engine_profile, tables_file
from pdvsim.sim.hardware.contention import Sharing
from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.hardware.host import HostTimes, SimulatedHost, WatchedHost
from pdvsim.sim.hardware.links import LINKS, SSD, Fabric, LinkSpec
from pdvsim.sim.hardware.models import HEADS, gpu
from pdvsim.sim.hardware.pace import read_pace
from pdvsim.sim.hardware.profile import Profile, builtin, load, roofline
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import SimulatedGPU
from pdvsim.sim.machine.fastforward import FastForwardGPU
from pdvsim.sim.machine.kv import KvCache, capacity_tokens, states_tokens, windows_of
from pdvsim.sim.machine.node import Device, Node
from pdvsim.sim.machine.prefix import BLOCK, Reuse
from pdvsim.sim.machine.ranks import RankGPU, RankGroup
from pdvsim.sim.machine.tiers import KvTier, KvTiers
from pdvsim.sim.policies import archs_where, own_errors, policy_of
from pdvsim.sim.policies.apart import DecodeEngine, Disaggregated, KvShipping, PrefillEngine
from pdvsim.sim.policies.base import Context, Policy
from pdvsim.sim.policies.controllers import ByBatchSize, Controller, Feedback, Goodput
from pdvsim.sim.policies.planner import Planner, RemoteDrafter, StepCosts
from pdvsim.sim.policies.verification import AdaptiveVerification
from pdvsim.sim.records import Log
from pdvsim.sim.workload.lookup import lookup_of

AnyPolicy = TypeVar("AnyPolicy", bound=Policy)
WAITING_WEIGHT = 4  # running requests that count as much as one that waits, in vLLM's choice of a rank
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
    experiment = experiment.decoding
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


def side_profile(experiment: Experiment, side: Experiment, profile: Profile) -> Profile:
    """The profile of one kind of engine of a disaggregated server, where `profile` is that of those that decode."""
    decode, hardware = experiment.decoding, side.hardware
    if (side.pair, hardware.gpu) == (decode.pair, decode.hardware.gpu):
        return profile
    if hardware.gpu == decode.hardware.gpu and hardware.machine is None:  # as `profile` may be another than its own
        pair = side.pair if side.speculates else Pair(side.pair.target, side.pair.target)
        return profile.covering(pair, link_of(side)).padded(hardware.padding)
    return covering_profile(side)


def shipping_of(experiment: Experiment, sides: Sides, fabric: Fabric) -> KvShipping:
    """How a disaggregated server sends the KV cache of a prompt.

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
        state_bytes=ports * sum(model.state_bytes for model in models),
        drafter=drafter,
        first_token=hardware.predicted_engine in ("sglang", "trtllm"),
    )


def bar_of(experiment: Experiment, profile: Profile) -> float:
    """The error bar of an experiment's forward times: the widest of its models'; 0 where all were measured."""
    experiment = experiment.decoding
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
    experiment = experiment.decoding
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
    """Bytes per second of each GPU of a server, or of each of its data-parallel ranks."""
    if experiment.sides is not None:
        sides = experiment.sides
        same = sides.prefill.hardware.gpu == sides.decode.hardware.gpu
        cards = (profile.gpu if same else gpu(sides.prefill.hardware.gpu), profile.gpu)
        groups = zip(experiment.hardware.groups(), sides, strict=True)
        ranks = [count * side.hardware.data_parallel_size for count, side in groups]
        return [card.bandwidth_bytes_per_s for card, count in zip(cards, ranks, strict=True) for _ in range(count)]
    each = [one.gpu.bandwidth_bytes_per_s for one in profiles_of(experiment, profile)]
    return each * experiment.hardware.data_parallel_size


def link_of(experiment: Experiment) -> LinkSpec:
    """The link between the GPUs of a server."""
    return LINKS[experiment.hardware.link]


def kv_capacities(experiment: Experiment, profile: Profile) -> list[int]:
    """Tokens of KV cache that each GPU of a server has room for, of all models on it; of a group, the fullest.

    Of data-parallel ranks, that of one: each has the KV cache of its own requests.
    """
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
    experiment = experiment.decoding
    placement, capacities = experiment.placement, kv_capacities(experiment, profile)
    verify = capacities[placement.verify]
    return min(verify, sum(capacities[at] for at in placement.draft)) if experiment.speculates else verify


def reuse_of(experiment: Experiment, target: ModelSpec | None = None) -> Reuse | None:
    """What a server may use of cached prefixes; None: prefixes are not cached. `target` may keep states."""
    server, placement = experiment.server, experiment.placement
    if not (server.enable_prefix_caching and experiment.paged):
        return None
    return Reuse(
        snapshot_blocks=max(1, target.snapshot_tokens // BLOCK) if target is not None else 1,
        lost_blocks=1 if experiment.speculates and server.drafted_by in HEADS else 0,
        answers=placement.prefill == (placement.verify,),
        drafter=experiment.speculates and server.drafted_by not in LOOKED_UP,
    )


def tiers_of(experiment: Experiment, models: dict[Role, CostModel]) -> KvTiers | None:
    """What is behind the KV cache of a server whose GPU runs these models; None: nothing is."""
    hardware, reuse = experiment.hardware, reuse_of(experiment, models["target"].spec)
    sizes = {"host": hardware.kv_offload_gb, "ssd": hardware.kv_offload_ssd_gb}
    if reuse is None or not any(sizes.values()):
        return None
    links, token_bytes = {"host": LINKS[hardware.kv_offload_link], "ssd": SSD}, 0.0
    for model in models.values():
        token_bytes += model.spec.kv_bytes_per_token
    group_bytes = token_bytes * hardware.tensor_parallel_size * hardware.data_parallel_size

    def prefill_s(start: int, tokens: int, rest: int) -> float:
        whole, without = [(start, tokens + rest)], [(start + tokens, rest)]
        prices = [(model.price(0, prompts=whole), model.price(0, prompts=without)) for model in models.values()]
        return sum(a.seconds_0 - b.seconds_0 for a, b in prices)

    tiers = [
        KvTier(name, links[name], int(size * 1e9 // group_bytes), token_bytes) for name, size in sizes.items() if size
    ]
    return KvTiers(tiers, prefill_s, reuse)


def tier_facts(caches: Sequence[KvCache]) -> dict[str, float]:
    """Hits by tier of all servers, and what a fetch takes against a prefill; nothing without tiers."""
    facts: dict[str, float] = {}
    for kv in caches:
        for name, value in (kv.tiers.facts() if kv.tiers is not None else {}).items():
            facts[name] = value if name.endswith("_ms") else facts.get(name, 0) + value
    return facts


def states_held(experiment: Experiment) -> int:
    """States that a request holds in layers that keep one, as in vLLM: one per token of a verify.

    With prefix caching there is one more, of the last snapshot (vLLM's mamba_cache_mode align).
    """
    return 1 + experiment.longest_draft + (reuse_of(experiment) is not None)


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
            with suppress(ValueError):  # models that cannot be divided so, or too many GPUs for a server
                wider = replace(hardware, tensor_parallel_size=size, draft_tensor_parallel_size=drafters)
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
        self.end = end  # of the error bar of predicted forward times
        self._profiles = profiles_of(experiment, profile, end) if experiment.sides is None else []
        self._models = cost_models(experiment, self._profiles) if experiment.sides is None else []
        self.log = log
        self.pair = experiment.pair
        self.capacity_tokens = kv_capacity(experiment, profile)
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.servers: list[Policy] = []  # every engine
        self.fronts: list[list[Policy | Disaggregated]] = []  # of each replica its ranks
        self.gpus: list[SimulatedGPU] = []
        self.fabrics: list[Fabric] = []
        self._turn = 0
        self._next_rank = [0] * experiment.hardware.replicas  # by replica
        self._rng = np.random.default_rng([experiment.traffic.seed, 7])
        self._host_times = host_times(experiment, profile)
        self._read_at_s = 0.0  # when the host has read all requests that arrived
        # requests that were sent together do not arrive together: equal ones would finish in one step for ever
        self._lateness = np.random.default_rng([experiment.traffic.seed, 8])
        for replica in range(experiment.hardware.replicas):
            if experiment.sides is not None:
                self.fronts.append([self._disaggregated(env, replica, experiment.sides)])
                continue
            size = experiment.hardware.data_parallel_size
            group = RankGroup(env) if size > 1 else None
            ranks = [self._server(env, replica, group, rank) for rank in range(size)]
            self.servers += ranks
            self.fronts.append([*ranks])

    def _server(self, env: Clock, replica: int, group: RankGroup | None = None, rank: int = 0) -> Policy:
        """A server, or one of its ranks."""
        experiment = self.experiment
        placement, host = experiment.placement, self._host(replica)
        planner = make_planner(experiment, self.profile, self._models)
        gpus = [
            self._gpu(env, experiment, host, planner, one, models, replica, rank if group else at, group)
            for at, (one, models) in enumerate(zip(self._profiles, self._models, strict=True))
        ]
        device: Device = gpus[0]
        if len(gpus) > 1:
            self.fabrics.append(fabric := Fabric(link_of(experiment), placement.gpus))
            target = self.pair.target
            device = Node(env, host, gpus, placement, fabric, target.kv_bytes_per_token, target.state_bytes)
        verifying = self._models[placement.verify]
        context = self._context(env, experiment, device, planner, self.capacity_tokens, verifying)
        kind: type[Policy] = policy_of(experiment.arch)
        return self._started(env, kind, context)

    def _host(self, replica: int) -> SimulatedHost:
        if (spans := self.log.host) is None:
            return SimulatedHost(self._host_times)
        return WatchedHost(self._host_times, lambda what, start_s, end_s: spans.append((replica, what, start_s, end_s)))

    def _gpu(
        self, env: Clock, experiment: Experiment, host: SimulatedHost, planner: Planner, profile: Profile,
        models: dict[Role, CostModel], replica: int, at: int, group: RankGroup | None = None,
    ) -> FastForwardGPU | RankGPU:  # fmt: skip
        sharing = Sharing(experiment.hardware.contention, experiment.server.priority, profile.contention)
        looked_up = planner.lookup if experiment.server.drafted_by in LOOKED_UP else None
        parts = (
            env, host, models, sharing, self.log.launches, drawn_verdict, profile.gpu.peak, replica, at, profile.power,
            looked_up,
        )  # fmt: skip
        one = FastForwardGPU(*parts, blocks=self.blocks) if group is None else RankGPU(group, *parts)
        self.gpus.append(one)
        return one

    def _context(
        self, env: Clock, experiment: Experiment, device: Device, planner: Planner, capacity_tokens: int,
        models: dict[Role, CostModel],
    ) -> Context:  # fmt: skip
        settings = engine_settings(experiment)
        specs = [model.spec for model in models.values()]
        return Context(
            env=env,
            device=device,
            settings=settings,
            controller=make_controller(settings, planner),
            planner=planner,
            kv=KvCache(
                capacity_tokens,
                experiment.longest_draft,
                experiment.paged,
                reuse_of(experiment, models["target"].spec),
                () if experiment.traffic.shares else windows_of(specs),
                states_tokens(specs, states_held(experiment)),
                tiers_of(experiment, models),
            ),
            deliveries=self.log.deliveries,
            prefill_workers=len(experiment.placement.prefill),
            on_finish=lambda request: self.on_finish(request),
        )

    def _started(self, env: Clock, kind: type[AnyPolicy], context: Context) -> AnyPolicy:
        with own_errors(self.experiment.arch):
            policy = kind(context)
            for process in policy.processes():
                env.process(process)
        return policy

    def _disaggregated(self, env: Clock, replica: int, sides: Sides) -> Disaggregated:
        """Engines that prefill and engines that decode, and the ports between them."""
        experiment, (prefills, decodes) = self.experiment, self.experiment.hardware.groups()
        prefill = self._engines(env, PrefillEngine, sides.prefill, replica, prefills, 0)
        decode = self._engines(env, DecodeEngine, sides.decode, replica, decodes, len(prefill))
        self.servers += [*decode, *prefill]
        link = LINKS[experiment.hardware.kv_link or experiment.hardware.link]
        self.fabrics.append(fabric := Fabric(link, len(prefill) + len(decode)))
        aware = experiment.hardware.router == "prefix-aware"
        return Disaggregated(prefill, decode, shipping_of(experiment, sides, fabric), aware)

    def _engines(
        self, env: Clock, kind: type[AnyPolicy], side: Experiment, replica: int, count: int, first: int
    ) -> list[AnyPolicy]:
        """So many engines of one kind, or all of their data-parallel ranks; their GPUs are numbered from `first` on."""
        [profile] = profiles_of(side, side_profile(self.experiment, side, self.profile), self.end)
        [models] = cost_models(side, [profile])
        room, size = kv_capacity(side, profile), side.hardware.data_parallel_size
        engines: list[AnyPolicy] = []
        for _ in range(count):
            group = RankGroup(env) if size > 1 else None
            for _ in range(size):
                host, planner = self._host(replica), make_planner(side, profile, [models])
                at = first + len(engines)
                device = self._gpu(env, side, host, planner, profile, models, replica, at, group)
                engines.append(self._started(env, kind, self._context(env, side, device, planner, room, models)))
        return engines

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what could never be served."""
        check_context(models_of(self.experiment), requests)
        check_kv(self.servers[0].kv, requests, partial(sharded_hint, self.experiment, self.profile))
        self._check_sharing(requests)
        if self.experiment.sides is None:
            room = kv_capacities(self.experiment, self.profile)[self.experiment.placement.prefill[0]]
        else:
            room = self.servers[-1].kv.capacity_tokens
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

    def route(self, request: Request) -> Policy | Disaggregated:
        """The server that takes a request, and of its data-parallel ranks the one that does."""
        router, replicas = self.experiment.hardware.router, self.fronts
        if len(replicas) == 1:
            at = 0
        elif router in ("least-loaded", "prefix-aware"):
            loads = [sum([rank.load for rank in ranks]) for ranks in replicas]
            cached = [0] * len(replicas)
            if router == "prefix-aware" and max(loads) - min(loads) <= max(UNEVEN, min(loads) // 2):
                cached = [max([rank.cached(request) for rank in ranks]) for ranks in replicas]
            at = min(range(len(replicas)), key=lambda i: (-cached[i], loads[i]))
        elif router == "random":
            at = int(self._rng.integers(len(replicas)))
        else:
            at, self._turn = self._turn, (self._turn + 1) % len(replicas)
        request.taken.replica = at
        ranks = [rank for rank in replicas[at] if isinstance(rank, Policy)]
        return replicas[at][0] if len(ranks) < 2 else self._rank(at, ranks)

    def _rank(self, replica: int, ranks: Sequence[Policy]) -> Policy:
        """The rank that takes a request, as engines deal them by default.

        vLLM: the one with the least running requests and four times those that wait. TensorRT-LLM: the one with the
        fewest requests. SGLang: each in turn.
        """
        engine, first = self.experiment.hardware.predicted_engine, self._next_rank[replica]
        if engine != "sglang":
            waits = 1 if engine == "trtllm" else WAITING_WEIGHT
            turns = [*range(first, len(ranks)), *range(first)]  # of equal ones not always the same
            first = min(turns, key=lambda i: ranks[i].in_flight + waits * len(ranks[i].waiting))
        self._next_rank[replica] = (first + 1) % len(ranks)
        return ranks[first]

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
            **tier_facts([server.kv for server in self.servers]),
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
