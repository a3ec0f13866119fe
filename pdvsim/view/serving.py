"""One run as a table in the layout of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.summary import STEPS, percentile_name
from pdvsim.sim.records import LANES
from pdvsim.view.comparison import LATENCIES, outside
from pdvsim.view.table import SHORT_TEXT, TextTable, banded, cell, folded, mean_of, missing, terminal_width

Section = tuple[str, list[tuple[str, str]]]
WIDTH = 50
TOTALS = (
    ("Successful requests:", "completed", 0),
    ("Failed requests:", "failed", 0),
    ("Maximum request concurrency:", "max_concurrency", 0),
    ("Request rate configured (RPS):", "request_rate", 2),
    ("Benchmark duration (s):", "duration", 2),
    ("Total input tokens:", "total_input_tokens", 0),
    ("Total generated tokens:", "total_output_tokens", 0),
    ("Request throughput (req/s):", "request_throughput", 2),
    ("Request goodput (req/s):", "request_goodput", 2),
    ("Output token throughput (tok/s):", "output_throughput", 2),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", 2),
    ("Peak concurrent requests:", "max_concurrent_requests", 2),
    ("Total token throughput (tok/s):", "total_token_throughput", 2),
)
SPECULATION = (
    ("Acceptance rate per drafted token (%):", "spec_decode_acceptance_rate", 2),  # vLLM's
    ("Acceptance rate per judged token (%):", "spec_decode_judged_acceptance_rate", 2),
    ("Acceptance length:", "spec_decode_acceptance_length", 2),
    ("Drafts:", "spec_decode_num_drafts", 0),
    ("Draft tokens:", "spec_decode_draft_tokens", 0),
    ("Judged tokens:", "spec_decode_judged_tokens", 0),
    ("Accepted tokens:", "spec_decode_accepted_tokens", 0),
)
PREFIXES = (
    ("Queried prompt tokens:", "prefix_cache_queries", 0),
    ("Cached prompt tokens:", "prefix_cache_hits", 0),
    ("Hit rate (%):", "prefix_cache_hit_rate", 2),
    ("Mean cached tokens of a request:", "mean_num_cached_tokens", 2),
    ("Mean TTFT of hits (ms):", "mean_ttft_hit_ms", 2),
    ("Mean TTFT of misses (ms):", "mean_ttft_miss_ms", 2),
    ("Cached tokens on the GPU:", "kv_gpu_hit_tokens", 0),
    ("Cached tokens fetched from host:", "kv_host_hit_tokens", 0),
    ("Cached tokens fetched from SSD:", "kv_ssd_hit_tokens", 0),
    ("On host, but faster to prefill:", "kv_host_slower_tokens", 0),
    ("On SSD, but faster to prefill:", "kv_ssd_slower_tokens", 0),
    ("Prefill of 1,000 tokens (ms):", "kv_prefill_ms", 2),
    ("Fetch of 1,000 from host (ms):", "kv_host_fetch_ms", 2),
    ("Fetch of 1,000 from SSD (ms):", "kv_ssd_fetch_ms", 2),
    ("Evicted blocks:", "prefix_cache_evictions", 0),
    ("Peak KV tokens:", "kv_peak_tokens", 0),
    ("Peak shared KV tokens:", "kv_peak_shared_tokens", 0),
    ("Conversations:", "conversations", 0),
    ("GPU-seconds per conversation:", "gpu_s_per_conversation", 2),
)
PREEMPTION = (("Preemptions:", "preemptions", 0), ("Recomputed tokens:", "recomputed_tokens", 0))


def serving_table(values: Mapping[str, Any], percentiles: Iterable[float]) -> str:
    """One load point in the layout of `vllm bench serve`, followed by lanes and request times."""
    lines: list[str] = []
    for title, rows in sections(values, percentiles):
        lines.append(f"{title:=^{WIDTH}}" if not lines else f"{title:-^{WIDTH}}")
        for label, text in rows:
            first, *more = folded(text, max(terminal_width() - 41, SHORT_TEXT))
            lines += [f"{label:<40} {first}".rstrip(), *(" " * 41 + rest for rest in more)]
    return "\n".join([*lines, "=" * WIDTH])


def serving_html(values: Mapping[str, Any], percentiles: Iterable[float]) -> str:
    """The same as HTML, for a notebook: a table per part, those after the latencies collapsed."""
    parts = sections(values, percentiles)
    first = 1 + sum(title in dict(LATENCIES.values()).values() for title, _ in parts)
    tables = [TextTable([{title.strip(): label, " ": text} for label, text in rows]).html() for title, rows in parts]
    return f"{''.join(tables[:first])}<details><summary>more</summary>{''.join(tables[first:])}</details>"


def sections(values: Mapping[str, Any], percentiles: Iterable[float]) -> list[Section]:
    """The parts of a serving table: titles, labels and formatted values. Absent values have no line."""
    parts: list[Section] = [(" Serving Benchmark Result ", _origin(values) + _lines(values, TOTALS))]
    for name, (short, title) in LATENCIES.items():
        marks = [("Mean", "mean"), ("Median", "median")]
        marks += [(percentile_name(p).upper(), percentile_name(p)) for p in percentiles]
        parts.append((title, _lines(values, [(f"{word} {short} (ms):", f"{key}_{name}_ms", 2) for word, key in marks])))
    speculation = _lines(values, SPECULATION)
    if speculation and "acceptance_source" in values:
        speculation.insert(0, ("Acceptance:", str(values["acceptance_source"])))
    per_position = values.get("spec_decode_per_position_acceptance_rates")
    if isinstance(per_position, Sequence):
        speculation += [(f"  Position {i} (%):", cell(rate, scale=100)) for i, rate in enumerate(per_position)]
    parts.append(("Speculative Decoding", speculation))
    happened = [line for line in PREEMPTION if getattr(values.get(line[1]), "mean", values.get(line[1]))]
    parts.append(("KV Cache", _lines(values, happened)))
    looked = "prefix_cache_queries" in values or "conversations" in values
    parts.append(("Prefix Cache", _lines(values, PREFIXES) if looked else []))
    batches = [(f"Mean {kind} batch (rows):", f"kinds_{kind}_mean_batch", 2) for kind in KINDS if kind != "prefill"]
    parts.append(("Batches", _lines(values, [("Mean prefill (tokens):", "kinds_prefill_mean_tokens", 2), *batches])))
    steps = [(f"{step.capitalize()} (ms):", f"breakdown_ms_{step}", 2) for step in STEPS]
    parts.append(("Mean Time of a Request", _lines(values, steps)))
    for lane in LANES:
        rows = (("busy", "utilisation"), ("bandwidth", "bandwidth_share"))
        shares = [
            (f"{label.capitalize()} (%):", cell(values[f"lanes_{lane}_{key}"], scale=100))
            for label, key in rows
            if f"lanes_{lane}_{key}" in values and not missing(values[f"lanes_{lane}_{key}"])
        ]
        rest = _lines(
            values,
            (("Launches:", f"lanes_{lane}_launches", 0), ("Mean queue depth:", f"lanes_{lane}_mean_queue_depth", 2)),
        )
        parts.append((f"Lane: {lane}", shares + rest))
    return [(title, rows) for title, rows in parts if rows]


def _origin(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Architecture, models, GPU and foundation of a run."""
    labels = (("Architecture:", "arch"), ("Models (draft:target):", "pair"), ("GPU:", "gpu"), ("Profile:", "profile"))
    rows = [(label, str(values[key])) for label, key in labels if values.get(key) is not None]
    gpus = mean_of(values.get("gpus"), 0.0)
    rows += [("GPUs in total:", f"{gpus:.0f}")] if gpus > 1 else []
    rows += [("Foundation:", str(values["foundation"]))] if "foundation" in values else []
    bar = mean_of(values.get("forward_error_bar"), 0.0)
    rows += [("Error bar of forward times, 95%:", f"{bar:.0%}")] if bar else []
    rows += [("Error range (in brackets):", str(values["error_range"]))] if "error_range" in values else []
    beyond = outside(values)
    rows += [("Outside the measured range:", beyond)] if beyond else []
    return rows + ([("Stability:", str(values["stability"]))] if "stability" in values else [])


def _lines(values: Mapping[str, Any], labels: Iterable[tuple[str, str, int]]) -> list[tuple[str, str]]:
    shown = ((label, key, decimals) for label, key, decimals in labels if values.get(key) != math.inf)
    return [(label, banded(values, key, decimals)) for label, key, decimals in shown if not missing(values.get(key))]
