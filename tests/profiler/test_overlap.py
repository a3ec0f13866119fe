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
    each = []
    for _ in range(draw(st.integers(2, 3))):
        at = draw(st.integers(0, 20))
        spans = []
        for length in draw(st.lists(st.integers(1, 9), min_size=1, max_size=8)):
            spans.append((at, at + length))
            at += length
        each.append(spans)
    return each


def oracle(each: list[Intervals], solos: list[int]) -> tuple[int, list[Fraction]]:
    """Time all are busy, and each member's work in it by its time alone, unit by unit."""

    def at(spans: Intervals, t: int) -> tuple[int, int] | None:
        return next((s for s in spans if s[0] <= t < s[1]), None)

    horizon = max(end for spans in each for _, end in spans)
    busy = [t for t in range(horizon) if all(at(spans, t) for spans in each)]
    work = []
    for spans, solo in zip(each, solos, strict=True):
        running = [s for t in busy if (s := at(spans, t)) is not None]
        work.append(sum((Fraction(solo, b - a) for a, b in running), Fraction(0)))
    return len(busy), work


@given(members(), st.lists(st.integers(1, 5), min_size=3, max_size=3))
def test_against_the_oracle(each: list[Intervals], solos: list[int]) -> None:
    solos = solos[: len(each)]
    arrays = [np.array(spans, dtype=np.float64) for spans in each]
    busy, work = oracle(each, solos)
    within = overlap.window(arrays)
    if within is None:
        assert busy == 0
        return
    assert within[1] - within[0] == busy
    for spans, solo, expected in zip(arrays, solos, work, strict=True):
        assert overlap.work_done_s(spans, solo, within) == pytest.approx(float(expected))
