"""PDV with an atomic path: few requests are drafted and verified in one step of the decode lane, many in three lanes.

`Adaptive` leaves the choice, and whether to speculate at all, to the calibrated latency model.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.policies.admission import OwnOptions, Tuned
from pdvsim.sim.policies.base import Context
from pdvsim.sim.policies.controllers import Learner
from pdvsim.sim.policies.pdv import PDV
from pdvsim.sim.workload.acceptance import expected_tokens


class Hybrid(PDV):
    """At or below the threshold atomic, above it three lanes."""

    atomic_rounds = True
    options: OwnOptions = (*PDV.options, "hybrid_threshold")
    tuned: Tuned = ("hybrid_threshold", (2, 8, 32))
    not_in_engines = "switches from one lane to three by the number of requests"
    asked = "on change"  # in a round between lanes its own choice stays the same

    def decode_batch(self, rows: Batch) -> Generator[Event, Any, None]:
        k = self.atomic_length(rows) if len(rows) <= self.settings.verify_batch else None
        if k is None:
            yield from super().decode_batch(rows)
            return
        self.decode.put_first((yield from self.rounds(self.reserve(rows, k), k)))

    def atomic_length(self, rows: Batch) -> int | None:
        """Draft length if these rows should be verified right here, None if they should go to the verify lane."""
        # drafts that wait for verification may be waiting for these rows: then they go the same way
        if self.in_flight > self.settings.hybrid_threshold or len(self.verify_queue):
            return None
        return self.draft_length(rows)


class Adaptive(Hybrid):
    """Before each batch: plain decoding, an atomic round, or three lanes, whichever the profile predicts fastest.

    Drafting is charged with all that the drafter reads: prompts, what it has to catch up on, and, after plain decoding,
    what was decoded without it. A new mode must promise `MARGIN` more than the one in use, so that noise in the
    acceptance estimate does not make it alternate, and to end plain decoding it must do so for `PERSISTENCE` batches.
    Plain decoding teaches nothing about acceptance, so drafts are tried now and then.
    """

    plain_rounds = verifies_all = True
    drafter_follows = False  # while it decodes plainly
    options = PDV.options
    tuned = ("verify_gather", ("auto", "never"))
    not_in_engines = "switches from one lane to three by the latency model"
    MARGIN = 1.02
    PERSISTENCE = 8
    HORIZON_S = 2.0  # within which what the drafter must read after plain decoding has to pay

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.mode = "plain"
        self.learner = Learner()
        self.urge = 0  # batches in a row for which ending plain decoding would have paid

    def atomic_length(self, rows: Batch) -> int | None:
        if len(self.verify_queue):
            return None
        k = self.draft_length(rows)
        decoding = max(len(rows), self.in_flight - len(self.prefilling))
        context = rows.context * decoding // len(rows)
        self.learner.served.look(rows)
        self.mode = self.best_mode(rows, decoding, context, k)
        self.drafter_follows = self.mode != "plain"
        if self.mode == "plain":
            return k if k and self.learner.tries(lambda: self.lost(rows, decoding, context, k)) else 0
        return k if self.mode == "atomic" else None

    def best_mode(self, rows: Batch, decoding: int, context: int, k: int) -> str:
        """Return the mode with the most tokens per second for these requests and this total context."""
        rate, half = self.learner.estimate.rate, decoding // 2
        speeds = {
            "plain": self.speed(decoding, 0, self.planner.decode_s(decoding, context)),
            "atomic": self.speed(decoding, k, self.planner.caught_up_s(decoding, context, k, rate)),
        }
        if half:  # two half batches that alternate in the two lanes
            speeds["lanes"] = self.speed(2 * half, k, 2 * self.planner.overlapped_s(half, context // 2, k, rate))
        best = max(speeds, key=lambda mode: speeds[mode])
        gain, margin = speeds[best] / speeds.get(self.mode, 1e-9), self.MARGIN
        if self.mode == "plain" and gain > margin:
            margin += self.planner.lag_s(rows) * decoding / len(rows) / self.HORIZON_S
            self.urge = self.urge + 1 if gain > margin else 0
            return best if self.urge > self.PERSISTENCE else "plain"
        self.urge = 0
        return best if gain > margin else self.mode

    def speed(self, decoding: int, k: int, round_s: float) -> float:
        """Tokens per second of rounds that take `round_s`, with the prompts that are prefilled meanwhile."""
        served = self.learner.served
        tokens, finished = served.in_a_round(decoding, k, self.learner.estimate.rate)
        return tokens / (round_s + self.planner.prefill_s(decoding, k, finished, served.prompts))

    def lost(self, rows: Batch, decoding: int, context: int, k: int) -> float:
        """Plain rounds that trying drafts costs."""
        rate = self.learner.estimate.rate
        trying_s = self.planner.lag_s(rows) + self.planner.round_s(decoding, context, k, rate)
        return trying_s / self.planner.decode_s(decoding, context) - expected_tokens(rate, k)

    def settle(self, rows: Batch, verdict: Sequence[int]) -> Batch:
        self.learner.observe(rows, verdict, plain=self.mode == "plain")
        verified = list(rows)
        going = super().settle(rows, verdict)
        self.learner.served.observe([row for row in verified if row.taken.finish_s >= 0])
        return going
