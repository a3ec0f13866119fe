"""The page's charts: metrics over time, latency distributions, and the latest launches of each architecture's lanes.

A chart is described once, for plotly.js: its traces name the columns of a source, and updates send columns only. One
that `gives_way` is hidden while its lines are constant: queues that are empty, a draft length that is fixed. `level` is
a service level, drawn as a line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from pdvsim.live.gauge import LATENCIES, STRIP_S
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import policy_of
from pdvsim.sim.records import LANES, Array
from pdvsim.view.style import KIND_COLOURS, LANE_COLOURS, arch_colour

SERIES = {
    "tokens_per_s": "Output tokens per second",
    "in_system": "Requests in system",
    "draft_length": "Draft length",
    "acceptance": "Drafts accepted (share)",
}
FAST = ("tokens_per_s", "in_system")
SLOW = ("draft_length", "acceptance", *(f"queue_{lane}" for lane in LANES))
UPDATES_PER_CYCLE = 6  # the strip in each, fast charts in every other, the others once
SLOW_TURN, SPREADS_TURN = 1, 3  # position in the cycle
HEIGHT_PX, MARGIN_PX, STRIP_LANE_PX, LETTER_PX = 210, 44, 22, 6
DASHES = ("solid", "dash", "dot", "dashdot")  # to distinguish lines of one colour
Chart = dict[str, Any]


class Charts:
    """Charts of the architectures `archs`; `names` are their names on the page."""

    def __init__(self, archs: Sequence[str], names: Sequence[str], levels_s: Mapping[str, float]) -> None:
        """`levels_s` are the service levels by metric."""
        self.archs, self.names, self.levels_s = archs, names, levels_s
        self.lead = [self._strip(), *map(self._over_time, SERIES)]
        self.others = [*map(self._spread, LATENCIES), *map(self._queues, range(len(archs)))]

    def due(self, turn: int) -> list[str]:
        """The sources to redraw in an update: the strip each time, slow charts less often."""
        turns = {"launches": 0, "fast": turn % 2, "slow": (turn - SLOW_TURN) % UPDATES_PER_CYCLE}
        turns["spreads"] = (turn - SPREADS_TURN) % UPDATES_PER_CYCLE
        return [name for name, waits in turns.items() if turn == 0 or not waits]

    def data(self, source: str, figures: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """The columns of a source for JSON; values that are not shown are None."""
        columns: dict[str, Any] = {}
        if source == "launches":
            columns = _strip_data(self.names, figures)
        elif source == "spreads":
            columns = _joined([_spread_columns(shown) for shown in figures])
        else:
            names = ("time_s", *(FAST if source == "fast" else SLOW))
            columns = _joined([{name: shown["series"][name] for name in names} for shown in figures])
        return {name: [None if item != item else item for item in _plain(column)] for name, column in columns.items()}

    def _over_time(self, column: str) -> Chart:
        shown = [at for at, arch in enumerate(self.archs) if column in FAST or policy_of(arch).speculates]
        lines = [self._line(at, f"time_s_{at}", f"{column}_{at}") for at in shown]
        axis = {"range": [0, 1]} if column == "acceptance" else {"rangemode": "tozero"}
        chart = _chart(SERIES[column], "fast" if column in FAST else "slow", lines, "seconds", yaxis=axis)
        return chart | {"legend": column == "tokens_per_s", "gives_way": column == "draft_length"}

    def _spread(self, metric: str) -> Chart:
        lines = [self._line(at, f"{metric}_ms_{at}", f"{metric}_{at}", "hv") for at in range(len(self.archs))]
        ticks = {"type": "log", "nticks": 5, "tickformat": "~s" if metric in ("ttft", "e2el") else "~r", "tickangle": 0}
        title = f"{metric.upper()}: share of {'chunks' if metric == 'itl' else 'requests'}"
        chart = _chart(title, "spreads", lines, "ms", xaxis=ticks)
        return chart | {"level": self.levels_s[metric] * 1e3} if metric in self.levels_s else chart

    def _queues(self, at: int) -> Chart:
        lines = [
            _trace({"x": f"time_s_{at}", "y": f"queue_{lane}_{at}"}, lane, LANE_COLOURS[lane])
            for lane in policy_of(self.archs[at]).lane_names()
        ]
        axis = {"rangemode": "tozero", "autorangeoptions": {"include": 4}}
        chart = _chart(f"{escape(self.names[at])}: queues", "slow", lines, "seconds", yaxis=axis)
        return chart | {"legend": True, "colour": arch_colour(self.archs[at]), "gives_way": True}

    def _strip(self) -> Chart:
        lanes = [policy_of(arch).lane_names() for arch in self.archs]
        rows = [_row(name, lane) for name, own in zip(self.names, lanes, strict=True) for lane in own]
        bars = {
            "type": "bar", "orientation": "h", "hovertemplate": "%{text}<extra></extra>", "textposition": "none",
            "columns": {"y": "row", "base": "start_ms", "x": "span_ms", "text": "label", "colour": "colour"},
        }  # fmt: skip
        axis = {"categoryarray": rows[::-1], "range": [-0.5, len(rows) - 0.5], "type": "category", "showgrid": False}
        title, span = f"The last {STRIP_S * 1e3:.0f} ms", {"range": [-STRIP_S * 1e3, 0]}
        chart = _chart(title, "launches", [bars], "ms from now", xaxis=span, yaxis=axis)
        margin_px = 10 + LETTER_PX * max(map(len, rows))  # measuring the labels in each update would take longer
        return chart | {"height": 80 + STRIP_LANE_PX * len(rows), "margin": margin_px, "wide": True}

    def _line(self, at: int, x: str, y: str, shape: str = "linear") -> Chart:
        """A line of an architecture; dashed if another has the same colour."""
        colour = arch_colour(self.archs[at])
        alone = sum(arch_colour(other) == colour for other in self.archs) == 1
        line = _trace({"x": x, "y": y}, escape(self.names[at]), colour)
        line["line"] |= {"dash": "solid" if alone else DASHES[at], "shape": shape}
        return line


def _trace(columns: dict[str, str], name: str, colour: str) -> Chart:
    line = {"color": colour, "width": 2}
    return {
        "type": "scatter", "mode": "lines", "name": name, "line": line, "columns": columns, "cliponaxis": False,
        "hovertemplate": "%{y:,.3~r}",
    }  # fmt: skip


def _chart(
    title: str, source: str, traces: list[Chart], x: str, xaxis: Chart | None = None, yaxis: Chart | None = None
) -> Chart:
    axes = {"xaxis": {"title": {"text": x}, **(xaxis or {})}, "yaxis": yaxis or {"rangemode": "tozero"}}
    return {
        "title": title,
        "source": source,
        "traces": traces,
        "height": HEIGHT_PX,
        "margin": MARGIN_PX,
        "legend": False,
        **axes,
    }


def _row(name: str, lane: str) -> str:
    """The label of a lane."""
    return f"{escape(name)} {lane}"


def _strip_data(names: Sequence[str], figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The launches of all architectures, as bars on their lanes."""
    columns: dict[str, list[Any]] = {name: [] for name in ("row", "start_ms", "span_ms", "colour", "label")}
    for name, shown in zip(names, figures, strict=True):
        rows, now_s = shown["strip"], shown["now_s"]
        starts_ms = np.maximum((rows["start_s"] - now_s) * 1e3, -STRIP_S * 1e3)
        columns["start_ms"] += starts_ms.tolist()
        columns["span_ms"] += ((rows["end_s"] - now_s) * 1e3 - starts_ms).tolist()
        columns["row"] += [_row(name, LANES[int(lane)]) for lane in rows["lane"]]
        kinds, took_ms = [KINDS[int(kind)] for kind in rows["kind"]], (rows["end_s"] - rows["start_s"]) * 1e3
        columns["colour"] += [KIND_COLOURS[kind] for kind in kinds]
        columns["label"] += [
            f"{kind}: {count} rows, {tokens} tokens, {ms:.2f} ms"
            for kind, count, tokens, ms in zip(kinds, rows["rows"], rows["tokens"], took_ms, strict=True)
        ]
    return columns


def _spread_columns(shown: dict[str, Any]) -> dict[str, Array]:
    """Bin edges of each metric, and the share from each edge."""
    columns: dict[str, Array] = {}
    for metric, (edges_ms, shares) in shown["histograms"].items():
        columns[f"{metric}_ms"], columns[metric] = edges_ms, np.append(shares, 0.0)
    return columns


def _joined(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Columns of all architectures together; shorter ones are padded with values that are not shown."""
    columns = [{name: np.asarray(column, float) for name, column in part.items()} for part in parts]
    rows = max(len(column) for part in columns for column in part.values())
    return {
        f"{name}_{at}": np.pad(column, (0, rows - len(column)), constant_values=np.nan)
        for at, part in enumerate(columns)
        for name, column in part.items()
    }


def _plain(column: Sequence[Any] | Array) -> list[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)
