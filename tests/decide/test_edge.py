"""The search for an edge: it ends next to it, and takes few runs where margins tell the distance."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.bench.stats import interval
from pdvsim.decide.edge import Bracketing, Edge, Ends, find_edge, first_where, lockstep

LIMITS = Ends(-300, 300)


def drive(search: Bracketing, root: float, slope: float, bend: float = 1.0) -> tuple[Edge, list[int]]:
    """A search with margins that fall, `bend` times as steeply beyond the edge; and the places it asked for."""
    asked: list[int] = []

    def judge(places: dict[str, int]) -> list[float]:
        [place] = places.values()
        asked.append(place)
        return [slope * (root - place) * (bend if place > root else 1.0)]

    edges: dict[str, Edge] = {}
    lockstep({"one": search}, judge, edges)
    return edges["one"], asked


@given(
    edge=st.integers(-400, 400),
    start=st.integers(-299, 299),
    stride=st.integers(1, 30),
    far=st.sampled_from([0, 1, 1e9]),
    slope=st.sampled_from([0.01, 1.0, 50.0]),
    guess=st.sampled_from([0.0, 0.1, 3.0]),
    bend=st.sampled_from([0.1, 1, 20]),
)
def test_it_ends_next_to_the_edge(
    edge: int, start: int, stride: int, far: float, slope: float, guess: float, bend: float
) -> None:
    """From anywhere, whatever the margins' unit and shape, and the first guess of their slope."""
    found, asked = drive(find_edge(start, LIMITS, stride, slope=guess, far=far), edge + 0.5, slope, bend)
    low = min(max(edge, LIMITS.low), LIMITS.high - 1)
    assert (found.low, found.high) == (low, low + 1)
    assert found.low <= found.root <= found.high
    assert len(asked) == len(set(asked))
    assert all(LIMITS.low < place < LIMITS.high for place in asked)
    assert len(asked) <= 3 * math.ceil(math.log2(600)) + 2


@given(root=st.floats(-200, 200), start=st.integers(-200, 200), slope=st.sampled_from([0.02, 1.0]))
def test_a_straight_margin_takes_three_places(root: float, start: int, slope: float) -> None:
    """Two give the slope, the third is next to the edge; with a known slope the first one may be enough."""
    found, asked = drive(find_edge(start, LIMITS, 4, slope=slope, trust=1.5), root, slope)
    assert found.root == pytest.approx(root, abs=1e-6)
    assert len(asked) <= 2 + math.ceil(math.log2(1 + abs(root - start) / 4))
    near = find_edge(round(root), LIMITS, slope=slope, trust=1.5, known=True)
    assert drive(near, root, slope)[1] == [round(root)]


def test_seeds_give_an_interval_that_holds_the_root() -> None:
    """Each seed's margins are straight with an offset of its own; the later ones use the slope of the first."""
    rng, covered, runs = np.random.default_rng(1), 0, []
    for _ in range(200):
        roots: list[float] = []
        slope = 0.0
        for offset in rng.normal(0.0, 2.0, 5):
            start, known = (roots[0], True) if roots else (40.0, False)
            search = find_edge(round(start), Ends(-300, 300), 6, slope=slope or 0.04, trust=1.5, known=known)
            found, asked = drive(search, 17.3 + offset, 0.07, bend=1.5)
            roots.append(found.root)
            slope = found.slope
            runs.append(len(asked))
        low, high = interval(roots).ends
        covered += low <= 17.3 <= high
    assert covered >= 180
    assert np.mean(runs) < 3.5


@given(places=st.integers(0, 70), edge=st.integers(-5, 75))
def test_the_first_place_is_that_of_a_scan(places: int, edge: int) -> None:
    assert first_where(range(places), lambda place: place >= edge) == next(
        (place for place in range(places) if place >= edge), None
    )
