"""The metrics of the window as one table: one column per architecture, with the difference from the first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from pdvsim.live.gauge import LATENCIES, MARKS
from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES
from pdvsim.view.style import KIND_COLOURS, arch_colour
from pdvsim.view.table import cell

NAME_PX, FIGURE_PX = 150, 100
Line = tuple[str, list[float | None]]  # a name, and one value per architecture


def lines(figures: Sequence[dict[str, Any]]) -> list[Line]:
    """Every metric by name; None for architectures without it."""
    table: list[Line] = [
        ("output tokens/s", [f["tokens_per_s"] for f in figures]),
        ("requests/s finished", [f["requests_per_s"] for f in figures]),
        ("requests/s arriving", [f["arrivals_per_s"] for f in figures]),
    ]
    for name in LATENCIES:
        table += [
            (f"{name.upper()} p{mark:g} (ms)", [f["marks_ms"][name][at] for f in figures])
            for at, mark in enumerate(MARKS)
        ]
    if any(not math.isnan(f["goodput_per_s"]) for f in figures):
        table.append(("within service levels (%)", [100 * f["attainment"] for f in figures]))
        table.append(("goodput (req/s)", [f["goodput_per_s"] for f in figures]))
    table.append(("requests in system", [f["in_system"] for f in figures]))
    table += [
        (f"{lane} queue now", [f["queues"].get(lane) for f in figures])
        for lane in LANES
        if any(lane in f["queues"] for f in figures)
    ]
    table += [
        (words.format(kind), [f["kinds"].get(kind, {}).get(size) for f in figures])
        for kind in KINDS
        for words, size in [("tokens per {}", "mean_tokens") if kind == "prefill" else ("rows per {}", "mean_batch")]
        if any(kind in f["kinds"] for f in figures)
    ]
    table.append(("draft length", [f["draft_length"] for f in figures]))
    table.append(("drafts accepted (%)", [100 * f["acceptance"] for f in figures]))
    for name in dict.fromkeys(key for f in figures for key in f["controller"]):
        words = "last draft length" if name == "k" else f"controller: {name}"
        table.append((words, [f["controller"].get(name) for f in figures]))
    for lane in LANES:
        if any(lane in f["lanes"] for f in figures):
            for key, words in (("utilisation", "SM busy"), ("bandwidth_share", "bandwidth")):
                shares = [f["lanes"][lane][key] if lane in f["lanes"] else None for f in figures]
                table.append((f"{lane}: {words} (%)", [None if s is None else 100 * s for s in shares]))
    table.append(("KV cache in use (%)", [100 * f["kv_share"] for f in figures]))
    if any(not math.isnan(f["hit_rate"]) for f in figures):
        table.append(("prefix cache hits (%)", [100 * f["hit_rate"] for f in figures]))
    for name in dict.fromkeys(key for f in figures for key in f["cache"]):
        table.append((name, [f["cache"].get(name) for f in figures]))
    return table


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
    rows = []
    for name, values in lines(figures):
        first = values[0]
        cells = [_cell(value, None if at == 0 else first, name.endswith("(%)")) for at, value in enumerate(values)]
        rows.append(
            f'<tr><td style="padding:1px 4px 1px 0;white-space:nowrap">{escape(name)}</td>{"".join(cells)}</tr>'
        )
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
    against = f"Small: difference from {escape(names[0])}. " if len(names) > 1 else ""
    note = f'<p style="margin:6px 0 0;color:#59636b">{against}Launches: {kinds}</p>'
    return f"{table}{''.join(rows)}</table>{note}"


def _state(shown: dict[str, Any]) -> str:
    """Whether the queue grew in the window, so that latencies keep increasing."""
    look, word = (
        ("color:#a34700;font-weight:bold", "overloaded") if shown["overloaded"] else ("color:#59636b", "steady")
    )
    return f'<td style="text-align:right;padding:1px 4px;{look}">{word}</td>'


def _cell(value: float | None, first: float | None, is_share: bool) -> str:
    """A value and its difference from the first, in percent, or points for shares."""
    if value is None or math.isnan(value):
        return '<td style="text-align:right;padding:1px 4px;color:#8a949c">–</td>'
    difference = ""
    if first is not None and not math.isnan(first) and (first or is_share):
        more = value - first if is_share else 100 * (value / first - 1)
        by = f"{round(more):+d}{' pt' if is_share else '%'}"
        difference = f' <small style="color:#59636b">{by}</small>'
    figure = cell(value, 0 if isinstance(value, int) or abs(value) >= 100 else 1 if abs(value) >= 10 else 2)
    return f'<td style="text-align:right;padding:1px 4px;white-space:nowrap">{figure}{difference}</td>'
