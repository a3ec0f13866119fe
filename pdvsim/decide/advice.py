"""The question of `pdvsim advise` and its answer.

The answer has the recommendation first, then the candidates, why, where that changes, and the commands. Every sentence
is a template next to the numbers that it quotes. Text, page and notebook show the same sections, whose candidates are
those of the document.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

from pdvsim.bench import output
from pdvsim.bench.length import length_of, too_short
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.common.commandline import command_line
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.deploy import Deployment, deployment
from pdvsim.decide.error import Ranged, gain_note, model_error, ranged, ranged_of
from pdvsim.decide.fleet import Contender, contender_name
from pdvsim.decide.goal import NAMES, Goal, attained, level_title
from pdvsim.decide.options import BUDGET
from pdvsim.decide.race import Contest, Finals, check_seeds, threshold_text, unsure_text
from pdvsim.decide.report import (
    NO_DRAFTS,
    Answer,
    Report,
    asked_lines,
    clients_of,
    gpus_text,
    nearest_pair,
    plural,
    positive,
    served_as_text,
)  # fmt: skip
from pdvsim.decide.runs import conversation_output_tokens, delivered_tokens_per_s, load_axis, load_words, replications
from pdvsim.decide.space import Space, drafts_text, settings_text
from pdvsim.decide.surroundings import Flips
from pdvsim.decide.tune import Search
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.engines.served import Block, unknown_head
from pdvsim.sim.limits import Budget, GpuHourUsd, Gpus, NumRuns, PartialShare, Range, check_ranges
from pdvsim.sim.relevance import vet
from pdvsim.sim.workload.usual import drafter_name
from pdvsim.view.comparison import most_outside
from pdvsim.view.report.sheet import Highlight, Showable
from pdvsim.view.setting import acceptance_notes, is_assumed, is_published, measure_notes, recorded_elsewhere
from pdvsim.view.style import metric_label
from pdvsim.view.table import DETAIL, TextTable, cell, span_text

if TYPE_CHECKING:
    import pandas as pd

MILLION = 1e6
VISIBLE = 0.95  # a TPOT below this share of another is worth a word
FLIPS = "Where that changes"
TILES = ("output_throughput", "mean_e2el_ms", "p99_ttft_ms", "p99_tpot_ms")  # metrics at the head of a page
EXPECTED = (
    "request_throughput", "output_throughput", "request_goodput", "mean_ttft_ms", "{}_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "{}_tpot_ms", "p99_tpot_ms", "mean_e2el_ms",
)  # fmt: skip


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
    contenders: tuple[Contender, ...] = ()  # compared instead of architectures
    # up to which the smallest fleet is found if one server does not meet the goal; 0: none is
    most_gpus: Annotated[int, Range(0, 1024)] = 0
    fleet_archs: tuple[Arch, ...] = ()  # architectures of such fleets
    gpus: Gpus | None = None  # that there are, if given
    by_cost: bool = False  # the cheapest of the contenders that meet the goal is chosen

    def __post_init__(self) -> None:
        check_seeds(self.num_runs)
        check_ranges(self)
        space = self.space
        starts = Search(self.goal, space, contenders=self.contenders).starts(self.base)
        kinds = ("num_speculative_tokens", "controller")
        vet(one for start in starts for one in (start, *(c for kind in kinds for c in space.others(start, kind))))

    def name(self, candidate: Experiment) -> str:
        """Name of the contender with these settings."""
        return contender_name(candidate, self.contenders)

    @property
    def fleets(self) -> tuple[Contender, ...]:
        """Ways to use several GPUs."""
        return tuple(one for one in self.contenders if one.hardware is not None)

    @property
    def drafters(self) -> tuple[Contender, ...]:
        """Architectures with drafters."""
        return tuple(one for one in self.contenders if one.pair is not None)

    def described(self, candidate: Experiment) -> str:
        """Short description of a candidate."""
        return ", ".join([self.name(candidate), *settings_text(candidate)])

    def hourly(self, candidate: Experiment) -> float:
        """Hourly cost of a fleet: dollars, or GPUs if no price is given."""
        return self.gpus_of(candidate) * (self.gpu_hour_usd or 1.0)

    @staticmethod
    def gpus_of(candidate: Experiment) -> int:
        """GPUs of all its servers."""
        return candidate.hardware.replicas * candidate.gpus


@dataclass(repr=False)
class Advice(Answer):
    """The finalists, the recommendation and its surroundings, possibly interrupted."""

    question: Question
    search: Search
    finals: Finals | None = None  # with the contest among those that can be chosen
    best: str = ""  # name of the recommendation
    flips: list[Flips] = field(default_factory=list)  # with the acceptance of drafts, with the load
    capacity: Capacities | None = None  # of the recommendation and of plain decoding
    left_out: list[str] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # fleets that are not among the finalists, and why

    @property
    def finalists(self) -> dict[str, Experiment]:
        """The finalists by name."""
        return {} if self.finals is None else self.finals.candidates

    @property
    def recommended(self) -> Experiment | None:
        """The recommendation; None if nothing was decided."""
        return self.finalists.get(self.best)

    @property
    def rows(self) -> list[Row]:
        """The recommendation's replications."""
        return self._decided.rows[self.best]

    @property
    def _decided(self) -> Finals:
        assert self.finals is not None, "nothing was decided"
        return self.finals

    @property
    def _contest(self) -> Contest:
        return self._decided.contest

    @property
    def compared(self) -> dict[str, Experiment]:
        """All contenders by name, each at its best: the finalists, then those that short runs ruled out."""
        best: dict[str, Experiment] = {}
        for candidate in self.search.order(self.question.base):
            best.setdefault(self.question.name(candidate), candidate)
        return self.finalists | {name: mine for name, mine in best.items() if name not in self.finalists}

    @property
    def plain(self) -> str | None:
        """The finalist without drafts that the recommendation is compared with."""
        others = (name for name, c in self.finalists.items() if c.arch == "autoregressive" and name != self.best)
        return next(others, None)

    @property
    def met(self) -> bool:
        """Whether the recommendation meets the service levels and keeps up; the capacity search overrules its runs."""
        held, load = self.holds(self.best), self.question.base.traffic.request_rate
        return self.question.goal.met(self.rows) and (held is None or load <= held.high)

    def verdict(self, name: str) -> str:
        """Whether a finalist meets the service levels, by the whole of its interval and of the rate that it holds."""
        goal, load, held = self.question.goal, self.question.base.traffic.request_rate, self.holds(name)
        verdict = goal.verdict(self.finalists[name], self._decided.rows[name])
        if verdict == "meets" and held is not None and load > held.low:
            return "misses" if load > held.high else "too close to call"
        return verdict if verdict != "meets" or goal.levels else "keeps up"

    @property
    def standing(self) -> str:
        """What the recommendation is called in tables and plots."""
        return "recommended" if self.met else "closest"

    def holds(self, name: str | None) -> Ranged | None:
        """The rate that a finalist holds, with the error of seeds and model; None if it was not searched."""
        return self.capacity.ranges().get(str(name)) if self.capacity else None

    @property
    def able(self) -> list[str]:
        """The finalists that meet the service levels and keep up."""
        return [name for name, rows in self._decided.rows.items() if self.question.goal.met(rows)]

    @property
    def cheapest(self) -> str | None:
        """The cheapest fleet that meets the service levels and keeps up."""
        able = self.able if self.question.fleets else []
        return min(able, key=lambda name: self.question.hourly(self.finalists[name]), default=None)

    def cost_of(self, name: str, tokens: float = MILLION) -> Interval:
        """The price of tokens on a fleet at this load, in dollars or GPU-hours: the one figure of cost in all lines."""
        candidate, rows = self.finalists[name], self._decided.rows[name]
        runs = replications(candidate, len(rows))
        rates = (delivered_tokens_per_s(run, row) for run, row in zip(runs, rows, strict=True))
        return interval(self.question.hourly(candidate) * tokens / (rate * 3600) for rate in rates)

    @property
    def points(self) -> pd.DataFrame:
        """One row per run of the finals: finalist, settings, seed and metrics."""
        import pandas as pd

        return pd.DataFrame(
            {"finalist": name, "settings": ", ".join(settings_text(c)), "recommended": name == self.best} | row
            for name, c in self.finalists.items()
            for row in self._decided.rows[name]
        )

    @cached_property
    def candidates(self) -> list[dict[str, Any]]:
        """All settings compared: the finalists in the order of their means, with the intervals that decided.

        Then those that short runs ruled out: other contenders and draft lengths of the recommendation, each at its
        best.
        """
        ask, contest, finals, entries = self.question, self._contest, self._decided, list[dict[str, Any]]()
        order = list(dict.fromkeys([*contest.order, *finals.candidates]))
        if ask.by_cost:
            order.sort(key=lambda name: ask.hourly(finals.candidates[name]))
        for name in order:
            candidate, rows, state = finals.candidates[name], finals.rows[name], ""
            if name in contest.unsure:
                state = unsure_text(contest.leads[name], contest.thresholds[name], name in contest.alike)
            elif name not in contest.values and name in self.able:
                state = "costs more"
            entry = self._entry(name, candidate, rows)
            entry["objective"] = contest.values.get(name) or interval(map(ask.goal.value, rows))
            entry |= {"lead_of_best": contest.leads.get(name), "holds_req_per_s": self.holds(name)}
            entry |= self._costs(name) | {"verdict": self.verdict(name), "met": name in self.able}
            standing = self.standing if name == self.best else ""
            entries.append(entry | {"note": ", ".join(filter(None, (standing, state)))})
        seen = {drafts_text(finals.candidates[self.best])}
        ruled_out = [mine for name, mine in self.compared.items() if name not in finals.candidates]
        for candidate in self.search.order(ask.base):
            drafts = drafts_text(candidate)
            if ask.name(candidate) == self.best and drafts and drafts not in seen:
                seen.add(drafts)
                ruled_out.append(candidate)
        for candidate in ruled_out:
            entry = self._entry(ask.name(candidate), candidate, [self.search.rows[candidate]])
            entries.append(entry | {"objective": self.search.figures[candidate], "note": "short run"})
        return entries

    def _entry(self, name: str, candidate: Experiment, rows: list[Row]) -> dict[str, Any]:
        keys = ("mean_tpot_ms", f"{self.question.goal.percentile}_ttft_ms")
        settings = {"name": name, "settings": settings_text(candidate), "gpus": self.question.gpus_of(candidate)}
        command = {"command": command_line("pdvsim run", candidate)}
        return settings | {key: ranged_of(candidate, rows, key) for key in keys} | command

    def _costs(self, name: str) -> dict[str, Any]:
        """What a finalist costs; nothing if neither fleets nor a price are given."""
        ask = self.question
        if not (ask.fleets or ask.gpu_hour_usd):
            return {}
        talk = conversation_output_tokens(ask.base.traffic)  # all its turns
        costs = {"hourly": ask.hourly(self.finalists[name]), "per_million_output_tokens": self.cost_of(name)}
        return costs | ({"per_conversation": self.cost_of(name, talk)} if ask.base.traffic.converses else {})

    def report(self) -> Report:
        """The whole advice, section by section."""
        ask, best, load = self.question, self.recommended, load_words(self.question.base.traffic)
        lead = f"Recommendation at {load}, with confidence."
        tried = {"settings_tried": len(self.search.figures), "settings_left_out": self.search.skipped}
        used = {"budget": ask.budget, "runs": self.runs, "spent_s": self.spent_s, "left_out": self.left_out}
        document = self.document(question=output.settings(ask), search=tried | used)
        stopped = "the above uses the runs that had finished" if self.interrupted else ""
        if best is None:
            return Report("Advice", lead, ask.base, [("", [self._undecided()])], document, stopped)
        tiles = {label: self._shown(key) for label, key in self._metrics.items() if key in TILES}
        missed = f"meets {ask.goal.levels_text}" if ask.goal.levels else "keeps up"
        heading = "Recommendation" if self.met else f"Nothing {missed} at {load}; closest:"
        drafting = (c for c in (best, *self.compared.values()) if c.speculates)
        nearest = nearest_pair(next(drafting, None), clients_of(self.rows))
        sections = (
            (heading, [Highlight(list(self._recommendation(best)), tiles, self.met)]),
            ("Asked", [*asked_lines(best, self.compared.values(), self.rows), *nearest]),
            ("Candidates", list(self._compared())),
            ("Why", list(self._why())),
            ("Expected", [self._expected()]),
            (FLIPS, list(self._surroundings())),
            ("To run it", [Deployment(self.deployment)]),
            ("Method", list(self._method(best))),
        )
        document |= {
            "recommendation": {
                "name": self.best,
                "arch": best.arch,
                "described": ask.described(best),
                "meets": self.met,
                "verdict": self.verdict(self.best),
                "replications": len(self.rows),
                "server": output.settings(best.server),
                "command": command_line("pdvsim run", best),
                "deployment": [asdict(block) for block in self.deployment],
            },
            "expected": {key: self.expects(key) for key in self._metrics.values()}
            | ({"attainment": self._attainment} if ask.goal.levels else {}),
            "first_replication": {key: value for key, value in self.rows[0].items() if key != "run"},
            "objective": ask.goal.objective,
            "contest": self._contest.document(),
            "candidates": [
                {key: value._asdict() if isinstance(value, Ranged) else value for key, value in entry.items()}
                for entry in self.candidates
            ],
            **({"cheapest": self.cheapest} if ask.fleets else {}),
            **({"refused": self.refused} if self.refused else {}),
            "flips": [flips.document() for flips in self.flips],
            "kv_cache": self.memory(self.best),
            "capacity": self.capacity and self.capacity.summary(),
            "outside_measured": next(iter(most_outside(self.rows)), None),
        }
        return Report("Advice", lead, ask.base, sections, document, stopped)

    @cached_property
    def deployment(self) -> list[Block]:
        """Commands to start the recommendation, as engines support it."""
        assert self.recommended is not None
        fixed = [c for c in self.search.figures if c.arch == "colocated" and c.server.controller == "fixed"]
        return deployment(self.recommended, self.search.best(fixed))

    @property
    def _metrics(self) -> dict[str, str]:
        """Columns of a run that are expected of the recommendation, by label."""
        keys = [key.format(self.question.goal.percentile) for key in EXPECTED]
        batch = {"Time to finish (s)": "duration"} if load_axis(self.question.base.traffic) == "requests" else {}
        return batch | {metric_label(key): key for key in keys} | {"Tokens per round": "spec_decode_acceptance_length"}

    def expects(self, key: str) -> Interval:
        """A metric of the recommendation."""
        within = (row[f"{key}_se"] for row in self.rows if f"{key}_se" in row)
        return interval((row.get(key, math.nan) for row in self.rows), within=within)

    def _shown(self, key: str) -> str:
        """A metric of the recommendation, a latency with the error of the model too."""
        latency = key.endswith("_ms")
        return self._ranged(key).text(decimals=2) if latency else positive(self.expects(key))

    def _ranged(self, key: str) -> Ranged:
        return ranged_of(self.finalists[self.best], self.rows, key)

    @property
    def _attainment(self) -> Interval:
        """Share of the requests that meet every service level with the recommendation."""
        return interval(map(attained, self.rows))

    def memory(self, name: str) -> dict[str, int]:
        """Peak use of the KV cache in a finalist's runs, and its capacity, in tokens."""
        rows = self._decided.rows[name]
        peak = max(int(row["kv_peak_tokens"]) for row in rows)
        return {"peak_tokens": peak, "capacity_tokens": int(rows[0]["kv_capacity_tokens"])}

    def _undecided(self) -> str:
        order = self.search.order(self.question.base)
        if order:
            first = self.question.described(order[0])
            return f"Not decided. After {len(order)} short runs without replication, {first} leads."
        done = f"{plural(self.runs, 'simulation')} finished, none of a" if self.runs else "No simulation of a"
        return f"Not decided. {done} setting to compare."

    def _recommendation(self, best: Experiment) -> Iterator[str]:
        """What to start, what it gains and costs, whether it meets the levels, and what makes that uncertain."""
        ask, goal = self.question, self.question.goal
        drafts = f"and speculate with {drafter_name(best.server.pair)}, {drafts_text(best)}"
        how = drafts if best.speculates else "without speculation"
        yield f"{'Start' if self.met else 'Closest is'} {served_as_text(best, ask.gpus)} {how}."
        yield from self._gains(best)
        model = ask.base.pair.target.name if ask.drafters else ask.base.server.pair
        yield f"{ask.described(best)}, for {model} at {load_words(ask.base.traffic)}"
        if not best.speculates and (why := self._without_drafts()):
            yield f"{NO_DRAFTS}: {why}"
        if goal.levels:
            verdict, share = self.verdict(self.best) if self.met else "does not meet", cell(self._attainment, 1, 100)
            close = verdict == "too close to call"
            yield (
                f"{verdict}{':' if close else ''} {goal.levels_text}{goal.share_text} "
                f"(predicted: {share} % of the requests do){'; --num-runs 10 may tell' if close else ''}"
            )
            of, rooms = "predicted value" if goal.named else goal.percentile.upper(), list[str]()
            for level in goal.levels_ms:
                room = interval(goal.headrooms(row)[level] for row in self.rows)
                error = model_error(best, self.rows, goal.level_metric(level))
                rooms.append(f"{level_title(level)} {ranged(room.mean, room.half_width, error).text()}")
            yield f"head-room (service level / {of}): {', '.join(rooms)}"
        yield from self._doubts(best)

    def _gains(self, best: Experiment) -> Iterator[str]:
        """TPOT, the rate held and the KV cache, each with that of plain decoding where it was compared."""
        plain, held, tpot = self.plain, self.holds(self.best), self._ranged("mean_tpot_ms")
        against, parts, gains = plain if best.speculates else None, list[str](), list[float]()
        if not math.isnan(tpot.mean):
            mean = self._mean_tpot(against) if against else math.nan
            gains = [mean / tpot.mean] if against else []
            parts.append(f"TPOT {tpot.text('ms')}" + (f" instead of {mean:.1f} without drafts" if against else ""))
        if held is not None and held.mean:
            other = self.holds(against)
            parts.append(f"it holds {held.text('req/s')}" + (f" instead of {other.mean:.1f}" if other else ""))
        elif held is not None:
            parts.append("no rate holds the service levels")
        whole = self.memory(self.best)["capacity_tokens"]
        if against and self.question.gpus_of(self.finalists[against]) == self.question.gpus_of(best):
            lost = max(0.0, 1 - whole / self.memory(against)["capacity_tokens"])
            parts.append(f"drafting costs {lost:.0%} of the KV cache")
        else:
            parts.append(f"its KV cache holds {whole:,} tokens")
        yield "; ".join(parts) + "."
        yield from gain_note(best, gains) if not math.isnan(tpot.mean) else ()

    def _mean_tpot(self, name: str) -> float:
        return interval(row["mean_tpot_ms"] for row in self._decided.rows[name]).mean

    def _without_drafts(self) -> str:
        """Why a recommendation has no drafts; empty if none were compared."""
        contest, drafting = self._contest, [name for name, c in self.compared.items() if c.speculates]
        finalists = [name for name in drafting if name in self.finalists]
        first = next((name for name in contest.order if name in drafting), None)
        if not drafting:
            return ""
        if not finalists:
            return "settings that draft were far behind in short runs"
        if first is None:
            able = "costs as little" if set(finalists) & set(self.able) else "meets the goal on average"
            return f"no setting that drafts {able}"
        if self.best == contest.best and first not in contest.unsure:
            return f"the best setting that drafts, {first}, is {cell(contest.leads[first], 1, 100)} % behind"
        tpots = self._mean_tpot(first), self._mean_tpot(self.best)
        faster = f", though TPOT with {first} is {tpots[0]:.1f} ms instead of {tpots[1]:.1f}"
        seen = faster if tpots[0] < VISIBLE * tpots[1] else ""
        return f"no setting that drafts is significantly better by the objective{seen}"

    def _doubts(self, best: Experiment) -> Iterator[str]:
        """What would meet the goal or show that it is met, and unmeasured acceptance that the decision depends on.

        That is, assumed, published by others, or recorded with another target. A drafter that cannot be loaded is
        called hypothetical. If the recommendation drafts, it depends on its own acceptance and on that of its ties;
        else on every drafter's.
        """
        ask, rows, skipped = self.question, self.rows, self.search.skipped
        if not self.met:
            most = f"no fleet of up to {gpus_text(ask.most_gpus)} meets the goal: raise --gpus"
            yield most if ask.most_gpus else "no tested setting holds this load; the values below are of the best one"
            if skipped:
                yield f"{skipped} settings were not tested; one may meet the levels: raise --budget"
        elif self.capacity is None:
            if short := next(filter(None, (too_short(ask.base.traffic, row) for row in rows)), ""):
                yield f"inconclusive: {short}: raise --num-prompts"
            elif 2 * sum(row["stability"] == "inconclusive" for row in rows) > len(rows):
                few = f"runs of {best.traffic.num_prompts} requests are too short to show that the queue stays bounded"
                yield f"inconclusive: {few}: raise --num-prompts"
        if best.speculates and (why := unknown_head(best)):
            yield f"note: hypothetical: {why}"
        ties = (self.best, self._contest.best, *self._contest.alike)
        decisive = [c for name, c in self.compared.items() if name in ties or not best.speculates]
        for kind in (recorded_elsewhere, is_published, is_assumed):
            yield from (f"note: {note}" for note in acceptance_notes(filter(kind, decisive)))

    def _expected(self) -> TextTable:
        rows, seed = self.rows, self.question.base.traffic.seed
        mean, first = f"mean of {len(rows)} seeds", f"seed {seed} (command below)"
        lines = [
            {"metric": label, mean: self._shown(key), first: cell(rows[0].get(key))}
            for label, key in self._metrics.items()
        ]
        return TextTable([line for line in lines if line[first] != "-"])

    def _table(self, candidates: Sequence[dict[str, Any]], shared: Sequence[str]) -> TextTable:
        ask, goal, contest, rows = self.question, self.question.goal, self._contest, list[dict[str, str]]()
        ttft = f"{goal.percentile}_ttft_ms"
        per_hour, unit = ("$/h", "$") if ask.gpu_hour_usd else ("GPU/h", "GPU-hours")
        prices = (
            ("per_million_output_tokens", f"{unit} per million tokens", 1),
            ("per_conversation", f"{unit} per 1000 conversations", 1000),
        )
        for entry in candidates:
            name, held, value, final = (
                entry["name"],
                entry.get("holds_req_per_s"),
                entry["objective"],
                "verdict" in entry,
            )
            row = {"candidate": ", ".join([name, *(one for one in entry["settings"] if one not in shared)])}
            row |= {"TPOT ms": entry["mean_tpot_ms"].text(), f"{goal.percentile.upper()} TTFT ms": entry[ttft].text()}
            row[NAMES[goal.objective]] = positive(value) if final else cell(value)
            row[f"lead of {contest.best}"] = contest.lead_text(name) if final and name in contest.leads else ""
            if self.capacity is not None:
                row["holds req/s"] = held.text() if held else ""
            if "hourly" in candidates[0]:
                row[per_hour] = f"{entry['hourly']:.3g}" if final else ""
            for key, title, scale in prices:
                if key in candidates[0]:
                    row[title] = positive(entry[key], 3, scale) if final else ""
            row["levels" if goal.levels else "load"] = entry.get("verdict", "")
            rows.append(row | {"verdict": entry["note"]})
        return TextTable(rows, (f"{goal.percentile.upper()} TTFT ms", DETAIL))

    def _compared(self) -> Iterator[str | Showable]:
        """The candidates, and how to read them."""
        every = [settings_text(candidate) for candidate in self.finalists.values()]
        shared = [one for one in settings_text(self.finalists[self.best]) if all(one in words for words in every)]
        yield self._table(self.candidates, shared)
        if shared:
            yield f"All with {', '.join(shared)}."
        yield (
            "In parentheses: between these ends with the errors of seeds and of the model; ± is over seeds alone. "
            "Autoregressive: without drafts. Colocated: drafts, verifies and prefills in the steps of one batch."
        )
        if self.refused:  # the document names them
            counts = Counter(self.refused.values()).items()
            refused = "; ".join(f"{plural(count, 'fleet')} {why}" for why, count in counts)
            yield f"Not compared: {refused}."

    def _why(self) -> Iterator[str]:
        ask, contest, cheapest = self.question, self._contest, self.cheapest
        if ask.by_cost and self.met:
            yield f"{self.best} is the cheapest fleet that meets the goal."
        elif ask.gpu_hour_usd and cheapest not in (None, self.best):
            yield f"Cheapest finalist that meets the goal: {ask.described(self.finalists[str(cheapest)])}."
        if contest.others:
            limits = threshold_text([contest], ask.indifference)
            yield f"Leads are paired by seed, {contest.confidence:.1%} confidence each; {limits}."
            if contest.alike:
                yield f"{self.best} is the simplest of the finalists without significant difference."
        elif self.met and not ask.by_cost:
            yield "No other finalist meets the goal on average."

    def _surroundings(self) -> Iterator[str]:
        """Where the decision changes, and how near its limits are."""
        yield from (flips.sentence(side) for flips in reversed(self.flips) for side in flips.sides)
        peak, whole = self.memory(self.best).values()
        used = [f"at most {peak / whole:.0%} of the KV cache ({peak} of {whole} tokens)"]
        if self.capacity and (held := self.holds(self.best)) is not None and held.mean:
            share = self.question.base.traffic.request_rate / held.mean
            times = f"{share:.0%} of" if share <= 1 else f"{share:.3g} times"
            limits = {entry["arch"]: entry["limited_by"] for entry in self.capacity.summary()}
            used.insert(0, f"{times} the rate that it holds (limited by {limits[self.best]})")
            if self.question.gpu_hour_usd:
                cost = self.cost_of(self.best)
                there = f"${share * cost.mean:.3f} at the rate that it holds"
                used.append(f"${positive(cost, 3)} per million output tokens, {there}")
        yield f"in use at this load: {'; '.join(used)}"
        yield from (f"not tested (raise --budget): {what}" for what in self.left_out)

    def _method(self, best: Experiment) -> Iterator[str]:
        ask, goal, search = self.question, self.question.goal, self.search
        able = "meet the service levels and keep up" if goal.levels else "keep up"
        most = "lowest" if goal.sign < 0 else "highest"
        yield f"objective: {most} {NAMES[goal.objective]} among the settings that {able}"
        left = f"; {search.skipped} more were not tested" if search.skipped else ""
        contender = "way to use the GPUs" if ask.fleets else "architecture"
        contender += " and drafter" if ask.drafters else ""
        allowed = f"of {ask.budget} allowed"
        over = f"the search ended at {ask.budget}; finalists always run" if self.runs > ask.budget else allowed
        yield (
            f"searched {len(search.figures)} settings in short runs, each {contender} at its best{left}; "
            f"{self.runs} simulations ({over}), in {self.spent_s:.0f} s"
        )
        seeds, length = span_text(map(len, self._decided.rows.values())), length_of(best)
        steady = f" in the steady state (after the first {length.start}, without the drain)"
        runs = f"{length.measured} requests{steady if best.scoring.steady else ''}"
        yield f"{len(self.finalists)} finalists: {seeds} seeds of {runs}; the search used other seeds"
        if self.capacity:
            yield "holds: by these settings, tuned for this load; pdvsim capacity tunes for the rate"
        yield from measure_notes(self.compared.values())
