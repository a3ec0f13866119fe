"""The one search for an edge: what it ends with, from anywhere, and how much it asks."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from pdvsim.decide.bracket import Bracketing, Ends, find_edge, first_where, lockstep


def drive(steps: Bracketing, edge: float, scale: float) -> tuple[Ends, list[int]]:
    """A search for an edge, with margins that are its distances times a factor."""
    asked: list[int] = []

    def judge(places: dict[str, int]) -> list[float]:
        asked.extend(places.values())
        return [scale * (edge - place) for place in places.values()]

    edges: dict[str, Ends] = {}
    lockstep({"one": steps}, judge, edges)
    return edges["one"], asked


@given(
    edge=st.integers(-400, 400), start=st.integers(-299, 299), stride=st.integers(1, 30), guesses=st.integers(0, 4),
    scale=st.sampled_from([0.01, 1.0, 50.0]),
)  # fmt: skip
def test_it_ends_next_to_the_edge(edge: int, start: int, stride: int, guesses: int, scale: float) -> None:
    limits = Ends(-300, 300)
    ends, asked = drive(find_edge(start, limits, stride, guesses=guesses), edge + 0.5, scale)
    low = min(max(edge, limits.low), limits.high - 1)
    assert ends == (low, low + 1)
    assert len(asked) == len(set(asked))
    assert all(limits.low < place < limits.high for place in asked)
    assert len(asked) <= 2 * math.ceil(math.log2(600)) + guesses + 1


@given(edge=st.integers(1, 63), start=st.integers(1, 63))
def test_exact_distances_take_at_most_three_more_places(edge: int, start: int) -> None:
    """The place that the first margin points to, and those next to it."""
    ends, asked = drive(find_edge(start, Ends(0, 64), 64, guesses=3), edge + 0.5, 1.0)
    assert ends == (edge, edge + 1)
    assert len(asked) <= 4


def test_searches_that_are_cut_short_are_not_found() -> None:
    edges: dict[int, Ends] = {}
    searches = {edge: find_edge(1, Ends(0, 1000)) for edge in (1, 700)}
    lockstep(searches, lambda asked: [edge + 0.5 - place for edge, place in asked.items()], edges, rounds=3)
    assert edges == {1: (1, 2)}


@given(places=st.integers(0, 70), edge=st.integers(-5, 75))
def test_the_first_place_is_that_of_a_scan(places: int, edge: int) -> None:
    assert first_where(range(places), lambda place: place >= edge) == next(
        (place for place in range(places) if place >= edge), None
    )
