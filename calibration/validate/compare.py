"""Predicted against measured: the same experiments under both clocks, metric by metric.

Every real run of a file is simulated with the same seeds; nothing in the profile is fitted on these runs. An error is
predicted over measured, less one. Beside it stand the spread of repeated real runs (each against the mean of the others
of its experiment: what a perfect prediction would still be off) and the two ablations of the contention model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, get_args

import numpy as np

from pdvsim.calibration.fit.errors import middle
from pdvsim.calibration.validate.runs import Scenario
from pdvsim.common.outcomes import Row
from pdvsim.common.workers import finished_here
from pdvsim.sim.config import Contention, Experiment
from pdvsim.sim.limits import MAX_DATA_BYTES
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.reading import parse_json, read_text, said
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate

FAMILIES = ("ttft", "tpot", "itl", "e2el")
METRICS = (
    "output_throughput",
    *(f"{which}_{name}_ms" for name in FAMILIES for which in ("mean", "median", "p95", "p99")),
)
CONTENTIONS: tuple[Contention, ...] = get_args(Contention)
APART = 0.03  # two architectures measured nearer than this have no order to get right


@dataclass(frozen=True)
class Checked:
    """One real run and its prediction."""

    load: Scenario
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        """Relative errors by metric; those that the run or the simulation does not have are left out."""
        return {
            name: self.predicted[name] / self.measured[name] - 1
            for name in METRICS
            if self.measured.get(name) and not math.isnan(self.predicted[name])
        }


@dataclass(frozen=True)
class Validation:
    """All runs under one or several contention models, and whether all were simulated."""

    checked: dict[Contention, list[Checked]]
    foundation: str
    complete: bool


def read(path: str | Path) -> list[dict[str, Any]]:
    """The runs of a file; a ValueError of one line if it is not one."""
    number = 0
    try:
        text = read_text(path, MAX_DATA_BYTES)
        lines = []
        for line in text.splitlines():
            number += 1
            run = parse_json(line)
            Scenario(**run["load"]).experiment()
            if not run["metrics"]["output_throughput"] > 0:
                raise ValueError("output_throughput is not above 0")
            lines.append(run)
    except (OSError, ValueError, KeyError, TypeError) as error:
        where = f", line {number}" if number else ""
        raise ValueError(f"{path}{where}: not a file of real runs: {said(error)}") from None
    if not lines:
        raise ValueError(f"{path}: holds no runs")
    return lines


def experiments(lines: Sequence[dict[str, Any]]) -> list[Scenario]:
    """What was run, each once, however often it was repeated."""
    return list(dict.fromkeys(_experiment(line) for line in lines))


def validate(
    lines: Sequence[dict[str, Any]],
    contentions: Sequence[Contention] = ("fluid",),
    profile: str | None = None,
    jobs: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Validation:
    """Simulate the experiment of every run, once for all its repeats; after Ctrl-C, with what is finished."""
    distinct = experiments(lines)
    wanted = [_at(load, contention, profile) for contention in contentions for load in distinct]
    rows: dict[int, Row] = {}
    outcomes = finished_here(_predicted, list(enumerate(wanted)), jobs)
    with closing(outcomes), suppress(KeyboardInterrupt):
        for outcome in outcomes:
            if outcome.row is None:
                load = distinct[outcome.index % len(distinct)]
                raise ValueError(f"{load.arch} of {load.pair}: {outcome.reason}")
            rows[outcome.index] = outcome.row
            if progress:
                progress(len(rows), len(wanted))
    checked: dict[Contention, list[Checked]] = {contention: [] for contention in contentions}
    for i, contention in enumerate(contentions):
        for line in lines:
            row = rows.get(i * len(distinct) + distinct.index(_experiment(line)))
            if row is not None:
                predicted = {name: float(row[name]) for name in METRICS}
                checked[contention].append(Checked(Scenario(**line["load"]), line["metrics"], predicted))
    foundation = "; ".join(dict.fromkeys(str(rows[number]["foundation"]) for number in sorted(rows)))
    return Validation(checked, foundation, len(rows) == len(wanted))


def _at(load: Scenario, contention: Contention, profile: str | None) -> Experiment:
    """What is simulated for a load."""
    experiment = load.experiment()
    hardware = replace(experiment.hardware, contention=contention, profile=profile, band=False)
    return suited(replace(experiment, hardware=hardware))


def _predicted(index: int, experiment: Experiment) -> Row:
    result = simulate(experiment)
    return {"foundation": result.meta["foundation"]} | summarise(result)


def spread(lines: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """By metric, each repeated run against the mean of the other runs of its experiment, less one."""
    groups: dict[Scenario, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(_experiment(line), []).append(line["metrics"])
    found = []
    for runs in groups.values():
        for i, run in enumerate(runs):
            others = runs[:i] + runs[i + 1 :]
            if others:
                means = {m: float(np.mean([o.get(m) or math.nan for o in others])) for m in METRICS}
                found.append({m: run[m] / means[m] - 1 for m in METRICS if run.get(m) and means[m] > 0})
    return found


def leads(checked: Sequence[Checked]) -> dict[str, Any]:
    """By metric, how far off a predicted lead of one architecture over another is, and how often their order is right.

    For every two architectures in the same closed loop, the figure of the one predicted ahead over the other's,
    predicted over measured, less one; repeated runs count as their mean. `baseline` served fewer requests: without it.
    """
    loops: dict[tuple[str, int], dict[str, list[Checked]]] = {}
    for run in checked:
        if run.load.concurrency is not None and run.load.arch != "baseline":
            loops.setdefault((run.load.pair, run.load.concurrency), {}).setdefault(run.load.arch, []).append(run)
    by_metric = {metric: _leads(metric, list(loops.values())) for metric in METRICS}
    return {
        "pairs": sum(math.comb(len(archs), 2) for archs in loops.values()),
        "by_metric": {metric: found for metric, found in by_metric.items() if found},
    }


def _leads(metric: str, loops: Sequence[dict[str, list[Checked]]]) -> dict[str, float] | None:
    """Of one metric; None where no two architectures have it."""
    errors, apart, right = [], 0, 0
    sign = 1 if metric == "output_throughput" else -1  # times are better the shorter
    for archs in loops:
        both = [
            (runs[0].predicted[metric], float(np.mean([run.measured[metric] for run in runs])))
            for runs in archs.values()
            if all(metric in run.errors for run in runs)
        ]
        for (ahead, real), (behind, other) in combinations(sorted(both, key=lambda of: -sign * of[0]), 2):
            errors.append(ahead / behind / (real / other) - 1)
            if max(real / other, other / real) > 1 + APART:
                apart += 1
                right += (ahead - behind) * (real - other) > 0
    return {**middle(errors), "apart": apart, "order_right": right} if errors else None


def document(found: Validation, lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All errors, and their medians and 95th percentiles overall, by metric and by architecture."""
    first, *others = found.checked
    repeats = spread(lines)
    return {
        "contention": first,
        "foundation": found.foundation,
        "complete": found.complete,
        "runs": [
            {
                "load": asdict(c.load),
                "measured": {name: c.measured.get(name) for name in METRICS},
                "predicted": c.predicted,
                "errors": c.errors,
            }
            for c in found.checked[first]
        ],
        **_summary(found.checked[first]),
        "leads": leads(found.checked[first]),
        "spread": {"runs": len(repeats), **_middles(repeats)} if repeats else None,
        "ablations": {name: _summary(found.checked[name]) for name in others},
    }


def _experiment(line: dict[str, Any]) -> Scenario:
    return replace(Scenario(**line["load"]), repeat=0)


def _summary(checked: Sequence[Checked]) -> dict[str, Any]:
    archs = list(dict.fromkeys(c.load.arch for c in checked))
    return _middles([c.errors for c in checked]) | {
        "by_arch": {a: middle([e for c in checked if c.load.arch == a for e in c.errors.values()]) for a in archs},
    }


def _middles(errors: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Medians and 95th percentiles of errors' sizes, overall and by metric."""
    overall = middle([e for run in errors for e in run.values()])
    by_metric = {m: middle([run[m] for run in errors if m in run]) for m in METRICS if any(m in run for run in errors)}
    return {"median_abs_error": overall["median"], "p95_abs_error": overall["p95"], "by_metric": by_metric}
