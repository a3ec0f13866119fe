"""Plots of predicted against measured: forwards alone, co-running slowdowns, whole serving runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pdvsim.calibration.validate.served import FAMILIES
from pdvsim.view.figure import legend_above, new_figure, styled, titled
from pdvsim.view.setting import values_text
from pdvsim.view.style import KIND_COLOURS, arch_colour, arch_rank

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from pdvsim.calibration.fit.corun import Corun
    from pdvsim.calibration.fit.forward import Solo

BAND = 0.1
TITLES = {
    "output_throughput": ("Output throughput", "tok/s"),
    "ttft": ("Time to first token", "ms"),
    "tpot": ("Time per output token", "ms"),
    "itl": ("Inter-token latency", "ms"),
    "e2el": ("End-to-end latency", "ms"),
}
MARKS = {"mean": "o", "median": "s", "p90": "v", "p95": "^", "p99": "D"}


def solo_figure(solos: Mapping[str, Solo], foundation: str) -> Figure:
    """Held-out error of every point over its predicted time: one panel per model, one colour per kind of launch."""
    columns = min(3, len(solos))
    kinds = list(dict.fromkeys(kind for solo in solos.values() for kind in solo.frame["kind"]))
    note = f"Forward latency alone, points held out of the fit (5-fold); {foundation}. Grey: within 6%."
    with styled():
        figure, grid = _panels(-(-len(solos) // columns), columns, 3.2, note)
        for axes, (model, solo) in zip(grid, solos.items(), strict=False):
            axes.axhspan(-6, 6, color="0.92", zorder=0)
            for kind in kinds:
                rows = (solo.frame["kind"] == kind).to_numpy()
                at = solo.frame["held_out"].to_numpy(float)[rows] * 1e3
                axes.scatter(at, solo.errors[rows] * 100, s=16, color=KIND_COLOURS[kind], label=kind, alpha=0.85)
            axes.set_xscale("log")
            _plain_ticks(axes.xaxis, *axes.get_xlim())
            titled(axes, model, "Predicted time (ms)", "Error (%)")
        for axes in grid[len(solos) :]:
            axes.set_visible(False)
        legend_above(figure, grid[0])
    return figure


def corun_figure(corun: Corun, foundation: str) -> Figure:
    """Predicted over measured slowdown of co-running launches, pairs and triples, held out by shape."""
    kinds = list(dict.fromkeys(corun.frame["kind"]))
    note = f"Co-running time over time alone, shapes held out of the fit (5-fold); {foundation}. Grey: within 10%."
    with styled():
        figure, grid = _panels(1, 2, 5.5, note)
        for axes, (title, works) in zip(grid, (("Pairs", 2), ("Triples", 3)), strict=True):
            for kind in kinds:
                for ordered, mark in ((False, "o"), (True, "^")):
                    frame = corun.frame
                    rows = frame[(frame["works"] == works) & (frame["kind"] == kind) & (frame["ordered"] == ordered)]
                    label = f"{kind}, {'by priority' if ordered else 'equal streams'}" if len(rows) else None
                    axes.scatter(rows["measured"], rows["by_shape"], s=26, marker=mark, color=KIND_COLOURS[kind],
                                 label=label, alpha=0.8)  # fmt: skip
            _diagonal(axes, corun.frame[corun.frame["works"] == works], "measured", "by_shape")
            titled(axes, title, "Measured slowdown", "Predicted slowdown")
        legend_above(figure, grid[0], 4)
    return figure


def validation_figure(document: Mapping[str, Any]) -> Figure:
    """Predicted against measured metrics of all runs: one panel per family, one colour per architecture."""
    import pandas as pd

    runs = document["runs"]
    archs = sorted({run["arch"] for run in runs}, key=arch_rank)
    pairs = values_text([run["pair"] for run in runs], "pairs")
    note = (
        f"{pairs}: {len(runs)} real runs, simulated with the profile {document['foundation']}: median error "
        f"{document['median_abs_error']:.1%}, 95th percentile {document['p95_abs_error']:.1%}. Grey: within 10%."
    )
    with styled():
        figure, grid = _panels(2, 3, 4.6, note)
        for axes, family in zip(grid, ("output_throughput", *FAMILIES), strict=False):
            title, unit = TITLES[family]
            marks = {"": "o"} if family == "output_throughput" else MARKS
            points = []
            for which, mark in marks.items():
                metric = f"{which}_{family}_ms" if which else family
                for arch in archs:
                    at = [(r["measured"][metric], r["predicted"][metric]) for r in runs
                          if r["arch"] == arch and metric in r["errors"]]  # fmt: skip
                    points += at
                    x, y = [a for a, _ in at], [b for _, b in at]
                    axes.scatter(x, y, s=22, marker=mark, color=arch_colour(arch), alpha=0.75)
            _diagonal(axes, pd.DataFrame(points, columns=["measured", "predicted"]), "measured", "predicted")
            titled(axes, title, f"Measured ({unit})", f"Predicted ({unit})")
        _keys(grid[-1], archs)
    return figure


def launches_figure(measured: pd.DataFrame, predicted: pd.DataFrame, run: Mapping[str, Any]) -> Figure:
    """One run's launches: measured over the time of each alone, over time; and by rows, with the simulated ones."""
    note = (
        f"{run['arch']}, {run['pair']}, {run['dataset']}; profile {run['foundation']}. Left: a launch as "
        "measured over the profile's time for it alone. Right: by decoding rows, measured (dots) and simulated (rings)."
    )
    with styled():
        figure, (over_time, by_rows) = _panels(1, 2, 4.6, note)
        for kind, colour in KIND_COLOURS.items():
            real, simulated = (frame[frame["kind"] == kind] for frame in (measured, predicted))
            known = real[real["solo_s"] > 0]
            span = known["end_s"] - known["start_s"]
            over_time.scatter(known["start_s"], span / known["solo_s"], s=7, color=colour, alpha=0.5, linewidth=0)
            for frame, ring in ((real, False), (simulated, True)):
                rows = frame[frame["rows"] > 0]
                by_rows.scatter(
                    rows["rows"], 1e3 * (rows["end_s"] - rows["start_s"]), s=26 if ring else 7,
                    facecolor="none" if ring else colour, edgecolor=colour if ring else "none", linewidth=0.6,
                    alpha=0.5, label=None if ring or real.empty else kind,
                )  # fmt: skip
        over_time.axhline(1.0, color="0.5", linewidth=1)
        over_time.set_yscale("log")
        _plain_ticks(over_time.yaxis, *over_time.get_ylim())
        titled(over_time, "", "Time of the run (s)", "Measured over alone")
        titled(by_rows, "", "Rows", "Duration (ms)")
        legend_above(figure, by_rows, markerscale=2)
    return figure


def _panels(rows: int, columns: int, height: float, caption: str) -> tuple[Figure, list[Axes]]:
    figure = new_figure(5.2 * columns, height * rows + 0.6, caption)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def _diagonal(axes: Axes, frame: pd.DataFrame, x: str, y: str) -> None:
    """Equal log axes with the line of no error and a band around it."""
    values = frame[[x, y]].to_numpy(float)
    values = values[(values > 0).all(1)] if len(values) else values
    low, high = (values.min() / 1.15, values.max() * 1.15) if len(values) else (0.5, 2.0)
    ends = [low, high]
    axes.fill_between(ends, [v * (1 - BAND) for v in ends], [v * (1 + BAND) for v in ends], color="0.9", zorder=0)
    axes.plot(ends, ends, color="0.5", linewidth=1, zorder=1)
    for scale, limit in ((axes.set_xscale, axes.set_xlim), (axes.set_yscale, axes.set_ylim)):
        scale("log")
        limit(low, high)
    for axis in (axes.xaxis, axes.yaxis):
        _plain_ticks(axis, low, high)


def _plain_ticks(axis: Any, low: float, high: float) -> None:
    """A few tick values: powers of ten over several decades, else 1, 2 and 5 as well."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    subs = (1.0,) if high > 300 * low else (1.0, 3.0) if high > 30 * low else (1.0, 1.5, 2.0, 3.0, 5.0)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _keys(axes: Axes, archs: Sequence[str]) -> None:
    """One legend for all panels."""
    from matplotlib.lines import Line2D

    axes.set_axis_off()
    by_colour = [Line2D([], [], marker="o", linestyle="", color=arch_colour(arch), label=arch) for arch in archs]
    by_mark = [Line2D([], [], marker=m, linestyle="", color="0.4", label=which) for which, m in MARKS.items()]
    first = axes.legend(handles=by_colour, title="architecture", loc="upper left", frameon=False)
    axes.add_artist(first)
    axes.legend(handles=by_mark, title="of the requests", loc="upper right", frameon=False)
