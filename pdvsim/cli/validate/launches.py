"""`pdvsim validate --run`: one real run compared with its simulation, launch by launch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench import output
from pdvsim.calibration.validate import compare
from pdvsim.calibration.validate.launches import compared, launches_of, priced, saved_run, simulated
from pdvsim.cli.validate.base import Compared, RecordedRuns
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.sim.relevance import applicable
from pdvsim.view.calibration_plots import launches_figure
from pdvsim.view.validation import launch_tables

if TYPE_CHECKING:
    import pandas as pd


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
        if not name.isdecimal():
            return *saved_run(Path(name), self.own_policies), name
        runs = self.served_runs()
        if not 1 <= int(name) <= len(runs):
            raise ValueError(f"--run: there are runs 1 to {len(runs)}, got {name}")
        run = runs[int(name) - 1]
        if run.held_out and not self.held_out:
            raise ValueError(f"run {name} is held out; --held-out shows it")
        return run.experiment, launches_of(run), run.metrics, f"run {name}: {run.command}"
