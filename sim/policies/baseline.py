"""Standard speculative decoding, request by request: each of W workers runs one request to its end at batch 1.

All share one stream, so their kernels line up behind each other.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Chunk, Request, Work
from pdvsim.sim.lane import Lane
from pdvsim.sim.policies.base import Policy, Process


class Baseline(Policy):
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
            request = self.admit()
            if request is None:
                yield rest.wait()
                continue
            rows = yield from self.read_prompt(request)
            while rows:
                rows, _ = self.taking_turn(rows)
                k = self.controller.draft_length(rows, 0, self.env.now)
                verdict = yield self.device.round(rows, k, self.draft, self.verify, self.controller.steady, alone=False)
                rows = self.settle(rows, verdict)

    def read_prompt(self, request: Request) -> Generator[Event, Any, list[Request]]:
        """Both models read the prompt, in chunks where it is long."""
        self.prefilling.append(request)
        rows: list[Request] = []
        budget = self.settings.max_num_batched_tokens
        while request.prefilled < request.prompt_tokens:
            tokens = min(budget, request.prompt_tokens - request.prefilled)
            chunks = (Chunk(request, request.prefilled, tokens),)
            if self.for_drafter(chunks):
                self.device.launch(Work("prefill", "draft", "main", [], chunks=chunks, watched=False))
            yield self.device.launch(Work("prefill", "target", "main", [], chunks=chunks))
            rows = self.prefilled(chunks)
        return rows
