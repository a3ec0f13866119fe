"""What an engine's launches may and may not change: chunking, padding, rolling back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engines import Stage, stage

from pdvsim.realrun.engine.cache import PAGE
from pdvsim.realrun.engine.graphs import PromptChunk
from studies.engine_check import generate, prefill, put

PROMPT = [7, 3, 11, 40, 2, 2, 19, 33, 8, 50, 1, 28, 9]


def cached(lanes: Stage, slot: int, upto: int) -> torch.Tensor:
    pages = lanes.target.engine.cache.data[:, :, lanes.sequences.pages[slot].long()]
    return pages.transpose(3, 2).flatten(3, 4)[:, :, :, :upto].clone()


@settings(max_examples=6, deadline=None)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_chunked_prefill_equals_whole(sizes: list[int]) -> None:
    whole, pieces = stage(), stage()
    put(whole.sequences, 0, PROMPT)
    put(pieces.sequences, 0, PROMPT)
    expected = whole.target.prefill([PromptChunk(0, 0, len(PROMPT), True)]).outcome().first
    start, got = 0, None
    for size in [*sizes, len(PROMPT)]:
        size = min(size, len(PROMPT) - start)
        if size:
            final = start + size == len(PROMPT)
            got = pieces.target.prefill([PromptChunk(0, start, size, final)]).outcome().first
            start += size
    assert got == expected
    torch.testing.assert_close(cached(pieces, 0, 13), cached(whole, 0, 13), rtol=1e-5, atol=1e-5)


def test_rollback_leaves_what_never_drafting_leaves() -> None:
    drafted, plain = stage(), stage()
    for lanes in (drafted, plain):
        put(lanes.sequences, 0, PROMPT)
        prefill(lanes.target, [PROMPT], 64, emit=True)
        prefill(lanes.draft, [PROMPT], 64, emit=False)
    for _ in range(4):  # drafts are made, fed to the target, and all thrown away
        drafted.draft.draft([0], 5).outcome()
        drafted.target.verify([0], 5, pins=[0]).outcome()
        plain.target.verify([0], 0).outcome()
    assert drafted.sequences.get(0) == plain.sequences.get(0)
    known = len(PROMPT) + 4
    torch.testing.assert_close(cached(drafted, 0, known), cached(plain, 0, known), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 5, 7])
def test_padded_rows_change_nothing(rows: int) -> None:
    lanes = stage()
    generate(lanes.target, [PROMPT[i:] for i in range(8)], 3, draft=lanes.draft)
    before = lanes.target.engine.cache.data.clone()
    tokens, length = lanes.sequences.tokens.clone(), lanes.sequences.length.clone()
    lanes.draft.draft(list(range(rows)), 3, width=2).outcome()
    lanes.target.verify(list(range(rows)), 3).outcome()
    after, idle = lanes.target.engine.cache.data, slice(rows, 8)
    theirs = lanes.sequences.pages[idle, : lanes.sequences.capacity // PAGE].flatten().long()
    assert after[:, :, theirs].equal(before[:, :, theirs])
    assert lanes.sequences.tokens[idle].equal(tokens[idle])
    assert lanes.sequences.length[idle].equal(length[idle])
    assert int(lanes.sequences.length[lanes.sequences.scratch]) == 2


def test_results_survive_the_reuse_of_host_buffers() -> None:
    lanes = stage()
    put(lanes.sequences, 0, PROMPT)
    first = lanes.target.prefill([PromptChunk(0, 0, len(PROMPT), True)])
    later = [lanes.target.verify([0], 0) for _ in range(20)]
    tokens = [first.outcome().first[0], *(ticket.outcome().rows[0][0] for ticket in later)]
    assert lanes.sequences.get(0) == PROMPT + tokens
