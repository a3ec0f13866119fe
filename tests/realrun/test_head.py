"""Heads on a tiny target: what the engine drafts from pages and kept states is what a plain recomputation drafts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_serving import MACHINE, experiment, same_rounds
from tiny_engines import Stage, random_model, stage_of, tiny_arch
from torch import Tensor

from pdvsim.realrun.device import CudaGPU
from pdvsim.realrun.engine import reference_ops
from pdvsim.realrun.engine.batch import Gate
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk, Ticket
from pdvsim.realrun.engine.head import Head, layers_read
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.engine.weights import LayerWeights
from pdvsim.realrun.site import serve
from pdvsim.sim.config import Arch, Hardware
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.models.presets import drafter
from pdvsim.sim.models.specs import HeadKind
from studies.engine_check import prefill, put

KINDS: tuple[HeadKind, ...] = ("eagle3", "mtp")
PROMPTS = ([5, 9, 2, 7, 7, 1, 30, 8, 4], [11, 3, 60, 2, 2, 2, 15], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11])
SHORT = ([5], PROMPTS[1], [1, 2])  # shorter than what a batch of drafts begins with


def lanes(kind: HeadKind, layers: int = 5) -> Stage:
    """A target's lane and a head's, over the same sequences."""
    target = random_model(tiny_arch(layers), 1)
    spec = drafter(kind, target.arch.spec)
    assert spec.is_head
    return stage_of(target, Head.on(target, spec, 2))


class Recorded:
    """Operations that note their names as they are called."""

    def __init__(self, called: list[str]) -> None:
        self.called = called

    def __getattr__(self, name: str) -> object:
        self.called.append(name)
        return getattr(reference_ops, name)


# the plain twin ------------------------------------------------------------------------------------------------------


def block(model: Transformer, layer: LayerWeights, qkv: Tensor, x: Tensor) -> Tensor:
    """A decoder layer over a whole sequence, from its q, k and v on: causal attention, then the gated MLP."""
    spec, count = model.arch.spec, len(x)
    widths = (spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.kv_heads * spec.head_dim)
    q, k, v = (part.unflatten(-1, (-1, spec.head_dim)) for part in qkv.split(widths, dim=-1))
    at = torch.arange(count)
    q, k = (reference_ops.rotate(part, at, model.cos, model.sin) for part in (q, k))
    k, v = (part.repeat_interleave(spec.heads // spec.kv_heads, dim=1) for part in (k, v))
    attended = F.scaled_dot_product_attention(*(part.transpose(0, 1) for part in (q, k, v)), is_causal=True)
    x = x + F.linear(attended.transpose(0, 1).flatten(1), layer.output)
    gate = Gate(model.arch.activation, model.arch.gate_block)
    return x + F.linear(
        reference_ops.gated(F.linear(reference_ops.unit_norm(x, 1e-5), layer.gate_up), gate), layer.down
    )


def hidden_states(target: Transformer, tokens: Sequence[int]) -> Tensor:
    """What the target's layers pass on, of every token."""
    x, states = target.weights.embedding[torch.tensor(tokens)], []
    for at, layer in enumerate(target.weights.layers):
        x = block(target, layer, F.linear(reference_ops.unit_norm(x, 1e-5), layer.qkv), x)
        states += [x] * target.passes_on.count(at)
    return torch.cat(states, dim=1)


def plainly(head: Head, target: Transformer, tokens: Sequence[int], steps: int) -> list[int]:
    """Drafts after `tokens`, all recomputed for each: place t has token t + 1 and the state at t."""
    w, given = head.weights, list(tokens)
    states = hidden_states(target, tokens)[:-1]
    states = states if w.fused is None else F.linear(states, w.fused)
    drafts: list[int] = []
    for _ in range(steps):
        embedded = w.embedding[torch.tensor(given[1:])]
        both = torch.cat((reference_ops.unit_norm(embedded, 1e-5), reference_ops.unit_norm(states, 1e-5)), dim=1)
        if w.joined is None:
            x = block(head, w.layers[0], F.linear(both, w.layers[0].qkv), states)
        else:
            x = F.linear(both, w.joined)
            x = block(head, w.layers[0], F.linear(reference_ops.unit_norm(x, 1e-5), w.layers[0].qkv), x)
        drafts.append(int(F.linear(reference_ops.unit_norm(x[-1:], 1e-5), w.head).argmax()))
        given.append(drafts[-1])
        states = torch.cat((states, x[-1:]))
    return drafts


# the engine against it -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("chunk", "prompts"), [(4, PROMPTS), (64, SHORT)])
def test_drafts_are_those_of_a_plain_recomputation(kind: HeadKind, chunk: int, prompts: tuple[list[int], ...]) -> None:
    """Rows that gained unlike numbers of tokens are drafted for in one batch, over several rounds."""
    target, draft = lanes(kind)
    sequences, head = target.engine.sequences, draft.engine.model
    assert isinstance(head, Head)
    for slot, prompt in enumerate(prompts):
        put(sequences, slot, prompt)
    prefill(target, prompts, chunk, emit=True, head=draft)
    rows, width = [0, 1, 2], 1
    for pins in ([0, 3, 1], [2, 0, 0], [3, 3, 3], [1, 0, 2]):
        expected = [plainly(head, target.engine.model, sequences.get(slot), 3) for slot in rows]
        assert draft.draft(rows, 3, width=width).outcome().rows == expected
        target.verify(rows, 3, pins=pins).outcome()
        width = 1 + max(pins)


def test_eagle3_reads_a_low_a_middle_and_a_high_layer() -> None:
    spec = drafter("eagle3", tiny_arch(32).spec)
    assert spec.is_head
    assert layers_read(spec, 32) == (2, 16, 29)
    assert layers_read(spec, 2) == (0, 1, 1)


# served --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compare every served draft with a plain recomputation; return the rows of each."""
    launched, rows = CudaGPU._draft, []

    def watched(
        self: CudaGPU, launch: Launch, lane: GraphLane, slots: list[int], chunks: list[PromptChunk]
    ) -> list[Ticket]:
        head = lane.engine.model
        target = next(x for (_, role), x in self.lanes.items() if role == "target").engine.model
        assert isinstance(head, Head)
        expected = [plainly(head, target, lane.engine.sequences.get(slot), launch.steps) for slot in slots]
        tickets = launched(self, launch, lane, slots, chunks)
        if slots:
            assert tickets[-1].outcome().rows == expected
            rows.append(len(slots))
        return tickets

    monkeypatch.setattr(CudaGPU, "_draft", watched)
    return rows


@pytest.mark.parametrize(
    ("arch", "kind"), [("baseline", "eagle3"), ("colocated", "eagle3"), ("pdv-unified", "eagle3"), ("pdv", "mtp")]
)
def test_every_served_draft_is_that_of_a_plain_recomputation(arch: Arch, kind: HeadKind, checked: list[int]) -> None:
    """Whatever order a policy launches prompts, drafts and verifies in, a head finds the states it needs."""
    real, _ = same_rounds(experiment(arch, drafter=kind))
    assert sum(checked) == real.requests["drafts"].sum() > 20
    assert real.experiment.server.pair == f"{kind}-tiny:tiny"


@pytest.mark.parametrize("arch", ["colocated", "pdv"])
def test_a_head_reads_the_last_block_of_a_hit_again(arch: Arch, checked: list[int]) -> None:
    """What it keeps of a position is made of the next token, which the next turn may have another of."""
    chosen = experiment(arch, drafter="eagle3")
    talks = replace(chosen.traffic, num_turns=3, input_len=40, output_len=12, random_range_ratio=0.5)
    result = serve(replace(chosen, traffic=talks), MACHINE)
    assert sum(checked) == result.requests["drafts"].sum() > 20
    assert result.requests["num_cached_tokens"].sum() > 200


def test_preempted_requests_are_read_again_by_the_head(checked: list[int]) -> None:
    chosen = experiment("colocated", drafter="eagle3")
    traffic = replace(chosen.traffic, request_rate=math.inf, input_len=40, output_len=28, random_range_ratio=0.5)
    result = serve(replace(chosen, traffic=traffic, hardware=Hardware(kv_capacity_tokens=128)), MACHINE)
    assert result.requests["preemptions"].sum() > 0
    assert sum(checked) == result.requests["drafts"].sum()
    assert result.deliveries["tokens"].sum() == result.requests["output_tokens"].sum()


def test_what_a_head_cannot_do_here_is_refused() -> None:
    for chosen, message in (
        (experiment("pdv", drafter="eagle3", controller="goodput"), "--min-speculative-tokens 1"),
        (experiment("adaptive", drafter="eagle3"), "no adaptive"),
    ):
        with pytest.raises(ValueError, match=message):
            serve(chosen, MACHINE)


@pytest.mark.usefixtures("quick_interpreter")
def test_the_gpus_kernels_draft_what_the_plain_recomputation_does() -> None:
    """In Triton's interpreter: rows that begin some tokens back, at places one before their tokens', and prompts."""
    gpu = pytest.importorskip("pdvsim.realrun.engine.gpu")
    target, draft = lanes("eagle3", layers=1)
    sequences, head = target.engine.sequences, draft.engine.model
    assert isinstance(head, Head)
    target.engine.model.ops = head.ops = gpu
    prompts = (PROMPTS[0][:5], [11])
    for slot, prompt in enumerate(prompts):
        put(sequences, slot, prompt)
    prefill(target, prompts, 4, emit=True, head=draft)
    for pins, width in (([2, 0], 1), ([0, 1], 3)):
        expected = [plainly(head, target.engine.model, sequences.get(slot), 2) for slot in (0, 1)]
        assert draft.draft([0, 1], 2, width=width).outcome().rows == expected
        target.verify([0, 1], 2, pins=pins).outcome()


@pytest.mark.parametrize("kind", KINDS)
def test_attention_is_not_the_kernel_of_its_plan(kind: HeadKind) -> None:
    # on a GPU it starts, and reads the plan, while the kernel ahead of it still runs
    for lane in lanes(kind):
        called: list[str] = []
        lane.engine.model.ops = Recorded(called)  # type: ignore[assignment]
        put(lane.engine.sequences, 0, PROMPTS[0], settled=True)
        lane.verify([0], 0)
        lane.draft([0], 3, width=2)
        ahead = [before for before, name in itertools.pairwise(called) if name == "decode_attention"]
        assert ahead
        assert "plan" not in ahead
