"""Accounting of a GPU: the price of a launch, and its entry in the log.

The simulated and the real GPU share it, so that their records mean the same.
"""

from __future__ import annotations

from pdvsim.sim.core import KINDS, Kind, Role
from pdvsim.sim.hardware.latency import Latency, Shape
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.records import LANES, ROLES, Launches


class Ledger:
    """Prices the launches of one GPU, and records finished ones in the log and in their requests."""

    def __init__(self, models: dict[Role, Latency], log: Launches, replica: int = 0, gpu: int = 0) -> None:
        self.models = models
        self._widest = models["draft"].widest if "draft" in models else 2
        self.log, self._append, self.extend_short = log, log.append, log.extend_short
        self._place = replica, gpu
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

    def price(self, launch: Launch) -> tuple[float, float, float]:
        """Seconds alone, bytes moved and flops of a launch."""
        rows, tokens, context = launch.rows, launch.tokens, launch.context
        if context < 0:
            context = launch.context = rows.context
        if not launch.chunks and not launch.packed and (tokens <= self._widest or launch.role == "target"):
            model = self.models[launch.role]
            key = (
                launch.role,
                len(rows),
                tokens,
                launch.steps,
                bool(model.window) and context > len(rows) * model.window,
            )
            shape = self._shapes.get(key)
            if shape is None:
                shape = self._shapes[key] = model.shape(*key[1:4], context)
            solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = shape
            return solo_0 + solo_1 * context, bytes_0 + bytes_1 * context, flops_0 + flops_1 * context
        solo = moved = flops = 0.0
        model = self.models[launch.role]
        if launch.role == "draft" and rows:
            # prompts, and what rows are behind with, are read by forwards of their own before the first step
            before = [model.carrying(0, 0, 1, launch.chunks, False)] if launch.chunks else []
            if tokens > self._widest:
                before.append(model.behind(rows))
                tokens = 1 + max(
                    [row.state.drafter_lag for row in rows if row.state.drafter_lag < self._widest], default=0
                )
            for shape in before:
                solo, moved, flops = solo + shape.solo_0, moved + shape.bytes_0, flops + shape.flops_0
            shape = model.shape(len(rows), tokens, launch.steps, context)
        else:
            emits = launch.role == "target"
            shape = model.carrying(len(rows), tokens, launch.steps, launch.chunks, emits, launch.packed, context)
        solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = shape
        return (
            solo + solo_0 + solo_1 * context,
            moved + bytes_0 + bytes_1 * context,
            flops + flops_0 + flops_1 * context,
        )

    def note(self, launch: Launch, start_s: float, end_s: float, solo_s: float, moved: float, flops: float) -> None:
        """Record a finished launch."""
        rows = launch.rows
        spent_s = end_s - start_s
        rows.spend(launch.kind, spent_s)
        tokens, prompt_start = launch.packed or len(rows) * (launch.tokens + launch.steps - 1), 0
        for chunk in launch.chunks:
            tokens += chunk.tokens
            if chunk.start > prompt_start:
                prompt_start = chunk.start
            if launch.role == "target":  # the drafter prefills after it or concurrently
                chunk.request.taken.prefill_s += spent_s
        self._append((
            *self._head(launch.lane, launch.kind, launch.role), len(rows), tokens, launch.steps, launch.tokens,
            launch.queue_depth, prompt_start, launch.context, start_s, end_s, solo_s, moved, flops,
        ))  # fmt: skip
        if self.log.carried is not None:
            self.log.carried.append(
                (tuple([row.id for row in rows]), tuple(chunk.request.id for chunk in launch.chunks))
            )
