"""`pdvsim report` and `pdvsim plot`: one interactive page, or plots, of sweeps and runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from pdvsim.bench.output import check_file, check_folder, picture, save
from pdvsim.bench.results import Results, load
from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.sim.limits import Paths, Placed
from pdvsim.view.differences import check
from pdvsim.view.figure import DPI
from pdvsim.view.plots import Layout, custom_figure, slug, standing
from pdvsim.view.report.document import build
from pdvsim.view.report.sheet import page


@dataclass(frozen=True)
class ResultsCommand(Command):
    """Results that were saved."""

    without: ClassVar = ("json",)

    results: Placed[Paths]
    """Sweep folders, or JSON files of single runs."""

    def loaded(self) -> Results:
        """The results; prints what is missing in them."""
        results = load(self.results)
        for line in results.incomplete:
            say("pdvsim", line)
        return results


@dataclass(frozen=True)
class ReportCommand(ResultsCommand):
    """Write one self-contained page: comparison, histograms, scheduler and GPU over time, provenance."""

    output: str = "report.html"
    """HTML file to write."""

    def execute(self) -> int:
        results = self.loaded()
        path = check_file(Path(self.output))
        with Progress(results.detailed, "records") as progress:
            document = build(results, progress.update)
        text = page(document)
        write_whole(path, text.encode())
        say("pdvsim", f"saved {path} ({len(text) / 1e6:.1f} MB)")
        if not results.detailed:
            say("pdvsim", "no histograms and time series: the results were saved without --save-detailed")
        return 0


@dataclass(frozen=True)
class PlotCommand(ResultsCommand):
    """Plot throughput, latency, GPU use by lane, acceptance and the improvement heatmap, or a custom plot."""

    output: str | None = None
    """Folder for the plots; default: plots, in the first sweep's folder or next to the first run."""
    format: Literal["png", "svg"] = "png"
    """File format."""
    against: str | None = None
    """Architecture that the heatmap compares with; default: the first in the results."""
    metric: str | None = None
    """Metric of the heatmap, e.g. mean_ttft_ms; default: output_throughput in closed loops, mean_e2el_ms at request
    rates."""
    var_x: str | None = None
    """Custom plot: the column of the x axis, a varied option or a metric; default: load."""
    var_y: str | None = None
    """Custom plot: the metric of the y axis; default: output_throughput."""
    curve_by: str | None = None
    """Custom plot: one curve per value of this column; default: arch."""
    row_by: str | None = None
    """Custom plot: one row of panels per value of this column."""
    col_by: str | None = None
    """Custom plot: one column of panels per value of this column."""

    def execute(self) -> int:
        results = self.loaded()
        given = {"x": self.var_x, "y": self.var_y, "curve": self.curve_by, "row": self.row_by, "column": self.col_by}
        chosen = {name: column.replace("-", "_") for name, column in given.items() if column is not None}
        against, metric = self.against or results.archs[0], self.metric and self.metric.replace("-", "_")
        if chosen:
            axes = Layout(**chosen)
            pictures = iter([(slug(f"{axes.y}-by-{axes.x}"), custom_figure(results, axes))])
        else:
            check(results, metric or results.headline, against)
            pictures = standing(results, metric, against)
        first = Path(self.results[0])
        usual = (first if first.is_dir() else first.parent) / "plots"
        folder = check_folder(Path(self.output) if self.output else usual)
        for name, figure in pictures:
            path = folder / f"{name}.{self.format}"
            save({path: picture(figure, path, DPI)})
        return 0
