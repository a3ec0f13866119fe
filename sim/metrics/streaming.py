"""The metrics of a run whose rows are not kept: those of `summarise`, key by key, from rows that are seen once.

Rows are taken out of the log now and then. Counts, means and deviations are exact, to rounding; quantiles are a
sketch's, within 1%. What is held beyond the requests in the system does not grow with their number.

Taken for granted of a simulated run: requests are sent in the order of their numbers, and every one of them finishes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pdvsim.sim.config import Experiment
from pdvsim.sim.core import Request
from pdvsim.sim.hardware.reach import Reaches
from pdvsim.sim.metrics.sketch import Spread
from pdvsim.sim.metrics.stability import is_closed_loop
from pdvsim.sim.metrics.summary import Sums
from pdvsim.sim.records import REQUESTS, Log, Reader, request_columns


class Tally(Reader):
    """Accumulates the metrics of a run while it proceeds."""

    def __init__(
        self,
        experiment: Experiment,
        requests: int,
        bandwidths: Sequence[float],
        log: Log,
        settled_s: Callable[[], float],
        reaches: Reaches | None = None,
    ) -> None:
        """`settled_s` says until when every launch that began is in the log."""
        super().__init__(log, REQUESTS)
        self.sums = Sums(experiment, experiment.scoring, bandwidths, reaches or Reaches(), Spread)
        self._settled_s = settled_s
        self._warmup, self._last_id = experiment.scoring.warmup_requests, requests - 1
        self._drains = self._warmup > 0 and is_closed_loop(experiment.traffic)
        self._left = requests - self._warmup
        self._came_s = array("d")

    def arrived(self, request: Request) -> None:
        self._came_s.append(request.arrival_s)
        window = self.sums.window
        if request.id == self._warmup:
            self.sums.window = window._replace(start_s=request.arrival_s)
        elif self._drains and request.id == self._last_id and request.arrival_s > window.start_s:
            self.sums.window = window._replace(end_s=request.arrival_s)

    def finished(self, request: Request) -> None:
        if request.id >= self._warmup:
            self._left -= 1
            if not self._left:
                window = self.sums.window
                self.sums.window = window._replace(end_s=min(window.end_s, request.finish_s))
        super().finished(request)

    def take(self, now_s: float) -> None:
        self._book(now_s, self._settled_s())

    def close(self) -> dict[str, Any]:
        """The metrics, when all is done."""
        self._book(math.inf, math.inf)
        return self.sums.metrics()

    def _book(self, now_s: float, settled_s: float) -> None:
        served, self.served = request_columns(self.served), []
        came_s, self._came_s = np.frombuffer(self._came_s), array("d")
        self.sums.launches(self.log.launches.drain(), settled_s)
        self.sums.deliveries(self.log.deliveries.drain(), now_s)
        self.sums.crowd.add(came_s, served["finish_s"], self.sums.window.start_s, now_s)
        self.sums.requests(served)
