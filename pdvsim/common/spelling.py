"""Names of options in other programs, and what an unknown name may have meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

MEANT = {  # names of options in other programs
    "request_rate": ("rate", "qps", "rps", "arrival_rate", "req_rate"),
    "max_concurrency": ("users", "clients", "num_users"),
    "num_prompts": ("requests", "num_requests", "prompts", "n"),
    "num_runs": ("runs", "seeds", "repeats", "replications", "num_seeds"),
    "tensor_parallel_size": ("tp", "tp_size", "tensor_parallel"),
    "data_parallel_size": ("dp", "dp_size", "enable_dp_attention", "enable_attention_dp"),
    "enable_expert_parallel": ("ep", "ep_size", "expert_parallel_size", "moe_ep_size", "moe_expert_parallel_size"),
    "all2all_backend": ("moe_a2a_backend", "deepep_mode"),
    "max_num_seqs": ("batch_size", "max_batch_size", "batch", "max_running_requests"),
    "max_num_batched_tokens": ("chunk", "chunk_size", "chunked_prefill_size", "prefill_chunk"),
    "num_speculative_tokens": ("k", "gamma", "draft_length", "spec_tokens", "speculative_num_draft_tokens"),
    "acceptance_rate": ("acceptance", "alpha", "accept_rate"),
    "goodput": ("slo", "slos", "sla"),
    "gpu": ("card", "device", "gpu_type"),
    "gpus": ("num_gpus", "n_gpus"),
    "dataset_path": ("trace", "data", "dataset"),
    "input_len": ("prompt_len", "isl", "random_input_len"),
    "output_len": ("osl", "max_tokens", "random_output_len"),
    "drafter": ("speculative_algorithm", "spec_method", "method"),
    "output": ("out", "out_dir", "output_dir", "save_dir"),
    "arch": ("architecture", "policy", "policies", "architectures"),
    "pair": ("models", "draft_model", "speculative_model"),
    "jobs": ("workers", "processes", "threads"),
}  # fmt: skip
OTHER_SPELLINGS = {
    "model": "pair",
    "random_prefix_len": "prefix_len",
    "prefix_repetition_prefix_len": "prefix_len",
    "prefix_repetition_suffix_len": "input_len",
    "prefix_repetition_num_prefixes": "num_prefixes",
    "prefix_repetition_output_len": "output_len",
}
MISSING_OPTIONS = {
    "gpus": "--replicas copies the server, --tensor-parallel-size divides the model; pdvsim advise --gpus chooses",
    "dtype": "models are simulated in the precision of their configuration, or bf16 if it names none",
    "overwrite": "results are never overwritten: name another folder with -o, or continue with --resume",
    "force": "results are never overwritten: name another folder with -o, or continue with --resume",
}


def nearest(name: str, known: Iterable[str]) -> str:
    """A suggestion of the known name with the same meaning as `name`, or the most similar; empty if none."""
    known, dashes = list(known), "--" if name.startswith("--") else ""
    word = name.removeprefix("--").replace("-", "_")
    if word in MISSING_OPTIONS:
        return f": {MISSING_OPTIONS[word]}"
    meant = [meaning if not dashes else f"--{meaning.replace('_', '-')}" for meaning in MEANT if word in MEANT[meaning]]
    close = [one for one in meant if one in known] or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def other_spellings(known: Collection[str]) -> list[tuple[str, str]]:
    """Other names of these options, each with the name that it has here."""
    return [(other, name) for other, name in OTHER_SPELLINGS.items() if name in known and other not in known]
