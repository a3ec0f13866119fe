"""Continuous batching on one stream, as vLLM does it.

Each step drafts and verifies all running requests, and its forwards also carry a chunk of the prompts that are waiting.
Without speculation it is plain autoregressive serving. With `separate_prefill` prompts have forwards of their own,
which go first, as in SGLang. A gate may hold waiting prompts back for some steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.base import Context, Policy, Process


class Colocated(Policy):
    """The strong modern baseline."""

    options = ("async_scheduling",)

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.running = Batch()

    def processes(self) -> Sequence[Process]:
        return [self.loop()]

    def loop(self) -> Process:
        while True:
            yield from self.turn()

    def turn(self) -> Process:
        """One step, or rounds until something changes; without requests, a wait for some."""
        inside, rows = self.in_flight, self.running
        k = self.draft_length(rows)
        rows = self.running = self.reserve(rows, k)
        self.admitting = self.in_flight == inside  # as in vLLM, none is admitted after a preemption
        if self.gate is not None and self.gate.holds(self, len(rows), self.decode_steps):
            self.admitting, self.admission_pending = False, True
        apart = self.settings.separate_prefill
        chunks = self.next_chunks(self.settings.max_num_batched_tokens - (0 if apart else len(rows) * (k + 1)))
        if chunks and apart:
            yield self.step(Batch(), k, chunks)
            rows.add(self.prefilled(chunks))
            if self.gate is not None:
                self.gate.prefilled(self.decode_steps)
        elif chunks:
            verdict = yield self.step(rows, k, chunks)
            self.running = self.settle(rows, verdict)
            self.running.add(self.prefilled(chunks))
        elif rows:
            self.running = yield from self.rounds(rows, k)
        else:
            yield self.prefill_workers[0].wait()


class Autoregressive(Colocated):
    """No draft model: one token a step for every running request. The yardstick."""

    speculates = False
