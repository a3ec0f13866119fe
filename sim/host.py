"""The one host thread: launches, completions and hand-overs queue for it, and idle lanes that poll take some of it.

Not modelled: garbage collection, other processes, and a scheduler whose cost grows with the batch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Host seconds of each operation, and how idle lanes look for work."""

    launch_s: float = 0.0
    completion_s: float = 0.0
    handoff_s: float = 0.0
    idle_poll_s: float = 0.0
    idle_poll_cost_s: float = 0.0


class SimulatedHost:
    """Serves one operation at a time, in the order asked."""

    def __init__(self, times: HostTimes) -> None:
        self.times = times
        self.free_at = 0.0
        self._idle_lanes = 0
        # an idle lane that polls holds the thread for cost out of every period + cost
        period = times.idle_poll_s + times.idle_poll_cost_s
        self._tax = times.idle_poll_cost_s / period if times.idle_poll_s > 0 else 0.0

    def spend(self, now_s: float, cost_s: float) -> float:
        """Do an operation that is asked for now; when it will be done."""
        self.free_at = done = self.done_s(now_s, cost_s)
        return done

    def done_s(self, now_s: float, cost_s: float) -> float:
        """When an operation asked for now would be done."""
        if self._tax and self._idle_lanes:
            cost_s /= max(1.0 - self._tax * self._idle_lanes, 0.01)
        return (now_s if now_s > self.free_at else self.free_at) + cost_s

    def idle(self, lanes: int) -> None:
        """One more lane (+1) or one fewer (-1) is waiting for work."""
        self._idle_lanes += lanes

    def notice(self, idle_since_s: float, now_s: float) -> float:
        """When a lane idle since then looks again, at or after now."""
        period = self.times.idle_poll_s
        if not period:
            return now_s
        looks = -(-(now_s - idle_since_s) // period)
        return max(now_s, idle_since_s + looks * period)
