"""PDV with an atomic path: few requests are drafted and verified in one step of the decode lane, many in three lanes.

`Adaptive` leaves the choice, and whether to speculate at all, to the calibrated latency model.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.acceptance import expected_tokens
from pdvsim.sim.controllers import AcceptanceEstimate
from pdvsim.sim.core import Request, Work
from pdvsim.sim.policies.base import PRIORITY, Context, Process
from pdvsim.sim.policies.pdv import PDV


class Hybrid(PDV):
    """At or below the threshold atomic, above it three lanes."""

    def decode_worker(self) -> Process:
        while True:
            rows = self.decode.take(self.settings.max_num_seqs)
            if not rows:
                yield self.decode.wait()
                continue
            self.open_door()
            k = self.atomic_length(rows)
            if k is None:
                yield from self.draft_in_lanes(rows)
                continue
            verdict = yield self.device.round(rows, k, self.draft_here, self.verify_here, self.controller.steady)
            going = self.settle(rows, verdict)
            self.decode.queue.extendleft(reversed(going))

    def atomic_length(self, rows: list[Request]) -> int | None:
        """Draft length if these rows should be verified right here, None if they should go to the verify lane."""
        if self.in_flight > self.settings.hybrid_threshold:
            return None
        return self.controller.draft_length(rows, len(self.check))

    def draft_here(self, rows: list[Request], k: int) -> Work:
        work = self.draft(rows, k)
        work.watched = False
        return work

    def verify_here(self, rows: list[Request], k: int) -> Work:
        work = self.verify(rows, k)
        work.lane, work.priority, work.queue_depth = "decode", PRIORITY["decode"], len(self.decode)
        return work


class Adaptive(Hybrid):
    """Before each batch: plain decoding, an atomic round, or three lanes, whichever the profile predicts fastest.

    A new mode must promise `MARGIN` more than the one in use, so that noise in the acceptance estimate does not make it
    flap.
    """

    MARGIN = 1.05

    def __init__(self, context: Context) -> None:
        self.mode = "atomic"
        self.estimate = AcceptanceEstimate()
        super().__init__(context)

    def atomic_length(self, rows: list[Request]) -> int | None:
        k = self.controller.draft_length(rows, len(self.check))
        context = sum(row.context for row in rows)
        n = len(rows)
        gain = expected_tokens(self.estimate.rate, k)
        half = max(1, self.in_flight // 2)
        speeds = {
            "plain": n / self.planner.decode_s(n, context),
            "atomic": n * gain / self.planner.round_s(n, context, k),
        }
        if self.in_flight > 1:  # two half batches that take turns in the two lanes
            speeds["lanes"] = half * gain / self.planner.overlapped_s(half, context * half // n, k)
        speeds[self.mode] = speeds.get(self.mode, 0.0) * self.MARGIN
        self.mode = max(speeds, key=lambda mode: speeds[mode])
        return {"plain": 0, "atomic": k}.get(self.mode)

    def settle(self, rows: list[Request], verdict: Sequence[int]) -> list[Request]:
        judged = [(accepted, row.k) for row, accepted in zip(rows, verdict, strict=True) if row.k]
        self.estimate.observe(sum(a for a, _ in judged), sum(a < k for a, k in judged))
        return super().settle(rows, verdict)
