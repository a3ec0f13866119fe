"""The highest rate that holds: a search that yields rates, is sent the verdict on each, and knows of no servers.

Which rate to try next is guessed from the head-room at those tried; what is found does not rest on the guess.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

REACH = 500.0  # how far from where it starts a search looks: below that requests hardly ever meet
STEEPNESS = 2.0  # head-room falls with about this power of the rate: a first guess, before two rates tell
FAR_OFF = 0.3  # logarithm of a head-room beyond which it tells only the side
LEAST_STEEP = 0.5
NEAR = 0.1  # logarithm of a rate over the one held, within which head-rooms tell how steep they are there
GUESSES = 3  # rates that a search takes from head-rooms, and as many within its bracket; then it strides and halves

Bisection = Generator[float, "Held", "Bracket"]


@dataclass(frozen=True)
class Bracket:
    """The highest rate that held (0: none did) and the lowest above it that did not (inf: all did)."""

    held: float
    failed: float
    rooms: tuple[tuple[float, float], ...] = field(default=(), compare=False)  # logarithms of rates and head-rooms


class Held(NamedTuple):
    """Of a run at one rate."""

    holds: bool
    room: float  # the least head-room of its levels: which rate would just hold is guessed from it


def search(start: float, step: float, tolerance: float) -> Bisection:
    """Yields rates, is sent the verdict on each; returns the highest that holds and the next, which does not.

    The rates are powers of 1 + `tolerance`. So where a search starts does not move what it finds, and two that ask for
    the same run share it. The first step is `step` at the most.
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
    """The power of the rate with which head-room falls near what is held, by the searches of several seeds.

    A figure that is off by a share moves the rate by that share over this. As runs scatter it is the slope less twice
    its standard error, and at least `LEAST_STEEP`; 1 where too few runs tell.
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
    """How far a rate is from one that just holds, by the logarithm of its head-room: above 0 if it holds."""
    room = math.log(min(max(verdict.room, 1e-9), 1e9))
    return min(max(room, 1e-3), FAR_OFF) if verdict.holds else -min(max(-room, 1e-3), FAR_OFF)
