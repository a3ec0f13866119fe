"""A draft table: the question, the draft length for each batch size, and that as text and as a document."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

from pdvsim.common.version import __version__
from pdvsim.decide.deploy import Block, deployment_text, of_table, vllm
from pdvsim.decide.runs import replications
from pdvsim.sim.config import Experiment
from pdvsim.sim.limits import Range, check, check_ranges
from pdvsim.study import output
from pdvsim.study.inputs import checked
from pdvsim.study.stats import Interval
from pdvsim.view.table import cell, grid

IdleDrafter = Literal["follows", "rests"]

SIZES = Range(1, 4096)  # of a batch, at most
USUAL = 4  # draft length that people leave as it is
RUN_BATCHES = 3  # requests of a simulation, at least, in batches of its size
SHOWN = 0.0005  # the least share that is not printed as 0.0%


@dataclass(frozen=True)
class DraftQuestion:
    """Models, card and traffic; up to which draft length and, in `base`, which batch size."""

    base: Experiment
    max_k: int = 8
    against: int | None = None  # a fixed draft length to compare with
    idle_drafter: IdleDrafter | None = None
    indifference: float = 0.02  # gains, as a share, that are not worth a tier of their own
    num_runs: int = 5

    def __post_init__(self) -> None:
        check_ranges(self)
        check("max-num-seqs", self.most, SIZES)
        if self.base.kin in ("autoregressive", "baseline"):
            why = "drafts nothing" if self.base.kin == "autoregressive" else "serves each request at batch 1"
            raise ValueError(f"a draft table needs an architecture that drafts in batches; {self.base.arch} {why}")
        if not self.base.has_drafter:
            raise ValueError("a draft table needs a drafter: --drafter none has none")
        if self.against is not None and self.against > self.max_k:
            raise ValueError(f"--against {self.against} is beyond --max-k {self.max_k}")
        if self.idle_drafter == "follows" and self.base.kin != "colocated":
            raise ValueError(f"--idle-drafter follows is what engines do with colocated batches, not {self.base.arch}")
        if self.base.seats.gpus > 1:
            raise ValueError("a draft table is of one GPU: --verify-gpu and --place do not apply")
        checked(self.drafting(self.max_k))

    @property
    def most(self) -> int:
        """The largest batch."""
        return self.base.server.max_num_seqs

    @property
    def compared(self) -> int:
        return min(USUAL, self.max_k) if self.against is None else self.against

    @property
    def follows(self) -> bool:
        """Whether the drafter reads along at k=0."""
        return self.idle_drafter == "follows" or (self.idle_drafter is None and self.base.kin == "colocated")

    @property
    def has_rate(self) -> bool:
        """Whether acceptance is by a rate that can be moved."""
        return self.base.acceptance.by_rate

    def drafting(self, k: int) -> Experiment:
        """The experiment with a fixed draft length."""
        given = self.base.acceptance
        return replace(
            self.base,
            server=replace(self.base.server, controller="fixed", num_speculative_tokens=k),
            acceptance=replace(given, synthetic_acceptance_rates=given.synthetic_acceptance_rates[:k]),
        )

    def at_once(self, rows: int, k: int) -> list[Experiment]:
        """Replications of a closed loop of so many requests on one server, measured behind the first batch."""
        one = self.drafting(k)
        count = max(self.base.traffic.num_prompts, RUN_BATCHES * rows)
        traffic = replace(one.traffic, num_prompts=count, max_concurrency=rows)
        scoring = replace(one.scoring, warmup_requests=min(rows, count - 1))
        hardware = replace(one.hardware, replicas=1)
        return replications(replace(one, traffic=traffic, hardware=hardware, scoring=scoring), self.num_runs)


class Simulated(NamedTuple):
    """What runs of a batch size say of a draft length: the lead of each neighbour over it, as a share."""

    rows: int
    leads: dict[int, Interval]

    @property
    def ahead(self) -> int | None:
        """The neighbour that is surely faster, the most so if both are."""
        sure = {k: lead.mean for k, lead in self.leads.items() if lead.mean - lead.half_width > 0}
        return max(sure, key=lambda k: sure[k]) if sure else None


@dataclass(frozen=True)
class Tier:
    """Batch sizes from `first` to `last` with one draft length. Gains are shares, over all its sizes alike."""

    first: int
    last: int
    k: int
    tokens_per_s: tuple[float, float]  # at its ends
    next_best: int
    over_next: float
    over_plain: float  # over a server without a drafter
    over_compared: float
    acceptance: tuple[float, float] | None  # rates between which it stays the best
    simulated: Simulated | None = None

    @property
    def middle(self) -> int:
        return (self.first + self.last) // 2


@dataclass(repr=False)
class DraftTable:
    """The best draft lengths, and how sure they are."""

    question: DraftQuestion
    tiers: list[Tier]
    best: tuple[int, ...]  # by formula alone, at batch sizes 1, 2, …
    lost: float  # the most that leaving out small gains costs, as a share, at any size
    error: float  # what two rounds may be off by, one against the other; nan where the profile states none
    single: int  # the one draft length that costs least where every doubling of the batch counts alike; 0: no drafter
    single_lost: float  # what it costs then
    plain_from: int | None  # the batch size from which on a server without a drafter is faster
    fits: int  # rows of the traffic's mean context that the KV cache holds
    measured: int | None  # rows that the profile's samples went up to; None: not told
    profile: str
    foundation: str
    runs: int = 0
    spent_s: float = 0.0
    interrupted: bool = False

    def __repr__(self) -> str:
        return draft_text(self)

    @property
    def base(self) -> Experiment:
        """What it is for."""
        return self.question.base

    def told_apart(self, tier: Tier) -> bool:
        """Whether a tier's draft length is ahead of the next best by more than the error."""
        return not tier.over_next <= (0.0 if math.isnan(self.error) else self.error)

    def ranges(self, rows: int | None = None) -> list[list[int]]:
        """Rows of [first batch size, last, draft length], as far as a batch size."""
        most = rows or self.question.most
        return [[tier.first, min(tier.last, most), tier.k] for tier in self.tiers if tier.first <= most]


def draft_document(table: DraftTable) -> dict[str, Any]:
    """Everything that was asked and found."""
    return {
        "pdvsim_version": __version__,
        "interrupted": table.interrupted,
        "question": output.settings(table.question),
        "num_speculative_tokens_per_batch_size": table.ranges(),
        "tiers": [asdict(tier) | _sureness(table, tier) for tier in table.tiers],
        "against": table.question.compared,
        "drafter_follows_at_0": table.question.follows,
        "best_by_formula": list(table.best),
        "most_lost": table.lost,
        "error": table.error,
        "one_draft_length": {"k": table.single, "behind": table.single_lost},
        "plain_is_faster_from": table.plain_from,
        "rows_that_fit": table.fits,
        "rows_measured": table.measured,
        "vllm": asdict(ready(table)),
        "profile": table.profile,
        "foundation": table.foundation,
        "runs": table.runs,
        "spent_s": table.spent_s,
    }


def ready(table: DraftTable) -> Block:
    """The vLLM line with the table."""
    question = table.question
    if question.base.arch == "colocated" and question.follows:
        return vllm(of_table(table))
    does = f"{question.base.arch}, with a drafter that {'reads along' if question.follows else 'rests'} at k=0"
    return Block("vLLM", "", (f"no line: the table is for {does}, which vLLM is not",))


def draft_text(table: DraftTable) -> str:
    """The table, how sure it is, and what to start."""
    question = table.question
    served = f"{question.base.server.pair} on {question.base.hardware.gpu}, {question.base.arch}"
    against = f"over k={question.compared}"
    header = ["at once", "k", "tok/s", "next best", "gain", "over plain", against, "acceptance", "simulated", ""]
    body = []
    for tier in table.tiers:
        lows = "-" if tier.acceptance is None else "{:.2f} to {:.2f}".format(*tier.acceptance)
        body.append(
            [
                f"{tier.first} to {tier.last}",
                str(tier.k),
                "{:,.0f} to {:,.0f}".format(*tier.tokens_per_s),
                f"k={tier.next_best}",
                *(f"{share:+.1%}" for share in (tier.over_next, tier.over_plain, tier.over_compared)),
                lows,
                _simulated(tier.simulated),
                "" if table.told_apart(tier) else "not told apart",
            ]
        )
    return "\n".join(
        [
            f"Draft lengths by batch size: {served}",
            grid(header, body),
            *(f"- {note}" for note in _notes(table)),
            "",
            deployment_text([ready(table)]),
        ]
    )


def _sureness(table: DraftTable, tier: Tier) -> dict[str, Any]:
    simulated = tier.simulated and {
        "rows": tier.simulated.rows,
        "leads": tier.simulated.leads,
        "ahead": tier.simulated.ahead,
    }
    return {"told_apart": table.told_apart(tier), "simulated": simulated}


def _simulated(found: Simulated | None) -> str:
    if found is None:
        return "-"
    if found.ahead is None:
        return f"agrees at {found.rows}"
    return f"k={found.ahead} at {found.rows}: {cell(found.leads[found.ahead], 1, 100, '+')} %"


def _notes(table: DraftTable) -> list[str]:
    question = table.question
    within = f" (gains below {question.indifference:.0%} aside)" if question.indifference else ""
    notes = ["gain: over the next best; over plain: over a server without a drafter; means over the sizes of the range"]
    if question.has_rate:
        notes.append(f"acceptance: rates between which k stays the best{within}")
    if table.lost >= SHOWN:
        notes.append(
            f"gains below {question.indifference:.0%} got no range of their own: the best by formula at each size is "
            f"at most {table.lost:.1%} faster"
        )
    if math.isnan(table.error):
        notes.append("the profile states no error of its forward times: how sure a gain is, is not known")
    else:
        notes.append(f"not told apart: a gain within {table.error:.1%}, the error of two rounds by the profile")
    if question.follows:
        notes.append("at k=0 the drafter still reads along, as in vLLM and SGLang")
    if table.plain_from == 1:
        notes.append("a server without a drafter is faster at every size")
    elif table.plain_from is not None:
        notes.append(
            f"from {table.plain_from} at once a server without a drafter is faster than any row of this table; if your "
            "load stays there, serve without one"
        )
    if table.fits < question.most:
        notes.append(f"the KV cache holds about {table.fits} requests of this traffic: there are no larger batches")
    if table.measured is not None and table.measured < question.most:
        notes.append(f"batches above {table.measured} were not measured: their times are extrapolated")
    if table.runs:
        notes.append(f"simulated: closed loops of k-1, k and k+1, {question.num_runs} seeds each ({table.runs} runs)")
    return [*notes, f"profile {table.profile}: {table.foundation}; {table.spent_s:.1f} s"]
