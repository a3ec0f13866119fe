"""Panels of metrics over the load, one curve per architecture or lane.

A band is the 95% confidence interval over replications; one replication has no band. Hollow markers are points where
the queue grew: their latencies would increase with a longer run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.bench.stats import Interval, over_replications, varied
from pdvsim.view.figure import titled
from pdvsim.view.style import (
    ARCH_MARKERS,
    AXIS_NAMES,
    RAMP,
    arch_colour,
    arch_marker,
    grew,
    name_of,
    paler,
    replications,
    rests_on,
)
from pdvsim.view.table import load_name, load_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Entry = dict[str, Any]
Dash = Literal["-", "--", ":"]

CLEAR = 4  # with more curves bands hide each other: whiskers instead
WHISKER_DODGE = 0.05
BAND = ("low", "high")  # suffixes of a metric's error bar columns
LEGEND_INCHES = 0.28  # a line
DASHES: tuple[Dash, ...] = ("-", "--", ":")
PALEST = 0.7  # most white in the colour of an architecture's last setting


@dataclass(frozen=True)
class Curve:
    """Style of one curve."""

    label: str
    colour: str
    marker: str = "o"
    dash: Dash = "-"


def arch_curve(arch: str) -> Curve:
    """Curve style of an architecture."""
    return Curve(arch, arch_colour(arch), arch_marker(arch))


def curves_named(labels: Sequence[str]) -> list[Curve]:
    """Curves of other columns than architecture: other colours, from dark to pale."""
    markers = list(ARCH_MARKERS.values())
    steps = (len(RAMP) - 1) / max(len(labels) - 1, 1)
    return [
        Curve(name, RAMP[round(i * steps)], markers[i % len(markers)], DASHES[i % len(DASHES)])
        for i, name in enumerate(labels)
    ]


def entries_of(points: pd.DataFrame) -> list[Entry]:
    """One entry per architecture, load and setting, in the order of the load; `series` names its curve."""
    names = varied(points)
    entries = []
    for key, group in points.groupby(names, sort=False, dropna=False) if names else [((), points)]:
        more = [f"{name.replace('_', ' ')} {value}" for name, value in zip(names, key, strict=True)]
        entries += [e | {"series": ", ".join([e["arch"], *more])} for e in over_replications(group)]
    return sorted(entries, key=lambda e: float(e["load"]) if not math.isnan(e["load"]) else math.inf)


def curves_of(entries: Sequence[Entry]) -> list[Curve]:
    """The curves of entries, ordered by architecture and setting; later settings are paler and dashed."""
    series: dict[str, list[str]] = {}
    for entry in entries:
        names = series.setdefault(entry["arch"], [])
        if entry["series"] not in names:
            names.append(entry["series"])
    markers = list(ARCH_MARKERS.values())
    return [
        Curve(
            name, paler(arch_colour(arch), PALEST * number / len(names)),
            arch_marker(arch) if len(series) > 1 else markers[number % len(markers)], DASHES[number % len(DASHES)],
        )
        for arch, names in series.items()
        for number, name in enumerate(names)
    ]  # fmt: skip


def has(entry: Entry, metric: str) -> bool:
    """Whether an entry has a value for a metric."""
    return isinstance(entry.get(metric), Interval) and math.isfinite(entry[metric].mean)


def draw(
    axes: Axes, entries: Sequence[Entry], metric: str, curve: Curve, at: Sequence[float], whiskers: bool = False
) -> None:
    """One curve at positions `at`: line, markers, and its interval as a band or whiskers."""
    scale = name_of(metric)[2]
    shown = [(e, x) for e, x in zip(entries, at, strict=True) if has(e, metric)]
    x = [place for _, place in shown]
    y = [e[metric].mean * scale for e, _ in shown]
    half = [e[metric].half * scale for e, _ in shown]
    axes.plot(x, y, curve.dash, color=curve.colour, linewidth=2)
    if any(half) and whiskers:
        axes.errorbar(x, y, half, fmt="none", ecolor=curve.colour, elinewidth=1.2, capsize=2.5, alpha=0.7)
    elif any(half):
        low = [max(a - h, 1e-9) for a, h in zip(y, half, strict=True)]
        high = [a + h for a, h in zip(y, half, strict=True)]
        axes.fill_between(x, low, high, color=curve.colour, alpha=0.2, linewidth=0)
    if shown and all(f"{metric}_low" in e for e, _ in shown):  # predicted forward times have an error bar
        low, high = ([max(e[f"{metric}_{end}"].mean * scale, 1e-9) for e, _ in shown] for end in BAND)
        axes.fill_between(
            x, low, high, facecolor="none", edgecolor=curve.colour, hatch="///", alpha=0.35, linewidth=0.5
        )
    for hollow in (False, True):
        chosen = [i for i, (e, _) in enumerate(shown) if grew(e.get("stability")) is hollow]
        axes.plot(
            [x[i] for i in chosen], [y[i] for i in chosen], curve.marker, color=curve.colour, markersize=8,
            markerfacecolor="white" if hollow else curve.colour, markeredgewidth=1.6,
        )  # fmt: skip


def bars(axes: Axes, entries: Sequence[Entry], metric: str, curves: Sequence[Curve]) -> None:
    """One load only: one bar per curve, hatched if the queue grew."""
    scale = name_of(metric)[2]
    shown = [e for e in entries if has(e, metric)]
    colours = {curve.label: curve.colour for curve in curves}
    half = [e[metric].half * scale for e in shown]
    patches = axes.bar(
        range(len(shown)), [e[metric].mean * scale for e in shown], width=0.7,
        color=[colours[e["series"]] for e in shown], yerr=half if any(half) else None, capsize=5, ecolor="0.25",
    )  # fmt: skip
    for bar, entry in zip(patches, shown, strict=True):
        if grew(entry.get("stability")):
            bar.set_hatch("//")
            bar.set_edgecolor("white")
    names = [e["series"].replace(", ", "\n").replace(" = ", " =\n") for e in shown]
    turned = len(shown) > 3
    axes.set_xticks(range(len(shown)), names, rotation=30 if turned else 0, ha="right" if turned else "center")
    axes.grid(False, axis="x")


def places(values: Sequence[float]) -> list[float]:
    """Positions of loads, or other numbers, on an axis; infinity is one step after the largest finite one."""
    last = 2.0 * max((float(value) for value in values if math.isfinite(value)), default=0.5)
    return [float(value) if math.isfinite(value) else last for value in values]


def panel(
    axes: Axes,
    entries: Sequence[Entry],
    metric: str,
    curves: Sequence[Curve],
    log: bool = False,
    framed: Sequence[Entry] = (),
) -> None:
    """One metric of all architectures over the load; axis limits are from the entries `framed`, default: its own."""
    dodge = WHISKER_DODGE if len(curves) > CLEAR else 0.0
    title, unit, _ = name_of(metric)
    loads = [e["load"] for e in entries]
    at = dict(zip(loads, places(loads), strict=True))
    banded = len(at) > 1
    if not banded:
        bars(axes, entries, metric, curves)
        axes.set_xlabel(load_line(entries))
    else:
        for number, curve in enumerate(curves):
            mine = [e for e in entries if e["series"] == curve.label]
            shift = 2 ** (min(dodge, 0.5 / len(curves)) * (number - (len(curves) - 1) / 2))  # within half a step
            draw(axes, mine, metric, curve, [at[e["load"]] * shift for e in mine], whiskers=len(curves) > CLEAR)
        load_axis(axes, entries)
    frame(axes, framed or entries, metric, log, banded)
    titled(axes, title, y=unit)


def load_line(entries: Sequence[Entry]) -> str:
    """The only load as text."""
    return f"{AXIS_NAMES.get(entries[0]['load_kind'], 'Load')}: {load_text(entries[0]['load'])}"


def load_axis(axes: Axes, entries: Sequence[Entry]) -> None:
    """The loads as ticks on a log axis."""
    kind = str(entries[0]["load_kind"])
    loads = [e["load"] for e in entries]
    at = dict(zip(places(loads), loads, strict=True))
    if min(at) > 0:
        axes.set_xscale("log", base=2)
    axes.set_xticks(list(at), [load_text(load) for load in at.values()])
    axes.minorticks_off()
    axes.set_xlabel(AXIS_NAMES.get(kind, load_name(kind)))


def frame(axes: Axes, entries: Sequence[Entry], metric: str, log: bool, banded: bool = True) -> None:
    """Axis limits from means, error bars if `banded`, and intervals up to a limit.

    Intervals from two replications can be very long.
    """
    from matplotlib.ticker import LogLocator, NullFormatter

    scale = name_of(metric)[2]
    intervals = [e[metric] for e in entries if has(e, metric)]
    ends = [e[f"{metric}_{end}"] for e in entries for end in BAND if banded and has(e, f"{metric}_{end}")]
    means = [f.mean * scale for f in (*intervals, *ends)]
    low, high = min(means, default=0), max(means, default=0)
    if log and high > 10 * low > 0:
        axes.set_yscale("log")
        axes.set_ylim(low / 2, high * 2)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        reach = max((f.mean + f.half_width for f in intervals if f.n > 1), default=0.0) * scale
        axes.set_ylim(0, 1.12 * max(high, min(reach, 1.5 * high)) if high > 0 else 1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.10g}")


def caption(points: pd.DataFrame, setting: str, dims: Sequence[str] = ()) -> str:
    """Caption of curves: setting and foundation; `dims` are the columns that distinguish settings."""
    note = f"{setting} {rests_on(points)}".strip()
    counted = replications(points, dims)
    sure = f"{counted[:-1]}, bands and whiskers are 95% confidence (cut at the frame)."
    note += f" {sure if counted[0].isdigit() else counted}"
    if "output_throughput_low" in points and points["load"].nunique() > 1:
        low, high = (f"{bar:.0%}" for bar in (points["forward_error_bar"].min(), points["forward_error_bar"].max()))
        off = low if low == high else f"{low} to {high}"
        note += f" Hatched areas: forward times within ±{off}."
    if points["stability"].map(grew).any():
        note += " Hollow or hatched: the queue kept growing; a longer run has longer latencies."
    return note


def legend(figure: Figure, curves: Sequence[Curve], title: str | None = None) -> None:
    """Legend above all panels, in as many lines as needed; the figure's title is below it."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c.colour, marker=c.marker, linestyle=c.dash, label=c.label) for c in curves]
    needed_inches = [0.1 * len(c.label) + 0.75 for c in curves]
    room_inches = figure.get_figwidth() - 0.4
    across = len(curves) if sum(needed_inches) <= room_inches else max(1, int(room_inches / max(needed_inches)))
    lines = -(-len(curves) // across)
    figure.legend(
        handles=handles, loc="outside upper center", ncols=-(-len(curves) // lines), frameon=False, title=title
    )
    figure.set_figheight(figure.get_figheight() + LEGEND_INCHES * (lines - 1))
    if figure.get_suptitle():
        figure.suptitle("\n" * lines + figure.get_suptitle(), fontsize=13, fontweight="bold", x=0.01, ha="left")
