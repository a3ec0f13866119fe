"""`pdvsim validate --serve`: serve planned runs on this machine's GPU."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from pdvsim.bench import output
from pdvsim.calibration.validate.launches import gather
from pdvsim.calibration.validate.runs import serve_all, tiny
from pdvsim.calibration.validate.served import read_runs
from pdvsim.cli.realrun import server_line
from pdvsim.cli.validate.options import ValidateOptions
from pdvsim.common.console import say
from pdvsim.realrun.engines import EngineBench
from pdvsim.realrun.machine import Machine


def serve_plan(args: ValidateOptions, plan: str) -> int:
    """Serve a plan, and collect the launches of its runs in one table."""
    runs, engine = read_runs(plan, planned=True, own_policies=args.own_policies), args.hardware.engine
    runs = [replace(run, command=f"{run.command} --engine {engine}") for run in runs] if engine else runs
    path, tell = output.check_file(Path(args.output)), partial(say, "pdvsim")
    machine = Machine(device="cpu" if args.tiny else "cuda", tiny=args.tiny and not engine, models=args.models)
    with EngineBench(machine, server_line) if engine else nullcontext() as bench:
        try:
            runs = list(map(tiny, runs)) if args.tiny else runs
            serve_all(runs, path, 60 * args.minutes, machine, tell, bench)
        finally:
            gather(path.parent)
    return 0
