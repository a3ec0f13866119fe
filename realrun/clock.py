"""Wall time for the simulator's processes: events happen when their moment has come; devices are asked, not awaited.

One host thread does everything: it runs what is due, asks the sources whether something is over, and asks again. It
never sleeps, so nothing waits for the operating system to wake it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import heappush
from threading import current_thread, main_thread
from time import perf_counter
from types import FrameType
from typing import Protocol

from simpy.core import EmptySchedule
from simpy.events import NORMAL, Event, EventPriority

from pdvsim.sim.machine.clock import Clock


class EventSource(Protocol):
    """Something outside that makes events happen."""

    def poll(self) -> bool:
        """Let what is over happen, without waiting; whether anything is still under way."""

    def rest(self) -> None:
        """Nothing is due: a moment for short chores."""


class WallClock(Clock):
    """Seconds of the host's monotonic clock since `start`."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[EventSource] = []
        self._origin_s = perf_counter()
        self._interrupted = False

    def start(self) -> None:
        """Time is 0 now; before anything is scheduled."""
        assert not self._queue, "the clock cannot be set back with events ahead"
        self._origin_s = perf_counter()
        self._now = 0.0

    @property
    def now(self) -> float:
        """The time, which goes on while a process runs."""
        self._now = now = perf_counter() - self._origin_s
        return now

    def schedule(self, event: Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        heappush(self._queue, (self.now + delay, priority, next(self._eid), event))

    def run_to(self, last: Event) -> None:
        """Run until `last` has happened. Ctrl-C ends it between two events, so that no step is left half done."""
        queue, sources = self._queue, self.sources
        with self._heeding_ctrl_c():
            while last.callbacks is not None:
                if queue and queue[0][0] <= self.now:  # asking costs more than most events: first all that is due
                    self.step()
                else:
                    busy = False
                    for source in sources:
                        busy = source.poll() or busy
                    if not queue and not busy:
                        raise EmptySchedule
                    if not queue or queue[0][0] > self.now:
                        for source in sources:
                            source.rest()
                if self._interrupted:
                    raise KeyboardInterrupt

    @contextmanager
    def _heeding_ctrl_c(self) -> Iterator[None]:
        """Record the first Ctrl-C; the second acts as usual, in case a step never ends."""
        self._interrupted = False
        if current_thread() is not main_thread():  # only the main thread hears of signals
            yield
            return

        def noted(number: int, frame: FrameType | None) -> None:
            self._interrupted = True
            signal.signal(signal.SIGINT, before)

        before = signal.signal(signal.SIGINT, noted)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
