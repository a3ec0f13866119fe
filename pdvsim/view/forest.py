"""Differences of architectures from one of them, paired by seed, as a forest plot.

The intervals are those of the paired differences. They are much narrower than those of two means, which would hide
significant differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdvsim.bench.stats import Interval
from pdvsim.view.comparison import founded
from pdvsim.view.figure import new_figure, styled, titled
from pdvsim.view.plots.curves import Entry, arch_curve, legend
from pdvsim.view.style import arch_colour, arch_marker, counted, lower_is_better, metric_label, number_text
from pdvsim.view.table import load_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW_INCHES = 0.3  # one architecture at one place
FAR = 1.0  # from this difference on the axis shows ratios on a log scale
NAME_AT = 0.02  # position of a row's values, as a share of the panel


def forest_figure(entries: Sequence[Entry], differences: Sequence[Mapping[str, Any]], setting: str) -> Figure:
    """One row of panels per load, one column per metric, one line per place and architecture: the paired difference.

    `entries` are the metrics of each; `differences` have the paired differences, their significance and the profile's
    error. `setting` starts the caption.
    """
    against = str(differences[0]["against"])
    archs = list(dict.fromkeys([against, *(e["arch"] for e in entries)]))
    loads = list(dict.fromkeys(e["load"] for e in entries))
    places = list(dict.fromkeys(str(e["place"]) for e in entries))
    metrics = list(dict.fromkeys(d["metric"] for d in differences))
    rows = len(places) * len(archs)
    rests_on = dict.fromkeys(f"{e['gpu']}, {founded(e)}" for e in entries)
    note = f"{setting} Simulated. {'. '.join(rests_on)}. "
    note += counted([int(e["replications"]) for e in entries])
    note += f" Left of each line: its value and draft length. Marks: difference from {against}, paired by "
    note += "seed, lines its interval. Hollow: not significant. Grey: the profile's error."
    with styled():
        height = (ROW_INCHES * rows + 0.9) * len(loads)
        figure = new_figure(4.6 * len(metrics) + 2.2, height + 0.8, note)
        grid = figure.subplots(len(loads), len(metrics), squeeze=False, sharey=True)
        for axes_row, load in zip(grid, loads, strict=True):
            here = [e for e in entries if e["load"] == load]
            for axes, metric in zip(axes_row, metrics, strict=True):
                mine = [d for d in differences if d["metric"] == metric and d["load"] == load]
                _forest(axes, here, mine, metric, archs, places)
                titled(axes, metric_label(metric), fontsize=11)
            kind = "concurrent requests" if here[0]["load_kind"] == "concurrency" else "requests/s"
            ticks = [place * len(archs) + (len(archs) - 1) / 2 for place in range(len(places))]
            axes_row[0].set_yticks(ticks, [_name(place, here) for place in places], fontsize=10)
            axes_row[0].set_ylabel(f"{load_text(load)} {kind}", fontweight="bold")
            axes_row[0].set_ylim(rows - 0.5, -0.5)
        legend(figure, [arch_curve(arch) for arch in archs])
    return figure


def _forest(
    axes: Axes,
    entries: list[Entry],
    differences: list[Mapping[str, Any]],
    metric: str,
    archs: Sequence[str],
    places: Sequence[str],
) -> None:
    """One metric at one load: each architecture's value at the left of its line, the difference as a mark."""
    from matplotlib.ticker import LogLocator

    ends = [end for d in differences for end in d["relative"].ends if math.isfinite(end)]
    far = max(map(abs, ends), default=0.0) > FAR
    axes.axvline(1.0 if far else 0.0, color="0.25", linewidth=1.4, zorder=1)
    for number, place in enumerate(places):
        if number:
            axes.axhline(number * len(archs) - 0.5, color="0.8", linewidth=1, zorder=0)
        for at, arch in enumerate(archs):
            entry = next((e for e in entries if (e["place"], e["arch"]) == (place, arch)), None)
            if entry is None or math.isnan(entry[metric].mean):
                continue
            y = number * len(archs) + at
            axes.text(
                NAME_AT, y, f"{number_text(entry[metric].mean)} {_drafts(entry)}".strip(), va="center", fontsize=9,
                color="0.25", transform=axes.get_yaxis_transform(),
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}, zorder=4,
            )  # fmt: skip
            mine = next((d for d in differences if (d["place"], d["arch"]) == (place, arch)), None)
            if arch == archs[0]:
                _mark(axes, Interval(0.0, math.nan, 0), True, y, arch, far)
            elif mine is not None and math.isfinite(mine["relative"].mean):
                off, one = mine["error"], 1.0 if far else 0.0
                axes.fill_betweenx([y - 0.5, y + 0.5], one - off, one + off, color="0.92", linewidth=0, zorder=0)
                _mark(axes, mine["relative"], mine["significant"], y, arch, far)
    lowest, highest = min(ends, default=-0.01), max(ends, default=0.01)
    if far:
        axes.set_xscale("log")
        low, high = max(1 + min(lowest, 0.0), 0.02), 1 + max(highest, 0.0)
        axes.set_xlim(low * (low / high) ** 0.75, high * (high / low) ** 0.3)
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.set_xlabel(f"times {archs[0]}")
    else:
        span = max(highest, 0.0) - min(lowest, 0.0) or 0.02
        axes.set_xlim(min(lowest, 0.0) - 0.95 * span, max(highest, 0.0) + 0.45 * span)
        axes.xaxis.set_major_formatter(lambda value, _: f"{100 * value:+g}%" if value else "0")
        axes.set_xlabel(f"difference from {archs[0]}, {'lower' if lower_is_better(metric) else 'higher'} is better")
    axes.minorticks_off()
    axes.grid(False, axis="y")


def _mark(axes: Axes, difference: Interval, sure: bool, y: float, arch: str, far: bool) -> None:
    """A difference with its interval: filled if significant, else hollow."""
    shift = 1.0 if far else 0.0
    low, high = (end + shift for end in difference.ends)
    axes.plot([max(low, 1e-3) if far else low, high], [y, y], color=arch_colour(arch), linewidth=2.2, zorder=2)
    axes.plot(
        difference.mean + shift, y, arch_marker(arch), color=arch_colour(arch), markersize=8, markeredgewidth=1.6,
        markerfacecolor=arch_colour(arch) if sure else "white", zorder=3,
    )  # fmt: skip
    if difference.n:
        left = difference.mean < 0
        axes.annotate(
            _percent(difference.mean), (low if left else high, y), xytext=(-7 if left else 7, 0),
            textcoords="offset points", va="center", ha="right" if left else "left", fontsize=9,
            color="0.15" if sure else "0.45", fontweight="bold" if sure else "normal", zorder=4,
        )  # fmt: skip


def _percent(relative: float) -> str:
    return f"{1 + relative:.3g}×" if relative > 3 else f"{100 * relative:+.1f}%".replace("-", "−")


def _drafts(entry: Entry) -> str:
    """The draft length of an entry, or its controller; empty without drafts."""
    first = str(entry.get("settings", "")).partition(",")[0]
    return first.removesuffix(" controller") if first.startswith("k=") or first.endswith(" controller") else ""


def _name(place: str, entries: Sequence[Entry]) -> str:
    """A place and its acceptance."""
    mine = [e for e in entries if e["place"] == place and "spec_decode_acceptance_rate" in e]
    rates = [e["spec_decode_acceptance_rate"].mean for e in mine]
    accepted = [rate for rate in rates if not math.isnan(rate)]  # nan without drafts
    shown = [f"accepted {sum(accepted) / len(accepted):.0f}% of drafted"] if accepted else []
    return "\n".join([place.replace(":", " to\n"), *shown])
