"""What a chart shows, whoever draws it: `view.figure` in a file, `view/report/page.js` on a page.

A chart is either curves over a number, rows of bars, or rows and columns of cells. Its band or whiskers are the 95%
confidence interval over replications; one replication has none. Hollow markers and bars are points where the queue
grew: their latencies would increase with a longer run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from pdvsim.bench.results import value_text
from pdvsim.bench.stats import Interval, over_replications, varied
from pdvsim.sim.metrics.summary import STEPS, latencies_s
from pdvsim.sim.records import Array, Result
from pdvsim.view.series import in_flight, waiting
from pdvsim.view.style import (
    ARCH_MARKERS,
    AXIS_NAMES,
    KIND_COLOURS,
    LANE_COLOURS,
    LILAC,
    RAMP,
    SLATE,
    STEP_COLOURS,
    arch_colour,
    arch_marker,
    grew,
    metric_label,
    name_of,
    number_text,
    paler,
)
from pdvsim.view.table import load_text, missing

if TYPE_CHECKING:
    import pandas as pd

Entry = dict[str, Any]
Dash = Literal["-", "--", ":", "-.", "none"]
DASHES: tuple[Dash, ...] = ("-", "--", ":", "-.")
PALEST = 0.7  # most white in the colour of an architecture's last setting
MOST_TICKED_VALUES = 10
RUN_BINS = 40  # of histograms of one run
NEAR = 1.3  # service levels beyond this multiple of a run's longest latency are not shown
LOGARITHMIC = ("ttft", "e2el")  # latencies that a queue multiplies


@dataclass(frozen=True)
class Curve:
    """One curve; nan is a gap. Without values, its style."""

    name: str
    colour: str
    x: Sequence[float] | Array = ()
    y: Sequence[float] | Array = ()
    half: Sequence[float] | Array = ()  # half-width of the interval of each point
    low: Sequence[float] = ()  # error bar of predicted forward times
    high: Sequence[float] = ()
    hollow: Sequence[bool] = ()  # if given, points have markers
    text: Sequence[str] = ()  # about each point
    marker: str = "o"
    dash: Dash = "-"
    step: bool = False
    fill: bool = False
    size: float = 8.0  # of markers in a file, in points


class Bar(NamedTuple):
    """A bar in a row, and what to say about it."""

    row: int
    start: float
    end: float
    colour: str
    text: str = ""
    hollow: bool = False
    half: float = 0.0  # half-width of the interval of its end


class Tile(NamedTuple):
    """A cell in a row and a column."""

    row: int
    column: int
    colour: str
    text: str
    hollow: bool = False  # proves nothing


@dataclass(frozen=True)
class Chart:
    """Curves, rows of bars, or rows and columns of cells."""

    title: str = ""
    unit: str = ""
    x: str = ""
    traces: Sequence[Curve] = ()
    rows: Sequence[str] = ()
    bars: Sequence[Bar] = ()
    columns: Sequence[str] = ()
    cells: Sequence[Tile] = ()
    key: Sequence[tuple[str, str]] = ()  # legend of bars or cells: names and colours
    ticks: Sequence[tuple[float, str]] = ()  # of the x axis
    log_x: bool = False
    log_y: bool = False
    top: float | None = None  # end of the y axis
    range: tuple[float, float] | None = None  # of the x axis
    levels: Sequence[float] = ()  # service levels in ms, drawn as lines
    upright: bool = False  # levels are values of the x axis
    height: int = 0  # pixels on a page
    free: bool = False  # the y axis need not begin at 0
    labelled: bool = False  # bars with their texts, from a reference line at 0, or 1 on a logarithmic axis


def plain(value: Any) -> Any:
    """Charts and their values as JSON: rounded to visible digits, without what is empty; nan is null."""
    if isinstance(value, Chart | Curve):
        parts, kept = vars(value).items(), {"x", "y", "bars"}  # also when they are empty
        return {n: plain(p) for n, p in parts if n in kept or (len(p) if hasattr(p, "__len__") else p)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in (value.tolist() if isinstance(value, np.ndarray) else value)]
    if isinstance(value, float):
        return float(f"{value:.5g}") if math.isfinite(value) else None
    return value.item() if hasattr(value, "item") else value


# curves over the load ------------------------------------------------------------------------------------------------


def entries_of(points: pd.DataFrame, by: Sequence[str] | None = None, curve: str | None = None) -> list[Entry]:
    """One entry per architecture, load and setting, in the order of the load; `series` names its curve.

    Settings differ in the columns `by`; default: all that vary. A curve is of a value of the column `curve`, if given,
    else of an architecture with one setting.
    """
    names, entries = varied(points) if by is None else list(by), []
    for key, group in points.groupby(names, sort=False, dropna=False) if names else [((), points)]:
        setting = dict(zip(names, key, strict=True))
        more = [f"{name.replace('_', ' ')} {value_text(value)}" for name, value in setting.items()]
        for entry in (e | setting for e in over_replications(group)):
            series = ", ".join([entry["arch"], *more]) if curve is None else value_text(entry[curve])
            entries.append(entry | {"series": series})
    return sorted(entries, key=lambda e: float(e["load"]) if not math.isnan(e["load"]) else math.inf)


def curves_of(entries: Iterable[Entry], column: str = "arch") -> list[Curve]:
    """The curves of entries, ordered by architecture and setting; later settings are paler and dashed.

    Those of another column than the architecture have other colours, from dark to pale.
    """
    series: dict[str, dict[str, None]] = {}
    for entry in entries:
        series.setdefault(entry["arch"] if column == "arch" else "", {})[entry["series"]] = None
    markers, curves = list(ARCH_MARKERS.values()), []
    for arch, names in series.items():
        for at, name in enumerate(names):
            dark = RAMP[round(at * (len(RAMP) - 1) / max(len(names) - 1, 1))]
            colour = paler(arch_colour(arch), PALEST * at / len(names)) if arch else dark
            marker = arch_marker(arch) if len(series) > 1 else markers[at % len(markers)]
            curves.append(Curve(name, colour, marker=marker, dash=DASHES[at % 3]))
    return curves


def panel(
    inside: Sequence[Entry],
    metric: str,
    curves: Sequence[Curve],
    title: str | None = None,
    levels: Sequence[float] = (),
    x: str = "load",
    every: Sequence[Entry] = (),
) -> Chart:
    """One metric over the load or another column, one curve per series; at one load only, bars.

    `every` are the entries of all panels, whose values are the ticks.
    """
    name, unit, scale = name_of(metric)
    title, every = name if title is None else title, every or inside
    kind, by_metric = str(every[0]["load_kind"]), isinstance(every[0][x], Interval)
    axis = AXIS_NAMES[kind] if x == "load" else metric_label(x)
    text = load_text if x == "load" else value_text
    ticks = [] if by_metric else _ticks([e[x] for e in every], text)
    if x == "load" and len(ticks) == 1:
        shown, colours = [e for e in inside if has(e, metric)], {c.name: c.colour for c in curves}
        bars = [
            Bar(n, 0.0, e[metric].mean * scale, colours[e["series"]], _said(e, metric, unit), grew(e["stability"]),
                e[metric].half * scale) for n, e in enumerate(shown)
        ]  # fmt: skip
        return Chart(title, unit, f"{axis}: {ticks[0][1]}", rows=[e["series"] for e in shown], bars=bars)
    place, traces = {name: at for at, name in ticks}, []
    for curve in curves:
        mine = [e for e in inside if e["series"] == curve.name and has(e, metric) and (not by_metric or has(e, x))]
        at = [e[x].mean * name_of(x)[2] if by_metric else place[text(e[x])] for e in mine]
        order = sorted(range(len(mine)), key=lambda n: mine[n]["load"] if by_metric else at[n])
        traces += [_trace([mine[n] for n in order], metric, curve, [at[n] for n in order])] if mine else []
    first, last = (ticks[0][0], ticks[-1][0]) if ticks else (0.0, 0.0)
    wide = first > 0 and (x == "load" or (last >= 8 * first and _numeric([e[x] for e in every])))
    values = [y for trace in traces for y in trace.y]
    log = any(word in metric for word in LOGARITHMIC) and bool(values) and max(values) > 10 * min(values) > 0
    ticks = ticks if x == "load" or len(ticks) <= MOST_TICKED_VALUES else []
    return Chart(title, unit, axis, traces, ticks=ticks, log_x=wide, log_y=log, levels=levels)


def has(entry: Entry, metric: str) -> bool:
    """Whether an entry has a value for a metric."""
    return isinstance(entry.get(metric), Interval) and math.isfinite(entry[metric].mean)


def _ticks(values: Iterable[Any], text: Callable[[Any], str]) -> list[tuple[float, str]]:
    """The values of a column and their places: numbers at theirs, infinity one step after the last, others in a row."""
    known = {text(value): value for value in values}
    last = 2.0 * max((v for v in known.values() if _numeric([v]) and math.isfinite(v)), default=0.5)
    numbers = (float(value) if math.isfinite(value) else last for value in known.values())
    return sorted(zip(numbers if _numeric([*known.values()]) else map(float, range(len(known))), known, strict=True))


def _numeric(values: Sequence[Any]) -> bool:
    return all(isinstance(v, int | float) or hasattr(v, "dtype") for v in values)


def _trace(entries: Sequence[Entry], metric: str, curve: Curve, x: Sequence[float]) -> Curve:
    """The values of entries at positions `x`, with their intervals and error bars."""
    unit, scale = name_of(metric)[1:]
    y, half = ([getattr(e[metric], part) * scale for e in entries] for part in ("mean", "half"))
    ends = [
        [e[f"{metric}_{end}"].mean * scale for e in entries if has(e, f"{metric}_{end}")] for end in ("low", "high")
    ]
    low, high = ends if len(x) == len(ends[0]) == len(ends[1]) else ((), ())
    hollow, text = [grew(e.get("stability")) for e in entries], [_said(e, "", unit) for e in entries]
    return replace(curve, x=x, y=y, half=half if any(half) else [], low=low, high=high, hollow=hollow, text=text)


def _said(entry: Entry, metric: str, unit: str) -> str:
    count = entry["replications"]
    value = f"{entry['series']}: {number_text(entry[metric].mean, 4)} {unit} " if metric else ""
    return f"{value}({entry.get('stability', '')}, {count} replication{'s' * (count > 1)})"


# one run or one load -------------------------------------------------------------------------------------------------


def histogram(metric: str, values_ms: Mapping[str, tuple[str, Array]], bins: int = 60, **more: Any) -> Chart:
    """Shares of latencies by name, each with its colour, in bins that all have in common, on a logarithmic axis."""
    every = np.concatenate([values for _, values in values_ms.values()])
    every = every[every > 0]
    low, high = (float(every.min()), float(every.max())) if len(every) else (1.0, 10.0)
    edges, traces = np.geomspace(low, max(high, 1.01 * low), bins + 1), []
    for name, (colour, values) in values_ms.items():
        found = np.histogram(values.clip(edges[0], edges[-1]), edges)[0]
        shares = np.append(100 * found / max(1, found.sum()), 0.0)
        traces.append(Curve(name, colour, edges, shares, step=True, fill=True))
    what = Chart(metric.upper(), f"% of {'chunks' if metric == 'itl' else 'requests'}", f"{metric.upper()} (ms)")
    return replace(what, traces=traces, upright=True, log_x=True, **more)


def run_charts(result: Result, metrics: Mapping[str, Any]) -> list[Chart]:
    """Histograms of two latencies with their levels, requests over time, and the mean time of a request by step."""
    arch, scoring, requests = result.experiment.arch, result.experiment.scoring, result.requests
    latencies, levels = latencies_s(requests, dict(result.deliveries), scoring.warmup_requests), scoring.slo()
    charts = []
    for name in ("ttft", "tpot"):
        ms, level = latencies[name] * 1e3, 1e3 * levels.get(name, math.inf)
        within = f", {np.mean(ms <= level):.0%} within {level:g}" if name in levels and len(ms) else ""
        near = [level] if level < NEAR * ms.max(initial=0.0) else []
        title = f"{name.upper()}, median {number_text(float(np.median(ms)))} ms{within}" if len(ms) else ""
        charts.append(histogram(name, {"": (arch_colour(arch), ms)}, RUN_BINS, levels=near, title=title))
    start_s, end_s = float(requests["arrival_s"].min()), float(requests["finish_s"].max())
    edges = np.linspace(start_s, max(end_s, start_s + 1e-6), 3 * RUN_BINS + 1)
    shown = (("in the system", in_flight(requests), SLATE), ("not admitted", waiting(requests), LILAC))
    traces = [Curve(name, colour, edges[1:], steps.mean(edges), fill=True) for name, steps, colour in shown]
    steps_ms = {f"breakdown_ms_{k}": Interval(v, 0.0, 1) for k, v in metrics.get("breakdown_ms", {}).items()}
    entry = steps_ms | {"arch": arch, "spec_decode_acceptance_length": metrics.get("spec_decode_acceptance_length")}
    return [*charts, Chart("Requests over time", "", "seconds", traces), breakdown([entry])]


def breakdown(entries: Sequence[Entry]) -> Chart:
    """The mean time of a request by step, one row per entry."""
    bars = []
    for row, entry in enumerate(entries):
        start, drafts = 0.0, not missing(entry.get("spec_decode_acceptance_length"))
        for step in STEPS:
            value = entry.get(f"breakdown_ms_{step}")
            end = start + (value.mean if isinstance(value, Interval) else 0.0)
            name = {"verify": "verify" if drafts else "decode", "wait": "wait for verify", "other": "hand-overs, host"}
            said = f"{name.get(step, step)}: {number_text(end - start)} ms"
            bars.append(Bar(row, start, end, STEP_COLOURS[step], said, grew(entry.get("stability"))))
            start = end
    key = [("verify or decode" if step == "verify" else step, STEP_COLOURS[step]) for step in STEPS]
    if len(entries) == 1:
        key = [(bar.text.removesuffix(" ms").replace(":", ""), bar.colour) for bar in bars if bar.end > bar.start]
    return Chart("", "", "Mean time of a request (ms)", rows=[e["arch"] for e in entries], bars=bars, key=key)


def timeline(series: Mapping[str, Any]) -> list[Chart]:
    """A run over time, in charts with a common axis: requests, queues, batches, draft lengths, shares of lanes."""
    lanes = {what: [(lane, values, LANE_COLOURS[lane]) for lane, values in series[what].items()]
             for what in ("queue", "busy", "bandwidth")}  # fmt: skip
    panels: list[tuple[str, list[tuple[str, Any, str]], int]] = [
        ("In the system", [("requests", series["in_flight"], SLATE)], 1),
        ("Queues", [("not admitted", series["waiting"], LILAC), *lanes["queue"]], 1),
        ("Batch (rows)", [(kind, values, KIND_COLOURS[kind]) for kind, values in series["batch"].items()], 1),
        ("Draft length", [("draft", series["draft_length"], KIND_COLOURS["draft"])], 1),
        ("Busy (%)", lanes["busy"], 100),
        ("Copy bandwidth (%)", lanes["bandwidth"], 100),
    ]
    charts, edges = [], series["edges_s"]
    middles = (edges[1:] + edges[:-1]) / 2
    for title, lines, factor in panels:
        shown = [(name, np.asarray(values) * factor, colour) for name, values, colour in lines if len(values)]
        known = [(name, np.flatnonzero(~np.isnan(values)), values, colour) for name, values, colour in shown]
        traces = [Curve(name, colour, middles[at], values[at]) for name, at, values, colour in known if len(at)]
        if traces:
            top = 105.0 if factor > 1 else None
            charts.append(Chart(title, "", "Time (s)", traces, top=top, range=(edges[0], edges[-1]), height=180))
    return charts
