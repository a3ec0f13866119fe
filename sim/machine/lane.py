"""A lane: the queue of requests in front of one worker, and the worker's wait for them."""

from __future__ import annotations

from collections import deque

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.hardware.host import SimulatedHost
from pdvsim.sim.machine.batch import RunningBatch
from pdvsim.sim.machine.clock import Clock


class Lane:
    """A FIFO with one consumer, who waits with `yield lane.wait()` while there is nothing to do.

    Where it is `timed`, requests note when they are put in, and how long they waited when they are taken.
    """

    def __init__(self, env: Clock, host: SimulatedHost, name: str, timed: bool = False) -> None:
        self.env = env
        self.host = host
        self.name = name
        self.timed = timed
        self._queue: deque[Request] = deque()
        self._batch: RunningBatch | None = None  # of those who wait, some that came as one
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
        batch = self._batch
        if batch is None:
            return [list(self._queue)]
        return [batch, [request for request in self._queue if request not in batch.paths]]

    def discard(self, request: Request) -> None:
        """Remove a request from the queue, if it waits; a batch is split into its requests."""
        if request in self.queue:
            self._queue.remove(request)

    def dissolve(self) -> None:
        """Split a waiting batch into its requests."""
        if self._batch is not None:
            self._batch.dissolve()
            self._batch = None

    @property
    def waits(self) -> bool:
        """Whether the consumer is waiting."""
        return self._waiter is not None

    def put(self, requests: list[Request]) -> None:
        """Hand requests over from another lane, at the host's cost."""
        if not requests:
            return
        if self.timed:
            _note_ready(requests, self.env.now)
        self._queue.extend(self._rows(requests))
        self.wake(self.host.spend(self.env.now, self.host.times.handoff_s))

    def put_first(self, requests: list[Request]) -> None:
        """Put requests at the front of the queue, at no cost: their worker continues with them."""
        self._queue.extendleft(reversed(self._rows(requests)))

    def _rows(self, requests: list[Request]) -> list[Request]:
        if isinstance(requests, RunningBatch) and requests:
            if self._batch is None:
                self._batch = requests
                return requests.raw()
            return requests.dissolve()
        return requests

    def take(self, limit: int) -> list[Request]:
        """The first `limit` requests."""
        queue, batch = self._queue, self._batch
        if batch is not None and len(queue) <= limit and batch.takes(others := self.groups()[1]):
            self._batch = None
            batch += others
            taken: list[Request] = batch.in_order(list(queue))
            queue.clear()
        else:
            self.dissolve()
            taken = [queue.popleft() for _ in range(min(limit, len(queue)))]
        if self.timed:
            _note_wait(taken, self.env.now)
        return taken

    def wait(self, at_most_s: float | None = None) -> Event:
        """Happens when the consumer should look again, after `at_most_s` seconds at the latest."""
        assert self._waiter is None, f"lane {self.name} has only one consumer"
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


def _note_ready(rows: list[Request], now_s: float) -> None:
    if isinstance(rows, RunningBatch):
        rows.ready_s = now_s
    else:
        for row in rows:
            row.state.ready_s = now_s


def _note_wait(rows: list[Request], now_s: float) -> None:
    if isinstance(rows, RunningBatch):
        rows.wait_s += now_s - rows.ready_s
    else:
        for row in rows:
            row.taken.wait_s += now_s - row.state.ready_s
