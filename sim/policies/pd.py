"""PD: a prefill lane and a decode lane, each on its own stream.

The decode lane drafts and verifies its whole batch in one atomic step; prompts are prefilled concurrently.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.sim.core import Request
from pdvsim.sim.policies.base import Policy, Process
from pdvsim.sim.policies.facts import OwnOptions


class PrefillDecode(Policy):
    """A prefill lane that feeds a decode lane."""

    draft_lane = "decode"
    verify_lane = "decode"
    prefill_lane = "prefill"
    beyond = "prefills on a stream of its own, concurrently with the decode on the same GPU"

    def processes(self) -> Sequence[Process]:
        self.decode = self.lane("decode")
        return [*(self.prefill_worker(reader) for reader in range(len(self.readers))), self.decode_worker()]

    def prefill_worker(self, reader: int = 0) -> Process:
        while True:
            self.reader = reader
            chunks = self.next_chunks(self.settings.max_num_batched_tokens)
            if not chunks:
                yield self.readers[reader].wait()
                continue
            self.decode.put((yield from self.prefill(chunks)))

    def decode_worker(self) -> Process:
        raise NotImplementedError


class PD(PrefillDecode):
    """Draft and verify in one atomic step of the decode lane."""

    options: OwnOptions = ("async_scheduling",)

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
            rows = yield from self.rounds(rows, k)
