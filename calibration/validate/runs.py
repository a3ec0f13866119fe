"""Real runs to compare predictions with, served on this machine's GPU: `pdvsim validate --serve PLAN.jsonl`.

A second call into the same file continues where the first stopped, and Ctrl-C keeps what is done. Runs of a pair share
its models; runs that differ in traffic alone share the graphs too. Serving needs torch, Triton, numpy and SimPy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from time import monotonic
from typing import Any

from pdvsim.calibration.validate.launches import WARM_UP_PREFIX, save_part
from pdvsim.calibration.validate.served import ServedRun, read_runs, write_runs
from pdvsim.common.commandline import command_line
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Experiment, Server
from pdvsim.sim.core import Request
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.models.presets import drafter_kind
from pdvsim.sim.records import Result
from pdvsim.sim.workload.requests import make_requests


class Workbench:
    """Serves runs on this machine, and keeps what takes long to make as long as it is of use."""

    def __init__(self, machine: Machine, say: Callable[[str], None]) -> None:
        import torch

        if machine.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device: real runs need one")
        self._machine, self._say = machine, say
        self._pair = ""
        self._models: dict[Any, Any] = {}
        self._rig: Any = None

    def ready(self, group: Sequence[Experiment]) -> None:
        """Prepare for all of a group together, if there is room; else each is prepared on its own."""
        users = [experiment.traffic.max_concurrency for experiment in group]
        most = None if None in users else max(user for user in users if user is not None)
        seats = max(experiment.server.max_num_seqs for experiment in group)
        first = replace(
            group[0],
            traffic=replace(group[0].traffic, max_concurrency=most),
            server=replace(group[0].server, max_num_seqs=seats),
        )
        requests = [request for experiment in group for request in _requests(experiment)]
        try:
            self._prepare(first, requests)
        except ValueError as error:
            self._say(f"not together: {error}")

    def served(self, experiment: Experiment) -> Result:
        """A run; a ValueError if it cannot be served here."""
        from pdvsim.realrun.memory import Needs
        from pdvsim.realrun.site import serve

        requests = _requests(experiment)
        needs = Needs.of(experiment, requests)
        if self._rig is None or not self._rig.serves(experiment.server, needs):
            self._prepare(experiment, requests)
        if not self._rig.serves(experiment.server, needs):
            raise ValueError("it does not fit into memory")
        return serve(experiment, self._machine, rig=self._rig)

    @property
    def warm_launches(self) -> Any:
        """Launches of the last warm-up, whose traffic is no validation run's."""
        return self._rig.warm_launches if self._rig is not None else {}

    def _prepare(self, experiment: Experiment, requests: list[Request]) -> None:
        from pdvsim.realrun.site import prepare

        pair, self._rig = experiment.server.pair, None  # its memory is free again
        if self._pair != pair:
            self._models = {
                role: model for role, model in self._models.items() if role == "target" and self._same(pair)
            }
        self._pair = pair
        self._rig = prepare(experiment, self._machine, requests, models=dict(self._models))
        self._models |= self._rig.models

    def _same(self, pair: str) -> bool:
        """Return whether another pair has the same target; with a draft model its vocabulary may be cut."""
        served, wanted = self._pair.partition(":"), pair.partition(":")
        return served[2] == wanted[2] and "model" not in (drafter_kind(served[0]), drafter_kind(wanted[0]))


def _requests(experiment: Experiment) -> list[Request]:
    return make_requests(experiment.traffic, experiment.acceptance)


def serve_all(plan: Sequence[ServedRun], output: Path, budget_s: float, bench: Any, say: Callable[[str], None]) -> None:
    """Serve what is planned and not yet in the file, as far as the time goes; each run is written as it ends."""
    trusted = any(run.own_policies for run in plan)
    done = read_runs(output, own_policies=trusted) if output.exists() and output.stat().st_size else []
    known = {run.id for run in done}
    todo = [run for run in plan if run.id not in known]
    pairs = list(dict.fromkeys(run.experiment.server.pair for run in todo))
    todo.sort(key=lambda run: pairs.index(run.experiment.server.pair))  # weights are made once a pair
    if not todo:
        return
    begin = monotonic()
    for _, group in groupby(todo, key=_shared):
        runs = list(group)
        if monotonic() - begin > budget_s:
            break
        bench.ready([run.experiment for run in runs])
        if bench.warm_launches:
            save_part(output.parent, f"{WARM_UP_PREFIX}{runs[0].id}", bench.warm_launches)
        for run in runs:
            if monotonic() - begin > budget_s:
                break
            try:
                result = bench.served(run.experiment)
            except ValueError as error:
                say(f"left out: {run.command}: {error}")
                continue
            metrics = summarise(result)
            meta = {name: value for name, value in result.meta.items() if name != "telemetry"}
            done.append(replace(run, metrics=metrics, meta=meta))
            save_part(output.parent, run.id, result.launches)
            write_runs(output, done)
            took_s, throughput = metrics["duration"], metrics["output_throughput"]
            say(f"{len(done)} runs; {took_s:.1f} s, {throughput:.0f} tok/s: {run.command}")
    left = len({run.id for run in plan} - {run.id for run in done})
    say(f"{left} of {len(plan)} runs are left")


def _shared(run: ServedRun) -> tuple[str, Server]:
    """Return the key of runs that can share models and graphs."""
    server, plan_len = run.experiment.server, Server.adaptive_verification_profile_context_len
    server = replace(server, adaptive_verification_profile_context_len=plan_len)
    return run.experiment.arch, replace(server, max_num_seqs=1, max_prompts_per_forward=None)


def tiny(run: ServedRun) -> ServedRun:
    """A run that a CPU serves in a moment, to try the command."""
    traffic = replace(run.experiment.traffic, num_prompts=4, input_len=16, output_len=8)
    scoring = replace(run.experiment.scoring, warmup_requests=0)
    command = command_line("realrun", replace(run.experiment, traffic=traffic, scoring=scoring))
    return replace(run, command=command, folder=Path())  # its files are named from here by now
