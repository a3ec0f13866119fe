"""`pdvsim validate`: real runs on a GPU and their simulations: all of them, or one launch by launch (--run)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench import output
from pdvsim.calibration.validate import compare
from pdvsim.calibration.validate.launches import compared, launches_of, priced, saved_run, simulated
from pdvsim.calibration.validate.served import SHIPPED, ServedRun, read_runs
from pdvsim.cli.page import write_page
from pdvsim.cli.validate.base import Compared, ValidationCommand
from pdvsim.common.version import __version__
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Contention, Experiment, Hardware
from pdvsim.sim.limits import Jobs, Paths, Placed
from pdvsim.sim.relevance import applicable
from pdvsim.sim.trust import Errors, as_text, errors_path
from pdvsim.view.calibration_plots import launches_figure, validation_figure
from pdvsim.view.report.sheet import Sheet
from pdvsim.view.validation import launch_tables, runs_text

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class RecordedRuns(ValidationCommand):
    """Real runs on a GPU"""

    runs: Placed[Paths] = ()
    """Files of real runs, one JSON object per line; default: the H200 runs included in pdvsim."""
    own_policies: bool = False
    """Execute the policy files that the runs name as file.py:Class. Use this only for files you trust."""
    held_out: bool = False
    """Use the rows that were held out: no constant was fitted to them. Of real runs, show them too."""
    profile: str | None = None
    """Profile file (JSON) instead of the built-in one of the H200."""
    contention: Contention = "fluid"
    """How streams share the simulated GPU."""
    plot: str | None = None
    """Plot predicted against measured metrics to this file (PNG)."""

    def served_runs(self) -> list[ServedRun]:
        """The real runs to compare."""
        paths = [Path(path) for path in self.runs] or shipped()
        return [run for path in paths for run in read_runs(path, own_policies=self.own_policies)]


def shipped() -> list[Path]:
    """The files of real runs that are included in pdvsim."""
    folder = Path(str(files("pdvsim.calibration"))) / "data" / "h200"
    return [folder / name for name in SHIPPED]


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


@dataclass(frozen=True)
class ValidateLaunches(RecordedRuns):
    """Compare one real run launch by launch (--run)"""

    key = "run"

    run: str | None = None
    """Compare one run launch by launch: its number, or a result of realrun --save-detailed."""

    def execute(self) -> int:
        plot = output.optional_file(self.plot)
        experiment, measured, metrics, name = self._chosen(str(self.run))
        hardware = replace(experiment.hardware, contention=self.contention, profile=self.profile, band=False)
        experiment = applicable(replace(experiment, hardware=hardware))
        profile = covering_profile(experiment)
        measured, predicted = priced(measured, experiment, profile), simulated(experiment, profile)
        comparison = compared(measured, predicted) | {
            "dataset": compare.dataset(experiment), "arch": experiment.arch, "pair": experiment.server.pair,
            "run": name, "foundation": profile.foundation, "output_throughput": metrics.get("output_throughput"),
        }  # fmt: skip
        self.printed(Compared(comparison, "\n\n".join(launch_tables(comparison))))
        if plot:
            output.save({plot: output.picture(launches_figure(measured, predicted, comparison), plot)})
        return 0

    def _chosen(self, name: str) -> tuple[Experiment, pd.DataFrame, Mapping[str, Any], str]:
        """The experiment, launches, metrics and name of the requested run."""
        if not (name.isascii() and name.isdecimal()):
            return *saved_run(Path(name), self.own_policies), name
        runs = self.served_runs()
        if not 1 <= int(name) <= len(runs):
            raise ValueError(f"--run: there are runs 1 to {len(runs)}, got {name}")
        run = runs[int(name) - 1]
        if run.held_out and not self.held_out:
            raise ValueError(f"run {name} is held out; --held-out shows it")
        return run.experiment, launches_of(run), run.metrics, f"run {name}: {run.command}"
