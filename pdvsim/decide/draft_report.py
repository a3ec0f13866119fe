"""A draft table as text and as a document."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from pdvsim.common.version import __version__
from pdvsim.decide.deploy import Block, deployment_text, of_table, vllm
from pdvsim.decide.draft_table import DraftTable, Simulated, Tier
from pdvsim.study import output
from pdvsim.view.table import cell, grid

SHOWN = 0.0005  # the least share that is not printed as 0.0%


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
