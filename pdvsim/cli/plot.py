"""`pdvsim plot`: pictures of sweeps and runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdvsim.common.console import say
from pdvsim.common.options import Placed, parse
from pdvsim.view.figure import DPI


@dataclass(frozen=True)
class PlotCommand:
    """Draw throughput, latency, GPU use by lane, acceptance and the improvement heatmap; or a picture of your own."""

    results: Placed[tuple[str, ...]]
    """Sweep folders, or JSON files of single runs."""
    output: str | None = None
    """Folder for the pictures; default: plots, in the first sweep's folder or beside the first run."""
    format: Literal["png", "svg"] = "png"
    """Kind of file."""
    against: str | None = None
    """Architecture that the heatmap compares the others with; default: the first in the results."""
    metric: str | None = None
    """What the heatmap compares, e.g. mean_ttft_ms; default: output_throughput in closed loops, mean_e2el_ms where
    arrivals set the throughput."""
    var_x: str | None = None
    """Your own picture: the column along x, an option that was varied or a metric; default: load."""
    var_y: str | None = None
    """Your own picture: the metric along y; default: output_throughput."""
    curve_by: str | None = None
    """Your own picture: one curve for each value of this column; default: arch."""
    row_by: str | None = None
    """Your own picture: one row of panels for each value of this column."""
    col_by: str | None = None
    """Your own picture: one column of panels for each value of this column."""
    frontier: bool = False
    """Of results at one load: which points no other beats both in --var-x (default: mean_ttft_ms) and in --var-y
    (default: p99_itl_ms), as a picture and a table."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(PlotCommand, argv, "pdvsim plot")

    from pdvsim.decide.frontier import find_frontier, frontier_figure
    from pdvsim.study.output import check_folder, picture, save
    from pdvsim.study.results import load
    from pdvsim.view.plots import own, standing
    from pdvsim.view.plots.custom import Layout
    from pdvsim.view.plots.heatmap import check

    results = load(args.results)
    for line in results.incomplete:
        say("pdvsim", line)
    given = {"x": args.var_x, "y": args.var_y, "curve": args.curve_by, "row": args.row_by, "column": args.col_by}
    chosen = {name: column.replace("-", "_") for name, column in given.items() if column is not None}
    against, metric = args.against or results.archs[0], args.metric and args.metric.replace("-", "_")
    if args.frontier:
        if chosen.keys() - {"x", "y"}:
            raise ValueError("--frontier takes --var-x and --var-y, and no curves or panels")
        frontier = find_frontier(results.points, **chosen)
        pictures = iter([("frontier", frontier_figure(frontier, results.configs))])
        print(frontier)
    elif chosen:
        pictures = iter([own(results, Layout(**chosen))])
    else:
        check(results, metric or results.headline, against)
        pictures = standing(results, metric, against)
    first = Path(args.results[0])
    folder = check_folder(Path(args.output) if args.output else (first if first.is_dir() else first.parent) / "plots")
    for name, figure in pictures:
        path = folder / f"{name}.{args.format}"
        save({path: picture(figure, path, DPI)})
    return 0
