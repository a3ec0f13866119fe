"""The draft-length controller of the PD-Verify paper, as published.

Three signals: the mean acceptance ratio of the last rounds, the depth of the verify queue, and the 95th percentile of
decode latency. The draft length falls by one when any of them is bad, rises by one when all of them are good, and
otherwise stays: the gap between the two thresholds of a signal is the hysteresis. All figures below are the published
ones. They do not depend on the GPU, the models or the batch, so the length it settles on is often not the best; the
`goodput` controller computes that.

A decode latency is here the time between two deliveries to one request. The published program timed the draft alone.
It also adjusted after every ten verdicts, here at most once for each round, whose rows are judged together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import ceil

from pdvsim.sim.core import Request
from pdvsim.sim.policies.controllers import Controller
from pdvsim.sim.policies.options import Server


class Feedback(Controller):
    """One draft token fewer when a signal is bad, one more when all are good."""

    learns = True
    by_sums = False  # needs each row's verdict and latency
    WINDOW = 100  # verdicts that the signals are taken over
    INTERVAL = 10  # verdicts between two adjustments
    ACCEPTANCE = (0.4, 0.7)  # shorter below the first, longer only above the second
    QUEUE = (10, 0)  # requests: shorter above the first, longer only at the second
    LATENCY_S = (0.050, 0.040)  # shorter above the first, longer only below the second

    def __init__(self, settings: Server) -> None:
        super().__init__(settings)
        self.low, self.high = settings.draft_range
        self.k = min(max(self.k, self.low), self.high)
        self._ratios: deque[float] = deque(maxlen=self.WINDOW)
        self._latencies: deque[float] = deque(maxlen=self.WINDOW)
        self._new = 0  # verdicts since the last adjustment

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens, mean of the last verdicts."""
        return sum(self._ratios) / len(self._ratios) if self._ratios else None

    @property
    def latency_s(self) -> float:
        """95th percentile of decode latency."""
        return sorted(self._latencies)[ceil(0.95 * len(self._latencies)) - 1] if self._latencies else 0.0

    def draft_length(self, rows: Sequence[Request], queue_depth: int, now_s: float) -> int:
        if self._new >= self.INTERVAL:
            self._adjust(queue_depth)
            self._new = 0
        return self.k

    def _adjust(self, queue_depth: int) -> None:
        acceptance, latency_s = self.acceptance, self.latency_s
        assert acceptance is not None
        if acceptance < self.ACCEPTANCE[0] or queue_depth > self.QUEUE[0] or latency_s > self.LATENCY_S[0]:
            self.k = max(self.low, self.k - 1)
        elif acceptance > self.ACCEPTANCE[1] and queue_depth <= self.QUEUE[1] and latency_s < self.LATENCY_S[1]:
            self.k = min(self.high, self.k + 1)

    def observe(self, rows: Sequence[Request], verdict: Sequence[int], now_s: float) -> None:
        for row, accepted in zip(rows, verdict, strict=True):
            if row.k:
                self._ratios.append(accepted / row.k)
                self._latencies.append(now_s - row.turn_s)
                self._new += 1
