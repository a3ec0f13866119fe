"""PD: a prefill lane and a decode lane, each on its own stream.

The decode lane drafts and verifies its whole batch in one atomic step; prompts are read beside it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from pdvsim.sim.core import Request, Work
from pdvsim.sim.policies.base import Policy, Process


class PrefillDecode(Policy):
    """A prefill lane that feeds a decode lane."""

    draft_lane = "decode"
    verify_lane = "decode"
    prefill_lane = "prefill"

    def processes(self) -> Sequence[Process]:
        self.decode = self.lane("decode")
        self.queues.append(self.decode.queue)
        return [self.prefill_worker(), self.decode_worker()]

    def backlog(self, lane: str) -> int:
        return len(self.decode)

    def lines(self) -> dict[str, Sized]:
        return super().lines() | {"decode": self.decode}

    def prefill_worker(self) -> Process:
        while True:
            self.preempting = False
            chunks = self.next_chunks(self.settings.max_num_batched_tokens)
            if not chunks:
                yield self.door.wait()
                continue
            lane, depth = self.prefill_lane, len(self.waiting)
            priority = self.priority(lane, [chunk.request for chunk in chunks])
            target = Work("prefill", "target", lane, [], 1, 1, chunks, priority, depth)
            draft = Work("prefill", "draft", lane, [], 1, 1, self.for_drafter(chunks), priority, depth)
            reading = self.device.launch(target)
            following = self.device.launch(draft) if draft.chunks else None
            yield reading
            ready = self.prefilled(chunks)
            if following is not None:
                yield following
            self.kv.unpin(chunk.request for chunk in chunks)
            if ready:
                self.decode.put(ready)

    def decode_worker(self) -> Process:
        raise NotImplementedError


class PD(PrefillDecode):
    """Draft and verify in one atomic step of the decode lane."""

    def decode_worker(self) -> Process:
        rows: list[Request] = []
        while True:
            rows += self.decode.take(self.settings.round_batch - len(rows))
            if not rows:
                yield self.decode.wait()
                continue
            rows = self.taking_turn(rows)
            k = self.controller.draft_length(rows, 0, self.env.now)
            rows = self.hold(rows, k)
            if rows:
                verdict = yield self.draft_and_verify(rows, k)
                rows = self.settle(rows, verdict)
            rows = self.together_again(rows)
