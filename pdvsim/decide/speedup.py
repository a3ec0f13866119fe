"""What drafting gains: each drafter and draft length against plain decoding, over the number of concurrent requests.

All run the same closed loops, so that every gain is paired by seed. Between the concurrencies asked for, the one from
which drafting is slower is an edge (`find_edge`). Ranges hold the spread over seeds and the error of predicted gains,
which was measured on pairs of servers with and without drafts that nothing was fitted to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from pdvsim.bench import output
from pdvsim.bench.inputs import checked
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, interval
from pdvsim.calibration.validate.speculation import MeasuredPair, read_pairs
from pdvsim.decide.edge import Ends, edge_of, find_edge
from pdvsim.decide.error import Ranged, gain_note, gain_ranged
from pdvsim.decide.fleet import Contender
from pdvsim.decide.race import check_seeds
from pdvsim.decide.report import Answer, Report, asked_lines, nearest_pair, plural
from pdvsim.decide.runs import Bench, in_loop, replications
from pdvsim.decide.space import settings_text
from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Experiment
from pdvsim.sim.limits import LeastDraft, NumRuns, Requests, check_list, check_ranges
from pdvsim.sim.workload.usual import drafter_name
from pdvsim.view.report.sheet import Showable
from pdvsim.view.setting import acceptance_notes
from pdvsim.view.table import TextTable

STEP = 1.1  # between the places where an edge is looked for


class Drafting(NamedTuple):
    """A drafter and a draft length."""

    drafter: str
    k: int


@dataclass(frozen=True)
class SpeedupQuestion:
    """Drafters of a model on a server, draft lengths, and closed loops."""

    base: Experiment
    drafters: tuple[Contender, ...]
    lengths: tuple[LeastDraft, ...] = (1, 2, 3, 5)  # without 0, which all are compared with
    concurrency: tuple[Requests, ...] = (1, 8, 64, 256)
    num_runs: NumRuns = 3
    prompts: Requests | None = None  # of a run; None: as many as its closed loop needs

    def __post_init__(self) -> None:
        check_list("num-speculative-tokens", self.lengths)
        check_list("concurrency", self.concurrency)
        check_ranges(self)
        check_seeds(self.num_runs)
        if not self.drafters:
            raise ValueError("speedup needs a drafter: none of this model's is known; give --pair or --drafter")
        for name in self.options:
            checked(self.server(name))

    @cached_property
    def options(self) -> tuple[Drafting, ...]:
        """Every drafter with every length."""
        return tuple(Drafting(drafter_name(str(one.pair)), k) for one in self.drafters for k in self.lengths)

    def server(self, name: Drafting | None) -> Experiment:
        """The server with a drafter and a length; None: plain decoding."""
        one = self.base
        if name is not None:
            one = next(d for d in self.drafters if drafter_name(str(d.pair)) == name.drafter).of(one)
        length = 0 if name is None else name.k
        return replace(one, server=replace(one.server, controller="fixed", num_speculative_tokens=length))

    def loops(self, name: Drafting | None, load: int) -> list[Experiment]:
        """Replications of a closed loop."""
        return replications(in_loop(self.server(name), load, self.prompts), self.num_runs)


@dataclass(repr=False)
class Speedup(Answer):
    """The gains whose runs have finished."""

    question: SpeedupQuestion
    runs: int = 0
    rows: list[Row] = field(default_factory=list)
    gains: dict[tuple[Drafting, int], Interval] = field(default_factory=dict)
    loses_from: dict[Drafting, int] = field(default_factory=dict)  # concurrency from which drafting is slower
    interrupted: bool = False

    def ranged(self, name: Drafting, load: int) -> Ranged | None:
        """A gain with the errors of seeds and of the model; None if its runs have not finished."""
        known = self.gains.get((name, load))
        return None if known is None else gain_ranged(self.question.server(name), known)

    def best(self, load: int) -> tuple[Drafting, Ranged] | None:
        """What gains most at a load."""
        known = ((name, self.ranged(name, load)) for name in self.question.options)
        return max(((n, gain) for n, gain in known if gain is not None), key=lambda one: one[1].mean, default=None)

    def cache_cost(self, name: Drafting) -> float:
        """Share of the KV cache that drafting takes."""
        plain, drafting = (ServerParts(self.question.server(one)).kv_capacity for one in (None, name))
        return max(0.0, 1 - drafting / plain)

    def report(self) -> Report:
        """The best at each load, the table, and what its figures rest on."""
        ask, options = self.question, self.question.options
        title = f"Speed-up by drafting, {ask.base.pair.target.name} on {ask.base.hardware.gpu}"
        document = self.document(
            question=output.settings(ask),
            gains=[
                {"drafter": name.drafter, "k": name.k, "concurrency": load, "gain": held} | {"low": low, "high": high}
                for (name, load), held in self.gains.items()
                for _, low, high in [gain_ranged(ask.server(name), held)]
            ],
            loses_from=[name._asdict() | {"concurrency": at} for name, at in self.loses_from.items()],
            kv_cache_cost=[name._asdict() | {"share": self.cache_cost(name)} for name in options],
            runs=self.runs,
        )
        lines: list[str | Showable] = ["no pair of runs has finished"]
        if self.gains:
            lines = [TextTable([self._row(name) for name in options]), *self._notes()]
        headline = [_best_line(load, *found) for load in ask.concurrency if (found := self.best(load)) is not None]
        stopped = f"{len(self.gains)} gains are known" if self.interrupted else ""
        sections: list[tuple[str, list[str | Showable]]] = [(title, [*headline]), ("Gains", lines)]
        if self.gains:
            servers = [ask.server(name) for name in options]
            nearest = dict.fromkeys(line for one in servers for line in nearest_pair(one, max(ask.concurrency)))
            sections.append(("Asked", [*asked_lines(ask.base, servers, self.rows), *nearest]))
        return Report("Speed-up", f"{title}.", ask.base, sections, document, stopped, not self.gains)

    def _row(self, name: Drafting) -> dict[str, str]:
        gains = {load: self.ranged(name, load) for load in self.question.concurrency}
        cells = {f"at {load}": "-" if g is None else g.text(decimals=2) for load, g in gains.items()}
        loses = str(self.loses_from[name]) if name in self.loses_from else "-"
        return {"drafter": name.drafter, "k": str(name.k)} | cells | {
            "a loss from": loses, "KV cache": f"-{self.cache_cost(name):.0%}"
        }  # fmt: skip

    def _notes(self) -> list[str]:
        ask = self.question
        gains = {name.drafter: [g.mean for (n, _), g in self.gains.items() if n.drafter == name.drafter]
                 for name in ask.options}  # fmt: skip
        errors = (gain_note(ask.server(name), gains[name.drafter]) for name in ask.options)
        return [
            f"output tokens per second over those of plain decoding, {plural(ask.num_runs, 'seed')} each, paired; in "
            "parentheses with the errors of seeds and of the model",
            f"all with {', '.join(settings_text(ask.server(None))[1:])}, not tuned; a full batch shows capacity",
            "a loss from: concurrency from which plain decoding is faster; KV cache: share that drafting takes",
            *dict.fromkeys(note for notes in errors for note in notes),
            *acceptance_notes(map(ask.server, ask.options)),
        ]


def _best_line(load: int, name: Drafting, gain: Ranged) -> str:
    """What to do at a load."""
    fast = f"{gain.text(decimals=2)} times as fast"
    if gain.mean <= 1:
        return f"{load} concurrent: do not draft: the best, {name.drafter} with k={name.k}, is {fast}"
    doubt = "" if gain.low > 1 else ", which may be a loss"
    return f"{load} concurrent: {name.drafter}, k={name.k}: {fast} as plain decoding{doubt}"


def measured_pairs(servers: Iterable[Experiment]) -> dict[Drafting, list[MeasuredPair]]:
    """Measured pairs of servers of the same engine, target, drafter and draft length, on one card of any kind."""
    found: dict[Drafting, list[MeasuredPair]] = {}
    every = read_pairs()
    for one in servers:
        key = one.hardware.predicted_engine, one.server.drafted_by, one.pair.target.name, one.longest_draft
        found[Drafting(drafter_name(one.server.pair), one.longest_draft)] = [
            pair for pair in every
            if (pair.hardware.engine, pair.method, pair.target, pair.k) == key
            and pair.drafted.experiment.gpus == 1 and not pair.drafted.topk
        ]  # fmt: skip
    return found


def usual_runs(question: SpeedupQuestion) -> int:
    """Estimated simulations: all loads, and a few per edge."""
    return (len(question.options) + 1) * len(question.concurrency) * question.num_runs


def find_speedup(question: SpeedupQuestion, bench: Bench) -> Speedup:
    """The gains at all loads, then where they end. Ctrl-C keeps finished runs."""
    answer = Speedup(question)
    try:
        _run(answer, [(name, load) for load in question.concurrency for name in question.options], bench)
        _edges(answer, bench)
    except KeyboardInterrupt:
        answer.interrupted = True
    answer.runs = bench.runs
    return answer


def _run(answer: Speedup, asked: Iterable[tuple[Drafting, int]], bench: Bench) -> None:
    """Run what is asked, and plain decoding beside it."""
    ask, asked = answer.question, list(asked)
    pairs = [(name, load) for wanted, load in asked for name in (None, wanted)]
    try:
        bench.rows([run for name, load in dict.fromkeys(pairs) for run in ask.loops(name, load)])
    finally:
        for name, load in asked:
            plain, drafting = (bench.known(ask.loops(one, load)) for one in (None, name))
            if plain and drafting and (name, load) not in answer.gains:
                both = zip(drafting, plain, strict=True)
                answer.gains[name, load] = interval(a["output_throughput"] / b["output_throughput"] for a, b in both)
                answer.rows += [{"drafter": name.drafter, "k": name.k} | row for row in drafting]


def _edges(answer: Speedup, bench: Bench) -> None:
    """Where each drafter becomes a loss, if it does between the smallest load and the largest."""
    ask, loads = answer.question, sorted(answer.question.concurrency)
    places = sorted({round(loads[0] * STEP**n) for n in range(math.ceil(math.log(loads[-1] / loads[0], STEP)))})
    asked = dict(answer.gains)
    for name in ask.options:
        logs = [math.log(asked[name, load].mean) for load in loads]
        if not logs[0] > 0 > logs[-1]:
            continue
        last = next(at for at, log in enumerate(logs) if log <= 0)
        apart, fall = math.log(loads[last] / loads[last - 1]), logs[last - 1] - logs[last]
        guess = math.log(loads[last - 1]) + apart * logs[last - 1] / fall  # on a straight line between both
        start = min(range(len(places)), key=lambda at: abs(math.log(places[at]) - guess))

        def margin(at: int, name: Drafting = name) -> float:
            _run(answer, [(name, places[at])], bench)
            return math.log(answer.gains[name, places[at]].mean)

        slope = fall / max(1.0, apart / math.log(STEP))
        edge = edge_of(find_edge(start, Ends(-1, len(places)), 2, 2, slope, trust=1.0), margin)
        answer.loses_from[name] = places[min(math.ceil(edge.root), len(places) - 1)]
    answer.gains = asked
