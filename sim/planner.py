"""The calibrated latency model, asked beforehand: what would this batch cost? Used by controllers and `adaptive`."""

from __future__ import annotations

from dataclasses import dataclass

from pdvsim.sim.contention import Sharing
from pdvsim.sim.core import Role
from pdvsim.sim.host import HostTimes
from pdvsim.sim.latency import Latency, Shape


@dataclass(slots=True)
class _Demand:
    kind: str
    lane: str
    priority: int
    compute: float
    bandwidth: float
    solo_s: float
    turn_s: float
    nimble: bool
    share: float = 0.0
    rate: float = 0.0


class Planner:
    """Predicts solo and overlapped times of a batch on one GPU."""

    def __init__(
        self, models: dict[Role, Latency], sharing: Sharing, peak: tuple[float, float], host: HostTimes
    ) -> None:
        self.models = models
        self.sharing = sharing
        self.flops_per_s, self.bytes_per_s = peak
        self.host_s = host.launch_s + host.completion_s
        self.handoff_s = host.handoff_s

    def decode_s(self, rows: int, context: int) -> float:
        """One plain token for each row."""
        return self._solo(self.models["target"].shape(rows, 1), context) + self.host_s

    def round_s(self, rows: int, context: int, k: int) -> float:
        """Draft and verify one behind the other."""
        draft = self._solo(self.models["draft"].shape(rows, 1, k), context)
        verify = self._solo(self.models["target"].shape(rows, k + 1), context)
        return draft + verify + self.host_s

    def overlapped_s(self, rows: int, context: int, k: int) -> float:
        """Draft of one batch beside the verify of another of the same size: until both are done."""
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
        turn_s, nimble = solo / (steps * model.spec.layers), width <= model.fit.nimble_tokens
        return _Demand(kind, lane, priority, compute, bandwidth, solo, turn_s, nimble)
