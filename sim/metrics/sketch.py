"""What is left of many numbers when they are not kept: quantiles, mean and spread, and when things happened.

The quantiles are DDSketch's (Masson, Rim and Lee, 2019): numbers are counted in bins whose bounds grow by a constant
factor, so each order statistic is known to a fixed relative error. Mean and deviation are exact, merged part by part
(Chan, Golub and LeVeque, 1979).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ERROR = 0.004  # relative, of an order statistic
_GROWTH = math.log((1 + ERROR) / (1 - ERROR))
_SMALLEST = 1e-12  # seconds; what is smaller counts as 0
_BINS = int(math.log(1e12 / _SMALLEST) / _GROWTH) + 2


class Spread:
    """Count, mean, standard deviation and quantiles of numbers from 0 to 1e12."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = math.nan
        self._squares = 0.0  # sum of squared distances from the mean
        self._zeros = 0
        self._bins = np.zeros(_BINS, np.int64)

    def add(self, values: Array) -> None:
        if not len(values):
            return
        mean, count = float(values.mean()), len(values)
        squares = float(np.square(values - mean).sum())
        if self.count:
            both, apart = self.count + count, mean - self.mean
            squares += self._squares + apart * apart * self.count * count / both
            mean = self.mean + apart * count / both
        self.count += count
        self.mean, self._squares = mean, squares
        seen = values[values >= _SMALLEST]
        self._zeros += count - len(seen)
        at = np.ceil(np.log(seen / _SMALLEST) / _GROWTH).astype(np.int64)
        self._bins += np.bincount(at.clip(0, _BINS - 1), minlength=_BINS)

    @property
    def std(self) -> float:
        return math.sqrt(self._squares / self.count) if self.count else math.nan

    def percentiles(self, ranks: list[float]) -> list[float]:
        """As numpy's: between the two order statistics that a rank falls between, each known to ERROR."""
        if not self.count:
            return [math.nan] * len(ranks)
        upto = np.cumsum(np.concatenate(([self._zeros], self._bins)))
        found = []
        for rank in ranks:
            place = rank / 100 * (self.count - 1)
            low, high = (
                self._value(int(np.searchsorted(upto, at + 1))) for at in (math.floor(place), math.ceil(place))
            )
            found.append(low + (high - low) * (place - math.floor(place)))
        return found

    @staticmethod
    def _value(at: int) -> float:
        """The middle of a bin, in relative terms; bin 0 holds the zeros."""
        return 0.0 if at == 0 else _SMALLEST * math.exp((at - 1) * _GROWTH) * (1 - ERROR)


class Timeline:
    """How often each of several things happened, in bins of time that double in width as time goes on.

    At least half of the bins are in use. The counts do not depend on the order in which times are added.
    """

    BINS = 1 << 14

    def __init__(self, things: int) -> None:
        self.width_s = 1e-6
        self.counts = np.zeros((things, self.BINS), np.int64)

    def add(self, thing: int, times_s: Array) -> None:
        if not len(times_s):
            return
        while float(times_s.max()) >= self.width_s * self.BINS:
            self.width_s *= 2
            if self.counts.any():
                self.counts[:, : self.BINS // 2] = self.counts.reshape(len(self.counts), -1, 2).sum(axis=2)
                self.counts[:, self.BINS // 2 :] = 0
        self.counts[thing] += np.bincount((times_s / self.width_s).astype(np.int64), minlength=self.BINS)
