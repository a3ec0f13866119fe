"""Common style of plots and pages: colours, markers, names, units and foundations.

Architectures have the colours of seaborn's colour-blind palette, the same in every figure, by their rank in the table
of architectures; markers and dashes distinguish them without colour. Lanes, launches and steps have other colours.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING
from zlib import crc32

from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.summary import STEPS
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import LANES
from pdvsim.view.table import span_text

if TYPE_CHECKING:
    import pandas as pd

BLUE, ORANGE, GREEN, RED, PINK, BROWN, ROSE, GREY, YELLOW, SKY = (
    "#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#fbafe4", "#949494", "#ece133", "#56b4e9",
)  # fmt: skip
MINT, RASPBERRY, VIOLET, PINE, LIME, COCOA, MIST, LILAC, SLATE = (
    "#7fc8b2", "#e8437a", "#6a3fd0", "#0b7a75", "#a3c644", "#8a5a44", "#d5d8dd", "#b9b3de", "#52606d",
)  # fmt: skip
RAMP = ("#1b1044", "#4a2c82", "#7a4fb5", "#a67fd1", "#cdb4e6")  # for anything but architectures
ARCH_COLOURS = dict(zip(ARCHS, (GREY, BROWN, GREEN, BLUE, RED, PINK, ORANGE, SKY, YELLOW), strict=False))
ARCH_MARKERS = dict(zip(ARCHS, "XPsoDv^*>", strict=False))
LANE_COLOURS = dict(zip(LANES, (MINT, RASPBERRY, VIOLET, PINE), strict=True))
KIND_COLOURS = dict(zip((*KINDS, "mixed", "read"), (MINT, RASPBERRY, VIOLET, PINE, LIME, COCOA, SLATE), strict=True))
STEP_COLOURS = dict(zip(STEPS, (MIST, MINT, RASPBERRY, LILAC, VIOLET, COCOA), strict=True))
OWN_COLOURS, OWN_MARKERS = ("#333333", ROSE, YELLOW), "pHd"  # for custom architectures, by name

AXIS_NAMES = {"concurrency": "Concurrent requests", "request_rate": "Request rate (req/s)", "trace": "Trace"}
# Metrics of a run: names with units, as `vllm bench serve` prints those that it has, and decimals
TOTALS = {
    "completed": ("Successful requests", 0),
    "failed": ("Failed requests", 0),
    "max_concurrency": ("Maximum request concurrency", 0),
    "request_rate": ("Request rate configured (RPS)", 2),
    "duration": ("Benchmark duration (s)", 2),
    "total_input_tokens": ("Total input tokens", 0),
    "total_output_tokens": ("Total generated tokens", 0),
    "request_throughput": ("Request throughput (req/s)", 2),
    "request_goodput": ("Request goodput (req/s)", 2),
    "output_throughput": ("Output token throughput (tok/s)", 2),
    "max_output_tokens_per_s": ("Peak output token throughput (tok/s)", 2),
    "max_concurrent_requests": ("Peak concurrent requests", 2),
    "total_token_throughput": ("Total token throughput (tok/s)", 2),
}
SPECULATION = {
    "spec_decode_acceptance_rate": ("Acceptance rate per drafted token (%)", 2),  # vLLM's
    "spec_decode_judged_acceptance_rate": ("Acceptance rate per judged token (%)", 2),
    "spec_decode_acceptance_length": ("Acceptance length", 2),
    "spec_decode_num_drafts": ("Drafts", 0),
    "spec_decode_draft_tokens": ("Draft tokens", 0),
    "spec_decode_judged_tokens": ("Judged tokens", 0),
    "spec_decode_accepted_tokens": ("Accepted tokens", 0),
}
PREFIXES = {
    "prefix_cache_queries": ("Queried prompt tokens", 0),
    "prefix_cache_hits": ("Cached prompt tokens", 0),
    "prefix_cache_hit_rate": ("Prefix cache hit rate (%)", 2),
    "mean_num_cached_tokens": ("Mean cached tokens of a request", 2),
    "mean_ttft_hit_ms": ("Mean TTFT of hits (ms)", 2),
    "mean_ttft_miss_ms": ("Mean TTFT of misses (ms)", 2),
    "kv_gpu_hit_tokens": ("Cached tokens on the GPU", 0),
    "kv_host_hit_tokens": ("Cached tokens fetched from host", 0),
    "kv_ssd_hit_tokens": ("Cached tokens fetched from SSD", 0),
    "kv_host_slower_tokens": ("On host, but faster to prefill", 0),
    "kv_ssd_slower_tokens": ("On SSD, but faster to prefill", 0),
    "kv_prefill_ms": ("Prefill of 1,000 tokens (ms)", 2),
    "kv_host_fetch_ms": ("Fetch of 1,000 from host (ms)", 2),
    "kv_ssd_fetch_ms": ("Fetch of 1,000 from SSD (ms)", 2),
    "prefix_cache_evictions": ("Evicted blocks", 0),
    "kv_peak_tokens": ("Peak KV tokens", 0),
    "kv_peak_shared_tokens": ("Peak shared KV tokens", 0),
    "conversations": ("Conversations", 0),
    "gpu_s_per_conversation": ("GPU-seconds per conversation", 2),
}
PREEMPTION = {"preemptions": ("Preemptions", 0), "recomputed_tokens": ("Recomputed tokens", 0)}
OTHERS = {
    "arrival_rate": ("Request arrivals (req/s)", 2),
    "attainment": ("Requests within service levels (%)", 2),
    "in_system": ("Requests in the system", 0),
    "draft_length": ("Draft length", 2),
    "kv_share": ("KV cache in use (%)", 2),
    "kinds_prefill_mean_tokens": ("Mean prefill (tokens)", 2),
}
LANE_METRICS = {
    "utilisation": "busy (%)",
    "bandwidth_share": "share of copy bandwidth (%)",
    "mean_queue_depth": "queue (requests)",
    "queue": "queue now (requests)",
}
METRICS: dict[str, tuple[str, int]] = {
    **(TOTALS | SPECULATION | PREFIXES | PREEMPTION | OTHERS),
    **{f"kinds_{kind}_mean_batch": (f"Mean {kind} batch (rows)", 2) for kind in KINDS},
    **{
        f"lanes_{n}_{key}": (f"{n.capitalize()} lane: {words}", 2) for n in LANES for key, words in LANE_METRICS.items()
    },
}
SHARES = ("attainment", "kv_share", "utilisation", "bandwidth_share")  # ends of those that are shown in percent
LATENCY = re.compile(r"(mean|std|median|p[\d.]+)_(ttft|tpot|itl|e2el)_ms")


def name_of(column: str) -> tuple[str, str, float]:
    """Title and unit of a column, and the factor that converts its values."""
    words = column.replace("_ms", "").replace("_", " ")
    label = words[:1].upper() + words[1:] + (" (ms)" if "_ms" in column else "")
    if column in METRICS:
        label, _ = METRICS[column]
    elif match := LATENCY.fullmatch(column):
        label = f"{match[1].capitalize()} {match[2].upper()} (ms)"
    title, _, unit = label.removesuffix(")").partition(" (")
    return title, unit, 100.0 if column.endswith(SHARES) else 1.0


def metric_label(column: str) -> str:
    """Title of a column with its unit."""
    title, unit, _ = name_of(column)
    return f"{title} ({unit})" if unit else title


def arch_rank(arch: str) -> tuple[int, str]:
    """Position of an architecture in a legend: by the table, custom ones last."""
    return (ARCHS.index(arch) if arch in ARCHS else len(ARCHS)), arch


def arch_colour(arch: str) -> str:
    """The colour of an architecture."""
    return ARCH_COLOURS.get(arch) or OWN_COLOURS[crc32(arch.encode()) % len(OWN_COLOURS)]


def arch_marker(arch: str) -> str:
    """The marker of an architecture."""
    return ARCH_MARKERS.get(arch) or OWN_MARKERS[crc32(arch.encode()) // len(OWN_COLOURS) % len(OWN_MARKERS)]


def paler(colour: str, share: float) -> str:
    """A colour with that share of white in it."""
    parts = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    return "#" + "".join(f"{round(part + (255 - part) * share):02x}" for part in parts)


def number_text(value: float, digits: int = 3) -> str:
    """A number with that many significant `digits`, as 1,070 rather than 1.07e+03."""
    return f"{value:,.0f}" if 10 ** (digits - 1) <= abs(value) < 1e9 else f"{value:.{digits}g}"


def better(column: str) -> int:
    """1 if more is better, -1 if less is, 0 if neither."""
    rates = column.endswith(("throughput", "goodput", "attainment", "acceptance_rate", "hit_rate"))
    return 1 if rates else -1 if column.endswith("_ms") or column == "in_system" else 0


def grew(stability: object) -> bool:
    """Whether a stability label says that the queue kept growing in any replication."""
    return "overloaded" in str(stability)


def tail(points: pd.DataFrame) -> str:
    """Key of the highest percentile in the rows; the median if there is none."""
    given = [match[1] for c in points.columns if (match := re.fullmatch(r"(p[\d.]+)_ttft_ms", str(c)))]
    return max(given, key=lambda name: float(name[1:]), default="median")


def rests_on(points: pd.DataFrame) -> str:
    """The GPU and the foundation of the values."""
    pairs = points[["profile", "foundation"]].drop_duplicates()
    texts = [
        f"{foundation}" if foundation == "measured run" else f"simulated, profile {profile}: {foundation}"
        for profile, foundation in zip(pairs["profile"], pairs["foundation"], strict=True)
    ]
    return f"{texts[0][:1].upper()}{'; '.join(texts)[1:]}."


def grown_note(points: pd.DataFrame) -> str:
    """A note on points whose queue grew; empty if there are none."""
    some = points["stability"].map(grew).any()
    return "Hollow or hatched: the queue kept growing; a longer run has longer latencies." if some else ""


def replications(points: pd.DataFrame, dims: Sequence[str] = ()) -> str:
    """Replications per point; `dims` are the columns that distinguish settings."""
    return counted(points.groupby(["arch", "load_kind", "load", *dims], dropna=False)["seed"].nunique().tolist())


def counted(replications: Sequence[int]) -> str:
    """Numbers of replications as text."""
    if max(replications) == 1:
        return "One replication: no interval, no significance."
    return f"{span_text(replications)} replications."
