"""The simulator's latency model run over figures that are still free: it tells which of them a time consists of.

So a fit needs no model of its own, and has the slopes of the simulator's.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.calibration.fit.points import Floats, price_s
from pdvsim.sim.core import ModelSpec
from pdvsim.sim.hardware.latency import ForwardFit, Latency

if TYPE_CHECKING:
    import pandas as pd


class Factor(NamedTuple):
    """Two figures joined, the second weighted: the larger of them, or the root of the sum of their squares."""

    larger: bool
    first: int
    second: int
    weight: float  # 0: the first figure alone


class Traced:
    """A time as the simulator puts it together from figures that are still free: products of factors, and how often."""

    def __init__(self, products: dict[tuple[Factor, ...], float]) -> None:
        self.products = {product: count for product, count in products.items() if count}

    @classmethod
    def figures(cls, count: int) -> list[Traced]:
        """So many free figures."""
        return [cls({(Factor(False, number, number, 0.0),): 1.0}) for number in range(count)]

    def joined(self, other: Traced, larger: bool) -> Traced:
        """One figure and another one, weighted."""
        ([(first, _)], [(second, weight)]) = self.products.items(), other.products.items()
        return Traced({(Factor(larger, first[0].first, second[0].first, weight),): 1.0})

    def __add__(self, other: Traced | float) -> Traced:
        if not isinstance(other, Traced):  # the simulator's sums begin with 0
            return self
        both = dict(self.products)
        for product, count in other.products.items():
            both[product] = both.get(product, 0.0) + count
        return Traced(both)

    def __mul__(self, other: Traced | float) -> Traced:
        if not isinstance(other, Traced):
            return Traced({product: count * other for product, count in self.products.items()})
        pairs = [(a + b, n * m) for a, n in self.products.items() for b, m in other.products.items()]
        return sum((Traced({product: count}) for product, count in pairs), Traced({}))

    def __truediv__(self, other: float) -> Traced:
        return Traced({product: count / other for product, count in self.products.items()})

    def __sub__(self, other: Traced) -> Traced:
        return self + other * -1.0

    def __lt__(self, other: float) -> bool:
        return False  # than 0: no time is

    __radd__, __rmul__ = __add__, __mul__


class TracedLatency(Latency):
    """The simulator's latency model over figures that are still free."""

    def _joined(self, wide: Any, long: Any) -> Any:  # type: ignore[override]
        return wide.joined(long, larger=False)

    def _larger(self, memory_s: Any, compute_s: Any) -> Any:
        return memory_s.joined(compute_s, larger=True)


class Terms:
    """Traced times as matrices: how often each product is in each time, and each factor in each product."""

    def __init__(self, times: Sequence[Traced]) -> None:
        products = list(dict.fromkeys(product for time in times for product in time.products))
        factors = list(dict.fromkeys(factor for product in products for factor in product))
        self._times = np.array([[time.products.get(product, 0.0) for product in products] for time in times])
        self._products = np.array([[float(product.count(factor)) for factor in factors] for product in products])
        larger, first, second, self._weight = np.array(factors).T
        self._larger, self._first, self._second = larger > 0, first.astype(int), second.astype(int)

    def at(self, chosen: NDArray[Any]) -> Terms:
        """Some of the times."""
        some = copy(self)
        some._times = self._times[chosen]
        return some

    def seconds(self, figures: Floats) -> Floats:
        """The times with these figures."""
        return np.asarray(self._times @ np.exp(self._products @ np.log(self._factors(figures)[2])))

    def predict(self, logarithms: Floats) -> tuple[Floats, Floats]:
        """The times with figures of these logarithms, and how they change with each of those."""
        first, second, size = self._factors(np.exp(logarithms))
        share = np.where(self._larger, first >= second, (first / size) ** 2)  # of a factor's growth, by the first
        every, growth = np.arange(len(size)), np.zeros((len(size), len(logarithms)))
        growth[every, self._first] += share
        growth[every, self._second] += 1 - share
        times = self._times * np.exp(self._products @ np.log(size))
        return times.sum(1), times @ (self._products @ growth)

    def _factors(self, figures: Floats) -> tuple[Floats, Floats, Floats]:
        first, second = figures[self._first], self._weight * figures[self._second]
        return first, second, np.where(self._larger, np.maximum(first, second), np.hypot(first, second))


def terms_of(spec: ModelSpec, figures: ForwardFit, frame: pd.DataFrame) -> Terms:
    """The times of measured points as the simulator prices them, with traced figures."""
    drafter, verifier = (TracedLatency(spec, figures) for _ in range(2))
    verifier.widest = 2  # a head's draft has logits of its newest tokens, but it is measured with all of them too
    points = frame.to_dict("records")
    return Terms([price_s(drafter if point["kind"] == "draft" else verifier, point) for point in points])
