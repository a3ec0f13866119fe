"""Predicted against measured: the same experiments under both clocks, metric by metric.

Every real run is simulated with the same seeds; nothing in the profile is fitted on these runs. An error is predicted
over measured, minus one. Reported with it are the spread of repeated real runs (each against the mean of the others of
its experiment, which is the error of a perfect prediction), the two ablations of the contention model and, if a run
recorded the speed of its machine, the errors of predictions for that machine.

Error bars are made of both predictions: for any machine, and for a machine whose pace is known.

Held-out runs are never mixed with the others, which are the only ones used to develop the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations, starmap
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from pdvsim.bench.join import Joined, grouped, middle, simulations
from pdvsim.bench.pool import Row
from pdvsim.calibration.validate.served import FAMILIES, METRICS, ServedRun
from pdvsim.calibration.validate.table import cell, error_table
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Contention, Experiment
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.prices.pace import Pace, pace_in
from pdvsim.sim.prices.reach import NOTABLE_SHARE
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.trust import LONG_PROMPT_TOKENS, Bars, Known, Loading, groups, load_kind, traits

TAILS = ("p90", "p95", "p99")
CONTENTIONS: tuple[Contention, ...] = get_args(Contention)
LEAST_LEAD = 0.03  # architectures measured closer than this have no order
ERROR_GROUPS = ("arch", "pair", "dataset", "load")
COVERED_BY = (*ERROR_GROUPS, "group", "prompts", "sizes", "drafter", "controller")
MOST_CAPACITY_SHARES = {"open, low": 0.65, "open, mid": 0.9, "open, high": math.inf}
BAR_COVERAGE = 0.9
TARGETS = {  # at most: of all errors the median and the 95th percentile; the 95th percentile of a group, of a metric
    "median": 0.025, "p95": 0.08, "group": 0.10, "output_throughput": 0.03, "median_ttft_ms": 0.10, "p95_ttft_ms": 0.10,
}  # fmt: skip


CheckedTask = tuple[Experiment, Pace | None, bool]  # for which machine; whether it is no ablation


@dataclass(frozen=True)
class Checked(Joined[ServedRun]):
    """One real run and its prediction."""

    share: float = math.nan  # of what the server can do at most, that an open load asks for
    paced: dict[str, float] | None = None  # predicted for this very machine
    prompt_tokens: float = 0.0  # mean of its requests
    outside: dict[str, float] = field(default_factory=dict)  # how far the simulation went beyond what was measured

    @property
    def kind(self) -> Loading:
        """How the server was loaded, as error bars know it."""
        return load_kind(self.of.experiment.traffic)

    @cached_property
    def groups(self) -> tuple[str, str, str]:
        """The groups of runs whose errors it is among."""
        return groups(self.of.experiment, self.prompt_tokens, self.outside.get("share", 0.0))

    @cached_property
    def labels(self) -> dict[str, str]:
        """The value of each part in `COVERED_BY` that this run counts towards."""
        experiment, load = self.of.experiment, str(self.kind)
        if load == "open":
            load = next(name for name, most in MOST_CAPACITY_SHARES.items() if not self.share > most)
        drafter = experiment.server.drafted_by
        return {
            "arch": experiment.arch,
            "pair": experiment.server.pair,
            "dataset": dataset(experiment),
            "load": load,
            "group": self.groups[0],
            "prompts": "long" if self.prompt_tokens >= LONG_PROMPT_TOKENS else "short",
            "sizes": "beyond" if self.outside.get("share", 0.0) > NOTABLE_SHARE else "measured",
            "drafter": "model" if drafter in ("model", "none") else "head or n-gram",
            "controller": experiment.server.controller,
        }


@dataclass(frozen=True)
class Validation:
    """All runs under one or several contention models, and how many were simulated."""

    checked: dict[Contention, list[Checked]]
    foundation: str
    unfinished: str = ""  # after Ctrl-C: how many simulations there are

    def runs(self, contention: Contention, held_out: bool) -> list[Checked]:
        """The runs under a contention model that are held out or not."""
        return [one for one in self.checked[contention] if one.of.held_out == held_out]

    def by_machine(self, held_out: bool) -> dict[Known, list[Checked]]:
        """The runs that are held out or not, predicted for any machine and, where its pace is known, for their own."""
        runs = self.runs(next(iter(self.checked)), held_out)
        paced = [replace(one, predicted=one.paced) for one in runs if one.paced is not None]
        return {"any machine": runs, "this machine": paced}


def dataset(experiment: Experiment) -> str:
    """Return the source of the lengths of a run's requests."""
    traffic = experiment.traffic
    if traffic.dataset_name == "random":
        return "long prompts" if (traffic.input_len or 1024) >= LONG_PROMPT_TOKENS else "short chat"
    return traffic.dataset_name if traffic.dataset_path is None else Path(traffic.dataset_path).name.split(".")[0]


def validate(
    runs: Sequence[ServedRun],
    contentions: Sequence[Contention] = ("fluid",),
    profile: str | None = None,
    jobs: int | None = None,
    quiet: bool = True,
) -> Validation:
    """Simulate the experiment of every run, once for all its repeats; after Ctrl-C, with what is finished."""
    first = contentions[0]
    tasks: dict[Contention, list[CheckedTask]] = {contention: [] for contention in contentions}
    for contention, those in tasks.items():
        for run in runs:
            hardware = replace(run.experiment.hardware, contention=contention, profile=profile, band=False)
            pace = pace_in(run.meta) if contention == first else None  # the ablations need none
            those.append((applicable(replace(run.experiment, hardware=hardware)), pace, contention == first))
    once = list(dict.fromkeys(task for those in tasks.values() for task in those))
    done = simulations(_predicted, once, "simulations", jobs, quiet, lambda task: float(task[0].traffic.num_prompts))
    for number, reason in done.failures.items():
        command = next(run.command for those in tasks.values() for run, task in zip(runs, those, strict=True)
                       if task == once[number])  # fmt: skip
        raise ValueError(f"{command}: {reason}")
    rows = {once[number]: done.rows[number] for number in sorted(done.rows)}
    shares = {run.command: rows[task]["share"] for run, task in zip(runs, tasks[first], strict=True) if task in rows}
    checked = {
        contention: [
            Checked(run, run.metrics, share=shares.get(run.command, math.nan), **rows[task]["checked"])
            for run, task in zip(runs, those, strict=True)
            if task in rows
        ]
        for contention, those in tasks.items()
    }
    foundations = [str(row["foundation"]).split("; ") for row in rows.values()]
    foundation = "; ".join(dict.fromkeys(part for parts in foundations for part in parts))
    return Validation(checked, foundation, done.unfinished)


def _predicted(index: int, task: CheckedTask) -> Row:
    experiment, pace, first = task  # how full a server is does not change with how its streams share the GPU
    result = simulate(experiment)
    metrics, paced = summarise(result), None
    if pace is not None:
        here = pace.applied(covering_profile(experiment), experiment.pair)
        paced = _figures(summarise(simulate(experiment, profile=here)))
    prompt_tokens, _ = traits(metrics)
    return {
        "foundation": result.meta["foundation"],
        "share": asked(experiment) if first else math.nan,
        "checked": {
            "predicted": _figures(metrics),
            "paced": paced,
            "prompt_tokens": prompt_tokens,
            "outside": metrics.get("outside_measured", {}),
        },
    }


def asked(experiment: Experiment) -> float:
    """The share of a server's capacity, by the simulator, that an open load asks for; nan of others."""
    if load_kind(experiment.traffic) != "open":
        return math.nan
    return experiment.traffic.request_rate / capacity(experiment)


def capacity(experiment: Experiment) -> float:
    """Simulated requests per second of a full server: after the first, until the last is sent."""
    server = experiment.server
    places = min(server.num_workers, server.max_num_seqs) if experiment.base_arch == "baseline" else server.max_num_seqs
    full = replace(
        experiment,
        traffic=replace(experiment.traffic, num_prompts=3 * places + 8, request_rate=math.inf, burstiness=1.0,
                        max_concurrency=places),
        scoring=replace(experiment.scoring, warmup_requests=places),
    )  # fmt: skip
    return float(summarise(simulate(full))["request_throughput"])


def _figures(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: float(metrics[name]) for name in METRICS if metrics.get(name) is not None}


# spread, leads -------------------------------------------------------------------------------------------------------


def spread(runs: Sequence[ServedRun]) -> list[Joined[ServedRun]]:
    """Each repeated run against the mean of the others of its experiment, as what they predict of it."""
    rows = []
    for repeats in grouped(runs, lambda run: run.command).values():
        for one in repeats:
            if others := [other.metrics for other in repeats if other is not one]:
                means = {m: float(np.mean([metrics.get(m) or math.nan for metrics in others])) for m in METRICS}
                rows.append(Joined(one, means, {m: value for m in METRICS if (value := one.metrics.get(m))}))
    return rows


def leads(checked: Sequence[Checked]) -> dict[str, Any]:
    """Return by metric the errors of predicted leads between servers, and how often their order is right.

    `limit` is what a lead must exceed to count: the 95th percentile of the errors, in percentiles pooled (`_rising`).
    For every two that served the same requests in the same closed loop, the figure of the one predicted ahead over the
    other's, predicted over measured, less one; repeated runs count as their mean. `baseline` is left out: it is too
    slow for anyone to choose between it and another.
    """
    loops: dict[Any, dict[str, list[Checked]]] = {}
    for one in checked:
        e = one.of.experiment
        if one.kind == "closed" and e.base_arch != "baseline":
            key = (e.server.pair, e.traffic, e.acceptance, e.scoring)
            loops.setdefault(key, {}).setdefault(one.of.command, []).append(one)
    by_metric = {metric: _leads(metric, list(loops.values())) for metric in METRICS}
    known = {metric: both for metric, both in by_metric.items() if both[0]}
    limits = {metric: middle(errors)["p95"] for metric, (errors, _) in known.items()}
    for family in FAMILIES:
        tails = [f"{mark}_{family}_ms" for mark in TAILS]
        limits |= _rising({metric: known[metric][0] for metric in tails if metric in known})
    return {
        "pairs": sum(math.comb(len(servers), 2) for servers in loops.values()),
        "by_metric": {
            metric: {**middle(errors), **order, "limit": limits[metric]} for metric, (errors, order) in known.items()
        },
    }


def _rising(errors: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the thresholds of leads in percentiles, from the lowest percentile up.

    A percentile that few of the pairs have borrows the errors of the next, and so do two of which the lower is further
    off: which runs had which percentile is chance, and tails are harder to predict the further out they are.
    """
    most = max(map(len, errors.values()), default=0)
    groups: list[tuple[list[str], list[float]]] = []
    for metric, mine in errors.items():
        groups.append(([metric], list(mine)))
        while len(groups) > 1 and (
            len(groups[-2][1]) < most or middle(groups[-2][1])["p95"] > middle(groups[-1][1])["p95"]
        ):
            names, more = groups.pop()
            groups[-1] = ([*groups[-1][0], *names], [*groups[-1][1], *more])
    return {metric: middle(pooled)["p95"] for names, pooled in groups for metric in names}


def _leads(metric: str, loops: Sequence[dict[str, list[Checked]]]) -> tuple[list[float], dict[str, int]]:
    """Return the error of each predicted lead of one metric, and counts of right orders."""
    errors, apart, right = [], 0, 0
    sign = 1 if metric == "output_throughput" else -1  # times are better the shorter
    for servers in loops:
        both = [
            (runs[0].predicted[metric], float(np.mean([one.of.metrics[metric] for one in runs])))
            for runs in servers.values()
            if all(metric in one.errors for one in runs)
        ]
        for (leading, real), (trailing, other) in combinations(sorted(both, key=lambda of: -sign * of[0]), 2):
            errors.append(leading / trailing / (real / other) - 1)
            if max(real / other, other / real) > 1 + LEAST_LEAD:
                apart += 1
                right += (leading - trailing) * (real - other) > 0
    return errors, {"apart": apart, "order_right": right}


# error bars ----------------------------------------------------------------------------------------------------------


def bars(checked: Sequence[Checked]) -> Bars:
    """Return by group and metric the share within which 90% of real runs lie: the conformal quantile of log ratios.

    Repeated runs count as one, their mean. A group with too few experiments for a quantile is left out, and so is one
    where the largest error alone would decide it, unless it holds all runs.
    """
    by_group: Bars = {}
    for (group, metric), sizes in sorted(_sizes(checked).items()):
        if (size := _quantile(group, list(sizes.values()))) is not None:
            by_group.setdefault(group, {})[metric] = math.ceil(1e3 * size) / 1e3
    return by_group


def _sizes(checked: Iterable[Checked]) -> dict[tuple[str, str], dict[str, float]]:
    """Return by group and metric the absolute log ratios of its experiments, each under its command."""
    repeats = grouped(checked, lambda one: one.of.command)
    sizes: dict[tuple[str, str], dict[str, float]] = {}
    for command, runs in repeats.items():
        for metric in METRICS:
            known = [one.of.metrics[metric] for one in runs if metric in one.errors]
            if known:
                size = abs(math.log(runs[0].predicted[metric] / (sum(known) / len(known))))
                for group in runs[0].groups:
                    sizes.setdefault((group, metric), {})[command] = size
    return sizes


def _quantile(group: str, sizes: Sequence[float]) -> float | None:
    """The share that a new run is within, 9 times of 10, if it is like these; None of too few.

    Between two order statistics where 90% of n + 1 is no whole number: else small groups have bars that hold 95%.
    """
    place = BAR_COVERAGE * (len(sizes) + 1)
    if place > len(sizes) - (group != "any"):
        return None
    (low, high), share = sorted([*sizes, math.inf])[int(place) - 1 :][:2], place % 1
    return math.expm1(low + share * (high - low) if share else low)


class Hit(NamedTuple):
    """Whether its bar holds one metric of a run."""

    one: Checked
    metric: str
    held: bool


def hits_of(checked: Sequence[Checked], within: Bars | None = None) -> list[Hit]:
    """Whether its bar holds each figure of each run that has one; by default, one made of all other experiments."""
    sizes, hits = _sizes(checked) if within is None else {}, list[Hit]()
    for one in checked:
        for metric, error in one.errors.items():
            if within is None:
                known = ((group, sizes[group, metric].items()) for group in one.groups)
                others = ((group, [size for run, size in runs if run != one.of.command]) for group, runs in known)
                widths: Iterable[float | None] = starmap(_quantile, others)
            else:
                widths = (within.get(group, {}).get(metric) for group in one.groups)
            bar = next((bar for bar in widths if bar is not None), None)
            if bar is not None:
                hits.append(Hit(one, metric, abs(math.log1p(error)) <= math.log1p(bar)))
    return hits


def covered(hits: Sequence[Hit]) -> dict[str, Any]:
    """The share of hits, in all, by metric and by the groups of `COVERED_BY`, each with its number of runs."""

    def share(those: Sequence[Hit]) -> dict[str, Any]:
        runs = len({(hit.one.of.command, hit.one.of.repeat) for hit in those})
        return {"runs": runs, "covered": float(np.mean([hit.held for hit in those])) if those else math.nan}

    labels: dict[str, Callable[[Hit], str]] = {kind: partial(_hit_label, kind) for kind in COVERED_BY}
    return share(hits) | {"by": error_table(hits, {"metric": lambda hit: hit.metric, **labels}, share)}


def _label(kind: str, one: Checked) -> str:
    return one.labels[kind]


def _hit_label(kind: str, hit: Hit) -> str:
    return hit.one.labels[kind]


# the document --------------------------------------------------------------------------------------------------------


def document(validation: Validation, numbers: dict[str, int] | None = None) -> dict[str, Any]:
    """All errors, and their medians and 95th percentiles overall, by metric and by group; bars, and what they hold.

    `numbers` are what runs are called, by their id. Runs that are held out have a part of their own.
    """
    first, *others = validation.checked
    within = {machine: bars(checked) for machine, checked in validation.by_machine(held_out=False).items()}

    def part(held_out: bool) -> dict[str, Any]:
        """The errors of visible or held-out runs, and what bars from other visible runs hold of them."""
        machines = validation.by_machine(held_out)
        paced = [one for one in machines["any machine"] if one.paced is not None]
        sides = {"raw": paced, "after": machines["this machine"]}
        return {
            "runs": [_entry(one, numbers) for one in machines["any machine"]],
            **errors_by(machines["any machine"], *ERROR_GROUPS),
            "paced": {side: errors_by(runs, *ERROR_GROUPS) for side, runs in sides.items()} if paced else None,
            "coverage": {
                machine: covered(hits_of(runs, within[machine] if held_out else None))
                for machine, runs in machines.items()
            },
        }

    known = validation.runs(first, held_out=False)
    repeats = spread([one.of for one in known])
    reached: dict[str, float] = {}  # the largest of each size in which runs were beyond what was measured
    for name, size in (item for one in known for item in one.outside.items()):
        if name != "share" and not name.endswith("_limit"):
            reached[name] = max(size, reached.get(name, 0.0))
    return {
        "contention": first,
        "foundation": validation.foundation,
        "complete": not validation.unfinished,
        "targets": TARGETS,
        **part(held_out=False),
        "leads": leads(known),
        "spread": errors_by(repeats) if repeats else None,
        "ablations": {name: errors_by(validation.runs(name, held_out=False), *ERROR_GROUPS) for name in others},
        "bars": within,
        "reached": reached,
        "held_out": part(held_out=True) if any(one.of.held_out for one in validation.checked[first]) else None,
    }


def _entry(one: Checked, numbers: dict[str, int] | None) -> dict[str, Any]:
    return {
        "number": (numbers or {}).get(one.of.id),
        **one.labels,
        "repeat": one.of.repeat,
        "command": one.of.command,
        "measured": {name: one.of.metrics.get(name) for name in METRICS},
        "predicted": one.predicted,
        "errors": one.errors,
    }


def errors_by(rows: Sequence[Any], *kinds: str) -> dict[str, Any]:
    """The errors of runs in all metrics, in each, and in all metrics of the groups of these kinds."""
    metrics = {metric: errors for metric in METRICS if (errors := cell(rows, metric))["rows"]}
    labels: dict[str, Callable[[Checked], str]] = {kind: partial(_label, kind) for kind in kinds}
    return {"by": {"all": {"all": cell(rows)}, "metric": metrics, **error_table(rows, labels, lambda of: cell(of))}}
