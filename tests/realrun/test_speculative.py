"""Laws of speculative decoding: lossless when greedy, the target's distribution when sampled, whatever the drafter."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from tiny_engines import CPU, Stage, engine, stage, tiny_arch

from pdvsim.realrun.engine.batch import ForwardBatch
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk
from pdvsim.realrun.engine.sampling import Sampler
from pdvsim.realrun.engine.speculative import generate, prefill

kept = cache(stage)  # a stage forgets nothing that matters: every run puts its prompts anew
prompts = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(prompts, st.integers(1, 6), st.integers(1, 4))
def test_greedy_speculation_changes_nothing(batch: list[list[int]], drafts: int, draft_seed: int) -> None:
    lanes = kept(1, draft_seed)
    plain = generate(lanes.target, batch, 14)
    assert generate(lanes.target, batch, 14, draft=lanes.draft, drafts=drafts, chunk_tokens=5) == plain


def test_a_perfect_drafter_is_always_accepted() -> None:
    lanes = stage(1, 1)
    prompt = [5, 9, 2]
    lanes.sequences.put(0, prompt)
    prefill(lanes.target, [prompt], 64, emit=True)
    prefill(lanes.draft, [prompt], 64, emit=False)
    for round in range(5):  # with the catch-up token: without it the drafter would attend to a hole
        drafted = lanes.draft.draft([0], 3, width=1 + (round > 0)).outcome().rows[0]
        assert lanes.target.verify([0], 3).outcome().rows[0][:3] == drafted


@settings(max_examples=10, deadline=None)
@given(prompts)
def test_ragged_batches_equal_one_by_one(batch: list[list[int]]) -> None:
    lanes = kept(1, 2)
    alone = [generate(lanes.target, [prompt], 10, draft=lanes.draft)[0] for prompt in batch]
    assert generate(lanes.target, batch, 10, draft=lanes.draft) == alone


def test_pins_decide_and_the_sequence_stays_consistent() -> None:
    lanes = kept(1, 2)
    batch = [[1, 2, 3], [4, 5], [6]]
    for slot, prompt in enumerate(batch):
        lanes.sequences.put(slot, prompt)
    expected = [p + f for p, f in zip(batch, prefill(lanes.target, batch, 64, emit=True), strict=True)]
    prefill(lanes.draft, batch, 64, emit=False)
    for pins in ([0, 2, 3], [3, 1, 0], [2, 3, 3]):
        drafted = lanes.draft.draft([0, 1, 2], 3, width=2).outcome().rows
        rows = lanes.target.verify([0, 1, 2], 3, pins=pins).outcome().rows
        assert [len(row) - 1 for row in rows] == pins
        assert [row[:-1] for row in rows] == [d[:pin] for d, pin in zip(drafted, pins, strict=True)]
        expected = [e + row for e, row in zip(expected, rows, strict=True)]
    assert [lanes.sequences.get(slot) for slot in range(3)] == expected


def test_limits_cap_rows_with_fewer_drafts() -> None:
    lanes = stage(1, 1)  # every draft would pass
    batch = [[1, 2, 3], [4, 5]]
    for slot, prompt in enumerate(batch):
        lanes.sequences.put(slot, prompt)
    prefill(lanes.target, batch, 64, emit=True)
    prefill(lanes.draft, batch, 64, emit=False)
    lanes.draft.draft([0, 1], 4).outcome()
    assert [len(row) for row in lanes.target.verify([0, 1], 4, limits=[4, 1]).outcome().rows] == [5, 2]


def sampling_stage(vocab: int, temperature: float, rows: int) -> Stage:
    sequences = Sequences(rows, 40, CPU)
    sequences.keep_proposals(2, vocab, torch.float32)
    target = engine(tiny_arch(vocab=vocab), sequences, 1, temperature)
    draft = engine(tiny_arch(1, 2, 1, vocab), sequences, 2, temperature)
    target.row_buckets = draft.row_buckets = (rows,)
    return Stage(GraphLane(target), GraphLane(draft))


def p_value(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = counts.sum() * probabilities
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(chi2.sf(float(statistic), counts.numel() - 1))


def test_sampled_speculation_has_the_targets_distribution() -> None:
    """First two output tokens of a round, counted jointly, against the target's own probabilities."""
    vocab, rows, temperature, rounds = 5, 512, 0.7, 12
    lanes = sampling_stage(vocab, temperature, rows)
    sequences, prompt = lanes.sequences, [3, 1, 4]
    slots = list(range(rows))
    for slot in slots:
        sequences.put(slot, prompt)
    for lane in (lanes.target, lanes.draft):
        for slot in slots:
            lane.prefill([PromptChunk(slot, 0, 2)]).outcome()
    counts = torch.zeros(vocab, vocab)
    lengths = set()
    for _ in range(rounds):
        sequences.length[:rows] = 3  # back to the prompt: rollback is the length
        lanes.draft.draft(slots, 2).outcome()
        rows_out = lanes.target.verify(slots, 2).outcome().rows
        lengths |= {len(row) for row in rows_out}
        short = [slot for slot, row in enumerate(rows_out) if len(row) == 1]
        lanes.target.step(short).outcome()
        for a, b in sequences.tokens[:rows, 3:5].tolist():
            counts[a, b] += 1
    assert lengths == {1, 2, 3}  # none, one and both of the drafts are accepted
    assert p_value(counts.flatten(), target_pairs(lanes, prompt, temperature).flatten()) > 1e-3


def target_pairs(lanes: Stage, prompt: list[int], temperature: float) -> torch.Tensor:
    """P(first, second) after the prompt, from the target's logits alone."""
    engine_, sequences = lanes.target.engine, lanes.sequences
    vocab = engine_.model.arch.spec.vocab
    slots = torch.arange(vocab, dtype=torch.int32)
    empty = torch.zeros(4, dtype=torch.int32)
    bounds = torch.zeros(4 + 1, dtype=torch.int32)
    batch = ForwardBatch(vocab, 2, 0, slots, empty, empty, bounds, sequences.pages, sequences.scratch)
    sequences.tokens[:vocab, 3] = slots
    sequences.length[:vocab] = len(prompt)
    logits = engine_.model.logits(engine_.model.forward(batch, engine_.cache, sequences).stream)
    chances = (logits / temperature).softmax(-1).view(vocab, 2, vocab)
    return chances[0, 0][:, None] * chances[:, 1]


@pytest.mark.parametrize("wrong", ["p_after_rejection", "always_accept"])
def test_the_chi_square_would_catch_a_wrong_rule(wrong: str) -> None:
    """The same test on the exact law of two well-known mistakes rejects them at this sample size."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5])
    keep = torch.minimum(p, q)
    law = q if wrong == "always_accept" else keep + (1 - keep.sum()) * p
    assert p_value(law * 6144, p) < 1e-6
    assert math.isclose(float((keep + (p - q).clamp(min=0)).sum()), 1.0, abs_tol=1e-6)


def test_rejection_rule_on_given_distributions() -> None:
    """One position, distributions far apart: the output follows p, the acceptance rate is sum(min(p, q))."""
    p, q, rows = torch.tensor([0.5, 0.3, 0.15, 0.05]), torch.tensor([0.1, 0.2, 0.3, 0.4]), 40000
    sequences = Sequences(rows, 8, CPU)
    sequences.keep_proposals(1, 4, torch.float32)
    sequences.proposals[:] = q.log()
    generator = torch.Generator().manual_seed(1)
    sequences.tokens[:rows, 2] = torch.multinomial(q.expand(rows, 4), 1, generator=generator)[:, 0].int()
    empty = torch.zeros(4, dtype=torch.int32)
    slots = torch.arange(rows, dtype=torch.int32)
    batch = ForwardBatch(rows, 2, 0, slots, empty, empty, torch.zeros(4 + 1, dtype=torch.int32), sequences.pages, rows)
    sampler = Sampler(1.0, CPU, seed=7)
    limits, pins = torch.ones(rows, dtype=torch.int32), torch.full((rows,), -1, dtype=torch.int32)
    agreed, chosen = sampler.judge(batch, p.log().expand(2 * rows, 4), limits, pins, sequences)
    first = torch.where(agreed > 0, sequences.tokens[:rows, 2], chosen[:, 0])
    assert p_value(torch.bincount(first.long(), minlength=4).float(), p) > 1e-3
    rate = float(torch.minimum(p, q).sum())
    assert abs(float(agreed.float().mean()) - rate) < 4 * math.sqrt(rate * (1 - rate) / rows)
    assert p_value(torch.bincount(chosen[agreed > 0, 1].long(), minlength=4).float(), p) > 1e-3
