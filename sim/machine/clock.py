"""SimPy's environment with events at exact absolute times, and devices that report when their next launch ends.

SimPy schedules by delay, so an event meant for time `t` happens at `now + (t - now)`, which rounding moves. The devices
know their finish times absolutely; `at` keeps them, so that a run is the same whatever was scheduled in between.

SimPy has no public way for this, nor for a finish that moves whenever another launch starts: a scheduled event cannot
be withdrawn. So the clock uses its queue (`_queue`, `_eid`) and time (`_now`), and `step` is SimPy's own with one more
source of events. Processes, events and everything that policies see are SimPy's as they are.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, URGENT, Event

Due = tuple[float, int, int]  # as the queue is ordered: time, priority, number

NEVER: Due = (inf, NORMAL, 0)


class TimedDevice(Protocol):
    """A device on simulated time: it knows when its next launch ends, unless something is launched before."""

    due: Due

    @property
    def ready_s(self) -> float:
        """When the first is ready of what was launched since it was last put on streams."""

    def take_in(self) -> None:
        """Put what was launched since the last call on its streams."""

    def end_next(self) -> tuple[Event | None, float]:
        """End the launch that is due; returns its completion, if awaited, and when the host notices it."""


class Clock(simpy.Environment):
    """Simulated time."""

    def __init__(self) -> None:
        super().__init__()
        self.machines: list[TimedDevice] = []
        self.launched: list[TimedDevice] = []  # with launches that are not on their streams yet

    now = property(attrgetter("_now"))  # read several times per round, so without a call

    def at(self, time_s: float, event: Event, value: Any = None, first: bool = False) -> Event:
        """Let `event` happen at `time_s` with `value`; `first` is for arrivals: before whatever else happens then."""
        event._ok = True
        event._value = value
        heappush(self._queue, (time_s, URGENT if first else NORMAL, next(self._eid), event))
        return event

    def number(self) -> int:
        """The next number, by which things due at the same time are ordered."""
        return next(self._eid)

    def run_to(self, last: Event) -> None:
        """Run until `last` has happened; an EmptySchedule where nothing is due before that."""
        step = self.step
        while last.callbacks is not None:
            step()

    def peek(self) -> float:
        """Return the time of the next event."""
        return min([super().peek(), *(machine.due[0] for machine in self.machines)])

    def step(self) -> None:
        """Process the next event or end of a launch."""
        queue, machines = self._queue, self.machines
        # what happens before a launch is ready may launch more, and so they are put on their streams together
        if self.launched and not (queue and queue[0][0] <= min([device.ready_s for device in self.launched])):
            while self.launched:
                self.launched.pop().take_in()
        machine = machines[0] if len(machines) == 1 else min(machines, key=attrgetter("due"), default=None)
        due = NEVER if machine is None else machine.due
        if queue and queue[0] < due:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value
        elif machine is None or due is NEVER:
            raise EmptySchedule
        else:
            self._now = due[0]
            ended, noticed_s = machine.end_next()
            if ended is not None:
                self.at(noticed_s, ended, ended._value)

    def horizon(self, device: TimedDevice, arrivals: bool = True) -> float:
        """Return the time of the next event that is not of `device`; without `arrivals`, arrivals do not count."""
        if self.launched:
            return self._now
        if not arrivals and self._queue and len(self.machines) == 1:  # else another may launch what arrives, and end it
            return min([event[0] for event in self._queue if event[1] != URGENT], default=inf)
        horizon_s: float = self._queue[0][0] if self._queue else inf
        for machine in self.machines:
            if machine is not device and machine.due[0] < horizon_s:
                horizon_s = machine.due[0]
        return horizon_s

    def catch_up(self) -> None:
        """Let happen what was due until now, each at its time."""
        now_s = self._now
        while self._queue and self._queue[0][0] <= now_s:
            self.step()
        self._now = now_s
