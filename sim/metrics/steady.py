"""How long a run must be for its load to be there, and where its steady state begins.

A run has a start, which is excluded, a measured part, and a drain, which never counts (`Scoring.steady`). Lengths are
multiples of the duration of a request, or of a conversation with its think time. A closed loop sends one conversation
per user and duration, so its length in requests is known before any run. At a request rate the durations come from a
run that is repeated, longer, until it is long enough for its own figures.

The start ends where MSER-5 (White, Cobb and Spratt, 2000) puts it: the truncation that minimises the squared standard
error of the mean of what is left, over batches of five observations. It is applied to the number of requests in the
system and to the hit rate of the prefix cache. A truncation in the second half of a run means that it was too short,
unless the means of its last two quarters agree, within 10% or two standard errors: then it is noise, as of a queue near
saturation or of few requests, and the best truncation in the first half is taken.

Not covered: a load that changes with time, as that of a log does; and a cache that fills more slowly than a run lasts,
unless its hit rate shows it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from pdvsim.sim.records import Array
from pdvsim.sim.workload.options import Traffic

OBSERVATIONS, BATCH = 500, 5
SAME, ERRORS = 0.1, 2.0  # two means agree within this share, or this many standard errors, from `BATCH` parts of each
FILL = 1.5  # durations until the load is there
REQUESTS_LONG, TALKS_LONG, LOOPS_LONG = 10, 3, 3  # measured durations: of requests, of conversations, of closed loops
LEAST, LEAST_LOOP = 400, 160  # requests measured at least, at a rate and in a closed loop
MOST = 20_000  # requests of a run whose length is not given


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
