"""What is left of many numbers that come in parts: mean, spread and quantiles, and when things happened.

Mean and deviation are exact, merged part by part (Chan, Golub and LeVeque, 1979). Where memory must not grow, numbers
are rounded to a grid whose steps grow by a constant factor, as in DDSketch (Masson, Rim and Lee, 2019): each order
statistic is then known to a fixed relative error. Numbers that are kept have the quantiles of `numpy.percentile`.
"""

from __future__ import annotations

import math

import numpy as np

from pdvsim.sim.records import Array

ERROR = 0.004  # relative, of an order statistic of rounded numbers
_GROWTH = math.log((1 + ERROR) / (1 - ERROR))
_SMALLEST = 1e-12  # seconds; what is smaller is rounded to 0
_MOST_PARTS = 64  # of rounded numbers, before they are joined


class Spread:
    """Count, mean, standard deviation and quantiles of numbers from 0 on: of all of them, or `rounded`.

    Equal numbers are kept once: the rows of a batch wait equally long for their next tokens, so a run has far fewer
    numbers than deliveries.
    """

    def __init__(self, rounded: bool = False) -> None:
        self.rounded = rounded
        self.count = 0
        self.mean = math.nan
        self._squares = 0.0  # sum of squared distances from the mean
        self._parts: list[tuple[Array, Array]] = []  # numbers, and how often each occurs

    def add(self, values: Array) -> None:
        if len(values):
            mean = float(values.mean())
            squares, both, apart = np.square(values - mean).sum(), self.count + len(values), mean - self.mean
            if self.count:
                squares += self._squares + apart * apart * self.count * len(values) / both
                mean = self.mean + apart * len(values) / both
            self.count, self.mean, self._squares = both, mean, float(squares)
            numbers, counts = _steps(values) if self.rounded else np.unique(values.astype(float), return_counts=True)
            self._parts.append((numbers, counts.astype(np.min_scalar_type(int(counts.max())))))
            if self.rounded and len(self._parts) > _MOST_PARTS:
                self.counted()

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def counted(self) -> tuple[Array, Array]:
        """Distinct numbers in order, and how often each occurs."""
        if len(self._parts) > 1:
            every, counts = (np.concatenate(columns) for columns in zip(*self._parts, strict=True))
            numbers, at = np.unique(every, return_inverse=True)
            self._parts = [(numbers, np.bincount(at, counts).astype(np.int64))]
        return self._parts[0] if self._parts else (np.empty(0), np.empty(0, np.int64))

    def percentiles(self, ranks: list[float]) -> list[float]:
        """Percentiles as numpy's, between the two order statistics that a rank falls between."""
        if not self.count:
            return [math.nan] * len(ranks)
        numbers, counts = self.counted()
        upto, marks = np.cumsum(counts, dtype=np.int64), []
        for rank in ranks:
            place = rank / 100 * (self.count - 1)
            low, high = (
                float(numbers[np.searchsorted(upto, at, "right")]) for at in (math.floor(place), math.ceil(place))
            )
            share = place - math.floor(place)  # from the nearer end, as numpy has it, to the last bit
            marks.append(low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share))
        return marks

    def standard_errors(self, ranks: list[float], independent: float) -> list[float]:
        """Standard error of each percentile, by order statistics, if `independent` of the numbers are independent.

        A quarter of the distance between the order statistics two standard errors of the rank below and above it: a
        percentile between two clusters of numbers has a large one, also where its neighbours are all alike.
        """
        shares = [rank / 100 for rank in ranks]
        off = [100 * 2 * math.sqrt(share * (1 - share) / max(independent, 1.0)) for share in shares]
        ends = [end for rank, two in zip(ranks, off, strict=True) for end in (max(rank - two, 0), min(rank + two, 100))]
        marks = self.percentiles(ends)
        return [(high - low) / 4 for low, high in zip(marks[::2], marks[1::2], strict=True)]


def _steps(values: Array) -> tuple[Array, Array]:
    """The steps of the grid that numbers are rounded to, each in the middle of its numbers, and how many those are."""
    at = np.ceil(np.log(values.clip(_SMALLEST) / _SMALLEST) / _GROWTH).astype(np.int64)
    least = int(at.min())
    counts = np.bincount(at - least)
    taken = np.flatnonzero(counts)
    steps = taken + least
    return np.where(steps > 0, _SMALLEST * np.exp(steps * _GROWTH) * (1 - ERROR), 0.0), counts[taken]


class Timeline:
    """Counts of several kinds of events, in time bins that double in width as the run gets longer.

    At least half of the bins are in use. The counts do not depend on the order in which times are added.
    """

    BINS = 1 << 14

    def __init__(self, things: int) -> None:
        self.width_s = 1e-6
        self.counts = np.zeros((things, self.BINS), np.int64)

    def add(self, thing: int, times_s: Array, amounts: Array | None = None) -> None:
        """Count each time once, or by its (whole) amount."""
        if not len(times_s):
            return
        while float(times_s.max()) >= self.width_s * self.BINS:
            self.width_s *= 2
            if self.counts.any():
                self.counts[:, : self.BINS // 2] = self.counts.reshape(len(self.counts), -1, 2).sum(axis=2)
                self.counts[:, self.BINS // 2 :] = 0
        bins = (times_s / self.width_s).astype(np.int64)
        self.counts[thing] += np.bincount(bins, amounts, self.BINS).astype(np.int64)


class Seconds:
    """Most tokens in any one second."""

    def __init__(self) -> None:
        self.most = 0.0
        self._first_open_second = 0
        self._tokens = np.zeros(0)  # from then on

    def add(self, after_s: Array, tokens: Array, settled_s: float) -> None:
        """Tokens, so long after the start; no more come before `settled_s`."""
        if len(tokens):
            second = after_s.astype(np.int64) - self._first_open_second
            self._tokens = summed(self._tokens, np.bincount(second, weights=tokens))
            self.most = max(self.most, float(self._tokens.max()))
        if self._first_open_second < settled_s < math.inf:
            self._tokens = self._tokens[int(settled_s) - self._first_open_second :]
            self._first_open_second = int(settled_s)


class Crowd:
    """Maximum number of concurrent requests; a departure at the same time as an arrival counts first."""

    def __init__(self) -> None:
        self.most = 0
        self._inside = 0
        self._came_s = self._left_s = np.empty(0)  # that others may follow at the same time

    def add(self, came_s: Array, left_s: Array, since_s: float, settled_s: float) -> None:
        """More arrivals and finishes; arrivals from `since_s` on count."""
        came_s = np.sort(np.concatenate((self._came_s, came_s)))
        left_s = np.sort(np.concatenate((self._left_s, left_s)))
        came, left = np.searchsorted(came_s, settled_s), np.searchsorted(left_s, settled_s)
        inside = self._inside + np.arange(1, came + 1) - np.searchsorted(left_s, came_s[:came], side="right")
        self.most = max(self.most, int(inside[came_s[:came] >= since_s].max(initial=0)))
        self._inside += int(came - left)
        self._came_s, self._left_s = came_s[came:], left_s[left:]


class Union:
    """How long some of several intervals lasted, overlaps once."""

    def __init__(self) -> None:
        self._length_s = 0.0
        self._open = np.empty((2, 0))  # intervals that others, not yet added, may overlap
        self._settled_s = -math.inf

    def add(self, start_s: Array, end_s: Array, settled_s: float) -> None:
        """More intervals in any order; those still to come begin at `settled_s` or later."""
        both = np.concatenate((self._open, (start_s, end_s)), axis=1)
        begin_s, finish_s = both.clip(self._settled_s, settled_s)
        order = np.argsort(begin_s, kind="stable")
        reach_s = np.maximum.accumulate(finish_s[order])
        begin_s = np.maximum(begin_s[order], np.concatenate(([-math.inf], reach_s))[:-1])
        self._length_s += float((reach_s - begin_s).clip(0).sum())
        self._open, self._settled_s = both[:, both[1] > settled_s], settled_s

    def length_s(self) -> float:
        """Return the seconds that the intervals cover, after all are added."""
        self.add(np.empty(0), np.empty(0), math.inf)
        return self._length_s


def summed(a: Array, b: Array) -> Array:
    """The sum of two counts, of which either may be longer."""
    long, short = (a, b) if len(a) >= len(b) else (b, a)
    return np.concatenate((long[: len(short)] + short, long[len(short) :]))
