"""Heatmap of differences between architectures and a reference, by load and setting.

A cell is the mean of the relative differences, paired by seed. If their 95% interval includes 0, or with one
replication, the cell is grey and hatched: not significant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.bench.results import Results, label
from pdvsim.bench.stats import Interval, over_replications, paired_differences
from pdvsim.view.figure import new_figure, styled, titled
from pdvsim.view.setting import points_line
from pdvsim.view.style import AXIS_NAMES, counted, grew, lower_is_better, name_of, rests_on
from pdvsim.view.table import load_name, load_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FAINT = 0.01  # colours are logarithmic above this difference
TICKS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # the last one is the end of the colour scale
MANY_FOLD = 10.0  # from this ratio on cells show factors, not percent


@dataclass(frozen=True)
class Gain:
    """One architecture compared with the reference, at one load and setting."""

    setting: str
    arch: str
    load_kind: str
    load: float
    relative: Interval
    grew: bool  # the queue of either kept growing

    @property
    def significant(self) -> bool:
        """Whether the paired interval excludes 0; never with one replication."""
        return self.relative.n > 1 and abs(self.relative.mean) > self.relative.half_width

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
        labels = {(e["arch"], e["load_kind"], load_text(e["load"])): e["stability"] for e in over_replications(points)}
        for d in paired_differences(points, metric, against):
            if math.isfinite(d["relative"].mean):
                load = (d["load_kind"], load_text(d["load"]))
                unsteady = any(grew(labels.get((arch, *load))) for arch in (d["arch"], against))
                gains.append(Gain(label(setting), d["arch"], d["load_kind"], d["load"], d["relative"], unsteady))
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
    one, flip, limit = len(settings) == 1, lower_is_better(metric), _limit(gains)
    rows, panels = (archs, [""]) if one else (settings, archs)
    title = f"{name_of(metric)[0]}: difference from {against}" + (f", {settings[0]}" if one and settings[0] else "")
    size = max(2.6 + 0.095 * max(map(len, rows)) + 1.05 * len(loads), 7.5), 1.5 + len(panels) * (0.5 * len(rows) + 0.9)
    with styled():
        figure = new_figure(*size, _caption(results, gains, metric, against), title)
        grid = figure.subplots(len(panels), 1, squeeze=False, sharex=True)[:, 0]
        for axes, arch in zip(grid, panels, strict=True):
            _panel(axes, [g for g in gains if g.arch == arch or one], rows, loads, one, flip, limit)
            if not one:
                titled(axes, arch, fontsize=12)
        grid[-1].set_xlabel(AXIS_NAMES.get(gains[0].load_kind, load_name(gains[0].load_kind)))
        _bar(figure, list(grid), flip, limit)
    return figure


def _panel(
    axes: Axes, gains: list[Gain], rows: list[str], loads: list[float], by_arch: bool, flip: bool, limit: float
) -> None:
    import seaborn as sns
    from matplotlib.colors import SymLogNorm
    from matplotlib.patches import Rectangle

    values = np.full((len(rows), len(loads)), np.nan)
    texts = np.full(values.shape, "", object)
    places = list(map(load_text, loads))
    for g in gains:
        row, column = rows.index(g.arch if by_arch else g.setting), places.index(load_text(g.load))
        values[row, column], texts[row, column] = g.relative.mean if g.significant else 0.0, g.text
        if not g.significant:
            style: dict[str, Any] = {"facecolor": "0.9", "edgecolor": "white", "hatch": "//", "linewidth": 1.5}
            axes.add_patch(Rectangle((column, row), 1, 1, zorder=1.5, **style))
    sns.heatmap(
        values, ax=axes, annot=texts, fmt="", cmap="vlag" if flip else "vlag_r",
        norm=SymLogNorm(FAINT, 0.5, -limit, limit), cbar=False, linewidths=1.5, linecolor="white",
        annot_kws={"fontsize": 11}, xticklabels=places, yticklabels=rows, mask=np.isnan(values),
    )  # fmt: skip
    axes.grid(False)  # it would show in empty cells
    for text in axes.texts:
        text.set_zorder(3)
    axes.tick_params(rotation=0)


def _limit(gains: list[Gain]) -> float:
    """End of the colour scale: the largest cell, up to a limit."""
    largest = max((abs(cell.relative.mean) for cell in gains if cell.significant), default=0.0)
    return next((tick for tick in TICKS[2:] if tick >= largest), TICKS[-1])


def _bar(figure: Figure, axes: list[Axes], flip: bool, limit: float) -> None:
    mesh: Any = next(c for c in axes[0].collections if c.get_array() is not None)
    bar = figure.colorbar(mesh, ax=axes, extend="both" if limit == TICKS[-1] else "neither", shrink=0.9, pad=0.02)
    ticks = [tick for tick in TICKS if tick <= limit]
    below = [tick for tick in ticks if tick < 1]  # a decrease is at most 100%
    labels = [f"−{tick:.0%}" for tick in reversed(below)] + ["0"] + [f"+{tick:.0%}" for tick in ticks]
    bar.set_ticks([*(-tick for tick in reversed(below)), 0, *ticks], labels=labels)
    bar.ax.minorticks_off()
    bar.set_label("worse   ←   →   better" if not flip else "better   ←   →   worse", fontsize=10)
    bar.outline.set_visible(False)


def _caption(results: Results, gains: list[Gain], metric: str, against: str) -> str:
    what = "lower" if lower_is_better(metric) else "higher"
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
