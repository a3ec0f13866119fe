"""`pdvsim validate --serve`: serve planned runs on this machine's GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from pdvsim.bench import output
from pdvsim.calibration.validate.launches import gather
from pdvsim.calibration.validate.runs import Workbench, serve_all, tiny
from pdvsim.calibration.validate.served import read_runs
from pdvsim.cli.realrun import server_line
from pdvsim.cli.validate.base import ValidationCommand
from pdvsim.common.console import say
from pdvsim.realrun.engines import EngineBench
from pdvsim.realrun.machine import Machine
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.limits import Range


@dataclass(frozen=True)
class ValidateServing(ValidationCommand):
    """Serve planned runs on this machine's GPU (--serve)"""

    key = "serve"
    without = ("json",)

    serve: str | None = None
    """Instead of comparing, serve the runs planned in this file on this machine's GPU and append them to --output."""
    output: str = "runs.jsonl"
    """File of real runs. Runs already in it are not served again."""
    minutes: Annotated[float, Range(0, 30 * 1440, or_inf=True)] = math.inf
    """Start no run after this many minutes."""
    tiny: bool = False
    """Try the command with tiny models and short requests on the CPU."""
    models: str | None = None
    """With --engine: folder with one folder per model, as of realrun."""
    engine: ServingEngine | None = None
    """Serve with this engine, as `realrun --engine`."""
    own_policies: bool = False
    """Execute the policy files that the runs name as file.py:Class. Use this only for files you trust."""

    def execute(self) -> int:
        """Serve the runs, and collect their launches in one table."""
        runs, engine = read_runs(str(self.serve), planned=True, own_policies=self.own_policies), self.engine
        runs = [replace(run, command=f"{run.command} --engine {engine}") for run in runs] if engine else runs
        path, tell = output.check_file(Path(self.output)), partial(say, "pdvsim")
        machine = Machine(device="cpu" if self.tiny else "cuda", tiny=self.tiny and not engine, models=self.models)
        bench = EngineBench(machine, server_line) if engine else Workbench(machine, tell)
        try:
            serve_all(list(map(tiny, runs)) if self.tiny else runs, path, 60 * self.minutes, bench, tell)
        finally:
            if isinstance(bench, EngineBench):
                bench.close()
            gather(path.parent)
        return 0
