"""Differences of architectures from one of them, paired by seed.

The intervals are those of the paired differences. They are much narrower than those of two means, which would hide
significant differences.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pdvsim.view.charts import Bar, Chart, Entry
from pdvsim.view.comparison import founded
from pdvsim.view.figure import chart_figure
from pdvsim.view.style import arch_colour, better, counted, metric_label, number_text
from pdvsim.view.table import load_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROW_INCHES = 0.34  # one architecture at one place
FAR = 1.0  # from this difference on the axis shows ratios on a log scale


def forest_figure(entries: Sequence[Entry], differences: Sequence[Mapping[str, Any]], setting: str) -> Figure:
    """One row of panels per load, one column per metric, one line per place and architecture: the paired difference.

    `entries` are the metrics of each; `differences` have the paired differences, their significance and the profile's
    error. `setting` starts the caption.
    """
    against = str(differences[0]["against"])
    loads = list(dict.fromkeys(e["load"] for e in entries))
    metrics = list(dict.fromkeys(d["metric"] for d in differences))
    rests_on = dict.fromkeys(f"{e['gpu']}, {founded(e)}" for e in entries)
    note = (
        f"{setting} Simulated. {'. '.join(rests_on)}. {counted([int(e['replications']) for e in entries])} "
        f"Each line: value and draft length. Bars: difference from {against}, paired by seed, with its interval. "
        "Hatched: not significant. Grey: the profile's error."
    )
    rows = [
        [
            _chart(metric, load, [e for e in entries if e["load"] == load],
                   [d for d in differences if d["metric"] == metric and d["load"] == load], against)
            for metric in metrics
        ]
        for load in loads
    ]  # fmt: skip
    most = max(len(chart.rows) for row in rows for chart in row)
    return chart_figure(rows, note, inches=(5.6, ROW_INCHES * most + 1.0))


def _chart(
    metric: str, load: float, entries: Sequence[Entry], differences: Sequence[Mapping[str, Any]], against: str
) -> Chart:
    """One metric at one load."""
    ends = [end for d in differences for end in d["relative"].ends if math.isfinite(end)]
    far = max(map(abs, ends), default=0.0) > FAR
    one, scale = (1.0, 1.0) if far else (0.0, 100.0)
    rows, bars, place = [], [], None
    for e in sorted(entries, key=lambda e: [other["place"] for other in entries].index(e["place"])):
        if math.isnan(e[metric].mean):
            continue
        if e["place"] != place:
            place = e["place"]
            rows.append(f"{place}{_accepted(place, entries)}")
        rows.append(" ".join(filter(None, [e["arch"], number_text(e[metric].mean), _drafts(e)])))
        mine = next((d for d in differences if (d["place"], d["arch"]) == (place, e["arch"])), None)
        if mine is not None and math.isfinite(mine["relative"].mean):
            off, error, at = scale * mine["relative"].mean, scale * mine["error"], len(rows) - 1
            bars.append(Bar(at, one - error, one + error, "#e4e4e4"))
            text = f"{1 + mine['relative'].mean:.3g}×" if far else f"{off:+.1f}%".replace("-", "−")
            hollow = not mine["significant"]
            bars.append(Bar(at, one, one + off, arch_colour(e["arch"]), text, hollow, scale * mine["relative"].half))
    aim = "lower" if better(metric) < 0 else "higher"
    axis = f"times {against}" if far else f"difference from {against} (%), {aim} is better"
    kind = "concurrent requests" if entries[0]["load_kind"] == "concurrency" else "requests/s"
    title = f"{metric_label(metric)}\nat {load_text(load)} {kind}"
    return Chart(title, "", axis, rows=rows, bars=bars, log_x=far, labelled=True)


def _drafts(entry: Entry) -> str:
    """The draft length of an entry, or its controller; empty without drafts."""
    first = str(entry.get("settings", "")).partition(",")[0]
    return first.removesuffix(" controller") if first.startswith("k=") or first.endswith(" controller") else ""


def _accepted(place: str, entries: Sequence[Entry]) -> str:
    """The acceptance at a place; empty without drafts."""
    rates = [e["spec_decode_acceptance_rate"].mean for e in entries
             if e["place"] == place and "spec_decode_acceptance_rate" in e]  # fmt: skip
    accepted = [rate for rate in rates if not math.isnan(rate)]
    return f": accepted {sum(accepted) / len(accepted):.0f}% of drafted" if accepted else ""
