"""The answer of `pdvsim advise`: the recommendation first, the candidates, why, where that changes, and the commands.

Every sentence is a template next to the numbers that it quotes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pdvsim.bench import output
from pdvsim.bench.length import length_of, too_short
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.common.commandline import command_line
from pdvsim.decide import surroundings
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.deploy import Deployment
from pdvsim.decide.error import Ranged, gain_note, model_error, ranged, ranged_of
from pdvsim.decide.goal import NAMES, attained, level_title
from pdvsim.decide.question import Question
from pdvsim.decide.race import Contest, threshold_text, unsure_text
from pdvsim.decide.report import (
    NO_DRAFTS,
    Answer,
    Report,
    asked_lines,
    gpus_text,
    plural,
    positive,
    served_as_text,
)  # fmt: skip
from pdvsim.decide.runs import conversation_output_tokens, delivered_tokens_per_s, load_axis, load_words, replications
from pdvsim.decide.space import drafts_text, settings_text
from pdvsim.decide.tune import Search
from pdvsim.sim.config import Experiment
from pdvsim.sim.engines.served import Block, unknown_head
from pdvsim.sim.workload.asked import drafter_name
from pdvsim.view.comparison import most_outside
from pdvsim.view.report.sheet import Highlight, Showable
from pdvsim.view.setting import acceptance_notes, is_assumed, is_published, measure_notes, recorded_elsewhere
from pdvsim.view.style import metric_label
from pdvsim.view.table import DETAIL, TextTable, cell, span_text
from pdvsim.view.validation import clients_of, nearest_pair

if TYPE_CHECKING:
    import pandas as pd

MILLION = 1e6
VISIBLE = 0.95  # a TPOT below this share of another is worth a word
CANDIDATES, FLIPS = "Candidates", "Where that changes"
UNFOLDED = 5  # candidates that a page always shows; those after them that lose significantly are folded
TILE_METRICS = ("output_throughput", "mean_e2el_ms", "p99_ttft_ms", "p99_tpot_ms")
EXPECTED = (
    "request_throughput", "output_throughput", "request_goodput", "mean_ttft_ms", "{}_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "{}_tpot_ms", "p99_tpot_ms", "mean_e2el_ms",
)  # fmt: skip


@dataclass(repr=False)
class Advice(Answer):
    """The finalists, the recommendation and its surroundings, possibly interrupted."""

    question: Question
    search: Search
    finals: dict[Experiment, list[Row]] = field(default_factory=dict)
    contest: Contest | None = None  # among the finalists that can be chosen
    recommended: Experiment | None = None
    flips: surroundings.Flips | None = None
    break_even: surroundings.BreakEven | None = None
    capacity: Capacities | None = None  # of the recommendation and of plain decoding
    deployment: list[Block] = field(default_factory=list)  # commands to start it
    left_out: list[str] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # fleets that are not among the finalists, and why

    @property
    def finalists(self) -> dict[str, Experiment]:
        """The finalists by name."""
        return {self.question.name(candidate): candidate for candidate in self.finals}

    @property
    def compared(self) -> dict[str, Experiment]:
        """All contenders by name, each at its best: the finalists, then those that short runs ruled out."""
        best: dict[str, Experiment] = {}
        for candidate in self.search.ranked(list(self.search.figures), self.question.base):
            best.setdefault(self.question.name(candidate), candidate)
        return self.finalists | {name: mine for name, mine in best.items() if name not in self.finalists}

    @property
    def rows(self) -> list[Row]:
        """The recommendation's replications."""
        assert self.recommended is not None
        return self.finals[self.recommended]

    @property
    def plain(self) -> Experiment | None:
        """The finalist without drafts that the recommendation is compared with."""
        return next((c for c in self.finals if c.arch == "autoregressive" and c != self.recommended), None)

    @property
    def met(self) -> bool:
        """Whether the recommendation meets the service levels and keeps up; the capacity search overrules its runs."""
        held, load = self.holds(self.recommended), self.question.base.traffic.request_rate
        return self.question.goal.met(self.rows) and (held is None or load <= held.high)

    def verdict(self, candidate: Experiment) -> str:
        """Whether a candidate meets the service levels, by the whole of its interval and of the rate that it holds."""
        verdict, load = self.question.goal.verdict(candidate, self.finals[candidate]), self.question.base.traffic
        held = self.holds(candidate)
        if verdict == "meets" and held is not None and load.request_rate > held.low:
            return "misses" if load.request_rate > held.high else "too close to call"
        return verdict if verdict != "meets" or self.question.goal.levels else "keeps up"

    @property
    def standing(self) -> str:
        """What the recommendation is called in tables and plots."""
        return "recommended" if self.met else "closest"

    def holds(self, candidate: Experiment | None) -> Ranged | None:
        """The rate that a finalist holds, with the error of seeds and model; None if it was not searched."""
        known = self.capacity.ranges() if self.capacity else {}
        return None if candidate is None else known.get(self.question.name(candidate))

    @property
    def able(self) -> list[Experiment]:
        """The finalists that meet the service levels and keep up."""
        return [candidate for candidate, rows in self.finals.items() if self.question.goal.met(rows)]

    @property
    def cheapest(self) -> Experiment | None:
        """The cheapest fleet that meets the service levels and keeps up."""
        return min(self.able if self.question.fleets else [], key=self.question.hourly, default=None)

    def cost_of(self, candidate: Experiment, tokens: float = MILLION) -> Interval:
        """The price of tokens on a fleet at this load, in dollars or GPU-hours: the one figure of cost in all lines."""
        price, rows = self.question.hourly(candidate), self.finals[candidate]
        runs = replications(candidate, len(rows))
        rates = (delivered_tokens_per_s(run, row) for run, row in zip(runs, rows, strict=True))
        return interval(price * tokens / (rate * 3600) for rate in rates)

    def _costs(self, candidate: Experiment) -> dict[str, Any]:
        """What a finalist costs; nothing if neither fleets nor a price are given."""
        ask = self.question
        if not (ask.fleets or ask.gpu_hour_usd):
            return {}
        talk = conversation_output_tokens(ask.base.traffic)  # all its turns
        return {
            "fleet": ask.name(candidate),
            "gpus": ask.gpus_of(candidate),
            "hourly": ask.hourly(candidate),
            "per_million_output_tokens": self.cost_of(candidate),
            **({"per_conversation": self.cost_of(candidate, talk)} if ask.base.traffic.converses else {}),
        }

    def expects(self, key: str) -> Interval:
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

    def report(self) -> Report:
        """The whole advice, section by section."""
        ask, best, contest, load = self.question, self.recommended, self.contest, load_words(self.question.base.traffic)
        lead = f"Recommendation at {load}, with confidence."
        # the document has the contenders under the name of its first version
        question = {"ways" if key == "contenders" else key: value for key, value in output.settings(ask).items()}
        tried = {"settings_tried": len(self.search.figures), "settings_left_out": self.search.skipped}
        used = {"budget": ask.budget, "runs": self.runs, "spent_s": self.spent_s, "left_out": self.left_out}
        document = self.document(question=question, search=tried | used)
        stopped = "the above uses the runs that had finished" if self.interrupted else ""
        if best is None or contest is None:
            return Report("Advice", lead, ask.base, [("", [self._undecided()])], document, stopped)
        expected = {key: self.expects(key) for key in self._metrics.values()}
        tiles = {label: self._shown(key) for label, key in self._metrics.items() if key in TILE_METRICS}
        missed = f"meets {ask.goal.levels_text}" if ask.goal.levels else "keeps up"
        heading = "Recommendation" if self.met else f"Nothing {missed} at {load}; closest:"
        nearest = nearest_pair(self._drafting, clients_of(self.rows))
        sections = (
            (heading, [Highlight(self._recommendation(best), tiles, self.met)]),
            ("Asked", [*asked_lines(best, self.compared.values(), self.rows), *nearest]),
            (CANDIDATES, [self._candidates(best, contest), *self._compared(best)]),
            ("Why", self._why(best, contest)),
            ("Expected", [self._expected()]),
            (FLIPS, self._surroundings(best)),
            ("To run it", [Deployment(self.deployment)]),
            ("Method", self._notes(best)),
        )
        return Report("Advice", lead, ask.base, sections, document | self._decided(best, contest, expected), stopped)

    def _decided(self, best: Experiment, contest: Contest, expected: dict[str, Interval]) -> dict[str, Any]:
        """The document's part on the recommendation and its neighbourhood."""
        ask, rows = self.question, self.rows
        holds = self.capacity.ranges() if self.capacity else {}
        return {
            "recommendation": {
                "arch": best.arch,
                "fleet": ask.name(best) if ask.fleets else None,
                "described": ask.described(best),
                "meets": self.met,
                "verdict": self.verdict(best),
                "replications": len(rows),
                "server": output.settings(best.server),
                "command": command_line("pdvsim run", best),
                "deployment": [asdict(block) for block in self.deployment],
            },
            "expected": expected | ({"attainment": self._attainment} if ask.goal.levels else {}),
            "first_replication": {key: value for key, value in rows[0].items() if key != "run"},
            "objective": ask.goal.objective,
            "contest": contest.document(),
            "finalists": [
                {"described": ask.described(c), "meets": ask.goal.met(mine), "verdict": self.verdict(c)}
                | {"command": command_line("pdvsim run", c)}
                | self._costs(c)
                for c, mine in self.finals.items()
            ],
            **({"cheapest": self.cheapest and ask.name(self.cheapest)} if ask.fleets else {}),
            **({"refused": self.refused} if self.refused else {}),
            "flips": self.flips and self.flips.document(),
            "failure_modes": {
                "break_even_acceptance": self.break_even and asdict(self.break_even),
                "kv_cache": self.memory(best),
                "capacity": self.capacity and self.capacity.summary(),
                "holds": {name: held._asdict() for name, held in holds.items()},
            },
            "profile": rows[0]["profile"],
            "foundation": rows[0]["foundation"],
            "outside_measured": next(iter(most_outside(rows)), None),
        }

    @property
    def _metrics(self) -> dict[str, str]:
        """Columns of a run that are expected of the recommendation, by label."""
        keys = [key.format(self.question.goal.percentile) for key in EXPECTED]
        batch = {"Time to finish (s)": "duration"} if load_axis(self.question.base.traffic) == "requests" else {}
        return batch | {metric_label(key): key for key in keys} | {"Tokens per round": "spec_decode_acceptance_length"}

    @property
    def _attainment(self) -> Interval:
        """Share of the requests that meet every service level with the recommendation."""
        return interval(map(attained, self.rows))

    @property
    def _drafting(self) -> Experiment | None:
        """The recommendation if it drafts, else the first contender that does."""
        return next((c for c in (self.recommended, *self.compared.values()) if c is not None and c.speculates), None)

    def memory(self, candidate: Experiment) -> dict[str, int]:
        """Peak use of the KV cache in a finalist's runs, and its capacity, in tokens."""
        rows = self.finals[candidate]
        peak = max(int(row["kv_peak_tokens"]) for row in rows)
        return {"peak_tokens": peak, "capacity_tokens": int(rows[0]["kv_capacity_tokens"])}

    def _undecided(self) -> str:
        order = self.search.ranked(list(self.search.figures), self.question.base)
        if order:
            first = self.question.described(order[0])
            return f"Not decided. After {len(order)} short runs without replication, {first} leads."
        done = f"{plural(self.runs, 'simulation')} finished, none of a" if self.runs else "No simulation of a"
        return f"Not decided. {done} setting to compare."

    def _recommendation(self, best: Experiment) -> list[str]:
        """What to start, what it gains and costs, whether it meets the levels, and what makes that uncertain."""
        ask, goal, contest = self.question, self.question.goal, self.contest
        assert contest is not None
        drafts = f"and speculate with {drafter_name(best.server.pair)}, {drafts_text(best)}"
        how = drafts if best.speculates else "without speculation"
        start = "Start" if self.met else "Closest is"
        lines = [f"{start} {served_as_text(best, ask.gpus)} {how}.", *self._figures(best)]
        model = ask.base.pair.target.name if ask.drafters else ask.base.server.pair
        lines += [f"{ask.described(best)}, for {model} at {load_words(ask.base.traffic)}"]
        lines += self._without_drafts(best, contest)
        if goal.levels:
            verdict, share = self.verdict(best), cell(self._attainment, 1, 100)
            verb = "does not meet" if not self.met else {"meets": "meets"}.get(verdict, verdict)
            verb += ":" if verb == "too close to call" else ""
            more = "; --num-runs 10 may tell" if verdict == "too close to call" and self.met else ""
            lines.append(f"{verb} {goal.levels_text}{goal.share_text} (predicted: {share} % of the requests do){more}")
            rooms = {name: self._headroom(name) for name in goal.levels_ms}
            parts = ", ".join(f"{level_title(name)} {room.text()}" for name, room in rooms.items())
            of = "predicted value" if goal.named else goal.percentile.upper()
            lines.append(f"head-room (service level / {of}): {parts}")
        lines += [f"inconclusive: {why}" for why in self._inconclusive(best)] if self.met else self._not_met()
        return lines + self._on_assumption(best, contest)

    def _headroom(self, level: str) -> Ranged:
        """By how much the recommendation clears a level, with the error of seeds and model."""
        assert self.recommended is not None
        goal = self.question.goal
        room = interval(goal.headrooms(row)[level] for row in self.rows)
        return ranged(room.mean, room.half_width, model_error(self.recommended, self.rows, goal.level_metric(level)))

    def _figures(self, best: Experiment) -> list[str]:
        """TPOT, the rate held and the KV cache, each with that of plain decoding where it was compared."""
        plain, held = self.plain, self.holds(best)
        drafts = best.speculates and plain is not None
        tpot = ranged_of(best, self.rows, "mean_tpot_ms")
        parts, notes = [], list[str]()
        if not math.isnan(tpot.mean):
            mean = interval(row["mean_tpot_ms"] for row in self.finals[plain]).mean if plain else math.nan
            notes = gain_note(best, [mean / tpot.mean] if drafts else [])
            parts.append(f"TPOT {tpot.text('ms')}" + (f" instead of {mean:.1f} without drafts" if drafts else ""))
        if held is not None and held.mean:
            other = self.holds(plain)
            instead = f" instead of {other.mean:.1f}" if other is not None and drafts else ""
            parts.append(f"it holds {held.text('req/s')}{instead}")
        whole = self.memory(best)["capacity_tokens"]
        if plain is not None and drafts and self.question.gpus_of(plain) == self.question.gpus_of(best):
            parts.append(
                f"drafting costs {max(0.0, 1 - whole / self.memory(plain)['capacity_tokens']):.0%} of the KV cache"
            )
        else:
            parts.append(f"its KV cache holds {whole:,} tokens")
        return ["; ".join(parts) + ".", *notes]

    def _without_drafts(self, best: Experiment, contest: Contest) -> list[str]:
        """A note that drafts do not pay, if some were compared and the recommendation has none."""
        drafting = {name: candidate for name, candidate in self.compared.items() if candidate.speculates}
        if best.speculates or not drafting:
            return []
        first = next((name for name in contest.order if name in drafting), None)
        if first is None and not any(name in self.finalists for name in drafting):
            return [f"{NO_DRAFTS}: settings that draft were far behind in short runs"]
        if first is None:
            able = "costs as little" if any(c in self.able for c in drafting.values()) else "meets the goal on average"
            return [f"{NO_DRAFTS}: no setting that drafts {able}"]
        if self.question.name(best) != contest.best or first in contest.unsure:
            tpots = [interval(row["mean_tpot_ms"] for row in self.finals[c]).mean for c in (drafting[first], best)]
            faster = f", though TPOT with {first} is {tpots[0]:.1f} ms instead of {tpots[1]:.1f}"
            seen = faster if tpots[0] < VISIBLE * tpots[1] else ""
            return [f"{NO_DRAFTS}: no setting that drafts is significantly better by the objective{seen}"]
        return [f"{NO_DRAFTS}: the best setting that drafts, {first}, is {cell(contest.leads[first], 1, 100)} % behind"]

    def _inconclusive(self, best: Experiment) -> list[str]:
        """Why it is uncertain that the load is held; empty if it is certain."""
        held, traffic, rows = self.holds(best), self.question.base.traffic, self.rows
        if held is not None:
            return [f"the highest rate it holds is {held.text('req/s')}"] if traffic.request_rate > held.mean else []
        if short := next(filter(None, (too_short(traffic, row) for row in rows)), ""):
            return [f"{short}: raise --num-prompts"]
        if 2 * sum(row["stability"] == "inconclusive" for row in rows) <= len(rows):
            return []
        runs = f"runs of {best.traffic.num_prompts} requests"
        return [f"{runs} are too short to show that the queue stays bounded: raise --num-prompts"]

    def _not_met(self) -> list[str]:
        """What would meet the goal, as far as that is known."""
        held, ask, skipped = self.holds(self.recommended), self.question, self.search.skipped
        known = []
        if self.recommended and held and held.mean > 0:
            known.append(f"on {gpus_text(ask.gpus_of(self.recommended))} it holds {held.text('req/s')}")
        if ask.most_gpus:
            known.append(f"no fleet of up to {gpus_text(ask.most_gpus)} meets the goal: raise --gpus")
        lines = ["; ".join(known) or "no tested setting holds this load; the values below are of the best one"]
        if skipped:
            lines.append(f"{skipped} settings were not tested; one may meet the levels: raise --budget")
        return lines

    def _on_assumption(self, best: Experiment, contest: Contest) -> list[str]:
        """Notes on unmeasured acceptance that the decision depends on.

        That is, assumed, published by others, or recorded with another target. A drafter that cannot be loaded is
        called hypothetical. If the recommendation drafts, it depends on its own acceptance and on that of its ties;
        else on every drafter's.
        """
        mine = self.question.name(best)
        ties = (mine, contest.best, *contest.alike)
        decisive = {name: c for name, c in self.compared.items() if name in ties or not best.speculates}
        why = unknown_head(best) if best.speculates else ""
        notes = [f"note: hypothetical: {why}"] if why else []
        for kind in (recorded_elsewhere, is_published, is_assumed):
            notes += [f"note: {note}" for note in acceptance_notes(c for c in decisive.values() if kind(c))]
        return notes

    def _shown(self, key: str) -> str:
        """A metric of the recommendation, a latency with the error of the model too."""
        assert self.recommended is not None
        latency = key.endswith("_ms")
        return ranged_of(self.recommended, self.rows, key).text(decimals=2) if latency else positive(self.expects(key))

    def _expected(self) -> TextTable:
        rows, seed = self.rows, self.question.base.traffic.seed
        mean, first = f"mean of {len(rows)} seeds", f"seed {seed} (command below)"
        lines = [
            {"metric": label, mean: self._shown(key), first: cell(rows[0].get(key))}
            for label, key in self._metrics.items()
        ]
        return TextTable([line for line in lines if line[first] != "-"])

    def _candidates(self, best: Experiment, contest: Contest) -> TextTable:
        """The finalists in the order of their means, with the intervals that decided; then draft lengths ruled out."""
        ask, goal, finalists = self.question, self.question.goal, self.finalists
        rows: list[dict[str, str]] = []
        hopeless = 0  # rows at the end, after the first few
        order = list(dict.fromkeys([*contest.order, *finalists]))
        for name in sorted(order, key=lambda name: ask.hourly(finalists[name])) if ask.by_cost else order:
            candidate, state = finalists[name], ""
            if name in contest.unsure:
                state = unsure_text(contest.leads[name], contest.thresholds[name], name in contest.alike)
            elif name not in contest.values and candidate in self.able:
                state = "costs more"
            values = contest.values.get(name) or interval(map(goal.value, self.finals[candidate]))
            row = self._figures_row(", ".join([name, *self._own(candidate, best)]), candidate, self.finals[candidate])
            row[NAMES[goal.objective]] = positive(values)
            row[f"lead of {contest.best}"] = contest.lead_text(name) if name in contest.leads else ""
            if self.capacity is not None:
                held = self.holds(candidate)
                row["holds req/s"] = held.text() if held is not None else ""
            row |= self._cost_cells(candidate)
            row["levels" if goal.levels else "load"] = self.verdict(candidate)
            row["verdict"] = ", ".join(filter(None, (self.standing if candidate == best else "", state)))
            loses = len(rows) >= UNFOLDED and candidate != best and name not in contest.unsure
            hopeless = hopeless + 1 if loses else 0
            rows.append(row)
        for candidate in self._ruled_out():
            name = ", ".join([ask.name(candidate), *self._own(candidate, best)])
            row = dict.fromkeys(rows[0], "") | self._figures_row(name, candidate, [self.search.rows[candidate]])
            rows.append(row | {NAMES[goal.objective]: cell(self.search.figures[candidate]), "verdict": "short run"})
        return TextTable(rows, (f"{goal.percentile.upper()} TTFT ms", DETAIL), folded=hopeless)

    def _figures_row(self, name: str, candidate: Experiment, rows: list[Row]) -> dict[str, str]:
        tail = self.question.goal.percentile
        keys = {"TPOT ms": "mean_tpot_ms", f"{tail.upper()} TTFT ms": f"{tail}_ttft_ms"}
        figures = {title: ranged_of(candidate, rows, key).text() for title, key in keys.items()}
        return {"candidate": name} | figures

    def _own(self, candidate: Experiment, best: Experiment) -> list[str]:
        """The settings of a candidate that not all finalists share."""
        shared = self._shared(best)
        return [setting for setting in settings_text(candidate) if setting not in shared]

    def _shared(self, best: Experiment) -> list[str]:
        return [one for one in settings_text(best) if all(one in settings_text(other) for other in self.finals)]

    def _ruled_out(self) -> Iterator[Experiment]:
        """What short runs ruled out: other contenders and draft lengths of the recommendation, each at its best."""
        assert self.recommended is not None
        name, seen = self.question.name(self.recommended), {drafts_text(self.recommended)}
        yield from (mine for other, mine in self.compared.items() if other not in self.finalists)
        for candidate in self.search.ranked(list(self.search.figures), self.question.base):
            drafts = drafts_text(candidate)
            if self.question.name(candidate) == name and drafts and drafts not in seen:
                seen.add(drafts)
                yield candidate

    def _cost_cells(self, candidate: Experiment) -> dict[str, str]:
        cost = self._costs(candidate)
        if not cost:
            return {}
        per_hour, unit = ("$/h", "$") if self.question.gpu_hour_usd else ("GPU/h", "GPU-hours")
        cells = {per_hour: f"{cost['hourly']:.3g}"}
        cells[f"{unit} per million tokens"] = positive(cost["per_million_output_tokens"], 3)
        if "per_conversation" in cost:
            cells[f"{unit} per 1000 conversations"] = positive(cost["per_conversation"], 3, 1000)
        return cells

    def _compared(self, best: Experiment) -> list[str | Showable]:
        shared, lines = self._shared(best), list[str | Showable]()
        lines += [f"All with {', '.join(shared)}."] if shared else []
        lines.append(
            "In parentheses: between these ends with the errors of seeds and of the model; ± is over seeds alone. "
            "Autoregressive: without drafts. Colocated: drafts, verifies and prefills in the steps of one batch."
        )
        if self.refused:  # the document names them
            counts = Counter(self.refused.values()).items()
            refused = "; ".join(f"{plural(count, 'fleet')} {why}" for why, count in counts)
            lines.append(f"Not compared: {refused}.")
        return lines

    def _why(self, best: Experiment, contest: Contest) -> list[str]:
        ask, lines = self.question, list[str]()
        if ask.by_cost and self.met:
            lines.append(f"{ask.name(best)} is the cheapest fleet that meets the goal.")
        elif ask.gpu_hour_usd and (cheapest := self.cheapest) not in (None, best):
            lines.append(f"Cheapest finalist that meets the goal: {ask.described(cheapest)}.")
        if not contest.others:
            return lines if ask.by_cost or not self.met else [*lines, "No other finalist meets the goal on average."]
        limits = threshold_text([contest], ask.indifference)
        lines.append(f"Leads are paired by seed, {contest.confidence:.1%} confidence each; {limits}.")
        if contest.alike:
            lines.append(f"{ask.name(best)} is the simplest of the finalists without significant difference.")
        return lines

    def _surroundings(self, best: Experiment) -> list[str]:
        """Where the decision changes, and failure modes nearby."""
        name, flips = self.question.name(best), self.flips
        lines = [flips.sentence(side) for side in flips.sides] if flips is not None else []
        if self.break_even is not None:
            lines.append(f"poor speculation: {self.break_even.text(name)}")
        peak, whole = self.memory(best).values()
        lines.append(f"KV cache: at most {peak / whole:.0%} in use ({peak} of {whole} tokens)")
        return [*lines, *self._saturation(best), *(f"not tested (raise --budget): {what}" for what in self.left_out)]

    def _saturation(self, best: Experiment) -> list[str]:
        held = self.holds(best)
        if held is None:
            return []
        if not held.mean:
            return ["saturation: no rate holds the service levels"]
        used = self.question.base.traffic.request_rate / held.mean
        load = f"the load is {used:.0%} of that" if used <= 1 else f"the load is {used:.3g} times that"
        text = f"saturation: it holds {held.text('req/s')} within the service levels; {load}"
        if self.question.gpu_hour_usd:
            here = self.cost_of(best)
            text += f"; a million output tokens cost ${positive(here, 3)} here and ${used * here.mean:.3f} at that rate"
        return [text]

    def _notes(self, best: Experiment) -> list[str]:
        ask, goal, search = self.question, self.question.goal, self.search
        able = "meet the service levels and keep up" if goal.levels else "keep up"
        most = "lowest" if goal.sign < 0 else "highest"
        left = f"; {search.skipped} more were not tested" if search.skipped else ""
        contender = "way to use the GPUs" if ask.fleets else "architecture"
        contender += " and drafter" if ask.drafters else ""
        seeds, length = span_text(map(len, self.finals.values())), length_of(best)
        runs = f"{length.measured} requests"
        if best.scoring.steady:
            runs += f" in the steady state (after the first {length.start}, without the drain)"
        over = f"the search ended at {ask.budget}; finalists always run" if self.runs > ask.budget else ""
        return [
            f"objective: {most} {NAMES[goal.objective]} among the settings that {able}",
            f"searched {len(search.figures)} settings in short runs, each {contender} at its best{left}; "
            f"{self.runs} simulations ({over or f'of {ask.budget} allowed'}), in {self.spent_s:.0f} s",
            f"{len(self.finals)} finalists: {seeds} seeds of {runs}; the search used other seeds",
            *(
                ["holds: by these settings, tuned for this load; pdvsim capacity tunes for the rate"]
                if self.capacity
                else []
            ),
            *measure_notes(self.compared.values()),
        ]
