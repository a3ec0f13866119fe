"""`pdvsim report`: one interactive page of sweeps and runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pdvsim.bench.output import check_file
from pdvsim.bench.results import load
from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.sim.limits import Paths, Placed
from pdvsim.view.report import page
from pdvsim.view.report.document import build


@dataclass(frozen=True)
class ReportCommand(Command):
    """Write one self-contained page: comparison, histograms, scheduler and GPU over time, provenance."""

    without: ClassVar = ("json",)

    results: Placed[Paths]
    """Sweep folders, or JSON files of single runs."""
    output: str = "report.html"
    """HTML file to write."""

    def execute(self) -> int:
        results = load(self.results)
        for line in results.incomplete:
            say("pdvsim", line)
        path = check_file(Path(self.output))
        with Progress(results.detailed, "records") as progress:
            document = build(results, progress.update)
        text = page(document)
        write_whole(path, text.encode())
        say("pdvsim", f"saved {path} ({len(text) / 1e6:.1f} MB)")
        if not results.detailed:
            say("pdvsim", "no histograms and time series: the results were saved without --save-detailed")
        return 0
