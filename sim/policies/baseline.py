"""Standard speculative decoding, request by request: each of W workers runs one request to its end at batch 1.

All share one stream, so their kernels run one after another.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.policies.base import Policy, Process
from pdvsim.sim.policies.options import Server


class Baseline(Policy):
    """Speculative decoding request by request: each of W workers serves one from prompt to end, at batch 1."""

    workers = "requests"
    options = ("num_workers",)
    tuned = ("num_workers", (1, 4, 16))
    not_in_engines = "serves each request to completion at batch 1"

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        return min(settings.num_workers, settings.max_num_seqs)

    def processes(self) -> Sequence[Process]:
        self.prefill_workers = [self.lanes.open("main") for _ in range(self.settings.num_workers)]
        return [self.worker(number) for number in range(self.settings.num_workers)]

    def backlog(self, lane: str) -> int:
        return 0

    def wake_prefill(self) -> None:
        idle = [worker for worker in self.prefill_workers if worker.waits]
        for worker in idle[: len(self.waiting)]:
            worker.wake(self.env.now)

    def worker(self, number: int) -> Process:
        while True:
            chunks = self.next_chunks(self.settings.max_num_batched_tokens, number)
            if not chunks:
                yield self.prefill_workers[number].wait()
                continue
            rows = yield from self.prefill(chunks)
            while rows:
                k = self.draft_length(rows)
                rows = yield from self.rounds(self.reserve(rows, k), k)
            if not chunks[0].request.state.prefilled:  # preempted: another request must leave first
                yield self.prefill_workers[number].wait()
