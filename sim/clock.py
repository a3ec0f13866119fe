"""SimPy's environment with events at exact absolute times.

SimPy schedules by delay, so an event meant for time `t` happens at `now + (t - now)`, which rounding moves. The device
knows its finish times absolutely; `at` keeps them, so that a run is the same whatever was scheduled in between.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import NORMAL, URGENT, Event


class Clock(simpy.Environment):
    """Simulated time."""

    def at(self, time_s: float, event: Event, value: Any = None, first: bool = False) -> Event:
        """Let `event` happen at `time_s` with `value`; `first` puts it before whatever else happens then."""
        event._ok = True
        event._value = value
        heappush(self._queue, (time_s, URGENT if first else NORMAL, next(self._eid), event))
        return event

    def run_to(self, last: Event) -> None:
        """Run until `last` has happened. SimPy's `run`, without a call and a try block for every event."""
        queue = self._queue
        while last.callbacks is not None:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value
