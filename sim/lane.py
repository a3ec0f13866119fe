"""A lane: the queue of requests in front of one worker, and the worker's wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.core import Request
from pdvsim.sim.host import SimulatedHost


class Lane:
    """A FIFO with one consumer, who waits with `yield lane.wait()` while there is nothing to do."""

    def __init__(self, env: Clock, host: SimulatedHost, name: str, disturb: Callable[[], None]) -> None:
        self.env = env
        self.host = host
        self.name = name
        self.queue: deque[Request] = deque()
        self._disturb = disturb  # tells the device that a foreseen stretch of rounds is over
        self._waiter: Event | None = None
        self._idle_since_s = 0.0

    def __len__(self) -> int:
        return len(self.queue)

    def put(self, requests: Iterable[Request]) -> None:
        """Hand requests over from another lane, at the host's cost."""
        self._disturb()
        self.queue.extend(requests)
        self.wake(self.host.spend(self.env.now, self.host.times.handoff_s))

    def take(self, limit: int) -> list[Request]:
        """The first `limit` requests."""
        queue = self.queue
        if len(queue) <= limit:
            taken = list(queue)
            queue.clear()
            return taken
        return [queue.popleft() for _ in range(limit)]

    def wait(self) -> Event:
        """Happens when the consumer should look again."""
        assert self._waiter is None, f"lane {self.name} has one consumer"
        return self.waiting(Event(self.env), self.env.now)

    def waiting(self, event: Event, since_s: float) -> Event:
        """The consumer has been waiting for `event` since then."""
        self._waiter = event
        self._idle_since_s = since_s
        self.host.idle(+1)
        return event

    def wake(self, time_s: float, value: Any = None) -> None:
        """Let a waiting consumer look at `time_s`, or when it polls next."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            self.host.idle(-1)
            self.env.at(max(self.env.now, self.host.notice(self._idle_since_s, time_s)), waiter, value)
