"""The keywords of `pdvsim.run` and the other functions of `pdvsim`, for editors.

Made from the commands' own fields by tests/optionfiles.py, and held to them by the tests. What each means is in
`pdvsim run --help` and its like.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pdvsim.sim.policies.base import Policy


class RunKeywords(TypedDict, total=False):
    """Of `pdvsim.run`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy]
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"]
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_memory_utilization: float
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    input_len: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int
    num_speculative_tokens: int
    num_workers: int
    output_len: int | None
    pad_drafts: bool
    pair: str
    partition: float | Sequence[float]
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int


class SweepKeywords(TypedDict, total=False):
    """Of `pdvsim.sweep`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    backend: Literal["loky", "dask", "ray"]
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    concurrency: int | Sequence[int]
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"]
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_memory_utilization: float
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int
    max_num_seqs: int
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int
    num_workers: int
    output_len: int | None
    pad_drafts: bool
    pair: str
    partition: float | Sequence[float]
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float | Sequence[float]
    router: Literal["round-robin", "least-loaded", "random"]
    scheduler: str | None
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    vary: Mapping[str, Sequence[Any]]
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int


class CapacityKeywords(TypedDict, total=False):
    """Of `pdvsim.capacity`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"] | None
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_hour_usd: float | None
    gpu_memory_utilization: float
    gpus: int | Sequence[int]
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int | None
    num_workers: int
    output_len: int | None
    pad_drafts: bool
    pair: str
    partition: float | Sequence[float]
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    tolerance: float
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int
    warmup_share: float


class CompareKeywords(TypedDict, total=False):
    """Of `pdvsim.compare`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    concurrency: int | Sequence[int]
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"] | None
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_hour_usd: str | Sequence[str]
    gpu_memory_utilization: float
    gpus: str | Sequence[str]
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    indifference: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int | None
    num_runs: int
    num_speculative_tokens: int | None
    num_workers: int
    objective: Literal["headroom", "goodput", "throughput", "ttft", "tpot", "e2el"] | None
    output_len: int | None
    pad_drafts: bool
    pair: str
    pair_acceptance: float | Sequence[float]
    pairs: str | Sequence[str]
    partition: float | Sequence[float]
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float | Sequence[float]
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int
    warmup_share: float


class AdviseKeywords(TypedDict, total=False):
    """Of `pdvsim.advise`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    band: bool
    budget: int
    burstiness: float
    card_hour_usd: str | Sequence[str]
    cards: str | Sequence[str]
    completion_s: float | None
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"] | None
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    drafter_card: str | None
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_hour_usd: float | None
    gpu_memory_utilization: float
    gpus: int
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    indifference: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int | None
    num_workers: int
    objective: Literal["headroom", "goodput", "throughput", "ttft", "tpot", "e2el"] | None
    output_len: int | None
    pad_drafts: bool
    pair: str
    partition: float | Sequence[float]
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    try_controllers: Literal["fixed", "feedback", "goodput"] | Sequence[Literal["fixed", "feedback", "goodput"]]
    try_draft_lengths: int | Sequence[int]
    try_max_num_batched_tokens: int | Sequence[int]
    try_max_num_seqs: int | Sequence[int]
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int
    warmup_share: float


class DraftTableKeywords(TypedDict, total=False):
    """Of `pdvsim.draft_table`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    against: int | None
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy]
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    confirm: bool
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"]
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    feedback_temperature: bool
    gpu: str
    gpu_memory_utilization: float
    handoff_s: float | None
    hybrid_threshold: int
    idle_drafter: Literal["follows", "rests"] | None
    idle_poll_cost_s: float
    idle_poll_s: float
    indifference: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_k: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int
    num_workers: int
    output_len: int | None
    pad_drafts: bool
    pair: str
    partition: float | Sequence[float]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int


class MapKeywords(TypedDict, total=False):
    """Of `pdvsim.winner_map`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    acceptances: float | Sequence[float]
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    attainment: float
    band: bool
    burstiness: float
    card_hour_usd: str | Sequence[str]
    cards: str | Sequence[str]
    completion_s: float | None
    concurrency: int | Sequence[int]
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"] | None
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    drafter_card: str | None
    family: Literal["map", "cell"]
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_memory_utilization: float
    gpus: int
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    indifference: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int | None
    max_num_seqs: int | None
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int | None
    num_runs: int
    num_speculative_tokens: int | None
    num_workers: int
    objective: Literal["headroom", "goodput", "throughput", "ttft", "tpot", "e2el"] | None
    output_len: int | None
    pad_drafts: bool
    pair: str
    pairs: str | Sequence[str]
    partition: float | Sequence[float]
    per_dollar: bool
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float | Sequence[float]
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int
    warmup_share: float
    y: Literal["acceptance", "size"]


class FrontierKeywords(TypedDict, total=False):
    """Of `pdvsim.frontier`."""

    acceptance_concentration: float | None
    acceptance_model: str | None
    acceptance_rate: float
    acceptance_temperature_slope: float
    acceptance_trace: str | os.PathLike[str] | None
    acceptance_trace_k: int
    admission_factor: float
    ahead_exponent: float
    ahead_fan: int | None
    ahead_miss: Literal["auto", "draft", "plain"]
    arch: str | type[Policy] | Sequence[str | type[Policy]]
    band: bool
    burstiness: float
    cards: str | Sequence[str]
    completion_s: float | None
    concurrency: int | None
    contention: Literal["fluid", "serial", "max"]
    controller: Literal["fixed", "feedback", "goodput"] | None
    dataset_name: Literal["random", "sharegpt", "custom", "azure", "burstgpt", "mooncake"]
    dataset_path: str | os.PathLike[str] | None
    detailed: bool
    draft_probs: Literal["none", "bf16", "fp32"]
    draft_temperature: float
    draft_tensor_parallel_size: int | None
    drafter: Literal["model", "eagle3", "mtp", "ngram", "none"] | None
    feedback_temperature: bool
    goodput: str | Sequence[str]
    gpu: str
    gpu_memory_utilization: float
    handoff_s: float | None
    hybrid_threshold: int
    idle_poll_cost_s: float
    idle_poll_s: float
    input_len: int | None
    jobs: int | None
    kv_cache: Literal["paged", "reserved"] | None
    kv_capacity_tokens: int | None
    lane_weights: str | Sequence[str]
    launch_s: float | None
    link: Literal["nvlink4", "pcie5", "pcie4", "400gbe", "100gbe"]
    link_bytes_per_s: float | None
    link_latency_s: float | None
    max_concurrency: int | None
    max_decode_queue: int
    max_draft_batch: int | None
    max_num_batched_tokens: int | Sequence[int]
    max_num_seqs: int
    max_prompts_per_forward: int | None
    max_speculative_tokens: int
    max_verify_batch: int | None
    metric_percentiles: float | Sequence[float]
    min_speculative_tokens: int
    notify_s: float
    num_prompts: int
    num_runs: int
    num_speculative_tokens: int | None
    num_workers: int
    output_len: int | None
    pad_drafts: bool
    pair: str
    partition: float | Sequence[float]
    percentile_metrics: str | Sequence[str]
    place: str | Sequence[str]
    priority: Literal["none", "stream", "dynamic", "preemptive", "partition"]
    profile: str | os.PathLike[str] | None
    random_range_ratio: float
    replicas: int
    request_rate: float | None
    router: Literal["round-robin", "least-loaded", "random"]
    seed: int
    synthetic_acceptance_rates: float | Sequence[float]
    tensor_parallel_size: int
    tokenizer: str | os.PathLike[str] | None
    use_trace_timestamps: bool
    verify_gather: Literal["auto", "always", "never"]
    verify_gpu: int
    warmup_requests: int
    warmup_share: float
    x: Literal["mean_ttft", "p99_ttft"]
    y: Literal["p99_itl", "p99_tpot", "mean_tpot"] | None
