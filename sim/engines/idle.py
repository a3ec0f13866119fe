"""Plain decoding in an engine whose drafter still runs: what a draft length of 0 is."""

from __future__ import annotations

from pdvsim.sim.core import Chunk
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.policies import named
from pdvsim.sim.policies.colocated import Colocated


class IdleDrafter(Colocated):
    """Plain decoding with a drafter that still runs, as in engines at k=0.

    In each step the drafter processes every row's newest token; its draft is not verified. For draft length 1.
    """

    def draft(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = (), atomic: bool = False) -> Launch:
        for row in rows:
            row.state.drafter_lag = 0  # it has read all before
        return super().draft(rows, k, chunks, atomic)

    def verify(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = (), atomic: bool = False) -> Launch:
        rows.k = 0
        return super().verify(rows, 0, chunks, atomic)


IDLE_DRAFTER = named(IdleDrafter)
