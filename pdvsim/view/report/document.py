"""The data of the page as one document: entries with intervals, paired differences, histograms, time series.

Every value of an entry is a mean over replications with its 95% interval. Percentiles are computed per run, then
averaged over runs. Histograms pool the counted requests of all replications; time series show one replication.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.results import Results, label, records
from pdvsim.bench.sources import KEYS, known_profile
from pdvsim.bench.stats import Interval, interval, over_replications
from pdvsim.sim.config import Scoring
from pdvsim.sim.metrics.summary import latencies_s
from pdvsim.view.comparison import most_outside
from pdvsim.view.plots.curves import places
from pdvsim.view.report.series import BINS, over_time
from pdvsim.view.report.sheet import flat
from pdvsim.view.setting import points_line
from pdvsim.view.style import KIND_COLOURS, LANE_COLOURS, LILAC, SLATE, STEP_COLOURS, arch_colour, grew, name_of
from pdvsim.view.table import load_name, load_text

if TYPE_CHECKING:
    import pandas as pd

OnRead = Callable[[int], None]
Latencies = dict[int, dict[str, NDArray[Any]]]  # seconds, by point and metric

HIST_BINS = 60
MARKS = {"mean": "mean", "median": "p50", "p95": "p95", "p99": "p99"}
RANKS = {"p95": 95.0, "p99": 99.0}
RATES = ("output_throughput", "request_throughput", "total_token_throughput", "request_goodput")
ACCEPTANCE = ("spec_decode_acceptance_rate", "spec_decode_judged_acceptance_rate")
CACHE = (
    "prefix_cache_hit_rate", "mean_num_cached_tokens", "mean_ttft_hit_ms", "mean_ttft_miss_ms", "kv_peak_shared_tokens",
    "prefix_cache_evictions", "gpu_s_per_conversation",
)  # fmt: skip
LAUNCHES_PER_BIN = 3
MANY = 100  # with more entries time series are coarser, to limit the page's size


def build(results: Results, progress: OnRead = lambda done: None) -> dict[str, Any]:
    """The document for `results`; `progress` is called with the number of records read."""
    points = results.points
    latencies, series = _read(results, progress)
    points = _with_percentiles(points, latencies)
    metrics = _metrics(points)
    kinds = list(dict.fromkeys(points["load_kind"]))
    settings, entries, histograms = [], [], []
    shown = Results(points, results.sources, results.dims)
    for number, (setting, frame) in enumerate(shown.settings()):
        settings.append(label(setting) or str(frame["pair"].iloc[0]))
        rivals = _rivals(frame, metrics)
        for entry in over_replications(frame):
            same = (frame["arch"] == entry["arch"]) & (frame["load_kind"] == entry["load_kind"])
            same &= frame["load"].eq(entry["load"]) | (frame["load"].isna() & math.isnan(entry["load"]))
            key = (entry["arch"], entry["load_kind"], load_text(entry["load"]))
            described = _entry(entry, metrics) | {"setting": number, "against": rivals.get(key, {})}
            described["rows"] = frame.index[same].tolist()
            entries.append(described)
        histograms += _histograms(entries, number, latencies)
    for entry in entries:
        entry["series"] = next((series[index] for index in entry.pop("rows") if index in series), None)
    return {
        "archs": [{"name": arch, "colour": arch_colour(arch)} for arch in results.archs],
        "colours": {"lane": LANE_COLOURS, "kind": KIND_COLOURS, "step": STEP_COLOURS, "other": (LILAC, SLATE)},
        "settings": settings,
        "lead": points_line(results.points, results.configs),
        "levels": _levels(results),
        "incomplete": results.incomplete,
        "loads": _loads(points, kinds),
        "metrics": {name: dict(zip(("title", "unit"), name_of(name)[:2], strict=True)) for name in metrics},
        "marks": {mark: word for mark, word in MARKS.items() if any(m.startswith(f"{mark}_") for m in metrics)},
        "entries": entries,
        "histograms": histograms,
        "sources": [_source(results, number) for number in range(len(results.sources))],
    }


def _read(results: Results, progress: OnRead) -> tuple[Latencies, dict[int, dict[str, Any]]]:
    """Latencies of each point and the time series of one replication, from saved records."""
    latencies: Latencies = {}
    series: dict[int, dict[str, Any]] = {}
    keys = [*KEYS, *results.dims]
    saved = results.points[results.points["records"] != ""]
    first = set(saved.drop_duplicates(keys).index)
    bins = BINS if len(first) <= MANY else max(BINS * MANY // len(first), BINS // 4)
    for done, (index, row) in enumerate(saved.iterrows(), 1):
        saved_rows = records(row)
        assert saved_rows is not None
        number = int(index)  # type: ignore[call-overload]
        latencies[number] = latencies_s(saved_rows.requests, saved_rows.deliveries, results.warmup(row))
        if index in first and len(saved_rows.launches["lane"]):
            busiest = int(np.bincount(saved_rows.launches["lane"]).max())
            fitting = min(bins, max(busiest // LAUNCHES_PER_BIN, BINS // 5))  # finer bins show single rounds
            over = over_time(saved_rows, results.bandwidths_bytes_per_s(row), fitting)
            series[number] = {"seed": int(row["seed"]), **_plain(over)}
        progress(done)
    return latencies, series


def _with_percentiles(points: pd.DataFrame, latencies: Latencies) -> pd.DataFrame:
    """`points` with further percentiles from the records."""
    points = points.copy()
    for mark, rank in RANKS.items():
        for metric in ("ttft", "tpot", "itl", "e2el") if latencies else ():
            column = f"{mark}_{metric}_ms"
            values = [latencies.get(i, {}).get(metric, np.empty(0)) for i in points.index]
            from_records = [float(np.percentile(v, rank)) * 1e3 if len(v) else math.nan for v in values]
            given = points.get(column, math.nan)
            points[column] = np.where(np.isnan(given), from_records, given)
    return points


def _metrics(points: pd.DataFrame) -> list[str]:
    """The metrics that the page compares."""
    times = [f"{mark}_{metric}_ms" for metric in ("ttft", "tpot", "itl", "e2el") for mark in MARKS]
    return [m for m in (*RATES, *ACCEPTANCE, *CACHE, *times) if m in points and points[m].notna().any()]


def _entry(entry: dict[str, Any], metrics: list[str]) -> dict[str, Any]:
    steps = {step: entry.get(f"breakdown_ms_{step}") for step in STEP_COLOURS}
    return {
        "arch": entry["arch"],
        "load": [entry["load_kind"], load_text(entry["load"])],
        "n": entry["replications"],
        "stability": str(entry["stability"]),
        "grew": grew(entry["stability"]),
        "foundation": str(entry["foundation"]),
        "profile": str(entry["profile"]),
        "values": {m: _interval(entry[m]) for m in metrics if isinstance(entry.get(m), Interval)},
        "bands": {m: ends for m in metrics if None not in (ends := [_end(entry, m, end) for end in ("low", "high")])},
        "drafts": math.isfinite(getattr(entry.get("spec_decode_acceptance_length"), "mean", math.nan)),
        "steps": {step: _short(v.mean) for step, v in steps.items() if isinstance(v, Interval)},
    }


def _end(entry: dict[str, Any], metric: str, end: str) -> float | None:
    """One end of a metric's error bar, if forward times are predicted."""
    value = entry.get(f"{metric}_{end}")
    return _short(value.mean) if isinstance(value, Interval) else None


def _levels(results: Results) -> dict[str, list[float]]:
    """The service levels in milliseconds, by metric."""
    levels: dict[str, list[float]] = {}
    for config in results.configs:
        with suppress(ValueError):  # levels that this version does not know
            for metric, level_s, _ in Scoring(tuple(config["scoring"].get("goodput") or ())).levels():
                levels.setdefault(metric, []).append(round(level_s * 1e3, 6))
    return {metric: list(dict.fromkeys(every)) for metric, every in levels.items()}


def _rivals(frame: pd.DataFrame, metrics: list[str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Relative paired differences by point, then by reference architecture, then by metric.

    The same as `bench.stats.paired_differences`, for all pairs of architectures.
    """
    differences: dict[tuple[str, str, str], dict[str, Any]] = {}
    places = list(zip(frame["arch"], frame["load_kind"], map(load_text, frame["load"]), frame["seed"], strict=True))
    for metric in (m for m in metrics if frame[m].dtype != object):
        by_seed: dict[tuple[str, str, str], dict[int, float]] = {}
        for (arch, kind, load, seed), value in zip(places, frame[metric], strict=True):
            by_seed.setdefault((arch, kind, load), {})[seed] = value
        for (arch, kind, load), mine in by_seed.items():
            for against in dict.fromkeys(frame["arch"]):
                theirs = by_seed.get((against, kind, load), {})
                if arch != against and theirs:
                    relative = interval([mine[s] / theirs[s] - 1 for s in mine if theirs.get(s)])
                    differences.setdefault((arch, kind, load), {}).setdefault(against, {})[metric] = _interval(relative)
    return differences


def _histograms(entries: list[dict[str, Any]], setting: int, latencies: Latencies) -> list[dict[str, Any]]:
    """Counts over edges that all architectures of a load share, evenly spaced on a logarithmic axis."""
    histograms = []
    mine = [e for e in entries if e["setting"] == setting]
    for load in {tuple(e["load"]): None for e in mine}:
        here = [e for e in mine if tuple(e["load"]) == load]
        for metric in ("ttft", "tpot", "itl", "e2el"):
            known = {e["arch"]: [latencies[i][metric] for i in e["rows"] if i in latencies] for e in here}
            values_ms = {arch: np.concatenate(runs) * 1e3 for arch, runs in known.items() if any(map(len, runs))}
            if not values_ms:
                continue
            every = np.concatenate(list(values_ms.values()))
            low = float(every[every > 0].min(initial=every.max())) or 1e-3
            edges = np.geomspace(low, max(float(every.max()), low * 1.01), HIST_BINS + 1)
            counts = {arch: histogram(values, edges) for arch, values in values_ms.items()}
            histograms.append(
                {"setting": setting, "load": list(load), "metric": metric, "edges": [_short(v) for v in edges]}
                | {"counts": {arch: c.tolist() for arch, c in counts.items()}}
            )
    return histograms


def histogram(values: NDArray[Any], edges: NDArray[Any]) -> NDArray[Any]:
    """Number of values between neighbouring edges; the outermost bins include values beyond."""
    return np.histogram(values.clip(edges[0], edges[-1]), edges)[0]


def _loads(points: pd.DataFrame, kinds: list[str]) -> list[dict[str, Any]]:
    """Loads in order, with their position on an axis; an infinite rate is one step after the largest finite one."""
    listed = []
    for kind in kinds:
        loads = sorted({load for load in points.loc[points["load_kind"] == kind, "load"] if not math.isnan(load)})
        at = list(zip(map(load_text, loads), places(loads), strict=True)) or [("trace", 1.0)]
        listed += [{"kind": kind, "name": load_name(kind), "text": text, "x": x} for text, x in at]
    return listed


def _source(results: Results, number: int) -> dict[str, Any]:
    """Provenance: the files, the profile and its foundation."""
    source = results.sources[number]
    points = results.points[results.points["source"] == number]
    row = points.iloc[0]
    provenance = source.provenance
    if provenance is None:
        profile = known_profile(str(row["gpu"]), str(row["profile"]), source.config)
        provenance = None if profile is None else profile.provenance
    facts = {
        "results": source.name,
        "date": source.date,
        "pdvsim": source.version,
        "points": len(points),
        "replications": int(points["seed"].nunique()),
        "warm-up requests excluded": results.warmup(row),
        "gpu": str(row["gpu"]),
        "profile": str(row["profile"]),
        "foundation": str(row["foundation"]),
        "note": "; ".join(most_outside(dict(point) for _, point in points.iterrows())),
    }
    return {
        "facts": {name: str(value) for name, value in facts.items() if value not in ("", None)},
        "provenance": flat(provenance or {}),
        "config": flat(source.config.model_dump()),
    }


def _interval(value: Interval) -> list[float | int | None]:
    return [_short(value.mean), _short(value.half_width), value.n]


def _short(value: float, digits: int = 5) -> float | None:
    """A number rounded to visible digits; null for none."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, np.ndarray | list):
        return [None if not math.isfinite(v) else int(v) if v == int(v) else _short(v, 4) for v in value]
    return _short(value, 8)
