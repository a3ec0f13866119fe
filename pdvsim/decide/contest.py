"""Who is best, and how sure: paired differences over replications, with the many comparisons paid for.

Contenders ran the same seeds, and those between which it was open some more: the best is one of these, and two are
compared on the seeds that both ran. The one with the best mean counts as the winner only if its paired interval against
every other contender lies above what does not count: no difference, the indifference asked for, and the profile's own
error in what decides either's figure, which no number of seeds reveals. Each interval is at a confidence that leaves
all of them together at 95% (Bonferroni). Fewer than `LEAST_SEEDS` seeds tell nothing apart. The intervals kept here are
the ones that decided, and are printed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdvsim.study.stats import CONFIDENCE, Interval, interval

LEAST_SEEDS = 5
TINY = 1e-9  # what nothing counts as, so that a lead over it is large and not infinite


@dataclass(frozen=True)
class Contest:
    """The best contender, those behind it in order, and its lead over each of them (positive: better)."""

    best: str
    behind: tuple[str, ...]
    values: dict[str, Interval]
    differences: dict[str, Interval]  # the lead in the values' own unit
    leads: dict[str, Interval]  # the lead as a share of the other's value, seed by seed
    unsure: tuple[str, ...]  # those whose difference from the best may be none that counts
    alike: tuple[str, ...]  # those of them that seeds and indifference alone, without the profile's error, leave unsure
    confidence: float  # of each difference and lead
    thresholds: dict[str, float]  # a lead up to this, as a share, does not count
    seeds: int

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
    values: Mapping[str, Sequence[float]],
    sign: int,
    comparisons: int | None = None,
    indifference: float = 0.0,
    errors: Mapping[str, float] | None = None,
) -> Contest:
    """Compare contenders by their values, seed by seed; `sign` is 1 where more is better.

    `comparisons` is over how many the 5% chance of error is spread: those made here unless the family is larger. A lead
    whose interval reaches below the indifference, or the larger of both contenders' `errors`, is not one to count on.
    """
    means = {name: interval(sample) for name, sample in values.items()}
    seeds = max(map(len, values.values()))
    best = max((name for name in values if len(values[name]) == seeds), key=lambda name: sign * means[name].mean)
    ahead_by = {  # seed by seed, on those that both ran
        other: [sign * (mine - theirs) for mine, theirs in zip(values[best], values[other], strict=False)]
        for other in values
        if other != best
    }

    def distance(other: str) -> tuple[float, float]:
        """From the best on the seeds that both ran; rounding must not change the order of the means."""
        mine = interval(values[best][: len(values[other])]).mean
        return sign * (mine - means[other].mean), -sign * means[other].mean

    behind = tuple(sorted(ahead_by, key=distance))
    confidence = corrected(comparisons or len(behind))
    off = errors or dict.fromkeys(values, 0.0)
    thresholds = {other: max(indifference, off[best], off[other]) for other in behind}
    differences, leads, here = {}, {}, {}
    for other in behind:
        differences[other] = interval(ahead_by[other], confidence)
        both = len(ahead_by[other])
        ahead = [sign * share for share in shares(values[best][:both], values[other][:both])]
        leads[other], here[other] = interval(ahead, confidence), interval(ahead, corrected(len(behind)))
    unsure = tuple(other for other in behind if not exceeds(leads[other], thresholds[other]))
    alike = tuple(other for other in behind if not here[other].mean - here[other].half_width > indifference)
    ordered = {name: means[name] for name in (best, *behind)}
    return Contest(best, behind, ordered, differences, leads, unsure, alike, confidence, thresholds, seeds)


def corrected(comparisons: int) -> float:
    """The confidence of each of so many comparisons that leaves all of them together at 95%."""
    return 1 - (1 - CONFIDENCE) / max(1, comparisons)


def exceeds(lead: Interval, threshold: float) -> bool:
    """Whether a lead counts: enough seeds, and all of its interval above the threshold."""
    return lead.n >= LEAST_SEEDS and lead.mean - lead.half_width > threshold


def enough(seeds: int, confidence: float) -> int:
    """How many seeds settle that a lead will not count: where its mean over them is no more than the threshold.

    If the first m of n leads are at most the threshold in the mean, Student's t of all n against it is largest where
    those m equal the threshold and the others are alike: sqrt((n - m)(n - 1) / m). While that is less than the quantile
    of the confidence, no further seeds could make the lead sure.
    """
    from scipy.special import stdtrit

    if seeds < LEAST_SEEDS:
        return seeds
    quantile = float(stdtrit(seeds - 1, 0.5 + confidence / 2))
    return next(m for m in range(1, seeds + 1) if math.sqrt((seeds - m) * (seeds - 1) / m) < quantile)


def shares(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By how much, seed by seed, mine is above theirs: of each seed's own, or of their mean where one is nothing."""
    mean = max(sum(map(abs, theirs)) / len(theirs), TINY)
    return [(a - b) / (abs(b) if all(theirs) else mean) for a, b in zip(mine, theirs, strict=True)]
