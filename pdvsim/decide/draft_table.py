"""A draft table: question, engine, the draft length for each batch size, and its output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from pdvsim.bench import output
from pdvsim.bench.inputs import checked
from pdvsim.bench.stats import Interval
from pdvsim.decide.deploy import Deployment, roomed
from pdvsim.decide.error import gain_note
from pdvsim.decide.report import NO_DRAFTS, Answer, Report, lengths_note, nearest_pair, plural
from pdvsim.decide.runs import in_loop, replications
from pdvsim.sim.assembly import profile_of
from pdvsim.sim.config import Experiment, Server
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.base import InferenceEngine
from pdvsim.sim.engines.served import Block, Served
from pdvsim.sim.limits import DraftLength, LeastDraft, NumRuns, PartialShare, Range, Requests, check, check_ranges
from pdvsim.sim.prices.options import Padding
from pdvsim.view.report.sheet import Showable
from pdvsim.view.setting import acceptance_notes
from pdvsim.view.table import TextTable

SIZES = Range(1, 4096)
USUAL_LENGTH = 4
LEAST_SHOWN_SHARE = 0.0005
PLAIN = -1  # in place of a draft length: a server without a drafter

SizeAndLength = tuple[int, int]  # batch size, and draft length or PLAIN
EngineName = Literal["vllm", "sglang", "tensorrt-llm"]
TABLED = {engine.padding: engine for engine in ENGINES.values()}  # by the name of their padding


@dataclass(frozen=True)
class DraftQuestion:
    """Models, GPU and traffic, served by an engine; the longest draft and, in `base`, the largest batch."""

    base: Experiment
    max_k: LeastDraft = 8
    against: DraftLength | None = None  # a fixed draft length to compare with
    engine: EngineName = "vllm"
    indifference: PartialShare = 0.02  # relative gains that start no new tier
    num_runs: NumRuns = 3
    prompts: Requests | None = None  # requests of a simulation; None: as many as its closed loop needs

    def __post_init__(self) -> None:
        check_ranges(self)
        check("max-num-seqs", self.most, SIZES)
        if not self.base.has_drafter:
            raise ValueError("a draft table needs a drafter: --drafter none has none")
        if self.compared > self.max_k:
            raise ValueError(f"--against {self.against} is beyond --max-k {self.max_k}")
        if self.compared < self.served_by.lowest_k:
            raise ValueError(f"--against {self.against} is below the lowest k of {self.engine}")
        checked(self.drafting(self.max_k))

    @property
    def most(self) -> int:
        """The largest batch."""
        return self.base.server.max_num_seqs

    @property
    def compared(self) -> int:
        return min(USUAL_LENGTH, self.max_k) if self.against is None else self.against

    @property
    def served_by(self) -> InferenceEngine:
        """The engine of the table."""
        return TABLED[self.engine]

    @property
    def padding(self) -> tuple[Padding, str]:
        """How the engine pads a step, also in words; a profile from an engine's log already includes it."""
        if profile_of(self.base).whole_steps:
            return "profile", "steps are padded as in the engine of the profile's log"
        return self.served_by.padding, self.served_by.pads

    def drafting(self, k: int) -> Experiment:
        """The experiment with a fixed draft length, on one server."""
        return replace(
            self.base,
            server=replace(self.base.server, controller="fixed", num_speculative_tokens=k),
            hardware=replace(self.base.hardware, replicas=1, padding=self.padding[0]),
        )

    def loops(self, rows: int, k: int) -> list[Experiment]:
        """Replications of a closed loop of `rows` requests; k may be PLAIN. At k=0 the drafter still runs."""
        one = self.drafting(max(k, 0) if k else Server.num_speculative_tokens)
        if not k:
            idle = replace(one.server, controller="table", num_speculative_tokens_per_batch_size=("1:0",))
            one = replace(one, server=idle)
        return replications(in_loop(one, rows, self.prompts), self.num_runs)


@dataclass(frozen=True)
class Tier:
    """Batch sizes from `first` to `last` with one draft length. Gains are shares."""

    first: int
    last: int
    k: int
    tokens_per_s: tuple[float, float]  # at its ends
    over_plain: tuple[float, float]  # over a server without a drafter, at its ends
    worst: int  # the size with the smallest of these gains
    worst_over_plain: float
    next_best: int
    over_next: float  # averaged over its sizes
    over_compared: float
    acceptance: tuple[float, float] | None  # range of rates in which it stays best
    break_even: float | None  # the lowest rate at which it is as fast as a server without a drafter


@dataclass(frozen=True)
class Border:
    """The batch size from which a table has another draft length, served at just that size. Losses are shares.

    vLLM looks the draft length up in every step, by all of its requests (issue 49548). A closed loop of as many
    requests as a border has is on both sides of it in turn.
    """

    first: int
    at: int  # the batch size that was simulated, about the same
    before: int
    after: int
    lost: float  # against the better of both lengths


@dataclass(repr=False)
class DraftTable(Answer):
    """The best draft lengths and their significance."""

    question: DraftQuestion
    tiers: list[Tier]
    best: tuple[int, ...]  # at batch sizes 1, 2, …, small gains included
    lost: float  # largest relative loss from ignoring small gains, at any size
    error: float  # error of a gain; nan if the profile states none
    single: int  # best single draft length, every doubling of the batch weighted equally; 0: no drafter
    single_lost: float  # its relative loss
    plain_from: int | None  # batch size from which a server without a drafter is faster
    context: float  # mean cached tokens per request while it decodes
    fits: int  # requests of that context that fit in the KV cache
    measured: int | None  # largest batch of the profile's samples; None: unknown
    profile: str
    foundation: str
    simulated: dict[SizeAndLength, Interval] = field(default_factory=dict)  # tokens per second
    borders: list[Border] = field(default_factory=list)
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False

    def significant(self, tier: Tier) -> bool:
        """Whether a tier's draft length leads the next best by more than the error."""
        return not tier.over_next <= (0.0 if math.isnan(self.error) else self.error)

    def ranges(self) -> list[list[int]]:
        """Rows of [first batch size, last, draft length]."""
        return [[tier.first, tier.last, tier.k] for tier in self.tiers]

    def report(self) -> Report:
        """The table, its significance, and the commands to start."""
        question, blocks = self.question, ready(self)
        served = f"{question.base.server.pair} on {question.base.hardware.gpu}, {question.base.arch}"
        title = f"Draft lengths by batch size for {question.engine}: {served}, context {self.context:,.0f}"
        document = self.document(
            question=output.settings(question),
            engine={"name": question.engine, "padding": question.padding[0], "lowest_k": question.served_by.lowest_k},
            tiers=[asdict(tier) | {"significant": self.significant(tier)} for tier in self.tiers],
            against=question.compared,
            best=list(self.best),
            most_lost=self.lost,
            error=self.error,
            one_draft_length={"k": self.single, "loss": self.single_lost},
            rows_measured=self.measured,
            context=self.context,
            num_speculative_tokens_per_batch_size=self.ranges(),
            plain_is_faster_from=self.plain_from,
            rows_that_fit=self.fits,
            simulated=[
                {"rows": rows, "k": "plain" if k == PLAIN else k, "tokens_per_s": speed}
                for (rows, k), speed in self.simulated.items()
            ],
            borders=[asdict(border) for border in self.borders],
            deployment=[asdict(block) for block in blocks],
            profile=self.profile,
            foundation=self.foundation,
            runs=self.runs,
            spent_s=self.spent_s,
        )
        sections: list[tuple[str, list[str | Showable]]] = [
            ("", [title, _tiers(self), *(f"- {note}" for note in _notes(self))]),
            ("", [Deployment(blocks)]),
        ]
        stopped = "the table uses the simulations that had finished" if self.interrupted else ""
        return Report("Draft table", title, question.base, sections, document, stopped)


def of_table(table: DraftTable) -> Served:
    """The setting of a table; without a drafter if that is faster at every size."""
    base = table.question.base
    if table.plain_from == 1:
        return Served(base, [[1, base.server.max_num_seqs, 0]], 0)
    return Served(base, table.ranges(), table.single, table.single_lost)


def ready(table: DraftTable) -> list[Block]:
    """The table in the engine's format."""
    return TABLED[table.question.engine].table(roomed(of_table(table)))


def _tiers(table: DraftTable) -> TextTable:
    against = f"over k={table.question.compared}"
    within = "not significant" if math.isnan(table.error) else f"within the profile's error (±{table.error:.1%})"
    rows = [
        {
            "batch": f"{tier.first} to {tier.last}",
            "k": str(tier.k),
            "tok/s": "{:,.0f} to {:,.0f}".format(*tier.tokens_per_s),
            "over plain": "{:+.1%} to {:+.1%}".format(*tier.over_plain),
            "least": f"{tier.worst_over_plain:+.1%} at {tier.worst}",
            "next best": f"k={tier.next_best}",
            "gain": f"{tier.over_next:+.1%}",
            against: f"{tier.over_compared:+.1%}",
            "acceptance": "-" if tier.acceptance is None else "{:.2f} to {:.2f}".format(*tier.acceptance),
            "": "" if table.significant(tier) else within,
        }
        for tier in table.tiers
    ]
    return TextTable(rows)


def _notes(table: DraftTable) -> list[str]:
    question = table.question
    within = f" (ignoring gains below {question.indifference:.0%})" if question.indifference else ""
    notes = [
        "over plain: over a server without a drafter, at both ends of the range; least: the smallest such gain in it; "
        "gain: over the next best k"
    ]
    notes += gain_note(question.base, [1 + gain for tier in table.tiers if tier.k for gain in tier.over_plain])
    notes += nearest_pair(question.drafting(max(1, table.single)), question.most)
    if question.base.acceptance.by_rate:
        notes.append(f"acceptance: range of rates in which k stays best{within}")
    pays = [f"{tier.break_even:.2f} at batch {tier.first} to {tier.last}" for tier in table.tiers if tier.break_even]
    for note in acceptance_notes([question.drafting(question.max_k)]):
        even = f"; drafting breaks even with no drafter at {', '.join(pays)}"
        notes.append(note + (even if pays and question.base.acceptance.by_rate else ""))
    if table.lost >= LEAST_SHOWN_SHARE:
        notes.append(
            f"gains below {question.indifference:.0%} start no new range: the best k at each size is "
            f"at most {table.lost:.1%} faster"
        )
    if math.isnan(table.error):
        notes.append("the profile states no error of its forward times: the significance of gains is unknown")
    else:
        notes.append(f"the profile's error for two rounds is ±{table.error:.1%}: it may favour either of two lengths")
    notes += [question.padding[1], question.served_by.at_0, *border_notes(table.borders)]
    notes += lengths_note(question.base.traffic)
    if table.plain_from == 1:
        notes.append(f"{NO_DRAFTS}: a server without a drafter is faster at every size")
    elif table.plain_from is not None:
        notes.append(
            f"from batch {table.plain_from} on a server without a drafter is faster than this table: serve without "
            "one if your load stays there"
        )
    if table.fits < question.most:
        notes.append(f"the KV cache holds about {table.fits} requests of this traffic: larger batches do not occur")
    if table.measured is not None and table.measured < question.most:
        notes.append(f"batches above {table.measured} were not measured: their times are extrapolated")
    if table.simulated:
        sizes = ", ".join(map(str, sorted({rows for rows, _ in table.simulated})))
        notes.append(
            f"decided by simulation: closed loops at batch {sizes}, {plural(question.num_runs, 'seed')} each; "
            "between these sizes by formula"
        )
    else:
        notes.append("by formula alone, without simulation; it overstates the gain of drafts")
    return [*notes, f"profile {table.profile}: {table.foundation}; {table.runs} runs, {table.spent_s:.1f} s"]


def border_notes(crossed: Sequence[Border]) -> list[str]:
    """The cost of crossing the worst border."""
    if not crossed:
        return []
    worst = max(crossed, key=lambda border: border.lost)
    return [
        f"vLLM looks k up in every step, prefills counted: at the border of batch {worst.first} (k={worst.before} to "
        f"{worst.after}) that costs {max(0.0, worst.lost):.1%} against the better of both lengths"
    ]
