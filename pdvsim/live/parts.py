"""What the page shows of a session: the metrics of the window, charts over time, distributions, the latest launches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from pdvsim.live.gauge import STRIP_S, LiveWindow
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import policy_of
from pdvsim.sim.records import LANES, Array
from pdvsim.view.charts import DASHES, Bar, Chart, Curve, Dash, histogram
from pdvsim.view.report.sheet import metric_table
from pdvsim.view.style import KIND_COLOURS, LANE_COLOURS, arch_colour, better, name_of
from pdvsim.view.table import cell

LiveContent = dict[str, Any] | None
GROUPS = {  # of the table's metrics; those without a name are always shown
    r"output_throughput|median_(ttft|tpot|e2el)_ms|p99_(ttft|tpot)_ms|attainment|in_system|draft_length|kv_share"
    r"|spec_decode_judged_acceptance_rate": "",
    r"request_throughput|arrival_rate|request_goodput": "rates",
    r"[^_]+_(ttft|tpot|itl|e2el)_ms": "latencies",
    r"lanes_.*_queue|kinds_prefill_mean_tokens|kinds_(?!prefill).*_mean_batch": "batches",
    r"last draft length|controller: .*": "controller",
    r"lanes_.*_(utilisation|bandwidth_share)": "lanes",
    r"prefix_cache_hit_rate|KV .*|evicted blocks": "caches",
}
SERIES = {"tokens_per_s": "Output tokens per second", "in_flight": "Requests in system",
          "draft_length": "Draft length", "acceptance": "Drafts accepted (%)"}  # fmt: skip
COUNT = {"ttft": "requests", "tpot": "requests", "itl": "chunks", "e2el": "requests"}  # what latencies are of
SLIGHT = 0.5  # percent, or points of shares: a difference of less has no colour
HEIGHT_PX = 190


class LivePart(NamedTuple):
    """A part of the page; its content comes with every `every`th update, and is None while it says nothing."""

    id: str
    title: str
    kind: str
    every: int
    content: Callable[[Sequence[LiveWindow]], LiveContent]


def parts(archs: Sequence[str], names: Sequence[str], levels_s: Mapping[str, float]) -> list[LivePart]:
    """The parts of a page of these architectures; `names` are theirs on the page, `levels_s` the service levels."""
    colours = [arch_colour(arch) for arch in archs]
    heads = list(zip(names, colours, strict=True))
    dashes: list[Dash] = ["-" if len(set(colours)) == len(colours) else DASHES[at] for at in range(len(archs))]
    lanes = [policy_of(arch).lane_names() for arch in archs]
    drafting = [policy_of(arch).speculates for arch in archs]
    curves = [Curve(*head, dash=dash) for head, dash in zip(heads, dashes, strict=True)]

    def compared(windows: Sequence[LiveWindow]) -> LiveContent:
        note = "Small: difference from the first, green if better." if len(names) > 1 else ""
        return {"table": table(heads, windows), "note": note}

    def strip(windows: Sequence[LiveWindow]) -> LiveContent:
        rows = {(at, lane): f"{names[at]} {lane}" for at, own in enumerate(lanes) for lane in own}
        bars = [bar for at, window in enumerate(windows) for bar in _launches(window, at, [*rows])]
        key = [(kind, KIND_COLOURS[kind]) for kind in KINDS]
        return {
            "charts": [Chart(x="ms from now", rows=[*rows.values()], bars=bars, key=key, range=(-1e3 * STRIP_S, 0.0))]
        }

    def over_time(column: str, windows: Sequence[LiveWindow]) -> LiveContent:
        shown = [at for at in range(len(archs)) if drafting[at] or column not in ("draft_length", "acceptance")]
        lines = [(curves[at], windows[at].series["edges_s"], windows[at].series[column]) for at in shown]
        return _lines(lines, column == "acceptance")

    def spread(metric: str, windows: Sequence[LiveWindow]) -> LiveContent:
        levels = [1e3 * levels_s[metric]] if metric in levels_s else []
        ms = {name: (colour, w.latencies_ms[metric]) for (name, colour), w in zip(heads, windows, strict=True)}
        return {"charts": [histogram(metric, ms, levels=levels, height=HEIGHT_PX, title="")]}

    def queues(at: int, windows: Sequence[LiveWindow]) -> LiveContent:
        series, own = windows[at].series, [Curve(lane, LANE_COLOURS[lane]) for lane in lanes[at]]
        return _lines([(curve, series["edges_s"], series["queue"].get(curve.name, ())) for curve in own])

    return [
        LivePart("strip", f"The last {1e3 * STRIP_S:.0f} ms", "wide", 1, strip),
        LivePart("table", "Metrics of the window", "table", 3, compared),
        *(LivePart(column, title, "", 4, partial(over_time, column)) for column, title in SERIES.items()),
        *(LivePart(name, f"{name.upper()}: share of {of}", "", 8, partial(spread, name)) for name, of in COUNT.items()),
        *(LivePart(f"queues-{at}", f"{name}: queues", "", 8, partial(queues, at)) for at, name in enumerate(names)),
    ]  # fmt: skip


def _lines(lines: Sequence[tuple[Curve, Array, Any]], share: bool = False) -> LiveContent:
    """Values between edges over time; nothing while they are constant: empty queues, a fixed draft length."""
    traces = []
    for curve, edges_s, values in lines:
        values = np.asarray(values, float)
        known = np.flatnonzero(~np.isnan(values))
        traces.append(replace(curve, x=edges_s[1:][known], y=values[known]))
    chart = Chart(x="seconds", traces=traces, height=HEIGHT_PX, top=100.0 if share else None)
    constant = all(len(set(np.asarray(trace.y).tolist())) < 2 for trace in traces)
    return None if constant and not share else {"charts": [chart]}


def _launches(window: LiveWindow, at: int, rows: Sequence[tuple[int, str]]) -> list[Bar]:
    """The latest launches of an architecture."""
    launches, bars, since_s = window.latest, [], window.end_s - STRIP_S
    columns = (launches[name].tolist() for name in ("lane", "kind", "start_s", "end_s", "rows", "tokens"))
    for lane, kind, start_s, end_s, count, tokens in zip(*columns, strict=True):
        said = f"{KINDS[kind]}: {count} rows, {tokens} tokens, {1e3 * (end_s - start_s):.2f} ms"
        start, end = (1e3 * (time_s - window.end_s) for time_s in (max(start_s, since_s), end_s))
        bars.append(Bar(rows.index((at, LANES[lane])), start, end, KIND_COLOURS[KINDS[kind]], said))
    return bars


def table(heads: Sequence[tuple[str, str]], windows: Sequence[LiveWindow]) -> dict[str, Any]:
    """The metrics of the windows, those that are always shown first, with their differences from the first window."""
    every = dict.fromkeys(column for window in windows for column in window.metrics)
    groups: dict[str, str] = {}
    for pattern, group in GROUPS.items():
        groups |= {column: group for column in every if column not in groups and re.fullmatch(pattern, column)}

    def shown(column: str, at: int) -> tuple[str, str, str]:
        values = [window.metrics.get(column, math.nan) for window in windows]
        return _cell(column, values[at], values[0] if at else math.nan)

    queues = ["overloaded" if window.overloaded else "steady" for window in windows]
    return metric_table(heads, queues, groups, shown)


def _cell(column: str, value: float, first: float) -> tuple[str, str, str]:
    """A value and its difference from the first, in percent, or points for shares."""
    _, unit, scale = name_of(column)
    value, first, share = value * scale, first * scale, unit == "%"
    if math.isnan(value):
        return "–", "", "unsure"
    figure = cell(value, 0 if float(value).is_integer() or abs(value) >= 100 else 1 if abs(value) >= 10 else 2)
    if math.isnan(first) or not (first or share):
        return figure, "", ""
    more = value - first if share else 100 * (value / first - 1)
    gain = better(column) * more
    kind = "better" if gain >= SLIGHT else "worse" if gain <= -SLIGHT else ""
    return figure, f"{round(more):+d}{' pt' if share else '%'}", kind
