"""Differences of architectures from one of them, paired by seed: a heatmap by load and setting, and a forest of bars.

Their intervals are those of the paired differences. They are much narrower than those of two means, which would hide
significant differences. A cell is the mean of the relative differences. If their 95% interval includes 0, or with one
replication, the cell is grey and hatched: not significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pdvsim.bench.results import Results, label
from pdvsim.bench.stats import Interval, over_replications, paired_differences
from pdvsim.view.charts import Bar, Chart, Entry, Tile
from pdvsim.view.comparison import founded
from pdvsim.view.figure import chart_figure
from pdvsim.view.setting import points_line
from pdvsim.view.style import (
    AXIS_NAMES,
    arch_colour,
    better,
    counted,
    grew,
    metric_label,
    name_of,
    number_text,
    paler,
    rests_on,
)
from pdvsim.view.table import load_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FAINT = 0.01  # colours are logarithmic above this difference
SCALES = (0.1, 0.3, 1.0, 3.0, 10.0)  # differences with the strongest colour
GAIN, LOSS, UNSURE = "#2369bd", "#a9373b", "#e5e5e5"
MANY_FOLD = 10.0  # from this ratio on cells show factors, not percent
ROW_INCHES = 0.34  # one architecture at one place
FAR = 1.0  # from this difference on the axis shows ratios on a log scale


class Gain(NamedTuple):
    """One architecture compared with the reference, at one load and setting."""

    setting: str
    arch: str
    load: float
    relative: Interval
    grew: bool  # the queue of either kept growing

    @property
    def significant(self) -> bool:
        """Whether the paired interval excludes 0; never with one replication."""
        return abs(self.relative.mean) > self.relative.half_width

    @property
    def text(self) -> str:
        ratio = self.relative.mean + 1
        percent = f"{100 * self.relative.mean:+.1f}%".replace("-", "−").replace("−0.0", "0.0").replace("+0.0", "0.0")
        return (f"{ratio:,.0f}×" if ratio >= MANY_FOLD else percent) + ("†" if self.grew else "")


def gains_of(results: Results, metric: str, against: str) -> list[Gain]:
    """Every architecture except `against`, at every load and setting that both have."""
    check(results, metric, against)
    gains: list[Gain] = []
    for setting, points in results.settings():
        grown = {(e["arch"], load_text(e["load"])) for e in over_replications(points) if grew(e["stability"])}
        for d in paired_differences(points, metric, against):
            if math.isfinite(d["relative"].mean):
                unsteady = any((arch, load_text(d["load"])) in grown for arch in (d["arch"], against))
                gains.append(Gain(label(setting), d["arch"], d["load"], d["relative"], unsteady))
    return gains


def check(results: Results, metric: str, against: str) -> None:
    """Reject a reference or metric that the results do not have."""
    if against not in results.archs:
        raise ValueError(f"--against {against}: not in the results, which have {', '.join(results.archs)}")
    if metric not in results.points:
        raise ValueError(f"--metric {metric}: no such column in the results")


def improvement_figure(results: Results, metric: str, against: str) -> Figure | None:
    """Rows are settings, one panel per architecture; with one setting, one panel whose rows are the architectures.

    The results have one kind of load, the x axis.
    """
    gains = gains_of(results, metric, against)
    if not gains:
        return None
    settings, archs = (list(dict.fromkeys(names)) for names in zip(*((g.setting, g.arch) for g in gains), strict=True))
    loads = [*sorted({load_text(g.load): g.load for g in gains}.items(), key=lambda v: (math.isnan(v[1]), v[1]))]
    columns, one = [name for name, _ in loads], len(settings) == 1
    rows, panels = (archs, [""]) if one else (settings, archs)
    largest = max((abs(gain.relative.mean) for gain in gains if gain.significant), default=0.0)
    limit = next((end for end in SCALES if largest <= end), SCALES[-1])
    sign, kind = better(metric) or 1, str(results.points["load_kind"].iloc[0])
    charts = []
    for arch in panels:
        cells = [
            Tile(rows.index(gain.arch if one else gain.setting), columns.index(load_text(gain.load)),
                 colour_of(sign * gain.relative.mean, limit) if gain.significant else UNSURE,
                 gain.text, not gain.significant) for gain in gains if one or gain.arch == arch
        ]  # fmt: skip
        axis = AXIS_NAMES[kind] if arch == panels[-1] else ""
        charts.append([Chart(arch, "", axis, rows=rows, columns=columns, cells=cells)])
    title = f"{name_of(metric)[0]}: difference from {against}" + (f", {settings[0]}" if one and settings[0] else "")
    inches = 2.6 + 0.095 * max(map(len, rows)) + 1.05 * len(loads), 0.5 * len(rows) + 0.9
    return chart_figure(charts, _caption(results, gains, metric, against), title, inches=inches)


def colour_of(gain: float, largest: float) -> str:
    """Blue for more, red for less, stronger by the logarithm of the difference."""
    strength = min(1.0, math.log1p(abs(gain) / FAINT) / math.log1p(largest / FAINT))
    return paler(GAIN if gain > 0 else LOSS, 1.0 - strength)


def _caption(results: Results, gains: Sequence[Gain], metric: str, against: str) -> str:
    what = "lower" if better(metric) < 0 else "higher"
    note = f"Paired by seed, relative to {against}; blue is better ({what}). {counted([g.relative.n for g in gains])}"
    if any(not gain.significant for gain in gains):
        single = all(gain.relative.n < 2 for gain in gains)
        why = "one replication gives no significance" if single else "the 95% paired interval includes 0"
        note += f" Grey, hatched: {why}."
    if any(gain.grew for gain in gains):
        note += " † the queue of one of the two kept growing."
    return f"{points_line(results.points, results.configs)} {note} {rests_on(results.points)}"


# a forest ------------------------------------------------------------------------------------------------------------


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
            _forest(metric, load, [e for e in entries if e["load"] == load],
                   [d for d in differences if d["metric"] == metric and d["load"] == load], against)
            for metric in metrics
        ]
        for load in loads
    ]  # fmt: skip
    most = max(len(chart.rows) for row in rows for chart in row)
    return chart_figure(rows, note, inches=(5.6, ROW_INCHES * most + 1.0))


def _forest(
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
