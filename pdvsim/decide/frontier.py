"""What the first token costs in the others: architectures x prompt chunks at one load, and those that nothing beats.

Every architecture runs with every prompt chunk, at the draft length that the formula ranks first there, and all meet
the same requests. On the frontier are those that no other equals or beats in both means. One behind it is compared with
the one on it that leads most; it counts as dominated only if that is better in both figures, by paired intervals that
lie above the profile's own error; else it is not told apart from the frontier. Who does not keep up has no latency
worth drawing, and is named.

Left out: other draft lengths, batch limits and controllers than those given. The profile's error was measured between
architectures; between two chunks of one architecture it is taken to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.common.outcomes import Row
from pdvsim.common.version import __version__
from pdvsim.decide.contest import LEAST_SEEDS, corrected, exceeds, shares
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal, attained
from pdvsim.decide.runs import Bench, kept_up, replications
from pdvsim.decide.space import Space, described, settings_text
from pdvsim.decide.text import lengths_note, positive
from pdvsim.sim.config import Experiment
from pdvsim.sim.doubts import vet
from pdvsim.sim.limits import check_list, check_points, check_ranges
from pdvsim.study import output
from pdvsim.study.stats import Interval, interval
from pdvsim.view import table
from pdvsim.view.style import name_of

if TYPE_CHECKING:
    import pandas as pd

FirstToken = Literal["mean_ttft", "p99_ttft"]
OtherTokens = Literal["p99_itl", "p99_tpot", "mean_tpot"]
Standing = Literal["frontier", "not told apart", "dominated", "does not keep up"]


@dataclass(frozen=True)
class FrontierQuestion:
    """One load, who serves it with which prompt chunks, and the two figures to trade."""

    base: Experiment
    space: Space  # all but the chunks
    max_num_batched_tokens: tuple[int, ...]
    x: FirstToken = "mean_ttft"
    y: OtherTokens = "p99_itl"
    num_runs: int = 5
    warmup_share: float = 0.1

    def __post_init__(self) -> None:
        check_list("max-num-batched-tokens", self.max_num_batched_tokens)
        if math.isinf(self.base.traffic.request_rate) == (self.base.traffic.max_concurrency is None):
            raise ValueError("a frontier is at one load: give one of --request-rate and --concurrency")
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed tells nothing for sure, got {self.num_runs}")
        check_ranges(self)
        check_points(
            "architectures x chunks x runs", len(self.space.archs), len(self.max_num_batched_tokens), self.num_runs
        )
        vet(replace(self.base, arch=arch) for arch in self.space.archs)  # what one of them refuses is refused now
        _ = self.candidates

    @cached_property
    def goal(self) -> Goal:
        """The service levels; as there are two figures to be good at, its objective is not asked."""
        return Goal("ttft", self.base.scoring.goodput, 0.99)

    @property
    def load(self) -> float:
        traffic = self.base.traffic
        return traffic.request_rate if traffic.max_concurrency is None else float(traffic.max_concurrency)

    @property
    def load_kind(self) -> Literal["request_rate", "concurrency"]:
        return "request_rate" if self.base.traffic.max_concurrency is None else "concurrency"

    @cached_property
    def errors(self) -> tuple[float, float]:
        """What a lead in each figure must exceed, as a share."""
        return lead_error(self.base, f"{self.x}_ms"), lead_error(self.base, f"{self.y}_ms")

    @cached_property
    def candidates(self) -> list[Experiment]:
        """Every architecture with every chunk, at its draft length."""
        prepared = self.goal.prepared(self.base, self.warmup_share)
        ways = [
            replace(self.space, max_num_batched_tokens=(chunk,)).starts(prepared)
            for chunk in self.max_num_batched_tokens
        ]
        return sorted((e for way in ways for e in way), key=lambda e: self.space.archs.index(e.arch))


@dataclass(frozen=True)
class FrontierPoint:
    """One candidate: its two figures, and where that puts it."""

    candidate: Experiment
    x: Interval
    y: Interval
    within_levels: Interval | None  # share of the requests that met every service level
    verdict: Standing
    by: Experiment | None = None  # who dominates it

    @property
    def chunk(self) -> int:
        return self.candidate.server.max_num_batched_tokens


@dataclass(repr=False)
class Frontier:
    """The candidates whose runs are all done, by the first figure."""

    question: FrontierQuestion
    points: list[FrontierPoint] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    def __repr__(self) -> str:
        return frontier_table(self)

    @property
    def runs(self) -> pd.DataFrame:
        """One row a run."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def those(self, *verdicts: Standing) -> list[FrontierPoint]:
        """The points of some verdicts."""
        return [point for point in self.points if point.verdict in verdicts]


def draw_frontier(question: FrontierQuestion, bench: Bench) -> Frontier:
    """Run all candidates and judge them. Ctrl-C keeps those that are done."""
    found = Frontier(question)
    candidates = question.candidates
    try:
        bench.rows([run for mine in candidates for run in replications(mine, question.num_runs)])
    except KeyboardInterrupt:
        found.interrupted = True
    rows = {mine: bench.known(replications(mine, question.num_runs)) for mine in candidates}
    done = {mine: known for mine, known in rows.items() if known is not None}
    found.points = _judged(question, done)
    for point in found.points:
        where = {"load_kind": question.load_kind, "load": question.load, "arch": point.candidate.arch}
        where |= {"settings": ", ".join(settings_text(point.candidate)), "max_num_batched_tokens": point.chunk}
        where |= {"verdict": point.verdict}
        found.rows += [row | where | {"run": run} for run, row in enumerate(done[point.candidate])]
    return found


def _judged(question: FrontierQuestion, rows: dict[Experiment, list[Row]]) -> list[FrontierPoint]:
    figures = {mine: (_figures(question.x, known), _figures(question.y, known)) for mine, known in rows.items()}
    up = [mine for mine, known in rows.items() if kept_up(known)]
    means = [(sum(figures[mine][0]), sum(figures[mine][1])) for mine in up]
    first = [up[at] for at in pareto(means)]
    confidence = corrected(len(up) - len(first))
    points = []
    for mine, known in rows.items():
        verdict: Standing = "does not keep up"
        by: Experiment | None = None
        if mine in first:
            verdict = "frontier"
        elif mine in up:
            ahead = {other: leads(figures[other], figures[mine], confidence) for other in first}
            most = max(first, key=lambda other: min(_beyond(ahead[other], question.errors)))
            by = most if all(map(exceeds, ahead[most], question.errors)) else None
            verdict = "dominated" if by else "not told apart"
        within = interval(map(attained, known)) if question.goal.levels else None
        points.append(FrontierPoint(mine, interval(figures[mine][0]), interval(figures[mine][1]), within, verdict, by))
    return sorted(points, key=lambda point: (point.verdict == "does not keep up", point.x.mean, point.y.mean))


def _figures(metric: str, rows: Sequence[Row]) -> list[float]:
    figures = [float(row[f"{metric}_ms"]) for row in rows]
    if not all(map(math.isfinite, figures)):  # times between tokens alone can be missing
        raise ValueError(f"{metric} has no figure: every answer is a single token")
    return figures


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other equals or beats in both and beats in one, by the first figure; less is better."""
    order = sorted(range(len(points)), key=lambda at: points[at])
    found: list[int] = []
    for at in order:
        if not found or points[at][1] < points[found[-1]][1] or points[at] == points[found[-1]]:
            found.append(at)
    return found


def leads(
    mine: tuple[Sequence[float], Sequence[float]], theirs: tuple[Sequence[float], Sequence[float]], confidence: float
) -> tuple[Interval, Interval]:
    """By how much mine is better in each figure, as a share, seed by seed; less is better.

    As both must be better to dominate, the chance of a false lead is not split between the two.
    """
    x, y = (interval([-share for share in shares(a, b)], confidence) for a, b in zip(mine, theirs, strict=True))
    return x, y


def _beyond(found: tuple[Interval, Interval], errors: tuple[float, float]) -> list[float]:
    return [lead.mean - error for lead, error in zip(found, errors, strict=True)]


def frontier_document(found: Frontier) -> dict[str, Any]:
    """Everything that was asked and found."""
    question = found.question
    points = [
        {
            "arch": point.candidate.arch,
            "settings": settings_text(point.candidate),
            "max_num_batched_tokens": point.chunk,
            f"{question.x}_ms": point.x,
            f"{question.y}_ms": point.y,
            "within_levels": point.within_levels,
            "verdict": point.verdict,
            "dominated_by": described(point.by) if point.by else None,
        }
        for point in found.points
    ]
    return {
        "pdvsim_version": __version__,
        "interrupted": found.interrupted,
        "question": output.settings(question),
        "leads_up_to_do_not_count": dict(zip((f"{question.x}_ms", f"{question.y}_ms"), question.errors, strict=True)),
        "points": points,
        "outside_measured": next(iter(table.most_outside(found.rows)), None) if found.rows else None,
    }


def frontier_table(found: Frontier) -> str:
    """A row a point, the frontier marked, by the first figure; then who did not keep up and what the verdicts mean."""
    if not found.points:
        return "no point is done"
    question, first = found.question, found.rows[0]
    shown = [point for point in found.points if point.verdict != "does not keep up"]
    levels = ["within levels %"] if question.goal.levels else []
    header = ["", "arch", "settings", metric_text(question.x), metric_text(question.y), *levels, "verdict"]
    rows = [
        [
            "*" if point.verdict == "frontier" else "",
            point.candidate.arch,
            ", ".join(settings_text(point.candidate)),
            positive(point.x),
            positive(point.y),
            *([positive(point.within_levels, 1, 100)] if point.within_levels else []),
            point.verdict + (f" by {place_of(point.by)}" if point.by else ""),
        ]
        for point in shown
    ]
    behind = [described(point.candidate) for point in found.points if point not in shown]
    return "\n".join(
        [
            *([table.grid(header, rows)] if rows else ["nobody keeps up"]),
            *([f"did not keep up: {'; '.join(behind)}"] if behind and rows else []),
            "* on the frontier: no other is as good in both means and better in one",
            *_rules(question),
            f"±: 95% confidence over {question.num_runs} replications",
            *lengths_note(question.base.traffic),
            table.founded(first),
            *table.most_outside(found.rows),
        ]
    )


def _rules(question: FrontierQuestion) -> list[str]:
    """When a point counts as dominated."""
    if question.num_runs < LEAST_SEEDS:
        return [f"{question.num_runs} seeds tell nothing apart: give at least {LEAST_SEEDS}"]
    x, y = question.errors
    return [
        f"dominated: another is surely better in both, by more than the profile's own error ({x:.1%} of "
        f"{name_of(f'{question.x}_ms')[0]}, {y:.1%} of {name_of(f'{question.y}_ms')[0]})",
        "not told apart: behind the frontier, not surely by so much; paired, 95% confidence for all of them together",
    ]


def place_of(candidate: Experiment) -> str:
    """An architecture and its chunk."""
    return f"{candidate.arch}, chunk {candidate.server.max_num_batched_tokens}"


def metric_text(metric: str) -> str:
    """A figure with its unit, as a heading."""
    name, unit, _ = name_of(f"{metric}_ms")
    return f"{name} {unit}"
