"""Laws of speculative decoding: lossless, whatever the drafter."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import stage

from studies.engine_check import generate, prefill

kept = cache(stage)  # a stage forgets nothing that matters: every run puts its prompts anew
prompts = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=6, deadline=None)
@given(prompts, st.integers(1, 6), st.integers(1, 4))
def test_greedy_speculation_changes_nothing(batch: list[list[int]], drafts: int, draft_seed: int) -> None:
    lanes = kept(1, draft_seed)
    plain = generate(lanes.target, batch, 14)
    assert generate(lanes.target, batch, 14, draft=lanes.draft, drafts=drafts, chunk_tokens=5) == plain


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
