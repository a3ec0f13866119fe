"""A comparison over pairs and cards as one figure: what each architecture adds to the first, paired by seed.

The intervals are of the differences, run by run with the same seed: far narrower than those of two means, which would
hide differences that are sure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdvsim.study.compare import COST, differences, summary
from pdvsim.study.stats import Interval
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.plots.curves import Entry, arch_curve, legend
from pdvsim.view.plots.heatmap import told_apart
from pdvsim.view.setting import Settings, points_line
from pdvsim.view.style import arch_colour, arch_marker, counted, lower_is_better
from pdvsim.view.table import founded, load_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PairOnCard = tuple[str, str]  # a pair and a card

ROW_INCHES = 0.3  # an architecture of a pair
FAR = 1.0  # a difference from which on the axis is of ratios, in logarithms
TOLD_BY = {COST: "output_throughput"}  # a cost is a price over a throughput
NAME_AT = 0.02  # share of the panel: where a row's own figures begin


def comparison_figure(
    points: pd.DataFrame, base: Settings | None = None, judged: Sequence[Mapping[str, Any]] = ()
) -> Figure:
    """A row of panels a load, a column a metric; a line a pair (on a card) and architecture: the paired difference.

    `base` is the experiment that is compared, `judged` says of the differences whether they count, and by how much the
    profile itself may be off. Of one architecture alone: its figures, without a difference.
    """
    entries = summary(points)
    archs = list(dict.fromkeys(e["arch"] for e in entries))
    loads = list(dict.fromkeys(e["load"] for e in entries))
    places = list(dict.fromkeys((e["pair"], e["gpu"]) for e in entries))
    metrics = _metrics(points)
    rivals = archs[1:]
    verdicts = {_seat(d): d for d in judged}
    found = [
        d | {key: verdict[key] for key in ("told_apart", "error")}
        if (verdict := verdicts.get((*_seat(d)[:-1], TOLD_BY.get(d["metric"], d["metric"]))))
        else d | {"told_apart": told_apart(d["relative"]), "error": 0.0}
        for d in differences(points, [name for name, _ in metrics], archs[0])
    ]
    rows = len(places) * (len(rivals) + 1)
    with styled():
        setting = points_line(points, [base] if base else [])
        height = (ROW_INCHES * rows + 0.9) * len(loads)
        figure = new_figure(4.6 * len(metrics) + 2.2, height + 0.8, _footnote(entries, setting, archs[0], bool(judged)))
        grid = figure.subplots(len(loads), len(metrics), squeeze=False, sharey=True)
        for axes_row, load in zip(grid, loads, strict=True):
            here = [e for e in entries if e["load"] == load]
            for axes, (metric, title) in zip(axes_row, metrics, strict=True):
                mine = [d for d in found if d["metric"] == metric and d["load"] == load]
                _forest(axes, here, mine, metric, archs, places)
                axes.set_title(title, fontweight="bold", loc="left", fontsize=11)
            kind = "requests at once" if here[0]["load_kind"] == "concurrency" else "requests/s"
            ticks = [place * (len(rivals) + 1) + len(rivals) / 2 for place in range(len(places))]
            axes_row[0].set_yticks(ticks, [_name(place, here, places) for place in places], fontsize=10)
            axes_row[0].set_ylabel(f"{load_text(load)} {kind}", fontweight="bold")
            axes_row[0].set_ylim(rows - 0.5, -0.5)
        legend(figure, [arch_curve(arch) for arch in archs])
    return figure


def _metrics(points: pd.DataFrame) -> list[tuple[str, str]]:
    tails = [c for c in points.columns if c.startswith("p") and c.endswith("_e2el_ms")]
    shown = [("output_throughput", "Output tok/s"), ("mean_e2el_ms", "Mean latency (ms)")]
    shown += [(name, f"{name.split('_')[0].upper()} latency (ms)") for name in tails[-1:]]
    return shown + ([(COST, "USD per million output tokens")] if COST in points.columns else [])


def _forest(
    axes: Axes,
    entries: list[Entry],
    found: list[dict[str, Any]],
    metric: str,
    archs: Sequence[str],
    places: Sequence[PairOnCard],
) -> None:
    """One metric at one load: each architecture's figure at the left of its line, the difference as a mark in it."""
    from matplotlib.ticker import LogLocator

    ends = [end for d in found for end in _ends(d["relative"]) if math.isfinite(end)]
    far = max(map(abs, ends), default=0.0) > FAR
    axes.axvline(1.0 if far else 0.0, color="0.25", linewidth=1.4, zorder=1)
    for number, place in enumerate(places):
        if number:
            axes.axhline(number * len(archs) - 0.5, color="0.8", linewidth=1, zorder=0)
        for at, arch in enumerate(archs):
            entry = next((e for e in entries if (e["pair"], e["gpu"], e["arch"]) == (*place, arch)), None)
            if entry is None or math.isnan(entry[metric].mean):
                continue
            y = number * len(archs) + at
            axes.text(
                NAME_AT, y, f"{_short(entry[metric].mean)} {_drafts(entry)}".strip(), va="center", fontsize=9,
                color="0.25", transform=axes.get_yaxis_transform(),
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.8}, zorder=4,
            )  # fmt: skip
            mine = next((d for d in found if (d["pair"], d["gpu"], d["arch"]) == (*place, arch)), None)
            if arch == archs[0]:
                _mark(axes, Interval(0.0, math.nan, 0), True, y, arch, far)
            elif mine is not None and math.isfinite(mine["relative"].mean):
                off, one = mine["error"], 1.0 if far else 0.0
                axes.fill_betweenx([y - 0.5, y + 0.5], one - off, one + off, color="0.92", linewidth=0, zorder=0)
                _mark(axes, mine["relative"], mine["told_apart"], y, arch, far)
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
        axes.set_xlabel(f"difference from {archs[0]}, {'lower' if _less(metric) else 'higher'} is better")
    axes.minorticks_off()
    axes.grid(False, axis="y")


def _mark(axes: Axes, difference: Interval, sure: bool, y: float, arch: str, far: bool) -> None:
    """A difference with its interval: filled where it counts, hollow where not."""
    shift = 1.0 if far else 0.0
    low, high = (end + shift for end in _ends(difference))
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


def _seat(difference: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(difference[key] for key in ("pair", "gpu", "load", "arch", "metric"))


def _ends(difference: Interval) -> tuple[float, float]:
    half = 0.0 if math.isnan(difference.half_width) else difference.half_width
    return difference.mean - half, difference.mean + half


def _percent(relative: float) -> str:
    return f"{1 + relative:.3g}×" if relative > 3 else f"{100 * relative:+.1f}%".replace("-", "−")


def _less(metric: str) -> bool:
    return lower_is_better(metric) or metric == COST


def _drafts(entry: Entry) -> str:
    """Of an entry's settings the draft length, or who chooses it; nothing where none is drafted."""
    first = str(entry.get("settings", "")).partition(",")[0]
    return first.removesuffix(" controller") if first.startswith("k=") or first.endswith(" controller") else ""


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _name(place: PairOnCard, entries: list[Entry], places: list[PairOnCard]) -> str:
    """A pair, its card where there are several, and what it accepted."""
    draft, _, target = place[0].partition(":")
    mine = [e for e in entries if (e["pair"], e["gpu"]) == place and "spec_decode_acceptance_rate" in e]
    rates = [e["spec_decode_acceptance_rate"].mean for e in mine]
    accepted = [rate for rate in rates if not math.isnan(rate)]  # nothing is drafted where it is nan
    lines = [f"{draft} to", target]
    if len({gpu for _, gpu in places}) > 1:
        lines.append(place[1])
    if accepted:
        lines.append(f"accepted {sum(accepted) / len(accepted):.0f}% of drafted")
    return "\n".join(lines)


def _footnote(entries: list[Entry], setting: str, first: str, judged: bool) -> str:
    rests_on = dict.fromkeys(f"{e['gpu']}, {founded(e)}" for e in entries)
    replications = [int(e["replications"]) for e in entries]
    note = f"{setting} Simulated. {'. '.join(rests_on)}. {counted(replications)}"
    note += " At the left of each line its own figure"
    if any(entry.get("settings") for entry in entries):
        note += " and draft length; all its settings are in compare.json"
    note += f". Marks: difference from {first}, paired by seed"
    if max(replications) == 1:
        return note + "."
    if judged:
        return note + ", lines its 95% interval. Hollow: not told apart. Grey: the profile's own error."
    return note + ", lines its 95% interval. Hollow: the interval includes 0."
