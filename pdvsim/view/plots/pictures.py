"""The standard plots of a sweep: throughput, latency, GPU use by lane, acceptance, and a summary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.sim.records import LANES
from pdvsim.study.stats import varied
from pdvsim.view.figure import new_figure, styled
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
ACROSS = 4  # most panels in a row
FACETS = 12  # most settings in one plot
ALIKE = 0.2  # percent of rounds: closer curves are merged
DASHES: tuple[Literal["-", ":"], ...] = ("-", ":")  # busy, bandwidth
LANE_MARKERS = dict(zip(LANES, "^Dos", strict=True))


def sweep_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure:
    """Throughput, time to first token and time per output token: mean and tail.

    One column of panels per varied setting; with many settings, throughput only.
    """
    names = varied(points)
    settings = len(points[names].drop_duplicates()) if names else 1
    if settings > 1 and (points["arch"].nunique() > 1 or settings > CLEAR or points["load"].nunique() == 1):
        return _facets(points, names, title, setting)
    last = tail(points)
    upper = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")
    return _panels(points, [upper, ("request_throughput", f"{last}_ttft_ms", f"{last}_tpot_ms")], title, setting)


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
    across = min(len(archs), ACROSS)
    down = -(-len(archs) // across)
    drawn = "Lines" if points["load"].nunique(dropna=False) > 1 else "Bars"
    inside = "dotted" if drawn == "Lines" else "narrow"
    note = f"{drawn}: share of the time the lane's stream is busy; {inside}: its share of the copy bandwidth."
    with styled():
        figure = new_figure(max(4.2 * across, 7), 3.9 * down + 0.9, f"{note} {caption(points, setting)}", title)
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


def acceptance_figure(points: pd.DataFrame, title: str = "", setting: str = "") -> Figure | None:
    """Acceptance rate, tokens per round, and acceptance by position; None without drafts.

    Architectures share their random numbers, so curves often coincide; those are merged.
    """
    rate, length = "spec_decode_acceptance_rate", "spec_decode_acceptance_length"
    entries = [e for e in entries_of(points) if has(e, rate)]
    if not entries:
        return None
    curves, drawn, note = _merged_curves(entries, rate)
    with styled():
        figure = new_figure(
            15, 4.8, f"{note}By position: at the highest load of each architecture. {caption(points, setting)}", title
        )
        first, second, third = figure.subplots(1, 3)
        for axes, metric in ((first, rate), (second, length)):
            panel(axes, drawn, metric, curves)
        first.set_ylim(0, 100)
        for curve in curves:
            last = [e for e in drawn if e["series"] == curve.label][-1]
            rates = last.get("spec_decode_per_position_acceptance_rates") or []
            third.plot(
                range(1, len(rates) + 1), [100 * p.mean for p in rates], curve.dash,
                color=curve.colour, marker=curve.marker, markersize=8, linewidth=2,
            )  # fmt: skip
        third.set_ylim(0, 100)
        third.xaxis.get_major_locator().set_params(integer=True)
        third.set_title("Drafts accepted, by position", fontweight="bold", loc="left")
        third.set_xlabel("Position in the draft")
        third.set_ylabel("% of rounds")
        if len({e["load"] for e in drawn}) > 1:
            legend(figure, curves)
    return figure


def _merged_curves(entries: list[Entry], metric: str) -> tuple[list[Curve], list[Entry], str]:
    """One curve for all series that coincide, its entries, and a note."""
    together: list[tuple[list[Curve], list[Entry]]] = []
    for curve in curves_of(entries):
        mine = [e for e in entries if e["series"] == curve.label]
        at = {e["load"]: e[metric].mean for e in mine}
        for curves, theirs in together:
            if {e["load"] for e in theirs} == set(at) and all(
                abs(at[e["load"]] - e[metric].mean) < ALIKE for e in theirs
            ):
                curves.append(curve)
                break
        else:
            together.append(([curve], mine))
    shared, drawn = [], []
    for curves, mine in together:
        one = curves[0] if len(curves) == 1 else Curve(" = ".join(c.label for c in curves), "0.25")
        shared.append(one)
        drawn += [e | {"series": one.label} for e in mine]
    coincide = any(len(curves) > 1 for curves, _ in together)
    return shared, drawn, f"Joined by =: within {ALIKE} percentage points, drawn once. " if coincide else ""


def _facets(points: pd.DataFrame, names: Sequence[str], title: str, setting: str) -> Figure:
    """Panels by setting, one curve per architecture, with one scale per metric."""
    groups = [(dict(zip(names, key, strict=True)), mine) for key, mine in points.groupby(list(names), sort=False)]
    shown = groups[:FACETS]
    whole = len(shown) <= ACROSS  # room for more than one metric
    metrics = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms") if whole else ("output_throughput",)
    across = len(shown) if whole else ACROSS
    down = len(metrics) if whole else -(-len(shown) // across)
    entries = [entries_of(mine) for _, mine in shown]
    every = [entry for mine in entries for entry in mine]
    curves = curves_of(every)
    left_out = f"The first {FACETS} of {len(groups)} settings; pdvsim plot shows all. " if shown != groups else ""
    with styled():
        figure = new_figure(
            max(4.0 * across, 8) + 0.5, 3.3 * down + 0.8, left_out + caption(points, setting, names), title
        )
        grid = figure.subplots(down, across, squeeze=False)
        for number, ((values, _), mine) in enumerate(zip(shown, entries, strict=True)):
            for row, metric in enumerate(metrics):
                axes = grid[row][number] if whole else grid.flat[number]
                log = any(name in metric for name in LOGARITHMIC)
                panel(axes, mine, metric, curves, log=log, framed=every)
                name, unit, _ = name_of(metric)
                axes.set_ylabel(f"{name} ({unit})" if axes is grid[row if whole else number // across][0] else "")
                axes.set_title(_words(values) if not row else "", fontweight="bold", loc="left", fontsize=11)
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
                draw(axes, entries, share, Curve(lane, colour, marker, dash), places(entries))
    if len(entries) == 1:
        axes.set_xticks(range(len(lanes)), lanes)
        axes.set_xlim(-0.6, len(lanes) - 0.4)
        axes.grid(False, axis="x")
        axes.set_xlabel(load_line(entries))
    else:
        load_axis(axes, entries)
    axes.set_ylim(0, 105)
