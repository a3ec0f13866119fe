"""A question, the advice on it, and that as text and as a document: every sentence is made of figures from the runs."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from pdvsim.common.commandline import command_line
from pdvsim.common.outcomes import Row
from pdvsim.common.version import __version__
from pdvsim.decide import hazards
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.contest import Contest
from pdvsim.decide.deploy import Block, deployment_text
from pdvsim.decide.fleet import Fleet, fleet_name, hourly, prices
from pdvsim.decide.flips import Edge, Flips
from pdvsim.decide.goal import NAMES, Goal, attained
from pdvsim.decide.options import BUDGET
from pdvsim.decide.space import Space, settings_text
from pdvsim.decide.text import contest_document, lead_text, lengths_note, positive, threshold_text
from pdvsim.decide.tune import Search
from pdvsim.sim.config import Experiment
from pdvsim.sim.doubts import vet
from pdvsim.sim.limits import check_ranges
from pdvsim.study import output
from pdvsim.study.stats import Interval, interval
from pdvsim.view.table import cell, founded, grid, most_outside

MILLION = 1e6
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
    ("Tokens a round", "spec_decode_acceptance_length"),
)


@dataclass(frozen=True)
class Question:
    """What is asked, and how many simulations the answer may take."""

    base: Experiment
    space: Space
    goal: Goal
    num_runs: int = 5
    indifference: float = 0.01
    warmup_share: float = 0.2
    budget: int = BUDGET
    gpu_hour_usd: float | None = None
    fleets: tuple[Fleet, ...] = ()  # ways to use several GPUs, that compete in place of architectures
    card_hour_usd: tuple[str, ...] = ()  # what an hour of each of their cards costs, as card=dollars

    def __post_init__(self) -> None:
        if not 0 < self.base.traffic.request_rate < float("inf"):
            raise ValueError("advice is for a load: give --request-rate, in requests per second")
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed tells nothing for sure, got {self.num_runs}")
        check_ranges(self)
        for fleet in self.fleets:
            self.hourly(fleet.name)  # a price that is missing is asked for now
        vet(way for start in self.space.starts(self.base) for way in self.space.drafts(start))

    def name(self, candidate: Experiment) -> str:
        """Who competes with these settings: an architecture, or a fleet."""
        return fleet_name(candidate) if self.fleets else str(candidate.arch)

    def described(self, candidate: Experiment) -> str:
        """A candidate in a few words."""
        return ", ".join([self.name(candidate), *settings_text(candidate)])

    def hourly(self, name: str) -> float:
        """What a fleet costs an hour: dollars, or GPUs where no prices are given."""
        fleet = next(fleet for fleet in self.fleets if fleet.name == name)
        return hourly(fleet, self.base, prices(self.card_hour_usd))

    @property
    def cheaper(self) -> frozenset[str]:
        """Fleets that cost less than others."""
        costs = {fleet.name: self.hourly(fleet.name) for fleet in self.fleets}
        return frozenset(name for name, cost in costs.items() if cost < max(costs.values()))

    @property
    def varies_acceptance(self) -> bool:
        """Whether acceptance is one rate, that can be another."""
        return self.base.acceptance.by_rate


@dataclass(repr=False)
class Advice:
    """The answer, as far as it got."""

    question: Question
    search: Search
    finals: dict[Experiment, list[Row]] = field(default_factory=dict)
    held: Contest | None = None  # among the finalists that could be chosen
    recommended: Experiment | None = None
    flips: list[Flips] = field(default_factory=list)
    alone: hazards.Alone | None = None
    break_even: hazards.BreakEven | None = None
    balance: hazards.Balance | None = None
    drafter: hazards.DrafterCost | None = None
    memory: hazards.Memory | None = None
    capacity: Capacities | None = None
    deployment: list[Block] = field(default_factory=list)  # what to start
    left_out: list[str] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False

    def __repr__(self) -> str:
        return advice_text(self)

    @property
    def rows(self) -> list[Row]:
        """The recommendation's replications."""
        assert self.recommended is not None
        return self.finals[self.recommended]

    @property
    def met(self) -> bool:
        """Whether the recommendation meets the service levels and keeps up; the search for its capacity knows best."""
        held, load = self.held_rate, self.question.base.traffic.request_rate
        return self.question.goal.met(self.rows) and (held is None or load <= held.mean + held.half_width)

    @property
    def held_rate(self) -> Interval | None:
        """The rate that the recommendation holds; None where that was not looked for."""
        rate: Interval | None = self.capacity.summary()[0]["rate"] if self.capacity and self.capacity.rows else None
        return rate

    def finalist(self, name: str) -> Experiment:
        """The finalist of this name."""
        return next(candidate for candidate in self.finals if self.question.name(candidate) == name)

    @property
    def cheapest(self) -> Experiment | None:
        """Of the fleets that meet the service levels and keep up, the one that costs least."""
        ask = self.question
        able = [c for c, rows in self.finals.items() if ask.goal.met(rows)] if ask.fleets else []
        return min(able, key=lambda c: ask.hourly(ask.name(c)), default=None)

    def per_million(self, candidate: Experiment) -> Interval:
        """What a million output tokens cost on a fleet at this load: dollars, or hours of a GPU."""
        tokens = [float(row["output_throughput"]) * 3600 for row in self.finals[candidate]]
        price = self.question.hourly(self.question.name(candidate))
        return interval(price * MILLION / each for each in tokens)


def advice_text(advice: Advice) -> str:
    """The whole advice, section by section."""
    if advice.recommended is None:
        return "\n".join(_unfinished(advice))
    sections = (
        ("Recommendation" if advice.met else _nothing(advice), _recommendation(advice)),
        ("Expected", [_expected(advice)]),
        ("How sure", _how_sure(advice)),
        ("Where the decision flips", _where(advice)),
        ("Failure modes near it", _failure_modes(advice)),
        ("To run it", _commands(advice)),
        ("How this was found", _notes(advice)),
    )
    return "\n\n".join("\n".join([f"{title}", "-" * len(title), *lines]) for title, lines in sections if lines)


def advice_document(advice: Advice) -> dict[str, Any]:
    """Everything that was asked and found."""
    ask = advice.question
    document: dict[str, Any] = {
        "pdvsim_version": __version__,
        "interrupted": advice.interrupted,
        "question": output.settings(ask),
        "search": {
            "settings_tried": len(advice.search.figures),
            "settings_left_out": advice.search.skipped,
            "budget": ask.budget,
            "runs": advice.runs,
            "spent_s": advice.spent_s,
            "left_out": advice.left_out,
        },
    }
    best = advice.recommended
    if best is None:
        return document
    assert advice.held is not None
    rows = advice.rows
    return document | {
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
        "expected": {key: interval(row.get(key, math.nan) for row in rows) for key in _numbers(advice)}
        | ({"attainment": interval(map(attained, rows))} if ask.goal.levels else {}),
        "first_replication": {key: value for key, value in rows[0].items() if key != "run"},
        "objective": ask.goal.objective,
        "contest": contest_document(advice.held),
        "finalists": [
            {"described": ask.described(c), "meets": ask.goal.met(mine), "command": command_line("pdvsim run", c)}
            | (_cost(advice, c) if ask.fleets else {})
            for c, mine in advice.finals.items()
        ],
        **({"cheapest": advice.cheapest and ask.name(advice.cheapest)} if ask.fleets else {}),
        "flips": [
            asdict(found) | {"probes": [asdict(found.probes[at]) for at in sorted(found.probes)]}
            for found in advice.flips
        ],
        "failure_modes": {
            "one_request_at_a_time": advice.alone
            and {"e2el_ms": contest_document(advice.alone.e2el_ms), "speculation_gain": advice.alone.speculation_gain},
            "break_even_acceptance": advice.break_even and asdict(advice.break_even),
            "balance": advice.balance
            and asdict(advice.balance)
            | {
                "step_ratio": advice.balance.step_ratio,
                "speedup": advice.balance.speedup,
                "affordable": advice.balance.affordable,
            },
            "drafter_cost": advice.drafter and asdict(advice.drafter),
            "kv_cache": advice.memory and asdict(advice.memory),
            "capacity": advice.capacity and advice.capacity.summary(),
            "busiest_lane": dict([hazards.busiest_lane(rows)]),
        },
        "profile": rows[0]["profile"],
        "foundation": rows[0]["foundation"],
        "outside_measured": next(iter(most_outside(rows)), None),
    }


def _unfinished(advice: Advice) -> list[str]:
    order = advice.search.ranked(list(advice.search.figures), advice.question.base)
    if not order:
        return ["Nothing is known yet."]
    first = advice.question.described(order[0])
    return [f"Not decided. In {len(order)} short tries so far, none of them replicated: {first} leads."]


def _recommendation(advice: Advice) -> list[str]:
    ask, best, held = advice.question, advice.recommended, advice.held
    assert best is not None
    assert held is not None
    rate, goal = ask.base.traffic.request_rate, ask.goal
    count = best.hardware.replicas * best.gpus
    card = f"{count} GPUs ({best.hardware.gpu})" if ask.fleets else best.hardware.gpu
    lines = [ask.described(best), f"for {ask.base.server.pair} on {card} at {rate:g} req/s"]
    if goal.levels:
        share = interval(map(attained, advice.rows))
        verb = "meets" if advice.met else "does NOT meet"
        lines.append(
            f"{verb} {_levels(goal)} for {goal.attainment:.0%} of the requests: {cell(share, 1, 100)} % are in time"
        )
        room = {name: interval(goal.headrooms(row)[name] for row in advice.rows) for name in goal.levels_ms}
        parts = (f"{name.upper()} {cell(value, 1)} times" for name, value in room.items())
        lines.append(f"head-room of the {goal.percentile.upper()} under its level: {', '.join(parts)}")
    if advice.met and (why := _inconclusive(advice)):
        lines.append(f"inconclusive: {why}")
    if not advice.met:
        lines.append(_not_met(advice))
        if advice.search.skipped:
            lines.append(f"{advice.search.skipped} settings were not tried; others may do: give more --budget")
    return lines


def _inconclusive(advice: Advice) -> str:
    """Why it is not certain that the load is held; nothing where it is."""
    held, requests = advice.held_rate, advice.question.base.traffic.num_prompts
    if held is not None:
        above = advice.question.base.traffic.request_rate > held.mean
        return f"the rate it holds is {positive(held, 1)} req/s" if above else ""
    if 2 * sum(row["stability"] == "cannot tell" for row in advice.rows) <= len(advice.rows):
        return ""
    return f"runs of {requests} requests are too short to show that the queue stays bounded: raise --num-prompts"


def _nothing(advice: Advice) -> str:
    """The heading where none of the finalists will do."""
    goal, rate = advice.question.goal, advice.question.base.traffic.request_rate
    missed = f"meets {_levels(goal)}" if goal.levels else "keeps up"
    return f"Nothing {missed} at {rate:g} req/s; least bad:"


def _levels(goal: Goal) -> str:
    return " and ".join(f"{name.upper()} <= {level:g} ms" for name, level in goal.levels_ms.items())


def _not_met(advice: Advice) -> str:
    """What it would take, as far as that is known."""
    found, held, rate = advice.capacity, advice.held_rate, advice.question.base.traffic.request_rate
    if found and held and held.mean > 0:
        gpus = found.plan.gpus[0]
        needed = max(gpus + 1, math.ceil(gpus * rate / held.mean))
        return f"on {gpus} GPU{'s' if gpus > 1 else ''} it holds {held.mean:.3g} req/s: {needed} would be needed"
    return "no setting that was tried holds this load; the figures below are of the best of them"


def _numbers(advice: Advice) -> list[str]:
    return [key.format(advice.question.goal.percentile) for _, key in EXPECTED]


def _expected(advice: Advice) -> str:
    goal, rows = advice.question.goal, advice.rows
    body = []
    marks = {label.format(goal.percentile.upper()): key.format(goal.percentile) for label, key in EXPECTED}
    for label, key in marks.items():
        values = [row.get(key) for row in rows]
        if values[0] is None or (isinstance(values[0], float) and math.isnan(values[0])):
            continue
        body.append([label, positive(interval(values)), cell(values[0])])  # type: ignore[arg-type]
    seed = advice.question.base.traffic.seed
    return grid(["metric", f"mean of {len(rows)} seeds, ± 95%", f"seed {seed}, the command below"], body)


def _how_sure(advice: Advice) -> list[str]:
    """The finalists in the order of their means, with the intervals that decided."""
    best, held, goal = advice.recommended, advice.held, advice.question.goal
    assert best is not None
    assert held is not None
    rows, ask = [], advice.question
    for name in (held.best, *held.behind):
        candidate = advice.finalist(name)
        behind = "" if name == held.best else lead_text(held, name)
        state = "not told apart" if name in held.unsure else ""
        chosen = ("recommended" if advice.met else "least bad") if candidate == best else ""
        rows.append([ask.described(candidate), positive(held.values[name]), behind, *_costs(advice, candidate), state])
        rows[-1].append(chosen)
    for candidate, mine in advice.finals.items():
        if ask.name(candidate) not in held.values:
            state = "misses the levels" if goal.levels else "does not keep up"
            value = positive(interval(map(goal.value, mine)))
            rows.append([ask.described(candidate), value, "", *_costs(advice, candidate), state, ""])
    unit = "$" if ask.card_hour_usd else "GPU"
    costs = [f"{unit}/h", f"{unit if unit == '$' else 'GPU-hours'} per million tokens"] if ask.fleets else []
    lines = [grid(["finalist", NAMES[goal.objective], f"{held.best} ahead by", *costs, "", ""], rows)]
    if ask.card_hour_usd and (cheapest := advice.cheapest) not in (None, best):
        lines.append(f"Cheapest that meets the goal: {ask.described(cheapest)}.")
    if not held.behind:
        return [*lines, "The only finalist that could be chosen."]
    lines.append(
        f"Leads are paired by seed, {held.confidence:.1%} confidence each; "
        f"{threshold_text([held], advice.question.indifference)}."
    )
    if held.alike:
        lines.append(f"{ask.name(best)} is the simplest of those that seeds do not tell apart.")
    return lines


def _cost(advice: Advice, candidate: Experiment) -> dict[str, Any]:
    name = advice.question.name(candidate)
    fleet = next(fleet for fleet in advice.question.fleets if fleet.name == name)
    return {
        "fleet": name,
        "cards": fleet.cards(advice.question.base),
        "hourly": advice.question.hourly(name),
        "per_million_output_tokens": advice.per_million(candidate),
    }


def _costs(advice: Advice, candidate: Experiment) -> list[str]:
    """An hour of a fleet, and a million tokens."""
    if not advice.question.fleets:
        return []
    return [f"{advice.question.hourly(advice.question.name(candidate)):.3g}", positive(advice.per_million(candidate))]


def _where(advice: Advice) -> list[str]:
    lines = []
    for found in advice.flips:
        for edge, side in ((found.below, "down"), (found.above, "up")):
            if edge is not None:
                lines.append(_edge(found, edge, side))
    if advice.drafter is not None:
        lines.append(_drafter(advice.drafter))
    return lines + [f"left out, the budget is spent: {what}" for what in advice.left_out if what.startswith("flips")]


def _edge(found: Flips, edge: Edge, side: str) -> str:
    unit = " req/s" if found.axis == "load" else ""
    stands, here = f"{edge.stands:.3g}{unit}", f"{found.here:.3g}{unit}"
    name = f"{found.axis}, {side} from {here}: "
    if edge.falls is None:
        looked = f"it stands to {stands}" if edge.stands != found.here else "nothing was tried"
        return name + looked + (", the furthest tried" if edge.reason == "not found" else ", as far as the budget went")
    falls = f"{edge.falls:.3g}{unit}"
    if edge.reason == "nobody is able":
        return name + f"it stands to {stands}; at {falls} none of the finalists compared can hold it"
    lead = "" if math.isnan(edge.lead) else f" by {edge.lead:.1%}"
    return name + f"it stands to {stands}; at {falls} {edge.challenger} is ahead{lead}"


def _drafter(found: hazards.DrafterCost) -> str:
    now = f"cost of the drafter, by formula: a draft step takes {found.step_ratio:.2f} of a target step"
    if found.flips_at is None:
        rest = "drafting pays up to 4 times that" if found.k else "plain decoding is better down to a quarter of that"
    elif found.k:
        rest = f"from {found.flips_at:.2f} on {found.arch} is better without drafts"
    else:
        rest = f"from {found.flips_at:.2f} down {found.arch} is better with drafts"
    return f"{now}; {rest}"


def _failure_modes(advice: Advice) -> list[str]:
    best = advice.recommended
    assert best is not None
    lines = []
    if advice.alone is not None:
        lines.append("low concurrency: " + _alone(advice.alone, advice.question.name(best)))
    if advice.break_even is not None:
        lines.append("poor speculation: " + _break_even(advice.break_even, best))
    if advice.balance is not None:
        lines.append("balanced models: " + _balance(advice.balance))
    if advice.memory is not None:
        share = advice.memory.peak_tokens / advice.memory.capacity_tokens
        tokens = f"{advice.memory.peak_tokens} of {advice.memory.capacity_tokens} tokens"
        lines.append(f"KV cache: at most {share:.0%} held ({tokens})")
    lines.append(_saturation(advice))
    named = [what for what in advice.left_out if not what.startswith("flips")]
    return lines + [f"left out, the budget is spent: {what}" for what in named]


def _alone(found: hazards.Alone, best: str) -> str:
    held = found.e2el_ms
    text = f"with one request at a time E2EL is {cell(held.values[best], 0)} ms"
    alike = [name for name in (held.best, *held.unsure) if name != best]
    if best in (held.best, *held.unsure):
        text += ", the lowest of the finalists" + (f" (not told apart from {', '.join(alike)})" if alike else "")
    else:
        behind = held.leads[best].mean
        text += f"; {held.best} is at {cell(held.values[held.best], 0)} ms ({behind:.1%} lower)"
    if found.speculation_gain is not None:
        text += f"; drafting makes tokens {cell(found.speculation_gain)} times as fast as plain decoding there"
    return text


def _break_even(found: hazards.BreakEven, best: Experiment) -> str:
    who = "drafting" if found.arch == best.arch else f"drafting ({found.arch})"
    if found.wins_at is None:
        return f"{who} does not beat plain decoding by the objective, even with every draft accepted"
    if found.loses_at is None:
        return f"{who} beats plain decoding by the objective even with no draft accepted: drafts are not why"
    here = best.acceptance.acceptance_rate
    side = "above" if here >= found.wins_at else "below" if here <= found.loses_at else "at"
    between = f"between {found.loses_at:.2f} and {found.wins_at:.2f}"
    return f"{who} breaks even with plain decoding at an acceptance {between}; yours, {here:g}, is {side} it"


def _balance(found: hazards.Balance) -> str:
    share = found.draft_s / (found.draft_s + found.verify_s)
    text = (
        f"{found.arch} at {found.rows} rows: a draft step costs {found.step_ratio:.2f} of a target step, {found.k} of "
        f"them {share:.0%} of a round; a round of {found.tokens_a_round:.2f} tokens is {found.speedup:.2f} times as "
        "fast as plain steps"
    )
    if found.affordable > 1:
        return text + f", until the draft costs {found.affordable:.1f} times as much"
    return text + ": the verify alone takes longer" if found.affordable <= 0 else text + ": the draft costs too much"


def _saturation(advice: Advice) -> str:
    """The distance to capacity, where that was looked for. How busy a lane is does not tell it: batches grow."""
    found = advice.capacity
    if found is None or not found.rows:
        lane, busy = hazards.busiest_lane(advice.rows)
        share = f"the {lane} lane is busy {cell(busy, 0, 100)} % of the time"
        return f"lanes: {share}; a lane is busy whenever anyone decodes, so that is no distance to capacity"
    entry = found.summary()[0]
    rate: Interval = entry["rate"]
    if not rate.mean:
        return "saturation: no rate holds the service levels"
    used = advice.question.base.traffic.request_rate / rate.mean
    load = f"of which the load is {used:.0%}" if used <= 1 else f"the load is {used:.3g} times that"
    text = f"saturation: it holds {positive(rate, 1)} req/s within the levels, {load}"
    cost = entry["usd_per_million_output_tokens"]
    gpus, rate_asked = found.plan.gpus[0], advice.question.base.traffic.request_rate
    needed = max(gpus, math.ceil(gpus * used))
    text += f"; the load needs {needed} GPU{'s' if needed > 1 else ''}"
    if math.isnan(cost.mean):
        return text
    offered = cost.mean * rate.mean / rate_asked
    return (
        text + f"; a million output tokens cost ${positive(cost, 3)} at that rate, ${offered:.3f} at the load offered"
    )


def _commands(advice: Advice) -> list[str]:
    return [deployment_text(advice.deployment)]


def _notes(advice: Advice) -> list[str]:
    ask, first = advice.question, advice.rows[0]
    assert advice.recommended is not None
    best = "the least" if ask.goal.sign < 0 else "the most"
    first_of_all = "meet the service levels and keep up" if ask.goal.levels else "keep up"
    left = f"; {advice.search.skipped} more were left out" if advice.search.skipped else ""
    who = "way to use the GPUs" if ask.fleets else "architecture"
    return [
        f"objective: among those that {first_of_all}, {best} {NAMES[ask.goal.objective]}",
        f"searched {len(advice.search.figures)} settings in short runs, each {who} at its own best{left}; "
        f"{advice.runs} simulations of a budget of {ask.budget}, in {advice.spent_s:.0f} s here",
        f"{len(advice.finals)} finalists: {len(advice.rows)} seeds of {advice.recommended.traffic.num_prompts} "
        f"requests, the first {ask.warmup_share:.0%} left out, seeds that the search did not use",
        *lengths_note(ask.base.traffic),
        founded(first),
        *most_outside(advice.rows),
    ]
