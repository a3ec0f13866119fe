"""The one figure factory: no window, no global state, one style, a caption under it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
CAPTION_INCHES = 0.2  # a line
TITLE_INCHES = 0.4
CHARACTERS_PER_INCH = 12.5


# seaborn's "whitegrid" and "notebook", as they differ from matplotlib's own: every sweep draws a picture, and seaborn
# takes longer to import than the picture takes to draw
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
    """The style of all figures, while one is drawn."""
    import matplotlib as mpl

    with mpl.rc_context(WHITEGRID | {"axes.grid": grid}):  # type: ignore[arg-type]
        yield


def new_figure(width_inches: float, height_inches: float, caption: str, title: str = "") -> Figure:
    """An empty figure; safe in threads and notebooks alike, as no window knows of it."""
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
