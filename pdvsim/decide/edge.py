"""The search for the place where an answer changes, shared by all decisions that look for one.

A search is a generator over the places of a grid: it yields places and is sent the margin of each, which is positive
below the edge. Margins fall with the place. So each gives not only a side but, over the slope, a distance: the search
goes where two margins, or one and the slope of similar searches, put the edge. It widens from its start until there is
a place on either side, then narrows until these are adjacent, or until a margin puts the edge within `trust` places.
Margins of `far` or more, positive or negative, give the side only. So do all where `far` is 0.

A verdict that costs nothing, as by formula, is bisected over all places (`first_where`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

Seeker = TypeVar("Seeker")
Tried = TypeVar("Tried")
Margin = TypeVar("Margin")
Found = TypeVar("Found")

SPREAD = 8  # places between which a slope is taken
NARROWED = 0.6  # a step that leaves more than this of the bracket is followed by one into its middle


class Ends(NamedTuple):
    """The highest place below the edge and the lowest above it, of those that are known."""

    low: int
    high: int


class Edge(NamedTuple):
    """Where the margin passes zero, between two places; beyond the limits, `low` or `high` is one of them."""

    low: int
    high: int
    root: float  # interpolated; the lower place where margins give sides only
    slope: float  # fall of the margin per place; 0: unknown
    tried: dict[int, float]  # margins by place


Bracketing = Generator[int, float, Edge]


def find_edge(
    start: int,
    limits: Ends,
    stride: float = 1,
    growth: float = 2,
    slope: float = 0.0,
    far: float = math.inf,
    trust: float = 0.0,
    known: bool = False,
) -> Bracketing:
    """Search between the limits, which are not tried; one that is returned means that the edge is beyond it.

    The first step is at most `stride`, each next one `growth` times as long. `slope` is a first guess of the margin's
    fall per place; if it is `known`, as from the same search on other seeds, the first margin may end the search.
    """
    (low, high), at, halve = limits, start, False
    margins: dict[int, float] = {}
    while high - low > 1:
        margins[at] = margin = yield at
        before = high - low
        low, high = (at, high) if margin > 0 else (low, at)
        if own := _slope(margins, at, far):
            slope, known = own, True
        away = margin / slope if slope and abs(margin) < far else math.copysign(math.inf, margin)
        if known and abs(away) <= trust:
            return Edge(low, high, at + away, slope, margins)
        if low in margins and high in margins:
            halve = not halve and high - low > NARROWED * before
            root = at + away
            step = round(root) if low < root < high and not halve else (low + high) // 2
            at = min(max(step, low + 1), high - 1)
        else:
            jump = math.ceil(min(abs(away) + 1, stride))
            at, stride = at + (jump if margin > 0 else -jump), growth * max(stride, jump)
            at = min(max(at, low + 1), high - 1)
    between = [margins.get(low, math.inf), -margins.get(high, -math.inf)]
    if max(between) < far:
        root = low + (high - low) * between[0] / sum(between)
        return Edge(low, high, root, sum(between) / (high - low), margins)
    return Edge(low, high, low, slope, margins)


def _slope(margins: Mapping[int, float], at: int, far: float) -> float:
    """Fall per place between the last place and the nearest other; 0 if they are too far apart, or margins rise."""
    near = [place for place, margin in margins.items() if abs(margin) < far and 0 < abs(place - at) <= SPREAD]
    if not near or abs(margins[at]) >= far:
        return 0.0
    other = min(near, key=lambda place: abs(place - at))
    return max(0.0, (margins[other] - margins[at]) / (at - other))


def lockstep(
    searches: Mapping[Seeker, Generator[Tried, Margin, Found]],
    judge: Callable[[dict[Seeker, Tried]], Iterable[Margin]],
    ends: dict[Seeker, Found],
) -> None:
    """Advance all searches together, filling `ends` as each finishes; `judge` gets one place of each search at a time.

    So every step is one batch of runs.
    """
    asked = {key: next(steps) for key, steps in searches.items()}
    while asked:
        for key, verdict in list(zip(asked, judge(dict(asked)), strict=True)):
            try:
                asked[key] = searches[key].send(verdict)
            except StopIteration as end:
                ends[key] = end.value
                del asked[key]


def edge_of(search: Generator[Tried, Margin, Found], judge: Callable[[Tried], Margin]) -> Found:
    """The end of one search."""
    ends: dict[str, Found] = {}
    lockstep({"one": search}, lambda asked: [judge(asked["one"])], ends)
    return ends["one"]


def first_where(places: Sequence[Tried], holds: Callable[[Tried], bool]) -> Tried | None:
    """The first place at which a verdict holds that changes once; None if it holds at none."""
    at = bisect_left(places, x=True, key=holds)
    return places[at] if at < len(places) else None
