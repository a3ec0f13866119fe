"""What an experiment is: frozen dataclasses that are also the command line. Flags are named as in `vllm bench serve`.

Checks live in `__post_init__`, so that a bad value is refused wherever it comes from, with one line that names it. The
range of every number is in `limits`; here is what values must be together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Literal

from pdvsim.sim.core import DrafterKind, Pair, Seats
from pdvsim.sim.hardware.cards import GPUS
from pdvsim.sim.hardware.links import DraftProbs, LinkName
from pdvsim.sim.hardware.models import HEADS, drafted_by, drafter_kind, is_config, pair_name, shard
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.hardware.padding import Padding
from pdvsim.sim.limits import Range, check, check_ranges
from pdvsim.sim.policies import archs_where, file_of, kin, policy_of

Arch = str  # a name of the table in `policies`, or a policy of the user's own as file.py:Class
Dataset = Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
ControllerName = Literal["fixed", "feedback", "goodput"]
Priority = Literal["none", "stream", "dynamic", "preemptive", "partition"]
Contention = Literal["fluid", "serial", "max"]
Router = Literal["round-robin", "least-loaded", "random"]
KvPolicy = Literal["paged", "reserved"]

RECORDED = ("cnn", "gsm8k", "instructcoder", "sharegpt")  # data sets whose acceptance was recorded, ...
ACCEPTANCE_MODELS = tuple(f"{data}-{drafter}" for data in RECORDED for drafter in ("eagle3", "ngram"))  # ... with both
TRACES: tuple[Dataset, ...] = ("custom", "azure", "burstgpt", "mooncake")  # files of requests
OPEN = -1  # a number of requests that is left to what they are
LEVEL_MS = Range(0, 1e9)  # of a service level
BESIDE = ("decode", "verify", "prefill")  # lanes that share a GPU, as shares of it are given
LANE_WEIGHT = Range(0.001, 1000)
MOST_GPUS = 8  # of one server that lanes are placed on
SHARDED = (1, 2, 4, 8)  # GPUs that a model may be sharded over
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")  # gigabytes, of no tokenizer


@dataclass(frozen=True)
class Traffic:
    """Who asks what, and when."""

    dataset_name: Dataset = "sharegpt"
    """sharegpt without --dataset-path is the built-in quantile model of ShareGPT V3; custom is a file of your own."""
    dataset_path: str | None = None
    """The data set's file: as published, or your own, CSV or JSONL of arrivals and tokens (docs/traffic.md)."""
    tokenizer: str | None = None
    """Folder of a local Hugging Face tokenizer, to count the tokens of a file that holds text (sharegpt, custom)."""
    num_prompts: int = OPEN
    """Number of requests; default: 1000, or all of a trace that is replayed."""
    request_rate: float = math.inf
    """Requests per second; inf sends all at once (or as --max-concurrency lets them)."""
    burstiness: float = 1.0
    """Shape of the Gamma gaps between arrivals: 1 is Poisson, below 1 burstier, above 1 more regular."""
    max_concurrency: int | None = None
    """Most requests outstanding at once; with --request-rate inf this is a closed loop."""
    use_trace_timestamps: bool = False
    """Replay the trace's own arrival times (custom, azure, burstgpt, mooncake) instead of --request-rate."""
    input_len: int | None = None
    """Prompt tokens; random: default 1024, other data sets: overrides their own lengths."""
    output_len: int | None = None
    """Output tokens; random: default 128, other data sets: overrides their own lengths."""
    random_range_ratio: float = 0.0
    """Lengths that are given, and those of random, are uniform in [len*(1-ratio), len*(1+ratio)]."""
    seed: int = 0
    """Draws arrivals, lengths and acceptance; the same seed gives every architecture the same requests."""

    usual_prompts = 1000  # requests where their number is open

    @property
    def fixed_lengths(self) -> tuple[int, ...]:
        """Prompt and output tokens that are not a data set's own."""
        lengths = (self.input_len, self.output_len)
        if self.dataset_name == "random":
            lengths = (self.input_len or 1024, self.output_len or 128)
        return tuple(length for length in lengths if length is not None)

    def __post_init__(self) -> None:
        if self.dataset_name in TRACES and self.dataset_path is None:
            raise ValueError(f"dataset {self.dataset_name} needs --dataset-path with its file")
        if self.dataset_name == "random" and self.dataset_path is not None:
            raise ValueError("dataset random takes no --dataset-path")
        if self.use_trace_timestamps and self.dataset_name not in TRACES:
            raise ValueError(f"--use-trace-timestamps needs {', '.join(TRACES)}, not {self.dataset_name}")
        if self.use_trace_timestamps and self.request_rate != math.inf:
            raise ValueError("--use-trace-timestamps and --request-rate exclude each other")
        if self.num_prompts == OPEN:
            object.__setattr__(self, "num_prompts", self._all() if self.use_trace_timestamps else self.usual_prompts)
        check_ranges(self)

    def _all(self) -> int:
        """The requests of the file."""
        from pdvsim.sim.workload.own import read_requests

        return len(read_requests(self.dataset_name, self.dataset_path or "", self.tokenizer).lengths)


@dataclass(frozen=True)
class Acceptance:
    """How often the target agrees with the draft."""

    acceptance_rate: float = 0.6
    """Chance that one draft token is accepted (Leviathan's alpha), where no other form is given."""
    acceptance_concentration: float | None = None
    """Draw each request's rate from a Beta of mean --acceptance-rate and this concentration (a+b)."""
    synthetic_acceptance_rates: tuple[float, ...] = ()
    """Unconditional acceptance per draft position (vLLM's convention): non-increasing, e.g. 0.8,0.6,0.4."""
    acceptance_model: str | None = None
    """As measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, each with -eagle3 or -ngram behind it."""
    acceptance_trace: str | None = None
    """JSONL of recorded rounds: one list of accepted counts a line, cycled over the requests."""
    acceptance_trace_k: int = 4
    """Draft length the trace was recorded at."""

    def __post_init__(self) -> None:
        check_ranges(self)
        rates = self.synthetic_acceptance_rates
        if any(b > a for a, b in pairwise(rates)):
            raise ValueError(f"synthetic-acceptance-rates must be non-increasing, got {rates}")
        name = self.acceptance_model
        if name is not None and name not in ACCEPTANCE_MODELS:
            raise ValueError(f"acceptance-model must be one of {', '.join(ACCEPTANCE_MODELS)}, got {name}")
        forms = {
            "--acceptance-concentration": self.acceptance_concentration is not None,
            "--synthetic-acceptance-rates": bool(rates),
            "--acceptance-model": name is not None,
            "--acceptance-trace": self.acceptance_trace is not None,
        }
        if sum(forms.values()) > 1:
            raise ValueError(f"give one of {', '.join(forms)}")

    @property
    def by_rate(self) -> bool:
        """Whether a rate of each request decides, and no other form."""
        return not self.synthetic_acceptance_rates and self.acceptance_model is None and self.acceptance_trace is None


@dataclass(frozen=True)
class Server:
    """The serving architecture and its limits."""

    pair: str = "tinyllama-1.1b:llama-2-7b"
    """Models, as draft:target; each a preset, its Hugging Face id, or a config.json (or the folder that holds it)."""
    num_speculative_tokens: int = 4
    """Draft length k; where a controller moves it, the starting value. 0: no speculation, the drafter is not used."""
    drafter: DrafterKind | None = None
    """Who drafts: model, the draft model of --pair; eagle3 or mtp, a head on the target's hidden states; ngram, a
    search in the request's own tokens; none. Default: as --pair says; beside those four it may be a target alone."""
    controller: ControllerName = "fixed"
    """Who chooses the draft length: fixed, feedback (the PD-Verify paper's), goodput (best by the latency model)."""
    min_speculative_tokens: int | None = None
    """Shortest draft a controller may choose. Default: 2 for feedback; for goodput 0, which lets it decode plainly."""
    max_speculative_tokens: int = 8
    """Longest draft a controller may choose."""
    max_num_seqs: int = 128
    """Most requests decoding at once: the batch limit of every lane."""
    max_draft_batch: int | None = None
    """Most requests that one draft is made for; default --max-num-seqs. pd, pdv-unified: both limits hold a round."""
    max_verify_batch: int | None = None
    """Most requests that one verify takes; default --max-num-seqs."""
    max_num_batched_tokens: int = 2048
    """Most prompt tokens in one prefill forward; longer prompts are split into chunks."""
    max_prompts_per_forward: int | None = None
    """Most prompts that one forward reads together; default: no limit, as in vLLM (realrun's engine: 4)."""
    pad_drafts: bool = False
    """ngram: rows of a verify are padded to its longest draft, as in realrun's engine; default: packed, as in vLLM."""
    kv_cache: KvPolicy = "paged"
    """paged: blocks as tokens come, and preemption where none is free; reserved: all that a request may need, at
    admission."""
    num_workers: int = 4
    """baseline: requests run side by side, each to completion at batch 1."""
    max_decode_queue: int = 32
    """pdv: prefill admits nobody while this many requests wait for the decode lane."""
    verify_gather: Literal["auto", "always", "never"] = "auto"
    """pdv: verify waits for a draft under way, to take both in one batch: by the latency model, always, or never."""
    admission_factor: float = 1.2
    """pdv-unified: admit one prefill a turn while the decode queue is under this times the batch limit."""
    hybrid_threshold: int = 8
    """pdv-hybrid: at or below this many requests draft and verify atomically, above it in three lanes."""
    ahead_fan: int | None = None
    """pdv-ahead: tokens guessed behind each number of accepted drafts; 0: go on as if all were accepted; default: the
    latency model chooses, for each batch."""
    ahead_miss: Literal["auto", "draft", "plain"] = "auto"
    """pdv-ahead: a request whose verdict was not guessed is drafted for anew, or goes on without drafts for a round;
    auto: the latency model chooses."""
    ahead_exponent: float = 1.0
    """pdv-ahead: the target's token, where it is not the drafter's first choice, is none of the next n with a chance of
    (1 + n)^-this; assumed, the form is from arXiv 2603.03251."""
    priority: Priority = "stream"
    """Between lanes (decode > verify > prefill): none, stream (CUDA's), dynamic (stream, and up with queues and ages),
    preemptive (ideal), partition (SM split; realrun alone)."""
    lane_weights: tuple[str, ...] = ()
    """A lane's share of the GPU beside others, as lane=weight, e.g. decode=3,verify=2,prefill=1; without: 1 each."""
    partition: tuple[float, ...] = (0.4, 0.4, 0.2)
    """partition: SM share of decode, verify, prefill."""

    def __post_init__(self) -> None:
        check_ranges(self)
        object.__setattr__(self, "pair", drafted_by(self.drafter, pair_name(self.pair)))
        if self.controller == "feedback" and self.min_speculative_tokens == 0:
            raise ValueError(
                "--controller feedback learns from drafts alone: --min-speculative-tokens must be 1 or more"
            )
        if (self.min_speculative_tokens or 0) > self.max_speculative_tokens:
            raise ValueError("min-speculative-tokens must not exceed max-speculative-tokens")
        for name in ("max_draft_batch", "max_verify_batch"):
            limit = getattr(self, name)
            if limit is not None and limit > self.max_num_seqs:
                flag = name.replace("_", "-")
                raise ValueError(f"{flag} must be max-num-seqs, {self.max_num_seqs}, at most, got {limit}")
        self.weights()
        if len(self.partition) != 3 or sum(self.partition) > 1.000001:
            raise ValueError(f"partition takes three shares that sum to at most 1, got {self.partition}")

    def weights(self) -> dict[str, float]:
        """The weights of lanes that have one."""
        found: dict[str, float] = {}
        for text in self.lane_weights:
            lane, _, value = text.partition("=")
            if lane not in BESIDE or lane in found:
                fault = "twice" if lane in found else f"unknown; known: {', '.join(BESIDE)}"
                raise ValueError(f"lane-weights: lane {lane!r} is {fault}")
            try:
                weight = float(value)
            except ValueError:
                raise ValueError(f"lane-weights: {text!r} must be lane=weight, e.g. decode=3") from None
            check(f"lane-weights {lane}", weight, LANE_WEIGHT)
            found[lane] = weight
        return found

    @property
    def draft_batch(self) -> int:
        """The most requests that one draft is made for."""
        return self.max_draft_batch or self.max_num_seqs

    @property
    def verify_batch(self) -> int:
        """The most requests that one verify takes."""
        return self.max_verify_batch or self.max_num_seqs

    @property
    def round_batch(self) -> int:
        """The most requests that one draft and one verify both take."""
        return min(self.draft_batch, self.verify_batch)

    @property
    def drafted_by(self) -> DrafterKind:
        """Who drafts."""
        return drafter_kind(self.pair)

    @property
    def draft_range(self) -> tuple[int, int]:
        """The shortest and the longest draft that a controller may choose."""
        least, most = self.min_speculative_tokens, self.max_speculative_tokens
        if least is None:  # the paper's controller has 2
            least = min(2, most) if self.controller == "feedback" else 0
        return least, most

    @property
    def longest_draft(self) -> int:
        """The most tokens that a draft may have."""
        if self.drafted_by == "none":
            return 0
        return self.num_speculative_tokens if self.controller == "fixed" else self.max_speculative_tokens


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


@dataclass(frozen=True)
class Scoring:
    """How a run is summarised."""

    goodput: tuple[str, ...] = ()
    """Service levels as metric:milliseconds, e.g. ttft:500 tpot:50 (ttft, tpot, e2el)."""
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    """Metrics to give percentiles of: ttft, tpot, itl, e2el."""
    metric_percentiles: tuple[float, ...] = (99.0,)
    """Percentiles to give."""
    warmup_requests: int = 0
    """Measure behind the first N requests: latencies leave them out, rates count what is delivered from then on.

    A closed loop is then measured until its last request is sent, so that its running dry does not count either.
    """
    detailed: bool = True
    """--no-detailed keeps no record beyond the metrics: memory stays flat, and percentiles are within 1%."""

    def __post_init__(self) -> None:
        check_ranges(self)
        for name in self.percentile_metrics:
            if name not in ("ttft", "tpot", "itl", "e2el"):
                raise ValueError(f"percentile-metrics: unknown metric {name!r}; known: ttft, tpot, itl, e2el")
        self.slo()

    def slo(self) -> dict[str, float]:
        """Service levels in seconds by metric."""
        levels: dict[str, float] = {}
        for text in self.goodput:
            name, _, value = text.partition(":")
            if name not in ("ttft", "tpot", "e2el"):
                raise ValueError(f"goodput: unknown metric {name!r} in {text!r}; known: ttft, tpot, e2el")
            try:
                level = float(value)
            except ValueError:
                raise ValueError(f"goodput: {text!r} must be metric:milliseconds, e.g. ttft:500") from None
            check(f"goodput {name}", level, LEVEL_MS)
            levels[name] = level / 1000
        return levels


@dataclass(frozen=True)
class Experiment:
    """One run: an architecture, under a load, on a GPU."""

    arch: Arch = "pdv"
    """Serving architecture: autoregressive, baseline, colocated, pd, pdv, pdv-unified, pdv-hybrid, adaptive, pdv-ahead,
    or a policy of your own as file.py:Class."""
    traffic: Traffic = field(default_factory=Traffic)
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: Server = field(default_factory=Server)
    hardware: Hardware = field(default_factory=Hardware)
    host: Host = field(default_factory=Host)
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def kin(self) -> Arch:
        """The named architecture whose options and needs it shares: its own, unless its policy is the user's."""
        return kin(self.arch)

    @property
    def speculates(self) -> bool:
        """Whether the draft model is ever run."""
        return self.longest_draft > 0

    @property
    def has_drafter(self) -> bool:
        """Whether it drafts where its draft length is not 0."""
        return policy_of(self.arch).speculates and self.server.drafted_by != "none"

    @cached_property
    def seats(self) -> Seats:
        """Which GPU of a server each part is on."""
        if self.hardware.verify_gpu:
            return Seats(prefill=(1,), draft=(0,), verify=1)
        placed = self.hardware.placed()
        draft, verify = placed.get("decode", (0,)), placed.get("verify", (0,))
        return Seats(placed.get("prefill", (0,)), draft, draft[0] if self.kin == "pd" else verify[0])

    @cached_property
    def pair(self) -> Pair:
        """The models as a GPU runs them: those that are sharded by one of their shards."""
        whole, hardware = named_pair(self.server.pair), self.hardware
        drafters = hardware.draft_tensor_parallel_size or (1 if self.seats.apart else hardware.tensor_parallel_size)
        target = shard(whole.target, hardware.tensor_parallel_size)
        if not self.speculates:
            return Pair(whole.draft, target)
        try:
            return Pair(shard(whole.draft, drafters), target)
        except ValueError as error:
            raise ValueError(f"{error}; give --draft-tensor-parallel-size 1") from None

    @property
    def gpus(self) -> int:
        """GPUs of a server, those of its groups counted one by one."""
        return sum(self.group(at) for at in self.seats.used)

    def group(self, at: int) -> int:
        """How many GPUs stand behind one that lanes are placed on: they do the same at the same time."""
        seats, hardware = self.seats, self.hardware
        drafters = hardware.draft_tensor_parallel_size or 1
        return hardware.tensor_parallel_size if at in (seats.verify, *seats.prefill) else drafters

    @property
    def longest_draft(self) -> int:
        """Most drafts of one round."""
        return self.server.longest_draft if policy_of(self.arch).speculates else 0

    @property
    def paged(self) -> bool:
        """Whether the KV cache hands out blocks as tokens come."""
        return self.server.kv_cache == "paged"

    @property
    def files(self) -> tuple[str, ...]:
        """The files it reads; of a tokenizer's folder all but weights, which may lie there too."""
        profile = None if self.hardware.profile == "roofline" else self.hardware.profile
        cards = {card: None for card in (self.hardware.gpu, *self.hardware.cards) if card.endswith(".toml")}
        models = self.server.pair.split(":")[0 if self.server.drafted_by == "model" else 1 :]
        configs = [f"{name}/config.json" if Path(name).is_dir() else name for name in models if is_config(name)]
        folder = Path(self.traffic.tokenizer) if self.traffic.tokenizer else None
        found = folder.iterdir() if folder is not None and folder.is_dir() else ()
        tokenizer = sorted(str(path) for path in found if path.is_file() and path.suffix not in WEIGHTS)
        inputs = (file_of(self.arch), self.traffic.dataset_path, self.acceptance.acceptance_trace)
        named = (*inputs, profile, *cards, *configs, *tokenizer)
        return tuple(path for path in named if path is not None)

    def __post_init__(self) -> None:
        kind = self.kin
        if self.scoring.warmup_requests >= self.traffic.num_prompts:
            raise ValueError(
                f"no request is left to measure: num-prompts is {self.traffic.num_prompts}, "
                f"warmup-requests {self.scoring.warmup_requests}"
            )
        if kind == "baseline" and self.server.controller == "feedback":
            raise ValueError("--controller feedback watches the verify queue, which baseline does not have")
        if kind == "pdv-ahead":
            drawn = self.acceptance
            if drawn.synthetic_acceptance_rates or drawn.acceptance_trace:
                raise ValueError("pdv-ahead needs --acceptance-rate or -model: other forms do not tell what is behind")
        hardware, drafter = self.hardware, self.server.drafted_by
        if kind == "pdv-ahead" and drafter not in ("model", "none"):
            raise ValueError(f"pdv-ahead drafts ahead of verdicts with a model of its own: --drafter {drafter} cannot")
        if self.seats.gpus > 1 and drafter in (*HEADS, "ngram"):
            raise ValueError(
                f"--drafter {drafter} drafts beside its target, on one GPU: leave out --place, --verify-gpu"
            )
        policy = policy_of(self.arch)
        if hardware.verify_gpu and not policy.hands_over():
            fitting = archs_where(lambda other: other.hands_over())
            raise ValueError(f"--verify-gpu 1 needs a verify lane ({', '.join(fitting)}), not {self.arch}")
        if hardware.place and not policy.placeable():
            fitting = archs_where(lambda other: other.placeable())
            raise ValueError(f"--place needs lanes with workers of their own ({', '.join(fitting)}), not {self.arch}")
        if kind == "pd" and "verify" in hardware.placed():
            raise ValueError("--place verify: pd verifies in its decode lane")
        if kind == "pd" and len(self.seats.draft) > 1:
            raise ValueError("--place decode: pd verifies there, on one GPU; --replicas makes more of it")
        empty = set(range(self.seats.gpus)).difference(self.seats.used)
        if empty:
            raise ValueError(f"--place leaves GPU {min(empty)} empty")
        if hardware.cards and len(hardware.cards) != self.seats.gpus:
            raise ValueError(f"--cards names {len(hardware.cards)} cards, and a server has {self.seats.gpus} GPUs")
        for lane in (self.seats.prefill, self.seats.draft):
            if hardware.cards and len({hardware.cards[at] for at in lane}) > 1:
                raise ValueError("--cards: the GPUs of one lane are of one card")
        if hardware.cards and self.seats.gpus == 1:
            raise ValueError("--cards is for several GPUs a server, by --place or --verify-gpu: the one is --gpu")
