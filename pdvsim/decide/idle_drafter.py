"""Plain decoding with a drafter that still runs, as in engines at k=0 of a draft table."""

from __future__ import annotations

from pdvsim.sim.core import Request, Work
from pdvsim.sim.policies.colocated import Colocated


class IdleDrafter(Colocated):
    """In each step the drafter processes every row's newest token; its draft is not verified. For draft length 1."""

    def draft(self, rows: list[Request], k: int) -> Work:
        for row in rows:
            row.owed = 0  # it has read all before
        return super().draft(rows, k)

    def verify(self, rows: list[Request], k: int, drafted: Work | None = None) -> Work:
        for row in rows:
            row.k = 0
        return super().verify(rows, 0, drafted)
