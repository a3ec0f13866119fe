"""Plots of results as PNG or SVG: the standard ones of `pdvsim plot` and `pdvsim sweep`, and custom ones.

Points are averaged over replications only. If they differ in anything else that no axis shows, a custom plot is
rejected, because its band would not be a confidence interval.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pdvsim.bench.output import picture
from pdvsim.bench.results import Results, label, value_text
from pdvsim.bench.stats import over_replications, varied
from pdvsim.common.spelling import nearest
from pdvsim.sim.records import LANES
from pdvsim.view.charts import (
    Bar,
    Chart,
    Curve,
    Entry,
    arch_curve,
    curves_named,
    curves_of,
    entries_of,
    has,
    load_ticks,
    panel,
    places,
    trace_of,
)
from pdvsim.view.figure import CLEAR, DPI, chart_figure
from pdvsim.view.heatmap import improvement_figure
from pdvsim.view.setting import Settings, points_line
from pdvsim.view.style import AXIS_NAMES, LANE_COLOURS, grown_note, metric_label, name_of, replications, rests_on, tail

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

MOST_PER_ROW = 4
MAX_SETTINGS = 12
SHARES = ("utilisation", "bandwidth_share")
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
    entries = entries_of(points)
    curves = curves_of(entries)
    charts = [[panel(entries, metric, curves) for metric in row] for row in rows]
    return chart_figure(charts, caption(points, setting), title)


def sweep_figure(points: pd.DataFrame, setting: str = "") -> Figure:
    """Throughput, time to first token and time per output token: mean and tail.

    One column of panels per varied setting, with one scale per metric; with many settings, throughput only.
    """
    names, last = varied(points), tail(points)
    upper = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    settings = len(points[names].drop_duplicates()) if names else 1
    if settings < 2 or (points["arch"].nunique() == 1 and settings <= CLEAR and points["load"].nunique() > 1):
        lower = ("request_throughput", f"{last}_ttft_ms", f"{last}_tpot_ms")
        return metrics_figure(points, [upper, lower], "", setting)
    groups = [*points.groupby(names, sort=False)][:MAX_SETTINGS]
    entries = [[e | {"series": e["arch"]} for e in entries_of(mine)] for _, mine in groups]
    titles = ["\n".join(f"{n.replace('_', ' ')} {v}" for n, v in zip(names, key, strict=True)) for key, _ in groups]
    curves = curves_of(entry for mine in entries for entry in mine)
    whole = len(groups) <= MOST_PER_ROW  # room for more than one metric
    rows = [
        [
            panel(mine, metric, curves, f"{title}\n{name_of(metric)[0]}")
            for title, mine in zip(titles, entries, strict=True)
        ]
        for metric in (upper if whole else upper[:1])
    ]
    if not whole:
        rows = [rows[0][at : at + MOST_PER_ROW] for at in range(0, len(groups), MOST_PER_ROW)]
    left_out = (
        f"The first {MAX_SETTINGS} of {settings} settings; pdvsim plot shows all. " if settings > MAX_SETTINGS else ""
    )
    return chart_figure(rows, left_out + caption(points, setting, names), "", "row" if whole else "all", (4.0, 3.3))


def utilisation_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure:
    """Utilisation and share of the copy bandwidth of each lane; one panel per architecture."""
    entries, lines = entries_of(points), points["load"].nunique(dropna=False) > 1
    lanes = [lane for lane in LANES if f"lanes_{lane}_utilisation" in points]
    form, inside = ("Lines", "dotted") if lines else ("Pale", "full")
    note = f"{form}: share of the time the lane's stream is busy; {inside}: its share of the copy bandwidth."
    charts = [_lanes([e for e in entries if e["arch"] == arch], lanes) for arch in dict.fromkeys(points["arch"])]
    rows = [charts[at : at + MOST_PER_ROW] for at in range(0, len(charts), MOST_PER_ROW)]
    return chart_figure(rows, f"{note} {caption(points, setting)}", title, "", (4.2, 3.9))


def _lanes(entries: Sequence[Entry], lanes: Sequence[str]) -> Chart:
    """Each lane's utilisation and bandwidth share over the load, or as bars with one load."""
    arch, ticks = str(entries[0]["arch"]), load_ticks(entries)
    axis = AXIS_NAMES.get(str(entries[0]["load_kind"]), "Load")
    shares = [
        (row, name, key, pale)
        for row, name in enumerate(lanes)
        for key, pale in zip(SHARES, (True, False), strict=True)
    ]
    if len(ticks) == 1:
        means = [(row, name, entries[0].get(f"lanes_{name}_{key}"), pale) for row, name, key, pale in shares]
        bars = [Bar(row, 0.0, 100 * v.mean, LANE_COLOURS[n], hollow=pale) for row, n, v, pale in means if v is not None]
        return Chart(arch, "% of one GPU", f"{axis}: {ticks[0][1]}", rows=lanes, bars=bars)
    traces = []
    for _, lane, share, busy in shares:
        mine = [e for e in entries if has(e, f"lanes_{lane}_{share}")]
        curve = Curve(lane, LANE_COLOURS[lane])
        curve = curve if busy else replace(curve, name=f"{lane}: bandwidth", marker=".", dash=":")
        traces.append(trace_of(mine, f"lanes_{lane}_{share}", curve, places(e["load"] for e in mine)))
    return Chart(arch, "% of one GPU", axis, traces, ticks=ticks, log_x=ticks[0][0] > 0, top=105.0)


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
    entries = [
        entry | (named := dict(zip(keys, values, strict=True))) | {"series": value_text(named[axis.curve])}
        for values, group in points.groupby(list(keys), sort=False, dropna=False)
        for entry in over_replications(group)
    ]
    values = [value_text(value) for value in _values(points, axis.curve)]
    curves = list(map(arch_curve, values)) if axis.curve == "arch" else curves_named(values)
    rows: list[list[Chart]] = []
    for row in _values(points, axis.row):
        rows.append([])
        for column in _values(points, axis.column):
            inside = [e for e in entries if _is(e, axis.row, row) and _is(e, axis.column, column)]
            names = [(axis.row, row), (axis.column, column)]
            title = ", ".join(f"{k.replace('_', ' ')}: {value_text(v)}" for k, v in names if k)
            chart = panel(inside, axis.y, curves, title, x=axis.x, every=entries)
            rows[-1].append(replace(chart, unit=metric_label(axis.y)))
    note = caption(points, points_line(points, results.configs), results.dims)
    names_title = None if axis.curve == "arch" else axis.curve.replace("_", " ")
    return chart_figure(rows, note, "", "all", (5.0, 3.8), names_title)


def _values(points: pd.DataFrame, name: str | None) -> list[Any]:
    if name is None:
        return [None]
    values = list(dict.fromkeys(points[name]))
    return values if any(isinstance(value, str) for value in values) else sorted(values)


def _is(entry: Entry, name: str | None, value: Any) -> bool:
    return name is None or entry[name] == value


def _check(points: pd.DataFrame, axis: Layout, keys: tuple[str, ...]) -> None:
    """Reject missing columns, and curves or panels by a metric."""
    from pandas.api.types import is_numeric_dtype

    metrics = [str(c) for c in points.columns if c not in keys and is_numeric_dtype(points[c])]
    flags = {"--var-x": (axis.x, [*keys, *metrics]), "--var-y": (axis.y, metrics), "--curve-by": (axis.curve, [*keys])}
    for flag, (name, known) in (flags | {"--row-by": (axis.row, [*keys]), "--col-by": (axis.column, [*keys])}).items():
        if name is not None and name not in known:
            shown = known if len(known) < 12 else [*known[:11], "…"]
            hint = nearest(name, known)
            raise ValueError(f"{flag} {name}: no such column{hint}; the results have {', '.join(shown)}")
    if axis.x == axis.y:
        raise ValueError(f"--var-x and --var-y are both {axis.x}")
