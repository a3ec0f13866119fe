"""How much load each architecture holds: the highest request rate within the service levels, by root finding.

Each architecture is tuned first, near the rate that it holds with the settings that the formula predicts.

A rate holds in a run if the required share of the requests in its steady state meets every service level and the run
is labelled stable; an inconclusive run does not count. All runs last as long as the slowest server that holds its rate
needs (`sim.metrics.steady`). Each replication has its own seed and search, in which the same requests are compressed in
time. This gives one capacity per seed, an interval over seeds, and paired differences between architectures. Rates are
those of the sampled arrivals, not of the process: otherwise a seed whose requests happen to arrive slowly would seem to
hold more.

Limits: runs are finite, so a server slightly above its capacity may hold for a while. The share of requests is not
exactly monotone in the rate. A rate is extrapolated by at most 3%, and at most 1.5 times the tolerance, from a run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdvsim.bench import output
from pdvsim.bench.length import CLOSE, length_of, mean_turns, service_s, with_length
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import interval
from pdvsim.decide.error import Ranged, lead_error, model_error, ranged
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import Contest, contest, threshold_text
from pdvsim.decide.report import Answer, Report, gpus_text, positive, rests_on, vague
from pdvsim.decide.runs import at_rate, mean_gap
from pdvsim.decide.space import Space, settings_text
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.limits import (
    LeastShare,
    LongSeconds,
    NumRuns,
    Requests,
    Tolerance,
    check_list,
    check_points,
    check_ranges,
)
from pdvsim.sim.metrics.steady import LEAST, Length, first_uses, rate_length
from pdvsim.sim.relevance import vet
from pdvsim.view.comparison import interval_note
from pdvsim.view.report.sheet import Showable
from pdvsim.view.setting import acceptance_notes
from pdvsim.view.table import DETAIL, TextTable, span_text

ENOUGH = 1.25  # a run may be this much shorter than its own figures ask for, and can still be labelled stable
FEW = 100  # least requests measured in a coarse search

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
    least: Requests = LEAST  # requests measured in a run, per server; more if the load needs them, by the next two
    service_s: LongSeconds = 0.0  # longest time that requests are in service at a rate held so far
    transient_s: LongSeconds = 0.0  # longest start of a run
    share: LeastShare = 1.0  # of the measured part of a run, for a coarse search

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
        traffic = replace(self.base.traffic, seed=seed)
        one = replace(self.server_of(arch), traffic=traffic)
        run = with_length(self.goal.prepared(one), self.length(rate))
        return at_rate(run, rate * mean_gap(run.traffic))

    def server_of(self, arch: Arch) -> Experiment:
        """The experiment of an architecture with its settings."""
        return self.tuned.get(arch) or replace(self.base, arch=arch)

    def length(self, rate: float) -> Length:
        """Requests of a run at a rate."""
        traffic, least = replace(self.base.traffic, request_rate=rate), self.least * self.base.hardware.replicas
        whole = rate_length(traffic, mean_turns(traffic), self.service_s, self.transient_s, least)
        return whole.short(self.share, min(FEW, least))

    def suffices(self, row: Row) -> bool:
        """Whether runs of this plan are long enough for what a run showed.

        Where caches start cold, the queue that builds up meanwhile must be gone when the measured part begins.
        """
        if self.base.traffic.use_trace_timestamps:
            return True
        rate = float(row["load"])
        length, needed = self.length(rate), self.lengthened([row]).length(rate)
        settled = not self.starts_cold or needed.start <= CLOSE * length.start
        return settled and needed.total <= ENOUGH * length.total

    @property
    def starts_cold(self) -> bool:
        """Whether shared prefixes are prefilled at the start of a run, which takes more time than later requests do."""
        return first_uses(self.base.traffic) > 0

    def lengthened(self, rows: Sequence[Row]) -> Plan:
        """The plan with runs that are long enough for what these rows show."""
        longest_s = max(map(service_s, rows), default=0.0)
        starts_s = [self._start_s(row) for row in rows]
        return replace(self, service_s=max(self.service_s, longest_s), transient_s=max([self.transient_s, *starts_s]))

    def _start_s(self, row: Row) -> float:
        """The start that a run showed; twice that of its own length if no steady state began in it."""
        start_s, rate = float(row["transient_s"]), float(row["load"])
        return 2 * self.length(rate).start / rate if math.isnan(start_s) else start_s


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
        entries = []
        for arch in self.plan.archs:
            rows = self._of(arch)
            if not rows:
                continue
            numbers = ["output_tokens_per_s", "usd_per_million_output_tokens", "attainment"]
            numbers += ["usd_per_conversation"] if self.plan.base.traffic.converses else []
            settings = ", ".join(settings_text(self.plan.experiment((arch, 0), 1.0)))
            entry: dict[str, Any] = {
                "gpus": self.plan.gpus(arch),
                "arch": arch,
                "settings": settings,
                "replications": len(rows),
            }
            rates, below = [row["rate"] for row in rows], interval(row["may_hold"] for row in rows).mean
            rate = interval(rates, grid=self.plan.tolerance * sum(rates) / len(rates))
            # at least as wide as from the rate to the upper limit of the capacity; nan, from one replication, stays
            entry["rate"] = replace(rate, half_width=max(rate.half_width, below - rate.mean))
            entry |= {name: interval(row[name] for row in rows) for name in numbers}
            both = ranged(entry["rate"].mean, entry["rate"].half_width, max(map(self._model_error, rows)))
            entry |= {"low": both.low, "high": both.high}
            entry["held_in"] = sum(row["rate"] > 0 for row in rows)
            entry["limited_by"] = "/".join(dict.fromkeys(str(row["limited_by"]) for row in rows))
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
        errors = {arch: max(map(self._error, self._of(arch))) for arch in whole}
        return contest(whole, 1, len(self.plan.archs) - 1, self.plan.tolerance, errors)

    def _error(self, row: Row) -> float:
        """The profile's error in a rate: that of the throughput, or of the binding latencies divided by their slope.

        Near saturation TTFT rises steeply with the rate, so its error changes the rate little. TPOT may rise slowly,
        and its error changes the rate more.
        """
        return self._off(row, lambda metric: lead_error(self.plan.server_of(row["arch"]), metric))

    def _model_error(self, row: Row) -> float:
        """The same of the rate itself, not of a lead over another."""
        return self._off(row, lambda metric: model_error(self.plan.server_of(row["arch"]), [row], metric))

    def _off(self, row: Row, error: Callable[[str], float]) -> float:
        goal = self.plan.goal
        missed = [goal.level_metric(level) for level in goal.levels_ms if level in row["limited_by"].split("+")]
        return max([error("output_throughput"), *(error(metric) / float(row["steepness"]) for metric in missed)])

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
    notes = [
        f"a rate is held if {whose}{levels} and the queue does not grow",
        f"{_lengths(answer)}; rates within {plan.tolerance:.0%}; {answer.runs} runs",
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


def _lengths(answer: Capacities) -> str:
    """The length of the runs at the rates held."""
    plan, held = answer.plan, [row for row in answer.rows if row["rate"]]
    if not held:
        return "no run held its rate"
    runs = [plan.experiment((row["arch"], row["seed"]), row["rate"]) for row in held]
    counts, starts = ({getattr(length_of(run), name) for run in runs} for name in ("measured", "start"))
    times_s = [length_of(run).measured / run.traffic.request_rate for run in runs]
    return (
        f"runs at the rates held measure {span_text(counts)} requests ({min(times_s):.0f} s or more) after the first "
        f"{span_text(starts)}; the drain is excluded"
    )
