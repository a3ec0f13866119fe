"""Plots of results as PNG or SVG, for `pdvsim plot` and `pdvsim sweep`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from pdvsim.bench.output import picture
from pdvsim.bench.results import Results, label
from pdvsim.view.figure import DPI
from pdvsim.view.plots.heatmap import improvement_figure
from pdvsim.view.plots.pictures import (
    acceptance_figure,
    latency_figure,
    sweep_figure,
    throughput_figure,
    utilisation_figure,
)
from pdvsim.view.setting import Settings, points_line

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

STANDING = {
    "throughput": throughput_figure,
    "latency": latency_figure,
    "utilisation": utilisation_figure,
    "acceptance": acceptance_figure,
}


def sweep_png(points: pd.DataFrame, base: Settings) -> bytes:
    """The six main panels of a sweep, as the content of a PNG file; `base` is its base experiment."""
    return picture(sweep_figure(points, points_line(points, [base])), "sweep.png", DPI)


def standing(results: Results, metric: str | None, against: str) -> Iterator[tuple[str, Figure]]:
    """The standard plots of results, by name: one of each per setting, one heatmap per kind of load.

    The heatmap shows `metric`; default: the metric that compares architectures under that kind of load.
    """
    settings = results.settings()
    for setting, points in settings:
        words = label(setting)
        suffix = f"-{slug(words)}" if len(settings) > 1 else ""
        for name, plot in STANDING.items():
            figure = plot(points, words, points_line(points, replace(results, points=points).configs))
            if figure is not None:
                yield name + suffix, figure
    kinds = results.by_load_kind()
    for kind, mine in kinds.items():
        compared_by = metric or mine.headline
        figure = improvement_figure(mine, compared_by, against) if against in mine.archs else None
        if figure is not None:
            suffix = f"-by-{kind}" if len(kinds) > 1 else ""
            yield slug(f"improvement-{compared_by.removesuffix('_ms')}{suffix}"), figure


def slug(words: str) -> str:
    """`words` as part of a file name."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")
