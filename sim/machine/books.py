"""Accounting of a GPU and of a round: the price of a launch, its log entry, and the effect of a verdict on its rows.

The simulated and the real GPU share it, so that their records mean the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.core import KINDS, Kind, Request, Role, Work
from pdvsim.sim.hardware.latency import Latency, Shape
from pdvsim.sim.machine.batch import RunningBatch
from pdvsim.sim.records import LANES, ROLES, Launches


class Books:
    """Prices the launches of one GPU, and records finished ones in the log and in their requests."""

    def __init__(self, models: dict[Role, Latency], log: Launches, replica: int = 0, gpu: int = 0) -> None:
        self.models = models
        self._widest = models["draft"].widest if "draft" in models else 2
        self.log, self._append, self.extend_short = log, log.append, log.extend_short
        self._place = replica, gpu
        self.joules_of: dict[float, tuple[float, float]] = {}  # by number
        self._kinds: dict[tuple[str, Kind, Role, int, int, int, bool], tuple[int, Shape]] = {}
        self._shapes: dict[tuple[Role, int, int, int, bool], Shape] = {}

    def kind(
        self, lane: str, kind: Kind, role: Role, rows: int, tokens: int, steps: int, context: int = 0
    ) -> tuple[int, Shape]:
        """The number that launches of one kind have in the log, without prompts; and their price about a context."""
        key = (lane, kind, role, rows, tokens, steps, self.models[role].is_past_window(rows, context))
        known = self._kinds.get(key)
        if known is None:
            shape = self.models[role].shape(rows, tokens, steps, context)
            self.log.kinds.append(
                (*self._head(lane, kind, role), rows, rows * (tokens + steps - 1), steps, tokens, *shape)
            )
            known = self._kinds[key] = (len(self.log.kinds) - 1, shape)
        return known

    def _head(self, lane: str, kind: Kind, role: Role) -> tuple[int, ...]:
        """The first columns of its rows in the log."""
        return *self._place, LANES.index(lane), KINDS.index(kind), ROLES.index(role)

    def price(self, work: Work) -> tuple[float, float, float]:
        """Seconds alone, bytes moved and flops of a launch."""
        rows, tokens, context = work.rows, work.tokens, work.context
        if context < 0:
            context = work.context = sum([row.state.context for row in rows])
        if not work.chunks and not work.packed and (tokens <= self._widest or work.role == "target"):
            model = self.models[work.role]
            key = (work.role, len(rows), tokens, work.steps, bool(model.window) and context > len(rows) * model.window)
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = model.shape(*key[1:4], context)
            solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = shape
            return solo_0 + solo_1 * context, bytes_0 + bytes_1 * context, flops_0 + flops_1 * context
        solo = moved = flops = 0.0
        model = self.models[work.role]
        if work.role == "draft" and rows:
            # prompts, and what rows are behind with, are read by forwards of their own before the first step
            before = [model.carrying(0, 0, 1, work.chunks, False)] if work.chunks else []
            if tokens > self._widest:
                before.append(model.behind(rows))
                tokens = 1 + max(
                    [row.state.drafter_lag for row in rows if row.state.drafter_lag < self._widest], default=0
                )
            for shape in before:
                solo, moved, flops = solo + shape.solo_0, moved + shape.bytes_0, flops + shape.flops_0
            shape = model.shape(len(rows), tokens, work.steps, context)
        else:
            emits = work.role == "target"
            shape = model.carrying(len(rows), tokens, work.steps, work.chunks, emits, work.packed, context)
        solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = shape
        return (
            solo + solo_0 + solo_1 * context,
            moved + bytes_0 + bytes_1 * context,
            flops + flops_0 + flops_1 * context,
        )

    def note(self, work: Work, start_s: float, end_s: float, solo_s: float, moved: float, flops: float) -> None:
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
                if row.taken.finish_s < 0:  # an early draft may outlive a row
                    row.taken.draft_s += spent_s
        elif work.kind != "ahead":  # its rows are being verified
            for row in rows:
                row.taken.verify_s += spent_s
        tokens, prompt_start = work.packed or len(rows) * (work.tokens + work.steps - 1), 0
        for chunk in work.chunks:
            tokens += chunk.tokens
            if chunk.start > prompt_start:
                prompt_start = chunk.start
            if work.role == "target":  # the drafter prefills after it or concurrently
                chunk.request.taken.prefill_s += spent_s
        self._append((
            *self._head(work.lane, work.kind, work.role), len(rows), tokens, work.steps, work.tokens,
            work.queue_depth, prompt_start, work.context, start_s, end_s, solo_s, moved, flops,
        ))  # fmt: skip
        if self.log.carried is not None:
            self.log.carried.append((tuple([row.id for row in rows]), tuple(chunk.request.id for chunk in work.chunks)))


def book(rows: Sequence[Request], verdict: Sequence[int], now_s: float, rereads: bool) -> tuple[list[int], bool]:
    """Give each row its accepted drafts and one target token, up to its output length.

    Returns the gains, and whether some row is finished. A drafter that `rereads` must catch up on all accepted drafts.
    """
    gains, over = [], False
    for row, accepted in zip(rows, verdict, strict=True):
        k, gained = row.state.k, accepted + 1
        emitted = row.state.emitted + gained
        if emitted >= row.output_tokens:
            gained -= emitted - row.output_tokens
            emitted = row.output_tokens
            over = True
        row.state.emitted = emitted
        row.state.context += gained
        row.taken.rounds += 1
        row.state.k, row.state.missed, row.state.last_delivery_s = 0, False, now_s
        if not k:
            row.state.drafter_lag += gained
        else:
            row.taken.drafts += 1
            row.taken.drafted += k
            row.taken.accepted += accepted
            row.taken.refused += accepted < k
            # after full acceptance the drafter has not read its own last draft; a head reads accepted ones again
            row.state.drafter_lag = accepted if rereads else int(accepted == k)
        gains.append(gained)
    return gains, over
