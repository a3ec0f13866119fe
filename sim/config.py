"""What an experiment is: frozen dataclasses that are also the command line. Flags are named as in `vllm bench serve`.

Its parts stand with what they are about: traffic and acceptance in `workload.options`, the server in
`policies.options`, hardware and host in `prices.options`. They can be imported from here as well. Checks live in
`__post_init__`, so that a bad value is refused wherever it comes from, with one line that names it. The range of every
number is in `limits`; in the parts, and here, is what values must be together.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pdvsim.sim.core import LOOKED_UP, Contention, Placement, Priority
from pdvsim.sim.limits import MAX_REQUESTS, RANKED, SHARDED, Internal, Range, check, check_ranges, hints_of
from pdvsim.sim.models.presets import HEADS, CannotShard, is_config, shard, unquantised
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.models.specs import Pair
from pdvsim.sim.policies import archs_where, base_arch, file_of, policy_of
from pdvsim.sim.policies.options import ControllerName, KvPolicy, Server
from pdvsim.sim.prices.options import Hardware, Host
from pdvsim.sim.workload.options import ACCEPTANCE_MODELS, BY_SEED, OPEN, TRACES, Acceptance, Dataset, Traffic
from pdvsim.sim.workload.usual import usual_acceptance

__all__ = [
    "ACCEPTANCE_MODELS", "BY_SEED", "OPEN", "RANKED", "SHARDED", "TRACES", "Acceptance", "Arch",
    "Contention", "ControllerName", "Dataset", "Experiment", "Hardware", "Host", "Internal", "KvPolicy", "Priority",
    "Scoring", "Server", "Traffic",
]  # fmt: skip

Arch = str  # a name of the table in `policies`, or a policy of the user's own as file.py:Class

LEVEL_MS, PERCENT = Range(0, 1e9), Range(1, 99.99)  # of a service level
LEAST_MS = {"ttft": 5.0, "tpot": 1.0, "e2el": 50.0}  # levels below these were meant in seconds
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")  # gigabytes, of no tokenizer


class Sides(NamedTuple):
    """The two kinds of engine of a disaggregated server, as experiments of one such engine each."""

    prefill: Experiment
    decode: Experiment


class Level(NamedTuple):
    """A service level: seconds of a metric that a percentile of the requests stay within; None: no percentile named."""

    metric: str
    seconds: float
    percent: float | None


@dataclass(frozen=True)
class Scoring:
    """Metrics of a run."""

    goodput: tuple[str, ...] = ()
    """Service levels of ttft, tpot or e2el in ms: ttft:500 tpot:50, or with a percentile p99_ttft:200."""
    metric_percentiles: tuple[Annotated[float, Range(0, 100)], ...] = (99.0,)
    """Percentiles of TTFT, TPOT, ITL and E2EL to report."""
    warmup_requests: Annotated[int, Range(0, MAX_REQUESTS)] = 0
    """Measure after the first N requests: latencies exclude them, rates count tokens delivered from then on.

    A closed loop is then measured until its last request is sent, so that its drain is excluded too.
    """
    steady: bool = False
    """Measure the steady state. The run is as long as its load needs (or --num-prompts), its start is excluded (or
    --warmup-requests), and so is the drain: measured are the requests up to the last that waits for no answer."""
    detailed: bool = True
    """Keep metrics only, no record of each request and launch: constant memory, percentiles ±1%."""

    def __post_init__(self) -> None:
        check_ranges(self)
        self.levels()

    def levels(self) -> tuple[Level, ...]:
        """The service levels."""
        levels = []
        for text in self.goodput:
            name, _, value = text.partition(":") if ":" in text else text.partition("=")
            percentile, _, metric = name.rpartition("_")
            if metric not in LEAST_MS or not re.fullmatch(r"(p\d+(\.\d+)?)?", percentile, re.ASCII):
                known = "ttft, tpot, e2el, or with a percentile, p99_ttft"
                raise ValueError(f"goodput: unknown metric {name!r} in {text!r}; known: {known}")
            try:
                level_ms = float(value if value.isascii() and "_" not in value else "")
            except ValueError:
                raise ValueError(f"goodput: {text!r} must be metric:milliseconds, e.g. ttft:500") from None
            check(f"goodput {name}", level_ms, LEVEL_MS)
            if 0 < level_ms < LEAST_MS[metric]:
                meant = f"if seconds are meant, give {name}:{level_ms * 1e3:g}"
                raise ValueError(f"--goodput {text} is {level_ms:g} milliseconds: {meant}")
            percent = float(percentile[1:]) if percentile else None
            if percent is not None:
                check(f"goodput {name}: the percentile", percent, PERCENT)
            levels.append(Level(metric, level_ms / 1000, percent))
        return tuple(levels)

    def slo(self) -> dict[str, float]:
        """Seconds by metric that a request may take to be in time; the longest where a metric has several levels."""
        levels: dict[str, float] = {}
        for metric, level_s, _ in self.levels():
            levels[metric] = max(level_s, levels.get(metric, 0.0))
        return levels


@dataclass(frozen=True)
class Experiment:
    """One run: an architecture, under a load, on a GPU."""

    arch: Arch = "colocated"
    """Serving architecture: colocated (one batch, as in vLLM), pd (a prefill lane) or pdv (three lanes). More:
    autoregressive, baseline, pdv-unified, pdv-hybrid, adaptive, pdv-ahead, or your own policy as file.py:Class."""
    traffic: Traffic = field(default_factory=Traffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: Server = field(default_factory=Server)
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: Scoring = field(default_factory=Scoring)

    def __str__(self) -> str:
        """The keywords of `pdvsim.run` that run it, in one line."""
        return ", ".join(f"{name}={value!r}" for name, value in {"arch": self.arch, **self.given()}.items())

    def given(self, real: bool = False) -> dict[str, Any]:
        """The options that `pdvsim run`, or `realrun`, needs to run it: those with another value than it would take."""
        marks = {name: marks for kind in GROUPS.values() for name, (_, marks) in hints_of(kind).items()}
        names = (name for name in GROUP_OF if "internal" not in marks[name])
        given = {name: value for name in names if (value := self.setting(name)) != DEFAULTS[name]}
        if not real and self.hardware.serving([self.arch]) != self.hardware:  # what `run` would predict otherwise
            given["engine"] = "pdvsim"
        if not real and self.hardware.engine:  # which has its own default
            given["max_num_batched_tokens"] = self.server.max_num_batched_tokens
        usual = usual_acceptance(self.server.pair, self.traffic)
        if self.acceptance == Acceptance() != usual and self.has_drafter:  # else the recorded one is taken
            given["acceptance_rate"] = self.acceptance.acceptance_rate
        return given

    def setting(self, name: str) -> Any:
        """The value of a field of one of its groups."""
        return getattr(getattr(self, GROUP_OF[name]), name)

    def with_settings(self, **settings: Any) -> Experiment:
        """The experiment with other values of fields and of its groups' fields, validated together."""
        changed: dict[str, Any] = {}
        groups: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            (groups.setdefault(GROUP_OF[name], {}) if name in GROUP_OF else changed)[name] = value
        changed |= {group: replace(getattr(self, group), **mine) for group, mine in groups.items()}
        return replace(self, **changed)

    def __repr__(self) -> str:
        return f"<Experiment {self}>"

    @property
    def base_arch(self) -> Arch:
        """The named architecture whose options and needs it shares: its own, unless its policy is the user's."""
        return base_arch(self.arch)

    @property
    def speculates(self) -> bool:
        """Whether the draft model is ever run."""
        return self.longest_draft > 0

    @property
    def has_drafter(self) -> bool:
        """Whether it drafts where its draft length is not 0."""
        return policy_of(self.arch).speculates and self.server.drafted_by != "none"

    @cached_property
    def sides(self) -> Sides | None:
        """The prefill engines and the decode engines, each as continuous batching; None: one server does both."""
        hardware = self.hardware
        if hardware.disaggregate is None:
            return None
        cards = hardware.cards or (hardware.gpu,) * 2
        default: dict[str, Any] = {name: DEFAULTS[name] for name in DISAGGREGATION}
        shards, ranks = hardware.tensor_parallel_size, hardware.data_parallel_size
        prefill = hardware.prefill_tensor_parallel_size or shards, hardware.prefill_data_parallel_size or ranks
        own = [
            replace(
                hardware, **default, gpu=card, tensor_parallel_size=shards, data_parallel_size=ranks,
                replicas=1, router=Hardware.router,
                draft_tensor_parallel_size=1 if hardware.draft_tensor_parallel_size == 1 else None,
            )
            for card, (shards, ranks) in zip(cards, (prefill, (shards, ranks)), strict=True)
        ]  # fmt: skip
        prompts = self.server
        if hardware.draft_kv == "recomputed" or self.server.drafted_by in LOOKED_UP or not self.speculates:
            alone = f"none:{prompts.pair.partition(':')[2]}"
            prompts = replace(prompts, pair=alone, drafter=None, controller="fixed")
        return Sides(
            replace(self, arch=Experiment.arch, server=prompts, hardware=own[0]),
            replace(self, arch=Experiment.arch, hardware=replace(own[1], kv_offload_gb=0.0, kv_offload_ssd_gb=0.0)),
        )

    @property
    def decoding(self) -> Experiment:
        """The engine that decodes: itself, unless the server is disaggregated."""
        return self if self.sides is None else self.sides.decode

    @cached_property
    def placement(self) -> Placement:
        """The GPUs of each part of a server."""
        placed = self.hardware.placed()
        draft, verify = placed.get("decode", (0,)), placed.get("verify", (0,))
        return Placement(
            placed.get("prefill", (0,)), draft, verify[0] if policy_of(self.arch).hands_over() else draft[0]
        )

    @cached_property
    def pair(self) -> Pair:
        """The models as a GPU runs them: of a sharded model, one shard."""
        if self.sides is not None:
            return self.sides.decode.pair
        whole, hardware = self.server.models(), self.hardware
        drafters = hardware.draft_tensor_parallel_size or (1 if self.placement.apart else hardware.tensor_parallel_size)
        layout = (
            hardware.data_parallel_size, hardware.enable_expert_parallel, hardware.exchange,
            hardware.num_redundant_experts if hardware.enable_eplb else 0, hardware.enable_eplb,
        )  # fmt: skip
        target = shard(whole.target, hardware.tensor_parallel_size, *layout)
        if not self.speculates:
            return Pair(whole.draft, target)
        try:
            return Pair(shard(whole.draft, drafters, *layout), target)
        except CannotShard as error:
            raise CannotShard(f"{error}; give --draft-tensor-parallel-size 1") from None

    @property
    def gpus(self) -> int:
        """GPUs of a server, those of its groups counted one by one."""
        if self.sides is not None:
            return sum(count * side.gpus for count, side in zip(self.hardware.groups(), self.sides, strict=True))
        return sum(self.group(at) for at in self.placement.used) * self.hardware.data_parallel_size

    @property
    def batches(self) -> int:
        """Batches that requests are dealt to: the data-parallel ranks of all replicas or decode engines."""
        return self.hardware.replicas * max(1, self.hardware.groups()[1]) * self.hardware.data_parallel_size

    def group(self, at: int) -> int:
        """Number of GPUs in the group at a place of --place; they work in step."""
        placement, hardware = self.placement, self.hardware
        drafters = hardware.draft_tensor_parallel_size or 1
        return hardware.tensor_parallel_size if at in (placement.verify, *placement.prefill) else drafters

    @property
    def longest_draft(self) -> int:
        """Most draft tokens in one round."""
        return self.server.longest_draft if policy_of(self.arch).speculates else 0

    @property
    def paged(self) -> bool:
        """Whether the KV cache hands out blocks as tokens come."""
        return self.server.kv_cache == "paged"

    @property
    def files(self) -> tuple[str, ...]:
        """The files it reads; of a tokenizer's folder all but weights, which may lie there too."""
        fitted = (None if self.hardware.profile == "roofline" else self.hardware.profile), self.hardware.machine
        cards = {card: None for card in (self.hardware.gpu, *self.hardware.cards) if card.endswith(".toml")}
        models = map(unquantised, self.server.pair.split(":")[0 if self.server.drafted_by == "model" else 1 :])
        configs = [f"{name}/config.json" if Path(name).is_dir() else name for name in models if is_config(name)]
        folder = Path(self.traffic.tokenizer) if self.traffic.tokenizer else None
        paths = folder.iterdir() if folder is not None and folder.is_dir() else ()
        tokenizer = sorted(str(path) for path in paths if path.is_file() and path.suffix not in WEIGHTS)
        inputs = (file_of(self.arch), self.traffic.dataset_path, self.acceptance.acceptance_trace)
        named = (*inputs, *fitted, *cards, *configs, *tokenizer)
        return tuple(path for path in named if path is not None)

    @property
    def context(self) -> int | None:
        """The shortest context of its models, whether or not its architecture drafts: all get the same requests."""
        try:
            models = named_pair(self.server.pair)
        except ValueError:  # a real run's own checkpoints
            return self.traffic.model_context
        limits = (model.max_position_embeddings for model in (models.draft, models.target))
        return min((limit for limit in limits if limit is not None), default=None)

    def __post_init__(self) -> None:
        sized = self.traffic.dataset_path is not None or self.traffic.num_turns > 1 or self.traffic.prefixes[0] > 0
        if self.traffic.model_context != (context := self.context if sized else None):
            object.__setattr__(self, "traffic", replace(self.traffic, model_context=context))
        policy = policy_of(self.arch)
        if self.scoring.warmup_requests >= self.traffic.num_prompts:
            raise ValueError(
                f"no request is left to measure: num-prompts is {self.traffic.num_prompts}, "
                f"warmup-requests {self.scoring.warmup_requests}"
            )
        if policy.workers == "requests" and self.server.controller == "feedback":
            raise ValueError(f"--controller feedback needs a verify queue, which {self.arch} does not have")
        if (controller := self.server.controller) in ("table", "adaptive-verification"):
            if policy.verifies_all:
                raise ValueError(f"{self.arch} plans with drafts that are all verified: no --controller {controller}")
            if self.server.drafted_by in LOOKED_UP:
                looked_up = self.server.drafted_by
                raise ValueError(f"--controller {controller} needs a drafter on the GPU, not --drafter {looked_up}")
        given = self.acceptance
        if policy.drafts_ahead and (given.synthetic_acceptance_rates or given.acceptance_trace):
            raise ValueError(f"{self.arch} needs --acceptance-rate or --acceptance-model")
        hardware, drafter = self.hardware, self.server.drafted_by
        if policy.drafts_ahead and drafter not in ("model", "none"):
            raise ValueError(f"{self.arch} drafts ahead with a draft model: it does not support --drafter {drafter}")
        if self.placement.gpus > 1 and drafter in (*HEADS, *LOOKED_UP):
            raise ValueError(f"--drafter {drafter} drafts alongside its target, on one GPU: leave out --place")
        if hardware.disaggregate is not None:
            self._check_disaggregated()
            return
        if hardware.place and not policy.placeable():
            fitting = archs_where(lambda other: other.placeable())
            raise ValueError(f"--place needs separate lanes ({', '.join(fitting)}), not {self.arch}")
        if not policy.hands_over() and "verify" in hardware.placed():
            raise ValueError(f"--place verify: {self.arch} verifies in its decode lane")
        if not policy.hands_over() and len(self.placement.draft) > 1:
            raise ValueError(
                f"--place decode: {self.arch} verifies in its decode lane, on one GPU; use --replicas for more"
            )
        self._check_ranks()
        empty = set(range(self.placement.gpus)).difference(self.placement.used)
        if empty:
            raise ValueError(f"--place leaves GPU {min(empty)} empty")
        if hardware.cards and len(hardware.cards) != self.placement.gpus:
            raise ValueError(f"--cards names {len(hardware.cards)} cards, but a server has {self.placement.gpus} GPUs")
        for lane in (self.placement.prefill, self.placement.draft):
            if hardware.cards and len({hardware.cards[at] for at in lane}) > 1:
                raise ValueError("--cards: the GPUs of one lane must be of one type")

    def _check_disaggregated(self) -> None:
        """Refuse a disaggregated server that cannot be, or one of its engines."""
        hardware, drafter = self.hardware, self.server.drafted_by
        if self.arch not in (fitting := archs_where(lambda policy: policy.disaggregates())):
            raise ValueError(f"--disaggregate needs --arch {' or '.join(fitting)}, not {self.arch}")
        if hardware.cards and len(hardware.cards) != 2:
            raise ValueError(f"--cards: --disaggregate takes 2, of prefill and decode, got {len(hardware.cards)}")
        if hardware.draft_kv == "recomputed" and drafter in HEADS:
            raise ValueError(f"--draft-kv recomputed: {drafter} reads hidden states that only the prefill engines have")
        assert self.sides is not None

    def _check_ranks(self) -> None:
        """Refuse data-parallel ranks where they cannot be."""
        if self.hardware.data_parallel_size == 1:
            return
        if self.server.models().target.experts is None:
            raise ValueError("--data-parallel-size needs a target with experts; --replicas are copies of a dense model")
        if not policy_of(self.arch).in_steps():
            fitting = archs_where(lambda other: other.in_steps())
            raise ValueError(f"--data-parallel-size: ranks step together, as in {', '.join(fitting)}, not {self.arch}")
        if self.server.async_scheduling:
            raise ValueError("--data-parallel-size: ranks agree on each step before it begins: no --async-scheduling")


GROUPS: dict[str, Any] = {part.name: part.default_factory for part in fields(Experiment) if part.name != "arch"}
GROUP_OF = {part.name: group for group, kind in GROUPS.items() for part in fields(kind)}
DEFAULTS = {part.name: part.default for kind in GROUPS.values() for part in fields(kind)}
MARKS = ((name, mark) for name, (_, marks) in hints_of(Hardware).items() for mark in marks)
DISAGGREGATION = ("disaggregate", *(name for name, mark in MARKS if "disaggregate" in getattr(mark, "given", ())))
