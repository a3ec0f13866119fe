"""How to use several GPUs for a load: every fleet at its best settings, replicated, and compared by latency and cost.

The rule is that of `advise`: of those that meet the service levels and keep up, the best by the objective, or the
simplest of those alike. Beside it stands the cheapest of those that will do: at a load that all hold they deliver the
same tokens, so that what a fleet costs is what its cards cost.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pdvsim.common.commandline import command_line
from pdvsim.common.outcomes import Row
from pdvsim.common.version import __version__
from pdvsim.decide.advice import Question
from pdvsim.decide.contest import Contest
from pdvsim.decide.fleet import Fleet, hourly, tuned_fleets
from pdvsim.decide.goal import NAMES
from pdvsim.decide.runs import Bench, replications
from pdvsim.decide.space import settings_text
from pdvsim.decide.text import contest_document, lead_text, lengths_note, positive, threshold_text
from pdvsim.decide.tune import Search
from pdvsim.decide.verdict import chosen, judged
from pdvsim.sim.config import Experiment
from pdvsim.study import output
from pdvsim.study.stats import Interval, interval
from pdvsim.view.table import founded, grid, most_outside

SEARCH_SHARE = 0.7  # of the budget
MILLION = 1e6


@dataclass(repr=False)
class FleetAdvice:
    """The answer: every fleet at its best, and the contest among those that could be chosen."""

    question: Question
    fleets: tuple[Fleet, ...]
    usd: Mapping[str, float]
    search: Search
    best: dict[str, Experiment] = field(default_factory=dict)
    rows: dict[str, list[Row]] = field(default_factory=dict)
    held: Contest | None = None
    recommended: str | None = None
    runs: int = 0
    interrupted: bool = False

    def __repr__(self) -> str:
        return fleet_text(self)

    def does(self, name: str) -> bool:
        """Whether a fleet meets the service levels and keeps up."""
        return self.question.goal.met(self.rows[name])

    def hourly(self, name: str) -> float:
        """What a fleet costs an hour: dollars, or GPUs where no prices are given."""
        fleet = next(fleet for fleet in self.fleets if fleet.name == name)
        return hourly(fleet, self.question.base, self.usd)

    def per_million(self, name: str) -> Interval:
        """What a million output tokens cost at this load: dollars, or hours of a GPU."""
        tokens = [float(row["output_throughput"]) * 3600 for row in self.rows[name]]
        return interval(self.hourly(name) * MILLION / each for each in tokens)

    @property
    def cheapest(self) -> str | None:
        """Of the fleets that will do."""
        return min(filter(self.does, self.rows), key=self.hourly, default=None)


def advise_fleet(question: Question, fleets: tuple[Fleet, ...], usd: Mapping[str, float], bench: Bench) -> FleetAdvice:
    """Tune every fleet, run all on the same seeds, decide. Ctrl-C keeps what is done."""
    for fleet in fleets:
        hourly(fleet, question.base, usd)  # a price that is missing is asked for now
    goal, base = question.goal, question.base
    budget = int(SEARCH_SHARE * question.budget)
    search = Search(goal, question.space, question.warmup_share, question.indifference, budget)
    advice = FleetAdvice(question, fleets, usd, search)
    try:
        [best] = tuned_fleets(search, fleets, [base], bench)
        ready = {name: goal.prepared(mine, question.warmup_share) for name, mine in best.items()}
        rows = {name: bench.rows(replications(mine, question.num_runs)) for name, mine in ready.items()}
    except KeyboardInterrupt:
        advice.interrupted, advice.runs = True, bench.runs
        return advice
    advice.best, advice.rows, advice.runs = ready, rows, bench.runs
    advice.held = judged(rows, goal, ready, question.indifference)
    advice.recommended = chosen(advice.held, ready, base)
    return advice


def fleet_text(advice: FleetAdvice) -> str:
    """The answer as text."""
    ask, held, best = advice.question, advice.held, advice.recommended
    if held is None or best is None:
        return "Nothing is known yet."
    rate, unit = ask.base.traffic.request_rate, "$" if advice.usd else "GPU"
    order = [*held.values, *(name for name in advice.rows if name not in held.values)]
    body = []
    for name in order:
        behind = lead_text(held, name) if name in held.behind else ""
        state = "not told apart" if name in held.unsure else "" if advice.does(name) else "will not do"
        value = held.values.get(name) or interval(map(ask.goal.value, advice.rows[name]))
        cost = [f"{advice.hourly(name):.3g}", positive(advice.per_million(name))]
        mark = "recommended" if name == best else ""
        body.append([name, ", ".join(settings_text(advice.best[name])), positive(value), behind, *cost, state, mark])
    per_token = "$ per million tokens" if advice.usd else "GPU-hours per million tokens"
    head = ["fleet", "at its best", NAMES[ask.goal.objective], f"{held.best} ahead by", f"{unit}/h", per_token, "", ""]
    gpus = len(advice.fleets[-1].cards(ask.base))
    will = "" if advice.does(best) else ", the least bad: none will do"
    title = f"{best} for {ask.base.server.pair}, {gpus} GPUs at {rate:g} req/s{will}"
    lines = [title, "-" * len(title), grid(head, body)]
    cheapest = advice.cheapest
    if advice.usd and cheapest is not None and cheapest != best:
        lines.append(f"Cheapest that will do: {cheapest}.")
    if held.behind:
        threshold = threshold_text([held], ask.indifference)
        lines.append(f"Leads are paired by seed, {held.confidence:.1%} confidence each; {threshold}.")
    skipped = f"; {advice.search.skipped} settings were not tried, give more --budget" if advice.search.skipped else ""
    lines.append(f"{advice.runs} simulations{skipped}.")
    lines += ["To run it:", f"  {command_line('pdvsim run', advice.best[best])}"]
    rests_on = dict.fromkeys(founded(rows[0]) for rows in advice.rows.values())
    return "\n".join([*lines, *lengths_note(ask.base.traffic), *rests_on, *most_outside(advice.rows[best])])


def fleet_document(advice: FleetAdvice) -> dict[str, Any]:
    """Everything that was asked and found."""
    document: dict[str, Any] = {
        "pdvsim_version": __version__,
        "interrupted": advice.interrupted,
        "question": output.settings(advice.question),
        "card_hour_usd": dict(advice.usd),
        "runs": advice.runs,
        "settings_left_out": advice.search.skipped,
    }
    if advice.held is None:
        return document
    return document | {
        "recommendation": advice.recommended,
        "cheapest": advice.cheapest,
        "objective": advice.question.goal.objective,
        "contest": contest_document(advice.held),
        "fleets": [
            {
                "name": fleet.name,
                "cards": fleet.cards(advice.question.base),
                "settings": settings_text(advice.best[fleet.name]),
                "meets": advice.does(fleet.name),
                "hourly": advice.hourly(fleet.name),
                "per_million_output_tokens": advice.per_million(fleet.name),
                "output_throughput": interval(row["output_throughput"] for row in advice.rows[fleet.name]),
                "mean_ttft_ms": interval(row["mean_ttft_ms"] for row in advice.rows[fleet.name]),
                "mean_tpot_ms": interval(row["mean_tpot_ms"] for row in advice.rows[fleet.name]),
                "command": command_line("pdvsim run", advice.best[fleet.name]),
            }
            for fleet in advice.fleets
        ],
    }
