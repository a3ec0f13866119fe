"""One run as a table in the layout of `vllm bench serve`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdvsim.sim.config import Scoring
from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.summary import STEPS, percentile_name
from pdvsim.sim.records import LANES
from pdvsim.view.comparison import LATENCIES, outside
from pdvsim.view.style import METRICS, PREEMPTION, PREFIXES, SPECULATION, TOTALS, metric_label, name_of
from pdvsim.view.table import SHORT_TEXT, TextTable, banded, cell, folded, mean_of, missing, terminal_width

Section = tuple[str, list[tuple[str, str]]]
WIDTH = 50
LANE_LINES = {
    "utilisation": ("Busy (%)", 2), "bandwidth_share": ("Bandwidth (%)", 2), "launches": ("Launches", 0),
    "mean_queue_depth": ("Mean queue depth", 2),
}  # fmt: skip
IN_TIME = 0.9  # share of the requests that must meet levels without a percentile


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
    marks = ["mean", "median", *map(percentile_name, percentiles)]
    parts: list[Section] = [(" Serving Benchmark Result ", _origin(values) + _lines(values, TOTALS))]
    parts += [
        (title, _lines(values, [f"{mark}_{name}_ms" for mark in marks])) for name, (_, title) in LATENCIES.items()
    ]
    speculation = _lines(values, SPECULATION)
    if speculation and "acceptance_source" in values:
        speculation.insert(0, ("Acceptance:", str(values["acceptance_source"])))
    per_position = values.get("spec_decode_per_position_acceptance_rates")
    if isinstance(per_position, Sequence):
        speculation += [(f"  Position {i} (%):", cell(rate, scale=100)) for i, rate in enumerate(per_position)]
    looked = "prefix_cache_queries" in values or "conversations" in values
    parts += [
        ("Speculative Decoding", speculation),
        ("KV Cache", _lines(values, [key for key in PREEMPTION if mean_of(values.get(key), 0.0)])),
        ("Prefix Cache", _lines(values, PREFIXES) if looked else []),
        ("Batches", _lines(values, [f"kinds_{k}_mean_{'tokens' if k == 'prefill' else 'batch'}" for k in KINDS])),
        ("Mean Time of a Request", _lines(values, {f"breakdown_ms_{s}": (f"{s.capitalize()} (ms)", 2) for s in STEPS})),
    ]
    for lane in LANES:
        shown = {f"lanes_{lane}_{key}": named for key, named in LANE_LINES.items()}
        parts.append((f"Lane: {lane}", _lines(values, shown)))
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
    rows += [("Service levels:", str(values["service_levels"]))] if "service_levels" in values else []
    return rows + ([("Stability:", str(values["stability"]))] if "stability" in values else [])


def levels_text(scoring: Scoring, values: Mapping[str, Any]) -> str:
    """Whether a run meets its service levels: each at its percentile, or all together for 90% of the requests."""
    parts = []
    for given, level in zip(scoring.goodput, scoring.levels(), strict=True):
        name = percentile_name(level.percent or 0.0)
        found = values.get(f"{name}_{level.metric}_ms")
        if level.percent is not None and found is not None:
            parts.append(f"{'meets' if found <= 1e3 * level.seconds else 'misses'} {given} ({found:.1f} ms)")
    together = [given for given, level in zip(scoring.goodput, scoring.levels(), strict=True) if level.percent is None]
    if together and values["request_throughput"]:
        share = values["request_goodput"] / values["request_throughput"]
        parts.append(f"{'meets' if share >= IN_TIME else 'misses'} {' '.join(together)} ({share:.1%} of the requests)")
    return ", ".join(parts) or f"{' '.join(scoring.goodput)}: add their percentiles to --metric-percentiles"


def _lines(values: Mapping[str, Any], keys: Iterable[str]) -> list[tuple[str, str]]:
    """The labels and cells of metrics; without those that are unknown or infinite. `keys` may map to their names."""
    named = keys if isinstance(keys, Mapping) else METRICS
    shown = {key: named.get(key) or (metric_label(key), 2) for key in keys
             if not missing(values.get(key)) and values[key] != math.inf}  # fmt: skip
    return [(f"{label}:", banded(values, key, decimals, name_of(key)[2])) for key, (label, decimals) in shown.items()]
