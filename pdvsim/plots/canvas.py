"""A figure without a window and without global state, in the house's dress, with a caption under it."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 150
CAPTION_INCHES = 0.2  # a line
TITLE_INCHES = 0.4
CHARACTERS_PER_INCH = 12.5


@contextmanager
def dress() -> Iterator[None]:
    """Seaborn's style while a figure is drawn."""
    import seaborn as sns

    with sns.axes_style("whitegrid"), sns.plotting_context("notebook"):
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
