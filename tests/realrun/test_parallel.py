"""A draft model that drafts in parallel, on a tiny target: one forward over mask tokens, and the target's own text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_head import PROMPTS, block
from tiny_engines import CPU, SLOTS_OF_FOUR, tiny_arch

from pdvsim.realrun.engine import reference_ops
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.machine import Machine
from pdvsim.realrun.site import serve
from pdvsim.sim.config import Arch, Experiment, Server, Traffic
from pdvsim.sim.models.presets import in_parallel
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from studies.engine_check import prefill, put


def lanes(slots: int = 4, capacity: int = 128) -> tuple[GraphLane, GraphLane]:
    """A target's lane and that of a model that drafts in parallel, over the same sequences."""
    sequences = Sequences(slots, capacity, CPU)
    target = Transformer.random(tiny_arch(3), capacity, CPU, torch.float32, 1)
    arch = tiny_arch(2)
    drafter = Transformer.random(replace(arch, spec=in_parallel(arch.spec)), capacity, CPU, torch.float32, 2)
    sizes = {"row_buckets": (1, 2, 4), "chunk_buckets": (4, 8, 16, 32, 64)}
    return GraphLane(Engine(target, sequences, **sizes)), GraphLane(Engine(drafter, sequences, **sizes))


def plainly(model: Transformer, tokens: list[int], steps: int) -> list[int]:
    """What follows the last token and each of the mask tokens after it, in one pass over the whole sequence."""
    masked = tokens + [model.arch.spec.vocab - 1] * (steps - 1)
    x = model.weights.embedding[torch.tensor(masked)]
    for layer in model.weights.layers:
        x = block(model, layer, F.linear(reference_ops.unit_norm(x, 1e-5), layer.qkv), x)
    ids: list[int] = F.linear(reference_ops.unit_norm(x[-steps:], 1e-5), model.weights.head).argmax(dim=-1).tolist()
    return ids


@pytest.mark.parametrize("steps", [1, 4, 8])
def test_drafts_are_those_of_a_plain_recomputation(steps: int) -> None:
    """Over several rounds, in which rows gain unlike numbers of tokens and what was accepted is read again."""
    target, draft = lanes()
    sequences = target.engine.sequences
    for slot, prompt in enumerate(PROMPTS):
        put(sequences, slot, prompt)
    texts = [[*prompt, first] for prompt, [first] in zip(PROMPTS, prefill(target, PROMPTS, 64, emit=True), strict=True)]
    prefill(draft, PROMPTS, 64, emit=False)
    slots, unread = list(range(len(PROMPTS))), [0] * len(PROMPTS)
    for pins in ([0, 1, steps], [steps, 0, 1], [1, 1, 0]):
        drafts = draft.draft(slots, steps, width=1 + max(unread)).outcome().rows
        assert drafts == [plainly(draft.engine.model, text, steps) for text in texts]
        rows = target.verify(slots, steps, pins=[min(pin, steps) for pin in pins]).outcome().rows
        for text, new in zip(texts, rows, strict=True):
            text += new
        unread = [len(new) - 1 for new in rows]


@pytest.mark.parametrize("arch", ["colocated", "pdv"])
def test_an_experiment_that_is_served_and_simulated_has_the_same_rounds(arch: Arch) -> None:
    traffic = Traffic("random", num_prompts=8, request_rate=200.0, input_len=40, output_len=12, random_range_ratio=0.5)
    chosen = applicable(Experiment(arch, traffic, server=Server(**SLOTS_OF_FOUR | {"drafter": "pard"})))
    real, simulated = serve(chosen, Machine(device="cpu", tiny=True)), simulate(chosen)
    for name in ("rounds", "drafted", "accepted"):
        assert real.requests[name].tolist() == simulated.requests[name].tolist()
    assert real.experiment.server.pair == "pard-tiny-draft:tiny"
