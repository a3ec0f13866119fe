"""A lane: the queue of requests in front of one worker, and the worker's wait for them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.hardware.host import SimulatedHost
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.clock import Clock


class Lane:
    """A FIFO with one consumer, who waits with `yield lane.wait()` while there is nothing to do."""

    def __init__(self, env: Clock, host: SimulatedHost, name: str) -> None:
        self.env = env
        self.host = host
        self.name = name
        self._queue: deque[Request] = deque()
        self._batch: Batch | None = None  # the first in the queue, if they came as one and none has left
        self._waiter: Event | None = None
        self._idle_since_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def queue(self) -> deque[Request]:
        """Who waits, in order."""
        self.dissolve()
        return self._queue

    def groups(self) -> list[list[Request]]:
        """Who waits: those who came as a batch, and the others."""
        if self._batch is None:
            return [list(self._queue)]
        return [self._batch, list(islice(self._queue, len(self._batch), None))]

    def dissolve(self) -> None:
        """Whoever came as a batch waits one by one from now on."""
        if self._batch is not None:
            self._batch.dissolve()
            self._batch = None

    @property
    def waits(self) -> bool:
        """Whether the consumer is waiting."""
        return self._waiter is not None

    def put(self, requests: Iterable[Request]) -> float:
        """Hand requests over from another lane, at the host's cost; returns when that is done."""
        self.put_first(requests) if not self._queue else self._queue.extend(requests)
        done = self.host.spend(self.env.now, self.host.times.handoff_s)
        self.wake(done)
        return done

    def put_first(self, requests: Iterable[Request]) -> None:
        """Put requests before those who wait, at no cost: their worker goes on with them."""
        if isinstance(requests, Batch) and self._batch is None:
            self._batch = requests
            requests = requests.raw()
        else:
            self.dissolve()
            requests = list(requests)
        self._queue.extendleft(reversed(requests))

    def take(self, limit: int) -> list[Request]:
        """The first `limit` requests."""
        queue, batch = self._queue, self._batch
        if batch is not None:
            later = list(islice(queue, len(batch), None))
            if len(queue) <= limit and batch.takes(later):
                self._batch = None
                queue.clear()
                batch += later
                return batch
            self.dissolve()
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
