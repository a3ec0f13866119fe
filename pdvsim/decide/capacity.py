"""How much load each architecture holds: the highest request rate within the service levels, by root finding.

Each architecture is tuned first, near the rate that it holds with the settings that the formula predicts.

A rate holds in a run if the required share of the requests in its steady state meets every service level and the run
is labelled stable; an inconclusive run does not count. All runs last as long as the slowest server that holds its rate
needs (`sim.metrics.steady`). Each replication has its own seed and search, in which the same requests are compressed in
time. This gives one capacity per seed, an interval over seeds, and paired differences between architectures. Rates are
those of the sampled arrivals, not of the process: otherwise a seed whose requests happen to arrive slowly would seem to
hold more.

Limits: runs are finite, so a server slightly above its capacity may hold for a while. The share of requests is not
exactly monotone in the rate. A rate is extrapolated by at most 3%, and at most the tolerance, from a run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pdvsim.bench import output
from pdvsim.bench.length import length_of, with_length
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import interval
from pdvsim.decide.error import Ranged, lead_error, model_error, ranged
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import Contest, contest, threshold_text
from pdvsim.decide.report import Answer, Report, gpus_text, positive, rests_on, vague
from pdvsim.decide.runs import at_rate, mean_gap
from pdvsim.decide.space import Space, settings_text
from pdvsim.sim.config import Arch, Experiment, Server
from pdvsim.sim.limits import (
    NumRuns,
    Requests,
    Tolerance,
    check_list,
    check_points,
    check_ranges,
)
from pdvsim.sim.metrics.steady import LEAST, Length
from pdvsim.sim.relevance import vet
from pdvsim.view.comparison import interval_note
from pdvsim.view.report.sheet import Showable
from pdvsim.view.setting import acceptance_notes
from pdvsim.view.table import DETAIL, TextTable

NO_LENGTH = Length(0, 0)

Case = tuple[Arch, int]  # architecture and seed


@dataclass(frozen=True)
class Plan:
    """What to find the capacity of."""

    base: Experiment
    archs: tuple[Arch, ...]
    num_runs: NumRuns
    goal: Goal
    tolerance: Tolerance = 0.02
    space: Space | None = None  # settings to tune each architecture over; None: those of the base
    tuned: Mapping[str, Experiment] = field(default_factory=dict)  # contenders with their settings, if known
    least: Requests = LEAST  # requests measured in a run, per server
    length: Length = NO_LENGTH  # requests of a run, if it needs more
    coarse: bool = False  # an inconclusive run counts as held if it kept up

    def __post_init__(self) -> None:
        check_list("arch", self.archs)
        if not self.goal.levels:
            raise ValueError("capacity needs service levels: give --goodput, e.g. --goodput ttft:500 tpot:50")
        check_ranges(self)
        check_points("architectures x runs", len(self.archs), self.num_runs)
        vet(self.experiment(case, 1.0) for case in self.cases())  # reports invalid options before any run

    def gpus(self, arch: Arch) -> int:
        """GPUs of all servers of an architecture."""
        one = self.server_of(arch)
        return one.hardware.replicas * one.gpus

    def cases(self) -> list[Case]:
        """Architecture and seed of every search."""
        seeds = range(self.base.traffic.seed, self.base.traffic.seed + self.num_runs)
        return [(arch, seed) for arch in self.archs for seed in seeds]

    def experiment(self, case: Case, rate: float) -> Experiment:
        """One run at a rate of the sampled arrivals."""
        arch, seed = case
        one = replace(self.server_of(arch), traffic=replace(self.base.traffic, seed=seed))
        measured = max(self.length.measured, self.least * self.base.hardware.replicas)
        run = with_length(self.goal.prepared(one), Length(self.length.start, measured))
        return at_rate(run, rate * mean_gap(run.traffic))

    def server_of(self, arch: Arch) -> Experiment:
        """The experiment of an architecture with its settings."""
        return self.tuned.get(arch) or replace(self.base, arch=arch)

    def with_servers(self, servers: Mapping[Arch, Server]) -> Plan:
        """The plan with other settings of its architectures."""
        tuned = {arch: replace(self.server_of(arch), server=server) for arch, server in servers.items()}
        return replace(self, tuned=tuned)

    @property
    def tuned_over(self) -> Space | None:
        """The settings to tune, if there are any."""
        return self.space if self.space is not None and self.space.kinds(self.archs) else None

    def rate(self, place: float) -> float:
        """The rate at a place of a search: searches that need the same run share it."""
        return float((1 + self.tolerance) ** place)


@dataclass(repr=False)
class Capacities(Answer):
    """The results of the searches: one row per architecture and seed."""

    plan: Plan
    gpu_hour_usd: float | None = None
    rows: list[Row] = field(default_factory=list)
    runs: int = 0
    interrupted: bool = False

    def summary(self) -> list[dict[str, Any]]:
        """One entry per architecture, with intervals over seeds."""
        numbers = ["output_tokens_per_s", "usd_per_million_output_tokens", "attainment"]
        numbers += ["usd_per_conversation"] if self.plan.base.traffic.converses else []
        entries = []
        for arch in self.plan.archs:
            rows = self._of(arch)
            if not rows:
                continue
            rates, below = [row["rate"] for row in rows], interval(row["may_hold"] for row in rows).mean
            rate = interval(rates, grid=self.plan.tolerance * sum(rates) / len(rates))
            # at least as wide as from the rate to the upper limit of the capacity; nan, from one replication, stays
            rate = replace(rate, half_width=max(rate.half_width, below - rate.mean))
            both = ranged(rate.mean, rate.half_width, max(self._error(row, of_lead=False) for row in rows))
            entry = {
                "gpus": self.plan.gpus(arch),
                "arch": arch,
                "settings": ", ".join(settings_text(self.plan.server_of(arch))),
                "replications": len(rows),
                "rate": rate,
                **{name: interval(row[name] for row in rows) for name in numbers},
                "low": both.low,
                "high": both.high,
                "held_in": sum(row["rate"] > 0 for row in rows),
                "limited_by": "/".join(dict.fromkeys(str(row["limited_by"]) for row in rows)),
            }
            entries.append(entry)
        return entries

    def ranges(self) -> dict[str, Ranged]:
        """The rate that each architecture holds, with the errors of seeds and of the model."""
        return {entry["arch"]: _range_of(entry) for entry in self.summary()}

    def most(self) -> Contest | None:
        """Which architecture holds most, if the searches of at least two have finished.

        Leads within the tolerance of the search or the profile's error do not count.
        """
        rates = {str(arch): [row["rate"] for row in self._of(arch)] for arch in self.plan.archs}
        whole = {arch: values for arch, values in rates.items() if len(values) == self.plan.num_runs}
        if len(whole) < 2:
            return None
        errors = {arch: max(self._error(row, of_lead=True) for row in self._of(arch)) for arch in whole}
        return contest(whole, 1, len(self.plan.archs) - 1, self.plan.tolerance, errors)

    def _error(self, row: Row, of_lead: bool) -> float:
        """The model's error in a rate, or in its lead over another.

        It is that of the throughput, or of the binding latencies divided by their slope. Near saturation TTFT rises
        steeply with the rate, so its error changes the rate little. TPOT may rise slowly: its error changes it more.
        """
        goal, served = self.plan.goal, self.plan.server_of(row["arch"])
        missed = [goal.level_metric(level) for level in goal.levels_ms if level in row["limited_by"].split("+")]
        shares = {"output_throughput": 1.0} | {metric: 1 / float(row["steepness"]) for metric in missed}
        errors = {name: lead_error(served, name) if of_lead else model_error(served, [row], name) for name in shares}
        return max(errors[name] * share for name, share in shares.items())

    def _of(self, arch: Arch) -> list[Row]:
        return [row for row in self.rows if row["arch"] == arch]

    def report(self) -> Report:
        """One row per architecture, which holds most, and the method."""
        plan, result, summary = self.plan, self.most(), self.summary()
        asked = "" if plan.goal.named else f" for {plan.goal.attainment:.0%}"
        lead = f"The highest request rate each architecture holds with {' '.join(plan.goal.levels)}{asked}."
        lines: list[str | Showable] = ["no search has finished"]
        if self.rows:
            most = [_most(plan.gpus(plan.archs[0]), result)] if result else []
            lines = [_table(summary, self.gpu_hour_usd is not None), *most, *_notes(self, summary, result)]
        return Report(
            "Capacity",
            lead,
            plan.base,
            [("", lines)],
            self.document(
                runs=self.runs,
                plan=output.settings(plan),
                gpu_hour_usd=self.gpu_hour_usd,
                summary=summary,
                most=result and result.document(),
                searches=self.rows,
            ),
            f"{len(self.rows)} of {len(plan.cases())} searches" if self.interrupted else "",
            not self.rows,
        )


def _range_of(entry: Mapping[str, Any]) -> Ranged:
    return Ranged(entry["rate"].mean, entry["low"], entry["high"])


def _table(summary: list[dict[str, Any]], priced: bool) -> TextTable:
    rows = []
    for entry in summary:
        gpus, held = entry["gpus"], _range_of(entry)
        figures = {"req/s held": held.text(), "per GPU": Ranged(*(end / gpus for end in held)).text()}
        figures["out tok/s"] = positive(entry["output_tokens_per_s"], 0)
        if priced:
            figures["$/M out tok at that rate"] = positive(entry["usd_per_million_output_tokens"], 3)
            if "usd_per_conversation" in entry:
                figures["$/1000 conversations"] = positive(entry["usd_per_conversation"], 3, 1000)
        limited, missed = str(entry["limited_by"]), entry["replications"] - entry["held_in"]
        if not entry["held_in"]:
            figures = dict.fromkeys(figures, "-") | {"req/s held": "none"}
            limited += ", even at the lowest rate"
        elif missed:
            limited += f" (no rate held in {missed} of {entry['replications']})"
        row = {"GPUs": str(gpus), "arch": entry["arch"], "settings": entry["settings"]}
        rows.append(row | figures | {"limited by": limited})
    return TextTable(rows, ("per GPU", DETAIL, "settings"))


def _most(gpus: int, result: Contest) -> str:
    """One sentence on which architecture holds most."""
    where, second = gpus_text(gpus), result.others[0]
    more = result.values[result.best].mean - result.values[second].mean
    lead = f"{result.lead_text(second)} ({more:+.2f} req/s) over {second}"
    if result.values[result.best].mean == 0:
        return f"{where}: none meets the service levels"
    if result.sure:
        return f"{where}: {result.best} holds most, {lead}"
    if math.isnan(result.leads[second].half_width):
        return f"{where}: {result.best} held most, {lead}; one seed gives no significance"
    return f"{where}: {result.best} leads {', '.join(result.unsure)} without significance; {lead}"


def _notes(answer: Capacities, summary: list[dict[str, Any]], result: Contest | None) -> list[str]:
    plan = answer.plan
    levels = " and ".join(f"{name} <= {level:g} ms" for name, level in plan.goal.levels_ms.items())
    whose = "" if plan.goal.named else f"{plan.goal.attainment:.0%} of the requests have "
    length, fastest = length_of(plan.experiment(plan.cases()[0], 1.0)), max(row["rate"] for row in answer.rows)
    shortest = f" ({length.measured / fastest:.0f} s or more)" if fastest else ""
    notes = [
        f"a rate is held if {whose}{levels} and the queue does not grow",
        f"runs measure {length.measured} requests{shortest} after the first {length.start}; the drain is excluded",
        f"rates within {plan.tolerance:.0%}; {answer.runs} runs",
    ]
    if plan.num_runs > 1:
        family = f"; differences are paired by seed, each at {result.confidence:.1%}" if result else ""
        both = "req/s: in parentheses with the errors of seeds and of the model; other columns: "
        notes.append(both + interval_note(plan.num_runs) + family)
        notes += [threshold_text([result], plan.tolerance)] if result else []
    if any(vague(entry["rate"]) for entry in summary):
        notes.append("(0 to ...): the 95% interval is wider than the mean; raise --num-runs")
    if any("queue" in row["limited_by"] for row in answer.rows):
        notes.append(
            "queue: at the next rate it grew or the run was inconclusive; then ± reaches up to the throughput of the "
            "saturated server"
        )
    served = (plan.experiment(case, 1.0) for case in plan.cases())
    return [*notes, *rests_on(plan.base.traffic, answer.rows), *acceptance_notes(served)]
