"""A sweep as one figure: throughput, time to first token and time per output token against the load."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.sim.stats import over_replications
from pdvsim.table import load_name, load_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXIS_NAMES = {"concurrency": "Concurrent requests", "request_rate": "Request rate (req/s)"}
HOLLOW = ("overloaded", "backlogged")


def save_sweep(points: pd.DataFrame, path: Path | str) -> None:
    """Draw `points` and write the figure to `path`."""
    sweep_figure(points).savefig(path, dpi=150)


def sweep_figure(points: pd.DataFrame) -> Figure:
    """Six panels over the load, one curve an architecture; the band is the 95% confidence interval over replications.

    Hollow markers are points where the queue grew: their latencies would grow with a longer run.
    """
    import seaborn as sns
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    entries = over_replications(points)
    archs = list(dict.fromkeys(points["arch"]))
    tail = _tail(points)
    panels = (
        ("Output throughput", "output_throughput", "tok/s", "linear"),
        ("Mean TTFT", "mean_ttft_ms", "ms", "log"),
        ("Mean TPOT", "mean_tpot_ms", "ms", "linear"),
        ("Request throughput", "request_throughput", "req/s", "linear"),
        (f"{tail.upper()} TTFT", f"{tail}_ttft_ms", "ms", "log"),
        (f"{tail.upper()} TPOT", f"{tail}_tpot_ms", "ms", "linear"),
    )
    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
        figure = Figure(figsize=(15, 8), layout="constrained")
        FigureCanvasAgg(figure)  # no window and no global state: safe in threads and notebooks alike
        grid = figure.subplots(2, 3)
        colours = dict(zip(archs, sns.color_palette("colorblind", len(archs)), strict=True))
        for axes, (title, metric, unit, scale) in zip(grid.flat, panels, strict=True):
            for arch in archs:
                _curve(axes, [e for e in entries if e["arch"] == arch], metric, arch, colours[arch])
            _dress(axes, entries, metric, title, unit, scale)
        handles, labels = grid.flat[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=min(len(archs), 8), frameon=False)
        figure.supxlabel(_footnote(points), fontsize=10, color="0.35", x=0.01, ha="left")
    return figure


def _tail(points: pd.DataFrame) -> str:
    """The highest percentile the rows hold, as its key; the median where they hold none."""
    given = [c.removesuffix("_ttft_ms") for c in points.columns if c.startswith("p") and c.endswith("_ttft_ms")]
    return max(given, key=lambda name: float(name[1:]), default="median")


def _curve(axes: Axes, entries: list[dict[str, Any]], metric: str, arch: str, colour: Any) -> None:
    shown = [e for e in entries if metric in e and math.isfinite(e[metric].mean)]
    shown.sort(key=lambda e: float(e["load"]) if math.isfinite(e["load"]) else math.inf)
    x = [_place(e, entries) for e in shown]
    y = [e[metric].mean for e in shown]
    half = [0.0 if math.isnan(e[metric].half_width) else e[metric].half_width for e in shown]
    axes.plot(x, y, color=colour, label=arch, linewidth=2)
    if any(half):
        axes.fill_between(
            x, [max(a - h, 1e-9) for a, h in zip(y, half, strict=True)], [a + h for a, h in zip(y, half, strict=True)],
            color=colour, alpha=0.2, linewidth=0,
        )  # fmt: skip
    if shown and all(f"{metric}_low" in e for e in shown):
        low, high = ([max(e[f"{metric}_{end}"].mean, 1e-9) for e in shown] for end in ("low", "high"))
        axes.fill_between(x, low, high, facecolor="none", edgecolor=colour, hatch="///", alpha=0.35, linewidth=0.5)
    grew = [any(word in str(e.get("stability")) for word in HOLLOW) for e in shown]
    for hollow in (False, True):
        at = [i for i, g in enumerate(grew) if g is hollow]
        face = "white" if hollow else colour
        axes.plot([x[i] for i in at], [y[i] for i in at], "o", color=colour, markerfacecolor=face, markersize=7)


def _place(entry: dict[str, Any], entries: list[dict[str, Any]]) -> float:
    """Where a load stands on the axis; an infinite rate one step behind the largest finite one."""
    load = float(entry["load"])
    if math.isfinite(load):
        return load
    return 2 * max((float(e["load"]) for e in entries if math.isfinite(e["load"])), default=0.5)


def _dress(axes: Axes, entries: list[dict[str, Any]], metric: str, title: str, unit: str, scale: str) -> None:
    kind = str(entries[0]["load_kind"])
    loads = {_place(e, entries): e["load"] for e in entries}
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(loads), [load_text(load) for load in loads.values()])
    means = [e[metric].mean for e in entries if metric in e and math.isfinite(e[metric].mean)]
    low, high = min(means, default=0), max(means, default=0)
    if scale == "log" and high > 10 * low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 2, high * 2)  # the curves set the frame: two replications make bands without end
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    else:
        axes.set_ylim(0, 1.2 * high if high > 0 else 1)
    axes.minorticks_off()
    axes.set_title(title, fontweight="bold", loc="left")
    axes.set_ylabel(unit)
    axes.set_xlabel(AXIS_NAMES.get(kind, load_name(kind)))


def _footnote(points: pd.DataFrame) -> str:
    note = f"Simulated, profile {points['profile'].iloc[0]}: {points['foundation'].iloc[0]}."
    if points["run"].nunique() > 1:
        note += f" Bands: 95% confidence over {points['run'].nunique()} replications."
    if "output_throughput_low" in points:
        note += f" Hatched: forward times {points['forward_error_bar'].max():.0%} slower to as much faster."
    if points["stability"].isin(HOLLOW).any():
        note += " Hollow: the queue was still growing."
    return note
