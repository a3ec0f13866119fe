"""Which points of a sweep nothing beats in two metrics at one load, e.g. TTFT against TPOT.

A point is on the frontier if no other equals or beats it in both means. Any other point is compared with the frontier
point that leads it most. It is dominated only if that one is better in both metrics, by paired intervals above the
profile's error; else the difference is not significant. Points that do not keep up have no steady latency: they are
only named.

The profile's error was measured between architectures; between two settings of one it is taken to be the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.bench.stats import Interval, interval, varied
from pdvsim.decide.error import lead_error
from pdvsim.decide.race import LEAST_SEEDS, corrected, exceeds, few_text, shares
from pdvsim.decide.report import positive
from pdvsim.decide.runs import kept_up
from pdvsim.sim.config import Experiment, Hardware, Scoring, Server
from pdvsim.view import table
from pdvsim.view.charts import Chart, Curve
from pdvsim.view.comparison import interval_note
from pdvsim.view.figure import chart_figure
from pdvsim.view.setting import Settings, points_line
from pdvsim.view.style import arch_colour, metric_label, name_of, paler

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

Standing = Literal["frontier", "not significant", "dominated", "does not keep up"]
MetricPair = tuple[Sequence[float], Sequence[float]]

LOGARITHMIC_FROM = 5.0  # ratio of an axis' ends
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class FrontierPoint:
    """An architecture with one setting: its two metrics and its verdict."""

    arch: str
    values: tuple[Any, ...]  # of the varied options
    x: Interval
    y: Interval
    verdict: Standing
    by: str = ""  # the dominating point

    @property
    def name(self) -> str:
        return ", ".join([self.arch, *map(str, self.values)])


@dataclass(repr=False)
class Frontier:
    """All points, ordered by the first metric; those that do not keep up last."""

    runs: pd.DataFrame
    dims: tuple[str, ...]  # varied options
    x: str
    y: str
    errors: tuple[float, float]  # relative lead to exceed in each metric
    points: list[FrontierPoint] = field(default_factory=list)

    def with_standing(self, *verdicts: Standing) -> list[FrontierPoint]:
        """The points with these verdicts."""
        return [point for point in self.points if point.verdict in verdicts]

    @property
    def shown(self) -> list[FrontierPoint]:
        return self.with_standing("frontier", "not significant", "dominated")

    def __repr__(self) -> str:
        """One row per point, the frontier marked; then points that did not keep up and the meaning of verdicts."""
        names = [name_of(metric)[0] for metric in (self.x, self.y)]
        rows = [
            {"": "*" if p.verdict == "frontier" else "", "arch": p.arch}
            | dict(zip(self.dims, map(str, p.values), strict=True))
            | {f"{name} ms": positive(value) for name, value in zip(names, (p.x, p.y), strict=True)}
            | {"verdict": p.verdict + (f" by {p.by}" if p.by else "")}
            for p in self.shown
        ]
        unsteady = [point.name for point in self.with_standing("does not keep up")]
        seeds = max(point.x.n for point in self.points)
        rules = [
            f"dominated: another is significantly better in both, by more than the profile's error "
            f"({self.errors[0]:.1%} of {names[0]}, {self.errors[1]:.1%} of {names[1]})",
            "not significant: worse than the frontier, but not by that much; paired, 95% confidence for all together",
        ]
        notes = [f"did not keep up: {'; '.join(unsteady)}"] if unsteady and rows else []
        notes += ["* on the frontier: no other has both means as low and one lower"]
        notes += rules if seeds >= LEAST_SEEDS else [few_text(seeds)]
        return "\n".join([table.rows_table(rows) if rows else "none keeps up", *notes, interval_note(seeds)])


def find_frontier(points: pd.DataFrame, x: str = "mean_ttft_ms", y: str = "p99_itl_ms") -> Frontier:
    """Judge every architecture and setting of a sweep at one load; lower is better in both metrics."""
    dims = tuple(varied(points))
    by = ["arch", *dims]
    if len(points[["load_kind", "load"]].drop_duplicates()) > 1:
        raise ValueError("a frontier needs one load: the results have several")
    for metric in (x, y):
        if metric not in points or not points[metric].map(math.isfinite).all():
            raise ValueError(f"{metric} is missing in some of the results")
    rows: dict[Any, pd.DataFrame] = {
        key: group.sort_values("seed") for key, group in points.groupby(by, sort=False, dropna=False)
    }
    if len({tuple(mine["seed"]) for mine in rows.values()}) > 1 or points.duplicated([*by, "seed"]).any():
        raise ValueError("points are compared seed by seed: all must have the same seeds")
    errors = (_error(points, x), _error(points, y))
    figures = {key: (mine[x].tolist(), mine[y].tolist()) for key, mine in rows.items()}
    up = [key for key, mine in rows.items() if kept_up(mine.to_dict("records"))]
    first = [up[at] for at in pareto([(sum(figures[key][0]), sum(figures[key][1])) for key in up])]
    confidence = corrected(len(up) - len(first))
    frontier = Frontier(points, dims, x, y, errors)
    for key in rows:
        x_mean, y_mean = map(interval, figures[key])
        point = FrontierPoint(str(key[0]), tuple(key[1:]), x_mean, y_mean, "does not keep up")
        if key in first:
            point = replace(point, verdict="frontier")
        elif key in up:
            ahead = {other: leads(figures[other], figures[key], confidence) for other in first}
            most = max(first, key=lambda other: min(a.mean - e for a, e in zip(ahead[other], errors, strict=True)))
            sure = all(map(exceeds, ahead[most], errors))
            verdict: Standing = "dominated" if sure else "not significant"
            point = replace(point, verdict=verdict, by=", ".join(map(str, most)) if sure else "")
        frontier.points.append(point)
    frontier.points.sort(key=lambda point: (point.verdict == "does not keep up", point.x.mean, point.y.mean))
    return frontier


def _error(points: pd.DataFrame, metric: str) -> float:
    """The largest error of a lead among the pairs and GPUs of the rows."""
    places = points[["pair", "gpu"]].drop_duplicates().itertuples(index=False)
    seats = (Experiment(server=Server(pair=pair), hardware=Hardware(gpu=gpu)) for pair, gpu in places)
    return max(lead_error(seat, metric) for seat in seats)


def pareto(points: Sequence[tuple[float, float]]) -> list[int]:
    """The points that no other point dominates, ordered by the first metric; lower is better."""
    order = sorted(range(len(points)), key=lambda at: points[at])
    best: list[int] = []
    for at in order:
        if not best or points[at][1] < points[best[-1]][1] or points[at] == points[best[-1]]:
            best.append(at)
    return best


def leads(mine: MetricPair, theirs: MetricPair, confidence: float) -> list[Interval]:
    """Relative lead in each metric, paired by seed; lower is better.

    As both must be better to dominate, the chance of a false lead is not split between the two.
    """
    return [interval([-s for s in shares(a, b)], confidence) for a, b in zip(mine, theirs, strict=True)]


def frontier_figure(frontier: Frontier, configs: Sequence[Settings] = ()) -> Figure:
    """One marker per point with its intervals, pale if dominated; the frontier as a stair.

    `configs` are those of the base experiments, for the caption and the service levels.
    """
    unsteady = len(frontier.with_standing("does not keep up"))
    note = points_line(frontier.runs, configs)
    note += " Pale: dominated beyond the profile's error. Bars: 95% confidence. Dashed: service levels."
    note += f" Not shown: {unsteady} that did not keep up." if unsteady else ""
    stair = frontier.with_standing("frontier")
    curves = [Curve("frontier", "0.25", [p.x.mean for p in stair], [p.y.mean for p in stair], step=True)]
    for at, point in enumerate(frontier.shown):
        colour = paler(arch_colour(point.arch), 0.55 if point.verdict == "dominated" else 0)
        marker = MARKERS[at % len(MARKERS)]
        curves.append(
            Curve(point.name, colour, [point.x.mean], [point.y.mean], hollow=[False], marker=marker, dash="none")
        )
    ends = [[value.mean for value in axis] for axis in zip(*((p.x, p.y) for p in frontier.shown), strict=True)]
    logs = [0 < min(means) < max(means) / LOGARITHMIC_FROM for means in ends] or [False, False]
    chart = Chart(
        "", metric_label(frontier.y), metric_label(frontier.x), curves, log_x=logs[0], log_y=logs[1], free=True
    )
    figure = chart_figure([[chart]], note, inches=(9.0, 5.4))
    [axes] = figure.axes
    for point, curve in zip(frontier.shown, curves[1:], strict=True):
        axes.errorbar(point.x.mean, point.y.mean, point.y.half, point.x.half, color=curve.colour, capsize=3)
    for metric, draw in ((frontier.x, axes.axvline), (frontier.y, axes.axhline)):
        for config in configs:
            levels = Scoring(goodput=tuple(config["scoring"]["goodput"])).slo()
            if seconds := levels.get(metric.removesuffix("_ms").rpartition("_")[2]):
                draw(1e3 * seconds, color="0.35", linewidth=1.4, linestyle="--", zorder=1)
    return figure
