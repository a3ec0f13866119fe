"""The search for the place on a grid where a verdict changes, shared by all decisions that look for one.

A search is a generator: it yields places and is sent the margin of each, which is positive below the edge. It widens
from its start until there is a place on either side of the edge, then narrows. Margins that estimate the distance to
the edge, in places, save runs; they do not change what adjacent places the search ends with, if the verdict changes
once. Verdicts that only give the side are sent as plus and minus 1, without `guesses`.

A verdict that costs nothing, as by formula, is bisected over all places (`first_where`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import count
from typing import NamedTuple, TypeVar

Seeker = TypeVar("Seeker")
Tried = TypeVar("Tried")
Margin = TypeVar("Margin")
Found = TypeVar("Found")


class Ends(NamedTuple):
    """The highest place below the edge and the lowest above it, of those that are known."""

    low: int
    high: int


Bracketing = Generator[int, float, Ends]


def find_edge(start: int, limits: Ends, stride: int = 1, growth: int = 2, guesses: int = 0) -> Bracketing:
    """Search between the limits, which are not tried; one that is returned means that the edge is beyond it.

    The first step is at most `stride`, each next one `growth` times as long. `guesses` is the number of margins that
    are trusted as distances, while widening and while narrowing.
    """
    (low, high), at = limits, start
    margins: dict[int, float] = {}
    narrowing = guesses
    while high - low > 1:
        margins[at] = yield at
        low, high = (at, high) if margins[at] > 0 else (low, at)
        if low in margins and high in margins:
            share = margins[low] / (margins[low] - margins[high]) if narrowing else 0.5
            narrowing -= narrowing > 0
            at = low + int(share * (high - low))
        else:
            jump = min(math.ceil(abs(margins[at])), stride) if len(margins) <= guesses else stride
            at, stride = at + (jump if margins[at] > 0 else -jump), growth * stride
        at = min(max(at, low + 1), high - 1)
    return Ends(low, high)


def lockstep(
    searches: Mapping[Seeker, Generator[Tried, Margin, Found]],
    judge: Callable[[dict[Seeker, Tried]], Iterable[Margin]],
    ends: dict[Seeker, Found],
    rounds: int | None = None,
) -> None:
    """Advance all searches together, filling `ends` as each finishes; `judge` gets one place of each search at a time.

    After that number of `rounds` the others are left unfinished.
    """
    asked = {key: next(steps) for key, steps in searches.items()}
    for _ in count() if rounds is None else range(rounds):
        if not asked:
            return
        for key, verdict in list(zip(asked, judge(dict(asked)), strict=True)):
            try:
                asked[key] = searches[key].send(verdict)
            except StopIteration as end:
                ends[key] = end.value
                del asked[key]


def first_where(places: Sequence[Tried], holds: Callable[[Tried], bool]) -> Tried | None:
    """The first place at which a verdict holds that changes once; None if it holds at none."""
    at = bisect_left(places, x=True, key=holds)
    return places[at] if at < len(places) else None
