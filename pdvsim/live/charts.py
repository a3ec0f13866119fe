"""The page's charts: what went over time, how latencies are spread, and what each architecture's lanes did just now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, DataRange1d, FactorRange, HoverTool, Range1d
from bokeh.models.renderers import GlyphRenderer
from bokeh.plotting import figure

from pdvsim.live.gauge import LATENCIES, STRIP_S
from pdvsim.sim.core import KINDS
from pdvsim.sim.policies import ARCHITECTURES, kin, policy_of
from pdvsim.sim.records import LANES, Array
from pdvsim.view.style import KIND_COLOURS, LANE_COLOURS, RAMP, arch_colour

SERIES = {
    "tokens_per_s": "Output tokens a second",
    "in_system": "Requests in system",
    "draft_length": "Draft length",
    "acceptance": "Drafts accepted, of those judged",
}
FAST = ("tokens_per_s", "in_system")
RARELY = 3  # pictures, for the other charts
DASHES = ("solid", "dashed", "dotted", "dotdash")  # two of one colour are told apart by these


class Charts:
    """Charts over the architectures, in the order of `archs`; `names` are what they are called on the page.

    `errors` are the metrics whose error is drawn, where a simulation stands beside a real run.
    """

    def __init__(self, archs: Sequence[str], names: Sequence[str], errors: Sequence[str] = ()) -> None:
        self.archs, self.names = archs, names
        self._series = [ColumnDataSource(_no_series()) for _ in archs]
        self._slow = [ColumnDataSource(_no_series()) for _ in archs]
        self._turn = 0
        self._spreads = [ColumnDataSource(_no_spreads()) for _ in archs]
        self._strips = [ColumnDataSource(_no_strip()) for _ in archs]
        self.roots: list[Any] = []
        self._errors = ColumnDataSource({name: [] for name in ("time_s", *errors)})
        if errors:
            self._add(self._error(errors), "chart_errors")
        for column in FAST:
            self._add(self._over_time(column), f"chart_{column}")
        for draw, what in ((self._strip, "strip"), (self._queues, "queues")):
            for at, arch in enumerate(archs):
                self._add(draw(at, arch), f"chart_{what}_{at}")
        for metric in LATENCIES:
            self._add(self._spread(metric), f"chart_{metric}")
        for column in ("draft_length", "acceptance"):
            self._add(self._over_time(column), f"chart_{column}")

    def show(self, figures: Sequence[dict[str, Any]]) -> None:
        """Draw the latest; what moves slowly is drawn more rarely."""
        self._turn = (self._turn + 1) % RARELY
        for at, shown in enumerate(figures):
            self._series[at].data = {name: shown["series"][name] for name in ("time_s", *FAST)}
            self._strips[at].data = _strip_data(shown["strip"], shown["now_s"])
        if self._turn != 1:
            return
        if "errors" in figures[-1]:
            self._errors.data = figures[-1]["errors"]
        for at, shown in enumerate(figures):
            self._slow[at].data = {name: column for name, column in shown["series"].items() if name not in FAST}
            spreads: dict[str, Array] = {}
            for metric, (edges_ms, shares) in shown["histograms"].items():
                spreads[f"{metric}_ms"], spreads[metric] = edges_ms, np.append(shares, 0.0)
            self._spreads[at].data = spreads

    def _add(self, plot: Any, name: str) -> None:
        plot.name = name
        plot.toolbar.logo = None
        plot.title.text_font_size = "13px"
        plot.background_fill_color = plot.border_fill_color = "#ffffff"
        self.roots.append(plot)

    def _over_time(self, column: str) -> Any:
        plot = _plot(SERIES[column], x_axis_label="seconds")
        plot.y_range = DataRange1d(start=0) if column != "acceptance" else Range1d(0, 1)
        sources = self._series if column in FAST else self._slow
        for arch, name, source, dash in zip(self.archs, self.names, sources, DASHES, strict=False):
            style = {"color": arch_colour(arch), "line_width": 2, "line_dash": dash if self._twins(arch) else "solid"}
            legend = {"legend_label": name} if column == "tokens_per_s" else {}
            if column not in FAST and not policy_of(arch).speculates:
                continue
            plot.line("time_s", column, source=source, **style, **legend)
        if column == "tokens_per_s":
            _legend_below(plot)
        return plot

    def _error(self, errors: Sequence[str]) -> Any:
        plot = _plot("Error of the simulation (%)", x_axis_label="seconds")
        for name, colour in zip(errors, RAMP, strict=False):
            plot.line("time_s", name, source=self._errors, color=colour, line_width=2, legend_label=name)
        _legend_below(plot)
        return plot

    def _spread(self, metric: str) -> Any:
        plot = _plot(f"{metric.upper()}: share of {'chunks' if metric == 'itl' else 'requests'}", x_axis_type="log")
        plot.xaxis.axis_label = "ms"
        plot.y_range = DataRange1d(start=0)
        for arch, source, dash in zip(self.archs, self._spreads, DASHES, strict=False):
            dashes = dash if self._twins(arch) else "solid"
            plot.step(
                f"{metric}_ms", metric, source=source, mode="after", color=arch_colour(arch), line_width=2,
                line_dash=dashes,
            )  # fmt: skip
        return plot

    def _queues(self, at: int, arch: str) -> Any:
        plot = _plot(f"{self.names[at]}: queue of each lane", x_axis_label="seconds")
        plot.title.text_color = arch_colour(arch)
        plot.y_range = DataRange1d(start=0)
        for lane in lanes_of(arch):
            plot.line(
                "time_s", f"queue_{lane}", source=self._slow[at], color=LANE_COLOURS[lane], line_width=2,
                legend_label=lane,
            )  # fmt: skip
        _legend_below(plot)
        return plot

    def _strip(self, at: int, arch: str) -> Any:
        title = f"{self.names[at]}: the last {STRIP_S * 1e3:.0f} ms"
        plot = _plot(title, y_range=FactorRange(*reversed(lanes_of(arch))), x_range=Range1d(-STRIP_S * 1e3, 0))
        plot.title.text_color = arch_colour(arch)
        plot.xaxis.axis_label = "ms from now"
        bars: GlyphRenderer[Any] = plot.hbar(
            y="lane", left="start_ms", right="end_ms", height=0.8, color="colour", line_color="#ffffff",
            source=self._strips[at],
        )  # fmt: skip
        tips = [("", "@kind"), ("rows", "@rows"), ("tokens", "@tokens"), ("took", "@took ms")]
        plot.add_tools(HoverTool(renderers=[bars], tooltips=tips))
        return plot

    def _twins(self, arch: str) -> bool:
        return sum(arch_colour(other) == arch_colour(arch) for other in self.archs) > 1


def lanes_of(arch: str) -> tuple[str, ...]:
    """The lanes that an architecture has."""
    return ARCHITECTURES[kin(arch)].lanes


def _plot(title: str, **options: Any) -> Any:
    return figure(title=title, height=200, sizing_mode="stretch_width", tools="", toolbar_location=None, **options)


def _legend_below(plot: Any) -> None:
    """Names of the lines, where they hide none of them."""
    legend = plot.legend[0]
    legend.orientation, legend.padding, legend.margin, legend.spacing, legend.border_line_color = (
        "horizontal",
        0,
        0,
        8,
        None,
    )
    legend.label_text_font_size = "11px"
    plot.add_layout(legend, "below")


def _strip_data(rows: dict[str, Array], now_s: float) -> dict[str, Any]:
    kinds = [KINDS[int(kind)] for kind in rows["kind"]]
    start_ms = np.maximum((rows["start_s"] - now_s) * 1e3, -STRIP_S * 1e3)
    end_ms = (rows["end_s"] - now_s) * 1e3
    return {
        "lane": [LANES[int(lane)] for lane in rows["lane"]],
        "kind": kinds,
        "colour": [KIND_COLOURS[kind] for kind in kinds],
        "start_ms": start_ms,
        "end_ms": end_ms,
        "took": np.round((rows["end_s"] - rows["start_s"]) * 1e3, 2),
        "rows": rows["rows"],
        "tokens": rows["tokens"],
    }


def _no_series() -> dict[str, list[float]]:
    return {name: [] for name in ("time_s", *SERIES, *(f"queue_{lane}" for lane in LANES))}


def _no_spreads() -> dict[str, list[float]]:
    return {name: [] for metric in LATENCIES for name in (metric, f"{metric}_ms")}


def _no_strip() -> dict[str, list[Any]]:
    return {name: [] for name in ("lane", "kind", "colour", "start_ms", "end_ms", "took", "rows", "tokens")}
