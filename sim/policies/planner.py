"""The calibrated latency model, asked beforehand: what would this batch cost? Used by controllers and `adaptive`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pdvsim.sim.core import Chunk, Request, Role
from pdvsim.sim.hardware.contention import Sharing
from pdvsim.sim.hardware.host import HostTimes
from pdvsim.sim.hardware.latency import Latency, Shape


@dataclass(slots=True)
class _Demand:
    kind: str
    lane: str
    priority: int
    compute: float
    bandwidth: float
    solo_s: float
    turn_s: float
    nimble: float
    share: float = 0.0
    rate: float = 0.0


class Planner:
    """Predicts solo and overlapped times of a batch on one GPU."""

    PROMPT_TOKENS = 512

    def __init__(
        self,
        models: dict[Role, Latency],
        sharing: Sharing,
        peak: tuple[float, float],
        host: HostTimes,
        lanes: bool = False,
    ) -> None:
        self.models = models
        self.sharing = sharing
        self.peak = peak
        self.flops_per_s, self.bytes_per_s = peak
        self.host_s = host.launch_s + host.completion_s
        self.handoff_s = host.handoff_s
        self.lanes = lanes  # drafts and verifies have a lane each, and hand over to each other

    def decode_s(self, rows: int, context: int) -> float:
        """One plain token for each row."""
        return self.round_s(rows, context, 0)

    def round_s(self, rows: int, context: int, k: int) -> float:
        """Draft and verify one behind the other; with k=0 one plain token for each row."""
        draft = self._solo(self.models["draft"].shape(rows, 1, k), context) if k else 0.0
        verify = self._solo(self.models["target"].shape(rows, k + 1), context)
        return draft + verify + self.host_s

    def behind_s(self, rows: Sequence[Request]) -> float:
        """The drafter's reading of all that was decoded without it."""
        return self.models["draft"].behind(rows).solo_0 if any(row.owed > 1 for row in rows) else 0.0

    @cached_property
    def prompt_token_s(self) -> float:
        """The drafter's time per token of prompts, read several at once."""
        chunk = Chunk(Request(0, 0.0, self.PROMPT_TOKENS, 1, b""), 0, self.PROMPT_TOKENS)
        return self.models["draft"].carrying(0, 0, 1, (chunk,), False).solo_0 / self.PROMPT_TOKENS

    def turn_s(self, rows: int, context: int, k: int, rate: float) -> float:
        """A round of `rows` with what goes with it: the drafter's catching up, and hand-overs between lanes."""
        whole = self.round_s(rows, context, k)
        if k:
            # a row whose drafts were all accepted has the drafter read the last of them as well
            drafter = self.models["draft"]
            catch_up = self._solo(drafter.shape(rows, 2, k), context) - self._solo(drafter.shape(rows, 1, k), context)
            whole += catch_up * (1 - (1 - rate**k) ** rows)
        if not self.lanes:
            return whole
        whole += 2 * self.handoff_s + (self.host_s if k else 0.0)
        half = rows // 2
        return min(whole, 2 * self.overlapped_s(half, context // 2, k)) if half and k else whole

    def overlapped_s(self, rows: int, context: int, k: int) -> float:
        """Draft of one batch beside the verify of another of the same size: until both are done.

        With k=0 nothing is drafted, and they are verified in turn.
        """
        if not k:
            return self.round_s(rows, context, 0) + 2 * self.handoff_s
        drafter, target = self.models["draft"], self.models["target"]
        draft = self._demand("draft", "decode", 2, drafter.shape(rows, 1, k), context, drafter, k, rows)
        verify = self._demand("verify", "verify", 1, target.shape(rows, k + 1), context, target, 1, rows * (k + 1))
        self.sharing.solve([draft, verify])
        first, second = sorted((draft, verify), key=lambda d: d.solo_s / d.rate if d.rate > 0 else float("inf"))
        together = first.solo_s / first.rate
        alone = max(0.0, second.solo_s - together * second.rate)
        return together + alone + 2 * (self.host_s + self.handoff_s)

    @staticmethod
    def _solo(shape: Shape, context: int) -> float:
        return shape.solo_0 + shape.solo_1 * context

    def _demand(
        self, kind: str, lane: str, priority: int, shape: Shape, context: int, model: Latency, steps: int, width: int
    ) -> _Demand:
        solo = self._solo(shape, context)
        flops = shape.flops_0 + shape.flops_1 * context
        moved = shape.bytes_0 + shape.bytes_1 * context
        compute = min(1.0, flops / (solo * self.flops_per_s)) if solo else 0.0
        bandwidth = min(1.0, moved / (solo * self.bytes_per_s)) if solo else 0.0
        turn_s = solo / (steps * model.spec.layers)
        nimble = model.nimble(0, 0, width, solo / steps)
        return _Demand(kind, lane, priority, compute, bandwidth, solo, turn_s, nimble)
