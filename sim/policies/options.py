"""The options of a server: its models, drafts, limits and priorities, and those of each architecture."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal

from pdvsim.sim.core import DrafterKind, Priority
from pdvsim.sim.limits import (
    MAX_DRAFT,
    MAX_TOKENS,
    BatchLimit,
    DraftLength,
    Fact,
    Internal,
    LeastDraft,
    LeastShare,
    PartialShare,
    Range,
    Tokens,
    check_ranges,
    of,
)
from pdvsim.sim.models.presets import drafted_by, drafter_kind, pair_name, with_fp8_target, with_vocabulary
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.models.specs import ModelSpec, Pair

ControllerName = Literal["fixed", "feedback", "goodput", "table", "adaptive-verification"]
KvPolicy = Literal["paged", "reserved"]
GIVEN_LENGTH = of(Fact.DRAFTS, controller=("fixed", "feedback", "goodput", "adaptive-verification"))
VARIED_LENGTH, ADAPTIVE = of(controller=("goodput", "feedback")), of(controller="adaptive-verification")


@dataclass(frozen=True)
class Server:
    """The serving architecture and its limits."""

    pair: str = "llama-3.2-1b:llama-3.1-8b"
    """Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model)."""
    num_speculative_tokens: Annotated[DraftLength, GIVEN_LENGTH] = 4
    """Draft length k, or the starting value if a controller changes it. 0: no speculation, the drafter is not used."""
    drafter: DrafterKind | None = None
    """Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model), p-eagle or
    dflash or dspark (heads). Default: as in --pair."""
    draft_vocab: Annotated[int | None, Range(2, 10_000_000), of(Fact.EAGLE)] = None
    """Tokens that an EAGLE-3 or P-EAGLE head drafts from (draft_vocab_size of its config.json). Default: 32,000, as of
    most published heads."""
    controller: Annotated[ControllerName, of(Fact.DRAFTS)] = "fixed"
    """How the draft length is chosen: fixed, feedback (PD-Verify paper), goodput (best by the latency model), table (by
    batch size, as in vLLM) or adaptive-verification (of k draft tokens the most promising are verified, as in vLLM)."""
    num_speculative_tokens_per_batch_size: Annotated[tuple[str, ...], of(controller="table")] = ()
    """First batch sizes with their draft lengths, e.g. 1:4 16:2 64:0; pdvsim draft-table finds them. A batch
    counts all requests of a step, prefills included. At k=0 the drafter still runs."""
    adaptive_verification_profile_context_len: Annotated[int, Range(0, MAX_TOKENS), ADAPTIVE] = 8192
    """Context per request of the planned step costs, as in vLLM. 0: the context and requests of each step."""
    # adaptive-verification: noise of a signal that is 1 for a draft token that will be accepted, else 0; 0: an oracle;
    # None: no signal, estimates are from verdicts alone
    confidence_noise: Internal[Annotated[float, Range(0, 100)] | None] = None
    min_speculative_tokens: Annotated[DraftLength | None, VARIED_LENGTH] = None
    """Shortest draft a controller may choose. Default: 2 for feedback; 0 (no draft) for goodput."""
    max_speculative_tokens: Annotated[LeastDraft, VARIED_LENGTH] = 8
    """Longest draft a controller may choose."""
    max_num_seqs: BatchLimit = 128
    """Maximum number of requests that decode concurrently: the batch limit of every lane."""
    max_draft_batch: Annotated[BatchLimit | None, of(Fact.STREAMS)] = None
    """Maximum requests per draft; default: --max-num-seqs. In pd and pdv-unified a round obeys both batch limits."""
    max_verify_batch: Annotated[BatchLimit | None, of(Fact.STREAMS)] = None
    """Maximum requests per verify; default: --max-num-seqs."""
    max_num_batched_tokens: Tokens = 2048
    """Maximum prompt tokens per prefill forward; longer prompts are split into chunks."""
    attention_dp_timeout_iters: Annotated[int | None, Range(1, 100_000), of(Fact.TENSORRT_RANKS)] = None
    """TensorRT-LLM's attention_dp_config with enable_balance: a data-parallel group holds prompts back until every
    group has one, for at most this number of steps. Default: prompts do not wait."""
    attention_dp_batching_wait_iters: Annotated[int, Range(0, 100_000), of("attention_dp_timeout_iters")] = 10
    """Further steps that groups wait for more prompts once each has one."""
    max_prompts_per_forward: Annotated[BatchLimit | None, of(Fact.PREFILL_LANE)] = None
    """Maximum prompts per prefill forward; default: no limit, as in vLLM."""
    separate_prefill: Internal[bool] = False  # colocated: decoding waits while prompts are prefilled, as in SGLang
    # colocated: decode steps between looks for new requests, as SGLang can be set (`gates`)
    receive_interval: Internal[Annotated[int, Range(1, 10_000)]] = 1
    # the same: most steps that prompts wait while they fill less than a share of a forward, as TensorRT-LLM can be set
    prompt_wait_steps: Internal[Annotated[int, Range(0, 10_000)]] = 0
    prompt_wait_share: Internal[PartialShare] = 0.0
    pad_drafts: Internal[bool] = False  # ngram: rows of a verify padded to its longest draft, as in realrun's engine
    async_scheduling: Annotated[bool | None, of(Fact.ASYNC)] = None
    """Schedule the next step (pdvsim: launch the next draft) before the last result is read. Default: the engine's."""
    enforce_eager: Annotated[bool, of(Fact.EAGER)] = False
    """No CUDA graphs and no torch.compile, as vLLM with this flag: the host launches the kernels of each layer."""
    kv_cache: KvPolicy = "paged"
    """paged: blocks are allocated as tokens arrive, with preemption when none is free. reserved: all blocks a request
    may need are allocated at admission, and prefixes are not cached."""
    enable_prefix_caching: bool = True
    """Prefill every prompt whole. By default the KV cache of prompts and answers is kept, and prompts that begin with
    the same tokens skip that part: shared prefixes and conversations (docs/traffic.md)."""
    quantization: Literal["fp8"] | None = None
    """fp8: 8-bit weights in the target's layers, as in a target named NAME-fp8. Name a draft model's in --pair."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """KV cache of both models: auto (16 bits) or fp8 (8 bits, predicted by its bytes)."""
    expert_overlap: Annotated[LeastShare | None, of(Fact.EXPERTS)] = None
    """Mixture of experts: n tokens of one request read as many distinct experts as n to this power of different
    requests. 1: independent. Default: 0.8, from published counts."""
    num_workers: Annotated[int, Range(1, 4096)] = 4
    """baseline: number of concurrent requests, each run to completion at batch 1."""
    max_decode_queue: Annotated[int, Range(1, 1_000_000)] = 32
    """pdv: prefill admits no request while this many wait for the decode lane."""
    verify_gather: Literal["auto", "always", "never"] = "auto"
    """pdv: whether verify waits for a running draft to batch both: auto (by the latency model), always or never."""
    admission_factor: Annotated[float, Range(0.001, 1e6)] = 1.2
    """pdv-unified: admit one prefill per turn while the decode queue is shorter than this times the batch limit."""
    hybrid_threshold: Annotated[int, Range(0, 1_000_000)] = 8
    """pdv-hybrid: up to this many requests, draft and verify atomically; above it, use three lanes."""
    ahead_fan: Annotated[int, Range(0, 64)] | None = None
    """pdv-ahead: tokens guessed after each possible number of accepted drafts. 0: continue as if all were accepted.
    Default: the latency model chooses for each batch."""
    ahead_miss: Internal[Literal["auto", "draft", "plain"]] = "auto"  # unforeseen verdict: draft anew or verify plainly
    # chance that a target's token is none of the drafter's next n: (1 + n)^-this; assumed
    ahead_exponent: Internal[Annotated[float, Range(0, 10)]] = 1.0
    priority: Annotated[Priority, of(Fact.PRIORITISED)] = "stream"
    """Priority between lanes (decode > verify > prefill): none, stream (CUDA streams), dynamic (stream, raised by queue
    length and age), preemptive (ideal) or partition (SM split; realrun only)."""

    def __post_init__(self) -> None:
        check_ranges(self)
        pair = drafted_by(self.drafter, pair_name(self.pair))
        object.__setattr__(self, "pair", pair if self.quantization is None else with_fp8_target(pair))
        if self.controller == "feedback" and self.min_speculative_tokens == 0:
            raise ValueError("--controller feedback learns from drafts: --min-speculative-tokens must be at least 1")
        if (self.min_speculative_tokens or 0) > self.max_speculative_tokens:
            raise ValueError("min-speculative-tokens must not exceed max-speculative-tokens")
        if self.controller == "table" and not self.draft_table:
            raise ValueError("--controller table needs --num-speculative-tokens-per-batch-size, e.g. 1:4 16:2")
        for lane, limit in (("draft", self.max_draft_batch), ("verify", self.max_verify_batch)):
            if limit is not None and limit > self.max_num_seqs:
                raise ValueError(f"max-{lane}-batch must be at most max-num-seqs, {self.max_num_seqs}, got {limit}")

    @cached_property
    def draft_batch(self) -> int:
        """The most requests that one draft is made for."""
        return self.max_draft_batch or self.max_num_seqs

    @cached_property
    def verify_batch(self) -> int:
        """The most requests that one verify takes."""
        return self.max_verify_batch or self.max_num_seqs

    @cached_property
    def round_batch(self) -> int:
        """The most requests that one draft and one verify both take."""
        return min(self.draft_batch, self.verify_batch)

    @property
    def drafted_by(self) -> DrafterKind:
        """The kind of drafter."""
        return drafter_kind(self.pair)

    def models(self) -> Pair:
        """The models of its pair, with KV cache and experts as its options say."""
        pair = named_pair(self.pair)
        return Pair(self.served(with_vocabulary(pair.draft, self.draft_vocab)), self.served(pair.target))

    def served(self, spec: ModelSpec) -> ModelSpec:
        """A model with KV cache and experts as the options say."""
        if self.kv_cache_dtype == "fp8":
            spec = replace(spec, kv_dtype_bytes=1)
        if self.expert_overlap is not None and spec.experts is not None:
            spec = replace(spec, experts=replace(spec.experts, overlap=self.expert_overlap))
        return spec

    @property
    def draft_range(self) -> tuple[int, int]:
        """The shortest and the longest draft that a controller may choose."""
        least, most = self.min_speculative_tokens, self.max_speculative_tokens
        usual = min(2, most) if self.controller == "feedback" else 0  # the paper's controller has 2
        return usual if least is None else least, most

    @property
    def longest_draft(self) -> int:
        """The most tokens that a draft may have."""
        if self.drafted_by == "none":
            return 0
        if self.controller == "table":
            return max(1, *(k for _, k in self.draft_table))
        return self.max_speculative_tokens if self.varies_length else self.num_speculative_tokens

    @property
    def draft_table(self) -> list[tuple[int, int]]:
        """Batch sizes in rising order from 1 on, and the draft length from each on."""
        tiers = []
        for text in self.num_speculative_tokens_per_batch_size:
            first, _, k = text.partition(":")
            if not ((first + k).isascii() and first.isdecimal() and k.isdecimal()) or int(k) > MAX_DRAFT:
                known = f"batch size and draft length from 0 to {MAX_DRAFT}, e.g. 1:4 16:2"
                raise ValueError(f"num-speculative-tokens-per-batch-size: {text!r} must be {known}")
            tiers.append((int(first), int(k)))
        if tiers and (tiers[0][0] != 1 or any(a >= b for (a, _), (b, _) in pairwise(tiers))):
            raise ValueError("num-speculative-tokens-per-batch-size: batch sizes must begin with 1 and rise")
        return tiers

    @property
    def varies_length(self) -> bool:
        """Whether a controller chooses how many tokens are drafted."""
        return self.controller in ("feedback", "goodput")
