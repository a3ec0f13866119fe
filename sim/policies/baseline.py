"""Standard speculative decoding, request by request: each of W workers runs one request to its end at batch 1.

All share one stream, so their kernels line up behind each other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.config import Server
from pdvsim.sim.core import Chunk, Request, Work
from pdvsim.sim.machine.lane import Lane
from pdvsim.sim.policies.base import OwnOptions, Policy, Process, Tuned


class Baseline(Policy):
    """Speculative decoding request by request: each of W workers serves one from prompt to end, at batch 1."""

    one_by_one = True
    one_prompt = True
    options: OwnOptions = ("num_workers",)
    tuned: Tuned = ("num_workers", (1, 4, 16))
    beyond = "serves each request to its end at batch 1"

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        return min(settings.num_workers, settings.max_num_seqs)

    def processes(self) -> Sequence[Process]:
        self.resting = [self.lane("main") for _ in range(self.settings.num_workers)]
        return [self.worker(rest) for rest in self.resting]

    def backlog(self, lane: str) -> int:
        return 0

    def open_door(self) -> None:
        idle = [rest for rest in self.resting if rest.waits]
        for rest in idle[: len(self.waiting)]:
            rest.wake(self.env.now)

    def worker(self, rest: Lane) -> Process:
        while True:
            self.preempting = False
            chunk = self.admit(self.settings.max_num_batched_tokens)
            if chunk is None:
                yield rest.wait()
                continue
            rows = yield from self.read_prompt(chunk)
            while rows:
                k = self.controller.draft_length(rows, 0, self.env.now)
                rows = self.hold(rows, k)
                if rows:
                    rows = yield from self.rounds(rows, k)
            if chunk.request.finish_s < 0:  # preempted: somebody must leave first
                yield rest.wait()

    def read_prompt(self, chunk: Chunk | None) -> Generator[Event, Any, list[Request]]:
        """Both models read the prompt, in chunks where it is long."""
        rows: list[Request] = []
        while chunk is not None:
            request = chunk.request
            if self.for_drafter((chunk,)):
                self.device.launch(Work("prefill", "draft", "main", [], chunks=(chunk,), watched=False))
            yield self.device.launch(Work("prefill", "target", "main", [], chunks=(chunk,)))
            rows = self.prefilled((chunk,))
            self.kv.unpin([request])
            chunk = self.go_on(request, self.settings.max_num_batched_tokens) if request in self.prefilling else None
        return rows
