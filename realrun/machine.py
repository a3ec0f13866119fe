"""Where a real run happens, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pdvsim.realrun.engine.buckets import most_prompts
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host
from pdvsim.sim.hardware.models import HEADS

MAX_DRAFT = 15  # the verify kernel's


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


def refuse(experiment: Experiment, machine: Machine) -> None:
    """A ValueError for whatever a real run cannot do."""
    server, hardware = experiment.server, experiment.hardware
    if hardware.replicas > 1 or experiment.gpus > 1:
        raise ValueError("realrun has one GPU: --replicas, --tensor-parallel-size and --place do not apply")
    if server.drafted_by in HEADS:
        _refuse_head(experiment, machine)
    ahead = experiment.kin == "pdv-ahead"
    if ahead and machine.own_verdict:
        raise ValueError("pdv-ahead needs --verdict pinned: which verdicts are foreseen is drawn, as they are")
    if not experiment.scoring.detailed:
        raise ValueError("--no-detailed is for simulated runs; realrun keeps what it measured")
    simulated = ("contention", "band", "padding", "machine")
    if any(getattr(hardware, name) != getattr(Hardware, name) for name in simulated):
        raise ValueError("--contention, --band, --padding and --machine are of a simulated GPU; realrun has a real one")
    if experiment.host != Host():
        raise ValueError("the host's costs are what they are: --host, --launch-s and the like are for pdvsim run")
    if server.priority == "preemptive":
        raise ValueError("--priority preemptive is an ideal that no GPU offers; use stream, none or partition")
    if server.priority == "dynamic" or server.lane_weights:
        raise ValueError("a CUDA stream keeps one priority: --priority dynamic is for pdvsim run")
    if experiment.longest_draft > MAX_DRAFT - ahead:
        most = f"{MAX_DRAFT - ahead} drafts{' behind a guess' if ahead else ''}"
        raise ValueError(f"the GPU kernels take at most {most}, got {experiment.longest_draft}")
    if machine.own_verdict and experiment.acceptance != Acceptance():
        raise ValueError("the models decide what is accepted: acceptance options need --verdict pinned")
    if machine.target_path and not machine.draft_path and experiment.speculates and server.drafted_by != "ngram":
        raise ValueError(f"{experiment.arch} needs --draft-path beside --target-path")
    if machine.device == "cpu" and server.priority == "partition":
        raise ValueError("--priority partition needs a GPU; the CPU has no multiprocessors to split")


def _refuse_head(experiment: Experiment, machine: Machine) -> None:
    """What a head cannot do on the real device, where hidden states of the last rounds alone are kept."""
    server = experiment.server
    if machine.target_path:
        raise ValueError(f"--drafter {server.drafted_by} has random weights in realrun: leave out --target-path")
    if experiment.kin == "adaptive" or (server.controller != "fixed" and not server.draft_range[0]):
        raise ValueError(
            f"--drafter {server.drafted_by} must read along in realrun: no adaptive, and with a controller "
            "--min-speculative-tokens 1"
        )


def as_served(experiment: Experiment) -> Experiment:
    """The experiment with the engine's own way of doing what the flags leave open; simulated, it is the same run."""
    server = experiment.server
    prompts, most = server.max_prompts_per_forward, most_prompts(server.max_num_batched_tokens)
    if (prompts or server.max_num_seqs) > most:
        prompts = most
    pads = experiment.has_drafter and server.drafted_by == "ngram"
    return replace(experiment, server=replace(server, max_prompts_per_forward=prompts, pad_drafts=pads))
