"""PDV (Verify-PD): prefill, draft-decode and verify as three lanes on their own streams.

The decode lane drafts for the requests in its queue. The verify lane collects the drafts of many requests into one
batch, and verified requests return to the decode lane. Decode takes precedence over verify, and verify over prefill.
Prefill pauses while the decode queue is full.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.admission import OwnOptions, Tuned
from pdvsim.sim.policies.base import Context, Process
from pdvsim.sim.policies.pd import PrefillDecode


class PDV(PrefillDecode):
    """Three lanes: prefill, draft and verify, each with its worker and stream."""

    verify_lane = "verify"
    options: OwnOptions = ("max_decode_queue", "verify_gather")
    tuned: Tuned = ("verify_gather", ("auto", "always", "never"))
    not_in_engines = "has three lanes on one GPU and collects verify batches from several drafts"
    asked = "on change"
    every_round = ("decode_worker", "decode_batch", "gathers", "verify_worker")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.verify_queue = self.lanes.open("verify", timed=True)
        self.drafting = Batch()
        self._gathering: dict[tuple[int, int, int], bool] = {}

    def processes(self) -> Sequence[Process]:
        return [*super().processes(), self.verify_worker()]

    def admits(self) -> bool:
        return len(self.decode) < self.settings.max_decode_queue and super().admits()

    def decode_worker(self) -> Process:
        while True:
            rows = self.decode.take(self.settings.draft_batch)
            if not rows:
                yield self.decode.wait()
                continue
            self.wake_prefill()
            yield from self.decode_batch(rows)

    def decode_batch(self, rows: Batch) -> Generator[Event, Any, None]:
        """Draft for `rows` and hand them to the verify lane."""
        k = self.draft_length(rows)
        rows = self.reserve(rows, k)
        if len(rows) == self.in_flight <= self.settings.verify_batch:
            rows, k = yield from self.handed_over(rows, k, self.decode)
        if k and rows:
            self.drafting = rows
            yield self.device.launch(self.draft(rows, k))
            self.drafting = Batch()
        self.verify_queue.put(rows)

    def gathers(self) -> bool:
        """Return whether verify should wait for the requests in the decode lane and take all in one batch.

        Weights are read once for a batch of any size, so two half batches that overlap often take longer than one whole
        batch in turn; `auto` asks the profile which it is.
        """
        rule, most = self.settings.verify_gather, self.settings.verify_batch
        coming = len(self.drafting) + len(self.decode)
        if not coming or rule == "never" or len(self.verify_queue) >= most:
            return False
        if rule == "always":
            return True
        drafted, drafting = self.verify_queue.rows, self.drafting
        there = len(drafted) + coming
        rows = min(there, most)
        context = (drafted.context + drafting.context + self.decode.rows.context) * rows // there
        k = max(drafted.k, drafting.k)
        key = (rows, context // (32 * rows), k)  # nearly the same question has the same answer
        answer = self._gathering.get(key)
        if answer is None:
            answer = self._gathering[key] = self.planner.gathers(rows, context, k)
        return answer

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self.verify_queue.wake(self.env.now)  # verify may have been waiting for it

    def verify_worker(self) -> Process:
        while True:
            while not len(self.verify_queue) or self.gathers():
                yield self.verify_queue.wait()
            rows = self.verify_queue.take(self.settings.verify_batch)
            verdict = yield self.device.launch(self.verify(rows, rows.k))
            self.decode.put(self.settle(rows, verdict))
