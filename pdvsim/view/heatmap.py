"""Heatmap of differences between architectures and a reference, by load and setting.

A cell is the mean of the relative differences, paired by seed. If their 95% interval includes 0, or with one
replication, the cell is grey and hatched: not significant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdvsim.bench.results import Results, label
from pdvsim.bench.stats import Interval, over_replications, paired_differences
from pdvsim.view.figure import new_figure, styled, titled
from pdvsim.view.setting import points_line
from pdvsim.view.style import AXIS_NAMES, better, counted, grew, name_of, rests_on
from pdvsim.view.table import load_name, load_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAINT = 0.01  # colours are logarithmic above this difference
TICKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # the last one is the end of the colour scale
MANY_FOLD = 10.0  # from this ratio on cells show factors, not percent


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


def cells(results: Results, metric: str, against: str) -> list[Gain]:
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


def improvement_figure(results: Results, metric: str, against: str) -> Figure | None:
    """Rows are settings, one panel per architecture; with one setting, one panel whose rows are the architectures.

    The results have one kind of load, the x axis.
    """
    gains = cells(results, metric, against)
    if not gains:
        return None
    settings, archs = (list(dict.fromkeys(names)) for names in zip(*((g.setting, g.arch) for g in gains), strict=True))
    loads = sorted({load_text(g.load): g.load for g in gains}.values(), key=lambda v: (math.isnan(v), v))
    one, flip, kind = len(settings) == 1, better(metric) < 0, str(results.points["load_kind"].iloc[0])
    largest = max((abs(cell.relative.mean) for cell in gains if cell.significant), default=0.0)
    ticks = [tick for at, tick in enumerate(TICKS) if at < 3 or TICKS[at - 1] < largest]  # of the scale of colours
    rows, panels = (archs, [""]) if one else (settings, archs)
    title = f"{name_of(metric)[0]}: difference from {against}" + (f", {settings[0]}" if one and settings[0] else "")
    size = max(2.6 + 0.095 * max(map(len, rows)) + 1.05 * len(loads), 7.5), 1.5 + len(panels) * (0.5 * len(rows) + 0.9)
    with styled(grid=False):
        figure = new_figure(*size, _caption(results, gains, metric, against), title)
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, arch in zip(grid, panels, strict=True):
            inside = {(g.arch if one else g.setting, load_text(g.load)): g for g in gains if g.arch == arch or one}
            _panel(axes, inside, rows, list(map(load_text, loads)), flip, ticks[-1])
            titled(axes, arch, fontsize=12)
        grid[-1].set_xlabel(AXIS_NAMES.get(kind, load_name(kind)))
        _bar(figure, list(grid), flip, ticks)
    return figure


def _panel(
    axes: Axes, gains: Mapping[tuple[str, str], Gain], rows: list[str], loads: list[str], flip: bool, limit: float
) -> None:
    import seaborn as sns
    from matplotlib.colors import SymLogNorm
    from matplotlib.patches import Rectangle

    values = np.full((len(rows), len(loads)), np.nan)
    texts = np.full(values.shape, "", object)
    for (row, load), gain in gains.items():
        y, x = rows.index(row), loads.index(load)
        values[y, x], texts[y, x] = gain.relative.mean if gain.significant else 0.0, gain.text
        if not gain.significant:
            style: dict[str, Any] = {"facecolor": "0.9", "edgecolor": "white", "hatch": "//", "linewidth": 1.5}
            axes.add_patch(Rectangle((x, y), 1, 1, zorder=1.5, **style))
    sns.heatmap(
        values, ax=axes, annot=texts, fmt="", cmap="vlag" if flip else "vlag_r",
        norm=SymLogNorm(FAINT, 0.5, -limit, limit), cbar=False, linewidths=1.5, linecolor="white",
        annot_kws={"fontsize": 11}, xticklabels=loads, yticklabels=rows, mask=np.isnan(values),
    )  # fmt: skip
    for text in axes.texts:
        text.set_zorder(3)
    axes.tick_params(rotation=0)


def _bar(figure: Figure, axes: list[Axes], flip: bool, ticks: list[float]) -> None:
    """The scale of colours; a decrease is at most 100%."""
    mesh: Any = next(c for c in axes[0].collections if c.get_array() is not None)
    extend = "both" if ticks[-1] == TICKS[-1] else "neither"
    bar = figure.colorbar(mesh, ax=axes, extend=extend, shrink=0.9, pad=0.02)
    every = [*(-tick for tick in reversed(ticks) if tick < 1), 0, *ticks]
    bar.set_ticks(every, labels=[f"{tick:+.0%}".replace("-", "−") if tick else "0" for tick in every])
    bar.ax.minorticks_off()
    bar.set_label("worse   ←   →   better" if not flip else "better   ←   →   worse", fontsize=10)
    bar.outline.set_visible(False)


def _caption(results: Results, gains: list[Gain], metric: str, against: str) -> str:
    what = "lower" if better(metric) < 0 else "higher"
    note = f"Paired by seed, relative to {against}; blue is better ({what}). {counted([c.relative.n for c in gains])}"
    if any(not cell.significant for cell in gains):
        single = all(cell.relative.n < 2 for cell in gains)
        why = "one replication gives no significance" if single else "the 95% paired interval includes 0"
        note += f" Grey, hatched: {why}."
    if any(cell.grew for cell in gains):
        note += " † the queue of one of the two kept growing."
    return f"{points_line(results.points, results.configs)} {note} {rests_on(results.points)}"


def check(results: Results, metric: str, against: str) -> None:
    """Reject a reference or metric that the results do not have."""
    if against not in results.archs:
        raise ValueError(f"--against {against}: not in the results, which have {', '.join(results.archs)}")
    if metric not in results.points:
        raise ValueError(f"--metric {metric}: no such column in the results")
