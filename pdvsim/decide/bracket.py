"""Search for the highest rate that holds, as a generator: it yields rates and is sent the verdict on each.

The next rate is guessed from the head-room at the rates tested. The guess affects the number of runs, not the result.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

REACH = 500.0  # search range, as a factor from the starting rate; below it requests hardly overlap
STEEPNESS = 2.0  # head-room falls with about this power of the rate; used until two rates are known
FAR_OFF = 0.3  # beyond this logarithm a head-room tells only the direction
LEAST_STEEP = 0.5
NEAR = 0.1  # largest logarithm of a rate over the held one at which head-rooms are used for the slope
GUESSES = 3  # rates guessed from head-rooms before and within the bracket; then fixed steps and bisection

Bisection = Generator[float, "Held", "Bracket"]


@dataclass(frozen=True)
class Bracket:
    """The highest rate that held (0: none did) and the lowest above it that did not (inf: all did)."""

    held: float
    failed: float
    rooms: tuple[tuple[float, float], ...] = field(default=(), compare=False)  # logarithms of rates and head-rooms


class Held(NamedTuple):
    """Verdict on a run at one rate."""

    holds: bool
    room: float  # smallest over the levels; the rate that just holds is guessed from it


def search(start: float, step: float, tolerance: float) -> Bisection:
    """Yields rates and is sent the verdict on each; returns the highest that holds and the next, which does not.

    Rates are powers of 1 + `tolerance`. So the result does not depend on the starting rate, and searches that need the
    same run share it. The first step is at most `step`.
    """
    grid = math.log1p(tolerance)
    first = at = round(math.log(start) / grid)
    stride = max(1, round(math.log(step) / grid))
    rooms: dict[int, float] = {}
    held: int | None = None
    failed: int | None = None
    guesses = GUESSES
    while True:
        verdict = yield math.exp(at * grid)
        rooms[at] = _side(verdict)
        held, failed = (at, failed) if verdict.holds else (held, at)
        if held is not None and failed is not None:
            if failed - held == 1:
                break
            share = rooms[held] / (rooms[held] - rooms[failed]) if guesses else 0.5
            at = min(max(held + int(share * (failed - held)), held + 1), failed - 1)
            guesses -= guesses > 0
        elif abs(at - first) * grid > math.log(REACH):
            break
        else:
            guess = math.ceil(abs(rooms[at]) / (STEEPNESS * grid))
            jump = min(guess, stride) if len(rooms) <= GUESSES else stride
            at, stride = at + (jump if verdict.holds else -jump), 2 * stride
    return Bracket(
        0.0 if held is None else math.exp(held * grid),
        math.inf if failed is None else math.exp(failed * grid),
        tuple((at * grid, room) for at, room in rooms.items() if held is not None and abs(at - held) * grid < NEAR),
    )


def steepness(brackets: Iterable[Bracket]) -> float:
    """The power of the rate with which head-room falls near the held rate, from the searches of several seeds.

    A relative error of a latency changes the rate by that error divided by this power. To allow for noise it is the
    slope minus two standard errors, at least `LEAST_STEEP`; 1 with too few runs.
    """
    x, y, seeds = list[float](), list[float](), 0
    for bracket in brackets:
        if len(bracket.rooms) > 1:
            means = [sum(part) / len(bracket.rooms) for part in zip(*bracket.rooms, strict=True)]
            x += [rate - means[0] for rate, _ in bracket.rooms]
            y += [room - means[1] for _, room in bracket.rooms]
            seeds += 1
    free, spread = len(x) - seeds - 1, sum(rate * rate for rate in x)
    if free < 1:
        return 1.0
    slope = sum(rate * room for rate, room in zip(x, y, strict=True)) / spread
    left = sum((room - slope * rate) ** 2 for rate, room in zip(x, y, strict=True))
    return max(LEAST_STEEP, -slope - 2 * math.sqrt(left / free / spread))


def _side(verdict: Held) -> float:
    """Logarithm of the head-room at a rate: positive if the rate holds."""
    room = math.log(min(max(verdict.room, 1e-9), 1e9))
    return min(max(room, 1e-3), FAR_OFF) if verdict.holds else -min(max(-room, 1e-3), FAR_OFF)
