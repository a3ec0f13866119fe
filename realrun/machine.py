"""Where a real run happens, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from pdvsim.realrun.engine.buckets import most_prompts
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.models.presets import HEADS, LAYERS
from pdvsim.sim.policies import policy_of

MAX_DRAFT = 15  # the verify kernel's
MAX_PARALLEL_DRAFT = 8  # with as many accepted ones that are read again


@dataclass(frozen=True)
class Machine:
    """Device and weights of the run."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cuda, or cpu for tests with --tiny: the same program in plain torch."""
    dtype: Literal["bfloat16", "float16", "float32"] | None = None
    """Data type of weights and caches; default: bfloat16, or float32 on the CPU."""
    tiny: bool = False
    """Use a pair of tiny models instead of --pair."""
    draft_path: str | None = None
    """Folder of the draft model's Hugging Face checkpoint; default: random weights."""
    target_path: str | None = None
    """Folder of the target model's checkpoint; default: random weights."""
    models: str | None = None
    """With --engine vllm or sglang: folder with one folder per model (config.json and tokenizer), named as in --pair;
    default: the names on Hugging Face."""
    verdict: Literal["auto", "pinned", "own"] = "auto"
    """What decides acceptance: pinned (the simulated acceptance), own (the models) or auto (own with checkpoints)."""

    def __post_init__(self) -> None:
        if self.tiny and (self.draft_path or self.target_path):
            raise ValueError("--tiny cannot be combined with --draft-path or --target-path")
        if self.draft_path and not self.target_path:
            raise ValueError("--draft-path needs --target-path")

    @property
    def own_verdict(self) -> bool:
        return self.verdict == "own" or (self.verdict == "auto" and self.target_path is not None)


def refuse(experiment: Experiment, machine: Machine) -> None:
    """A ValueError for whatever a real run cannot do."""
    server, hardware = experiment.server, experiment.hardware
    if hardware.engine in ("vllm", "sglang"):
        _refuse_elsewhere(experiment, machine)
        return
    if machine.models is not None:
        raise ValueError("--models needs --engine vllm or sglang")
    if reason := next((reason for given, reason in _only_simulated(experiment) if given), ""):
        raise ValueError(f"{reason}; pdvsim run simulates it")
    if server.drafted_by in HEADS:
        _refuse_head(experiment, machine)
    if server.drafted_by == "suffix":
        raise ValueError(
            "--drafter suffix is for pdvsim run: realrun looks drafts up in a request's own tokens, not in other "
            "answers; it serves ngram"
        )
    if server.drafted_by == "pard" and experiment.longest_draft > MAX_PARALLEL_DRAFT:
        raise ValueError(f"the GPU kernels take {MAX_PARALLEL_DRAFT} draft tokens of --drafter pard at most")
    ahead = policy_of(experiment.arch).drafts_ahead
    if ahead and machine.own_verdict:
        raise ValueError("pdv-ahead needs --verdict pinned: its correct guesses are drawn like the acceptance")
    if not experiment.scoring.detailed:
        raise ValueError("--no-detailed is for simulated runs; realrun keeps its records")
    simulated = ("contention", "band", "padding", "machine")
    if any(getattr(hardware, name) != getattr(Hardware, name) for name in simulated):
        raise ValueError("--contention, --band, --padding and --machine are options of a simulated GPU")
    if hardware.engine not in (None, "pdvsim"):
        raise ValueError(f"realrun starts no {hardware.engine}: it serves with --engine pdvsim, vllm or sglang")
    if experiment.host != Host():
        raise ValueError("host costs are real here: --host, --launch-s and the like are for pdvsim run")
    if server.priority == "preemptive":
        raise ValueError("no GPU supports --priority preemptive; use stream, none or partition")
    if experiment.longest_draft > MAX_DRAFT - ahead:
        most = f"{MAX_DRAFT - ahead}{' after a guess' if ahead else ''}"
        raise ValueError(f"the GPU kernels take a draft length of at most {most}, got {experiment.longest_draft}")
    if machine.own_verdict and server.confidence_noise is not None:
        raise ValueError("confidence_noise needs --verdict pinned: it is a signal of the drawn acceptance")
    if machine.own_verdict and experiment.acceptance != Acceptance():
        raise ValueError("acceptance options need --verdict pinned: here the models decide")
    if machine.target_path and not machine.draft_path and experiment.speculates and server.drafted_by != "ngram":
        raise ValueError(f"{experiment.arch} needs both --draft-path and --target-path")
    if machine.device == "cpu" and server.priority == "partition":
        raise ValueError("--priority partition needs a GPU; the CPU has no multiprocessors to split")


def _refuse_elsewhere(experiment: Experiment, machine: Machine) -> None:
    """Refuse what an engine's own server, one on this machine, cannot be measured with."""
    server, hardware = experiment.server, experiment.hardware
    if experiment.sides is not None or hardware.replicas > 1 or experiment.gpus > hardware.tensor_parallel_size:
        raise ValueError(f"realrun --engine {hardware.engine} starts one server, without a router")
    if machine.tiny or machine.target_path:
        raise ValueError("--tiny, --draft-path and --target-path are for realrun's own engine; give --models")
    if not machine.own_verdict and experiment.speculates and server.drafted_by in LOOKED_UP:
        raise ValueError(f"--drafter {server.drafted_by} finds nothing in random prompts; --engine pdvsim pins it")


def _only_simulated(experiment: Experiment) -> list[tuple[bool, str]]:
    """Layouts that are simulated alone: whether each is asked for, and why it is refused."""
    hardware, one = experiment.hardware, "realrun has one GPU"
    tiers = hardware.kv_offload_gb > 0 or hardware.kv_offload_ssd_gb > 0
    return [
        (hardware.disaggregate is not None, f"--disaggregate: {one}, which prefills and decodes"),
        (hardware.data_parallel_size > 1, f"--data-parallel-size: {one}, and no data-parallel ranks"),
        (hardware.enable_expert_parallel, f"--enable-expert-parallel: {one}, which has all experts"),
        (tiers, "--kv-offload-gb, --kv-offload-ssd-gb: realrun keeps its KV cache on the GPU"),
        (hardware.tensor_parallel_size > 1, f"--tensor-parallel-size: {one}"),
        (hardware.replicas > 1, f"--replicas: {one}"),
        (experiment.gpus > 1, f"--place: {one}"),
    ]


def _refuse_head(experiment: Experiment, machine: Machine) -> None:
    """Refuse a head that the real device cannot serve: it keeps hidden states of the last rounds alone."""
    server = experiment.server
    if server.drafted_by in LAYERS:
        raise ValueError(f"--drafter {server.drafted_by} is for pdvsim run; of parallel drafters realrun serves pard")
    if machine.target_path:
        raise ValueError(f"--drafter {server.drafted_by} has random weights in realrun: leave out --target-path")
    if experiment.base_arch == "adaptive" or (server.varies_length and not server.draft_range[0]):
        raise ValueError(
            f"--drafter {server.drafted_by} must run in every step in realrun: no adaptive, and a controller needs "
            "--min-speculative-tokens 1"
        )


def as_served(experiment: Experiment) -> Experiment:
    """The experiment with the engine's own way of doing what the flags leave open; simulated, it is the same run."""
    server = experiment.server
    if experiment.hardware.engine not in (None, "pdvsim"):
        return experiment
    prompts, most = server.max_prompts_per_forward, most_prompts(server.max_num_batched_tokens)
    if (prompts or server.max_num_seqs) > most:
        prompts = most
    pads = experiment.has_drafter and server.drafted_by == "ngram"
    return replace(experiment, server=replace(server, max_prompts_per_forward=prompts, pad_drafts=pads))
