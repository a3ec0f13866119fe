"""The page's charts: metrics over time, latency distributions, and the latest launches of each architecture's lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from bokeh.models import (
    ColumnDataSource,
    DataRange1d,
    FactorRange,
    FixedTicker,
    HoverTool,
    NumeralTickFormatter,
    Range1d,
)  # fmt: skip
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure

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
TICKS_MS = [first * 10.0**power for power in range(-1, 7) for first in (1, 2, 5)]  # of the latency axes
STRIP_LANE_PX = 22
DASHES = ("solid", "dashed", "dotted", "dotdash", "dashdot")  # to distinguish lines of one colour


class Charts:
    """Charts of the architectures `archs`; `names` are their names on the page.

    `figures` are shown first.
    """

    def __init__(self, archs: Sequence[str], names: Sequence[str], figures: Sequence[dict[str, Any]]) -> None:
        self.archs, self.names = archs, names
        # one source for all architectures: each message may redraw a chart
        sources = {name: ColumnDataSource(name=name, data=make(figures)) for name, make in self._columns().items()}
        self._launches, self._fast, self._slow = sources["launches"], sources["fast"], sources["slow"]
        self._spreads = sources["spreads"]
        self.roots: list[Any] = []
        self._add(self._strip(), "lead_strip")
        for column in SERIES:
            self._add(self._over_time(column), f"lead_{column}")
        for metric in LATENCIES:
            self._add(self._spread(metric), f"chart_{metric}")
        for at, arch in enumerate(archs):
            self._add(self._queues(at, arch), f"chart_queues_{at}")

    def due(self, turn: int) -> list[str]:
        """The sources to redraw after so many updates: the strip each time, slow charts less often."""
        turns = {"launches": 0, "fast": turn % 2, "slow": (turn - SLOW_TURN) % UPDATES_PER_CYCLE}
        turns["spreads"] = (turn - SPREADS_TURN) % UPDATES_PER_CYCLE
        return [name for name, waits in turns.items() if turn == 0 or not waits]

    def data(self, source: str, figures: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
        """The columns of a source for JSON; values that are not shown are None."""
        columns = self._columns()[source](figures)
        return {name: [None if item != item else item for item in _plain(column)] for name, column in columns.items()}

    def _columns(self) -> dict[str, Callable[[Sequence[dict[str, Any]]], dict[str, Any]]]:
        return {
            "launches": lambda figures: _strip_data(self.names, figures),
            "fast": lambda figures: _joined([_columns(shown, FAST) for shown in figures]),
            "slow": lambda figures: _joined([_columns(shown, SLOW) for shown in figures]),
            "spreads": lambda figures: _joined([_spread_columns(shown) for shown in figures]),
        }

    def _add(self, plot: Any, name: str) -> None:
        plot.name = name
        plot.toolbar.logo = None
        plot.title.text_font_size = "13px"
        plot.background_fill_color = plot.border_fill_color = "#ffffff"
        self.roots.append(plot)

    def _over_time(self, column: str) -> Any:
        plot = _plot(SERIES[column], x_axis_label="seconds")
        plot.y_range = DataRange1d(start=0) if column != "acceptance" else Range1d(0, 1)
        source = self._fast if column in FAST else self._slow
        for at, (arch, name, dash) in enumerate(zip(self.archs, self.names, DASHES, strict=False)):
            style = {"color": arch_colour(arch), "line_width": 2, "line_dash": dash if self._twins(arch) else "solid"}
            legend = {"legend_label": name} if column == "tokens_per_s" else {}
            if column not in FAST and not policy_of(arch).speculates:
                continue
            plot.line(f"time_s_{at}", f"{column}_{at}", source=source, **style, **legend)
        if column == "tokens_per_s":
            _legend_below(plot)
        return plot

    def _spread(self, metric: str) -> Any:
        plot = _plot(f"{metric.upper()}: share of {'chunks' if metric == 'itl' else 'requests'}", x_axis_type="log")
        plot.xaxis.axis_label = "ms"
        plot.xaxis.ticker, plot.xaxis.formatter = FixedTicker(ticks=TICKS_MS), NumeralTickFormatter(format="0.[0]a")
        plot.y_range = DataRange1d(start=0)
        for at, (arch, dash) in enumerate(zip(self.archs, DASHES, strict=False)):
            plot.step(
                f"{metric}_ms_{at}", f"{metric}_{at}", source=self._spreads, mode="after", color=arch_colour(arch),
                line_width=2, line_dash=dash if self._twins(arch) else "solid",
            )  # fmt: skip
        return plot

    def _queues(self, at: int, arch: str) -> Any:
        plot = _plot(f"{self.names[at]}: queues", x_axis_label="seconds")
        plot.title.text_color = arch_colour(arch)
        plot.y_range = DataRange1d(start=0, min_interval=4)
        for lane in lanes_of(arch):
            plot.line(
                f"time_s_{at}", f"queue_{lane}_{at}", source=self._slow, color=LANE_COLOURS[lane], line_width=2,
                legend_label=lane,
            )  # fmt: skip
        _legend_below(plot)
        return plot

    def _strip(self) -> Any:
        rows = [(name, lane) for arch, name in zip(self.archs, self.names, strict=True) for lane in lanes_of(arch)]
        plot = _plot(
            f"The last {STRIP_S * 1e3:.0f} ms", height=70 + STRIP_LANE_PX * (len(rows) + len(self.archs)),
            y_range=FactorRange(*reversed(rows), group_padding=0.8), x_range=Range1d(-STRIP_S * 1e3, 0),
        )  # fmt: skip
        plot.xaxis.axis_label = "ms from now"
        plot.yaxis.group_label_orientation = "horizontal"
        plot.yaxis.group_text_font_size = "12px"
        plot.yaxis.separator_line_color = plot.ygrid.grid_line_color = None
        bars: GlyphRenderer[Any] = plot.hbar(
            y="row", left="start_ms", right="end_ms", height=0.8, color="colour", line_color="#ffffff",
            source=self._launches,
        )  # fmt: skip
        tips = [("", "@kind"), ("rows", "@rows"), ("tokens", "@tokens"), ("took", "@took ms")]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))
        return plot

    def _twins(self, arch: str) -> bool:
        return sum(arch_colour(other) == arch_colour(arch) for other in self.archs) > 1


def lanes_of(arch: str) -> tuple[str, ...]:
    """The lanes that an architecture has."""
    return policy_of(arch).lane_names()  # type: ignore[no-any-return]


def _plot(title: str, height: int = 200, **options: Any) -> Any:
    plot = figure(title=title, height=height, sizing_mode="stretch_width", tools="", toolbar_location=None, **options)
    plot.axis.minor_tick_line_color = None
    return plot


def _legend_below(plot: Any) -> None:
    """Legend, placed where it hides no line."""
    legend = plot.legend[0]
    legend.orientation, legend.border_line_color = "horizontal", None
    legend.padding = legend.margin = 0
    legend.spacing, legend.label_height, legend.glyph_height = 4, 12, 12
    legend.label_text_font_size = "11px"
    legend.ncols = 3 if len(legend.items) > 4 else 2 if len(legend.items) > 3 else "auto"  # fits a phone screen
    plot.add_layout(legend, "below")


def _strip_data(names: Sequence[str], figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The launches of all architectures, as bars on their lanes."""
    names_of = ("row", "kind", "colour", "start_ms", "end_ms", "took", "rows", "tokens")
    columns: dict[str, list[Any]] = {name: [] for name in names_of}
    for name, shown in zip(names, figures, strict=True):
        rows, now_s = shown["strip"], shown["now_s"]
        kinds = [KINDS[int(kind)] for kind in rows["kind"]]
        columns["row"] += [(name, LANES[int(lane)]) for lane in rows["lane"]]
        columns["kind"] += kinds
        columns["colour"] += [KIND_COLOURS[kind] for kind in kinds]
        columns["start_ms"] += np.maximum((rows["start_s"] - now_s) * 1e3, -STRIP_S * 1e3).tolist()
        columns["end_ms"] += ((rows["end_s"] - now_s) * 1e3).tolist()
        columns["took"] += np.round((rows["end_s"] - rows["start_s"]) * 1e3, 2).tolist()
        for column in ("rows", "tokens"):
            columns[column] += rows[column].tolist()
    return columns


def _columns(shown: dict[str, Any], names: Sequence[str]) -> dict[str, Array]:
    return {name: shown["series"][name] for name in ("time_s", *names)}


def _spread_columns(shown: dict[str, Any]) -> dict[str, Array]:
    """Bin edges of each metric, and the share from each edge."""
    columns: dict[str, Array] = {}
    for metric, (edges_ms, shares) in shown["histograms"].items():
        columns[f"{metric}_ms"], columns[metric] = edges_ms, np.append(shares, 0.0)
    return columns


def _joined(parts: Sequence[dict[str, Array]]) -> dict[str, Array]:
    """Columns of all architectures together; shorter ones are padded with values that are not shown."""
    drawn = [{name: _drawable(column) for name, column in part.items()} for part in parts]
    rows = max(len(column) for part in drawn for column in part.values())
    return {
        f"{name}_{at}": np.pad(column, (0, rows - len(column)), constant_values=np.nan)
        for at, part in enumerate(drawn)
        for name, column in part.items()
    }


def _plain(column: Sequence[Any] | Array) -> list[Any]:
    return column.tolist() if isinstance(column, np.ndarray) else list(column)


def _drawable(column: Sequence[float] | Array) -> Array:
    """A column as numbers; an empty one becomes a point at 0, as an empty chart has no axes."""
    return np.asarray(column, float) if len(column) else np.zeros(1)
