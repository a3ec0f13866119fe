"""Which contender is best, and how surely: paired differences over common seeds, in rounds until the verdict is sure.

All contenders run the same seeds, the first ones first: contenders whose queue only grows, while others keep up, stop
there. Then those between whom it is open run as many seeds again, up to `MOST_TIMES` the requested number: a lead above
the threshold whose interval is too wide, or one above the indifference that leaves the choice open. A lead that is
significant or too small gets no more seeds. Nor do runs with fewer seeds than significance needs.

The best is one of those with the most seeds, and two are compared on the seeds that both ran. The contender with the
best mean wins only if its paired interval against every other lies above a threshold. The threshold is the larger of
the indifference and the profile's error in the deciding metric, which more seeds cannot reveal. Confidence is 95% for
all intervals together (Bonferroni). With fewer than `LEAST_SEEDS` seeds nothing is significant. The intervals stored
here are the ones that decided, and are printed by all answers with the sentences given here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from pdvsim.bench.pool import Row
from pdvsim.bench.stats import CONFIDENCE, Interval, interval
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, kept_up
from pdvsim.decide.space import complexity
from pdvsim.sim.config import Experiment
from pdvsim.view.table import cell

LEAST_SEEDS = 5
PILOTS = 2  # seeds after which contenders that cannot keep up stop
MOST_TIMES = 4  # seeds at most, times those requested
LARGE = 10  # a lead from which, over almost 0, only its size is printed
TINY = 1e-9  # replaces 0 in a denominator, so that a lead over it is large but finite


@dataclass(frozen=True)
class Contest:
    """The best contender, the others in order, and its lead over each of them (positive: better)."""

    best: str
    others: tuple[str, ...]
    values: dict[str, Interval]
    leads: dict[str, Interval]  # lead relative to the other's value, per seed
    unsure: tuple[str, ...]  # without significant difference from the best
    alike: tuple[str, ...]  # of these, the ones not significant even without the profile's error
    confidence: float  # of each interval
    thresholds: dict[str, float]  # relative leads up to this do not count
    seeds: int

    @property
    def sure(self) -> bool:
        return bool(self.others) and not self.unsure

    @property
    def order(self) -> tuple[str, ...]:
        """All contenders, the best first."""
        return self.best, *self.others

    @property
    def tied(self) -> tuple[str, ...]:
        """The best, and those without significant difference from it."""
        return self.best, *self.unsure

    def lead_text(self, other: str) -> str:
        """The best's relative lead over another, with its interval."""
        lead = self.leads[other]
        return percent(lead.mean) if lead.mean >= LARGE else f"{cell(lead, 1, 100, '+')} %"

    def document(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {"sure": self.sure, **vars(self)}


class Finals(NamedTuple):
    """All candidates and their replications by name, and the contest among those that can be chosen."""

    candidates: dict[str, Experiment]
    rows: dict[str, list[Row]]
    contest: Contest


def race(
    candidates: dict[str, Experiment],
    goal: Goal,
    bench: Bench,
    num_runs: int,
    indifference: float,
    budget: int | None = None,
    equally: bool = False,
    holder: str | None = None,
) -> Iterator[Finals]:
    """Run all candidates, by name, on the same seeds and compare; then add seeds where they help.

    The last yield is the answer. `budget` limits the simulations. With `equally` all have the same number of seeds.
    With a `holder` the race ends after the first seeds if it met the goal in all of them and none can beat it.
    """
    seeds, active = num_runs, candidates
    rows: dict[str, list[Row]] = {}
    pilots = PILOTS if holder is None else enough(num_runs, corrected(len(candidates) - 1))
    if num_runs > pilots and not equally:
        rows = bench.replicated(candidates, pilots)
        if holder is not None and all(goal.met([row]) for row in rows[holder]):
            result = contest_of(rows, goal, candidates, indifference)
            if result.best == holder or result.leads[holder].mean <= result.thresholds[holder]:
                yield Finals(candidates, dict(rows), result)
                return
        steady = [name for name, mine in rows.items() if kept_up(mine) or name == holder]
        active = {name: candidates[name] for name in steady} or candidates
    while True:
        rows |= bench.replicated(active, seeds)
        result = contest_of(rows, goal, candidates, indifference)
        yield Finals(candidates, dict(rows), result)
        open_ = {other for other in result.unsure if result.leads[other].mean > result.thresholds[other]}
        open_ |= {other for other in result.alike if result.leads[other].mean > indifference}
        active = {name: c for name, c in candidates.items() if equally or name in (result.best, *open_)}
        more = len(active) * seeds
        spent = 2 * seeds > MOST_TIMES * num_runs or (budget is not None and bench.runs + more > budget)
        if not open_ or spent or num_runs < LEAST_SEEDS:
            return
        seeds *= 2


def contest_of(
    rows: Mapping[str, Sequence[Row]],
    goal: Goal,
    places: Mapping[str, Experiment],
    indifference: float,
    comparisons: int | None = None,
) -> Contest:
    """The contest by the goal's metric among the candidates that meet the levels and keep up.

    If none meets the levels, among those that keep up; if none does, among all. `places` give each contender's pair
    and GPU.
    """
    up = {name: mine for name, mine in rows.items() if kept_up(mine)}
    able = {name: mine for name, mine in up.items() if goal.met(mine)} or up or rows
    values = {name: [goal.value(row) for row in mine] for name, mine in able.items()}
    errors = {name: lead_error(places[name], goal.error_metric(mine)) for name, mine in able.items()}
    return contest(values, goal.sign, comparisons, indifference, errors)


def chosen(result: Contest, candidates: Mapping[str, Experiment], base: Experiment) -> str:
    """The best, or the simplest of those without significant difference over seeds and indifference.

    The profile's error is not used here, as it may favour either side.
    """
    return min((result.best, *result.alike), key=lambda name: complexity(candidates[name], base))


def contest(
    values: Mapping[str, Sequence[float]],
    sign: int,
    comparisons: int | None = None,
    indifference: float = 0.0,
    errors: Mapping[str, float] | None = None,
) -> Contest:
    """Compare contenders by their values, paired by seed; `sign` is 1 if higher is better.

    `comparisons` is the number that share the 5% chance of error; default: those made here. A lead is not significant
    if its interval reaches below the indifference or the larger of both contenders' `errors`.
    """
    means, off = {name: interval(sample) for name, sample in values.items()}, errors or {}
    seeds = max(map(len, values.values()))
    best = max((name for name in values if len(values[name]) == seeds), key=lambda name: sign * means[name].mean)

    def distance(other: str) -> tuple[float, float]:
        """Differences from the best on the seeds that both ran; rounding must not change the order of the means."""
        mine = interval(values[best][: len(values[other])]).mean
        return sign * (mine - means[other].mean), -sign * means[other].mean

    others = tuple(sorted((name for name in values if name != best), key=distance))
    confidence = corrected(comparisons or len(others))
    thresholds = {other: max(indifference, off.get(best, 0.0), off.get(other, 0.0)) for other in others}
    leads, here = dict[str, Interval](), dict[str, Interval]()
    for other in others:  # paired, on the seeds that both ran
        ahead = [sign * share for share in shares(values[best][: len(values[other])], values[other])]
        leads[other], here[other] = interval(ahead, confidence), interval(ahead, corrected(len(others)))
    unsure = tuple(other for other in others if not exceeds(leads[other], thresholds[other]))
    alike = tuple(other for other in others if not here[other].mean - here[other].half_width > indifference)
    ordered = {name: means[name] for name in (best, *others)}
    return Contest(best, others, ordered, leads, unsure, alike, confidence, thresholds, seeds)


def corrected(comparisons: int) -> float:
    """Confidence of each comparison such that all together have 95%."""
    return 1 - (1 - CONFIDENCE) / max(1, comparisons)


def exceeds(lead: Interval, threshold: float) -> bool:
    """Whether a lead is significant: enough seeds, and the whole interval above the threshold."""
    return lead.n >= LEAST_SEEDS and lead.mean - lead.half_width > threshold


def enough(seeds: int, confidence: float) -> int:
    """Number of seeds after which a lead whose mean is at most the threshold can no longer become significant.

    If the first m of n leads have a mean of at most the threshold, Student's t of all n is largest if those m equal the
    threshold and the others are equal: sqrt((n - m)(n - 1) / m). While that is below the quantile of the confidence,
    more seeds cannot make the lead significant.
    """
    from scipy.special import stdtrit

    if seeds < LEAST_SEEDS:
        return seeds
    quantile = float(stdtrit(seeds - 1, 0.5 + confidence / 2))
    return next(m for m in range(1, seeds + 1) if math.sqrt((seeds - m) * (seeds - 1) / m) < quantile)


def shares(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Relative lead per seed: over each seed's own value, or over their mean if one is 0."""
    mean = max(sum(map(abs, theirs)) / len(theirs), TINY)
    return [(a - b) / (abs(b) if all(theirs) else mean) for a, b in zip(mine, theirs, strict=True)]


def percent(share: float) -> str:
    """A lead in percent; one over almost 0 is called large."""
    return f"{share:+.1%}" if share < LARGE else "+>999%"


def unsure_text(lead: Interval, error: float, alike: bool) -> str:
    """Why a lead is not significant: too few seeds, `alike` over the seeds, or the profile's error."""
    if lead.n < LEAST_SEEDS:
        return "too few runs"
    if alike:
        return "not significant"
    return f"{'within' if abs(lead.mean) <= error else 'not clearly beyond'} the profile's error (±{error:.1%})"


def threshold_text(contests: Iterable[Contest], indifference: float) -> str:
    """The threshold of leads and its reason; a range if contests differ."""
    decided = [contest for contest in contests if contest.others]
    if not decided:
        return "nothing to compare with"
    if decided[0].seeds < LEAST_SEEDS:
        return f"{decided[0].seeds} seeds give no significance: use at least {LEAST_SEEDS}"
    limits = [limit for contest in decided for limit in contest.thresholds.values()]
    low, high = f"{min(limits):.1%}", f"{max(limits):.1%}"
    if max(limits) <= indifference:
        return f"leads up to {high} are ignored"
    span = high if low == high else f"{low} to {high}, depending on the pair and the binding level,"
    return f"leads up to {span} are within the profile's error and ignored"


def check_seeds(num_runs: int) -> None:
    """Refuse a comparison on one seed."""
    if num_runs < 2:
        raise ValueError(f"num-runs must be at least 2: one seed gives no significance, got {num_runs}")
