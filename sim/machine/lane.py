"""A lane: the queue of requests in front of one worker, and the worker's wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.hardware.host import SimulatedHost
from pdvsim.sim.machine.clock import Clock


class Lane:
    """A FIFO with one consumer, who waits with `yield lane.wait()` while there is nothing to do."""

    def __init__(self, env: Clock, host: SimulatedHost, name: str) -> None:
        self.env = env
        self.host = host
        self.name = name
        self.queue: deque[Request] = deque()
        self._waiter: Event | None = None
        self._idle_since_s = 0.0

    def __len__(self) -> int:
        return len(self.queue)

    @property
    def waits(self) -> bool:
        """Whether the consumer is waiting."""
        return self._waiter is not None

    def put(self, requests: Iterable[Request]) -> float:
        """Hand requests over from another lane, at the host's cost; returns when that is done."""
        self.queue.extend(requests)
        done = self.host.spend(self.env.now, self.host.times.handoff_s)
        self.wake(done)
        return done

    def take(self, limit: int) -> list[Request]:
        """The first `limit` requests."""
        queue = self.queue
        if len(queue) <= limit:
            taken = list(queue)
            queue.clear()
            return taken
        return [queue.popleft() for _ in range(limit)]

    def wait(self, at_most_s: float | None = None) -> Event:
        """Happens when the consumer should look again, after `at_most_s` seconds at the latest."""
        assert self._waiter is None, f"lane {self.name} has one consumer"
        self._waiter = waiter = Event(self.env)
        self._idle_since_s = self.env.now
        self.host.idle(+1)
        if at_most_s is not None:
            self.env.timeout(at_most_s).callbacks.append(lambda _: self._look(waiter))
        return waiter

    def _look(self, waiter: Event) -> None:
        if self._waiter is waiter:
            self.wake(self.env.now)

    def wake(self, time_s: float) -> None:
        """Let a waiting consumer look at `time_s`, or when it polls next or is awake."""
        waiter = self._waiter
        if waiter is not None:
            self._waiter = None
            looks_at, now = self.host.notice(self._idle_since_s, time_s), self.env.now
            self.host.idle(-1)
            self.env.at(looks_at if looks_at > now else now, waiter)
