"""PDV with one worker: each turn admits at most one prompt, then drafts and verifies one batch.

The prompt is prefilled on its own stream, concurrently with the batch, and joins the decode queue at the end of the
turn in which its prefill ends. The decode queue may grow to `admission_factor` batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from simpy.events import Event

from pdvsim.sim.core import Chunk
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.base import Context, Policy, Process, start_prefill
from pdvsim.sim.policies.options import Server


class Unified(Policy):
    """One worker feeds the three streams in turn: at most one prompt, then a batch."""

    draft_lane = "decode"
    verify_lane = "verify"
    prefill_lane = "prefill"
    workers = "turns"
    options = ("admission_factor",)
    tuned = ("admission_factor", (1.0, 1.2, 2.0))
    not_in_engines = "has three streams on one GPU, fed in turn by one loop"

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        return ceil(settings.admission_factor * settings.max_num_seqs) + 1  # its decode queue may outgrow a batch

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.decode = self.lanes.open("decode")
        self.reading: tuple[tuple[Chunk, ...], Event, Event] | None = None  # prompt, target's and drafter's reading
        self.first_tokens: Batch | None = None  # of the prompt being read, once the target has read it

    def processes(self) -> Sequence[Process]:
        return [self.loop()]

    def admits(self) -> bool:
        return len(self.decode) < self.settings.admission_factor * self.settings.max_num_seqs

    def backlog(self, lane: str) -> int:
        return len(self.decode)

    def loop(self) -> Process:
        while True:
            if self.reading is None and (chunks := self.next_chunks(self.settings.max_num_batched_tokens)):
                self.reading = (chunks, *start_prefill(self, chunks))
            rows = self.decode.take(self.settings.round_batch)
            taken, k = len(rows), self.draft_length(rows)
            if self.reserve(rows, k):
                if k:
                    yield self.device.launch(self.draft(rows, k))
                verdict = yield self.device.launch(self.verify(rows, k))
                self.decode.rows.add(self.settle(rows, verdict))
            elif self.reading is not None:
                yield self.reading[2] if self.reading[1].processed else self.reading[1]
            elif not taken:  # preempted requests are admitted again next turn
                yield self.prefill_workers[0].wait()
            self.join_prompt()

    def join_prompt(self) -> None:
        """Deliver the first token once the target has read the prompt; once both models have, it decodes."""
        if self.reading is not None:
            chunks, target, draft = self.reading
            if target.processed and self.first_tokens is None:
                self.first_tokens = self.prefilled(chunks, pinned=True)
            if self.first_tokens is not None and draft.processed:
                self.decode.rows.add(self.first_tokens)
                self.kv.unpin(chunk.request for chunk in chunks)
                self.reading = self.first_tokens = None
