"""Creates all figures: no window, no global state, one style, with a caption."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
CAPTION_INCHES = 0.2  # a line
TITLE_INCHES = 0.4
CHARACTERS_PER_INCH = 12.5
LABEL_POINTS = (8, 11, 15, 20, 28, 38, 50, 64)  # distances of a label from its point, nearest first
NEAR_POINTS = 15  # labels further away get a line
MARKER_POINTS = 7  # distance that labels keep from the centre of a marker


# seaborn's "whitegrid" and "notebook" styles relative to matplotlib's: every sweep makes a plot, and importing seaborn
# takes longer than plotting
WHITEGRID: dict[str, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": ".8", "axes.grid": True, "axes.labelcolor": ".15", "axes.labelsize": 12,
    "axes.linewidth": 1.25, "axes.titlesize": 12, "font.size": 12, "grid.color": ".8", "grid.linewidth": 1,
    "font.sans-serif": ["Arial", "DejaVu Sans", "Liberation Sans", "Bitstream Vera Sans", "sans-serif"],
    "legend.fontsize": 11, "legend.title_fontsize": 12, "lines.solid_capstyle": "round", "patch.edgecolor": "w",
    "patch.force_edgecolor": True, "text.color": ".15", "xtick.bottom": False, "xtick.color": ".15",
    "xtick.labelsize": 11, "xtick.major.size": 6, "xtick.major.width": 1.25, "xtick.minor.size": 4,
    "xtick.minor.width": 1, "ytick.color": ".15", "ytick.labelsize": 11, "ytick.left": False, "ytick.major.size": 6,
    "ytick.major.width": 1.25, "ytick.minor.size": 4, "ytick.minor.width": 1,
}  # fmt: skip


@contextmanager
def styled(grid: bool = True) -> Iterator[None]:
    """Context of the common style."""
    import matplotlib as mpl

    with mpl.rc_context(WHITEGRID | {"axes.grid": grid}):  # type: ignore[arg-type]
        yield


def new_figure(width_inches: float, height_inches: float, caption: str, title: str = "") -> Figure:
    """An empty figure without a window, so it is safe in threads and notebooks."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = textwrap.wrap(caption, int(width_inches * CHARACTERS_PER_INCH))
    height_inches += CAPTION_INCHES * len(lines) + TITLE_INCHES * bool(title)
    figure = Figure(figsize=(width_inches, height_inches), layout="constrained")
    engine = figure.get_layout_engine()
    assert engine is not None
    engine.set(w_pad=0.12, h_pad=0.1)  # type: ignore[call-arg]
    FigureCanvasAgg(figure)
    figure.supxlabel("\n".join(lines), fontsize=10, color="0.35", x=0.01, ha="left")
    if title:
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def titled(axes: Axes, title: str, x: str | None = None, y: str | None = None, **style: Any) -> None:
    """Give a panel its title, in bold at the left, and the names of its axes where they are given."""
    axes.set_title(title, loc="left", fontweight="bold", **style)
    if x is not None:
        axes.set_xlabel(x)
    if y is not None:
        axes.set_ylabel(y)


def legend_above(figure: Figure, axes: Axes, columns: int | None = None, **style: Any) -> None:
    """A legend of one panel's labels above all panels."""
    handles, labels = axes.get_legend_handles_labels()
    across = columns or len(labels)
    figure.legend(handles, labels, loc="outside upper center", ncols=across, frameon=False, **style)


def label_points(axes: Axes, labels: Sequence[tuple[float, float, str, str]], spans: Sequence[Sequence[float]]) -> None:
    """Write a coloured text next to each point (x, y), where it hides no marker, no span and no other text.

    Each text is as near as possible; if no place is free, it is placed where it hides least. `spans` are horizontal and
    vertical lines, as x, y, x, y. The figure must be complete, as its layout decides where there is room.
    """
    import numpy as np
    from matplotlib.text import Text

    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    pixels = figure.dpi / 72
    points = axes.transData.transform([label[:2] for label in labels])
    ends = axes.transData.transform(np.reshape([*spans], (-1, 2))).reshape(-1, 4)
    lines = np.stack([*np.minimum(ends[:, :2], ends[:, 2:]).T - 1, *np.maximum(ends[:, :2], ends[:, 2:]).T + 1], axis=1)
    taken = np.concatenate([np.hstack([points - MARKER_POINTS * pixels, points + MARKER_POINTS * pixels]), lines])
    frame = axes.get_window_extent()
    ways = ((1, 1), (1, -1), (-1, 1), (-1, -1), (1, 0), (0, 1), (0, -1), (-1, 0))
    for (x, y, text, colour), point in zip(labels, points, strict=True):
        note = axes.annotate(
            text, (x, y), xytext=(0, 0), textcoords="offset points", size=9, color=colour, ha="center", va="center",
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.7, "shrinkB": 5},
        )  # fmt: skip
        note.set_in_layout(False)
        box = Text.get_window_extent(note)
        half = np.array([box.width, box.height]) / 2 + pixels
        best, least, place, chosen = (0.0, 0.0), math.inf, taken[0], 0
        for far, way in product(LABEL_POINTS, ways):
            middle = point + np.array(way) * (far * pixels + half)
            here = np.concatenate([middle - half, middle + half])
            if not (frame.x0 < here[0] and here[2] < frame.x1 and frame.y0 < here[1] and here[3] < frame.y1):
                continue
            shared = np.minimum(taken[:, 2:], here[2:]) - np.maximum(taken[:, :2], here[:2])
            hidden = float(np.prod(shared.clip(0), axis=1).sum())
            if hidden < least:
                best, least, place, chosen = tuple((middle - point) / pixels), hidden, here, far
            if not hidden:
                break
        note.set_position(best)
        if note.arrow_patch is not None:
            note.arrow_patch.set_visible(chosen > NEAR_POINTS)
        taken = np.vstack([taken, place])
