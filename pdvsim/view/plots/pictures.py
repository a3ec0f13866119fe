"""The standard plots of a sweep: throughput, latency, GPU use by lane, acceptance, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.bench.stats import varied
from pdvsim.sim.records import LANES
from pdvsim.view.figure import new_figure, styled, titled
from pdvsim.view.plots.curves import (
    CLEAR,
    Curve,
    Entry,
    caption,
    curves_of,
    draw,
    entries_of,
    has,
    legend,
    load_axis,
    load_line,
    panel,
    places,
)
from pdvsim.view.style import LANE_COLOURS, name_of, tail

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOGARITHMIC = ("ttft", "e2el")
MOST_PANELS_PER_ROW = 4
MAX_SETTINGS = 12
DASHES: tuple[Literal["-", ":"], ...] = ("-", ":")  # busy, bandwidth
LANE_MARKERS = dict(zip(LANES, "^Dos", strict=True))


def sweep_figure(points: pd.DataFrame, setting: str = "") -> Figure:
    """Throughput, time to first token and time per output token: mean and tail.

    One column of panels per varied setting; with many settings, throughput only.
    """
    names = varied(points)
    settings = len(points[names].drop_duplicates()) if names else 1
    if settings > 1 and (points["arch"].nunique() > 1 or settings > CLEAR or points["load"].nunique() == 1):
        return _facets(points, names, setting)
    last = tail(points)
    upper = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    return _panels(points, [upper, ("request_throughput", f"{last}_ttft_ms", f"{last}_tpot_ms")], "", setting)


def throughput_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure:
    """Tokens and requests per second."""
    return _panels(points, [("output_throughput", "request_throughput")], title, setting)


def latency_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure:
    """Mean and tail of the time to first token, per output token and end to end."""
    rows = [tuple(f"{mark}_{metric}_ms" for metric in ("ttft", "tpot", "e2el")) for mark in ("mean", tail(points))]
    return _panels(points, rows, title, setting)


def utilisation_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure:
    """Utilisation and share of the copy bandwidth of each lane; one panel per architecture."""
    entries = entries_of(points)
    archs = list(dict.fromkeys(points["arch"]))
    lanes = [lane for lane in LANES if f"lanes_{lane}_utilisation" in points]
    across = min(len(archs), MOST_PANELS_PER_ROW)
    down = -(-len(archs) // across)
    form = "Lines" if points["load"].nunique(dropna=False) > 1 else "Bars"
    inside = "dotted" if form == "Lines" else "narrow"
    note = f"{form}: share of the time the lane's stream is busy; {inside}: its share of the copy bandwidth."
    with styled():
        figure = new_figure(max(4.2 * across, 7), 3.9 * down + 0.9, f"{note} {caption(points, setting)}", title)
        grid = figure.subplots(down, across, squeeze=False, sharey=True)
        for axes, arch in zip(grid.flat, archs, strict=False):
            _lanes(axes, [e for e in entries if e["arch"] == arch], lanes)
            titled(axes, arch)
        for axes in grid.flat[len(archs) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("% of one GPU")
        if form == "Lines":
            curves = [Curve(lane, LANE_COLOURS[lane], LANE_MARKERS[lane]) for lane in lanes]
            legend(figure, [*curves, Curve("bandwidth", "0.35", "", ":")])
    return figure


def acceptance_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure | None:
    """Share of the drafted tokens that were accepted, and tokens per round; None without drafts."""
    rate, length = "spec_decode_acceptance_rate", "spec_decode_acceptance_length"
    drafting = points[points[rate].notna()] if rate in points else points[:0]
    if drafting.empty:
        return None
    note = "Curves may coincide, as architectures share their random numbers."
    return _panels(drafting, [(rate, length)], title, f"{setting} {note}")


def _facets(points: pd.DataFrame, names: Sequence[str], setting: str) -> Figure:
    """Panels by setting, one curve per architecture, with one scale per metric."""
    groups = [(dict(zip(names, key, strict=True)), mine) for key, mine in points.groupby(list(names), sort=False)]
    shown = groups[:MAX_SETTINGS]
    whole = len(shown) <= MOST_PANELS_PER_ROW  # room for more than one metric
    metrics = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms") if whole else ("output_throughput",)
    across = len(shown) if whole else MOST_PANELS_PER_ROW
    down = len(metrics) if whole else -(-len(shown) // across)
    entries = [entries_of(mine) for _, mine in shown]
    every = [entry for mine in entries for entry in mine]
    curves = curves_of(every)
    left_out = f"The first {MAX_SETTINGS} of {len(groups)} settings; pdvsim plot shows all. " if shown != groups else ""
    with styled():
        note = left_out + caption(points, setting, names)
        figure = new_figure(max(4.0 * across, 8) + 0.5, 3.3 * down + 0.8, note)
        grid = figure.subplots(down, across, squeeze=False)
        for number, ((values, _), mine) in enumerate(zip(shown, entries, strict=True)):
            for row, metric in enumerate(metrics):
                axes = grid[row][number] if whole else grid.flat[number]
                log = any(name in metric for name in LOGARITHMIC)
                panel(axes, mine, metric, curves, log=log, framed=every)
                name, unit, _ = name_of(metric)
                first = axes is grid[row if whole else number // across][0]
                titled(axes, "" if row else _words(values), y=f"{name} ({unit})" if first else "", fontsize=11)
        for axes in grid.flat[len(shown) :] if not whole else ():
            axes.set_visible(False)
        if len({e["load"] for e in every}) > 1:
            legend(figure, curves)
    return figure


def _words(values: dict[str, Any]) -> str:
    """A setting, one line per varied option."""
    return "\n".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())


def _panels(points: pd.DataFrame, rows: Sequence[Sequence[str]], title: str, setting: str) -> Figure:
    entries = entries_of(points)
    curves = curves_of(entries)
    with styled():
        several = len({e["load"] for e in entries}) > 1
        figure = new_figure(5 * len(rows[0]) + 0.5, 3.7 * len(rows) + 0.8, caption(points, setting), title)
        grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        for axes, metric in zip(grid.flat, [m for row in rows for m in row], strict=True):
            panel(axes, entries, metric, curves, log=any(name in metric for name in LOGARITHMIC))
        if several:
            legend(figure, curves)
    return figure


def _lanes(axes: Axes, entries: Sequence[Entry], lanes: Sequence[str]) -> None:
    """Each lane's utilisation and bandwidth share over the load, or as bars with one load."""
    for number, lane in enumerate(lanes):
        shares = (f"lanes_{lane}_utilisation", f"lanes_{lane}_bandwidth_share")
        colour = LANE_COLOURS[lane]
        if len(entries) == 1:
            for share, width, alpha in zip(shares, (0.75, 0.4), (0.45, 1.0), strict=True):
                if has(entries[0], share):
                    axes.bar(number, 100 * entries[0][share].mean, width, color=colour, alpha=alpha)
        else:
            for share, marker, dash in zip(shares, (LANE_MARKERS[lane], "."), DASHES, strict=True):
                draw(axes, entries, share, Curve(lane, colour, marker, dash), places([e["load"] for e in entries]))
    if len(entries) == 1:
        axes.set_xticks(range(len(lanes)), lanes)
        axes.set_xlim(-0.6, len(lanes) - 0.4)
        axes.grid(False, axis="x")
        axes.set_xlabel(load_line(entries))
    else:
        load_axis(axes, entries)
    axes.set_ylim(0, 105)
