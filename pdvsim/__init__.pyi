# Written by tests/stubfile.py from the options of the commands.
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from pdvsim.cli.validate.base import Compared
from pdvsim.decide.advice import Advice
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.draft_table import DraftTable
from pdvsim.decide.speedup import Speedup
from pdvsim.decide.winners import WinnerMap
from pdvsim.sim.policies.base import Policy
from pdvsim.view.plots import SweepPoints
from pdvsim.view.run import Run as Run
from pdvsim.view.traffic import TraceAccount

__version__: str

def advise(
    *, preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str] | None = ..., arch: str |
    type[Policy] | Sequence[str | type[Policy]] = ..., attainment: float = ..., num_runs: int = ..., jobs: int | None =
    ..., objective: Literal['headroom', 'goodput', 'throughput', 'ttft', 'tpot', 'e2el'] | None = ..., indifference:
    float = ..., request_rate: float = ..., concurrency: int | None = ..., gpus: int | None = ..., budget: int = ...,
    gpu_hour_usd: float | None = ..., dataset_name: Literal['random', 'prefix_repetition', 'sharegpt', 'custom',
    'azure', 'burstgpt', 'mooncake'] = ..., dataset_path: str | PathLike[str] | None = ..., tokenizer: str |
    PathLike[str] | None = ..., max_model_len: int | None = ..., num_prompts: int | None = ..., burstiness: float =
    ..., use_trace_timestamps: bool | None = ..., window: str | PathLike[str] | None = ..., columns: str |
    PathLike[str] | Sequence[str | PathLike[str]] = ..., input_len: int | None = ..., output_len: int | None = ...,
    random_range_ratio: float | None = ..., prefix_len: int | None = ..., num_prefixes: int | None = ..., num_turns:
    int = ..., think_time_s: float = ..., seed: int = ..., acceptance_rate: float | None = ...,
    acceptance_concentration: float | None = ..., synthetic_acceptance_rates: float | Sequence[float] = ...,
    acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] | None = ..., pair: str |
    PathLike[str] = ..., num_speculative_tokens: int | None = ..., drafter: Literal['model', 'pard', 'eagle3',
    'p-eagle', 'dflash', 'dspark', 'mtp', 'ngram', 'suffix', 'none'] | None = ..., draft_vocab: int | None = ...,
    controller: Literal['fixed', 'feedback', 'goodput', 'table', 'adaptive-verification'] | None = ...,
    num_speculative_tokens_per_batch_size: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    adaptive_verification_profile_context_len: int = ..., min_speculative_tokens: int | None = ...,
    max_speculative_tokens: int = ..., max_num_seqs: int | None = ..., max_draft_batch: int | None = ...,
    max_verify_batch: int | None = ..., max_num_batched_tokens: int | None = ..., attention_dp_timeout_iters: int |
    None = ..., attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ...,
    async_scheduling: bool | None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ...,
    enable_prefix_caching: bool = ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto',
    'fp8'] = ..., expert_overlap: float | None = ..., num_workers: int = ..., max_decode_queue: int = ...,
    verify_gather: Literal['auto', 'always', 'never'] = ..., admission_factor: float = ..., hybrid_threshold: int =
    ..., ahead_fan: int | None = ..., priority: Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ...,
    gpu: str | PathLike[str] = ..., profile: str | PathLike[str] | None = ..., machine: str | PathLike[str] | None =
    ..., engine: str | PathLike[str] | None = ..., contention: Literal['fluid', 'serial', 'max'] = ..., padding:
    Literal['profile', 'vllm', 'sglang', 'tensorrt-llm'] = ..., gpu_memory_utilization: float = ...,
    kv_capacity_tokens: int | None = ..., kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link:
    Literal['pcie5', 'pcie4'] = ..., tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ...,
    data_parallel_size: int = ..., enable_expert_parallel: bool = ..., all2all_backend:
    Literal['allgather_reducescatter', 'deepep_low_latency', 'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] |
    None = ..., enable_eplb: bool = ..., num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str |
    PathLike[str]] = ..., disaggregate: str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None =
    ..., prefill_data_parallel_size: int | None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv:
    Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ...,
    router: Literal['round-robin', 'least-loaded', 'random', 'prefix-aware'] = ..., host: Literal['measured',
    'polling', 'python-threads'] = ..., launch_s: float | None = ..., completion_s: float | None = ..., handoff_s:
    float | None = ..., goodput: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., metric_percentiles: float |
    Sequence[float] = ..., model: str | PathLike[str] | None = ..., random_prefix_len: int | None = ...,
    prefix_repetition_prefix_len: int | None = ..., prefix_repetition_suffix_len: int | None = ...,
    prefix_repetition_num_prefixes: int | None = ..., prefix_repetition_output_len: int | None = ...,
) -> Advice:
    """Recommend an architecture and settings for a load, with confidence and where the answer changes.

    Returns: an answer, which prints as text.

    Main options:

    - arch: Serving architectures to compare; default: autoregressive and colocated, which engines serve, and with
        --engine pdvsim, the only one that has lanes, pd and pdv.
    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - gpus: Most GPUs. With --goodput at a request rate: up to which the smallest and cheapest fleet that meets the
        levels is found (default: 64, if the placement is not given). Otherwise all of them are used, each way tuned
        (default: 1).
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - request_rate: Load in requests per second; default: the trace's own rate, replayed.
    - concurrency: Load as concurrent requests (closed loop).
    - num_prompts: Requests per run, a fifth of which is the start and excluded (capacity: the least number measured).
        Default: all of the window if a file is replayed, else as many as the load needs. advise without a load: a
        batch job, all of whose requests arrive at the start.
    - goodput: Service levels of ttft, tpot or e2el in ms: ttft:500 tpot:50, or with a percentile p99_ttft:200.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - num_speculative_tokens: Draft length k for every architecture; default: the best of each, from 0 (no drafts) to
        8.
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - num_runs: Replications of each result; replication i has seed --seed + i, the same for every architecture.
        (default: 5)
    - preset: Settings of options that are not given: those of PD-Verify.
    """

def capacity(
    *, preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str] | None = ..., arch: str |
    type[Policy] | Sequence[str | type[Policy]] = ..., attainment: float = ..., num_runs: int = ..., jobs: int | None =
    ..., gpu_hour_usd: float | None = ..., tolerance: float = ..., dataset_name: Literal['random', 'prefix_repetition',
    'sharegpt', 'custom', 'azure', 'burstgpt', 'mooncake'] = ..., dataset_path: str | PathLike[str] | None = ...,
    tokenizer: str | PathLike[str] | None = ..., max_model_len: int | None = ..., num_prompts: int | None = ...,
    burstiness: float = ..., use_trace_timestamps: bool | None = ..., window: str | PathLike[str] | None = ...,
    columns: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., input_len: int | None = ..., output_len: int |
    None = ..., random_range_ratio: float | None = ..., prefix_len: int | None = ..., num_prefixes: int | None = ...,
    num_turns: int = ..., think_time_s: float = ..., seed: int = ..., acceptance_rate: float | None = ...,
    acceptance_concentration: float | None = ..., synthetic_acceptance_rates: float | Sequence[float] = ...,
    acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] | None = ..., pair: str |
    PathLike[str] = ..., num_speculative_tokens: int | None = ..., drafter: Literal['model', 'pard', 'eagle3',
    'p-eagle', 'dflash', 'dspark', 'mtp', 'ngram', 'suffix', 'none'] | None = ..., draft_vocab: int | None = ...,
    controller: Literal['fixed', 'feedback', 'goodput', 'table', 'adaptive-verification'] | None = ...,
    num_speculative_tokens_per_batch_size: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    adaptive_verification_profile_context_len: int = ..., min_speculative_tokens: int | None = ...,
    max_speculative_tokens: int = ..., max_num_seqs: int | None = ..., max_draft_batch: int | None = ...,
    max_verify_batch: int | None = ..., max_num_batched_tokens: int | None = ..., attention_dp_timeout_iters: int |
    None = ..., attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ...,
    async_scheduling: bool | None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ...,
    enable_prefix_caching: bool = ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto',
    'fp8'] = ..., expert_overlap: float | None = ..., num_workers: int = ..., max_decode_queue: int = ...,
    verify_gather: Literal['auto', 'always', 'never'] = ..., admission_factor: float = ..., hybrid_threshold: int =
    ..., ahead_fan: int | None = ..., priority: Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ...,
    gpu: str | PathLike[str] = ..., profile: str | PathLike[str] | None = ..., machine: str | PathLike[str] | None =
    ..., engine: str | PathLike[str] | None = ..., contention: Literal['fluid', 'serial', 'max'] = ..., padding:
    Literal['profile', 'vllm', 'sglang', 'tensorrt-llm'] = ..., gpu_memory_utilization: float = ...,
    kv_capacity_tokens: int | None = ..., kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link:
    Literal['pcie5', 'pcie4'] = ..., tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ...,
    data_parallel_size: int = ..., enable_expert_parallel: bool = ..., all2all_backend:
    Literal['allgather_reducescatter', 'deepep_low_latency', 'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] |
    None = ..., enable_eplb: bool = ..., num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str |
    PathLike[str]] = ..., disaggregate: str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None =
    ..., prefill_data_parallel_size: int | None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv:
    Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ...,
    router: Literal['round-robin', 'least-loaded', 'random', 'prefix-aware'] = ..., host: Literal['measured',
    'polling', 'python-threads'] = ..., launch_s: float | None = ..., completion_s: float | None = ..., handoff_s:
    float | None = ..., goodput: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., metric_percentiles: float |
    Sequence[float] = ..., model: str | PathLike[str] | None = ..., random_prefix_len: int | None = ...,
    prefix_repetition_prefix_len: int | None = ..., prefix_repetition_suffix_len: int | None = ...,
    prefix_repetition_num_prefixes: int | None = ..., prefix_repetition_output_len: int | None = ...,
) -> Capacities:
    """Find the highest request rate each architecture holds within its service levels, with intervals over seeds.

    Returns: an answer, which prints as text.

    Main options:

    - arch: Serving architectures to compare; default: autoregressive and colocated, which engines serve, and with
        --engine pdvsim, the only one that has lanes, pd and pdv.
    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - num_prompts: Requests per run, a fifth of which is the start and excluded (capacity: the least number measured).
        Default: all of the window if a file is replayed, else as many as the load needs. advise without a load: a
        batch job, all of whose requests arrive at the start.
    - goodput: Service levels of ttft, tpot or e2el in ms: ttft:500 tpot:50, or with a percentile p99_ttft:200.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - num_speculative_tokens: Draft length k for every architecture; default: the best of each, from 0 (no drafts) to
        8.
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - num_runs: Replications of each result; replication i has seed --seed + i, the same for every architecture.
        (default: 5)
    - preset: Settings of options that are not given: those of PD-Verify.
    """

def draft_table(
    *, preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str] | None = ..., num_runs: int =
    ..., jobs: int | None = ..., max_k: int | None = ..., against: int | None = ..., engine: Literal['vllm', 'sglang',
    'tensorrt-llm'] = ..., indifference: float = ..., dataset_name: Literal['random', 'prefix_repetition', 'sharegpt',
    'custom', 'azure', 'burstgpt', 'mooncake'] = ..., dataset_path: str | PathLike[str] | None = ..., tokenizer: str |
    PathLike[str] | None = ..., max_model_len: int | None = ..., num_prompts: int | None = ..., columns: str |
    PathLike[str] | Sequence[str | PathLike[str]] = ..., input_len: int | None = ..., output_len: int | None = ...,
    random_range_ratio: float | None = ..., prefix_len: int | None = ..., num_prefixes: int | None = ..., num_turns:
    int = ..., think_time_s: float = ..., seed: int = ..., acceptance_rate: float | None = ...,
    acceptance_concentration: float | None = ..., synthetic_acceptance_rates: float | Sequence[float] = ...,
    acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] | None = ..., pair: str |
    PathLike[str] = ..., drafter: Literal['model', 'pard', 'eagle3', 'p-eagle', 'dflash', 'dspark', 'mtp', 'ngram',
    'suffix', 'none'] | None = ..., draft_vocab: int | None = ..., max_num_seqs: int = ..., max_draft_batch: int | None
    = ..., max_verify_batch: int | None = ..., max_num_batched_tokens: int | None = ..., attention_dp_timeout_iters:
    int | None = ..., attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ...,
    async_scheduling: bool | None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ...,
    enable_prefix_caching: bool = ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto',
    'fp8'] = ..., expert_overlap: float | None = ..., num_workers: int = ..., max_decode_queue: int = ...,
    verify_gather: Literal['auto', 'always', 'never'] = ..., admission_factor: float = ..., hybrid_threshold: int =
    ..., ahead_fan: int | None = ..., priority: Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ...,
    gpu: str | PathLike[str] = ..., profile: str | PathLike[str] | None = ..., machine: str | PathLike[str] | None =
    ..., contention: Literal['fluid', 'serial', 'max'] = ..., gpu_memory_utilization: float = ..., kv_capacity_tokens:
    int | None = ..., kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link: Literal['pcie5',
    'pcie4'] = ..., tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ..., data_parallel_size:
    int = ..., enable_expert_parallel: bool = ..., all2all_backend: Literal['allgather_reducescatter',
    'deepep_low_latency', 'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] | None = ..., enable_eplb: bool =
    ..., num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    disaggregate: str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None = ...,
    prefill_data_parallel_size: int | None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv:
    Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ...,
    router: Literal['round-robin', 'least-loaded', 'random', 'prefix-aware'] = ..., host: Literal['measured',
    'polling', 'python-threads'] = ..., launch_s: float | None = ..., completion_s: float | None = ..., handoff_s:
    float | None = ..., model: str | PathLike[str] | None = ..., random_prefix_len: int | None = ...,
    prefix_repetition_prefix_len: int | None = ..., prefix_repetition_suffix_len: int | None = ...,
    prefix_repetition_num_prefixes: int | None = ..., prefix_repetition_output_len: int | None = ...,
) -> DraftTable:
    """Find the best draft length for each batch size by simulation, as a table for vLLM, SGLang or TensorRT-LLM.

    Returns: an answer, which prints as text.

    Main options:

    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - num_prompts: Requests per run, a fifth of which is the start and excluded (capacity: the least number measured).
        Default: all of the window if a file is replayed, else as many as the load needs. advise without a load: a
        batch job, all of whose requests arrive at the start.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - num_runs: Replications of each simulation, with the same seeds. (default: 3)
    - preset: Settings of options that are not given: those of PD-Verify.
    """

def run(
    *, arch: str | type[Policy] = ..., preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str]
    | None = ..., dataset_name: Literal['random', 'prefix_repetition', 'sharegpt', 'custom', 'azure', 'burstgpt',
    'mooncake'] = ..., dataset_path: str | PathLike[str] | None = ..., tokenizer: str | PathLike[str] | None = ...,
    max_model_len: int | None = ..., num_prompts: int = ..., request_rate: float = ..., burstiness: float = ...,
    max_concurrency: int | None = ..., use_trace_timestamps: bool = ..., window: str | PathLike[str] = ..., columns:
    str | PathLike[str] | Sequence[str | PathLike[str]] = ..., input_len: int | None = ..., output_len: int | None =
    ..., random_range_ratio: float = ..., prefix_len: int | None = ..., num_prefixes: int | None = ..., num_turns: int
    = ..., think_time_s: float = ..., seed: int = ..., acceptance_rate: float | None = ..., acceptance_concentration:
    float | None = ..., synthetic_acceptance_rates: float | Sequence[float] = ..., acceptance_model: str |
    PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] | None = ..., pair: str | PathLike[str] = ...,
    num_speculative_tokens: int = ..., drafter: Literal['model', 'pard', 'eagle3', 'p-eagle', 'dflash', 'dspark',
    'mtp', 'ngram', 'suffix', 'none'] | None = ..., draft_vocab: int | None = ..., controller: Literal['fixed',
    'feedback', 'goodput', 'table', 'adaptive-verification'] = ..., num_speculative_tokens_per_batch_size: str |
    PathLike[str] | Sequence[str | PathLike[str]] = ..., adaptive_verification_profile_context_len: int = ...,
    min_speculative_tokens: int | None = ..., max_speculative_tokens: int = ..., max_num_seqs: int = ...,
    max_draft_batch: int | None = ..., max_verify_batch: int | None = ..., max_num_batched_tokens: int | None = ...,
    attention_dp_timeout_iters: int | None = ..., attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward:
    int | None = ..., async_scheduling: bool | None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged',
    'reserved'] = ..., enable_prefix_caching: bool = ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype:
    Literal['auto', 'fp8'] = ..., expert_overlap: float | None = ..., num_workers: int = ..., max_decode_queue: int =
    ..., verify_gather: Literal['auto', 'always', 'never'] = ..., admission_factor: float = ..., hybrid_threshold: int
    = ..., ahead_fan: int | None = ..., priority: Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] =
    ..., gpu: str | PathLike[str] = ..., profile: str | PathLike[str] | None = ..., machine: str | PathLike[str] | None
    = ..., engine: str | PathLike[str] | None = ..., band: bool = ..., contention: Literal['fluid', 'serial', 'max'] =
    ..., padding: Literal['profile', 'vllm', 'sglang', 'tensorrt-llm'] = ..., gpu_memory_utilization: float = ...,
    kv_capacity_tokens: int | None = ..., kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link:
    Literal['pcie5', 'pcie4'] = ..., tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ...,
    data_parallel_size: int = ..., enable_expert_parallel: bool = ..., all2all_backend:
    Literal['allgather_reducescatter', 'deepep_low_latency', 'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] |
    None = ..., enable_eplb: bool = ..., num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str |
    PathLike[str]] = ..., disaggregate: str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None =
    ..., prefill_data_parallel_size: int | None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv:
    Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ...,
    router: Literal['round-robin', 'least-loaded', 'random', 'prefix-aware'] = ..., host: Literal['measured',
    'polling', 'python-threads'] = ..., launch_s: float | None = ..., completion_s: float | None = ..., handoff_s:
    float | None = ..., goodput: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., metric_percentiles: float |
    Sequence[float] = ..., warmup_requests: int = ..., steady: bool = ..., detailed: bool = ..., model: str |
    PathLike[str] | None = ..., random_prefix_len: int | None = ..., prefix_repetition_prefix_len: int | None = ...,
    prefix_repetition_suffix_len: int | None = ..., prefix_repetition_num_prefixes: int | None = ...,
    prefix_repetition_output_len: int | None = ...,
) -> Run:
    """One run: an architecture, under a load, on a GPU.

    Returns: the run, which prints as a table and has its records as frames.

    Main options:

    - arch: Serving architecture: colocated (one batch, as in vLLM), pd (a prefill lane) or pdv (three lanes). More:
        autoregressive, baseline, pdv-unified, pdv-hybrid, adaptive, pdv-ahead, or your own policy as file.py:Class.
        (default: colocated)
    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - request_rate: Requests per second. inf sends all immediately, or as soon as --max-concurrency allows. (default:
        inf)
    - max_concurrency: Maximum number of concurrent requests; with --request-rate inf this is a closed loop.
    - num_prompts: Number of requests; default: 1000, or the whole trace if it is replayed.
    - goodput: Service levels of ttft, tpot or e2el in ms: ttft:500 tpot:50, or with a percentile p99_ttft:200.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - num_speculative_tokens: Draft length k, or the starting value if a controller changes it. 0: no speculation, the
        drafter is not used. (default: 4)
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - preset: Settings of options that are not given: those of PD-Verify.
    """

def speedup(
    *, preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str] | None = ..., num_runs: int =
    ..., jobs: int | None = ..., concurrency: int | Sequence[int] = ..., dataset_name: Literal['random',
    'prefix_repetition', 'sharegpt', 'custom', 'azure', 'burstgpt', 'mooncake'] = ..., dataset_path: str |
    PathLike[str] | None = ..., tokenizer: str | PathLike[str] | None = ..., max_model_len: int | None = ...,
    num_prompts: int | None = ..., columns: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., input_len: int |
    None = ..., output_len: int | None = ..., random_range_ratio: float | None = ..., prefix_len: int | None = ...,
    num_prefixes: int | None = ..., num_turns: int = ..., think_time_s: float = ..., seed: int = ..., acceptance_rate:
    float | None = ..., acceptance_concentration: float | None = ..., synthetic_acceptance_rates: float |
    Sequence[float] = ..., acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] |
    None = ..., pair: str | PathLike[str] = ..., num_speculative_tokens: int | Sequence[int] = ..., drafter:
    Literal['model', 'pard', 'eagle3', 'p-eagle', 'dflash', 'dspark', 'mtp', 'ngram', 'suffix', 'none'] | None = ...,
    draft_vocab: int | None = ..., max_num_seqs: int = ..., max_draft_batch: int | None = ..., max_verify_batch: int |
    None = ..., max_num_batched_tokens: int | None = ..., attention_dp_timeout_iters: int | None = ...,
    attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ..., async_scheduling: bool |
    None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ..., enable_prefix_caching: bool =
    ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto', 'fp8'] = ..., expert_overlap: float
    | None = ..., num_workers: int = ..., max_decode_queue: int = ..., verify_gather: Literal['auto', 'always',
    'never'] = ..., admission_factor: float = ..., hybrid_threshold: int = ..., ahead_fan: int | None = ..., priority:
    Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ..., gpu: str | PathLike[str] = ..., profile: str
    | PathLike[str] | None = ..., machine: str | PathLike[str] | None = ..., engine: str | PathLike[str] | None = ...,
    contention: Literal['fluid', 'serial', 'max'] = ..., padding: Literal['profile', 'vllm', 'sglang', 'tensorrt-llm']
    = ..., gpu_memory_utilization: float = ..., kv_capacity_tokens: int | None = ..., kv_offload_gb: float = ...,
    kv_offload_ssd_gb: float = ..., kv_offload_link: Literal['pcie5', 'pcie4'] = ..., tensor_parallel_size: int = ...,
    draft_tensor_parallel_size: int | None = ..., data_parallel_size: int = ..., enable_expert_parallel: bool = ...,
    all2all_backend: Literal['allgather_reducescatter', 'deepep_low_latency', 'deepep_high_throughput',
    'flashinfer_nvlink_two_sided'] | None = ..., enable_eplb: bool = ..., num_redundant_experts: int = ..., place: str
    | PathLike[str] | Sequence[str | PathLike[str]] = ..., disaggregate: str | PathLike[str] | None = ...,
    prefill_tensor_parallel_size: int | None = ..., prefill_data_parallel_size: int | None = ..., kv_link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer:
    Literal['layers', 'prompt'] = ..., draft_kv: Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] |
    Sequence[str | PathLike[str]] = ..., link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr',
    '400gbe', '100gbe'] = ..., replicas: int = ..., router: Literal['round-robin', 'least-loaded', 'random',
    'prefix-aware'] = ..., host: Literal['measured', 'polling', 'python-threads'] = ..., launch_s: float | None = ...,
    completion_s: float | None = ..., handoff_s: float | None = ..., model: str | PathLike[str] | None = ...,
    random_prefix_len: int | None = ..., prefix_repetition_prefix_len: int | None = ..., prefix_repetition_suffix_len:
    int | None = ..., prefix_repetition_num_prefixes: int | None = ..., prefix_repetition_output_len: int | None = ...,
) -> Speedup:
    """Show what drafting gains over plain decoding: by drafter, draft length and load, and where it is a loss.

    Returns: an answer, which prints as text.

    Main options:

    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - concurrency: Concurrent requests of closed loops. (default: 1,8,64,256)
    - num_prompts: Requests per run, a fifth of which is the start and excluded (capacity: the least number measured).
        Default: all of the window if a file is replayed, else as many as the load needs. advise without a load: a
        batch job, all of whose requests arrive at the start.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - num_speculative_tokens: Draft lengths. (default: 1,2,3,5)
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - num_runs: Replications of each simulation, with the same seeds. (default: 3)
    - preset: Settings of options that are not given: those of PD-Verify.
    """

def sweep(
    *, preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str] | None = ..., arch: str |
    type[Policy] | Sequence[str | type[Policy]] = ..., concurrency: int | Sequence[int] = ..., request_rate: float |
    Sequence[float] = ..., num_runs: int = ..., vary: str | PathLike[str] | Sequence[str | PathLike[str]] |
    Mapping[str, Any] = ..., jobs: int | None = ..., scheduler: str | PathLike[str] | None = ..., dataset_name:
    Literal['random', 'prefix_repetition', 'sharegpt', 'custom', 'azure', 'burstgpt', 'mooncake'] = ..., dataset_path:
    str | PathLike[str] | None = ..., tokenizer: str | PathLike[str] | None = ..., max_model_len: int | None = ...,
    num_prompts: int = ..., burstiness: float = ..., max_concurrency: int | None = ..., use_trace_timestamps: bool =
    ..., window: str | PathLike[str] = ..., columns: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    input_len: int | None = ..., output_len: int | None = ..., random_range_ratio: float = ..., prefix_len: int | None
    = ..., num_prefixes: int | None = ..., num_turns: int = ..., think_time_s: float = ..., seed: int = ...,
    acceptance_rate: float | None = ..., acceptance_concentration: float | None = ..., synthetic_acceptance_rates:
    float | Sequence[float] = ..., acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str |
    PathLike[str] | None = ..., pair: str | PathLike[str] = ..., num_speculative_tokens: int = ..., drafter:
    Literal['model', 'pard', 'eagle3', 'p-eagle', 'dflash', 'dspark', 'mtp', 'ngram', 'suffix', 'none'] | None = ...,
    draft_vocab: int | None = ..., controller: Literal['fixed', 'feedback', 'goodput', 'table',
    'adaptive-verification'] = ..., num_speculative_tokens_per_batch_size: str | PathLike[str] | Sequence[str |
    PathLike[str]] = ..., adaptive_verification_profile_context_len: int = ..., min_speculative_tokens: int | None =
    ..., max_speculative_tokens: int = ..., max_num_seqs: int = ..., max_draft_batch: int | None = ...,
    max_verify_batch: int | None = ..., max_num_batched_tokens: int | None = ..., attention_dp_timeout_iters: int |
    None = ..., attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ...,
    async_scheduling: bool | None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ...,
    enable_prefix_caching: bool = ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto',
    'fp8'] = ..., expert_overlap: float | None = ..., num_workers: int = ..., max_decode_queue: int = ...,
    verify_gather: Literal['auto', 'always', 'never'] = ..., admission_factor: float = ..., hybrid_threshold: int =
    ..., ahead_fan: int | None = ..., priority: Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ...,
    gpu: str | PathLike[str] = ..., profile: str | PathLike[str] | None = ..., machine: str | PathLike[str] | None =
    ..., engine: str | PathLike[str] | None = ..., band: bool = ..., contention: Literal['fluid', 'serial', 'max'] =
    ..., padding: Literal['profile', 'vllm', 'sglang', 'tensorrt-llm'] = ..., gpu_memory_utilization: float = ...,
    kv_capacity_tokens: int | None = ..., kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link:
    Literal['pcie5', 'pcie4'] = ..., tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ...,
    data_parallel_size: int = ..., enable_expert_parallel: bool = ..., all2all_backend:
    Literal['allgather_reducescatter', 'deepep_low_latency', 'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] |
    None = ..., enable_eplb: bool = ..., num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str |
    PathLike[str]] = ..., disaggregate: str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None =
    ..., prefill_data_parallel_size: int | None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv:
    Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ...,
    router: Literal['round-robin', 'least-loaded', 'random', 'prefix-aware'] = ..., host: Literal['measured',
    'polling', 'python-threads'] = ..., launch_s: float | None = ..., completion_s: float | None = ..., handoff_s:
    float | None = ..., goodput: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., metric_percentiles: float |
    Sequence[float] = ..., warmup_requests: int = ..., steady: bool = ..., detailed: bool = ..., model: str |
    PathLike[str] | None = ..., random_prefix_len: int | None = ..., prefix_repetition_prefix_len: int | None = ...,
    prefix_repetition_suffix_len: int | None = ..., prefix_repetition_num_prefixes: int | None = ...,
    prefix_repetition_output_len: int | None = ...,
) -> SweepPoints:
    """Simulate loads x architectures x varied flags x replications on all cores; print tables, save rows and a plot.

    Returns: the points as a frame that prints as a summary and has `plot()`, one row per run. Nothing is written.

    Main options:

    - arch: Serving architectures to compare. (default: autoregressive,colocated,pd,pdv)
    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - request_rate: Loads as requests per second (open loop); default without --concurrency: 1,2,4,8,16,32,64.
    - concurrency: Loads as concurrent requests (closed loop), e.g. 1,2,4,8.
    - max_concurrency: Maximum number of concurrent requests; with --request-rate inf this is a closed loop.
    - num_prompts: Number of requests; default: 1000, or the whole trace if it is replayed.
    - goodput: Service levels of ttft, tpot or e2el in ms: ttft:500 tpot:50, or with a percentile p99_ttft:200.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - num_speculative_tokens: Draft length k, or the starting value if a controller changes it. 0: no speculation, the
        drafter is not used. (default: 4)
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - num_runs: Replications of each point; replication i has seed --seed + i, the same for every architecture.
        (default: 1)
    - preset: Settings of options that are not given: those of PD-Verify.
    """

def traffic(
    file: str | PathLike[str], *, dataset_name: Literal['custom', 'azure', 'burstgpt', 'mooncake'] | None = ...,
    columns: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., tokenizer: str | PathLike[str] | None = ...,
) -> TraceAccount:
    """Summarise and plot a trace: rates over time, burstiness, lengths, acceptance and sessions.

    Returns: the trace and its statistics, which print as text and have `plot()`.

    Main options:
    """

def validate(
    runs: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., *, pair: str | PathLike[str] | None = ..., arch:
    str | type[Policy] = ..., bench: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., acceptance_rate: float
    = ..., acceptance_concentration: float | None = ..., synthetic_acceptance_rates: float | Sequence[float] = ...,
    acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] | None = ...,
    num_speculative_tokens: int | None = ..., drafter: Literal['model', 'pard', 'eagle3', 'p-eagle', 'dflash',
    'dspark', 'mtp', 'ngram', 'suffix', 'none'] | None = ..., draft_vocab: int | None = ..., controller:
    Literal['fixed', 'feedback', 'goodput', 'table', 'adaptive-verification'] = ...,
    num_speculative_tokens_per_batch_size: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    adaptive_verification_profile_context_len: int = ..., min_speculative_tokens: int | None = ...,
    max_speculative_tokens: int = ..., max_num_seqs: int = ..., max_draft_batch: int | None = ..., max_verify_batch:
    int | None = ..., max_num_batched_tokens: int = ..., attention_dp_timeout_iters: int | None = ...,
    attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ..., async_scheduling: bool |
    None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ..., enable_prefix_caching: bool =
    ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto', 'fp8'] = ..., expert_overlap: float
    | None = ..., num_workers: int = ..., max_decode_queue: int = ..., verify_gather: Literal['auto', 'always',
    'never'] = ..., admission_factor: float = ..., hybrid_threshold: int = ..., ahead_fan: int | None = ..., priority:
    Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ..., gpu: str | PathLike[str] = ..., profile: str
    | PathLike[str] | None = ..., machine: str | PathLike[str] | None = ..., engine: str | PathLike[str] | None = ...,
    band: bool = ..., contention: Literal['fluid', 'serial', 'max'] = ..., padding: Literal['profile', 'vllm',
    'sglang', 'tensorrt-llm'] = ..., gpu_memory_utilization: float = ..., kv_capacity_tokens: int | None = ...,
    kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link: Literal['pcie5', 'pcie4'] = ...,
    tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ..., data_parallel_size: int = ...,
    enable_expert_parallel: bool = ..., all2all_backend: Literal['allgather_reducescatter', 'deepep_low_latency',
    'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] | None = ..., enable_eplb: bool = ...,
    num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., disaggregate:
    str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None = ..., prefill_data_parallel_size: int |
    None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] | None =
    ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv: Literal['sent', 'recomputed'] = ..., cards: str |
    PathLike[str] | Sequence[str | PathLike[str]] = ..., link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ..., router: Literal['round-robin', 'least-loaded',
    'random', 'prefix-aware'] = ..., held_out: bool = ..., rows: int | None = ..., jobs: int | None = ..., silicon:
    Literal['all', 'vllm', 'sglang', 'trtllm'] | None = ..., kind: Literal['plain', 'expert-parallel', 'apart'] | None
    = ..., speculation: Literal['all', 'vllm', 'sglang', 'trtllm'] | None = ..., own_policies: bool = ..., ablations:
    bool = ..., model: str | PathLike[str] | None = ...,
) -> Compared:
    """Compare measurements with simulations; nothing is served or written.

    Returns: measurements and what is predicted for them. Prints as tables.

    Main options:

    - arch: Architecture of the benchmarked server; vLLM is colocated. (default: colocated)
    - pair: The models of the benchmarked server, as draft:target, or the target alone (or --model).
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - num_speculative_tokens: Draft length of the benchmarked server; default: that of the result.
    - acceptance_rate: Probability that a draft token is accepted (Leviathan's alpha), if no other form is given.
        (default: 0.6)
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    """

def winner_map(
    *, preset: Literal['pd-verify'] | None = ..., acceptance_from: str | PathLike[str] | None = ..., arch: str |
    type[Policy] | Sequence[str | type[Policy]] = ..., attainment: float = ..., num_runs: int = ..., jobs: int | None =
    ..., objective: Literal['headroom', 'goodput', 'throughput', 'ttft', 'tpot', 'e2el'] | None = ..., indifference:
    float = ..., y: Literal['acceptance', 'size', 'card'] = ..., concurrency: int | Sequence[int] = ..., request_rate:
    float | Sequence[float] = ..., acceptances: float | Sequence[float] = ..., pairs: str | PathLike[str] |
    Sequence[str | PathLike[str]] = ..., pair_acceptance: float | Sequence[float] = ..., try_cards: str | PathLike[str]
    | Sequence[str | PathLike[str]] = ..., gpus: int = ..., against: str | PathLike[str] | None = ..., dataset_name:
    Literal['random', 'prefix_repetition', 'sharegpt', 'custom', 'azure', 'burstgpt', 'mooncake'] = ..., dataset_path:
    str | PathLike[str] | None = ..., tokenizer: str | PathLike[str] | None = ..., max_model_len: int | None = ...,
    num_prompts: int | None = ..., burstiness: float = ..., use_trace_timestamps: bool | None = ..., window: str |
    PathLike[str] | None = ..., columns: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., input_len: int |
    None = ..., output_len: int | None = ..., random_range_ratio: float | None = ..., prefix_len: int | None = ...,
    num_prefixes: int | None = ..., num_turns: int = ..., think_time_s: float = ..., seed: int = ..., acceptance_rate:
    float | None = ..., acceptance_concentration: float | None = ..., synthetic_acceptance_rates: float |
    Sequence[float] = ..., acceptance_model: str | PathLike[str] | None = ..., acceptance_trace: str | PathLike[str] |
    None = ..., pair: str | PathLike[str] = ..., num_speculative_tokens: int | None = ..., drafter: Literal['model',
    'pard', 'eagle3', 'p-eagle', 'dflash', 'dspark', 'mtp', 'ngram', 'suffix', 'none'] | None = ..., draft_vocab: int |
    None = ..., controller: Literal['fixed', 'feedback', 'goodput', 'table', 'adaptive-verification'] | None = ...,
    num_speculative_tokens_per_batch_size: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    adaptive_verification_profile_context_len: int = ..., min_speculative_tokens: int | None = ...,
    max_speculative_tokens: int = ..., max_num_seqs: int | None = ..., max_draft_batch: int | None = ...,
    max_verify_batch: int | None = ..., max_num_batched_tokens: int | None = ..., attention_dp_timeout_iters: int |
    None = ..., attention_dp_batching_wait_iters: int = ..., max_prompts_per_forward: int | None = ...,
    async_scheduling: bool | None = ..., enforce_eager: bool = ..., kv_cache: Literal['paged', 'reserved'] = ...,
    enable_prefix_caching: bool = ..., quantization: Literal['fp8'] | None = ..., kv_cache_dtype: Literal['auto',
    'fp8'] = ..., expert_overlap: float | None = ..., num_workers: int = ..., max_decode_queue: int = ...,
    verify_gather: Literal['auto', 'always', 'never'] = ..., admission_factor: float = ..., hybrid_threshold: int =
    ..., ahead_fan: int | None = ..., priority: Literal['none', 'stream', 'dynamic', 'preemptive', 'partition'] = ...,
    gpu: str | PathLike[str] = ..., profile: str | PathLike[str] | None = ..., machine: str | PathLike[str] | None =
    ..., engine: str | PathLike[str] | None = ..., contention: Literal['fluid', 'serial', 'max'] = ..., padding:
    Literal['profile', 'vllm', 'sglang', 'tensorrt-llm'] = ..., gpu_memory_utilization: float = ...,
    kv_capacity_tokens: int | None = ..., kv_offload_gb: float = ..., kv_offload_ssd_gb: float = ..., kv_offload_link:
    Literal['pcie5', 'pcie4'] = ..., tensor_parallel_size: int = ..., draft_tensor_parallel_size: int | None = ...,
    data_parallel_size: int = ..., enable_expert_parallel: bool = ..., all2all_backend:
    Literal['allgather_reducescatter', 'deepep_low_latency', 'deepep_high_throughput', 'flashinfer_nvlink_two_sided'] |
    None = ..., enable_eplb: bool = ..., num_redundant_experts: int = ..., place: str | PathLike[str] | Sequence[str |
    PathLike[str]] = ..., disaggregate: str | PathLike[str] | None = ..., prefill_tensor_parallel_size: int | None =
    ..., prefill_data_parallel_size: int | None = ..., kv_link: Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4',
    'infiniband-xdr', '400gbe', '100gbe'] | None = ..., kv_transfer: Literal['layers', 'prompt'] = ..., draft_kv:
    Literal['sent', 'recomputed'] = ..., cards: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., link:
    Literal['nvlink4', 'nvlink5', 'pcie5', 'pcie4', 'infiniband-xdr', '400gbe', '100gbe'] = ..., replicas: int = ...,
    router: Literal['round-robin', 'least-loaded', 'random', 'prefix-aware'] = ..., host: Literal['measured',
    'polling', 'python-threads'] = ..., launch_s: float | None = ..., completion_s: float | None = ..., handoff_s:
    float | None = ..., goodput: str | PathLike[str] | Sequence[str | PathLike[str]] = ..., metric_percentiles: float |
    Sequence[float] = ..., model: str | PathLike[str] | None = ..., random_prefix_len: int | None = ...,
    prefix_repetition_prefix_len: int | None = ..., prefix_repetition_suffix_len: int | None = ...,
    prefix_repetition_num_prefixes: int | None = ..., prefix_repetition_output_len: int | None = ...,
) -> WinnerMap:
    """Map the best architecture over load and acceptance, model size or GPU.

    Returns: an answer, which prints as text.

    Main options:

    - arch: Serving architectures to compare; default: autoregressive and colocated, which engines serve, and with
        --engine pdvsim, the only one that has lanes, pd and pdv.
    - pair: Models as draft:target (name, Hugging Face id or config.json), or a target alone (or --model). (default:
        llama-3.2-1b:llama-3.1-8b)
    - pairs: Pairs, as draft:target; the map orders them by the ratio of their sizes. Only with --y size.
    - drafter: Draft model, eagle3 or mtp head, ngram or suffix search, or none; in parallel: pard (a draft model),
        p-eagle or dflash or dspark (heads). Default: as in --pair.
    - gpu: A GPU of `pdvsim profile --list`, or a TOML file that describes your own (docs/your-hardware.md). (default:
        h200)
    - gpus: Number of GPUs. Replicas, tensor parallelism and split lanes are compared, each tuned. (default: 1)
    - tensor_parallel_size: Number of GPUs the target is sharded over: 1, 2, 4 or 8. With --place, each GPU that holds
        the target is a group of this size. (default: 1)
    - replicas: Number of independent copies of the whole server, with a router. (default: 1)
    - request_rate: Loads in requests per second; default for a trace: around its rate.
    - concurrency: Loads as concurrent requests (closed loop); default without --request-rate: 1,4,16,64.
    - num_prompts: Requests per run, a fifth of which is the start and excluded (capacity: the least number measured).
        Default: all of the window if a file is replayed, else as many as the load needs. advise without a load: a
        batch job, all of whose requests arrive at the start.
    - goodput: Service levels of ttft, tpot or e2el in ms: ttft:500 tpot:50, or with a percentile p99_ttft:200.
    - dataset_path: File of the data set: a published one, or your own CSV or JSONL of arrivals and tokens
        (docs/traffic.md). Only with --dataset-name sharegpt, custom, azure, burstgpt or mooncake.
    - input_len: Prompt tokens; default: 1024 for random, else the data set's own.
    - output_len: Output tokens; default: 128 for random, else the data set's own.
    - num_speculative_tokens: Draft length k for every architecture; default: the best of each, from 0 (no drafts) to
        8.
    - acceptance_rate: Chance that a draft token is accepted; default: recorded for the drafter, else 0.6 (assumed).
    - acceptance_model: Acceptance as measured for Llama-3.1-8B: cnn, gsm8k, instructcoder or sharegpt, followed by
        -eagle3, -ngram or -suffix.
    - acceptance_from: Acceptance from a file: vLLM's /metrics, its bench result, or rounds.
    - num_runs: Replications of each result; replication i has seed --seed + i, the same for every architecture.
        (default: 5)
    - preset: Settings of options that are not given: those of PD-Verify.
    """
