"""How long a run must be for its load to be there, where its steady state begins, and whether the server kept up.

**Length.** A run has a start, which is excluded, a measured part, and a drain, which never counts (`Scoring.steady`).
Lengths are multiples of the duration of a request, or of a conversation with its think time. A closed loop sends one
conversation per user and duration, so its length in requests is known before any run. At a request rate the durations
come from a run that is repeated, longer, until it is long enough for its own figures.

**Start.** It ends where MSER-5 (White, Cobb and Spratt, 2000) puts it: the truncation that minimises the squared
standard error of the mean of what is left, over batches of five observations. It is applied to the number of requests
in the system and to the hit rate of the prefix cache. A truncation in the second half of a run means that it was too
short, unless the means of its last two quarters agree, within 10% or two standard errors: then it is noise, as of a
queue near saturation or of few requests, and the best truncation in the first half is taken.

**Stability.** A label with known error rates, from counts of arrivals, admissions and finishes over time. Only the
second half of the arrivals counts, in SLICES slices of time. Each slice contributes its shortest admission queue
(arrived, not admitted), because a queue that empties between two steps of the server does not count.

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

Not covered: a load that changes with time, as that of a log does; a cache that fills more slowly than a run lasts,
unless its hit rate shows it; and a server that admits every request immediately and cannot keep up later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pdvsim.sim.records import Array, Columns
from pdvsim.sim.workload.options import Traffic

OBSERVATIONS, BATCH = 500, 5
SAME, ERRORS = 0.1, 2.0  # two means agree within this share, or this many standard errors, from `BATCH` parts of each
FILL = 1.5  # durations until the load is there
REQUESTS_LONG, TALKS_LONG, LOOPS_LONG = 10, 3, 3  # measured durations: of requests, of conversations, of closed loops
LEAST, LEAST_LOOP = 400, 160  # requests measured at least, at a rate and in a closed loop
MOST = 20_000  # requests of a run whose length is not given

EVENTS = ("arrival_s", "admitted_s", "finish_s")
STARTS = len(EVENTS)  # place of the arrivals that wait for no answer
BINS = 1 << 14
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


class Length(NamedTuple):
    """Requests of a run: excluded ones of the start, and measured ones."""

    start: int
    measured: int

    @property
    def total(self) -> int:
        return self.start + self.measured

    def short(self, share: float, least: int) -> Length:
        """Return the same start, and a share of the measured part."""
        return Length(self.start, min(self.measured, max(least, math.ceil(share * self.measured))))


def loop_length(traffic: Traffic, turns: float) -> Length:
    """Length of a closed loop whose conversations have `turns` turns."""
    cycle = (traffic.max_concurrency or 1) * turns
    return Length(math.ceil(FILL * cycle + first_uses(traffic)), max(LEAST_LOOP, math.ceil(LOOPS_LONG * cycle)))


def rate_length(
    traffic: Traffic, turns: float, service_s: float, transient_s: float = 0.0, least: int = LEAST
) -> Length:
    """Length at a request rate, if requests are in service for `service_s` on average.

    `transient_s` is the start that a run showed; as much is measured after it, because a load that settles slowly also
    changes slowly. At least `least` requests are measured.
    """
    rate = traffic.request_rate
    lasts_s = turns * service_s + (turns - 1) * traffic.think_time_s
    measured_s = max(REQUESTS_LONG * service_s, TALKS_LONG * lasts_s if turns > 1 else 0.0, transient_s)
    start = max(rate * max(FILL * lasts_s, transient_s), first_uses(traffic))
    return Length(math.ceil(start), max(least, math.ceil(rate * measured_s)))


def first_uses(traffic: Traffic) -> float:
    """Requests until almost every shared prefix has been sent once (the coupon collector's mean)."""
    length, count = traffic.prefixes
    return count * (math.log(count) + np.euler_gamma) if length and count > 1 else 0.0


def is_closed_loop(traffic: Traffic) -> bool:
    """Return whether a request is sent only as another finishes."""
    unpaced = math.isinf(traffic.request_rate) and not traffic.use_trace_timestamps
    return unpaced and traffic.max_concurrency is not None


def mser5(values: Array) -> int | None:
    """Observations to exclude from the start; None if no steady state began in the first half, or there are few."""
    batches = np.asarray(values[: len(values) // BATCH * BATCH], dtype=float).reshape(-1, BATCH).mean(axis=1)
    if len(batches) < 2 * BATCH:
        return None
    left = np.arange(len(batches), 0, -1)
    sums, squares = (np.cumsum(series[::-1])[::-1] for series in (batches, batches**2))
    errors = ((squares - sums**2 / left).clip(0) / left**2)[: len(batches) - BATCH]  # the last few say nothing
    half, at = len(batches) // 2, int(errors.argmin())
    if at > half:
        if not _agree(*np.array_split(batches[half:], 2)):
            return None
        at = int(errors[: half + 1].argmin())
    return at * BATCH


def _agree(one: Array, other: Array) -> bool:
    """Return whether the means of two parts of a series agree."""
    first, second = float(one.mean()), float(other.mean())
    parts = np.array([[block.mean() for block in np.array_split(part, BATCH)] for part in (one, other)])
    error = math.sqrt(parts.var(axis=1, ddof=1).sum() / BATCH)
    return abs(second - first) <= max(SAME * max(abs(first), abs(second)), ERRORS * error)


class Timeline:
    """Counts of several kinds of events in time bins, as wide as fits all of them; at least half are in use.

    Each time counts once, or by its (whole) amount.
    """

    def __init__(self, times_s: Sequence[Array], amounts: Sequence[Array | None]) -> None:
        last_s = max((float(at_s.max(initial=0.0)) for at_s in times_s), default=0.0)
        self.width_s = 1e-6
        while last_s >= self.width_s * BINS:
            self.width_s *= 2
        bins = ((at_s / self.width_s).astype(np.int64) for at_s in times_s)
        counts = [np.bincount(at, amount, BINS) for at, amount in zip(bins, amounts, strict=True)]
        self.counts = np.array(counts).astype(np.int64)

    def cut_s(self, first_s: float, last_s: float, series: Callable[[Array], Array]) -> float:
        """The start that MSER-5 excludes from a series of equal slices' counts; nan where there is no steady state."""
        if not last_s > first_s:
            return math.nan
        first, stop = (int(at_s / self.width_s) for at_s in (first_s, last_s))
        bins = max(1, (stop + 1 - first) // OBSERVATIONS)
        slices = (stop + 1 - first) // bins
        counts = self.counts[:, first : first + slices * bins].reshape(len(self.counts), slices, bins).sum(axis=2)
        cut = mser5(series(counts))
        return math.nan if cut is None else cut * bins * self.width_s


class Census:
    """Arrivals, admissions and finishes of a run's requests over time, and what follows from them."""

    def __init__(self, requests: Columns) -> None:
        arrival_s = requests["arrival_s"]
        starts_s = arrival_s[requests["turn"] == 0] if "turn" in requests else arrival_s  # those that await no answer
        self._first_s, self._last_s = float(starts_s.min(initial=math.inf)), float(starts_s.max(initial=-math.inf))
        # a negative time: it never came to that
        times_s = [*(requests[name][requests[name] >= 0] for name in EVENTS), starts_s]
        self._timeline, self._looked_up = Timeline(times_s, [None] * len(times_s)), None
        self.half = self._second_half(len(arrival_s), len(arrival_s) / max(1, len(starts_s)))
        if "num_cached_tokens" in requests:
            looked_up = (requests["num_cached_tokens"] >= 0) & (requests["admitted_s"] >= 0)
            if looked_up.any():
                amounts = [requests[name][looked_up] for name in ("prompt_tokens", "num_cached_tokens")]
                self._looked_up = Timeline([requests["admitted_s"][looked_up]] * 2, amounts)

    def transient_s(self) -> float:
        """Return when the steady state began, after the first arrival; nan if it did not within the first half."""
        span = self._first_s, self._last_s
        cuts_s = [self._timeline.cut_s(*span, lambda counts: counts[0].cumsum() - counts[2].cumsum())]
        if self._looked_up is not None:
            cuts_s.append(self._looked_up.cut_s(*span, lambda counts: counts[1] / np.maximum(counts[0], 1)))
        return math.nan if any(map(math.isnan, cuts_s)) else max(cuts_s)

    def arrival_rate(self) -> float:
        """Requests sent per second in the second half of the arrivals; nan where that is too short."""
        return math.nan if self.half is None else self.half.arrival_rate

    def _second_half(self, count: int, turns: float) -> Half | None:
        """The second half of the arrivals in slices; None where it is too short for that."""
        width_s = self._timeline.width_s
        if not self._last_s > self._first_s:
            return None
        middle, stop = (int(at_s / width_s) for at_s in ((self._first_s + self._last_s) / 2, self._last_s))
        bins = (stop + 1 - middle) // SLICES
        return Half(count, turns, self._timeline.counts[:, : stop + 1], bins, bins * width_s) if bins else None

    def label(self, traffic: Traffic, delivered: float = math.inf) -> str:
        """The stability, given the rate of requests `delivered` in the time that was measured."""
        paced, half = not math.isinf(traffic.request_rate), self.half
        if not paced and not traffic.use_trace_timestamps:
            return "burst" if traffic.max_concurrency is None else "closed loop"
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
