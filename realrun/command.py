"""The `realrun` command: the experiments of `pdvsim run`, on the GPU of this machine. Same flags, table and files.

Bad input is one line on standard error and exit code 2; Ctrl-C saves the requests that have finished and is 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

import tyro

from pdvsim.args import RunCommand, parse
from pdvsim.console import guarded, say
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host
from pdvsim.sim.relevance import vet

MAX_DRAFT = 15  # the verify kernel's
MAX_PROMPTS = 4  # in one forward


@dataclass(frozen=True)
class Machine:
    """Where the run happens, and on which weights."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cuda, or cpu: the same program on plain torch, for tests with --tiny."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Of weights and caches; default: bfloat16, and float32 on the CPU."""
    tiny: bool = False
    """A pair of tiny models in place of --pair."""
    draft_path: str | None = None
    """Folder of the draft model's Hugging Face checkpoint; without one its weights are random."""
    target_path: str | None = None
    """Folder of the target model's checkpoint."""
    verdict: Literal["auto", "pinned", "own"] = "auto"
    """Who accepts drafts: pinned, the acceptance stream; own, the models; auto: own with checkpoints."""

    def __post_init__(self) -> None:
        if self.tiny and (self.draft_path or self.target_path):
            raise ValueError("--tiny excludes --draft-path and --target-path")
        if self.draft_path and not self.target_path:
            raise ValueError("--draft-path needs --target-path")

    @property
    def own_verdict(self) -> bool:
        return self.verdict == "own" or (self.verdict == "auto" and self.target_path is not None)


@dataclass(frozen=True)
class RealCommand(RunCommand):
    """Run one experiment on this machine's GPU and print its table, in the style of `vllm bench serve`."""

    machine: Annotated[Machine, tyro.conf.arg(name="")] = field(default_factory=Machine)
    label: str = "realrun"
    """Prefix of the name of --save-result."""


def refuse(experiment: Experiment, machine: Machine) -> None:
    """A ValueError for whatever a real run cannot do."""
    server, hardware = experiment.server, experiment.hardware
    if hardware.replicas > 1 or hardware.verify_gpu:
        raise ValueError("realrun has one GPU: --replicas and --verify-gpu do not apply")
    if not experiment.scoring.detailed:
        raise ValueError("--no-detailed is for simulated runs; realrun keeps what it measured")
    simulated = ("contention", "transfer_s", "band")
    if any(getattr(hardware, name) != getattr(Hardware, name) for name in simulated):
        raise ValueError("--contention, --transfer-s and --band describe a simulated GPU; realrun has a real one")
    if experiment.host != Host():
        raise ValueError("the host's costs are what they are: --launch-s and its like are for pdvsim run")
    if server.priority == "preemptive":
        raise ValueError("--priority preemptive is an ideal that no GPU offers; use stream, none or partition")
    if experiment.longest_draft > MAX_DRAFT:
        raise ValueError(f"the GPU kernels verify at most {MAX_DRAFT} drafts, got {experiment.longest_draft}")
    if (server.max_prompts_per_forward or 0) > MAX_PROMPTS:
        raise ValueError(f"max-prompts-per-forward is at most {MAX_PROMPTS} on the GPU")
    if server.kv_cache == "paged":
        raise ValueError("realrun holds a KV slot for each request, not blocks: --kv-cache paged is for pdvsim run")
    if machine.own_verdict and experiment.acceptance != Acceptance():
        raise ValueError("the models decide what is accepted: acceptance options need --verdict pinned")
    if machine.target_path and not machine.draft_path and experiment.speculates:
        raise ValueError(f"{experiment.arch} needs --draft-path beside --target-path")
    if machine.device == "cpu" and server.priority == "partition":
        raise ValueError("--priority partition needs a GPU; the CPU has no multiprocessors to split")


def as_served(experiment: Experiment) -> Experiment:
    """The experiment with the engine's own way of doing what the flags leave open; simulated, it is the same run."""
    server = experiment.server
    prompts = server.max_prompts_per_forward or MAX_PROMPTS
    return replace(experiment, server=replace(server, max_prompts_per_forward=prompts, kv_cache="reserved"))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("realrun", lambda: _run(list(sys.argv[1:] if argv is None else argv)))


def _run(argv: list[str]) -> int:
    args = parse(RealCommand, argv, "realrun")
    refuse(args.experiment, args.machine)
    vet([args.experiment])
    try:
        import torch
    except ImportError:
        raise ValueError("realrun needs torch: pip install 'pdvsim[gpu]'") from None
    if args.machine.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device here; --device cpu --tiny runs the same program on the CPU")

    from pdvsim import Run
    from pdvsim.output import DETAILS, RunFiles
    from pdvsim.realrun.site import Interrupted, serve

    files = RunFiles.checked(args, (*DETAILS, "telemetry"))
    try:
        result, asked = serve(args.experiment, args.machine, quiet=args.json), None
    except Interrupted as stop:
        if stop.result is None:
            raise
        result, asked = stop.result, stop.requests
        result.meta |= {"interrupted": True, "requests_asked": asked}
    run = Run(result)
    document = files.write(run)
    print(document if args.json else run.table())
    if files.paths:
        _say(f"saved {', '.join(map(str, files.paths))}")
    held, wanted = result.meta["kv_slots"], result.meta["kv_slots_wanted"]
    if held < wanted:
        _say(f"memory held {held} requests at once, not {wanted}: others waited")
    if asked is not None:
        _say(f"interrupted: {len(result.requests['id'])} of {asked} requests had finished")
    return 130 if asked is not None else 0


def _say(text: str) -> None:
    say("realrun", text)


if __name__ == "__main__":
    sys.exit(main())
