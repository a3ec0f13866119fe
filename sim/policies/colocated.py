"""Continuous batching on one stream, as vLLM does it.

Each step drafts and verifies all running requests, and its forwards also carry a chunk of the prompts that are waiting.
Without speculation it is plain autoregressive serving.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.core import Request
from pdvsim.sim.policies.base import Context, OwnOptions, Policy, Process


class Colocated(Policy):
    """The strong modern baseline."""

    options: OwnOptions = ("async_scheduling",)

    def __init__(self, context: Context) -> None:
        self.running: list[Request] = []
        super().__init__(context)

    def backlog(self, lane: str) -> int:
        return len(self.waiting)

    def processes(self) -> Sequence[Process]:
        return [self.loop()]

    def loop(self) -> Process:
        while True:
            self.preempting = False
            rows = self.running
            k = self.draft_length(rows) if self.speculates and rows else 0
            rows = self.running = self.hold(rows, k)
            chunks = self.next_chunks(self.settings.max_num_batched_tokens - len(rows) * (k + 1))
            if rows and not chunks:
                self.running = yield from self.rounds(rows, k)
            elif chunks:
                followed = self.for_drafter(chunks)
                early = self.drafted_early(rows)
                if followed or (k and not early):
                    drafting = self.draft(rows if k and not early else [], k)
                    drafting.chunks = followed
                    drafting.kind = "draft" if drafting.rows else "prefill"
                    drafting.steps = max(k, 1) if drafting.rows else 1
                    self.device.launch(drafting)
                verifying = self.verify(rows, k)
                verifying.chunks = chunks
                if not rows:
                    verifying.kind = "prefill"
                verdict = yield self.device.launch(verifying)
                self.running = self.settle(rows, verdict)
                self.running += self.prefilled(chunks)
                self.kv.unpin(chunk.request for chunk in chunks)
            else:
                yield self.door.wait()


class Autoregressive(Colocated):
    """No draft model: one token a step for every running request. The yardstick."""

    speculates = False
