"""The keywords of `pdvsim.run` and the other functions of `pdvsim`, for editors.

Made from the commands' own fields by tests/optionfiles.py, and held to them by the tests. What each means is in
`pdvsim run --help` and its like.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pdvsim.sim.policies.base import Policy


class Keywords(TypedDict, total=False):
    """All of them have these."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    async_scheduling: bool
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    contention: Literal["fluid", "serial", "max"]
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    gpu: str
    gpu_memory_utilization: float
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    input_len: int | None
    kv_cache: Literal["paged", "reserved"]
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    machine: str | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    min_speculative_tokens: int | None
    notify_s: float
    num_workers: int
    output_len: int | None
    pad_drafts: bool
    padding: Literal["profile", "vllm", "sglang", "tensorrt-llm"]
    pair: str
    partition: float | Sequence[float]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    replicas: int
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int


class RunKeywords(Keywords, total=False):
    """Of `pdvsim.run`."""

    arch: str | type[Policy]
    controller: Literal["fixed", "feedback", "goodput"]
    detailed: bool
    goodput: str | Sequence[str]
    max_num_batched_tokens: int
    max_num_seqs: int
    metric_percentiles: float | Sequence[float]
    num_prompts: int
    num_speculative_tokens: int
    percentile_metrics: str | Sequence[str]
    random_range_ratio: float
    request_rate: float
    warmup_requests: int


class SweepKeywords(Keywords, total=False):
    """Of `pdvsim.sweep`."""

    arch: str | type[Policy] | Sequence[str | type[Policy]]
    backend: Literal["loky", "dask", "ray"]
    concurrency: int | Sequence[int]
    controller: Literal["fixed", "feedback", "goodput"]
    detailed: bool
    goodput: str | Sequence[str]
    jobs: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    metric_percentiles: float | Sequence[float]
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int
    percentile_metrics: str | Sequence[str]
    random_range_ratio: float
    request_rate: float | Sequence[float]
    scheduler: str | None
    vary: Mapping[str, Sequence[Any]]
    warmup_requests: int


class CapacityKeywords(Keywords, total=False):
    """Of `pdvsim.capacity`."""

    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    controller: Literal["fixed", "feedback", "goodput"] | None
    detailed: bool
    goodput: str | Sequence[str]
    gpu_hour_usd: float | None
    gpus: int | Sequence[int]
    jobs: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    metric_percentiles: float | Sequence[float]
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int | None
    percentile_metrics: str | Sequence[str]
    random_range_ratio: float | None
    request_rate: float
    tolerance: float
    warmup_requests: int
    warmup_share: float


class AdviseKeywords(Keywords, total=False):
    """Of `pdvsim.advise`."""

    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    budget: int
    card_hour_usd: str | Sequence[str]
    controller: Literal["fixed", "feedback", "goodput"] | None
    detailed: bool
    drafter_card: str | None
    goodput: str | Sequence[str]
    gpu_hour_usd: float | None
    gpus: int
    indifference: float
    jobs: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    metric_percentiles: float | Sequence[float]
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int | None
    objective: Literal["headroom", "goodput", "throughput", "ttft", "tpot", "e2el"] | None
    percentile_metrics: str | Sequence[str]
    random_range_ratio: float | None
    request_rate: float
    try_controllers: Literal["fixed", "feedback", "goodput"] | Sequence[Literal["fixed", "feedback", "goodput"]]
    try_draft_lengths: int | Sequence[int]
    try_max_num_batched_tokens: int | Sequence[int]
    try_max_num_seqs: int | Sequence[int]
    warmup_requests: int
    warmup_share: float


class DraftTableKeywords(Keywords, total=False):
    """Of `pdvsim.draft_table`."""

    against: int | None
    arch: str | type[Policy]
    contexts: int | Sequence[int]
    controller: Literal["fixed", "feedback", "goodput"]
    engine: Literal["vllm", "sglang", "tensorrt-llm", "pdvsim"] | None
    indifference: float
    jobs: int | None
    max_k: int
    max_num_batched_tokens: int
    max_num_seqs: int
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int
    random_range_ratio: float | None
    request_rate: float


class MapKeywords(Keywords, total=False):
    """Of `pdvsim.winner_map`."""

    acceptances: float | Sequence[float]
    against: str | None
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    card_hour_usd: str | Sequence[str]
    concurrency: int | Sequence[int]
    controller: Literal["fixed", "feedback", "goodput"] | None
    detailed: bool
    drafter_card: str | None
    family: Literal["map", "cell"]
    goodput: str | Sequence[str]
    gpus: int
    indifference: float
    jobs: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    metric_percentiles: float | Sequence[float]
    num_prompts: int | None
    num_runs: int
    num_speculative_tokens: int | None
    objective: Literal["headroom", "goodput", "throughput", "ttft", "tpot", "e2el"] | None
    pair_acceptance: float | Sequence[float]
    pairs: str | Sequence[str]
    per_dollar: bool
    percentile_metrics: str | Sequence[str]
    random_range_ratio: float | None
    request_rate: float | Sequence[float]
    try_cards: str | Sequence[str]
    warmup_requests: int
    warmup_share: float
    y: Literal["acceptance", "size", "card"]
