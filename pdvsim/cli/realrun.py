"""The `realrun` command: the experiments of `pdvsim run`, on this machine's GPU. Ctrl-C saves what is finished."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated

from pdvsim.bench.output import dumps, optional_file
from pdvsim.cli.run import RunCommand
from pdvsim.common.commandline import parse
from pdvsim.common.console import guarded, say
from pdvsim.common.files import write_all, write_whole
from pdvsim.common.version import __version__
from pdvsim.decide.deploy import roomed
from pdvsim.realrun.machine import Machine, refuse
from pdvsim.sim.config import Experiment
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.served import Served, served_as
from pdvsim.sim.limits import of
from pdvsim.sim.metrics.iterations import iteration_lines
from pdvsim.sim.policies import archs_where, policy_of
from pdvsim.sim.relevance import vet
from pdvsim.view.run import Run

_say = partial(say, "realrun")


@dataclass(frozen=True)
class RealrunCommand(RunCommand):
    """Run one experiment on this machine's GPU and print its table, in the style of `vllm bench serve`."""

    machine: Machine = field(default_factory=Machine)
    iteration_log: str | None = None
    """Write one line per step to this file, as vLLM does, for `pdvsim calibrate --from-vllm`."""
    probe: Annotated[bool, of(without=["save_detailed", "trace_out", "html", "iteration_log"])] = False
    """Only measure how fast this machine is, with a short warm-up, and write that to -o, for `pdvsim run --machine`."""
    label: str = "realrun"
    """Prefix of the file name of --save-result."""

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment; if the models decide acceptance, none is recorded or assumed."""
        hardware = self.given.hardware  # without --engine it is this machine's run of pdvsim's own
        given = self.given if hardware.engine else replace(self.given, hardware=replace(hardware, engine="pdvsim"))
        return given.experiment(given.arch, assumed=self.machine.own_verdict)

    @classmethod
    def main(cls, argv: Sequence[str] | None = None, prog: str = "realrun") -> int:
        words = list(sys.argv[1:] if argv is None else argv)
        return guarded("realrun", lambda: parse(cls, words, "realrun").execute(), last=argv is None)

    def execute(self) -> int:
        experiment, engine = self.experiment, self.experiment.hardware.engine
        refuse(experiment, self.machine)
        elsewhere = engine not in (None, "pdvsim")
        if self.iteration_log and not policy_of(experiment.arch).in_steps():
            fitting = archs_where(lambda policy: policy.in_steps())
            raise ValueError(f"--iteration-log needs one lane: --arch {' or '.join(fitting)}")
        if elsewhere and (self.probe or self.trace_out or (self.iteration_log and engine != "vllm")):
            raise ValueError(f"--probe, --trace-out and --iteration-log need launches, which --engine {engine} hides")
        if elsewhere:
            server_line(experiment)  # refuses what the engine cannot serve
        vet([experiment])
        try:
            import torch
        except ImportError:
            raise ValueError("realrun needs torch: pip install 'pdvsim[gpu]'") from None
        if self.machine.device == "cuda" and not torch.cuda.is_available():
            raise ValueError("no CUDA device here; --device cpu --tiny runs the same program on the CPU")

        from pdvsim.realrun.engines import EngineBench
        from pdvsim.realrun.site import Interrupted, probe, serve

        files = self.files("telemetry")
        if self.probe:
            record = dumps({"date": files.date, **probe(experiment, self.machine, self.json)})
            write_all({path: record.encode() for path in files.results})
            print(record)
            return 0
        steps = optional_file(self.iteration_log)
        try:
            if elsewhere:
                with closing(EngineBench(self.machine, server_line, self.json, steps)) as bench:
                    result = bench.served(experiment)
            else:
                result = serve(experiment, self.machine, quiet=self.json, traced=bool(self.trace_out))
        except Interrupted as stop:
            if stop.result is None:
                raise
            result = stop.result
            result.meta |= {"interrupted": True, "requests_asked": stop.requests}
        document = files.write(run := Run(result))
        if steps is not None and not elsewhere:
            write_whole(steps, "".join(f"{line}\n" for line in iteration_lines(result, "pdvsim", __version__)).encode())
        print(document if self.json else run.table())
        if files.paths:
            _say(f"saved {', '.join(map(str, files.paths))}")
        held, wanted = (result.meta.get(name, 0) for name in ("kv_capacity_tokens", "kv_wanted_tokens"))
        if held < wanted:
            _say(f"the KV cache holds {held:,} tokens; requests in flight may need {wanted:,}: some may have waited")
        if "interrupted" in result.meta:
            _say(f"interrupted: {len(result.requests['id'])} of {result.meta['requests_asked']} requests had finished")
        return 130 if "interrupted" in result.meta else 0


def server_line(experiment: Experiment) -> str:
    """The command that starts an experiment's engine, as an advice prints it; a ValueError if the engine cannot."""
    if not isinstance(served := served_as(experiment), Served):
        raise ValueError(served)
    block = ENGINES["vllm" if experiment.hardware.engine == "vllm" else "sglang"].commands(roomed(served))[0]
    if not block.text:
        raise ValueError(f"{block.label}: {'; '.join(block.notes)}")
    return block.text


main = RealrunCommand.main
