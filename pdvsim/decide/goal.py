"""What "better" means: one metric of a run, its direction, and whether the service levels are met.

`headroom` is the factor by which every service level could be tightened: the smallest, over the levels, of the level
over the metric's percentile at the required attainment (with 0.9: p90). It ranks servers that all meet their levels,
and shows by how much a server misses them.

Levels without a percentile (ttft:500) must be met together, by the share `attainment` of the requests. If any level
names a percentile (p99_ttft:200), each is checked separately, at its own percentile or the highest that is named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from pdvsim.bench.pool import Row
from pdvsim.decide.error import ranged_of
from pdvsim.decide.runs import kept_up
from pdvsim.sim.config import Experiment, Scoring
from pdvsim.sim.limits import LeastShare, check_ranges
from pdvsim.sim.metrics.summary import percentile_name

LevelVerdict = Literal["meets", "misses", "too close to call", "does not keep up"]
Objective = Literal["headroom", "goodput", "throughput", "ttft", "tpot", "e2el"]

ATTAINMENT = 0.9  # share of the requests, if no percentile is named
ROUNDING = 1e-9  # a share is a quotient of two rates: tolerance for rounding
NAMES = {
    "headroom": "head-room",
    "goodput": "goodput (req/s)",
    "throughput": "output throughput (tok/s)",
    "ttft": "mean TTFT (ms)",
    "tpot": "mean TPOT (ms)",
    "e2el": "mean E2EL (ms)",
}
assert tuple(NAMES) == get_args(Objective)


@dataclass(frozen=True)
class Goal:
    """An objective under service levels, all of which the share `attainment` of the requests must meet."""

    objective: Objective
    levels: tuple[str, ...] = ()
    attainment: LeastShare = ATTAINMENT

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.named and self.attainment != ATTAINMENT:
            raise ValueError("--attainment needs service levels without a percentile; p99_ttft:200 has its own")
        if self.objective in ("headroom", "goodput") and not self.levels:
            raise ValueError(f"objective {self.objective} needs --goodput, e.g. --goodput ttft:500 tpot:50")
        if any(not level for level in self.levels_ms.values()):
            raise ValueError("goodput: a service level of 0 ms cannot be met")

    @cached_property
    def named(self) -> tuple[float, ...]:
        """The percentiles that levels name."""
        return tuple(level.percent for level in Scoring(goodput=self.levels).levels() if level.percent is not None)

    @cached_property
    def levels_ms(self) -> dict[str, float]:
        """Service levels by metric: ttft, or p99_ttft if any names its percentile."""
        levels = Scoring(goodput=self.levels).levels()
        if not self.named:
            return {level.metric: level.seconds * 1e3 for level in levels}
        return {
            f"{percentile_name(level.percent or self._percent)}_{level.metric}": level.seconds * 1e3 for level in levels
        }

    @property
    def levels_text(self) -> str:
        """The levels as a sentence has them."""
        return " and ".join(f"{level_title(name)} <= {level:g} ms" for name, level in self.levels_ms.items())

    @property
    def share_text(self) -> str:
        """The required share of requests as text; empty if the levels name percentiles."""
        return "" if self.named else f" for {self.attainment:.0%} of the requests"

    @property
    def percentile(self) -> str:
        """The percentile of the attainment, as in the keys of rows: p90."""
        return percentile_name(self._percent)

    @property
    def _percent(self) -> float:
        return max(self.named, default=round(100 * self.attainment, 6))

    @property
    def sign(self) -> int:
        """1 if higher is better, -1 if lower is."""
        return -1 if self.objective in ("ttft", "tpot", "e2el") else 1

    def prepared(self, experiment: Experiment) -> Experiment:
        """The experiment with the scoring that the goal needs."""
        scoring = experiment.scoring
        percentiles = tuple(dict.fromkeys((self._percent, *self.named, *scoring.metric_percentiles)))
        return replace(experiment, scoring=replace(scoring, goodput=self.levels, metric_percentiles=percentiles))

    def value(self, row: Row) -> float:
        """The objective's value in a run; a ValueError of one line if there is none."""
        if self.objective == "headroom":
            figure = min(self.headrooms(row).values())
        elif self.objective == "goodput":
            figure = float(row["request_goodput"])
        else:
            figure = float(row[self.error_metric([row])])
        if not math.isfinite(figure):  # only TPOT can be missing
            raise ValueError(f"objective {self.objective} is undefined: every output is a single token")
        return figure

    def headrooms(self, row: Row) -> dict[str, float]:
        """Each service level over its metric's percentile; below 1 where the metric misses it."""
        spent = {name: float(row[self.level_metric(name)]) for name in self.levels_ms}
        return {name: level / spent[name] if spent[name] > 0 else math.inf for name, level in self.levels_ms.items()}

    def error_metric(self, rows: Sequence[Row]) -> str:
        """The metric whose error applies to the objective: under service levels that of the binding level."""
        if self.objective in ("headroom", "goodput"):
            rooms = [self.headrooms(row) for row in rows]
            return self.level_metric(min(self.levels_ms, key=lambda name: sum(room[name] for room in rooms)))
        return "output_throughput" if self.objective == "throughput" else f"mean_{self.objective}_ms"

    def level_metric(self, level: str) -> str:
        """The percentile that a service level is about."""
        return f"{level}_ms" if self.named else f"{self.percentile}_{level}_ms"

    def attains(self, *rows: Row) -> bool:
        """Whether runs meet the service levels for the required share on average."""
        if self.named:
            means = {n: sum(float(row[self.level_metric(n)]) for row in rows) / len(rows) for n in self.levels_ms}
            return all(means[name] <= level for name, level in self.levels_ms.items())
        return sum(map(attained, rows)) / len(rows) >= self.attainment - ROUNDING

    def met(self, rows: Sequence[Row]) -> bool:
        """Whether replications meet the service levels on average, and most of them kept up."""
        return kept_up(rows) and (not self.levels or self.attains(*rows))

    def verdict(self, candidate: Experiment, rows: Sequence[Row]) -> LevelVerdict:
        """Whether a candidate meets the service levels, seeds and the model's error included."""
        if not kept_up(rows):
            return "does not keep up"
        ends = {name: ranged_of(candidate, rows, self.level_metric(name)) for name in self.levels_ms}
        if self.met(rows) and all(ends[name].high <= level for name, level in self.levels_ms.items()):
            return "meets"
        if not self.met(rows) and any(ends[name].low > level for name, level in self.levels_ms.items()):
            return "misses"
        return "too close to call"


def level_title(name: str) -> str:
    """The metric of a level as text: P99 TTFT."""
    return name.replace("_", " ").upper()


def attained(row: Row) -> float:
    """Share of a run's requests that met every service level."""
    return float(row["request_goodput"]) / float(row["request_throughput"])
