"""What it costs that a batch crosses the borders of a draft table, as vLLM applies it, and what a hysteresis saves.

vLLM looks the draft length up in every step, by all of its requests (issue 49548). A closed loop of as many requests as
a border has is on both sides of it in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from pdvsim.decide.draft_table import DraftQuestion, SizeAndLength
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Experiment, Server
from pdvsim.study.stats import Interval, interval

HOLD = 0.1  # share of its batch size by which a batch must be beyond a border
WORTH = 0.002  # saving from which a hysteresis is recommended


@dataclass(frozen=True)
class Border:
    """The batch size from which a table has another draft length, served at just that size. Losses are shares."""

    first: int
    before: int
    after: int
    lost: float  # against the better of both lengths
    lost_held: float  # the same with a hysteresis

    @property
    def saved(self) -> float:
        return self.lost - self.lost_held

    @property
    def held(self) -> tuple[int, int]:
        """Batch sizes from which the length changes: as the batch grows, and below which as it falls."""
        return -int(-self.first * (1 + HOLD) // 1), -int(-self.first * (1 - HOLD) // 1)


def served_tables(question: DraftQuestion, ranges: Sequence[Sequence[int]], rows: int, hold: float) -> list[Experiment]:
    """Replications of a closed loop of `rows` requests, with a table in service."""
    tiers = tuple(f"{first}:{k}" for first, _, k in ranges)
    usual = question.loops(rows, Server.num_speculative_tokens)
    server = replace(usual[0].server, controller="table", num_speculative_tokens_per_batch_size=tiers, table_hold=hold)
    return [replace(one, server=server) for one in usual]


def borders(
    question: DraftQuestion, ranges: Sequence[Sequence[int]], simulated: Mapping[SizeAndLength, Interval], bench: Bench
) -> list[Border]:
    """Each border that a batch can reach, where both lengths were simulated."""
    places = [
        (right[0], left[2], right[2])
        for left, right in pairwise(ranges)
        if (right[0], left[2]) in simulated and (right[0], right[2]) in simulated
    ]
    loops = [served_tables(question, ranges, first, hold) for first, *_ in places for hold in (0.0, HOLD)]
    bench.rows([run for runs in loops for run in runs])
    speeds = [interval(float(row["output_throughput"]) for row in bench.known(runs) or ()).mean for runs in loops]
    crossed = []
    for (first, before, after), jumping, held in zip(places, speeds[::2], speeds[1::2], strict=True):
        better = max(simulated[first, before].mean, simulated[first, after].mean)
        crossed.append(Border(first, before, after, 1 - jumping / better, 1 - held / better))
    return crossed


def border_notes(crossed: Sequence[Border]) -> list[str]:
    """The cost of crossing borders, and the hysteresis that would save it."""
    if not crossed:
        return []
    worst = max(crossed, key=lambda border: border.lost)
    notes = [
        f"vLLM looks k up in every step, prefills counted: at the border of batch {worst.first} (k={worst.before} to "
        f"{worst.after}) that costs {max(0.0, worst.lost):.1%} against the better of both lengths"
    ]
    for border in crossed:
        if border.saved > WORTH:
            grown, fallen = border.held
            notes.append(
                f"a hysteresis at batch {border.first} would save {border.saved:.1%}: k={border.after} from batch "
                f"{grown} on, and k={border.before} again below {fallen} (no engine has one)"
            )
    return notes
