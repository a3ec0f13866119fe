"""Creates all figures in files: no window, no global state, one style, with a caption."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pdvsim.view.charts import Chart, Curve

DPI = 150
CAPTION_INCHES = 0.2  # a line
TITLE_INCHES = 0.4
CHARACTERS_PER_INCH = 12.5
LEGEND_INCHES = 0.28  # a line
CLEAR = 4  # with more curves bands hide each other: whiskers instead
MOST_PER_ROW = 4  # charts
DODGE = 0.05  # of whiskers, in powers of two
Alike = Literal["", "row", "all"]  # charts with one scale


@contextmanager
def styled() -> Iterator[None]:
    """Context of the common style, which is seaborn's."""
    from seaborn import axes_style, plotting_context

    with axes_style("whitegrid"), plotting_context("notebook"):
        yield


def new_figure(width_inches: float, height_inches: float, caption: str, title: str = "") -> Figure:
    """An empty figure without a window, so it is safe in threads and notebooks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = textwrap.wrap(caption, int(width_inches * CHARACTERS_PER_INCH))
    height_inches += CAPTION_INCHES * len(lines) + TITLE_INCHES * bool(title)
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.12, h_pad=0.1)  # type: ignore[call-arg]
    FigureCanvasAgg(figure)
    figure.supxlabel("\n".join(lines), fontsize=10, color="0.35", x=0.01, ha="left")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def chart_figure(
    rows: Sequence[Sequence[Chart]],
    caption: str,
    title: str = "",
    alike: Alike = "",
    inches: tuple[float, float] = (5.0, 3.7),
    names: str | None = None,
) -> Figure:
    """Charts in rows, with one legend of their curves above; `names` is its title. `inches` are those of one chart."""
    from pdvsim.view.charts import Curve

    columns = max(map(len, rows))
    every = [chart for row in rows for chart in row]
    with styled():
        size = max(inches[0] * columns + 0.5, 7.5), inches[1] * len(rows) + 0.8
        figure = new_figure(*size, caption, title)
        grid = figure.subplots(len(rows), columns, squeeze=False)
        for axes_row, row in zip(grid, rows, strict=True):
            for axes, chart in zip(axes_row, row, strict=False):
                draw(axes, chart, {"": [chart], "row": row, "all": every}[alike])
            for axes in axes_row[len(row) :]:
                axes.set_visible(False)
        keys = [Curve(*one, hollow=[False], marker="s", dash="none") for c in every if c.columns for one in c.key]
        legend(figure, [*(trace for chart in every for trace in chart.traces), *keys], names)
    return figure


def in_rows(items: Sequence[Any], most: int = MOST_PER_ROW) -> list[Sequence[Any]]:
    """The items in rows of at most so many."""
    return [items[at : at + most] for at in range(0, len(items), most)]


def draw(axes: Axes, chart: Chart, framed: Sequence[Chart] = ()) -> None:
    """A chart; the ends of its y axis are from the values of the charts `framed`."""
    import numpy as np

    barred = chart.rows and not chart.columns
    title = f"{chart.title} ({chart.unit})" if barred and chart.unit else chart.title
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel=chart.x, ylabel="" if barred else chart.unit)
    if chart.columns:
        _cells(axes, chart)
        return
    whiskers = sum(len(trace.half) > 0 for trace in chart.traces) > CLEAR
    for number, trace in enumerate(chart.traces):
        shift = min(DODGE, 0.5 / len(chart.traces)) * (number - (len(chart.traces) - 1) / 2) if whiskers else 0.0
        _curve(axes, trace, np.asarray(trace.x, float) * 2**shift, whiskers)
    for bar in chart.bars:
        pale: dict[str, Any] = {"alpha": 0.5, "hatch": "//"} if bar.hollow else {}
        axes.barh(bar.row, bar.end - bar.start, 0.7, bar.start, color=bar.colour, edgecolor="white", **pale)
        if bar.half:
            axes.errorbar(bar.end, bar.row, xerr=bar.half, ecolor="0.25", capsize=5)
    line = axes.axvline if chart.upright else axes.axhline
    for level in chart.levels:
        line(level, color="0.2", linewidth=1.5, linestyle="--")
    if chart.rows:
        axes.set_yticks(range(len(chart.rows)), chart.rows)
        axes.set_ylim(len(chart.rows) - 0.5, -0.5)
        axes.grid(False, axis="y")
        _rows(axes, chart)
    else:
        _ends(axes, chart, framed or [chart])
    for name, colour in chart.key:
        axes.plot([], [], "s", color=colour, label=name)
    if chart.key:
        axes.set_ylim(len(chart.rows) - 0.5, -1.6 * len(chart.rows))  # room for the legend
        axes.legend(ncols=2, loc="upper left", fontsize=9)


def _cells(axes: Axes, chart: Chart) -> None:
    """Rows and columns of cells, each with its text; those that prove nothing are hatched."""
    from matplotlib.patches import Rectangle

    box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
    for cell in chart.cells:
        hatch: dict[str, Any] = {"hatch": "//"} if cell.hollow else {}
        corner = cell.column - 0.5, cell.row - 0.5
        axes.add_patch(Rectangle(corner, 1, 1, facecolor=cell.colour, edgecolor="white", linewidth=2, **hatch))
        axes.text(cell.column, cell.row, cell.text, ha="center", va="center", fontsize=12, color="0.1", bbox=box)
    axes.set_xticks(range(len(chart.columns)), chart.columns)
    axes.set_yticks(range(len(chart.rows)), chart.rows)
    axes.set(xlim=(-0.5, len(chart.columns) - 0.5), ylim=(len(chart.rows) - 0.5, -0.5), facecolor="0.92")
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _rows(axes: Axes, chart: Chart) -> None:
    """Ends of the axis of bars; texts stand after the end of a bar's interval."""
    if not chart.labelled:
        axes.set_xlim(left=0)
        return
    axes.axvline(1.0 if chart.log_x else 0.0, color="0.25", linewidth=1.4)
    if chart.log_x:
        axes.set_xscale("log")
        _log_ticks(axes.xaxis, *axes.get_xlim())
    axes.margins(x=0.4)
    for bar in chart.bars:
        left = bar.end < bar.start and not (chart.log_x and bar.end <= bar.half)  # a logarithm has no other side
        at, bold = bar.end + (-bar.half if left else bar.half), "normal" if bar.hollow else "bold"
        axes.annotate(bar.text, (at, bar.row), xytext=(-7 if left else 7, 0), textcoords="offset points", va="center",
                      ha="right" if left else "left", fontsize=9, fontweight=bold)  # fmt: skip


def _log_ticks(axis: Any, low: float, high: float) -> None:
    """A few plain values: powers of ten over several decades, else others as well."""
    from matplotlib.ticker import LogLocator, NullFormatter

    subs = (1.0,) if high > 300 * low else (1.0, 2.0, 5.0) if high > 8 * low else (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def _curve(axes: Axes, trace: Curve, x: Any, whiskers: bool) -> None:
    """One curve: line, markers, and its interval as a band or whiskers."""
    import numpy as np

    y, colour = np.asarray(trace.y, float), trace.colour
    drawn = "steps-post" if trace.step else "default"
    axes.plot(x, y, linestyle=trace.dash, color=colour, linewidth=2, drawstyle=drawn)
    if trace.fill:
        axes.fill_between(x, y, color=colour, alpha=0.4, linewidth=0, step="post" if trace.step else None)
    if len(trace.half) and whiskers:
        axes.errorbar(x, y, trace.half, fmt="none", ecolor=colour, elinewidth=1.2, capsize=2.5, alpha=0.7)
    elif len(trace.half):
        axes.fill_between(x, y - trace.half, y + trace.half, color=colour, alpha=0.2, linewidth=0)
    if len(trace.low):  # predicted forward times have an error bar
        style: dict[str, Any] = {"facecolor": "none", "edgecolor": colour, "hatch": "///"}
        axes.fill_between(x, trace.low, trace.high, alpha=0.35, linewidth=0.5, **style)
    for hollow in (False, True) if len(trace.hollow) else ():
        at = np.asarray(trace.hollow, bool) == hollow
        shape: dict[str, Any] = {
            "marker": trace.marker,
            "markersize": trace.size,
            "markerfacecolor": "white" if hollow else colour,
        }
        axes.plot(x[at], y[at], color=colour, linestyle="none", markeredgewidth=1.6, **shape)


def _ends(axes: Axes, chart: Chart, framed: Sequence[Chart]) -> None:
    """Scales, ticks and ends of the axes: means and error bars, intervals up to a limit, as those of two are long."""
    import numpy as np

    traces = [trace for one in framed for trace in one.traces]
    known = np.concatenate([np.asarray(v, float) for t in traces for v in (t.y, t.low, t.high)] or [np.zeros(1)])
    low, high = (float(known[~np.isnan(known)].min(initial=np.inf)), float(np.nan_to_num(known).max(initial=0.0)))
    reach = max((float(np.max(np.add(t.y, t.half))) for t in traces if len(t.half)), default=0.0)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
    if chart.log_y and low > 0:
        axes.set_yscale("log")
        axes.set_ylim(chart.range if chart.log_x and chart.range else (low / 2, high * 2))
        _log_ticks(axes.yaxis, low, high)
    elif not chart.free:
        axes.set_ylim(0, chart.top or (1.12 * max(high, min(reach, 1.5 * high)) if high > 0 else 1))
    if chart.log_x:
        axes.set_xscale("log", base=2 if chart.ticks else 10)
        _log_ticks(axes.xaxis, *(chart.range or axes.get_xlim()))
    if chart.ticks:
        axes.set_xticks([at for at, _ in chart.ticks], [name for _, name in chart.ticks])
        axes.minorticks_off()
    elif chart.range:
        axes.set_xlim(chart.range)


def legend(figure: Figure, traces: Sequence[Curve], title: str | None = None) -> None:
    """Legend above all charts, in as many lines as needed; the figure's title is below it."""
    from matplotlib.lines import Line2D

    curves = {t.name: t for t in reversed(traces) if t.name}
    if not curves or (len(curves) == 1 and title is None):
        return
    named = [curves[name] for name in dict.fromkeys(t.name for t in traces if t.name)]
    handles = [Line2D([], [], color=c.colour, marker=c.marker if len(c.hollow) else "", linestyle=c.dash, label=c.name)
               for c in named]  # fmt: skip
    needed_inches = [0.1 * len(c.name) + 0.75 for c in named]
    room_inches = figure.get_figwidth() - 0.4
    across = len(named) if sum(needed_inches) <= room_inches else max(1, int(room_inches / max(needed_inches)))
    lines = -(-len(named) // across)
    columns = -(-len(named) // lines)
    figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False, title=title)
    figure.set_figheight(figure.get_figheight() + LEGEND_INCHES * (lines - 1))
    if figure.get_suptitle():
        figure.suptitle("\n" * lines + figure.get_suptitle(), fontsize=13, fontweight="bold", x=0.01, ha="left")
