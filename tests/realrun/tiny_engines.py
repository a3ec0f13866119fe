"""Tiny engines for the tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from pdvsim.realrun.engine.arch import Llama3Rope, ModelArchitecture
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane
from pdvsim.realrun.engine.head import Head, states_width
from pdvsim.realrun.engine.model import Transformer
from pdvsim.sim.models.specs import ModelSpec

CPU = torch.device("cpu")
CAPACITY = 128
SLOTS_OF_FOUR: dict[str, Any] = {  # few slots, and prompts of several chunks
    "num_speculative_tokens": 3, "max_num_seqs": 4, "max_num_batched_tokens": 32, "num_workers": 2,
    "hybrid_threshold": 2,
}  # fmt: skip


def tiny_arch(
    layers: int = 2, heads: int = 4, kv_heads: int = 2, vocab: int = 61, *, scaled: bool = False, hidden: int = 32
) -> ModelArchitecture:
    spec = ModelSpec("tiny", "llama", layers, hidden, 48, heads, kv_heads, 16, vocab)
    return ModelArchitecture(spec, 1e4, 1e-5, rope_scaling=Llama3Rope(8.0, 1.0, 4.0, 16) if scaled else None)


def random_model(arch: ModelArchitecture, seed: int) -> Transformer:
    return Transformer.random(arch, CAPACITY, CPU, torch.float32, seed)


class Stage(NamedTuple):
    """A target lane and a draft lane over the same sequences."""

    target: GraphLane
    draft: GraphLane

    @property
    def sequences(self) -> Sequences:
        return self.target.engine.sequences


def stage_of(target: Transformer, drafter: Transformer, slots: int = 8) -> Stage:
    sequences = Sequences(slots, CAPACITY, CPU)
    if isinstance(drafter, Head):
        sequences.keep_states(states_width(drafter.arch), 64, torch.float32)
    sizes = {"row_buckets": (1, 2, 4, 8), "chunk_buckets": (4, 8, 16, 32, 64)}
    return Stage(*(GraphLane(Engine(model, sequences, **sizes)) for model in (target, drafter)))


def stage(target_seed: int = 1, draft_seed: int = 2) -> Stage:
    drafter = tiny_arch() if draft_seed == target_seed else tiny_arch(1, 2, 1)
    return stage_of(random_model(tiny_arch(), target_seed), random_model(drafter, draft_seed))
