"""PDV with one worker: each turn admits at most one prompt, then drafts and verifies one batch.

The prompt is read on its own stream beside the batch, and joins the decode queue at the end of the turn in which its
reading ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from simpy.events import Event

from pdvsim.sim.core import Chunk, Request, Work
from pdvsim.sim.policies.base import PRIORITY, Policy, Process


class Unified(Policy):
    draft_lane = "decode"
    verify_lane = "verify"
    prefill_lane = "prefill"

    def processes(self) -> Sequence[Process]:
        self.ready: deque[Request] = deque()
        self.reading: tuple[Chunk, Event, Event] | None = None
        return [self.loop()]

    def backlog(self, lane: str) -> int:
        return len(self.ready)

    def loop(self) -> Process:
        batch = self.settings.max_num_seqs
        while True:
            if self.reading is None:
                self.begin_prompt(room=len(self.ready) < self.settings.admission_factor * batch)
            rows = [self.ready.popleft() for _ in range(min(batch, len(self.ready)))]
            if rows:
                k = self.controller.draft_length(rows, 0)
                yield self.device.launch(self.draft(rows, k))
                verdict = yield self.device.launch(self.verify(rows, k))
                self.ready.extend(self.settle(rows, verdict))
            elif self.reading is not None:
                yield self.reading[1] & self.reading[2]
            else:
                yield self.door.wait()
            self.join_prompt()

    def begin_prompt(self, room: bool) -> None:
        """Put one prompt, or the next chunk of one, on the prefill stream."""
        if not self.prefilling and room:
            admitted = self.admit()
            if admitted is not None:
                self.prefilling.append(admitted)
        if self.prefilling:
            request = self.prefilling[0]
            tokens = min(self.settings.max_num_batched_tokens, request.prompt_tokens - request.prefilled)
            chunk = Chunk(request, request.prefilled, tokens)
            target, draft = (
                Work("prefill", role, "prefill", [], 1, 1, (chunk,), PRIORITY["prefill"], len(self.waiting))
                for role in ("target", "draft")
            )
            self.reading = (chunk, self.device.launch(target), self.device.launch(draft))

    def join_prompt(self) -> None:
        """If the prompt on the prefill stream has been read, it decodes from the next turn on."""
        if self.reading is not None:
            chunk, target, draft = self.reading
            if target.processed and draft.processed:
                self.reading = None
                self.ready.extend(self.prefilled((chunk,)))
