"""`pdvsim validate`: the errors of all real runs, as tables and a page, or stored with the profile."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdvsim.bench import output
from pdvsim.calibration.validate import compare
from pdvsim.cli.page import write_page
from pdvsim.cli.validate.base import Compared, RecordedRuns, shipped
from pdvsim.common.version import __version__
from pdvsim.sim.config import Hardware
from pdvsim.sim.limits import Jobs
from pdvsim.sim.trust import Errors, as_text, errors_path
from pdvsim.view.calibration_plots import validation_figure
from pdvsim.view.report.sheet import Sheet
from pdvsim.view.validation import runs_text


@dataclass(frozen=True)
class ValidateRuns(RecordedRuns):
    """Compare real runs on a GPU, the default"""

    ablations: bool = True
    """Predict with one contention model, without the others for comparison."""
    write: bool = False
    """Save the errors next to the profile; all other commands take their error ranges from there."""
    html: str | None = None
    """Write tables, plot and provenance to this file, as one page."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.write and self.contention != "fluid":
            raise ValueError("--write needs --contention fluid")

    def answer(self) -> Compared:
        """All real runs and their simulation, with the other contention models if `ablations`."""
        runs = self.served_runs()
        numbers = {run.id: number for number, run in enumerate(runs, 1)}
        runs = [run for run in runs if self.held_out or not run.held_out]
        if not runs:
            raise ValueError("all runs are held out; --held-out shows them")
        others = [each for each in compare.CONTENTIONS if each != self.contention] if self.ablations else []
        validation = compare.validate(runs, [self.contention, *others], self.profile, self.jobs, self.json)
        document = compare.document(validation, numbers)
        return Compared(document, runs_text(document), validation.unfinished)

    def execute(self) -> int:
        plot, page = map(output.optional_file, (self.plot, self.html))
        comparison = self.answer()
        document, code = comparison.document, self.printed(comparison)
        if (plot or page) and document["runs"]:
            figure = validation_figure(document)
            if plot:
                output.save({plot: output.picture(figure, plot)})
            lead = f"{len(document['runs'])} real runs compared with simulations."
            paths = ", ".join(map(str, self.runs or shipped()))
            facts = {"pdvsim": __version__, "date": output.now(), "runs": paths, "profile": document["foundation"]}
            pictures = {"Predicted and measured": figure}
            write_page(page, Sheet("Simulated against real", lead, [("", [comparison.text])], pictures, facts))
        if self.write and not code:
            self._write(document)
        return code

    def _write(self, document: Mapping[str, Any]) -> None:
        """Store the errors next to the profile, for all predictions with it; without held-out runs."""
        path = errors_path(Hardware(profile=self.profile))
        if path is None:
            raise ValueError("--write needs a profile file")
        leads = {metric: lead["limit"] for metric, lead in document["leads"]["by_metric"].items()}
        errors = Errors(
            profile=document["foundation"],
            runs=len(document["runs"]),
            drafters=sorted({run.experiment.server.drafted_by for run in self.served_runs() if not run.held_out}),
            reached=document["reached"],
            bars=document["bars"],
            leads={metric: math.ceil(1e3 * size) / 1e3 for metric, size in leads.items()},
        )
        output.save({output.check_file(path): as_text(errors).encode()})
