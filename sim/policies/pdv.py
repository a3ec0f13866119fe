"""PDV (Verify-PD): prefill, draft-decode and verify as three lanes on their own streams.

The decode lane drafts for whoever waits there; the verify lane collects the drafts of many requests into one batch;
verified requests go back to the decode lane. Decode goes before verify before prefill, and prefill pauses while the
decode queue is full.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence, Sized
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import RunningBatch, Way, context_of, drafted_for
from pdvsim.sim.policies.base import OwnOptions, Process, Tuned
from pdvsim.sim.policies.pd import PrefillDecode


class PDV(PrefillDecode):
    """Three lanes: prefill, draft and verify, each with its worker and stream."""

    verify_lane = "verify"
    hands_over = True
    options: OwnOptions = ("max_decode_queue", "verify_gather")
    tuned: Tuned = ("verify_gather", ("auto", "always", "never"))
    beyond = "has three lanes on one GPU, and gathers verify batches from several drafts"
    own_parts: tuple[str, ...] = ("decode_batch",)  # further ones that a round goes through

    def processes(self) -> Sequence[Process]:
        self.verify_queue = self.lane("verify")
        self.drafting: list[Request] = []
        self._gathering: dict[tuple[int, int, int], bool] = {}
        lanes = ("decode_worker", "verify_worker", "gathers", "hand_over", "waited", *self.own_parts)
        self.goes_round = not self.has_own(PDV, *lanes)  # between its lanes as written here
        return [*super().processes(), self.verify_worker()]

    def admits(self) -> bool:
        return super().admits() and len(self.decode) < self.settings.max_decode_queue

    def backlog(self, lane: str) -> int:
        return len(self.verify_queue) if lane == "verify" else len(self.decode)

    def lines(self) -> dict[str, Sized]:
        return super().lines() | {"verify": self.verify_queue}

    def decode_worker(self) -> Process:
        while True:
            rows = self.decode.take(self.settings.draft_batch)
            if not rows:
                yield self.decode.wait()
                continue
            self.open_door()
            yield from self.decode_batch(rows)

    def decode_batch(self, rows: list[Request]) -> Generator[Event, Any, None]:
        """Draft for `rows` and hand them to the verify lane."""
        k = self.controller.draft_length(rows, len(self.verify_queue), self.env.now)
        rows = self.hold(rows, k)
        if len(rows) == self.in_flight <= self.settings.verify_batch and self.goes_round and self.stands():
            # nobody is elsewhere: round after round they are drafted for, handed over, verified and handed back
            rows = self.batch(rows, k)
            if self.pass_rounds(rows, Way("decode", "verify", True, True, 0)):
                if self.learns:
                    k = self.controller.draft_length(rows, 0, self.env.now)
                rows = self.hold(rows, k)
        if not rows:
            return
        if k:
            self.drafting = rows
            yield self.device.launch(self.draft(rows, k))
        self.hand_over(rows, k)

    def gathers(self) -> bool:
        """Whether verify should wait for the requests in the decode lane and take all in one batch.

        Weights are read once for a batch of any size, so two half batches that overlap often take longer than one whole
        batch in turn; `auto` asks the profile which it is.
        """
        rule, most = self.settings.verify_gather, self.settings.verify_batch
        coming = len(self.drafting) + len(self.decode)
        if not coming or rule == "never" or len(self.verify_queue) >= most:
            return False
        if rule == "always":
            return True
        there = len(self.verify_queue) + coming
        rows = min(there, most)
        drafted = [*self.verify_queue.groups(), self.drafting]
        context = sum(map(context_of, [*drafted, *self.decode.groups()])) * rows // there
        k = max(map(drafted_for, drafted))
        key = (rows, context // (32 * rows), k)  # nearly the same question has the same answer
        found = self._gathering.get(key)
        if found is None:
            found = self._gathering[key] = self.planner.gathers(rows, context, k)
        return found

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self.verify_queue.wake(self.env.now)  # verify may have been waiting for it

    def hand_over(self, rows: list[Request], k: int) -> None:
        self.drafting = []
        now = self.env.now
        if isinstance(rows, RunningBatch):
            rows.ready_s = now
        else:
            for row in rows:
                row.ready_s = now
                if not k:
                    row.k = 0
        self.verify_queue.put(rows)

    def waited(self, rows: list[Request]) -> None:
        """Enter the time that `rows` were in the queue for verification."""
        now = self.env.now
        if isinstance(rows, RunningBatch):
            rows.wait_s += now - rows.ready_s
        else:
            for row in rows:
                row.wait_s += now - row.ready_s

    def verify_worker(self) -> Process:
        while True:
            while not len(self.verify_queue) or self.gathers():
                yield self.verify_queue.wait()
            rows = self.verify_queue.take(self.settings.verify_batch)
            self.waited(rows)
            verdict = yield self.device.launch(self.verify(rows, drafted_for(rows)))
            going = self.settle(rows, verdict)
            if going:
                self.decode.put(going)
