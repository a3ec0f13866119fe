"""Who chooses the draft length: nobody (`fixed`), a feedback loop, or an argmax over the calibrated latency model."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from pdvsim.sim.acceptance import expected_tokens
from pdvsim.sim.config import Server
from pdvsim.sim.core import Request
from pdvsim.sim.planner import Planner


class AcceptanceEstimate:
    """Chance that a draft token is accepted, from recent verdicts: older ones fade, with a weak prior of 0.6."""

    def __init__(self, memory: float = 2000.0) -> None:
        self._keep = 1 - 1 / memory
        self._accepted, self._tried = 6.0, 10.0

    def observe(self, rows: Sequence[Request], verdict: Sequence[int]) -> None:
        """Take a verdict: those that passed, and the first of each row to fail; those behind it were not judged."""
        accepted = rejected = 0
        for row, passed in zip(rows, verdict, strict=True):
            if row.k:
                accepted += passed
                rejected += passed < row.k
        decay = self._keep ** (accepted + rejected)
        self._accepted = self._accepted * decay + accepted
        self._tried = self._tried * decay + accepted + rejected

    @property
    def rate(self) -> float:
        return self._accepted / self._tried


class Controller:
    """Always the same draft length."""

    def __init__(self, settings: Server) -> None:
        self.k = settings.num_speculative_tokens
        self.temperature = settings.draft_temperature

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        """Draft length for the next draft of `rows`, with that many requests queued for verification."""
        return self.k

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        """A verify has judged these rows' drafts: so many of each passed."""


class Feedback(Controller):
    """Moves the draft length by one, at most once in `PATIENCE` verdicts, by three signals with hysteresis.

    Longer when the share of accepted drafts is high and the verify queue short; shorter when that share is low, when
    drafts pile up before verify, or when the 95th percentile of the time from draft to verdict is far above its median.
    """

    PATIENCE = 8
    LENGTHEN, SHORTEN = 0.75, 0.45  # share of drafts accepted; between the two nothing changes
    QUEUE = 2.0  # verify queue, in batches, beyond which drafts are too long
    TAIL = 2.5  # p95 over median of the time from draft to verdict

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.low, self.high = settings.min_speculative_tokens, settings.max_speculative_tokens
        self.k = min(max(self.k, self.low), self.high)
        self.move_temperature = settings.feedback_temperature
        self._share = 0.6
        self._verdicts = 0
        self._turns: deque[float] = deque(maxlen=64)
        self._drafted_s = 0.0
        self._crowded = False
        self._share_before = 0.6
        self._heat_step = 0.1

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        self._crowded = queue_depth > self.QUEUE * max(1, len(rows))
        self._drafted_s = now_s
        return self.k

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        drafted = sum(row.k for row in rows)
        if not drafted:
            return
        self._share += 0.1 * (sum(verdict) / drafted - self._share)
        self._turns.append(now_s - self._drafted_s)
        self._verdicts += 1
        if self._verdicts < self.PATIENCE:
            return
        self._verdicts = 0
        if self._share < self.SHORTEN or self._crowded or self._tail() > self.TAIL:
            self.k = max(self.low, self.k - 1)
        elif self._share > self.LENGTHEN:
            self.k = min(self.high, self.k + 1)
        if self.move_temperature:
            if self._share < self._share_before:
                self._heat_step = -self._heat_step  # that was the wrong way
            self.temperature = min(2.0, max(0.0, self.temperature + self._heat_step))
            self._share_before = self._share

    def _tail(self) -> float:
        turns = sorted(self._turns)
        if len(turns) < 20:
            return 1.0
        median = turns[len(turns) // 2]
        return turns[int(0.95 * len(turns))] / median if median > 0 else 1.0


class Goodput(Controller):
    """The draft length with the most expected tokens per second for the batch at hand, by the latency model."""

    def __init__(self, settings: Server, planner: Planner) -> None:
        super().__init__(settings)
        self.choices = range(settings.min_speculative_tokens, settings.max_speculative_tokens + 1)
        self.planner = planner
        self.estimate = AcceptanceEstimate()
        self._known: dict[tuple[int, int, int], int] = {}

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        context = sum(row.context for row in rows)
        # the answer is flat around its best: rounding the question costs nothing and lets it be remembered
        key = (len(rows), context // (64 * max(1, len(rows))), round(self.estimate.rate * 50))
        found = self._known.get(key)
        if found is None:
            rate = key[2] / 50
            found = self._known[key] = max(
                self.choices,
                key=lambda k: expected_tokens(rate, k) / self.planner.round_s(len(rows), context, k),
            )
        return found

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        self.estimate.observe(rows, verdict)


def make_controller(settings: Server, planner: Planner) -> Controller:
    """The controller that the settings name."""
    if settings.controller == "feedback":
        return Feedback(settings)
    if settings.controller == "goodput":
        return Goodput(settings, planner)
    return Controller(settings)
