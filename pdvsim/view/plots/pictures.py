"""The standing pictures of a sweep: throughput, latency, GPU use by lane, acceptance, and all in one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pdvsim.sim.records import LANES
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.plots.curves import (
    Curve,
    Entry,
    aside_of,
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
from pdvsim.view.style import LANE_COLOURS, tail

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Picture = Callable[["pd.DataFrame", str], "Figure"]
LOGARITHMIC = ("ttft", "e2el")
DODGE = 0.16  # the coins are the same for all, so the curves often are
ACROSS = 4  # panels side by side at most
DASHES: tuple[Literal["-", ":"], ...] = ("-", ":")  # busy, bandwidth
LANE_MARKERS = dict(zip(LANES, "^Dos", strict=True))


def sweep_figure(points: pd.DataFrame, title: str = "") -> Figure:
    """Throughput, time to first token and time per output token: mean and tail."""
    last = tail(points)
    upper = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    return _panels(points, [upper, ("request_throughput", f"{last}_ttft_ms", f"{last}_tpot_ms")], title)


def throughput_figure(points: pd.DataFrame, title: str = "") -> Figure:
    """Tokens and requests per second."""
    return _panels(points, [("output_throughput", "request_throughput")], title)


def latency_figure(points: pd.DataFrame, title: str = "") -> Figure:
    """Mean and tail of the time to first token, per output token and end to end."""
    rows = [tuple(f"{mark}_{metric}_ms" for metric in ("ttft", "tpot", "e2el")) for mark in ("mean", tail(points))]
    return _panels(points, rows, title)


def utilisation_figure(points: pd.DataFrame, title: str = "") -> Figure:
    """How busy each lane keeps its GPU, and the share of the copy bandwidth it draws; one panel an architecture."""
    entries = entries_of(points)
    archs = list(dict.fromkeys(points["arch"]))
    lanes = [lane for lane in LANES if f"lanes_{lane}_utilisation" in points]
    across = min(len(archs), ACROSS)
    down = -(-len(archs) // across)
    drawn = "Lines" if points["load"].nunique(dropna=False) > 1 else "Bars"
    inside = "dotted" if drawn == "Lines" else "narrow"
    note = f"{drawn}: share of the time the lane's stream is busy; {inside}: its share of the copy bandwidth."
    with styled():
        figure = new_figure(max(4.2 * across, 7), 3.9 * down + 0.9, f"{note} {caption(points)}", title)
        grid = figure.subplots(down, across, squeeze=False, sharey=True)
        for axes, arch in zip(grid.flat, archs, strict=False):
            _lanes(axes, [e for e in entries if e["arch"] == arch], lanes)
            axes.set_title(arch, fontweight="bold", loc="left")
        for axes in grid.flat[len(archs) :]:
            axes.set_visible(False)
        for row in grid:
            row[0].set_ylabel("% of one GPU")
        if drawn == "Lines":
            curves = [Curve(lane, LANE_COLOURS[lane], LANE_MARKERS[lane]) for lane in lanes]
            legend(figure, [*curves, Curve("bandwidth", "0.35", "", ":")])
    return figure


def acceptance_figure(points: pd.DataFrame, title: str = "") -> Figure | None:
    """Share of the drafts accepted, tokens a round, and acceptance by position; None where nothing is drafted."""
    rate, length = "spec_decode_acceptance_rate", "spec_decode_acceptance_length"
    entries = [e for e in entries_of(points) if has(e, rate)]
    if not entries:
        return None
    curves = curves_of(entries)
    with styled():
        note = "Curves that coincide are drawn side by side. By position: at the highest load of each."
        figure = new_figure(15, 4.8, f"{note} {caption(points)}", title)
        first, second, third = figure.subplots(1, 3)
        for axes, metric in ((first, rate), (second, length)):
            panel(axes, entries, metric, curves, dodge=DODGE)
        first.set_ylim(0, 100)
        for number, curve in enumerate(curves):
            last = [e for e in entries if e["series"] == curve.label][-1]
            rates = last.get("spec_decode_per_position_acceptance_rates") or []
            aside = aside_of(number, len(curves), DODGE)
            third.plot(
                [1 + i + aside for i in range(len(rates))], [100 * p.mean for p in rates], curve.dash,
                color=curve.colour, marker=curve.marker, markersize=8, linewidth=2,
            )  # fmt: skip
        third.set_ylim(0, 100)
        third.xaxis.get_major_locator().set_params(integer=True)
        third.set_title("Drafts accepted, by position", fontweight="bold", loc="left")
        third.set_xlabel("Position in the draft")
        third.set_ylabel("% of rounds")
        legend(figure, curves)
    return figure


def _panels(points: pd.DataFrame, rows: Sequence[Sequence[str]], title: str) -> Figure:
    entries = entries_of(points)
    curves = curves_of(entries)
    with styled():
        several = len({e["load"] for e in entries}) > 1
        figure = new_figure(5 * len(rows[0]) + 0.5, 3.7 * len(rows) + 0.8, caption(points), title)
        grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
        for axes, metric in zip(grid.flat, [m for row in rows for m in row], strict=True):
            panel(axes, entries, metric, curves, log=any(name in metric for name in LOGARITHMIC))
        if several:
            legend(figure, curves)
    return figure


def _lanes(axes: Axes, entries: Sequence[Entry], lanes: Sequence[str]) -> None:
    """Each lane's busy share and bandwidth share over the load, or as bars where there is one load."""
    for number, lane in enumerate(lanes):
        shares = (f"lanes_{lane}_utilisation", f"lanes_{lane}_bandwidth_share")
        colour = LANE_COLOURS[lane]
        if len(entries) == 1:
            for share, width, alpha in zip(shares, (0.75, 0.4), (0.45, 1.0), strict=True):
                if has(entries[0], share):
                    axes.bar(number, 100 * entries[0][share].mean, width, color=colour, alpha=alpha)
        else:
            for share, marker, dash in zip(shares, (LANE_MARKERS[lane], "."), DASHES, strict=True):
                draw(axes, entries, share, Curve(lane, colour, marker, dash), places(entries))
    if len(entries) == 1:
        axes.set_xticks(range(len(lanes)), lanes)
        axes.set_xlim(-0.6, len(lanes) - 0.4)
        axes.grid(False, axis="x")
        axes.set_xlabel(load_line(entries))
    else:
        load_axis(axes, entries)
    axes.set_ylim(0, 105)
