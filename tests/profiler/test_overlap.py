"""Interval arithmetic against an oracle that walks through every elementary stretch of time."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.profiler import overlap

Intervals = list[tuple[int, int]]


@st.composite
def members(draw: st.DrawFn) -> list[Intervals]:
    """Two or three members, each busy without a pause from some time on."""
    found = []
    for _ in range(draw(st.integers(2, 3))):
        at = draw(st.integers(0, 20))
        spans = []
        for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=8)):
            spans.append((at, at + length))
            at += length
        found.append(spans)
    return found


def oracle(found: list[Intervals], solos: list[int]) -> tuple[int, Fraction, list[list[Fraction]]]:
    """Time all are busy, the work done in it by its time alone, and each member's slowdowns, unit by unit."""

    def at(spans: Intervals, t: int) -> tuple[int, int] | None:
        return next((s for s in spans if s[0] <= t < s[1]), None)

    horizon = max(end for spans in found for _, end in spans)
    busy = [t for t in range(horizon) if all(at(spans, t) for spans in found)]
    work = Fraction(0)
    slowed: list[list[Fraction]] = []
    for spans, solo in zip(found, solos, strict=True):
        running = [s for t in busy if (s := at(spans, t)) is not None]
        work += sum(Fraction(solo, b - a) for a, b in running)
        slowed.append([Fraction(b - a, solo) for a, b in spans if set(range(a, b)) <= set(busy)])
    return len(busy), work, slowed


@given(members(), st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_against_the_oracle(found: list[Intervals], solos: list[int]) -> None:
    solos = solos[: len(found)]
    arrays = [np.array(spans, dtype=np.float64) for spans in found]
    busy, work, slowed = oracle(found, solos)
    within = overlap.window(arrays)
    gain = overlap.span_over_serial(arrays, [float(s) for s in solos])
    if within is None:
        assert busy == 0
        assert gain is None
        return
    assert within[1] - within[0] == busy
    assert gain == pytest.approx(float(busy / work))
    for spans, solo, expected in zip(arrays, solos, slowed, strict=True):
        assert overlap.slowdowns(spans, solo, within).tolist() == pytest.approx([float(s) for s in expected])
