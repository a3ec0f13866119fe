"""`pdvsim validate`: compare measurements with simulations. Each kind of validation is a module.

- `runs`: real runs of `realrun`, all of them (the default), served first with --serve; `launches`: one of them (--run)
- `bench`: a benchmark of your own server (--bench); `silicon`: published measurements of servers (--silicon)
- `decide.measured_pairs`: measured pairs of servers without and with speculation (--speculation)
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pdvsim.calibration.validate.served import read_runs
from pdvsim.cli.command import Command
from pdvsim.cli.validate.options import Compared, ValidateOptions
from pdvsim.common.console import say
from pdvsim.realrun.machine import Machine


@dataclass(frozen=True)
class ValidateCommand(Command, ValidateOptions):
    """Compare real serving runs with simulations of the same experiments and seeds."""

    def execute(self) -> int:
        if self.serve is not None:
            return self._serve(self.serve)
        if self.run is not None:
            from pdvsim.cli.validate.launches import compare_launches

            return compare_launches(self, self.run)
        if self.silicon is None and self.speculation is None and not self.bench:
            from pdvsim.cli.validate.runs import compare_runs

            return compare_runs(self)
        from pdvsim.bench.output import dumps

        comparison = compared(self)
        print(dumps(comparison.document) if self.json else comparison)
        return 0

    def _serve(self, plan: str) -> int:
        """Serve planned runs on this machine's GPU, and collect their launches in one table."""
        from pdvsim.bench import output
        from pdvsim.calibration.validate.launches import gather
        from pdvsim.calibration.validate.runs import Workbench, serve_all, tiny
        from pdvsim.cli.realrun import server_line
        from pdvsim.realrun.engines import EngineBench

        runs, engine = read_runs(plan, planned=True, own_policies=self.own_policies), self.hardware.engine
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


def compared(args: ValidateOptions) -> Compared:
    """Measurements and what is predicted for them."""
    if args.silicon is not None:
        from pdvsim.cli.validate.silicon import compare_silicon

        return compare_silicon(args)
    if args.speculation is not None:
        from pdvsim.view.measured_pairs import compared_pairs

        return Compared(*compared_pairs(args.speculation, args.held_out, args.rows, args.jobs, args.json))
    if args.bench and args.pair is not None:
        from pdvsim.cli.validate.bench import compare_bench

        return compare_bench(args, args.bench, args.pair)
    from pdvsim.cli.validate.runs import compared_runs

    return compared_runs(args)[1]
