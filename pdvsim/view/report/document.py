"""What the report shows, as one document: charts, tables and notes for every choice of its controls.

Every value is a mean over replications with its 95% interval. Percentiles are computed per run, then averaged over
runs. Histograms pool the counted requests of all replications; time series show one replication.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.results import Results, label, records
from pdvsim.bench.stats import Interval, interval, over_replications
from pdvsim.sim.config import Scoring
from pdvsim.sim.metrics.summary import latencies_s
from pdvsim.view.charts import Chart, Entry, breakdown, curves_of, histogram, panel, timeline
from pdvsim.view.comparison import most_outside
from pdvsim.view.report.sheet import facts_html, flat, metric_table
from pdvsim.view.series import BINS, over_time, parts_of
from pdvsim.view.setting import points_line
from pdvsim.view.style import (
    LATENCY,
    arch_colour,
    better,
    grew,
    grown_note,
    name_of,
    replications,
    rests_on,
)
from pdvsim.view.table import cell, load_name, load_text

if TYPE_CHECKING:
    import pandas as pd

OnRead = Callable[[int], None]
Latencies = dict[int, dict[str, NDArray[Any]]]  # seconds, by point and metric
Series = dict[int, dict[str, Any]]

MARKS = {"mean": "mean", "median": "p50", "p95": "p95", "p99": "p99"}
RANKS = {"p95": 95.0, "p99": 99.0}
TIMES = ("ttft", "tpot", "itl", "e2el")
RATES = ("output_throughput", "request_throughput", "total_token_throughput", "request_goodput")
MORE = (
    "spec_decode_acceptance_rate", "spec_decode_judged_acceptance_rate", "prefix_cache_hit_rate",
    "mean_num_cached_tokens", "mean_ttft_hit_ms", "mean_ttft_miss_ms", "kv_peak_shared_tokens",
    "prefix_cache_evictions", "gpu_s_per_conversation",
)  # fmt: skip
ALWAYS = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_e2el_ms", *RATES)  # rows of the table
LAUNCHES_PER_BIN = 3
MANY = 100  # with more entries time series are coarser, to limit the page's size
NO_RECORDS = "No records were saved: latency histograms and time series need a run with --save-detailed."


def build(results: Results, progress: OnRead = lambda done: None) -> dict[str, Any]:
    """The document for `results`; `progress` is called with the number of records read."""
    latencies, series = _read(results, progress)
    points = _with_percentiles(results.points, latencies)
    times = [f"{mark}_{metric}_ms" for metric in TIMES for mark in MARKS]
    metrics = [m for m in (*RATES, *MORE, *times) if m in points and points[m].notna().any()]
    times = [m for m in metrics if LATENCY.fullmatch(m)]
    settings = Results(points, results.sources, results.dims).settings()
    parts = {
        "rates": ReportPart("Rate", ("setting", "rate")),
        "latencies": ReportPart("Latency", ("setting", "latency", "mark")),
        "comparison": ReportPart("At one load", ("setting", "load", "against"), "wide"),
        "histogram": ReportPart("Latency histogram", ("setting", "load", "latency")),
        "breakdown": ReportPart("Where a request's time goes", ("setting", "load")),
        "timeline": ReportPart("Scheduler and GPU over time", ("setting", "load", "watched"), "wide"),
    }
    loads: dict[str, list[tuple[str, str]]] = {}
    calm: dict[str, str] = {}  # initially the highest load at which no queue grew
    watched = None
    levels = _levels(results)
    for number, (_, frame) in enumerate(settings):
        entries = [e | {"series": e["arch"]} for e in over_replications(frame)]
        curves = curves_of(entries)
        kinds = [[e for e in entries if e["load_kind"] == kind] for kind in dict.fromkeys(frame["load_kind"])]
        for metric in metrics:
            timed = LATENCY.fullmatch(metric)
            mark, latency = timed.groups() if timed else ("", "")
            charts = [panel(mine, metric, curves, levels=levels.get(latency, ())) for mine in kinds]
            note = f"{MARKS[mark]} of each run, averaged over runs. " if mark not in ("", "mean") else ""
            part, key = ("latencies", (latency, mark)) if latency else ("rates", (metric,))
            parts[part].add((number, *key), frame, f"{note}Whiskers: 95% confidence.", charts)
        for at in dict.fromkeys(map(_place, entries)):
            here = [e for e in entries if _place(e) == at]
            rows = frame[[_place(row) == at for _, row in frame.iterrows()]]
            place = number, " ".join(at)
            loads.setdefault(str(number), []).append((place[1], f"{load_name(at[0])} {at[1]}"))
            if any(not grew(e["stability"]) for e in here) or str(number) not in calm:
                calm[str(number)] = place[1]
            for against in results.archs:
                parts["comparison"].add((*place, against), rows, NOTE, table=_table(here, rows, metrics, against))
            for metric in TIMES:
                runs = {str(arch): [latencies[i][metric] for i in mine.index if i in latencies]
                        for arch, mine in rows.groupby("arch", sort=False)}  # fmt: skip
                ms = {
                    arch: (arch_colour(arch), np.concatenate(of) * 1e3)
                    for arch, of in runs.items()
                    if any(map(len, of))
                }
                if ms:
                    parts["histogram"].add((*place, metric), rows, POOLED, [histogram(metric, ms)])
            parts["breakdown"].add(place, rows, "Means over replications.", [breakdown(here)])
            for arch, mine in rows.groupby("arch", sort=False) if series else ():
                shown = next((series[index] for index in mine.index if index in series), None)
                watched = watched or (shown and str(arch))
                note = "No records of this point were saved."
                if shown is not None:
                    note = OVER_TIME.format(shown["seed"], 1e3 * np.diff(shown["edges_s"])[0])
                parts["timeline"].add((*place, str(arch)), mine, note, timeline(shown) if shown else [])
    described = [_source(results, number) for number in range(len(results.sources))]
    sources = "".join(f"<h3>{escape(n)}</h3>{html}" if len(described) > 1 else html for n, html in described)
    provenance = {"id": "provenance", "title": "Provenance", "html": sources, "note": "" if series else NO_RECORDS}
    archs = [(arch, arch) for arch in results.archs]
    marks = {m: [(mark, word) for mark, word in MARKS.items() if f"{mark}_{m}_ms" in times] for m in TIMES}
    known = [m for m in TIMES if marks[m]]
    return {
        "title": "Serving architectures compared",
        "lead": _lead(results),
        "warning": f"Not complete. {'; '.join(results.incomplete)}." if results.incomplete else "",
        "archs": [{"name": arch, "colour": arch_colour(arch)} for arch in results.archs],
        "controls": [
            {"id": "setting", "label": "Setting", "hidden": len(settings) < 2,
             "options": [(str(n), label(s) or str(f["pair"].iloc[0])) for n, (s, f) in enumerate(settings)]},
            {"id": "load", "label": "Load", "by": "setting", "options": loads, "value": calm},
            {"id": "rate", "label": "Rate", "options": [(m, name_of(m)[0]) for m in metrics if m not in times]},
            {"id": "latency", "label": "Latency", "options": [(m, m.upper()) for m in known]},
            {"id": "mark", "label": "Statistic", "by": "latency", "options": marks,
             "value": dict.fromkeys(known, "p99")},
            {"id": "against", "label": "Compared with", "options": archs},
            {"id": "watched", "label": "Over time", "options": archs, "value": watched or results.archs[0]},
        ],
        "parts": [*({"id": name, **vars(part)} for name, part in parts.items()), provenance],
    }  # fmt: skip


@dataclass
class ReportPart:
    """A part of the page: what it shows, by the values of the controls `by`."""

    title: str
    by: tuple[str, ...]
    kind: str = ""
    content: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, key: Sequence[Any], rows: pd.DataFrame, note: str, charts: Sequence[Chart] = (), **more: Any) -> None:
        """What it shows for a choice, and what that is from: replications, labels and profile of its rows."""
        texts = [note, replications(rows), grown_note(rows), rests_on(rows)]
        self.content["|".join(map(str, key))] = {"charts": charts, "note": " ".join(filter(None, texts)), **more}


POOLED = "All counted requests of all replications together, on a logarithmic axis."
NOTE = (
    "± is the 95% interval over replications; small: the difference, paired by seed, green if better. Grey italics: a "
    "difference that is not significant (its interval includes 0, or there is one replication), or a latency while the "
    "queue kept growing."
)
OVER_TIME = (
    "One replication (seed {}), averaged over bins of {:.3g} ms. The whole run, warm-up included. Not admitted: "
    "arrived, without a launch yet. Queues are recorded at each launch. Bandwidth: bytes moved over the GPU's copy "
    "bandwidth, spread evenly over each launch. Drag to zoom, double-click to zoom out."
)


def _place(entry: Mapping[str, Any] | pd.Series[Any]) -> tuple[str, str]:
    return str(entry["load_kind"]), load_text(entry["load"])


def _lead(results: Results) -> str:
    counts = {"setting": len(results.settings()), "architecture": len(results.archs), "run": len(results.points)}
    texts = [f"{n} {name}{'s' * (n > 1)}" for name, n in counts.items() if n > 1 or name == "run"]
    return f"{points_line(results.points, results.configs)} {', '.join(texts)}. {rests_on(results.points)}"


def _read(results: Results, progress: OnRead) -> tuple[Latencies, Series]:
    """Latencies of each point and the time series of one replication, from saved records."""
    latencies: Latencies = {}
    series: Series = {}
    keys = ["arch", "load_kind", "load", *results.dims]
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
            edges = parts_of(saved_rows, fitting)
            over = over_time(saved_rows.requests, saved_rows.launches, results.bandwidths_bytes_per_s(row), edges)
            series[number] = {"seed": int(row["seed"]), **over}
        progress(done)
    return latencies, series


def _with_percentiles(points: pd.DataFrame, latencies: Latencies) -> pd.DataFrame:
    """`points` with further percentiles from the records."""
    points = points.copy()
    for mark, rank in RANKS.items():
        for metric in TIMES if latencies else ():
            column = f"{mark}_{metric}_ms"
            values = [latencies.get(i, {}).get(metric, np.empty(0)) for i in points.index]
            from_records = [float(np.percentile(v, rank)) * 1e3 if len(v) else math.nan for v in values]
            given = points.get(column, math.nan)
            points[column] = np.where(np.isnan(given), from_records, given)
    return points


def _levels(results: Results) -> dict[str, list[float]]:
    """The service levels in milliseconds, by metric."""
    levels: dict[str, list[float]] = {}
    for config in results.configs:
        with suppress(ValueError):  # levels that this version does not know
            for metric, level_s, _ in Scoring(tuple(config["scoring"].get("goodput") or ())).levels():
                levels.setdefault(metric, []).append(round(level_s * 1e3, 6))
    return {metric: list(dict.fromkeys(every)) for metric, every in levels.items()}


def _table(here: Sequence[Entry], rows: pd.DataFrame, metrics: Sequence[str], against: str) -> dict[str, Any]:
    """The metrics at one load, a column per architecture, with differences from `against`, paired by seed."""
    numbers = [m for m in metrics if rows[m].dtype != object]
    by_seed = {arch: mine.set_index("seed")[numbers] for arch, mine in rows.groupby("arch", sort=False)}
    rivals = {arch: mine / by_seed[against].replace(0, np.nan) - 1 for arch, mine in by_seed.items()
              if arch != against and against in by_seed}  # fmt: skip

    def shown(metric: str, at: int) -> tuple[str, str, str]:
        rival = rivals.get(here[at]["arch"])
        off = interval(rival[metric]) if rival is not None and metric in rival else None
        unsteady = grew(here[at]["stability"]) and "_ms" in metric
        return cell(here[at].get(metric)), *difference(off, better(metric), unsteady)

    more = {m: "more latencies" if LATENCY.fullmatch(m) else "acceptance and cache" for m in metrics if m not in ALWAYS}
    groups = dict.fromkeys([m for m in metrics if m in ALWAYS], "") | dict(sorted(more.items(), key=lambda m: m[1]))
    heads = [(e["arch"], arch_colour(e["arch"])) for e in here]
    return metric_table(heads, [str(e["stability"]) for e in here], groups, shown)


def difference(relative: Interval | None, sign: int, unsteady: bool) -> tuple[str, str]:
    """A paired difference as text and its class: significant only if its interval excludes 0."""
    if relative is None or math.isnan(relative.mean):
        return "", "unsure" if unsteady else ""
    far = relative.mean >= 9
    text = f"{relative.mean + 1:,.3g}×" if far else cell(relative, 1, 100, "+").replace(" ", "% ", 1)
    text += "" if far or "±" in text else "%"
    sure = relative.n > 1 and abs(relative.mean) > relative.half_width and not unsteady
    return text, "unsure" if not sure else "" if not sign else "better" if sign * relative.mean > 0 else "worse"


def _source(results: Results, number: int) -> tuple[str, str]:
    """The name of a result, and where it is from as HTML: files, profile, its foundation, and all settings."""
    source = results.sources[number]
    points = results.points[results.points["source"] == number]
    row = points.iloc[0]
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
        "Foundation of the profile": source.provenance or {"": "Not recorded."},
        "Configuration": flat(source.config),
    }
    return source.name, facts_html(facts)
