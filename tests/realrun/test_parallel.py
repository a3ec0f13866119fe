"""A draft model that drafts in parallel, on a tiny target: one forward over mask tokens, and the target's own text."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_head import PROMPTS, block
from test_serving import experiment, same_rounds
from tiny_engines import Stage, random_model, stage_of, tiny_arch

from pdvsim.realrun.engine import reference_ops
from pdvsim.realrun.engine.model import Transformer
from pdvsim.sim.config import Arch
from pdvsim.sim.models.presets import in_parallel
from studies.engine_check import prefill, put


def lanes() -> Stage:
    """A target's lane and that of a model that drafts in parallel, over the same sequences."""
    arch = tiny_arch()
    return stage_of(random_model(tiny_arch(3), 1), random_model(replace(arch, spec=in_parallel(arch.spec)), 2))


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
    assert same_rounds(experiment(arch, drafter="pard"))[0].experiment.server.pair == "pard-tiny-draft:tiny"
