"""Did the server keep up? A label with known error rates, from counts of arrivals, admissions and finishes over time.

Only the second half of the arrivals is judged, in SLICES slices of time. Each slice contributes its shortest admission
queue (arrived, not admitted), because a queue that empties between two steps of the server does not count.

- "stable" if these shortest queues are, on average, far shorter than the queue of a server at exactly its capacity.
  That queue is a random walk with the noise of arrivals and admissions, which is estimated from the slices. The bounds
  LINE and LONG_RUN let 2% to 8% of such runs pass (M/D/c and M/G/c queues, c from 1 to 128, 1,000 and 4,000 requests;
  15% of the shortest). A run shorter than SHORT_RUN times the time that a request is in service has not filled the
  server, and is never stable.
- "overloaded" if the queue is longer than that, kept growing, and the server admitted fewer requests than
  --request-rate brings, or than the trace brought: a one-sided t test over the slices, at the confidence of a 95%
  interval.
- "inconclusive" otherwise: the run is too short for a load this close to capacity.

A client that holds requests back (--max-concurrency with a rate) hides the queue. If its limit was reached for more
than HELD of the time, the run is overloaded or inconclusive. "closed loop" and "burst" have no rate to keep up with.

Not detected: a server that admits every request immediately and falls behind later.
"""

from __future__ import annotations

import math
from typing import Any

from numpy.typing import NDArray

from pdvsim.sim.config import Traffic
from pdvsim.sim.metrics.sketch import Timeline
from pdvsim.sim.records import Columns

Array = NDArray[Any]

EVENTS = ("arrival_s", "admitted_s", "finish_s")
SLICES = 16
LINE = 0.06  # of the noise over the whole half
LONG_RUN = 128  # times a request's time in service, below which LINE shrinks in proportion
SHORT_RUN = 8
HELD = 0.05
CONFIDENCE = 0.95


def stability(requests: Columns, traffic: Traffic) -> str:
    """The label of a run from its requests."""
    census = Census()
    census.add(requests)
    return judged(traffic, census)


def is_closed_loop(traffic: Traffic) -> bool:
    """Whether a request is sent only as another finishes."""
    unpaced = math.isinf(traffic.request_rate) and not traffic.use_trace_timestamps
    return unpaced and traffic.max_concurrency is not None


class Census:
    """Counts of arrivals, admissions and finishes over time; the same from all rows together and from parts."""

    def __init__(self) -> None:
        self._timeline, self._tokens = Timeline(len(EVENTS)), Timeline(1)
        self.count = 0
        self._first_s, self._last_s = math.inf, -math.inf  # arrivals

    def add(self, requests: Columns) -> None:
        arrival_s = requests["arrival_s"]
        self.count += len(arrival_s)
        self._first_s = min(self._first_s, float(arrival_s.min()))
        self._last_s = max(self._last_s, float(arrival_s.max()))
        for at, name in enumerate(EVENTS):
            times_s = requests[name]
            self._timeline.add(at, times_s[times_s >= 0])  # negative: it never came to that
        if "output_tokens" in requests:
            done = requests["finish_s"] >= 0
            self._tokens.add(0, requests["finish_s"][done], requests["output_tokens"][done])

    def leaving(self, start_s: float) -> float:
        """Output tokens per second of the requests that finish from `start_s` to the last arrival."""
        first, last = (int(at_s / self._tokens.width_s) for at_s in (start_s, self._last_s))
        tokens = int(self._tokens.counts[0, first:last].sum())
        return tokens / ((last - first) * self._tokens.width_s) if last > first else math.nan

    def half(self) -> Half | None:
        """The second half of the arrivals in slices; None where it is too short for that."""
        line, width_s = self._timeline, self._timeline.width_s
        middle, stop = (int(at_s / width_s) for at_s in ((self._first_s + self._last_s) / 2, self._last_s))
        bins = (stop + 1 - middle) // SLICES
        return Half(self.count, line.counts[:, : stop + 1], bins, bins * width_s) if bins else None

    def in_system(self, start_s: float, stop_s: float) -> float:
        """Mean number of requests that had arrived and not finished, as counted at the ends of bins."""
        arrived, _, finished = self._timeline.counts.cumsum(axis=1)
        at = slice(*(int(edge_s / self._timeline.width_s) for edge_s in (start_s, stop_s)))
        return float((arrived - finished)[at].mean())


class Half:
    """The second half of the arrivals of `count` requests: `counts` end with it, each slice is `bins` of them."""

    def __init__(self, count: int, counts: Array, bins: int, slice_s: float) -> None:
        arrived, admitted, finished = counts.cumsum(axis=1)[:, -SLICES * bins :]
        line = (arrived - admitted).reshape(SLICES, bins)
        self.slice_s = slice_s
        self.arrivals, self.admissions = counts[:2, -SLICES * bins :].reshape(2, SLICES, bins).sum(axis=2)
        self.lowest = float(line.min(axis=1).mean())
        self.grew = bool(line[-1, -1] > line[0, 0])
        self.in_system = arrived - finished
        in_service = float((admitted - finished).mean())
        self.times_service = count / in_service if in_service else math.inf

    @property
    def bound(self) -> float:
        """How long a line may be, at its lowest, in a run that is stable."""
        noise = math.sqrt(SLICES * (self.arrivals.var(ddof=1) + self.admissions.var(ddof=1)))
        return LINE * min(1.0, self.times_service / LONG_RUN) * noise

    def falls_short(self, due: Array | float) -> bool:
        """Whether fewer were admitted in a slice than were `due`, beyond chance."""
        from scipy.special import stdtrit

        short = due - self.admissions
        spread = float(short.std(ddof=1)) / math.sqrt(SLICES)
        return float(short.mean()) > float(stdtrit(SLICES - 1, 0.5 + CONFIDENCE / 2)) * spread


def judged(traffic: Traffic, census: Census) -> str:
    """The label, from counts."""
    paced = not math.isinf(traffic.request_rate)
    if not paced and not traffic.use_trace_timestamps:
        return "burst" if traffic.max_concurrency is None else "closed loop"
    half = census.half()
    if half is None:
        return "inconclusive"
    limit = traffic.max_concurrency
    held = limit is not None and float((half.in_system >= limit).mean()) > HELD
    if half.lowest <= half.bound and not held:
        return "stable" if half.times_service >= SHORT_RUN else "inconclusive"
    due = half.arrivals if traffic.use_trace_timestamps else traffic.request_rate * half.slice_s
    return "overloaded" if (half.grew or held) and half.falls_short(due) else "inconclusive"
