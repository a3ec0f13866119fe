"""Windows of a recorded trace: a long one is cut into parts of equal length in time, the busiest first.

A conversation is wholly in the window in which it starts, so windows overlap by its later turns. Every request is in
one window. A short trace is one window.

Not modelled: what earlier windows left in the prefix cache; each window starts with an empty server.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.workload.datasets import Trace
from pdvsim.sim.workload.own import A_CLOCK_S

WINDOW_REQUESTS = 5000  # most requests of a window, and of a trace that is one
LEAST_REQUESTS = 500  # fewest of the busiest window, if longer ones are not too long
HOUR_S = 3600.0  # shorter windows only if an hour has too many requests
WINDOWS_S = (604800.0, 86400.0, 21600.0, HOUR_S, 1800.0, 600.0, 300.0, 60.0, 30.0, 10.0, 5.0, 1.0)
TALKS = 10  # least length of a window, in mean conversations
BUSY = 0.5  # seeds use windows with at least this share of the requests of the busiest


@dataclass(frozen=True, eq=False)
class TraceWindow:
    """Requests of a trace: their rows by arrival, when they start on its clock, and the time from first to last."""

    rows: NDArray[np.int64]
    start_s: float
    span_s: float

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def request_rate(self) -> float | None:
        """Mean request rate; None if all arrive at the same time."""
        return (len(self.rows) - 1) / self.span_s if self.span_s else None


@dataclass(frozen=True, eq=False)
class TraceWindows:
    """All requests of a trace, and its windows, the busiest first."""

    whole: TraceWindow
    parts: tuple[TraceWindow, ...]

    @property
    def busy(self) -> tuple[TraceWindow, ...]:
        """The windows that seeds use: at night a server is not at the load of the busiest."""
        return tuple(part for part in self.parts if len(part) >= BUSY * len(self.parts[0]))

    def described(self, number: int) -> str:
        """The window of this number, from 1, in words."""
        part = self.parts[number - 1]
        after = f"{time_text(part.start_s - self.whole.start_s)} after the first request"
        start = f"{datetime.fromtimestamp(part.start_s, UTC):%Y-%m-%d %H:%M:%S}" if part.start_s > A_CLOCK_S else after
        name = f"{number} of {len(self.parts)}{' (the busiest)' if number == 1 else ''}"
        return f"window {name}: {len(part):,} requests in {time_text(part.span_s)}, from {start}"


@lru_cache(maxsize=16)
def windows_of(trace: Trace, longest: int, prompt: int | None, output: int | None) -> TraceWindows:
    """The windows of a trace, of requests with at most `longest` tokens; `prompt` and `output` override their lengths.

    If both are given all requests have the same length, and none is excluded.
    """
    if prompt is not None and output is not None:
        return cut(trace, np.arange(len(trace.lengths)))
    own = trace.lengths[:, [prompt is None, output is None]].sum(axis=1)
    return cut(trace, np.flatnonzero(own + (prompt or 0) + (output or 0) <= longest))


def cut(trace: Trace, rows: NDArray[np.int64]) -> TraceWindows:
    """The windows of some rows of a trace."""
    rows = rows[np.argsort(trace.arrival_s[rows], kind="stable")]
    whole = _window(trace, rows)
    starts_s, mean_talk_s = _starts(trace, rows)
    span_s = float(np.ptp(starts_s)) if len(rows) else 0.0
    least_s = TALKS * mean_talk_s
    number, most = np.zeros(len(rows), dtype=np.int64), len(rows)
    for nominal_s in WINDOWS_S if most > WINDOW_REQUESTS else ():
        count = max(1, round(span_s / nominal_s))  # equal parts: none is incomplete
        place = np.minimum(((starts_s - starts_s.min()) * (count / (span_s or 1.0))).astype(np.int64), count - 1)
        shorter = int(np.bincount(place).max())
        if nominal_s < least_s or (most <= WINDOW_REQUESTS and shorter < LEAST_REQUESTS):
            break
        number, most = place, shorter
        if most <= WINDOW_REQUESTS and nominal_s <= HOUR_S:
            break
    parts = [_window(trace, rows[number == at]) for at in np.unique(number)]
    return TraceWindows(whole, tuple(sorted(parts, key=len, reverse=True)) or (whole,))


def _window(trace: Trace, rows: NDArray[np.int64]) -> TraceWindow:
    times_s = trace.arrival_s[rows]
    return TraceWindow(rows, float(times_s[0]), float(np.ptp(times_s))) if len(rows) else TraceWindow(rows, 0.0, 0.0)


def _starts(trace: Trace, rows: NDArray[np.int64]) -> tuple[NDArray[np.float64], float]:
    """When each request, or its conversation, starts, and how long one lasts on average; rows are by arrival."""
    times_s = trace.arrival_s[rows]
    if trace.turns is None or trace.sessions is None or not len(rows):
        return times_s, 0.0
    _, first, talk = np.unique(trace.sessions[rows], return_index=True, return_inverse=True)
    last = np.zeros(len(first), dtype=np.int64)
    np.maximum.at(last, talk, np.arange(len(rows)))
    return times_s[first][talk], float(np.mean(times_s[last] - times_s[first]))


def time_unit(seconds: float) -> tuple[float, str]:
    """Seconds of the unit that suits a duration, and its name."""
    steps = ((3 * 86400, 86400, "days"), (3 * 3600, 3600, "hours"), (300, 60, "minutes"), (0, 1, "seconds"))
    return next((float(scale), unit) for least, scale, unit in steps if seconds >= least)


def time_text(seconds: float) -> str:
    """A duration as text, in the unit that suits its length."""
    scale, unit = time_unit(seconds)
    if scale == 1 and seconds and seconds % 60 == 0:
        return f"{seconds / 60:g} min"
    return f"{seconds / scale:.3g} {'s' if scale == 1 else unit}"
