"""PD: a prefill lane and a decode lane, each on its own stream.

The decode lane drafts and verifies its whole batch in one atomic step; prompts are read beside it.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized

from pdvsim.sim.core import Request, Work
from pdvsim.sim.policies.base import OwnOptions, Policy, Process


class PrefillDecode(Policy):
    """A prefill lane that feeds a decode lane."""

    draft_lane = "decode"
    verify_lane = "decode"
    prefill_lane = "prefill"
    beyond = "prefills on a stream of its own, concurrently with the decode on the same GPU"

    def processes(self) -> Sequence[Process]:
        self.decode = self.lane("decode")
        self.queues.append(self.decode.queue)
        self.reading: set[int] = set()  # readers with a forward under way
        return [*(self.prefill_worker(reader) for reader in range(len(self.doors))), self.decode_worker()]

    def backlog(self, lane: str) -> int:
        return len(self.decode)

    def lines(self) -> dict[str, Sized]:
        return super().lines() | {"decode": self.decode}

    def prefill_worker(self, reader: int = 0) -> Process:
        while True:
            self.preempting = False
            self.reader = reader
            chunks = self.next_chunks(self.settings.max_num_batched_tokens)
            if not chunks:
                yield self.doors[reader].wait()
                continue
            self.reading.add(reader)
            lane, depth = self.prefill_lane, len(self.waiting)
            priority = self.priority(lane, [chunk.request for chunk in chunks])
            target = Work("prefill", "target", lane, [], 1, 1, chunks, priority, depth, worker=reader)
            draft = Work("prefill", "draft", lane, [], 1, 1, self.for_drafter(chunks), priority, depth)
            reading = self.device.launch(target)
            following = self.device.launch(draft) if draft.chunks else None
            yield reading
            self.reading.discard(reader)
            ready = self.prefilled(chunks)
            if following is not None:
                yield following
            self.kv.unpin(chunk.request for chunk in chunks)
            if ready:
                self.decode.put(ready)

    def most_prompts(self) -> int | None:
        """So many that other readers who are free get their share."""
        most, free = super().most_prompts(), len(self.doors) - len(self.reading)
        if free < 2:
            return most
        share = max(1, -(-len(self.waiting) // free))
        return min(share, most or share)

    def decode_worker(self) -> Process:
        raise NotImplementedError


class PD(PrefillDecode):
    """Draft and verify in one atomic step of the decode lane."""

    options: OwnOptions = ("async_scheduling",)

    def draft_early(self, rows: list[Request]) -> None:
        if not len(self.decode):  # those who wait join the next round, and have no drafts yet
            super().draft_early(rows)

    def decode_worker(self) -> Process:
        rows: list[Request] = []
        while True:
            if not rows or not self.early:  # else some would have drafts, and some none
                rows += self.decode.take(self.settings.round_batch - len(rows))
            if not rows:
                yield self.decode.wait()
                continue
            k = self.draft_length(rows)
            rows = self.hold(rows, k)
            if rows:
                rows = yield from self.rounds(rows, k)
