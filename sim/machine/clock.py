"""SimPy's environment with events at exact absolute times, and a short way to where a process waits anyway.

SimPy schedules by delay, so an event meant for time `t` happens at `now + (t - now)`, which rounding moves. The devices
know their finish times absolutely; `at` keeps them, so that a run is the same whatever was scheduled in between.

When a process waits for a launched work and nothing else is due before the work's completion is noticed, the clock
goes there at once and resumes the process, without the event queue. What happens, and in which order, is the same.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from operator import attrgetter
from typing import Any, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, URGENT, Event, Process, ProcessGenerator

Due = tuple[float, int, int]  # as the queue is ordered: time, priority, number

NEVER: Due = (inf, NORMAL, 0)


class Completion(Event):
    """A launched work as its process sees it: happens when the host has noticed the end."""

    device: TimedDevice


class TimedDevice(Protocol):
    """A device on simulated time: it knows when its next work will end, unless something is launched before."""

    due: Due

    def take_in(self) -> None:
        """Put the works launched since the last call on their streams."""

    def pass_through(self, last: Completion, before_s: float) -> float | None:
        """Run what was launched, up to `last`, if it has the device to itself and the host notices before then."""

    def end_next(self) -> tuple[Completion | None, float]:
        """The work that is due ends: its completion and when the host notices it; none where nobody looks."""


class _NoDevice:
    """Where there is no device, nothing ends."""

    due = NEVER

    def take_in(self) -> None: ...

    def pass_through(self, last: Completion, before_s: float) -> float | None: ...

    def end_next(self) -> tuple[Completion | None, float]:
        raise EmptySchedule


_NONE = _NoDevice()


class Worker(Process):
    """A process that goes straight to what it waits for, where nothing lies between."""

    env: Clock

    def _resume(self, event: Event) -> None:
        env, send = self.env, self._generator.send
        env._active_proc = self
        try:
            while event._ok:
                event = send(event._value)
                callbacks = event.callbacks
                if callbacks is not None and not (isinstance(event, Completion) and env.reach(event)):
                    callbacks.append(self._resume)
                    self._target = event
                    return
        except StopIteration as end:
            self._ok, self._value = True, end.value
            env.schedule(self)
            return
        finally:
            env._active_proc = None
        super()._resume(event)  # an event that failed


class Clock(simpy.Environment):
    """Simulated time."""

    def __init__(self, direct: bool = True) -> None:
        super().__init__()
        self.machines: list[TimedDevice] = []
        self.launched: list[TimedDevice] = []  # with works that are not on their streams yet
        self.direct = direct  # False: every completion goes through the queue, with the same result

    now = property(attrgetter("_now"))  # asked for several times a round: read without a call

    def process(self, generator: ProcessGenerator) -> Process:
        return Worker(self, generator)

    def at(self, time_s: float, event: Event, value: Any = None, first: bool = False) -> Event:
        """Let `event` happen at `time_s` with `value`; `first` puts it before whatever else happens then."""
        event._ok = True
        event._value = value
        heappush(self._queue, (time_s, URGENT if first else NORMAL, next(self._eid), event))
        return event

    def number(self) -> int:
        """The next number, by which things due at the same time are ordered."""
        return next(self._eid)

    def run_to(self, last: Event) -> None:
        """Run until `last` has happened; an EmptySchedule where nothing is due before that."""
        while last.callbacks is not None:
            self.step()

    def peek(self) -> float:
        """When the next thing is due."""
        return min(super().peek(), self._next_machine().due[0])

    def step(self) -> None:
        """Let the next thing happen: a work ends, or an event."""
        if self.launched:
            self._take_in()
        queue, machines = self._queue, self.machines
        machine = machines[0] if len(machines) == 1 else self._next_machine()
        if queue and queue[0] < machine.due:
            self._now, _, _, event = heappop(queue)
            callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
            for callback in callbacks:
                callback(event)
            if not event._ok and not event.defused:
                raise event._value
        elif machine.due is NEVER:
            raise EmptySchedule
        else:
            self._now = machine.due[0]
            work, noticed_s = machine.end_next()
            if work is not None:
                self.at(noticed_s, work, work._value)

    def reach(self, work: Completion) -> bool:
        """Go to where `work` is noticed, if nothing else happens before; else it is on its way as ever."""
        queue, device, launched = self._queue, work.device, self.launched
        if self.direct and len(launched) == 1 and launched[0] is device:
            horizon_s = queue[0][0] if queue else inf
            if len(self.machines) > 1:
                horizon_s = min(horizon_s, self._next_machine().due[0])
            noticed = device.pass_through(work, horizon_s)
            if noticed is not None:
                launched.clear()
                work._ok, work.callbacks = True, None  # type: ignore[assignment]
                self._now = noticed
                return True
        if launched:
            self._take_in()
        while self.direct:
            if (queue and queue[0] < device.due) or self._next_machine() is not device or device.due is NEVER:
                return False
            ended, noticed_s = device.end_next()
            if ended is None:
                continue
            if ended is work and (not queue or noticed_s < queue[0][0]) and noticed_s < self._next_machine().due[0]:
                work._ok, work.callbacks = True, None  # type: ignore[assignment]
                self._now = noticed_s
                return True
            self.at(noticed_s, ended, ended._value)
            if ended is work:
                return False
        return False

    def horizon(self, device: TimedDevice) -> float:
        """When something else than what `device` does is due."""
        if self.launched:
            return self._now
        horizon_s: float = self._queue[0][0] if self._queue else inf
        for machine in self.machines:
            if machine is not device and machine.due[0] < horizon_s:
                horizon_s = machine.due[0]
        return horizon_s

    def _take_in(self) -> None:
        while self.launched:
            self.launched.pop().take_in()

    def _next_machine(self) -> TimedDevice:
        """The one whose work ends first."""
        machines = self.machines
        if len(machines) == 1:
            return machines[0]
        first: TimedDevice = _NONE
        for machine in machines:
            if machine.due < first.due:
                first = machine
        return first
