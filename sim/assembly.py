"""What the servers of an experiment are made of: its profiles, models, planner, host times and KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pdvsim.sim.config import Experiment, Hardware, Server
from pdvsim.sim.core import LOOKED_UP, Role
from pdvsim.sim.hardware.composed import TABLES, engine_profile, tables_file
from pdvsim.sim.hardware.contention import Sharing
from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.hardware.host import HostTimes
from pdvsim.sim.hardware.links import LINKS, SSD, Fabric, LinkSpec
from pdvsim.sim.hardware.models import HEADS, gpu
from pdvsim.sim.hardware.pace import read_pace
from pdvsim.sim.hardware.profile import Profile, builtin, load, roofline
from pdvsim.sim.machine.kv import capacity_tokens
from pdvsim.sim.machine.prefix import BLOCK, Reuse
from pdvsim.sim.machine.tiers import KvTier, KvTiers
from pdvsim.sim.policies import archs_where, policy_of
from pdvsim.sim.policies.controllers import ByBatchSize, Controller, Feedback, Goodput
from pdvsim.sim.policies.planner import Planner, RemoteDrafter, StepCosts
from pdvsim.sim.policies.verification import AdaptiveVerification
from pdvsim.sim.specs import ModelSpec, Pair
from pdvsim.sim.workload.lookup import lookup_of


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
        join_s=measured.join_s if host.launch_s is None else 0.0,
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


def states_held(experiment: Experiment) -> int:
    """States that a request holds in layers that keep one, as in vLLM: one per token of a verify.

    With prefix caching there is one more, of the last snapshot (vLLM's mamba_cache_mode align).
    """
    return 1 + experiment.longest_draft + (reuse_of(experiment) is not None)
