"""A comparison over pairs and cards as one figure."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pdvsim.study.compare import COST, summary
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.plots.curves import Entry
from pdvsim.view.style import arch_colour, counted
from pdvsim.view.table import founded, load_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


PairOnCard = tuple[str, str]  # a pair and a card


def comparison_figure(points: pd.DataFrame) -> Figure:
    """A row of panels a metric, a column a load; groups of bars are pairs (on cards), bars architectures."""
    entries = summary(points)
    archs = list(dict.fromkeys(e["arch"] for e in entries))
    loads = list(dict.fromkeys(e["load"] for e in entries))
    places = list(dict.fromkeys((e["pair"], e["gpu"]) for e in entries))
    metrics = _metrics(points)
    with styled():
        width = max(6.0, 2.3 * len(places) + 1.5) * len(loads)
        figure = new_figure(min(width, 40), 3.3 * len(metrics) + 1, _footnote(entries))
        grid = figure.subplots(len(metrics), len(loads), squeeze=False, sharey="row", sharex=True)
        for column, load in enumerate(loads):
            here = [e for e in entries if e["load"] == load]
            for row, (metric, title) in enumerate(metrics):
                for arch in archs:
                    _bars(grid[row][column], [e for e in here if e["arch"] == arch], metric, archs, places)
                grid[row][column].grid(False, axis="x")
                grid[row][0].set_ylabel(title)
            kind = "requests at once" if here[0]["load_kind"] == "concurrency" else "requests/s"
            grid[0][column].set_title(f"{load_text(load)} {kind}", fontweight="bold", loc="left")
            grid[-1][column].set_xticks(range(len(places)), [_name(place, entries, places) for place in places])
        handles, labels = grid[0][0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper center", ncols=len(archs), frameon=False)
    return figure


def _metrics(points: pd.DataFrame) -> list[tuple[str, str]]:
    tails = [c for c in points.columns if c.startswith("p") and c.endswith("_e2el_ms")]
    shown = [(name, f"{name.split('_')[0].upper()} latency (ms)") for name in tails[-1:]]
    shown += [("mean_e2el_ms", "Mean latency (ms)"), ("output_throughput", "Output tok/s")]
    return shown + ([(COST, "USD per million\noutput tokens")] if COST in points.columns else [])


def _bars(
    axes: Axes,
    entries: list[dict[str, Any]],
    metric: str,
    archs: list[str],
    places: list[tuple[str, str]],
) -> None:
    """One architecture's bars; the whiskers are confidence intervals over replications."""
    if not entries:
        return
    arch = entries[0]["arch"]
    width = 0.84 / len(archs)
    shift = (archs.index(arch) - (len(archs) - 1) / 2) * width
    at = [places.index((e["pair"], e["gpu"])) + shift for e in entries]
    means = [e[metric].mean for e in entries]
    half = [0.0 if math.isnan(e[metric].half_width) else e[metric].half_width for e in entries]
    below = [min(h, mean) for h, mean in zip(half, means, strict=True)]  # nothing here can be less than 0
    bars = axes.bar(
        at, means, 0.92 * width, color=arch_colour(arch), label=arch,
        yerr=[below, half] if any(half) else None, capsize=3, ecolor="0.2",
    )  # fmt: skip
    labels = [f"{_short(mean)}\n{_drafts(entry)}".strip() for mean, entry in zip(means, entries, strict=True)]
    axes.bar_label(bars, labels, padding=2, fontsize=9, color="0.25")
    axes.margins(y=0.2)


def _drafts(entry: Entry) -> str:
    """Of an entry's settings the draft length, or who chooses it; nothing where none is drafted."""
    first = str(entry.get("settings", "")).partition(",")[0]
    return first.removesuffix(" controller") if first.startswith("k=") or first.endswith(" controller") else ""


def _short(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


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


def _footnote(entries: list[Entry]) -> str:
    rests_on = dict.fromkeys(f"{e['gpu']}, {founded(e)}" for e in entries)
    replications = [int(e["replications"]) for e in entries]
    note = f"Simulated. {'. '.join(rests_on)}. {counted(replications)}"
    if any(entry.get("settings") for entry in entries):
        note += (
            " On each bar its draft length: every architecture at its own best settings, all of them in compare.json."
        )
    if max(replications) > 1:
        note += " Whiskers: 95% confidence over replications."
    return note
