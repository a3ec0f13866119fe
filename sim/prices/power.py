"""Power throttling: under sustained load the GPU reaches its power limit and lowers its clock.

The draw of a launch at full clock follows from its bytes and arithmetic. If the mean draw over the last tens of
milliseconds exceeds a limit, launches take longer in proportion to the excess. Launches that mostly stream weights slow
less, because they wait for memory at any clock.

An 8-bit flop takes less energy than a 16-bit one, by a measured factor.

Not modelled: the temperature, and cards that differ from the one measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log
from typing import Annotated

from pdvsim.sim.limits import Range, Share
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.costs import Price

FULL_CLOCK_ITERATIONS = 8  # each reduces the error of a long launch to about a third


@dataclass(frozen=True, slots=True)
class PowerFit:
    """Coefficients of the draw of launches, and of the slowdown above the limit."""

    rest_w: Annotated[float, Range(0, 1e5)]  # of a card at work, besides what the work itself takes
    weight_j: Annotated[float, Range(0, 1e-6)]  # per byte of weights
    cache_j: Annotated[float, Range(0, 1e-6)]  # per byte of KV cache
    flop_j: Annotated[float, Range(0, 1e-9)]
    limit_w: Annotated[float, Range(1, 1e6)]  # mean draw at full clock from which on the clock falls
    slope: Annotated[float, Range(0, 10)]  # how much longer a work takes, per share of draw above the limit
    calm: Share  # how much less of that for the share of its time that weights stream
    settle_s: Annotated[float, Range(1e-4, 60)]  # the time over which the card takes its mean
    flop8: Annotated[float, Range(0.05, 2)] = 1.0  # energy of an 8-bit flop over that of a 16-bit one

    def flop_factor(self, spec: ModelSpec) -> float:
        """Energy of a model's flops over that of as many 16-bit ones."""
        return self.flop8 if spec.multiplies_8_bits else 1.0


@dataclass(slots=True)
class Draw:
    """Watts of one launch at full clock, and how much its time depends on the clock. Not frozen, for speed."""

    watts: float
    follows: float


class Power:
    """The draw of launches on one GPU, and the slowdown that the mean draw causes."""

    def __init__(self, fit: PowerFit, bytes_per_s: float) -> None:
        self.fit = fit
        self._bytes_per_s = bytes_per_s
        self.figures = fit.rest_w, fit.limit_w, fit.slope, fit.settle_s, fit.weight_j, fit.cache_j, fit.flop_j

    def draw(self, price: Price, flop_factor: float = 1.0) -> Draw:
        """The draw of a launch whose flops take `flop_factor` times the energy of 16-bit ones."""
        fit, (solo_s, moved, flops, cache) = self.fit, price
        weights = moved - cache if moved > cache else 0.0
        spent_j = fit.weight_j * weights + fit.cache_j * cache + fit.flop_j * (flops * flop_factor)
        return Draw(fit.rest_w + spent_j / solo_s, self.follows(weights, solo_s))

    def follows(self, weights: float, solo_s: float) -> float:
        """Return how much the time of a launch depends on the clock: less, the longer it streams weights."""
        streams = weights / (self._bytes_per_s * solo_s)
        return 1.0 - self.fit.calm * (streams if streams < 1.0 else 1.0)

    def taken_s(self, mean_w: float, draw: Draw, solo_s: float) -> float:
        """Duration of a launch that runs alone on a GPU with this mean draw before it, including its own."""
        fit = self.fit
        if draw.watts <= fit.limit_w and mean_w <= fit.limit_w:
            return solo_s
        over = self.over(mean_w, draw.watts, solo_s)
        return solo_s * (1.0 + fit.slope * draw.follows * over) if over > 0.0 else solo_s

    def run(self, mean_w: float, price: Price, flop_factor: float, start_s: float) -> tuple[float, float]:
        """Return the end of a launch that runs alone from `start_s`, and the mean draw then."""
        rest_w, limit_w, slope, settle_s, weight_j, cache_j, flop_j = self.figures
        solo_s, moved, flops, cache = price
        weights = moved - cache if moved > cache else 0.0
        watts = rest_w + (weight_j * weights + cache_j * cache + flop_j * (flops * flop_factor)) / solo_s
        taken_s = solo_s
        if (watts > limit_w or mean_w > limit_w) and (over := self.over(mean_w, watts, solo_s)) > 0.0:
            taken_s = solo_s * (1.0 + slope * self.follows(weights, solo_s) * over)
        end_s = start_s + taken_s
        watts = rest_w + (watts - rest_w)
        if end_s > start_s:
            mean_w = watts + (mean_w - watts) * exp((start_s - end_s) / settle_s)
        return end_s, mean_w

    def over(self, mean_w: float, watts: float, seconds: float) -> float:
        """Return the share by which the mean draw exceeds the limit: the mean over this time at `watts`.

        The mean draw goes from `mean_w` towards `watts`; while it is below the limit, nothing is gained.
        """
        limit_w = self.fit.limit_w
        x = seconds / self.fit.settle_s
        if x <= 1e-9:
            return max(0.0, mean_w / limit_w - 1.0)
        begin, end = 0.0, x  # of the stretch above the limit, in settling times
        if mean_w < limit_w:
            if watts <= limit_w:
                return 0.0
            begin = log((watts - mean_w) / (watts - limit_w))
            if begin >= end:
                return 0.0
        elif watts < limit_w:
            end = min(end, log((mean_w - watts) / (limit_w - watts)))
        above = (watts - limit_w) * (end - begin) + (mean_w - watts) * (exp(-begin) - exp(-end))
        return above / (x * limit_w)

    def full_clock_s(self, price: Price, flop_factor: float = 1.0) -> float:
        """Seconds at full clock of a launch that took `price.seconds` alone on a cool GPU.

        A long launch lowers the clock within itself.
        """
        taken_s = solo_s = price.seconds
        for _ in range(FULL_CLOCK_ITERATIONS):
            draw = self.draw(price._replace(seconds=solo_s), flop_factor)
            solo_s = taken_s * solo_s / self.taken_s(self.fit.rest_w, draw, solo_s)
        return solo_s

    def mean_w(self, before_w: float, seconds: float, watts: float) -> float:
        """The mean draw after this time at `watts`."""
        return watts + (before_w - watts) * exp(-seconds / self.fit.settle_s) if seconds > 0.0 else before_w
