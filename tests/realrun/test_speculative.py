"""Laws of speculative decoding: lossless, whatever the drafter."""

from __future__ import annotations

from functools import cache

from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import stage

from studies.engine_check import generate

kept = cache(stage)  # a stage forgets nothing that matters: every run puts its prompts anew
prompts = st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=12), min_size=1, max_size=4)


@settings(max_examples=6, deadline=None)
@given(prompts, st.integers(1, 6), st.integers(1, 4))
def test_greedy_speculation_changes_nothing(batch: list[list[int]], drafts: int, draft_seed: int) -> None:
    lanes = kept(1, draft_seed)
    plain = generate(lanes.target, batch, 14)
    assert generate(lanes.target, batch, 14, draft=lanes.draft, drafts=drafts, chunk_tokens=5) == plain
