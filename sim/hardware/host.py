"""The one host thread: launches, completions and hand-overs queue for it, and idle lanes that poll take some of it.

Lanes take turns on the thread, and none is interrupted. With W idle lanes, each wanting one look of cost c every P + c,
a turn is an operation of cost C and the n looks that come due in that time, n = W (C + n c) / (P + c), but one of each
lane at most: n = W C / max(C, P + c - W c). While few poll, an operation takes 1 / (1 - W c / (P + c)) times as long;
where their looks fill the thread, it waits for one look of each. W lanes look every P, or every W c if that is longer.

Not modelled: garbage collection, and other processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# An n-gram search: seconds a row, and a token that it goes through. Least squares over 101,214 searches of
# `realrun.ngram` in SpecDecode-Bench's tokens (39 to 8,577), in one thread of an Intel Xeon (studies/ngram_lookups).
LOOKUP_ROW_S, LOOKUP_TOKEN_S = 4.7e-6, 5.4e-10


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Host seconds of each operation, and how idle lanes learn of work: at once, by looking, or by being woken."""

    launch_s: float = 0.0
    completion_s: float = 0.0
    handoff_s: float = 0.0
    idle_poll_s: float = 0.0
    idle_poll_cost_s: float = 0.0
    notify_s: float = 0.0
    row_s: float = 0.0  # of a completion, for each of its rows

    def completed_s(self, rows: int) -> float:
        """Of the completion of a launch with so many rows."""
        return self.completion_s + self.row_s * rows


class SimulatedHost:
    """Serves one operation at a time, in the order asked."""

    def __init__(self, times: HostTimes) -> None:
        self.times = times
        self.free_at = 0.0
        self._polls = times.idle_poll_s > 0
        self._idle_lanes = 0

    def spend(self, now_s: float, cost_s: float) -> float:
        """Do an operation that is asked for now; when it will be done."""
        free_at = self.free_at
        if self._idle_lanes and self._polls and cost_s:
            cost_s += self._looks_s(cost_s)
        self.free_at = done = (now_s if now_s > free_at else free_at) + cost_s
        return done

    def _looks_s(self, cost_s: float) -> float:
        """Time that idle lanes' looks take in the turn of an operation."""
        times = self.times
        all_s = self._idle_lanes * times.idle_poll_cost_s
        return all_s * cost_s / max(cost_s, times.idle_poll_s + times.idle_poll_cost_s - all_s)

    def idle(self, lanes: int) -> None:
        """One more lane (+1) or one fewer (-1) is waiting for work."""
        self._idle_lanes += lanes

    def notice(self, idle_since_s: float, now_s: float) -> float:
        """When a lane idle since then goes on, with work there now: at its next look, or woken."""
        times = self.times
        if not times.idle_poll_s:
            return now_s + times.notify_s
        period = max(times.idle_poll_s, self._idle_lanes * times.idle_poll_cost_s)
        looks = -(-(now_s - idle_since_s) // period)
        return max(now_s, idle_since_s + looks * period)


class WatchedHost(SimulatedHost):
    """The same, noting what it does and when; operations that cost the same have one name together."""

    def __init__(self, times: HostTimes, note: Callable[[str, float, float], None]) -> None:
        super().__init__(times)
        self._note = note
        self._names: dict[float, str] = {}
        for name in ("launch", "completion", "handoff"):
            cost_s = getattr(times, f"{name}_s")
            self._names[cost_s] = f"{self._names[cost_s]} or {name}" if cost_s in self._names else name

    def spend(self, now_s: float, cost_s: float) -> float:
        start_s = max(now_s, self.free_at)
        done_s = super().spend(now_s, cost_s)
        if done_s > start_s:
            self._note(self._names.get(cost_s, "host"), start_s, done_s)
        return done_s
