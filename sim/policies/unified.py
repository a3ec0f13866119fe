"""PDV with one worker: each turn admits at most one prompt, then drafts and verifies one batch.

The prompt is read on its own stream beside the batch, and joins the decode queue at the end of the turn in which its
reading ends; the decode queue is let grow to `admission_factor` batches.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence, Sized
from math import ceil

from simpy.events import Event

from pdvsim.sim.config import Server
from pdvsim.sim.core import Chunk, Request, Work
from pdvsim.sim.policies.base import OwnOptions, Policy, Process, Tuned


class Unified(Policy):
    """One worker feeds the three streams in turn: at most one prompt, then a batch."""

    draft_lane = "decode"
    verify_lane = "verify"
    prefill_lane = "prefill"
    own_workers = False
    one_prompt = True
    options: OwnOptions = ("admission_factor",)
    tuned: Tuned = ("admission_factor", (1.0, 1.2, 2.0))
    beyond = "has three streams on one GPU, fed in turn by one loop"

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        return ceil(settings.admission_factor * settings.max_num_seqs) + 1  # its decode queue may outgrow a batch

    def processes(self) -> Sequence[Process]:
        self.ready: deque[Request] = deque()
        self.queues.append(self.ready)
        self.reading: tuple[Chunk, Event, Event] | None = None  # what is read; the target's reading, and the drafter's
        self.first_tokens: list[Request] | None = None  # of the prompt being read, once the target has read it
        return [self.loop()]

    def admits(self) -> bool:
        return len(self.ready) < self.settings.admission_factor * self.settings.max_num_seqs

    def backlog(self, lane: str) -> int:
        return len(self.ready)

    def lines(self) -> dict[str, Sized]:
        return super().lines() | {"decode": self.ready}

    def loop(self) -> Process:
        batch = self.settings.round_batch
        while True:
            self.preempting = False
            if self.reading is None:
                self.begin_prompt()
            rows = [self.ready.popleft() for _ in range(min(batch, len(self.ready)))]
            if rows:
                k = self.controller.draft_length(rows, 0, self.env.now)
                rows = self.hold(rows, k)
            if rows:
                if k:
                    yield self.device.launch(self.draft(rows, k))
                verdict = yield self.device.launch(self.verify(rows, k))
                self.ready.extend(self.settle(rows, verdict))
            elif self.reading is not None:
                yield self.reading[2] if self.reading[1].processed else self.reading[1]
            elif not self.preempting:  # whoever was is let in again next turn
                yield self.door.wait()
            self.join_prompt()

    def begin_prompt(self) -> None:
        """Put one prompt, or the next chunk of one, on the prefill stream."""
        budget = self.settings.max_num_batched_tokens
        chunk = self.go_on(self.prefilling[0], budget) if self.prefilling else self.admit(budget)
        if chunk is not None:
            priority, depth = self.priority("prefill", [chunk.request]), len(self.waiting)
            target = Work("prefill", "target", "prefill", [], 1, 1, (chunk,), priority, depth)
            draft = Work("prefill", "draft", "prefill", [], 1, 1, self.for_drafter((chunk,)), priority, depth)
            reading = self.device.launch(target)
            self.reading = (chunk, reading, self.device.launch(draft) if draft.chunks else reading)

    def join_prompt(self) -> None:
        """Deliver the first token once the target has read the prompt; once both models have, it decodes."""
        if self.reading is not None:
            chunk, target, draft = self.reading
            if target.processed and self.first_tokens is None:
                self.first_tokens = self.prefilled((chunk,))
            if self.first_tokens is not None and draft.processed:
                self.ready.extend(self.first_tokens)
                self.kv.unpin([chunk.request])
                self.reading = self.first_tokens = None
