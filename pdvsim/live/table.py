"""The metrics of the window as one table: one column per architecture, with the difference from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from pdvsim.live.gauge import LATENCIES, MARKS
from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES
from pdvsim.view.style import KIND_COLOURS, arch_colour
from pdvsim.view.table import cell

NAME_PX, FIGURE_PX = 150, 100
BETTER, WORSE, LIKE = "#1a6b3c", "#a34700", "#59636b"
SLIGHT = 0.5  # percent, or points of shares: a difference of less has no colour
RATES, LATENCY, BATCHES, LANE, CONTROL, CACHE = "rates", "latencies", "batches", "lanes", "controller", "caches"
MAIN_MARKS = {"ttft": (50.0, 99.0), "tpot": (50.0, 99.0), "e2el": (50.0,)}  # percentiles that are always shown


class Line(NamedTuple):
    """A metric: one value per architecture, None for those without it."""

    name: str
    values: list[float | None]
    group: str = ""  # that unfolds it; empty: always shown
    better: int = 0  # 1 if more is better, -1 if less is


def lines(figures: Sequence[dict[str, Any]]) -> list[Line]:
    """Every metric, those that are always shown first, then by group."""
    table = [
        Line("output tokens/s", [f["tokens_per_s"] for f in figures], "", 1),
        Line("requests/s finished", [f["requests_per_s"] for f in figures], RATES, 1),
        Line("requests/s arriving", [f["arrivals_per_s"] for f in figures], RATES),
    ]
    for name in LATENCIES:
        for at, mark in enumerate(MARKS):
            group = "" if mark in MAIN_MARKS.get(name, ()) else LATENCY
            values = [f["marks_ms"][name][at] for f in figures]
            table.append(Line(f"{name.upper()} p{mark:g} (ms)", values, group, -1))
    if any(not math.isnan(f["goodput_per_s"]) for f in figures):
        table.append(Line("within service levels (%)", [100 * f["attainment"] for f in figures], "", 1))
        table.append(Line("goodput (req/s)", [f["goodput_per_s"] for f in figures], RATES, 1))
    table.append(Line("requests in system", [f["in_system"] for f in figures], "", -1))
    table += [
        Line(f"{lane} queue now", [f["queues"].get(lane) for f in figures], BATCHES)
        for lane in LANES
        if any(lane in f["queues"] for f in figures)
    ]
    table += [
        Line(words.format(kind), [f["kinds"].get(kind, {}).get(size) for f in figures], BATCHES)
        for kind in KINDS
        for words, size in [("tokens per {}", "mean_tokens") if kind == "prefill" else ("rows per {}", "mean_batch")]
        if any(kind in f["kinds"] for f in figures)
    ]
    table.append(Line("draft length", [f["draft_length"] for f in figures]))
    table.append(Line("drafts accepted (%)", [100 * f["acceptance"] for f in figures], "", 1))
    for name in dict.fromkeys(key for f in figures for key in f["controller"]):
        words = "last draft length" if name == "k" else f"controller: {name}"
        table.append(Line(words, [f["controller"].get(name) for f in figures], CONTROL))
    for lane in LANES:
        if any(lane in f["lanes"] for f in figures):
            for key, words in (("utilisation", "SM busy"), ("bandwidth_share", "bandwidth")):
                shares = [f["lanes"][lane][key] if lane in f["lanes"] else None for f in figures]
                table.append(Line(f"{lane}: {words} (%)", [None if s is None else 100 * s for s in shares], LANE))
    table.append(Line("KV cache in use (%)", [100 * f["kv_share"] for f in figures]))
    if any(not math.isnan(f["hit_rate"]) for f in figures):
        table.append(Line("prefix cache hits (%)", [100 * f["hit_rate"] for f in figures], CACHE, 1))
    for name in dict.fromkeys(key for f in figures for key in f["cache"]):
        table.append(Line(name, [f["cache"].get(name) for f in figures], CACHE))
    groups = dict.fromkeys(line.group for line in table)
    return [line for group in sorted(groups, key=bool) for line in table if line.group == group]


def table_px(columns: int) -> int:
    """Width of the table, independent of its content."""
    return NAME_PX + FIGURE_PX * columns


def table_html(archs: Sequence[str], names: Sequence[str], figures: Sequence[dict[str, Any]]) -> str:
    """The table as HTML; names are text."""
    style = "text-align:right;padding:2px 4px 2px 0;vertical-align:bottom;font-size:11px;overflow-wrap:anywhere"
    heads = "".join(
        f'<th style="{style};border-bottom:3px solid {arch_colour(arch)}">{escape(name)}</th>'
        for arch, name in zip(archs, names, strict=True)
    )
    rows, group = [], ""
    for line in lines(figures):
        if line.group != group:
            group = line.group
            rows.append(f'<tr class="group" data-group="{group}"><td colspan="{1 + len(names)}">{group}</td></tr>')
        cells = [_cell(value, line.values[0] if at else None, line) for at, value in enumerate(line.values)]
        folded = f' class="in-{group}"' if group else ""
        name = f'<td style="padding:1px 4px 1px 0;white-space:nowrap">{escape(line.name)}</td>'
        rows.append(f"<tr{folded}>{name}{''.join(cells)}</tr>")
    kinds = "".join(
        f'<span style="white-space:nowrap;margin-right:10px"><span style="display:inline-block;width:10px;height:10px;'
        f'background:{KIND_COLOURS[kind]}"></span> {kind}</span>'
        for kind in KINDS
    )
    style = f"border-collapse:collapse;table-layout:fixed;width:{table_px(len(names))}px"
    head = f'<tr><th style="width:{NAME_PX}px"></th>{heads}</tr>'
    states = "".join(map(_state, figures))
    head += f'<tr><td style="padding:1px 4px 1px 0">queue</td>{states}</tr>'
    table = f'<table style="{style};font-variant-numeric:tabular-nums">{head}'
    against = f"Small: difference from {escape(names[0])}, green if better. " if len(names) > 1 else ""
    note = f'<p style="margin:6px 0 0;color:#59636b">{against}Launches: {kinds}</p>'
    return f"{table}{''.join(rows)}</table>{note}"


def _state(shown: dict[str, Any]) -> str:
    """Whether the queue grew in the window, so that latencies keep increasing."""
    look, word = (
        ("color:#a34700;font-weight:bold", "overloaded") if shown["overloaded"] else ("color:#59636b", "steady")
    )
    return f'<td style="text-align:right;padding:1px 4px;{look}">{word}</td>'


def _cell(value: float | None, first: float | None, line: Line) -> str:
    """A value and its difference from the first, in percent, or points for shares; coloured if one is better."""
    if value is None or math.isnan(value):
        return '<td style="text-align:right;padding:1px 4px;color:#8a949c">–</td>'
    difference, is_share = "", line.name.endswith("(%)")
    if first is not None and not math.isnan(first) and (first or is_share):
        more = value - first if is_share else 100 * (value / first - 1)
        gain = line.better * more
        colour = BETTER if gain >= SLIGHT else WORSE if gain <= -SLIGHT else LIKE
        by = f"{round(more):+d}{' pt' if is_share else '%'}"
        difference = f' <small style="color:{colour}">{by}</small>'
    figure = cell(value, 0 if isinstance(value, int) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2)
    return f'<td style="text-align:right;padding:1px 4px;white-space:nowrap">{figure}{difference}</td>'
