"""Did the server keep up? A label with known error rates, from counts of arrivals, admissions and finishes over time.

Only the second half of the arrivals counts, in SLICES slices of time. Each slice contributes its shortest admission
queue (arrived, not admitted), because a queue that empties between two steps of the server does not count.

- "stable" if these shortest queues are, on average, far shorter than the queue of a server at exactly its capacity.
  That queue is a random walk with the noise of arrivals and admissions, which is estimated from the slices. The bounds
  LINE and LONG_RUN let 2% to 8% of such runs pass (M/D/c and M/G/c queues, c from 1 to 128, 1,000 and 4,000 requests;
  15% of the shortest). A run shorter than SHORT_RUN times the time that a request is in service has not filled the
  server, and is never stable.
- "overloaded" if the queue is longer than that, kept growing, and the server admitted fewer requests than
  --request-rate brings, or than the trace brought: a one-sided t test over the slices, at the confidence of a 95%
  interval.
- "inconclusive" otherwise: the run is too short for a load this close to capacity, the queue was longer in the second
  half of that time than in the first (a one-sided Welch test over the slices), or the load never came: later
  turns of conversations are sent after answers and think times, and a short run ends before most of them.

Judged are arrivals up to the last request that waits for no answer: after that conversations only come to their end.

A client that holds requests back (--max-concurrency with a rate) hides the queue. If its limit was reached for more
than HELD of the time, the run is overloaded or inconclusive. "closed loop" and "burst" have no rate to keep up with.

Not detected: a server that admits every request immediately and cannot keep up later.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.config import Traffic
from pdvsim.sim.metrics.sketch import Timeline
from pdvsim.sim.metrics.steady import OBSERVATIONS, mser5
from pdvsim.sim.records import Columns

Array = NDArray[Any]

EVENTS = ("arrival_s", "admitted_s", "finish_s")
STARTS = len(EVENTS)  # place of the arrivals that wait for no answer
SLICES = 16
LINE = 0.06  # of the noise over the whole half
LONG_RUN = 128  # times a request's time in service, below which LINE shrinks in proportion
SHORT_RUN = 8
HELD = 0.05
# Student's t, as scipy.special.stdtrit gives it: importing that would take as long as a short run
SHORT_T = 2.131449545559776  # of SLICES slices, two-sided at 0.95
RISES = 2.0  # times the queue of the first half, and ...
RISES_T = 4.785289628638333  # ... of half the slices, at 0.999: slices of a stable queue are not independent
UNDELIVERED = 0.1  # share of the offered requests that may be missing, or twice the noise of their number


def stability(requests: Columns, traffic: Traffic) -> str:
    """The label of a run from its requests."""
    census = Census()
    census.add(requests)
    return label_of(traffic, census)


def is_closed_loop(traffic: Traffic) -> bool:
    """Return whether a request is sent only as another finishes."""
    unpaced = math.isinf(traffic.request_rate) and not traffic.use_trace_timestamps
    return unpaced and traffic.max_concurrency is not None


class Census:
    """Counts of arrivals, admissions and finishes over time; the same from all rows together and from parts."""

    def __init__(self) -> None:
        self._timeline, self._looked_up = Timeline(len(EVENTS) + 1), Timeline(2)
        self.count = self._starts = 0
        self._first_s, self._last_s = math.inf, -math.inf  # arrivals that wait for no answer

    def add(self, requests: Columns) -> None:
        arrival_s = requests["arrival_s"]
        self.count += len(arrival_s)
        starts_s = arrival_s[requests["turn"] == 0] if "turn" in requests else arrival_s
        self._first_s = min(self._first_s, float(starts_s.min(initial=math.inf)))
        self._last_s = max(self._last_s, float(starts_s.max(initial=-math.inf)))
        self._starts += len(starts_s)
        self._timeline.add(STARTS, starts_s)
        for at, name in enumerate(EVENTS):
            times_s = requests[name]
            self._timeline.add(at, times_s[times_s >= 0])  # negative: it never came to that
        if "num_cached_tokens" in requests:
            looked_up = (requests["num_cached_tokens"] >= 0) & (requests["admitted_s"] >= 0)
            for at, name in enumerate(("prompt_tokens", "num_cached_tokens")):
                self._looked_up.add(at, requests["admitted_s"][looked_up], requests[name][looked_up])

    def transient_s(self) -> float:
        """Return when the steady state began, after the first arrival; nan if it did not within the first half."""
        cuts_s = [self._cut_s(self._timeline, lambda counts: counts[0].cumsum() - counts[2].cumsum())]
        if self._looked_up.counts.any():
            cuts_s.append(self._cut_s(self._looked_up, lambda counts: counts[1] / np.maximum(counts[0], 1)))
        return math.nan if any(map(math.isnan, cuts_s)) else max(cuts_s)

    def _cut_s(self, line: Timeline, series: Callable[[Array], Array]) -> float:
        """The start that MSER-5 excludes from what the counts of equal slices give."""
        if not self._last_s > self._first_s:
            return math.nan
        first, stop = (int(at_s / line.width_s) for at_s in (self._first_s, self._last_s))
        bins = max(1, (stop + 1 - first) // OBSERVATIONS)
        slices = (stop + 1 - first) // bins
        counts = line.counts[:, first : first + slices * bins].reshape(len(line.counts), slices, bins).sum(axis=2)
        cut = mser5(series(counts))
        return math.nan if cut is None else cut * bins * line.width_s

    def arrival_rate(self) -> float:
        """Requests sent per second in the second half of the arrivals; nan where that is too short."""
        half = self.half()
        return math.nan if half is None else half.arrival_rate

    def half(self) -> Half | None:
        """The second half of the arrivals in slices; None where it is too short for that."""
        line, width_s = self._timeline, self._timeline.width_s
        if not self._last_s > self._first_s:
            return None
        middle, stop = (int(at_s / width_s) for at_s in ((self._first_s + self._last_s) / 2, self._last_s))
        bins = (stop + 1 - middle) // SLICES
        turns = self.count / self._starts
        return Half(self.count, turns, line.counts[:, : stop + 1], bins, bins * width_s) if bins else None


class Half:
    """The second half of the arrivals of `count` requests: `counts` end with it, each slice is `bins` of them.

    Conversations have `turns` requests.
    """

    def __init__(self, count: int, turns: float, counts: Array, bins: int, slice_s: float) -> None:
        arrived, admitted, finished, _ = counts.cumsum(axis=1)[:, -SLICES * bins :]
        self._starts, self._turns = int(counts[STARTS, -SLICES * bins :].sum()), turns
        line = (arrived - admitted).reshape(SLICES, bins)
        self.slice_s = slice_s
        self.arrivals, self.admissions = counts[:2, -SLICES * bins :].reshape(2, SLICES, bins).sum(axis=2)
        self.lowest = float(line.min(axis=1).mean())
        self.grew = bool(line[-1, -1] > line[0, 0])
        self.waiting = line.mean(axis=1)
        self.in_system = arrived - finished
        in_service = float((admitted - finished).mean())
        self.times_service = count / in_service if in_service else math.inf

    @property
    def bound(self) -> float:
        """Most requests in a line, at its lowest, in a run that is stable."""
        noise = math.sqrt(SLICES * (self.arrivals.var(ddof=1) + self.admissions.var(ddof=1)))
        return LINE * min(1.0, self.times_service / LONG_RUN) * noise

    @property
    def arrival_rate(self) -> float:
        """Requests sent per second."""
        return float(self.arrivals.mean()) / self.slice_s

    def lacks(self, delivered: float) -> bool:
        """Whether far fewer requests were sent here, or `delivered` per second, than the conversations begun bring."""
        offered = self._starts * self._turns / (SLICES * self.slice_s)
        allowed = max(UNDELIVERED, 2 / math.sqrt(max(self._starts, 1)))
        return self._turns > 1 and min(delivered, self.arrival_rate) < (1 - allowed) * offered

    def rises(self) -> bool:
        """Return whether the queue was longer in the second half of the slices, beyond chance and by a factor."""
        before, after = self.waiting.reshape(2, -1)
        spread = math.sqrt((before.var(ddof=1) + after.var(ddof=1)) / len(before))
        apart = float(after.mean() - before.mean())
        beyond_chance = apart > RISES_T * spread
        return beyond_chance and float(after.mean()) > RISES * max(1.0, float(before.mean()))

    def falls_short(self, due: Array | float) -> bool:
        """Return whether fewer were admitted in a slice than were `due`, beyond chance."""
        short = due - self.admissions
        spread = float(short.std(ddof=1)) / math.sqrt(SLICES)
        return float(short.mean()) > SHORT_T * spread


def label_of(traffic: Traffic, census: Census, delivered: float = math.inf) -> str:
    """The label, from counts and the rate of requests `delivered` in the time that was measured."""
    paced = not math.isinf(traffic.request_rate)
    if not paced and not traffic.use_trace_timestamps:
        return "burst" if traffic.max_concurrency is None else "closed loop"
    half = census.half()
    if half is None:
        return "inconclusive"
    limit = traffic.max_concurrency
    held = limit is not None and float((half.in_system >= limit).mean()) > HELD
    if half.lowest <= half.bound and not held:
        came = traffic.use_trace_timestamps or not half.lacks(delivered)
        long_enough = half.times_service >= SHORT_RUN and came
        return "stable" if long_enough and not half.rises() else "inconclusive"
    due = half.arrivals if traffic.use_trace_timestamps else traffic.request_rate * half.slice_s
    return "overloaded" if (half.grew or held) and half.falls_short(due) else "inconclusive"
