"""The question, the advice, and its text: every sentence uses values from the runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from pdvsim.common.commandline import command_line
from pdvsim.common.outcomes import Row
from pdvsim.decide import hazards
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.contest import Contest
from pdvsim.decide.deploy import Block, Deployment, unknown_head
from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.flips import Flips
from pdvsim.decide.goal import NAMES, Goal, attained, level_title
from pdvsim.decide.options import BUDGET
from pdvsim.decide.report import (
    Answer,
    Report,
    contest_document,
    lead_text,
    outside_measured,
    plural,
    positive,
    rests_on,
    threshold_text,
    unsure_text,
)
from pdvsim.decide.runs import (
    conversation_output_tokens,
    delivered_tokens_per_s,
    load_axis,
    load_words,
    replications,
)
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.tune import Search
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.limits import Budget, GpuHourUsd, NumRuns, PartialShare, Range, check_ranges
from pdvsim.sim.relevance import vet
from pdvsim.study import output
from pdvsim.study.length import length_of, too_short
from pdvsim.study.stats import Interval, interval
from pdvsim.view.report.sheet import Highlight, Showable
from pdvsim.view.setting import acceptance_notes, is_assumed, is_published, measure_notes, recorded_elsewhere
from pdvsim.view.table import DETAIL, TextTable, cell

if TYPE_CHECKING:
    import pandas as pd

MILLION = 1e6
BATCH_JOB_TIME = ("Time to finish (s)", "duration")
CONFIDENCE, FLIPS = "Confidence", "Where the decision changes"
TILE_METRICS = ("output_throughput", "mean_e2el_ms", "p99_ttft_ms", "p99_tpot_ms")
EXPECTED = (
    ("Request throughput (req/s)", "request_throughput"),
    ("Output throughput (tok/s)", "output_throughput"),
    ("Request goodput (req/s)", "request_goodput"),
    ("Mean TTFT (ms)", "mean_ttft_ms"),
    ("{} TTFT (ms)", "{}_ttft_ms"),
    ("P99 TTFT (ms)", "p99_ttft_ms"),
    ("Mean TPOT (ms)", "mean_tpot_ms"),
    ("{} TPOT (ms)", "{}_tpot_ms"),
    ("P99 TPOT (ms)", "p99_tpot_ms"),
    ("Mean E2EL (ms)", "mean_e2el_ms"),
    ("Tokens per round", "spec_decode_acceptance_length"),
)


@dataclass(frozen=True)
class Question:
    """The question, and the budget of simulations for the answer."""

    base: Experiment
    space: Space
    goal: Goal
    num_runs: NumRuns = 5
    indifference: PartialShare = 0.01
    budget: Budget = BUDGET
    gpu_hour_usd: GpuHourUsd | None = None
    ways: tuple[Contender, ...] = ()  # compared instead of architectures
    # up to which the smallest fleet is found if one server does not meet the goal; 0: none is
    most_gpus: Annotated[int, Range(0, 1024)] = 0
    fleet_archs: tuple[Arch, ...] = ()  # architectures of such fleets
    by_cost: bool = False  # the cheapest of the ways that meet the goal is chosen

    def __post_init__(self) -> None:
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed gives no significance, got {self.num_runs}")
        check_ranges(self)
        vet(way for start in self.space.starts(self.base) for way in self.space.drafts(start))

    def name(self, candidate: Experiment) -> str:
        """Name of the contender with these settings."""
        return contender_name(candidate, self.ways)

    @property
    def fleets(self) -> tuple[Contender, ...]:
        """Ways to use several GPUs."""
        return tuple(way for way in self.ways if way.hardware is not None)

    @property
    def drafters(self) -> tuple[Contender, ...]:
        """Architectures with drafters."""
        return tuple(way for way in self.ways if way.pair is not None)

    def described(self, candidate: Experiment) -> str:
        """Short description of a candidate."""
        return ", ".join([self.name(candidate), *settings_text(candidate)])

    def hourly(self, candidate: Experiment) -> float:
        """Hourly cost of a fleet: dollars, or GPUs if no price is given."""
        return candidate.hardware.replicas * candidate.gpus * (self.gpu_hour_usd or 1.0)

    @property
    def cheaper(self) -> frozenset[str]:
        """Fleets that cost less than others."""
        costs = {fleet.name: self.hourly(fleet.of(self.base)) for fleet in self.fleets}
        return frozenset(name for name, cost in costs.items() if cost < max(costs.values()))


@dataclass(repr=False)
class Advice(Answer):
    """The answer, possibly interrupted."""

    question: Question
    search: Search
    finals: dict[Experiment, list[Row]] = field(default_factory=dict)
    held: Contest | None = None  # among the finalists that can be chosen
    recommended: Experiment | None = None
    flips: list[Flips] = field(default_factory=list)
    alone: hazards.Alone | None = None
    break_even: hazards.BreakEven | None = None
    balance: hazards.Balance | None = None
    memory: dict[str, int] | None = None
    capacity: Capacities | None = None
    deployment: list[Block] = field(default_factory=list)  # commands to start it
    left_out: list[str] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # fleets that are not among the finalists, and why

    @property
    def rows(self) -> list[Row]:
        """The recommendation's replications."""
        assert self.recommended is not None
        return self.finals[self.recommended]

    @property
    def met(self) -> bool:
        """Whether the recommendation meets the service levels and keeps up; the capacity search overrules its runs."""
        held, load = self.held_rate, self.question.base.traffic.request_rate
        return self.question.goal.met(self.rows) and (held is None or load <= held.mean + held.half_width)

    @property
    def held_rate(self) -> Interval | None:
        """The rate that the recommendation holds; None if it was not searched."""
        rate: Interval | None = self.capacity.summary()[0]["rate"] if self.capacity and self.capacity.rows else None
        return rate

    def finalist(self, name: str) -> Experiment:
        """The finalist of this name."""
        return next(candidate for candidate in self.finals if self.question.name(candidate) == name)

    @property
    def able(self) -> list[Experiment]:
        """The finalists that meet the service levels and keep up."""
        return [candidate for candidate, rows in self.finals.items() if self.question.goal.met(rows)]

    @property
    def cheapest(self) -> Experiment | None:
        """The cheapest fleet that meets the service levels and keeps up."""
        return min(self.able if self.question.fleets else [], key=self.question.hourly, default=None)

    @property
    def priced(self) -> bool:
        """Whether costs are shown."""
        return bool(self.question.fleets or self.question.gpu_hour_usd)

    def per_million(self, candidate: Experiment) -> Interval:
        """Cost of a million output tokens on a fleet at this load: dollars or GPU-hours."""
        return self._cost_of(candidate, MILLION)

    def per_conversation(self, candidate: Experiment) -> Interval:
        """Cost of a conversation on a fleet at this load, all its turns, in the same unit."""
        return self._cost_of(candidate, conversation_output_tokens(self.question.base.traffic))

    def _cost_of(self, candidate: Experiment, tokens: float) -> Interval:
        """The price over what is delivered in the steady state: the one figure of cost in all lines."""
        price, rows = self.question.hourly(candidate), self.finals[candidate]
        runs = replications(candidate, len(rows))
        rates = (delivered_tokens_per_s(run, row) for run, row in zip(runs, rows, strict=True))
        return interval(price * tokens / (rate * 3600) for rate in rates)

    def _expects(self, key: str) -> Interval:
        """A metric of the recommendation."""
        within = (row[f"{key}_se"] for row in self.rows if f"{key}_se" in row)
        return interval((row.get(key, math.nan) for row in self.rows), within=within)

    @property
    def points(self) -> pd.DataFrame:
        """One row per run of the finals: finalist, settings, seed and metrics."""
        import pandas as pd

        ask, best = self.question, self.recommended
        return pd.DataFrame(
            {"finalist": ask.name(c), "settings": ", ".join(settings_text(c)), "recommended": c == best} | row
            for c, rows in self.finals.items()
            for row in rows
        )

    @property
    def flips_drawn(self) -> list[Flips]:
        """The axes on which more than the given load was tested."""
        return [flips for flips in self.flips if len(flips.probes) > 1]

    def report(self) -> Report:
        """The whole advice, section by section."""
        ask = self.question
        lead = f"Recommendation at {load_words(ask.base.traffic)}, with confidence."
        document = self.document(
            question=output.settings(ask),
            search={
                "settings_tried": len(self.search.figures),
                "settings_left_out": self.search.skipped,
                "budget": ask.budget,
                "runs": self.runs,
                "spent_s": self.spent_s,
                "left_out": self.left_out,
            },
        )
        stopped = "the above uses the runs that had finished" if self.interrupted else ""
        if self.recommended is None or self.held is None:
            return Report("Advice", lead, ask.base, [("", _undecided(self))], document, stopped)
        figures = {label: positive(self._expects(key)) for label, key in _metrics(ask).items() if key in TILE_METRICS}
        card = Highlight(_recommendation(self, self.recommended), figures, self.met)
        sections = (
            ("Recommendation" if self.met else _nothing(self), [card]),
            ("Expected", [_expected(self)]),
            (CONFIDENCE, _confidence(self, self.recommended, self.held)),
            (FLIPS, _where(self)),
            ("To run it", [Deployment(self.deployment)]),
            ("Failure modes nearby", _failure_modes(self, self.recommended)),
            ("Method", _notes(self, self.recommended)),
        )
        document |= _decided(self, self.recommended, self.held)
        return Report("Advice", lead, ask.base, sections, document, stopped)


def _decided(advice: Advice, best: Experiment, held: Contest) -> dict[str, Any]:
    """The document's part on the recommendation and its neighbourhood."""
    ask, rows, share = advice.question, advice.rows, advice.balance
    return {
        "recommendation": {
            "arch": best.arch,
            "fleet": ask.name(best) if ask.fleets else None,
            "described": ask.described(best),
            "meets": advice.met,
            "replications": len(rows),
            "server": output.settings(best.server),
            "command": command_line("pdvsim run", best),
            "deployment": [asdict(block) for block in advice.deployment],
        },
        "expected": {key: advice._expects(key) for key in _metrics(ask).values()}
        | ({"attainment": interval(map(attained, rows))} if ask.goal.levels else {}),
        "first_replication": {key: value for key, value in rows[0].items() if key != "run"},
        "objective": ask.goal.objective,
        "contest": contest_document(held),
        "finalists": [
            {"described": ask.described(c), "meets": ask.goal.met(mine), "command": command_line("pdvsim run", c)}
            | (_cost(advice, c) if advice.priced else {})
            for c, mine in advice.finals.items()
        ],
        **({"cheapest": advice.cheapest and ask.name(advice.cheapest)} if ask.fleets else {}),
        **({"refused": advice.refused} if advice.refused else {}),
        "flips": [
            asdict(flips) | {"probes": [asdict(p) for _, p in sorted(flips.probes.items())]} for flips in advice.flips
        ],
        "failure_modes": {
            "one_request_at_a_time": advice.alone
            and {"e2el_ms": contest_document(advice.alone.e2el_ms), "speculation_gain": advice.alone.speculation_gain},
            "break_even_acceptance": advice.break_even and asdict(advice.break_even),
            "balance": share
            and asdict(share) | {name: getattr(share, name) for name in ("step_ratio", "speedup", "affordable")},
            "kv_cache": advice.memory,
            "capacity": advice.capacity and advice.capacity.summary(),
        },
        "profile": rows[0]["profile"],
        "foundation": rows[0]["foundation"],
        "outside_measured": outside_measured(rows),
    }


def _undecided(advice: Advice) -> list[str]:
    order = advice.search.ranked(list(advice.search.figures), advice.question.base)
    if not order:
        return ["No simulation has finished."]
    first = advice.question.described(order[0])
    return [f"Not decided. After {len(order)} short runs without replication, {first} leads."]


def _recommendation(advice: Advice, best: Experiment) -> list[str]:
    ask, goal = advice.question, advice.question.goal
    card = f"{best.hardware.replicas * best.gpus} GPUs ({best.hardware.gpu})" if ask.fleets else best.hardware.gpu
    load = load_words(ask.base.traffic)
    model = ask.base.pair.target.name if ask.drafters else ask.base.server.pair
    lines = [ask.described(best), f"for {model} on {card} at {load}", *_without_drafts(advice, best)]
    if goal.levels:
        share = cell(interval(map(attained, advice.rows)), 1, 100)
        verb = "meets" if advice.met else "does not meet"
        lines.append(f"{verb} {goal.levels_text}{goal.share_text} (predicted: {share} %)")
        rooms = {name: interval(goal.headrooms(row)[name] for row in advice.rows) for name in goal.levels_ms}
        parts = ", ".join(f"{level_title(name)} {cell(room, 1)}" for name, room in rooms.items())
        of = "predicted value" if goal.named else goal.percentile.upper()
        lines.append(f"head-room (service level / {of}): {parts}")
    if advice.met:
        lines += [f"inconclusive: {why}" for why in _inconclusive(advice)]
    else:
        lines.append(_not_met(advice))
        if advice.search.skipped:
            lines.append(f"{advice.search.skipped} settings were not tested; one may meet the levels: raise --budget")
    return lines + _on_assumption(advice, best)


def _without_drafts(advice: Advice, best: Experiment) -> list[str]:
    """That drafts do not pay, where some were compared and the recommendation has none."""
    held, drafting = advice.held, [advice.question.name(c) for c in advice.finals if c.speculates]
    assert held is not None
    if best.speculates or not drafting:
        return []
    first = next(name for name in (held.best, *held.behind) if name in drafting)
    if advice.question.name(best) != held.best or first in held.unsure:
        return ["do not enable speculation: no setting that drafts is significantly better"]
    lead = cell(held.leads[first], 1, 100)
    return [f"do not enable speculation: the best setting that drafts, {first}, is {lead} % behind"]


def _on_assumption(advice: Advice, best: Experiment) -> list[str]:
    """Notes on unmeasured acceptance that the decision depends on, with the rate at which drafting breaks even.

    That is, assumed, published by others, or recorded with another target. A drafter that cannot be loaded is said to
    be hypothetical. If the recommendation drafts, it depends on its own acceptance and on that of its ties; else on
    every drafter's.
    """
    held, name, even = advice.held, advice.question.name, advice.break_even
    assert held is not None
    ties = (name(best), held.best, *held.alike)
    decisive = [c for c in advice.finals if name(c) in ties or not best.speculates]
    why = unknown_head(best) if best.speculates else ""
    notes = [f"note: hypothetical: {why}"] if why else []
    for kind in (recorded_elsewhere, is_published, is_assumed):
        mine = [c for c in decisive if kind(c)]
        pays = f"; {even.text(name(best))}" if even and even.who in map(name, mine) else ""
        notes += [f"note: {note}{pays}" for note in acceptance_notes(mine)]
    return notes


def _inconclusive(advice: Advice) -> list[str]:
    """Why it is uncertain that the load is held; empty if it is certain."""
    held, traffic = advice.held_rate, advice.question.base.traffic
    if held is not None:
        return [f"the highest rate it holds is {positive(held, 1)} req/s"] if traffic.request_rate > held.mean else []
    if short := next(filter(None, (too_short(traffic, row) for row in advice.rows)), ""):
        return [f"{short}: raise --num-prompts"]
    if 2 * sum(row["stability"] == "inconclusive" for row in advice.rows) <= len(advice.rows):
        return []
    assert advice.recommended is not None
    runs = f"runs of {advice.recommended.traffic.num_prompts} requests"
    return [f"{runs} are too short to show that the queue stays bounded: raise --num-prompts"]


def _nothing(advice: Advice) -> str:
    """The heading if no finalist meets the goal."""
    goal, load = advice.question.goal, load_words(advice.question.base.traffic)
    missed = f"meets {goal.levels_text}" if goal.levels else "keeps up"
    return f"Nothing {missed} at {load}; closest:"


def _not_met(advice: Advice) -> str:
    """What it would take, as far as that is known."""
    held, ask = advice.held_rate, advice.question
    more = f"no fleet of up to {plural(ask.most_gpus, 'GPU')} meets the goal: raise --gpus" if ask.most_gpus else ""
    if advice.capacity and held and held.mean > 0:
        holds = f"on {plural(advice.capacity.plan.gpus, 'GPU')} it holds {held.mean:.3g} req/s"
        return f"{holds}; {more}" if more else holds
    return more or "no tested setting holds this load; the values below are of the best one"


def _metrics(ask: Question) -> dict[str, str]:
    """Columns of a run that are expected of the recommendation, by label."""
    batch = (BATCH_JOB_TIME,) if load_axis(ask.base.traffic) == "requests" else ()
    percentile = ask.goal.percentile
    return {label.format(percentile.upper()): key.format(percentile) for label, key in (*batch, *EXPECTED)}


def _expected(advice: Advice) -> TextTable:
    rows, seed = advice.rows, advice.question.base.traffic.seed
    shown = {label: (advice._expects(key), rows[0].get(key)) for label, key in _metrics(advice.question).items()}
    mean, first = f"mean of {len(rows)} seeds, ± 95%", f"seed {seed} (command below)"
    return TextTable(
        [
            {"metric": label, mean: positive(values), first: cell(one)}
            for label, (values, one) in shown.items()
            if cell(one) != "-"
        ]
    )


def _confidence(advice: Advice, best: Experiment, held: Contest) -> list[str | Showable]:
    """The finalists in the order of their means, with the intervals that decided."""
    ask, goal = advice.question, advice.question.goal
    rows = []
    units = ["$/h", "$ per million tokens"] if ask.gpu_hour_usd else ["GPU/h", "GPU-hours per million tokens"]
    units += [units[1].replace("million tokens", "1000 conversations")] if ask.base.traffic.converses else []
    named = {ask.name(candidate): candidate for candidate in advice.finals}
    order = list(dict.fromkeys((held.best, *held.behind, *named)))
    shared = [one for one in settings_text(best) if all(one in settings_text(other) for other in advice.finals)]
    for name in sorted(order, key=lambda name: ask.hourly(named[name])) if ask.by_cost else order:
        candidate, values = named[name], held.values.get(name)
        state = ""
        if name in held.unsure:
            state = unsure_text(held.leads[name], held.thresholds[name], name in held.alike)
        if values is None:
            values = interval(map(goal.value, advice.finals[candidate]))
            state = "misses the levels" if goal.levels else "does not keep up"
            state = "costs more" if candidate in advice.able else state
        ahead = lead_text(held, name) if name in held.leads else ""
        chosen = ("recommended" if advice.met else "closest") if candidate == best else ""
        costs = [f"{ask.hourly(candidate):.3g}", positive(advice.per_million(candidate), 3)] if advice.priced else []
        costs += [positive(advice.per_conversation(candidate), 3, 1000)] if advice.priced and len(units) > 2 else []
        own = [setting for setting in settings_text(candidate) if setting not in shared]
        row = {"finalist": ", ".join([name, *own]), NAMES[goal.objective]: positive(values)}
        row |= {f"lead of {held.best}": ahead} | dict(zip(units, costs, strict=False))
        rows.append(row | {"verdict": ", ".join(filter(None, (chosen, state)))})
    lines: list[str | Showable] = [TextTable(rows, (DETAIL,))]
    if shared:
        lines.append(f"All with {', '.join(shared)}.")
    if advice.refused:
        lines.append(_refused(advice.refused))
    if ask.by_cost and advice.met:
        lines.append(f"{ask.name(best)} is the cheapest fleet that meets the goal.")
    elif ask.gpu_hour_usd and (cheapest := advice.cheapest) not in (None, best):
        lines.append(f"Cheapest finalist that meets the goal: {ask.described(cheapest)}.")
    if not held.behind:
        return lines if ask.by_cost else [*lines, "The only finalist that meets the goal."]
    limits = threshold_text([held], ask.indifference)
    lines.append(f"Leads are paired by seed, {held.confidence:.1%} confidence each; {limits}.")
    if held.alike:
        lines.append(f"{ask.name(best)} is the simplest of the finalists without significant difference.")
    return lines


def _refused(refused: Mapping[str, str]) -> str:
    """Fleets that were not compared, counted by reason; the document names them."""
    counts = Counter(refused.values())
    shown = (f"{count} {'fleet' if count == 1 else 'fleets'} {why}" for why, count in counts.items())
    return f"Not compared: {'; '.join(shown)}."


def _cost(advice: Advice, candidate: Experiment) -> dict[str, Any]:
    ask = advice.question
    return {
        "fleet": ask.name(candidate),
        "gpus": candidate.hardware.replicas * candidate.gpus,
        "hourly": ask.hourly(candidate),
        "per_million_output_tokens": advice.per_million(candidate),
        **({"per_conversation": advice.per_conversation(candidate)} if ask.base.traffic.converses else {}),
    }


def _where(advice: Advice) -> list[str]:
    return [line for flips in advice.flips for line in flips.lines] + _left_out(advice, True)


def _left_out(advice: Advice, flips: bool) -> list[str]:
    what = [what for what in advice.left_out if what.startswith("flips") is flips]
    return [f"not tested (raise --budget): {name}" for name in what]


def _failure_modes(advice: Advice, best: Experiment) -> list[str]:
    lines = []
    if advice.alone is not None:
        lines.append(f"low concurrency: {advice.alone.text(advice.question.name(best))}")
    if advice.break_even is not None:
        lines.append(f"poor speculation: {advice.break_even.text(advice.question.name(best))}")
    if advice.balance is not None:
        lines.append(f"balanced models: {advice.balance.text}")
    if advice.memory is not None:
        peak, whole = advice.memory.values()
        lines.append(f"KV cache: at most {peak / whole:.0%} in use ({peak} of {whole} tokens)")
    return [*lines, *_saturation(advice), *_left_out(advice, False)]


def _saturation(advice: Advice) -> list[str]:
    """The distance to capacity, if it was searched."""
    capacity, rate = advice.capacity, advice.held_rate
    if capacity is None or rate is None:
        return []
    if not rate.mean:
        return ["saturation: no rate holds the service levels"]
    used = advice.question.base.traffic.request_rate / rate.mean
    load = f"the load is {used:.0%} of that" if used <= 1 else f"the load is {used:.3g} times that"
    text = f"saturation: it holds {positive(rate, 1)} req/s within the service levels; {load}"
    if advice.question.gpu_hour_usd and advice.recommended is not None:
        here = advice.per_million(advice.recommended)
        text += f"; a million output tokens cost ${positive(here, 3)} here and ${used * here.mean:.3f} at that rate"
    return [text]


def _notes(advice: Advice, best: Experiment) -> list[str]:
    ask = advice.question
    able = "meet the service levels and keep up" if ask.goal.levels else "keep up"
    left = f"; {advice.search.skipped} more were not tested" if advice.search.skipped else ""
    who = "way to use the GPUs" if ask.fleets else "architecture"
    who += " and drafter" if ask.drafters else ""
    accepted = dict.fromkeys(way.acceptance_text for way in ask.drafters)
    counts = sorted({len(rows) for rows in advice.finals.values()})
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    length = length_of(best)
    runs = f"{length.measured} requests"
    if best.scoring.steady:
        runs += f" in the steady state (after the first {length.start}, without the drain)"
    most = "lowest" if ask.goal.sign < 0 else "highest"
    return [
        f"objective: {most} {NAMES[ask.goal.objective]} among the settings that {able}",
        f"searched {len(advice.search.figures)} settings in short runs, each {who} at its best{left}; "
        f"{advice.runs} of {ask.budget} simulations used, in {advice.spent_s:.0f} s",
        f"{len(advice.finals)} finalists: {seeds} seeds of {runs}; the search used other seeds",
        *([f"acceptance of {'; '.join(accepted)}"] if accepted else acceptance_notes(advice.finals)),
        *measure_notes(advice.finals),
        *rests_on(ask.base.traffic, advice.rows),
    ]
