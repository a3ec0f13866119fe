"""`pdvsim validate --run`: one real run compared with its simulation, launch by launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from pdvsim.view.table import cell, grid, percent_cell

if TYPE_CHECKING:
    import pandas as pd

LEAST_SHARE = 0.0005  # least share of the time that gets its own line


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
        self.printed(Compared(comparison, "\n\n".join(_launch_tables(comparison))))
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


def _launch_tables(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Contributions to the error by kind and size, largest first; then the gaps."""
    yield f"{comparison['run']}\nprofile {comparison['foundation']}"
    shown = [row for row in comparison["rows"] if abs(row["share"]) >= LEAST_SHARE]
    timed = ("measured_ms", "predicted_ms", "measured_stretch", "predicted_stretch")
    rows = []
    for row in sorted(shown, key=lambda row: -abs(row["share"])):
        counts, times = (str(row[side]) for side in ("measured", "predicted")), (cell(row[name], 3) for name in timed)
        rows.append([row["what"], row["sizes"], *counts, *times, percent_cell(row["share"], "+")])
    rows.append(["all", *[""] * 7, percent_cell(comparison["error"], "+")])
    header = ["launches", "rows or tokens", "real", "sim", "real ms", "sim ms", "real / alone", "sim / alone",
              "share of GPU time"]  # fmt: skip
    yield grid(header, rows)
    rows = []
    for lane, sides in comparison["gaps"].items():
        real, sim = (sides[side] for side in ("measured", "predicted"))
        figures = [f"{cell(real[key], 1)} / {cell(sim[key], 1)}" for key in ("median_us", "p95_us")]
        rows.append([lane, *figures, f"{percent_cell(real['share'])} / {percent_cell(sim['share'])}"])
    idle = " / ".join(percent_cell(comparison["idle"][side]) for side in ("measured", "predicted"))
    rows.append(["GPU idle", "-", "-", idle])
    yield grid(["gaps, real / sim", "median us", "95% us", "share of time"], rows)
