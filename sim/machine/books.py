"""Accounting of a GPU and of a round: the log entry of a launch, and the effect of a verdict on its rows.

The simulated and the real GPU share it, so that their records mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.core import KINDS, Kind, Request, Role, Work
from pdvsim.sim.hardware.costs import AffineCost, CostModel, Price
from pdvsim.sim.machine.batch import RunningBatch
from pdvsim.sim.records import LANES, ROLES, Launches


class Books:
    """Records the finished launches of one GPU in the log and in their requests."""

    def __init__(self, models: dict[Role, CostModel], log: Launches, replica: int = 0, gpu: int = 0) -> None:
        self.models = models
        self.log, self._append, self.extend_short = log, log.append, log.extend_short
        self._place = replica, gpu
        self.joules_of: dict[float, tuple[float, float]] = {}  # by number
        self._kinds: dict[tuple[str, Kind, Role, int, int, int, bool], tuple[int, AffineCost]] = {}

    def kind(
        self, lane: str, kind: Kind, role: Role, rows: int, tokens: int, steps: int, context: int = 0
    ) -> tuple[int, AffineCost]:
        """The number that launches of one kind have in the log, without prompts; and their price about a context."""
        key = (lane, kind, role, rows, tokens, steps, self.models[role].is_past_window(rows, context))
        known = self._kinds.get(key)
        if known is None:
            cost = self.models[role].price(rows, tokens, steps, context)
            self.log.kinds.append(
                (*self._head(lane, kind, role), rows, rows * (tokens + steps - 1), steps, tokens, *cost)
            )
            known = self._kinds[key] = (len(self.log.kinds) - 1, cost)
        return known

    def _head(self, lane: str, kind: Kind, role: Role) -> tuple[int, ...]:
        """The first columns of its rows in the log."""
        return *self._place, LANES.index(lane), KINDS.index(kind), ROLES.index(role)

    def note(self, work: Work, start_s: float, end_s: float, price: Price) -> None:
        """Record a finished launch."""
        rows = work.rows
        spent_s = end_s - start_s
        if isinstance(rows, RunningBatch):
            if work.kind == "draft":
                rows.draft_s += spent_s
            else:
                rows.verify_s += spent_s
        elif work.kind == "draft":
            for row in rows:
                if row.finish_s < 0:  # an early draft may outlive a row
                    row.draft_s += spent_s
        elif work.kind != "ahead":  # its rows are being verified
            for row in rows:
                row.verify_s += spent_s
        tokens, prompt_start = work.packed or len(rows) * (work.tokens + work.steps - 1), 0
        for chunk in work.chunks:
            tokens += chunk.tokens
            if chunk.start > prompt_start:
                prompt_start = chunk.start
            if work.role == "target":  # the drafter prefills after it or concurrently
                chunk.request.prefill_s += spent_s
        self._append((
            *self._head(work.lane, work.kind, work.role), len(rows), tokens, work.steps, work.tokens,
            work.queue_depth, prompt_start, work.context, start_s, end_s, *price[:3],
        ))  # fmt: skip
        if self.log.carried is not None:
            self.log.carried.append((tuple([row.id for row in rows]), tuple(chunk.request.id for chunk in work.chunks)))


def book(rows: Sequence[Request], verdict: Sequence[int], now_s: float, rereads: bool) -> tuple[list[int], bool]:
    """Give each row its accepted drafts and one target token, up to its output length.

    Returns the gains, and whether some row is finished. A drafter that `rereads` must catch up on all accepted drafts.
    """
    gains, over = [], False
    for row, accepted in zip(rows, verdict, strict=True):
        k, gained = row.k, accepted + 1
        emitted = row.emitted + gained
        if emitted >= row.output_tokens:
            gained -= emitted - row.output_tokens
            emitted = row.output_tokens
            over = True
        row.emitted = emitted
        row.context += gained
        row.rounds += 1
        row.k, row.missed, row.turn_s = 0, False, now_s
        if not k:
            row.owed += gained
        else:
            row.drafts += 1
            row.drafted += k
            row.accepted += accepted
            row.refused += accepted < k
            # after full acceptance the drafter has not read its own last draft; a head reads accepted ones again
            row.owed = accepted if rereads else int(accepted == k)
        gains.append(gained)
    return gains, over
