"""Why the same launch takes longer in long heavy service: the card draws its power limit, and its clock falls.

What a work would draw at full clock follows from its bytes and its arithmetic. The card minds the mean of that over
the last tens of milliseconds: above a limit, works take longer in proportion to the excess, less so those that mostly
stream weights, which wait for memory whatever the clock.

Not modelled: the temperature, and cards that differ from the one measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp


@dataclass(frozen=True, slots=True)
class PowerFit:
    """What works draw, and what drawing too much costs."""

    rest_w: float  # of a card at work, besides what the work itself takes
    weight_j: float  # per byte of weights
    cache_j: float  # per byte of KV cache
    flop_j: float
    limit_w: float  # mean draw at full clock from which on the clock falls
    slope: float  # how much longer a work takes, per share of draw above the limit
    calm: float  # how much less of that for the share of its time that weights stream
    settle_s: float  # the time over which the card takes its mean


@dataclass(slots=True)
class Draw:
    """One work's: watts at full clock, and how far its time follows the clock. Not frozen: one is made every launch."""

    watts: float
    follows: float


class Power:
    """What one card's works draw, and how much the mean draw so far slows those that start."""

    def __init__(self, fit: PowerFit, bytes_per_s: float) -> None:
        self.fit = fit
        self._bytes_per_s = bytes_per_s

    def draw(self, solo_s: float, weights: float, cache: float, flops: float) -> Draw:
        """Of a work that takes `solo_s` alone, reads so many bytes of each, and computes."""
        fit = self.fit
        spent_j = fit.weight_j * weights + fit.cache_j * cache + fit.flop_j * flops
        streams = weights / (self._bytes_per_s * solo_s)
        return Draw(fit.rest_w + spent_j / solo_s, 1.0 - fit.calm * (streams if streams < 1.0 else 1.0))

    def taken_s(self, mean_w: float, draw: Draw, solo_s: float) -> float:
        """What a work takes that runs alone on a card with this mean draw, and adds its own."""
        fit, x = self.fit, solo_s / self.fit.settle_s
        share = (1.0 - exp(-x)) / x if x > 1e-9 else 1.0
        over = (draw.watts + (mean_w - draw.watts) * share) / fit.limit_w - 1.0
        return solo_s * (1.0 + fit.slope * draw.follows * over) if over > 0.0 else solo_s

    def spent(
        self, mean_w: float, idle_s: float, start_s: float, solo_s: float, moved: float, cache: float, flops: float
    ) -> tuple[float, float]:
        """When a work ends that has the card to itself, after some seconds of rest; and the mean draw then.

        It moves so many bytes, `cache` of them of the KV cache.
        """
        fit = self.fit
        rest_w, settle_s, limit_w = fit.rest_w, fit.settle_s, fit.limit_w
        weights = moved - cache if moved > cache else 0.0
        watts = rest_w + (fit.weight_j * weights + fit.cache_j * cache + fit.flop_j * flops) / solo_s
        if idle_s > 0.0:
            mean_w = rest_w + (mean_w - rest_w) * exp(-idle_s / settle_s)
        if watts <= limit_w and mean_w <= limit_w:
            end_s = start_s + solo_s
        else:
            end_s = start_s + self.taken_s(mean_w, self.draw(solo_s, weights, cache, flops), solo_s)
        watts = rest_w + (watts - rest_w)  # to the last bit as where several works share the card
        return end_s, watts + (mean_w - watts) * exp((start_s - end_s) / settle_s) if end_s > start_s else mean_w

    def mean_w(self, before_w: float, seconds: float, watts: float) -> float:
        """The mean draw after so many seconds at `watts`."""
        return watts + (before_w - watts) * exp(-seconds / self.fit.settle_s) if seconds > 0.0 else before_w
