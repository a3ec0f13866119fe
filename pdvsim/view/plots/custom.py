"""Custom plots: any two columns as axes, and curves, rows and columns of panels by others.

Points are averaged over replications only. If they differ in anything else that no axis shows, the plot is rejected,
because its band would not be a confidence interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pdvsim.bench.results import Results, value_text
from pdvsim.bench.stats import over_replications
from pdvsim.common.spelling import nearest
from pdvsim.view.figure import new_figure, styled, titled
from pdvsim.view.plots.curves import (
    CLEAR,
    Curve,
    Entry,
    arch_curve,
    caption,
    curves_named,
    draw,
    frame,
    has,
    legend,
    load_axis,
    places,
)
from pdvsim.view.setting import points_line
from pdvsim.view.style import AXIS_NAMES, name_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


MOST_TICKED_VALUES = 10


@dataclass(frozen=True)
class Layout:
    """The columns of the axes."""

    x: str = "load"
    y: str = "output_throughput"
    curve: str = "arch"
    row: str | None = None
    column: str | None = None


def custom_figure(results: Results, axis: Layout) -> Figure:
    """Means over replications of `axis.y` over `axis.x`; a column that no axis names may not vary."""
    points = results.points
    keys = ("arch", "load", *results.dims)
    if points["load_kind"].nunique() > 1:
        raise ValueError("the results have loads by concurrency and by rate: plot them separately")
    _check(points, axis, keys)
    by = [name for name in (axis.curve, axis.row, axis.column) if name]
    by_metric = axis.x not in keys  # e.g. latency over throughput: the curve follows the remaining column
    spare = [k for k in keys if k not in (*by, axis.x) and points[k].nunique(dropna=False) > 1]
    if len(spare) > by_metric:
        raise ValueError(
            f"the points differ in {' and '.join(spare)}, which no axis shows: name it with --curve-by, --row-by "
            f"or --col-by, or keep {'one of them' if by_metric else 'it'} fixed"
        )
    entries = _entries(points, keys)
    rows = _values(points, axis.row)
    columns = _values(points, axis.column)
    curves = _curves(points, axis.curve)
    with styled():
        size = (max(5 * len(columns) + 1, 7.5), 3.8 * len(rows) + 0.8)
        figure = new_figure(*size, caption(points, points_line(points, results.configs), results.dims))
        grid = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True, sharey=True)
        for axes_row, row in zip(grid, rows, strict=True):
            for axes, column in zip(axes_row, columns, strict=True):
                inside = [e for e in entries if _is(e, axis.row, row) and _is(e, axis.column, column)]
                _panel(axes, inside, axis, curves, by_metric)
                names = [(axis.row, row), (axis.column, column)]
                title = ", ".join(f"{k.replace('_', ' ')}: {value_text(v)}" for k, v in names if k)
                titled(axes, title)
        frame(grid[0, 0], entries, axis.y, axis.y.endswith("_ms"))
        _names(grid, axis, entries, by_metric)
        legend(figure, list(curves.values()), None if axis.curve == "arch" else axis.curve.replace("_", " "))
    return figure


def _entries(points: pd.DataFrame, keys: tuple[str, ...]) -> list[Entry]:
    """One entry per point, averaged over replications, with its settings; ordered by x."""
    entries = []
    for values, group in points.groupby(list(keys), sort=False, dropna=False):
        entries += [entry | dict(zip(keys, values, strict=True)) for entry in over_replications(group)]
    return entries


def _panel(axes: Axes, entries: list[Entry], axis: Layout, curves: dict[Any, Curve], by_metric: bool) -> None:
    values = [] if by_metric else list(dict.fromkeys(e[axis.x] for e in entries))
    at = dict(zip(values, places(values) if _numeric(values) else map(float, range(len(values))), strict=True))
    for value, curve in curves.items():
        mine = [e for e in entries if _is(e, axis.curve, value) and (not by_metric or has(e, axis.x))]
        mine.sort(key=lambda e: e["load"] if by_metric else at[e[axis.x]])
        x = [e[axis.x].mean * name_of(axis.x)[2] if by_metric else at[e[axis.x]] for e in mine]
        draw(axes, mine, axis.y, curve, x, whiskers=len(curves) > CLEAR)


def _names(grid: Any, axis: Layout, entries: list[Entry], by_metric: bool) -> None:
    """Ticks, names and units on the outer panels."""
    values = [] if by_metric else list(dict.fromkeys(e[axis.x] for e in entries))
    for axes in grid.flat:
        if by_metric:
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")
        elif axis.x == "load":
            load_axis(axes, entries)
        elif not _numeric(values):
            axes.set_xticks(range(len(values)), [str(v) for v in values])
        elif min(values) > 0 and max(values) >= 8 * min(values):
            axes.set_xscale("log", base=2)
            axes.minorticks_off()
        if values and axis.x != "load" and _numeric(values) and len(values) <= MOST_TICKED_VALUES:
            axes.set_xticks(values, [value_text(v) for v in values])
        axes.set_xlabel("")
    for axes in grid[-1]:
        axes.set_xlabel(_axis_name(axis.x, entries))
    for axes in grid[:, 0]:
        axes.set_ylabel(_axis_name(axis.y, entries))


def _axis_name(column: str, entries: list[Entry]) -> str:
    if column == "load":
        return AXIS_NAMES.get(str(entries[0]["load_kind"]), "Load")
    title, unit, _ = name_of(column)
    return f"{title} ({unit})" if unit else title


def _curves(points: pd.DataFrame, name: str) -> dict[Any, Curve]:
    values = _values(points, name)
    if name == "arch":
        return {value: arch_curve(value) for value in values}
    return dict(zip(values, curves_named([value_text(value) for value in values]), strict=True))


def _values(points: pd.DataFrame, name: str | None) -> list[Any]:
    if name is None:
        return [None]
    values = list(dict.fromkeys(points[name]))
    return sorted(values) if _numeric(values) else values


def _numeric(values: list[Any]) -> bool:
    return all(isinstance(v, int | float) or hasattr(v, "dtype") for v in values)


def _is(entry: Entry, name: str | None, value: Any) -> bool:
    return name is None or entry[name] == value


def _check(points: pd.DataFrame, axis: Layout, keys: tuple[str, ...]) -> None:
    """Reject missing columns, and curves or panels by a metric."""
    from pandas.api.types import is_numeric_dtype

    metrics = [str(c) for c in points.columns if c not in keys and is_numeric_dtype(points[c])]
    for flag, name, known in (
        ("--var-x", axis.x, [*keys, *metrics]),
        ("--var-y", axis.y, metrics),
        ("--curve-by", axis.curve, list(keys)),
        ("--row-by", axis.row, list(keys)),
        ("--col-by", axis.column, list(keys)),
    ):
        if name is not None and name not in known:
            shown = known if len(known) < 12 else [*known[:11], "…"]
            hint = nearest(name, known)
            raise ValueError(f"{flag} {name}: no such column{hint}; the results have {', '.join(shown)}")
    if axis.x == axis.y:
        raise ValueError(f"--var-x and --var-y are both {axis.x}")
