"""The text of an advice: every sentence uses values from the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pdvsim.common.commandline import command_line
from pdvsim.decide.contest import Contest
from pdvsim.decide.goal import NAMES, attained
from pdvsim.decide.question import Findings, Question
from pdvsim.decide.recommendation import nothing_meets, recommendation
from pdvsim.decide.report import (
    Report,
    contest_document,
    lead_text,
    outside_measured,
    positive,
    rests_on,
    threshold_text,
    unsure_text,
)
from pdvsim.decide.runs import load_axis, load_words
from pdvsim.decide.served import Deployment
from pdvsim.decide.space import settings_text
from pdvsim.sim.config import Experiment
from pdvsim.study import output
from pdvsim.study.length import length_of
from pdvsim.study.stats import interval
from pdvsim.view.report.sheet import Highlight, Showable
from pdvsim.view.setting import acceptance_notes, measure_notes
from pdvsim.view.style import metric_label
from pdvsim.view.table import DETAIL, TextTable, cell, span_text

CONFIDENCE, FLIPS = "Confidence", "Where the decision changes"
UNFOLDED = 5  # finalists that a page always shows; those after them that lose significantly are folded
TILE_METRICS = ("output_throughput", "mean_e2el_ms", "p99_ttft_ms", "p99_tpot_ms")
EXPECTED = (
    "request_throughput", "output_throughput", "request_goodput", "mean_ttft_ms", "{}_ttft_ms", "p99_ttft_ms",
    "mean_tpot_ms", "{}_tpot_ms", "p99_tpot_ms", "mean_e2el_ms",
)  # fmt: skip


class Advice(Findings):
    """The answer, section by section."""

    def report(self) -> Report:
        """The whole advice, section by section."""
        ask = self.question
        lead = f"Recommendation at {load_words(ask.base.traffic)}, with confidence."
        # the document has the contenders under the name of its first version
        question = {"ways" if key == "contenders" else key: value for key, value in output.settings(ask).items()}
        document = self.document(
            question=question,
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
        if self.recommended is None or self.contest is None:
            return Report("Advice", lead, ask.base, [("", _undecided(self))], document, stopped)
        figures = {label: positive(self.expects(key)) for label, key in _metrics(ask).items() if key in TILE_METRICS}
        card = Highlight(recommendation(self, self.recommended), figures, self.met)
        sections = (
            ("Recommendation" if self.met else nothing_meets(self), [card]),
            ("Expected", [_expected(self)]),
            (CONFIDENCE, _confidence(self, self.recommended, self.contest)),
            (FLIPS, [*(line for flips in self.flips for line in flips.lines), *_left_out(self, True)]),
            ("To run it", [Deployment(self.deployment)]),
            ("Failure modes nearby", _failure_modes(self, self.recommended)),
            ("Method", _notes(self, self.recommended)),
        )
        document |= _decided(self, self.recommended, self.contest)
        return Report("Advice", lead, ask.base, sections, document, stopped)


def _decided(advice: Findings, best: Experiment, contest: Contest) -> dict[str, Any]:
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
        "expected": {key: advice.expects(key) for key in _metrics(ask).values()}
        | ({"attainment": interval(map(attained, rows))} if ask.goal.levels else {}),
        "first_replication": {key: value for key, value in rows[0].items() if key != "run"},
        "objective": ask.goal.objective,
        "contest": contest_document(contest),
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


def _undecided(advice: Findings) -> list[str]:
    order = advice.search.ranked(list(advice.search.figures), advice.question.base)
    if not order:
        return ["No simulation has finished."]
    first = advice.question.described(order[0])
    return [f"Not decided. After {len(order)} short runs without replication, {first} leads."]


def _metrics(ask: Question) -> dict[str, str]:
    """Columns of a run that are expected of the recommendation, by label."""
    keys = [key.format(ask.goal.percentile) for key in EXPECTED]
    batch = {"Time to finish (s)": "duration"} if load_axis(ask.base.traffic) == "requests" else {}
    return batch | {metric_label(key): key for key in keys} | {"Tokens per round": "spec_decode_acceptance_length"}


def _expected(advice: Findings) -> TextTable:
    rows, seed = advice.rows, advice.question.base.traffic.seed
    shown = {label: (advice.expects(key), rows[0].get(key)) for label, key in _metrics(advice.question).items()}
    mean, first = f"mean of {len(rows)} seeds, ± 95%", f"seed {seed} (command below)"
    return TextTable(
        [
            {"metric": label, mean: positive(values), first: cell(one)}
            for label, (values, one) in shown.items()
            if cell(one) != "-"
        ]
    )


def _confidence(advice: Findings, best: Experiment, contest: Contest) -> list[str | Showable]:
    """The finalists in the order of their means, with the intervals that decided."""
    ask, goal = advice.question, advice.question.goal
    rows: list[dict[str, str]] = []
    hopeless = 0  # rows at the end, after the first few
    units = ["$/h", "$ per million tokens"] if ask.gpu_hour_usd else ["GPU/h", "GPU-hours per million tokens"]
    units += [units[1].replace("million tokens", "1000 conversations")] if ask.base.traffic.converses else []
    named = {ask.name(candidate): candidate for candidate in advice.finals}
    order = list(dict.fromkeys((contest.best, *contest.others, *named)))
    shared = [one for one in settings_text(best) if all(one in settings_text(other) for other in advice.finals)]
    for name in sorted(order, key=lambda name: ask.hourly(named[name])) if ask.by_cost else order:
        candidate, values = named[name], contest.values.get(name)
        state = ""
        if name in contest.unsure:
            state = unsure_text(contest.leads[name], contest.thresholds[name], name in contest.alike)
        if values is None:
            values = interval(map(goal.value, advice.finals[candidate]))
            state = "misses the levels" if goal.levels else "does not keep up"
            state = "costs more" if candidate in advice.able else state
        ahead = lead_text(contest, name) if name in contest.leads else ""
        chosen = ("recommended" if advice.met else "closest") if candidate == best else ""
        costs = [f"{ask.hourly(candidate):.3g}", positive(advice.per_million(candidate), 3)] if advice.priced else []
        costs += [positive(advice.per_conversation(candidate), 3, 1000)] if advice.priced and len(units) > 2 else []
        own = [setting for setting in settings_text(candidate) if setting not in shared]
        row = {"finalist": ", ".join([name, *own]), NAMES[goal.objective]: positive(values)}
        row |= {f"lead of {contest.best}": ahead} | dict(zip(units, costs, strict=False))
        loses = len(rows) >= UNFOLDED and candidate != best and name not in contest.unsure
        hopeless = hopeless + 1 if loses else 0
        rows.append(row | {"verdict": ", ".join(filter(None, (chosen, state)))})
    lines: list[str | Showable] = [TextTable(rows, (DETAIL,), folded=hopeless)]
    if shared:
        lines.append(f"All with {', '.join(shared)}.")
    if advice.refused:
        lines.append(_refused(advice.refused))
    if ask.by_cost and advice.met:
        lines.append(f"{ask.name(best)} is the cheapest fleet that meets the goal.")
    elif ask.gpu_hour_usd and (cheapest := advice.cheapest) not in (None, best):
        lines.append(f"Cheapest finalist that meets the goal: {ask.described(cheapest)}.")
    if not contest.others:
        return lines if ask.by_cost else [*lines, "The only finalist that meets the goal."]
    limits = threshold_text([contest], ask.indifference)
    lines.append(f"Leads are paired by seed, {contest.confidence:.1%} confidence each; {limits}.")
    if contest.alike:
        lines.append(f"{ask.name(best)} is the simplest of the finalists without significant difference.")
    return lines


def _refused(refused: Mapping[str, str]) -> str:
    """Fleets that were not compared, counted by reason; the document names them."""
    counts = Counter(refused.values())
    shown = (f"{count} {'fleet' if count == 1 else 'fleets'} {why}" for why, count in counts.items())
    return f"Not compared: {'; '.join(shown)}."


def _cost(advice: Findings, candidate: Experiment) -> dict[str, Any]:
    ask = advice.question
    return {
        "fleet": ask.name(candidate),
        "gpus": candidate.hardware.replicas * candidate.gpus,
        "hourly": ask.hourly(candidate),
        "per_million_output_tokens": advice.per_million(candidate),
        **({"per_conversation": advice.per_conversation(candidate)} if ask.base.traffic.converses else {}),
    }


def _left_out(advice: Findings, flips: bool) -> list[str]:
    what = [what for what in advice.left_out if what.startswith("flips") is flips]
    return [f"not tested (raise --budget): {name}" for name in what]


def _failure_modes(advice: Findings, best: Experiment) -> list[str]:
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


def _saturation(advice: Findings) -> list[str]:
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


def _notes(advice: Findings, best: Experiment) -> list[str]:
    ask = advice.question
    able = "meet the service levels and keep up" if ask.goal.levels else "keep up"
    left = f"; {advice.search.skipped} more were not tested" if advice.search.skipped else ""
    contender = "way to use the GPUs" if ask.fleets else "architecture"
    contender += " and drafter" if ask.drafters else ""
    accepted = dict.fromkeys(one.acceptance_text for one in ask.drafters)
    seeds = span_text(map(len, advice.finals.values()))
    length = length_of(best)
    runs = f"{length.measured} requests"
    if best.scoring.steady:
        runs += f" in the steady state (after the first {length.start}, without the drain)"
    most = "lowest" if ask.goal.sign < 0 else "highest"
    return [
        f"objective: {most} {NAMES[ask.goal.objective]} among the settings that {able}",
        f"searched {len(advice.search.figures)} settings in short runs, each {contender} at its best{left}; "
        f"{advice.runs} of {ask.budget} simulations used, in {advice.spent_s:.0f} s",
        f"{len(advice.finals)} finalists: {seeds} seeds of {runs}; the search used other seeds",
        *([f"acceptance of {'; '.join(accepted)}"] if accepted else acceptance_notes(advice.finals)),
        *measure_notes(advice.finals),
        *rests_on(ask.base.traffic, advice.rows),
    ]
