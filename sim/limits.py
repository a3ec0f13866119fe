"""The one place for limits: the smallest and largest value of every number that a user can give, and sizes of inputs.

`RANGES` is by field name, since flags are flat: one name means one thing in every command. A new numeric field of a
configuration needs a line here, and a test says so. The ends are what is sensible, not what is possible: beyond them a
value is a slip (milliseconds for seconds) or asks for more work than anyone waits for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Annotated, Any, TypeVar

T = TypeVar("T")
INTERNAL = "internal"
Internal = Annotated[T, INTERNAL]  # a field that no option sets

MAX_DRAFT = 32  # longest draft that a verify forward is modelled for
MAX_REQUESTS = 10_000_000
MAX_TOKENS = 10_000_000  # of a prompt or an output: beyond any context window
MAX_OUTPUT_TOKENS = 1 << 32  # of all requests in memory: each is a byte of memory
MAX_POINTS = 100_000  # of one sweep, comparison, map or search
MAX_RUNS = 10_000  # replications

MIB = 2**20
MAX_CONFIG_BYTES = 64 * MIB  # of a file that describes something: JSON, TOML
MAX_DATA_BYTES = 4096 * MIB  # of a data set, a trace or a table
MAX_LINE_CHARS = 32 * MIB  # of a trace


@dataclass(frozen=True)
class Range:
    """Values from `low` to `high`, and infinity where `or_inf`."""

    low: float
    high: float
    or_inf: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value is one of them; nan is not."""
        return self.low <= value <= self.high or (self.or_inf and value == math.inf)

    def __str__(self) -> str:
        return f"{_figure(self.low)} to {_figure(self.high)}{', or inf' if self.or_inf else ''}"


def _figure(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"


_SHARE = Range(0, 1)
_PART = Range(0, 0.99)  # of which something must be left
_DRAFT = Range(1, MAX_DRAFT)
_QUEUE = Range(1, 1_000_000)
_RATE = Range(1e-6, 1e9, or_inf=True)
_USD = Range(0.0001, 1e6)  # an hour of a GPU
_COST_S = Range(0, 1)
_SPEND_S = Range(0.01, 30 * 86400)

RANGES: dict[str, Range] = {
    # suffix decoding
    "suffix_decoding_max_tree_depth": Range(2, 256),
    "suffix_decoding_max_cached_requests": Range(0, MAX_REQUESTS),
    "suffix_decoding_max_spec_factor": Range(0, 64),
    "suffix_decoding_min_token_prob": Range(0, 1),
    # traffic
    "num_prompts": Range(1, MAX_REQUESTS),
    "prompts": Range(1, MAX_REQUESTS),
    "least": Range(1, MAX_REQUESTS),
    "service_s": Range(0, 1e9),
    "transient_s": Range(0, 1e9),
    "share": Range(0.01, 1),
    "window_prompts": Range(-1, MAX_REQUESTS),
    "request_rate": _RATE,
    "burstiness": Range(0.001, 1e6),
    "max_concurrency": Range(1, MAX_REQUESTS),
    "input_len": Range(1, MAX_TOKENS),
    "output_len": Range(1, MAX_TOKENS),
    "random_range_ratio": _PART,
    "prefix_len": Range(0, MAX_TOKENS),
    "num_prefixes": Range(1, MAX_REQUESTS),
    "num_turns": Range(1, 10_000),
    "think_time_s": Range(0, 86_400),
    "max_model_len": Range(2, 2 * MAX_TOKENS),
    "model_context": Range(1, 1_000_000_000),
    "seed": Range(0, 2**53),
    # acceptance
    "acceptance_rate": _SHARE,
    "acceptance_concentration": Range(0.001, 1e9),
    "synthetic_acceptance_rates": _SHARE,
    # server
    "num_speculative_tokens": Range(0, MAX_DRAFT),
    "min_speculative_tokens": Range(0, MAX_DRAFT),
    "max_speculative_tokens": _DRAFT,
    "max_num_seqs": Range(1, 65_536),
    "max_draft_batch": Range(1, 65_536),
    "max_verify_batch": Range(1, 65_536),
    "max_num_batched_tokens": Range(1, MAX_TOKENS),
    "max_prompts_per_forward": Range(1, 65_536),
    "expert_overlap": Range(0.01, 1),
    "num_workers": Range(1, 4096),
    "max_decode_queue": _QUEUE,
    "admission_factor": Range(0.001, 1e6),
    "hybrid_threshold": Range(0, 1_000_000),
    "ahead_fan": Range(0, 64),
    "ahead_exponent": Range(0, 10),
    # hardware
    "gpu_memory_utilization": Range(0.01, 1),
    "kv_capacity_tokens": Range(1, 10**12),
    "tensor_parallel_size": Range(1, 8),
    "draft_tensor_parallel_size": Range(1, 8),
    "replicas": Range(1, 1024),
    # host
    "launch_s": _COST_S,
    "completion_s": _COST_S,
    "handoff_s": _COST_S,
    "idle_poll_s": _COST_S,
    "idle_poll_cost_s": _COST_S,
    "notify_s": _COST_S,
    # scoring
    "metric_percentiles": Range(0, 100),
    "warmup_requests": Range(0, MAX_REQUESTS),
    # the commands' own
    "concurrency": Range(1, MAX_REQUESTS),
    "num_runs": Range(1, MAX_RUNS),
    "repeats": Range(1, MAX_RUNS),
    "jobs": Range(1, 1024),
    "rows": Range(1, 1_000_000),
    "budget": Range(1, MAX_POINTS),
    "speed": Range(0.01, 1e6, or_inf=True),
    "port": Range(0, 65_535),
    "budget_s": _SPEND_S,
    "pair_budget_s": _SPEND_S,
    "minutes": Range(0, 30 * 1440, or_inf=True),
    "attainment": Range(0.01, 1),
    "gpus": Range(1, 1024),
    "most_gpus": Range(0, 1024),
    "gpu_hour_usd": _USD,
    "usd": _USD,
    "tolerance": Range(0.001, 0.5),
    "indifference": _PART,
    "draft_lengths": Range(0, MAX_DRAFT),
    "max_k": _DRAFT,
    "against": Range(0, MAX_DRAFT),
    "acceptances": _SHARE,
    "pair_acceptance": _SHARE,
    "places": _SHARE,  # of a map, where they are acceptance rates
}


def check_ranges(config: Any, **own: Range) -> None:
    """Refuse a dataclass with a number outside its range; `own` are ranges where a command differs from the others."""
    for name, usual in _ranges(type(config)):  # type: ignore[arg-type]
        value, span = getattr(config, name), own.get(name, usual)
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, (int, float)):
                check(name.replace("_", "-"), item, span)


def check(name: str, value: float, span: Range) -> None:
    """A ValueError of one line that states the range if a number is outside it."""
    if not span.holds(value):
        raise ValueError(f"{name} must be {span}, got {shown(value)}")


def check_list(name: str, values: Sequence[Any], needed: bool = True) -> None:
    """A ValueError of one line if a list is empty, where one value is needed, or names a value twice."""
    if needed and not values:
        raise ValueError(f"{name} needs at least one value")
    if len(set(values)) != len(values):
        raise ValueError(f"{name} names a value twice: {', '.join(map(str, values))}")


def check_points(what: str, *counts: int) -> None:
    """The same for a product of lists, before it is spelt out."""
    total = math.prod(counts)
    if total > MAX_POINTS:
        raise ValueError(f"{' x '.join(map(str, counts))} {what} are {total}; at most {MAX_POINTS} are accepted")


def shown(value: float) -> str:
    """A number as an error quotes it; Python refuses to spell out one of thousands of digits."""
    return str(value) if not isinstance(value, int) or abs(value) < 10**18 else "a number of 19 or more digits"


@cache
def _ranges(config: type) -> tuple[tuple[str, Range], ...]:
    return tuple((f.name, RANGES[f.name]) for f in fields(config) if f.name in RANGES)
