"""`pdvsim validate --serve`: serve planned runs on this machine's GPU."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from pdvsim.bench import output
from pdvsim.calibration.validate.launches import gather
from pdvsim.calibration.validate.runs import serve_all, tiny
from pdvsim.calibration.validate.served import read_runs
from pdvsim.cli.validate.options import ValidateOptions
from pdvsim.common.console import say
from pdvsim.realrun.machine import Machine


def serve_plan(args: ValidateOptions, plan: str) -> int:
    """Serve a plan, and collect the launches of its runs in one table."""
    runs = read_runs(plan, planned=True, own_policies=args.own_policies)
    path = output.check_file(Path(args.output))
    machine = Machine(device="cpu" if args.tiny else "cuda", tiny=args.tiny)
    try:
        serve_all(
            list(map(tiny, runs)) if args.tiny else runs, path, 60 * args.minutes, machine, partial(say, "pdvsim")
        )
    finally:
        gather(path.parent)
    return 0
