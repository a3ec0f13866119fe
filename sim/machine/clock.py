"""SimPy's environment with events at exact absolute times, and a short way to where a process waits anyway.

SimPy schedules by delay, so an event meant for time `t` happens at `now + (t - now)`, which rounding moves. The devices
know their finish times absolutely; `at` keeps them, so that a run is the same whatever was scheduled in between.

When a process waits for a launched work and nothing else is due before the work's completion is noticed, the clock
goes there at once and resumes the process, without the event queue. What happens, and in which order, is the same.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Any, Protocol

import simpy
from simpy.core import EmptySchedule
from simpy.events import NORMAL, URGENT, Event, Process, ProcessGenerator

Due = tuple[float, int, int]  # as the queue is ordered: time, priority, number

NEVER: Due = (inf, NORMAL, 0)


class Completion(Event):
    """A launched work as its process sees it: happens when the host has noticed the end."""

    device: Machine


class Machine(Protocol):
    """A device on simulated time: it knows when its next work will end, unless something is launched before."""

    due: Due

    def take_in(self) -> None:
        """Put the works launched since the last call on their streams."""

    def pass_through(self, last: Completion, before_s: float) -> float | None:
        """Run what was launched, up to `last`, if it has the device to itself and the host notices before then."""

    def end_next(self) -> tuple[Completion | None, float]:
        """The work that is due ends: its completion and when the host notices it; none where nobody looks."""


class Worker(Process):
    """A process that goes straight to what it waits for, where nothing lies between."""

    env: Clock

    def _resume(self, event: Event) -> None:
        env, send = self.env, self._generator.send
        env._active_proc = self
        try:
            while event._ok:
                event = send(event._value)
                if event.callbacks is not None and not (isinstance(event, Completion) and env.reach(event)):
                    event.callbacks.append(self._resume)
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
        self.machines: list[Machine] = []
        self.launched: list[Machine] = []  # with works that are not on their streams yet
        self.direct = direct  # False: every completion goes through the queue, with the same result

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
        machine = self._first_machine()
        return min(super().peek(), inf if machine is None else machine.due[0])

    def step(self) -> None:
        """Let the next thing happen: a work ends, or an event."""
        while self.launched:
            self.launched.pop().take_in()
        queue, machine = self._queue, self._first_machine()
        if machine is not None and (not queue or machine.due < queue[0]):
            self._now = machine.due[0]
            work, noticed_s = machine.end_next()
            if work is not None:
                self.at(noticed_s, work, work._value)
            return
        if not queue:
            raise EmptySchedule
        self._now, _, _, event = heappop(queue)
        callbacks, event.callbacks = event.callbacks, None  # type: ignore[assignment]
        for callback in callbacks:
            callback(event)
        if not event._ok and not event.defused:
            raise event._value

    def reach(self, work: Completion) -> bool:
        """Go to where `work` is noticed, if nothing else happens before; else it is on its way as ever."""
        queue, device = self._queue, work.device
        if self.direct and len(self.launched) == 1 and self.launched[0] is device:
            horizon_s = queue[0][0] if queue else inf
            if len(self.machines) > 1:
                horizon_s = min(horizon_s, *(machine.due[0] for machine in self.machines))
            noticed = device.pass_through(work, horizon_s)
            if noticed is not None:
                self.launched.clear()
                work._ok, work.callbacks = True, None  # type: ignore[assignment]
                self._now = noticed
                return True
        while self.launched:
            self.launched.pop().take_in()
        while self.direct:
            if (queue and queue[0] < device.due) or self._first_machine() is not device:
                return False
            ended, noticed_s = device.end_next()
            if ended is None:
                continue
            if ended is work and noticed_s < device.due[0] and (not queue or noticed_s < queue[0][0]):
                first = self._first_machine()
                if first is None or noticed_s < first.due[0]:
                    work._ok, work.callbacks = True, None  # type: ignore[assignment]
                    self._now = noticed_s
                    return True
            self.at(noticed_s, ended, ended._value)
            if ended is work:
                return False
        return False

    def _first_machine(self) -> Machine | None:
        machines = self.machines
        if len(machines) == 1:
            return machines[0] if machines[0].due[0] < inf else None
        first = min(machines, key=lambda machine: machine.due, default=None)
        return first if first is not None and first.due[0] < inf else None
