"""PD: a prefill lane and a decode lane, each on its own stream.

The decode lane drafts and verifies its whole batch in one atomic step; prompts are prefilled concurrently.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.base import Context, Policy, Process


class PrefillDecode(Policy):
    """A prefill lane that feeds a decode lane."""

    draft_lane = "decode"
    verify_lane = "decode"
    prefill_lane = "prefill"
    not_in_engines = "prefills on a stream of its own, concurrently with the decode on the same GPU"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.decode = self.lanes.open("decode")

    def processes(self) -> Sequence[Process]:
        return [*(self.prefill_worker(worker) for worker in range(len(self.prefill_workers))), self.decode_worker()]

    def prefill_worker(self, worker: int = 0) -> Process:
        while True:
            chunks = self.next_chunks(self.settings.max_num_batched_tokens, worker)
            if not chunks:
                yield self.prefill_workers[worker].wait()
                continue
            self.decode.put((yield from self.prefill(chunks)))

    def decode_worker(self) -> Process:
        raise NotImplementedError


class PD(PrefillDecode):
    """Draft and verify in one atomic step of the decode lane."""

    options = ("async_scheduling",)

    def decode_worker(self) -> Process:
        rows = Batch()
        while True:
            if not rows or not self.early:  # else some would have drafts, and some none
                rows.add(self.decode.take(self.settings.round_batch - len(rows)))
            if not rows:
                yield self.decode.wait()
                continue
            k = self.draft_length(rows)
            rows = yield from self.rounds(self.reserve(rows, k), k)
