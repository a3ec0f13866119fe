"""What the page shows of a session: the metrics of the window, charts over time, distributions, the latest launches."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from pdvsim.live.gauge import LATENCIES, MARKS, STRIP_S
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import policy_of
from pdvsim.sim.records import LANES
from pdvsim.view.charts import DASHES, Bar, Chart, Curve, Dash, histogram
from pdvsim.view.style import KIND_COLOURS, LANE_COLOURS, arch_colour
from pdvsim.view.table import cell

WindowFigures = Sequence[dict[str, Any]]  # of each architecture, as `Gauge.figures` gives them
LiveContent = dict[str, Any] | None
SERIES = {"tokens_per_s": ("Output tokens per second", 1.0), "in_system": ("Requests in system", 1.0),
          "draft_length": ("Draft length", 1.0), "acceptance": ("Drafts accepted (%)", 100.0)}  # fmt: skip
RATES, LATENCY, BATCHES, LANE, CONTROL, CACHE = "rates", "latencies", "batches", "lanes", "controller", "caches"
MAIN_MARKS = {"ttft": (50.0, 99.0), "tpot": (50.0, 99.0), "e2el": (50.0,)}  # percentiles that are always shown
SLIGHT = 0.5  # percent, or points of shares: a difference of less has no colour
HEIGHT_PX = 190


class LivePart(NamedTuple):
    """A part of the page; its content comes with every `every`th update, and is None while it says nothing."""

    id: str
    title: str
    kind: str
    every: int
    content: Callable[[WindowFigures], LiveContent]


def parts(archs: Sequence[str], names: Sequence[str], levels_s: Mapping[str, float]) -> list[LivePart]:
    """The parts of a page of these architectures; `names` are theirs on the page, `levels_s` the service levels."""
    colours = [arch_colour(arch) for arch in archs]
    alone = len(set(colours)) == len(colours)
    dashes: list[Dash] = ["-" if alone else DASHES[at] for at in range(len(archs))]
    lanes = [policy_of(arch).lane_names() for arch in archs]
    drafting = [policy_of(arch).speculates for arch in archs]

    def compared(figures: WindowFigures) -> LiveContent:
        return {"table": {"heads": list(zip(names, colours, strict=True)), "rows": table_rows(figures)},
                "note": "Small: difference from the first, green if better." if len(names) > 1 else ""}  # fmt: skip

    def strip(figures: WindowFigures) -> LiveContent:
        rows = {(at, lane): f"{names[at]} {lane}" for at, own in enumerate(lanes) for lane in own}
        bars = [bar for at, shown in enumerate(figures) for bar in _launches(shown, at, [*rows])]
        key = [(kind, KIND_COLOURS[kind]) for kind in KINDS]
        span = (-1e3 * STRIP_S, 0.0)
        return _charts(Chart(x="ms from now", rows=[*rows.values()], bars=bars, key=key, range=span))

    def over_time(column: str) -> Callable[[WindowFigures], LiveContent]:
        scale = SERIES[column][1]

        def content(figures: WindowFigures) -> LiveContent:
            shown = [at for at in range(len(archs)) if drafting[at] or column not in ("draft_length", "acceptance")]
            return _lines([(names[at], colours[at], figures[at]["series"], column) for at in shown], scale, dashes)

        return content

    def spread(metric: str) -> Callable[[WindowFigures], LiveContent]:
        levels = [1e3 * levels_s[metric]] if metric in levels_s else []

        def content(figures: WindowFigures) -> LiveContent:
            [edges_ms, *_], counted = zip(*(shown["histograms"][metric] for shown in figures), strict=True)
            found = dict(zip(names, zip(colours, counted, strict=True), strict=True))
            shown = histogram(metric, edges_ms, found, log_x=True, levels=levels, height=HEIGHT_PX)
            return _charts(replace(shown, title=""))

        return content

    def queues(at: int) -> Callable[[WindowFigures], LiveContent]:
        def content(figures: WindowFigures) -> LiveContent:
            shown = [(lane, LANE_COLOURS[lane], figures[at]["series"], f"queue_{lane}") for lane in lanes[at]]
            return _lines(shown, 1.0, ["-"] * len(shown), gives_way=True)

        return content

    of = {metric: f"share of {'chunks' if metric == 'itl' else 'requests'}" for metric in LATENCIES}
    return [
        LivePart("strip", f"The last {1e3 * STRIP_S:.0f} ms", "wide", 1, strip),
        LivePart("table", "Metrics of the window", "table", 2, compared),
        *(LivePart(column, title, "", 3, over_time(column)) for column, (title, _) in SERIES.items()),
        *(LivePart(metric, f"{metric.upper()}: {of[metric]}", "", 6, spread(metric)) for metric in LATENCIES),
        *(LivePart(f"queues-{at}", f"{name}: queues", "", 6, queues(at)) for at, name in enumerate(names)),
    ]  # fmt: skip


def _charts(*charts: Chart) -> LiveContent:
    return {"charts": charts}


def _lines(
    lines: Sequence[tuple[str, str, dict[str, Any], str]], scale: float, dashes: Sequence[Dash], gives_way: bool = False
) -> LiveContent:
    """Series over time; nothing while they are constant: queues that are empty, a draft length that is fixed."""
    traces = []
    for (name, colour, series, column), dash in zip(lines, dashes, strict=False):
        known = ~np.isnan(series[column])
        traces.append(Curve(name, colour, series["time_s"][known], scale * series[column][known], dash=dash))
    chart = Chart(x="seconds", traces=traces, height=HEIGHT_PX, top=100.0 if scale > 1 else None)
    return None if chart.constant and (gives_way or not scale > 1) else _charts(chart)


def _launches(shown: dict[str, Any], at: int, rows: Sequence[tuple[int, str]]) -> list[Bar]:
    """The latest launches of an architecture."""
    columns = shown["strip"]
    bars = []
    for values in zip(
        *(columns[n].tolist() for n in ("lane", "kind", "start_s", "end_s", "rows", "tokens")), strict=True
    ):
        lane, kind, start_s, end_s, count, tokens = values
        said = f"{KINDS[kind]}: {count} rows, {tokens} tokens, {1e3 * (end_s - start_s):.2f} ms"
        start, end = (1e3 * (time_s - shown["now_s"]) for time_s in (max(start_s, shown["now_s"] - STRIP_S), end_s))
        bars.append(Bar(rows.index((at, LANES[lane])), start, end, KIND_COLOURS[KINDS[kind]], said))
    return bars


class Line(NamedTuple):
    """A metric: one value per architecture, None for those without it."""

    name: str
    values: list[float | None]
    group: str = ""  # that unfolds it; empty: always shown
    better: int = 0  # 1 if more is better, -1 if less is


def lines(figures: WindowFigures) -> list[Line]:
    """Every metric, those that are always shown first, then by group."""

    def line(name: str, key: str, group: str = "", better: int = 0) -> Line:
        return Line(name, [f[key] * (100 if name.endswith("(%)") else 1) for f in figures], group, better)

    table = [line("output tokens/s", "tokens_per_s", "", 1), line("requests/s finished", "requests_per_s", RATES, 1),
             line("requests/s arriving", "arrivals_per_s", RATES)]  # fmt: skip
    for name in LATENCIES:
        for at, mark in enumerate(MARKS):
            group = "" if mark in MAIN_MARKS.get(name, ()) else LATENCY
            values = [f["marks_ms"][name][at] for f in figures]
            table.append(Line(f"{name.upper()} p{mark:g} (ms)", values, group, -1))
    if any(not math.isnan(f["goodput_per_s"]) for f in figures):
        table.append(line("within service levels (%)", "attainment", "", 1))
        table.append(line("goodput (req/s)", "goodput_per_s", RATES, 1))
    table.append(line("requests in system", "in_system", "", -1))
    queued = [lane for lane in LANES if any(lane in f["queues"] for f in figures)]
    table += [Line(f"{lane} queue now", [f["queues"].get(lane) for f in figures], BATCHES) for lane in queued]
    for kind in (kind for kind in KINDS if any(kind in f["kinds"] for f in figures)):
        words, size = ("tokens", "mean_tokens") if kind == "prefill" else ("rows", "mean_batch")
        table.append(Line(f"{words} per {kind}", [f["kinds"].get(kind, {}).get(size) for f in figures], BATCHES))
    table += [line("draft length", "draft_length"), line("drafts accepted (%)", "acceptance", "", 1)]
    for name in dict.fromkeys(key for f in figures for key in f["controller"]):
        words = "last draft length" if name == "k" else f"controller: {name}"
        table.append(Line(words, [f["controller"].get(name) for f in figures], CONTROL))
    for lane in (lane for lane in LANES if any(lane in f["lanes"] for f in figures)):
        for key, words in (("utilisation", "SM busy"), ("bandwidth_share", "bandwidth")):
            shares = [100 * f["lanes"][lane][key] if lane in f["lanes"] else None for f in figures]
            table.append(Line(f"{lane}: {words} (%)", shares, LANE))
    table.append(line("KV cache in use (%)", "kv_share"))
    if any(not math.isnan(f["hit_rate"]) for f in figures):
        table.append(line("prefix cache hits (%)", "hit_rate", CACHE, 1))
    for name in dict.fromkeys(key for f in figures for key in f["cache"]):
        table.append(Line(name, [f["cache"].get(name) for f in figures], CACHE))
    groups = sorted(dict.fromkeys(line.group for line in table), key=bool)
    return sorted(table, key=lambda line: groups.index(line.group))


def table_rows(figures: WindowFigures) -> list[tuple[str, str, list[tuple[str, str, str]]]]:
    """The table's rows: name, group, and of each cell its text, its difference from the first, and its class."""
    late = [("overloaded", "", "grew") if f["overloaded"] else ("steady", "", "") for f in figures]
    rows = [("queue", "", late)]
    for line in lines(figures):
        first, *others = line.values
        rows.append((line.name, line.group, [_cell(first, None, line), *(_cell(v, first, line) for v in others)]))
    return rows


def _cell(value: float | None, first: float | None, line: Line) -> tuple[str, str, str]:
    """A value and its difference from the first, in percent, or points for shares."""
    if value is None or math.isnan(value):
        return "–", "", "unsure"
    figure = cell(value, 0 if isinstance(value, int) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2)
    is_share = line.name.endswith("(%)")
    if first is None or math.isnan(first) or not (first or is_share):
        return figure, "", ""
    more = value - first if is_share else 100 * (value / first - 1)
    gain = line.better * more
    return (
        figure,
        f"{round(more):+d}{' pt' if is_share else '%'}",
        "better" if gain >= SLIGHT else "worse" if gain <= -SLIGHT else "",
    )
