"""N-gram drafts: a search of bytes finds what a plain one over tokens finds."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.realrun.ngram import LEAST, MOST, History


def plain(tokens: Sequence[int], k: int) -> list[int]:
    """Longest agreement first, then the earliest place, token by token."""
    for size in range(MOST, LEAST - 1, -1):
        for at in range(len(tokens) - size):
            if list(tokens[at : at + size]) == list(tokens[-size:]):
                return list(tokens[at + size : at + size + k])
    return []


def test_the_example_of_vllm() -> None:
    """[2, 3] would match with two tokens; of three there is no earlier place."""
    assert History([1, 2, 3, 4, 2, 3]).drafts(4) == []
    assert History([1, 2, 3, 4, 9, 1, 2, 3]).drafts(4) == [4, 9, 1, 2]


def test_the_longest_agreement_goes_before_the_earliest() -> None:
    assert History([2, 3, 4, 7, 1, 2, 3, 4, 8, 1, 2, 3, 4]).drafts(1) == [8]
    assert History([2, 3, 4, 7, 2, 3, 4, 8, 2, 3, 4]).drafts(1) == [7]


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 8))
def test_it_finds_what_a_plain_search_finds(tokens: list[int], k: int) -> None:
    assert History(tokens).drafts(k) == plain(tokens, k)


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 16777216, 257]), max_size=40))
def test_bytes_that_match_across_tokens_are_no_match(tokens: list[int]) -> None:
    assert History(tokens).drafts(4) == plain(tokens, 4)


@pytest.mark.parametrize("cut", [0, 3, 7])
def test_tokens_may_come_in_parts(cut: int) -> None:
    tokens = [5, 6, 7, 8, 5, 6, 7]
    history = History(tokens[:cut])
    history.extend(tokens[cut:])
    assert len(history) == 7
    assert history.drafts(2) == [8, 5]
