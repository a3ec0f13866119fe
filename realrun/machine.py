"""Where a real run happens, and what it cannot do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pdvsim.realrun.engine.buckets import most_prompts
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Host
from pdvsim.sim.core import LOOKED_UP
from pdvsim.sim.limits import of
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
    draft_path: Annotated[str | None, of("target_path")] = None
    """Folder of the draft model's Hugging Face checkpoint; default: random weights."""
    target_path: Annotated[str | None, of(without=["tiny"])] = None
    """Folder of the target model's checkpoint; default: random weights."""
    models: str | None = None
    """With --engine vllm or sglang: folder with one folder per model (config.json and tokenizer), named as in --pair;
    default: the names on Hugging Face."""
    verdict: Literal["auto", "pinned", "own"] = "auto"
    """What decides acceptance: pinned (the simulated acceptance), own (the models) or auto (own with checkpoints)."""

    @property
    def own_verdict(self) -> bool:
        return self.verdict == "own" or (self.verdict == "auto" and self.target_path is not None)


def refuse(experiment: Experiment, machine: Machine) -> None:
    """A ValueError for whatever a real run cannot do."""
    elsewhere = experiment.hardware.engine in ("vllm", "sglang")
    refusals = _refused_elsewhere if elsewhere else _refused
    if reason := next((reason for given, reason in refusals(experiment, machine) if given), ""):
        raise ValueError(reason)


def _refused(experiment: Experiment, machine: Machine) -> list[tuple[bool, str]]:
    """What our own engine cannot do: whether it is asked for, and why not."""
    server, hardware, one = experiment.server, experiment.hardware, "realrun has one GPU"
    kind, longest, drafter = server.drafted_by, experiment.longest_draft, f"--drafter {server.drafted_by}"
    ahead, head, simulated = policy_of(experiment.arch).drafts_ahead, kind in HEADS, "pdvsim run simulates it"
    tiers = hardware.kv_offload_gb > 0 or hardware.kv_offload_ssd_gb > 0
    lags = experiment.base_arch == "adaptive" or (server.varies_length and not server.draft_range[0])
    untrue = any(getattr(hardware, n) != getattr(Hardware, n) for n in ("contention", "band", "padding", "machine"))
    most, after = MAX_DRAFT - ahead, " after a guess" if ahead else ""
    alone = bool(machine.target_path) and not machine.draft_path and experiment.speculates and kind != "ngram"
    return [
        (machine.models is not None, "--models needs --engine vllm or sglang"),
        (hardware.disaggregate is not None, f"--disaggregate: {one}, which prefills and decodes; {simulated}"),
        (hardware.data_parallel_size > 1, f"--data-parallel-size: {one}, and no data-parallel ranks; {simulated}"),
        (hardware.enable_expert_parallel, f"--enable-expert-parallel: {one}, which has all experts; {simulated}"),
        (tiers, f"--kv-offload-gb, --kv-offload-ssd-gb: realrun keeps its KV cache on the GPU; {simulated}"),
        (hardware.tensor_parallel_size > 1, f"--tensor-parallel-size: {one}; {simulated}"),
        (hardware.replicas > 1, f"--replicas: {one}; {simulated}"),
        (experiment.gpus > 1, f"--place: {one}; {simulated}"),
        (kind in LAYERS, f"{drafter} is for pdvsim run; of parallel drafters realrun serves pard"),
        # of a head the hidden states of the last rounds alone are kept
        (head and bool(machine.target_path), f"{drafter} has random weights in realrun: leave out --target-path"),
        (head and lags, f"{drafter} must run in every step in realrun: no adaptive, and a controller needs "
                        "--min-speculative-tokens 1"),
        (kind == "suffix", f"{drafter} is for pdvsim run: realrun looks drafts up in a request's own tokens, not in "
                           "other answers; it serves ngram"),
        (kind == "pard" and longest > MAX_PARALLEL_DRAFT,
         f"the GPU kernels take {MAX_PARALLEL_DRAFT} draft tokens of --drafter pard at most"),
        (ahead and machine.own_verdict,
         "pdv-ahead needs --verdict pinned: its correct guesses are drawn like the acceptance"),
        (not experiment.scoring.detailed, "--no-detailed is for simulated runs; realrun keeps its records"),
        (untrue, "--contention, --band, --padding and --machine are options of a simulated GPU"),
        (hardware.engine not in (None, "pdvsim"),
         f"realrun starts no {hardware.engine}: it serves with --engine pdvsim, vllm or sglang"),
        (experiment.host != Host(), "host costs are real here: --host, --launch-s and the like are for pdvsim run"),
        (server.priority == "preemptive", "no GPU supports --priority preemptive; use stream, none or partition"),
        (longest > most, f"the GPU kernels take a draft length of at most {most}{after}, got {longest}"),
        (machine.own_verdict and server.confidence_noise is not None,
         "confidence_noise needs --verdict pinned: it is a signal of the drawn acceptance"),
        (machine.own_verdict and experiment.acceptance != Acceptance(),
         "acceptance options need --verdict pinned: here the models decide"),
        (alone, f"{experiment.arch} needs both --draft-path and --target-path"),
        (machine.device == "cpu" and server.priority == "partition",
         "--priority partition needs a GPU; the CPU has no multiprocessors to split"),
    ]  # fmt: skip


def _refused_elsewhere(experiment: Experiment, machine: Machine) -> list[tuple[bool, str]]:
    """What an engine's own server, one on this machine, cannot be measured with."""
    server, hardware = experiment.server, experiment.hardware
    several = experiment.sides is not None or hardware.replicas > 1 or experiment.gpus > hardware.tensor_parallel_size
    looked_up = not machine.own_verdict and experiment.speculates and server.drafted_by in LOOKED_UP
    return [
        (several, f"realrun --engine {hardware.engine} starts one server, without a router"),
        (machine.tiny or bool(machine.target_path),
         "--tiny, --draft-path and --target-path are for realrun's own engine; give --models"),
        (looked_up, f"--drafter {server.drafted_by} finds nothing in random prompts; --engine pdvsim pins it"),
    ]  # fmt: skip


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
