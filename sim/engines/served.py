"""An experiment as engines serve it: colocated batching with its draft lengths, and the checkpoints that they load."""

from __future__ import annotations

import math
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from pdvsim.sim.config import Experiment
from pdvsim.sim.models.names import CHECKPOINTS
from pdvsim.sim.models.presets import FP8, HEADS, PRESETS, bits_of, can_load, unquantised
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.policies import ARCHITECTURES, policy_of


@dataclass(frozen=True)
class Block:
    """A command or a file with a label and notes. Without text there is none, and the notes say why."""

    label: str
    text: str
    notes: tuple[str, ...] = ()


class Served(NamedTuple):
    """Colocated batching as an engine can have it."""

    experiment: Experiment
    ranges: list[list[int]]  # first batch size, last, draft length; one row if it is constant
    k: int  # if only one draft length is possible; 0: no drafter
    single_lost: float = 0.0  # relative loss against varying lengths; nan: not known
    notes: tuple[str, ...] = ()  # how it differs from the experiment
    cache_tokens: int = 0  # room of a server's KV cache; 0: not known

    @property
    def longest(self) -> int:
        return max(k for *_, k in self.ranges)

    @property
    def varies(self) -> bool:
        return len(self.ranges) > 1

    @property
    def pair(self) -> Pair:
        return self.experiment.server.models()


def served_as(experiment: Experiment, fixed: Experiment | None = None) -> Served | str:
    """The command and settings of engines that serve an experiment, or why none can."""
    follows = experiment.speculates and experiment.server.varies_length
    apart = experiment.sides is not None
    if (apart or experiment.arch in ("autoregressive", "colocated")) and not follows:
        return as_served(experiment)
    if apart or experiment.arch == "colocated":
        cannot = f"no engine flag corresponds to --controller {experiment.server.controller}"
    else:
        does = policy_of(experiment.arch).not_in_engines if experiment.arch in ARCHITECTURES else "is a custom policy"
        placed = " with its lanes on several GPUs" if experiment.placement.gpus > 1 else ""
        cannot = f"{experiment.arch} {does}{placed}: no engine flag corresponds to it"
    if fixed is None:
        return cannot
    best = "; this is colocated batching at its best settings, with a fixed draft length"
    return as_served(fixed)._replace(notes=(cannot + best,))


def as_served(experiment: Experiment) -> Served:
    """The draft lengths of an experiment that engines support."""
    server = experiment.server
    if experiment.speculates and server.controller == "table":
        firsts, lengths = zip(*server.draft_table, strict=True)
        lasts = [*(first - 1 for first in firsts[1:]), max(server.max_num_seqs, firsts[-1])]
        ranges = [list(tier) for tier in zip(firsts, lasts, lengths, strict=True)]
        return Served(experiment, ranges, max(1, lengths[0]), math.nan)
    k = server.num_speculative_tokens if experiment.speculates else 0
    return Served(experiment, [[1, server.max_num_seqs, k]], k)


def unknown_head(experiment: Experiment) -> str:
    """Why an engine cannot load the drafting head; empty if it can."""
    kind, (_, _, target) = experiment.server.drafted_by, experiment.server.pair.partition(":")
    if not experiment.has_drafter or kind not in HEADS or can_load(kind, target):
        return ""
    what = {"mtp": "checkpoint with an MTP layer", "eagle3": "EAGLE-3 head", "p-eagle": "P-EAGLE head"}
    near = get_close_matches(target, [name for name in PRESETS if can_load(kind, name)], 1, 0.5)
    nearest = f"; the nearest model that has one is {near[0]}" if near else ""
    return f"no {what.get(kind, 'DFlash head')} of {target} is known{nearest}"


def drafter_checkpoint(experiment: Experiment) -> str:
    """The checkpoint of an experiment's drafter: one trained to draft in parallel if it drafts so, or a placeholder."""
    if unknown_head(experiment):
        return f"YOUR-{experiment.server.drafted_by.upper()}-HEAD"
    draft, _, _ = experiment.server.pair.partition(":")
    return CHECKPOINTS.get(draft) or checkpoint(experiment.server.models().draft)


def checkpoint(model: ModelSpec) -> str:
    """The checkpoint that an engine loads: a Hugging Face name, or the folder of a local model."""
    name = unquantised(model.name)
    if name in CHECKPOINTS:
        return CHECKPOINTS[name]
    path = Path(name)
    return str(path.parent if path.suffix == ".json" else path)


def is_fp8(model: ModelSpec) -> bool:
    """Whether the engine must quantise the checkpoint, which is not so where it comes quantised."""
    return bits_of(model.name) == FP8 and unquantised(model.name) != model.name
