"""What the servers of an experiment are made of: its profiles, models, planner, host times and KV cache."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from pdvsim.sim.config import Experiment, Hardware, Server
from pdvsim.sim.core import LOOKED_UP, Role
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.profiles import TABLES, engine_profile, from_tables, padded, serving
from pdvsim.sim.machine.kv import KvCache, capacity_tokens, states_tokens, windows_of
from pdvsim.sim.machine.prefix import BLOCK, Reuse
from pdvsim.sim.machine.tiers import KvTier, KvTiers
from pdvsim.sim.models.presets import HEADS
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.policies import archs_where, policy_of
from pdvsim.sim.policies.controllers import ByBatchSize, Controller, Feedback, Goodput
from pdvsim.sim.policies.planner import Planner, RemoteDrafter, StepCosts
from pdvsim.sim.policies.verification import AdaptiveVerification
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.prices.composed import ComposedProfile
from pdvsim.sim.prices.contention import Sharing
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.kernels import read_tables
from pdvsim.sim.prices.links import LINKS, SSD, Fabric, LinkSpec
from pdvsim.sim.prices.pace import read_pace
from pdvsim.sim.prices.profile import Profile, builtin, load, roofline
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
        return from_tables(read_tables(Path(hardware.profile), gpu(card)))
    profile = load(hardware.profile)
    if hardware.gpu not in (Hardware.gpu, profile.gpu.name):
        raise ValueError(f"--profile {hardware.profile} is for {profile.gpu.name}, not for --gpu {hardware.gpu}")
    return profile


def card_profile(hardware: Hardware, card: str) -> Profile:
    """The profile of the chosen engine on a card."""
    engine = hardware.predicted_engine
    return builtin(card) if engine == "pdvsim" else engine_profile(engine, card, hardware.engine_version)


def covered(profile: Profile, experiment: Experiment) -> Profile:
    """The profile with the models that an experiment runs, predicted where it lacks them."""
    pair = experiment.pair if experiment.speculates else Pair(experiment.pair.target, experiment.pair.target)
    if isinstance(profile, ComposedProfile):
        kind = experiment.server.drafted_by if experiment.speculates else "none"
        profile = serving(profile, kind, experiment.server.async_scheduling, experiment.server.enforce_eager)
    whole, padding = profile.covering(pair, link_of(experiment)), experiment.hardware.padding
    return whole if padding == "profile" else padded(whole, padding)


def covering_profile(experiment: Experiment) -> Profile:
    """The profile an experiment runs on, with all its models, at the pace of its machine."""
    experiment = experiment.decoding
    profile, pair = profile_of(experiment), experiment.pair
    if profile.whole_steps:
        if not policy_of(experiment.arch).in_steps():
            fitting = archs_where(lambda policy: policy.in_steps())
            raise ValueError(
                f"profile {profile.name} has {profile.foundation}: it supports {' and '.join(fitting)}, but not the "
                f"concurrent lanes of {experiment.arch}"
            )
        for spec in (pair.draft, pair.target) if experiment.speculates else (pair.target,):
            profile.cost_model(spec)  # refuses a model without steps of its own
    whole, machine = covered(profile, experiment), experiment.hardware.machine
    return whole if machine is None else read_pace(machine).applied(whole, pair)


def side_profile(experiment: Experiment, side: Experiment, profile: Profile) -> Profile:
    """Return the profile of a disaggregated server's engines; `profile` is the decode engines'."""
    decode, hardware = experiment.decoding, side.hardware
    if (side.pair, hardware.gpu) == (decode.pair, decode.hardware.gpu):
        return profile
    if hardware.gpu == decode.hardware.gpu and hardware.machine is None:  # as `profile` may be another than its own
        return covered(profile, side)
    return covering_profile(side)


def models_of(experiment: Experiment) -> list[ModelSpec]:
    """The models that an experiment runs."""
    pair = experiment.pair
    return [pair.draft, pair.target] if experiment.speculates and not pair.draft.on_host else [pair.target]


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
    experiment: Experiment, profile: Profile, models: dict[Role, CostModel], remote: RemoteDrafter | None = None
) -> Planner:
    """Return the planner for a server that runs these models."""
    policy = policy_of(experiment.arch)
    return Planner(
        models,
        Sharing(experiment.hardware.contention, experiment.server.priority, profile.contention),
        profile.gpu.peak,
        profile.host.with_options(experiment.host),
        lanes=policy.hands_over(),
        remote=remote,
        lookup=lookup_of(experiment.server.drafted_by, experiment.acceptance),
        packs=not experiment.server.pad_drafts,
        carries=policy.prefill_lane == policy.verify_lane,
    )


def link_of(experiment: Experiment) -> LinkSpec:
    """The link between the GPUs of a server."""
    return LINKS[experiment.hardware.link]


def reuse_of(experiment: Experiment, target: ModelSpec | None = None) -> Reuse | None:
    """Return the limits on reuse of cached prefixes; None: prefixes are not cached. `target` may keep states."""
    server, placement = experiment.server, experiment.placement
    if not (server.enable_prefix_caching and experiment.paged):
        return None
    return Reuse(
        snapshot_blocks=max(1, target.snapshot_tokens // BLOCK) if target is not None else 1,
        lost_blocks=1 if experiment.speculates and server.drafted_by in HEADS else 0,
        answers=placement.prefill == (placement.verify,),
        drafter=experiment.speculates and server.drafted_by not in LOOKED_UP,
    )


class ServerParts:
    """What every server of an experiment is made of, worked out once; of a disaggregated one, each decode engine.

    `profile` is that of the target's GPU. `end` is the end of the error bar that predicted forward times are at: +1
    slow, -1 fast.
    """

    def __init__(self, experiment: Experiment, profile: Profile | None = None, end: int = 0) -> None:
        self.experiment = experiment.decoding
        self.profile = covering_profile(self.experiment) if profile is None else profile
        self.end = end

    @cached_property
    def _nominal_profiles(self) -> list[Profile]:
        """The profile of each GPU, not at an end of its error bar."""
        hardware, placement = self.experiment.hardware, self.experiment.placement
        profiles = [self.profile] * placement.gpus
        for at, card in enumerate(hardware.cards):
            if card != hardware.cards[placement.verify]:
                own = roofline(gpu(card)) if hardware.profile == "roofline" else card_profile(hardware, card)
                profiles[at] = covered(own, self.experiment)
        return profiles

    @cached_property
    def profiles(self) -> list[Profile]:
        """The profile of each GPU."""
        return [one.at_bar(self.end) for one in self._nominal_profiles] if self.end else self._nominal_profiles

    @cached_property
    def _specs(self) -> list[dict[Role, ModelSpec]]:
        """The models on each GPU."""
        placement, pair = self.experiment.placement, self.experiment.pair
        specs: list[dict[Role, ModelSpec]] = [{} for _ in range(placement.gpus)]
        for at in (placement.verify, *placement.prefill):
            specs[at]["target"] = pair.target
        for at in placement.draft if self.experiment.speculates else ():
            specs[at]["draft"] = pair.draft
        return specs

    @cached_property
    def models(self) -> list[dict[Role, CostModel]]:
        """The cost models of each GPU."""
        placed = zip(self.profiles, self._specs, strict=True)
        return [{role: profile.cost_model(spec) for role, spec in specs.items()} for profile, specs in placed]

    @property
    def verifying(self) -> dict[Role, CostModel]:
        """The cost models of the GPU that verifies."""
        return self.models[self.experiment.placement.verify]

    @cached_property
    def bar(self) -> float:
        """The error bar of forward times: the widest of its models'; 0 where all were measured."""
        placed = zip(self._nominal_profiles, self._specs, strict=True)
        return max(profile.bar(spec) for profile, specs in placed for spec in specs.values())

    @cached_property
    def settings(self) -> Server:
        """The server's settings, scheduled as the chosen engine does: only pdvsim's launches drafts early."""
        server, engine = self.experiment.server, ENGINES[self.experiment.hardware.predicted_engine]
        early = server.async_scheduling if engine.name == "pdvsim" else None
        if (server.separate_prefill, server.async_scheduling) == (engine.separate_prefill, early):
            return server
        return replace(server, separate_prefill=engine.separate_prefill, async_scheduling=early)

    @cached_property
    def planner(self) -> Planner:
        """The planner of its policy."""
        experiment, placement = self.experiment, self.experiment.placement
        if experiment.server.priority == "partition":
            raise ValueError(
                "--priority partition is not simulated: the slowdown of kernels on part of a GPU was not measured; "
                "realrun serves with it"
            )
        models: dict[Role, CostModel] = {"target": self.verifying["target"]}
        if experiment.speculates:
            models["draft"] = self.models[placement.draft[0]]["draft"]
        remote = None
        if placement.apart:
            remote = RemoteDrafter(Fabric(link_of(experiment), placement.gpus), len(placement.draft))
        return make_planner(experiment, self.profile, models, remote)

    @cached_property
    def kv_capacities(self) -> list[int]:
        """Tokens of KV cache that each GPU has room for, of all models on it; of a group, the fullest.

        Of data-parallel ranks, that of one: each has the KV cache of its own requests.
        """
        hardware = self.experiment.hardware
        if hardware.kv_capacity_tokens is not None:
            return [hardware.kv_capacity_tokens] * self.experiment.placement.gpus
        return [
            capacity_tokens(one.gpu.memory_bytes * hardware.gpu_memory_utilization, [*specs.values()]) if specs else 0
            for one, specs in zip(self._nominal_profiles, self._specs, strict=True)
        ]

    @cached_property
    def kv_capacity(self) -> int:
        """Tokens of KV cache: of the part with the least room, among parts that hold a request to its end.

        Several GPUs that draft hold their requests' among them.
        """
        placement, capacities = self.experiment.placement, self.kv_capacities
        verify = capacities[placement.verify]
        drafts = sum(capacities[at] for at in placement.draft)
        return min(verify, drafts) if self.experiment.speculates else verify

    def kv_cache(self) -> KvCache:
        """An empty KV cache.

        Layers that keep a state hold one per token of a verify and request, as in vLLM; with prefix caching one more,
        of the last snapshot (vLLM's mamba_cache_mode align).
        """
        experiment, specs = self.experiment, [model.spec for model in self.verifying.values()]
        reuse = reuse_of(experiment, self.verifying["target"].spec)
        return KvCache(
            self.kv_capacity,
            experiment.longest_draft,
            experiment.paged,
            reuse,
            () if experiment.traffic.shares else windows_of(specs),
            states_tokens(specs, 1 + experiment.longest_draft + (reuse is not None)),
            None if reuse is None else self._tiers(reuse),
        )

    def _tiers(self, reuse: Reuse) -> KvTiers | None:
        """The offload tiers of the KV cache; None without any."""
        hardware, models = self.experiment.hardware, self.verifying.values()
        sizes = {"host": hardware.kv_offload_gb, "ssd": hardware.kv_offload_ssd_gb}
        if not any(sizes.values()):
            return None
        links = {"host": LINKS[hardware.kv_offload_link], "ssd": SSD}
        token_bytes = float(sum(model.spec.kv_bytes_per_token for model in models))
        group_bytes = token_bytes * hardware.tensor_parallel_size * hardware.data_parallel_size

        def prefill_s(start: int, tokens: int, rest: int) -> float:
            whole, without = [(start, tokens + rest)], [(start + tokens, rest)]
            prices = [(model.price(0, prompts=whole), model.price(0, prompts=without)) for model in models]
            return sum(a.seconds_0 - b.seconds_0 for a, b in prices)

        tiers = [
            KvTier(name, links[name], int(size * 1e9 // group_bytes), token_bytes)
            for name, size in sizes.items()
            if size
        ]
        return KvTiers(tiers, prefill_s, reuse)
