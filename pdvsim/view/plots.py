"""Plots of results as PNG or SVG: the standard ones of `pdvsim plot` and `pdvsim sweep`, and custom ones.

Points are averaged over replications only. If they differ in anything else that no axis shows, a custom plot is
rejected, because its band would not be a confidence interval.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.api.types import is_numeric_dtype
from pandas.plotting import PlotAccessor

from pdvsim.bench.output import picture
from pdvsim.bench.results import Results, label, value_text
from pdvsim.bench.stats import headline, over_replications, paired_differences, varied
from pdvsim.common.options import nearest
from pdvsim.sim.records import LANES
from pdvsim.view.charts import Curve, Dash, Entry, curves_of, entries_of, has, panel
from pdvsim.view.comparison import comparison_table
from pdvsim.view.differences import improvement_figure
from pdvsim.view.figure import CLEAR, DPI, MOST_PER_ROW, Alike, chart_figure, in_rows
from pdvsim.view.setting import Settings, points_line
from pdvsim.view.style import LANE_COLOURS, grown_note, name_of, replications, rests_on, tail
from pdvsim.view.table import TextTable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_SETTINGS = 12
SHARES: tuple[tuple[str, str, Dash], ...] = (("utilisation", "", "-"), ("bandwidth_share", ": bandwidth", ":"))
SHARE = "lanes_main_utilisation"  # a panel's metric, whichever the lane and share
RATE, LENGTH = "spec_decode_acceptance_rate", "spec_decode_acceptance_length"


def sweep_png(points: pd.DataFrame, base: Settings) -> bytes:
    """The six main panels of a sweep, as the content of a PNG file; `base` is its base experiment."""
    return picture(sweep_figure(points, points_line(points, [base])), "sweep.png", DPI)


def standing(results: Results, metric: str | None, against: str) -> Iterator[tuple[str, Figure]]:
    """The standard plots of results, by name: one of each per setting, one heatmap per kind of load.

    The heatmap shows `metric`; default: the metric that compares architectures under that kind of load.
    """
    settings = results.settings()
    for setting, points in settings:
        words = label(setting)
        suffix = f"-{slug(words)}" if len(settings) > 1 else ""
        line = points_line(points, replace(results, points=points).configs)
        yield f"throughput{suffix}", metrics_figure(points, THROUGHPUT, words, line)
        yield f"latency{suffix}", metrics_figure(points, latency_rows(points), words, line)
        yield f"utilisation{suffix}", utilisation_figure(points, words, line)
        drafting = points[points[RATE].notna()] if RATE in points else points[:0]
        if len(drafting):
            note = f"{line} Curves may coincide, as architectures share their random numbers."
            yield f"acceptance{suffix}", metrics_figure(drafting, [(RATE, LENGTH)], words, note)
    kinds = results.by_load_kind()
    for kind, mine in kinds.items():
        compared_by = metric or mine.headline
        figure = improvement_figure(mine, compared_by, against) if against in mine.archs else None
        if figure is not None:
            suffix = f"-by-{kind}" if len(kinds) > 1 else ""
            yield slug(f"improvement-{compared_by.removesuffix('_ms')}{suffix}"), figure


def slug(words: str) -> str:
    """`words` as part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")


THROUGHPUT = [("output_throughput", "request_throughput")]


def latency_rows(points: pd.DataFrame) -> list[tuple[str, ...]]:
    """Mean and tail of the time to first token, per output token and end to end."""
    return [tuple(f"{mark}_{metric}_ms" for metric in ("ttft", "tpot", "e2el")) for mark in ("mean", tail(points))]


def metrics_figure(points: pd.DataFrame, rows: Sequence[Sequence[str]], title: str = "", setting: str = "") -> Figure:
    """Metrics over the load, one panel each."""
    return facets(entries_of(points), [[(m, {}) for m in row] for row in rows], caption(points, setting), title=title)


def sweep_figure(points: pd.DataFrame, setting: str = "") -> Figure:
    """Throughput, time to first token and time per output token: mean and tail.

    One column of panels per varied setting, with one scale per metric; with many settings, throughput only.
    """
    names, last = varied(points), tail(points)
    upper = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    settings = points[names].drop_duplicates().to_dict("records") if names else [{}]
    if len(settings) < 2 or (points["arch"].nunique() == 1 and len(settings) <= CLEAR and points["load"].nunique() > 1):
        lower = ("request_throughput", f"{last}_ttft_ms", f"{last}_tpot_ms")
        return metrics_figure(points, [upper, lower], "", setting)
    note, shown = caption(points, setting, names), settings[:MAX_SETTINGS]
    if len(shown) < len(settings):
        note = f"The first {MAX_SETTINGS} of {len(settings)} settings; pdvsim plot shows all. {note}"
    whole = len(shown) <= MOST_PER_ROW  # room for more than one metric
    rows = [shown] * len(upper) if whole else in_rows(shown)
    panels = [[(upper[at if whole else 0], setting) for setting in row] for at, row in enumerate(rows)]
    alike: Alike = "row" if whole else "all"
    return facets(entries_of(points, curve="arch"), panels, note, alike=alike, inches=(4.0, 3.3))


def facets(
    entries: Sequence[Entry],
    rows: Sequence[Sequence[tuple[str, Mapping[Hashable, Any]]]],
    note: str,
    curve: str = "arch",
    x: str = "load",
    **layout: Any,
) -> Figure:
    """Panels in rows, each of a metric and the entries with some values; one curve per series, of a column `curve`."""
    curves, charts = curves_of(entries, curve), []
    for metric, values in itertools.chain.from_iterable(rows):
        inside = [e for e in entries if values.items() <= e.items()]
        titles = [f"{str(name).replace('_', ' ')} {value_text(value)}" for name, value in values.items()]
        charts.append(panel(inside, metric, curves, "\n".join([*titles, name_of(metric)[0]]), x=x, every=entries))
    return chart_figure(in_rows(charts, len(rows[0])), note, **layout)


def utilisation_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure:
    """Utilisation and share of the copy bandwidth of each lane; one panel per architecture."""
    entries, charts = entries_of(points), []
    note = "Share of the time that the lane's stream is busy, and (bandwidth) its share of the copy bandwidth."
    for arch in dict.fromkeys(points["arch"]):
        shares, curves = [], []
        for lane, (share, words, dash) in itertools.product(LANES, SHARES):
            mine = [e for e in entries if e["arch"] == arch and has(e, f"lanes_{lane}_{share}")]
            shares += [e | {"series": f"{lane}{words}", SHARE: e[f"lanes_{lane}_{share}"]} for e in mine]
            curves += [Curve(f"{lane}{words}", LANE_COLOURS[lane], marker="." if words else "o", dash=dash)]
        charts.append(replace(panel(shares, SHARE, curves, arch, every=entries), unit="% of one GPU", top=105.0))
    return chart_figure(in_rows(charts), f"{note} {caption(points, setting)}", title, inches=(4.2, 3.9))


def caption(points: pd.DataFrame, setting: str, dims: Sequence[str] = ()) -> str:
    """Caption of curves: setting and foundation; `dims` are the columns that distinguish settings."""
    note = f"{setting} {rests_on(points)}".strip()
    counted = replications(points, dims)
    sure = f"{counted[:-1]}, bands and whiskers are 95% confidence (cut at the frame)."
    note += f" {sure if counted[0].isdigit() else counted}"
    if "output_throughput_low" in points and points["load"].nunique() > 1:
        low, high = (f"{bar:.0%}" for bar in (points["forward_error_bar"].min(), points["forward_error_bar"].max()))
        note += f" Hatched areas: forward times within ±{low if low == high else f'{low} to {high}'}."
    return f"{note} {grown_note(points)}".strip()


# the rows of a sweep in Python ---------------------------------------------------------------------------------------


class _Plot(PlotAccessor):
    """pandas' plots; without arguments, the sweep's plot."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return super().__call__(*args, **options) if args or options else self._parent.figure()  # type: ignore[attr-defined]


class SweepPoints(pd.DataFrame):
    """One row per run. Prints as a summary, also in a notebook. Selections from it are ordinary frames."""

    _metadata = ["setting"]  # noqa: RUF012 (pandas' own)
    setting = ""  # the setting in one line

    @property
    def _constructor(self) -> type[pd.DataFrame]:
        return pd.DataFrame

    @property
    def plot(self) -> _Plot:
        """`plot()` is the plot of `pdvsim sweep`; `plot.line(…)` and others are pandas'."""
        return _Plot(self)

    def figure(self) -> Figure:
        """Throughput, latencies and acceptance over the load, one curve per architecture."""
        return sweep_figure(self, self.setting)

    def __repr__(self) -> str:
        table = self._summary()
        return super().__repr__() if table is None else str(table)

    def _repr_html_(self) -> str | None:
        table = self._summary()
        return super()._repr_html_() if table is None else table.html()  # type: ignore[misc]

    def _summary(self) -> TextTable | None:
        """The table of `pdvsim sweep`; None for a modified frame that is no longer a sweep."""
        with suppress(KeyError, IndexError):
            return sweep_table(self)
        return None


def sweep_table(points: pd.DataFrame) -> TextTable:
    """One row per architecture, load and setting, with the differences from the first architecture if there are any."""
    entries = over_replications(points)
    compared_by = headline((entry["load_kind"], entry["load"]) for entry in entries)
    paired = points["arch"].nunique() > 1 and points["seed"].nunique() > 1
    leads = paired_differences(points, compared_by, str(points["arch"].iloc[0])) if paired else []
    highest = tail(points)
    percentiles = () if highest == "median" else (float(highest[1:]),)
    return comparison_table(entries, percentiles=percentiles, varied=varied(points), differences=leads)


# custom plots --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """The columns of the axes of a custom plot."""

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
    values: list[list[Mapping[Hashable, Any]]] = [  # sorted if they are numbers
        [{name: v} for v in (points[name].unique() if points[name].dtype == object else np.unique(points[name]))]
        if name
        else [{}]
        for name in (axis.row, axis.column, axis.curve)
    ]
    order = [value_text(value[axis.curve]) for value in values[2]]
    entries = sorted(entries_of(points, results.dims, axis.curve), key=lambda e: order.index(e["series"]))
    rows = [[(axis.y, {**row, **column}) for column in values[1]] for row in values[0]]
    note = caption(points, points_line(points, results.configs), results.dims)
    names_title = None if axis.curve == "arch" else axis.curve.replace("_", " ")
    return facets(entries, rows, note, axis.curve, axis.x, alike="all", inches=(5.0, 3.8), names=names_title)


def _check(points: pd.DataFrame, axis: Layout, keys: tuple[str, ...]) -> None:
    """Reject missing columns, and curves or panels by a metric."""
    metrics = [str(c) for c in points.columns if c not in keys and is_numeric_dtype(points[c])]
    flags = {"--var-x": (axis.x, [*keys, *metrics]), "--var-y": (axis.y, metrics), "--curve-by": (axis.curve, [*keys])}
    for flag, (name, known) in (flags | {"--row-by": (axis.row, [*keys]), "--col-by": (axis.column, [*keys])}).items():
        if name is not None and name not in known:
            shown = known if len(known) < 12 else [*known[:11], "…"]
            hint = nearest(name, known)
            raise ValueError(f"{flag} {name}: no such column{hint}; the results have {', '.join(shown)}")
    if axis.x == axis.y:
        raise ValueError(f"--var-x and --var-y are both {axis.x}")
