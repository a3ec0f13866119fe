"""PDV with an atomic path: few requests are drafted and verified in one step of the decode lane, many in three lanes.

`Adaptive` leaves the choice, and whether to speculate at all, to the calibrated latency model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.policies.base import Context
from pdvsim.sim.policies.controllers import AcceptanceEstimate, judged
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.workload.acceptance import expected_tokens


class Hybrid(PDV):
    """At or below the threshold atomic, above it three lanes."""

    own_parts = ()  # in a round between lanes its own choice stays the same

    def decode_batch(self, rows: list[Request]) -> Generator[Event, Any, None]:
        k = self.atomic_length(rows) if len(rows) <= self.settings.verify_batch else None
        if k is None:
            yield from super().decode_batch(rows)
            return
        rows = self.hold(rows, k)
        if rows:
            going = yield from self.rounds(rows, k)
            self.decode.put_first(going)

    def atomic_length(self, rows: list[Request]) -> int | None:
        """Draft length if these rows should be verified right here, None if they should go to the verify lane."""
        # drafts that wait for verification may be waiting for these rows: then they go the same way
        if self.in_flight > self.settings.hybrid_threshold or len(self.verify_queue):
            return None
        return self.controller.draft_length(rows, 0, self.env.now)


class Adaptive(Hybrid):
    """Before each batch: plain decoding, an atomic round, or three lanes, whichever the profile predicts fastest.

    A new mode must promise `MARGIN` more than the one in use, so that noise in the acceptance estimate does not make it
    flap. Plain decoding teaches nothing about acceptance, so every `PROBE` plain batches one is drafted for. The
    drafter must first read all that was decoded without it, so of a large batch only a few rows are.
    """

    MARGIN = 1.05
    PROBE = 32
    LARGE, PROBE_ROWS = 16, 4

    def __init__(self, context: Context) -> None:
        self.mode = "atomic"
        self.plain_batches = 0
        self.estimate = AcceptanceEstimate()
        super().__init__(context)

    def decode_batch(self, rows: list[Request]) -> Generator[Event, Any, None]:
        if len(rows) > self.LARGE and self.mode == "plain" and (self.plain_batches + 1) % self.PROBE == 0:
            rows, rest = rows[: self.PROBE_ROWS], rows[self.PROBE_ROWS :]
            self.decode.put_first(rest)
        yield from super().decode_batch(rows)

    def atomic_length(self, rows: list[Request]) -> int | None:
        if len(self.verify_queue):
            return None
        k = self.controller.draft_length(rows, 0, self.env.now)
        decoding = max(len(rows), self.in_flight - len(self.prefilling))
        self.mode = self.best_mode(decoding, sum(row.context for row in rows) * decoding // len(rows), k)
        if self.mode == "plain":
            self.plain_batches += 1
            return 0 if self.plain_batches % self.PROBE else max(1, k)
        return k if self.mode == "atomic" else None

    def best_mode(self, decoding: int, context: int, k: int) -> str:
        """The mode with the most tokens per second for so many requests with so much context in all."""
        rate = self.estimate.rate
        gain = expected_tokens(rate, k)
        speeds = {
            "plain": decoding / self.planner.decode_s(decoding, context),
            "atomic": decoding * gain / self.planner.round_s(decoding, context, k, rate),
        }
        if decoding > 1:  # two half batches that take turns in the two lanes
            half = decoding // 2
            speeds["lanes"] = half * gain / self.planner.overlapped_s(half, context // 2, k, rate)
        speeds[self.mode] = speeds.get(self.mode, 0.0) * self.MARGIN
        return max(speeds, key=lambda mode: speeds[mode])

    def settle(self, rows: list[Request], verdict: Sequence[int]) -> list[Request]:
        self.estimate.observe(*(judged(rows, verdict) or (0, 0)))
        return super().settle(rows, verdict)
