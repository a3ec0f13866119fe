"""Who is best, and how sure: paired differences over replications, with the many comparisons paid for.

Contenders ran the same seeds. The one with the best mean counts as the winner only if its paired interval against every
other contender excludes no difference, each at a confidence that leaves all of them together at 95% (Bonferroni).
Nothing is significant from one seed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdvsim.study.stats import CONFIDENCE, Interval, interval

TINY = 1e-9  # what nothing counts as, so that a lead over it is large and not infinite


@dataclass(frozen=True)
class Contest:
    """The best contender, those behind it in order, and its lead over each of them (positive: better)."""

    best: str
    behind: tuple[str, ...]
    values: dict[str, Interval]
    differences: dict[str, Interval]  # the lead in the values' own unit
    leads: dict[str, Interval]  # the lead as a share of the other's value, seed by seed
    unsure: tuple[str, ...]  # those whose difference from the best may be none
    confidence: float  # of each difference and lead

    @property
    def sure(self) -> bool:
        return bool(self.behind) and not self.unsure

    @property
    def second(self) -> str | None:
        return self.behind[0] if self.behind else None

    @property
    def margin(self) -> float:
        """The mean lead over the second; nan where there is none."""
        return self.leads[self.behind[0]].mean if self.behind else math.nan


def contest(
    values: Mapping[str, Sequence[float]], sign: int, comparisons: int | None = None, indifference: float = 0.0
) -> Contest:
    """Compare contenders by their values, seed by seed; `sign` is 1 where more is better.

    `comparisons` is over how many the 5% chance of error is spread: those made here unless the family is larger. A lead
    whose interval reaches below `indifference` is not one to count on.
    """
    means = {name: interval(sample) for name, sample in values.items()}
    order = sorted(values, key=lambda name: -sign * means[name].mean)
    best, behind = order[0], tuple(order[1:])
    confidence = 1 - (1 - CONFIDENCE) / max(1, comparisons or len(behind))
    differences, leads = {}, {}
    for other in behind:
        pairs = zip(values[best], values[other], strict=True)
        differences[other] = interval([sign * (mine - theirs) for mine, theirs in pairs], confidence)
        leads[other] = interval([sign * share for share in shares(values[best], values[other])], confidence)
    # written so that an interval of one seed, which is nan, is not sure either
    unsure = tuple(other for other in behind if not leads[other].mean - leads[other].half_width > indifference)
    return Contest(best, behind, {name: means[name] for name in order}, differences, leads, unsure, confidence)


def shares(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By how much, seed by seed, mine is above theirs: of each seed's own, or of their mean where one is nothing."""
    mean = max(sum(map(abs, theirs)) / len(theirs), TINY)
    return [(a - b) / (abs(b) if all(theirs) else mean) for a, b in zip(mine, theirs, strict=True)]
