"""Lanes: the queue of requests in front of each worker, and the worker's wait for them."""

from __future__ import annotations

from collections.abc import Iterator, Sized

from simpy.events import Event

from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.prices.host import SimulatedHost

PRIORITY = {"decode": 2, "verify": 1, "prefill": 0, "main": 0}
PATIENCE_S = 0.2  # dynamic priority: a launch is a level higher for each that its first request has waited
HIGHEST = 5  # as many levels as CUDA's streams have, less one


class Lane:
    """A FIFO with one consumer, which waits with `yield lane.wait()` while there is nothing to do.

    Where it is `timed`, requests note when they are put in, and how long they waited when they are taken.
    """

    def __init__(self, env: Clock, host: SimulatedHost, name: str, timed: bool = False) -> None:
        self.env = env
        self.host = host
        self.name = name
        self.timed = timed
        self.rows = Batch()  # requests that wait, in order
        self._waiter: Event | None = None
        self._idle_since_s = 0.0

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def waits(self) -> bool:
        """Whether the consumer is waiting."""
        return self._waiter is not None

    def put(self, rows: Batch) -> None:
        """Hand requests over from another lane, at the host's cost."""
        if not rows:
            return
        if self.timed:
            rows.wait_from(self.env.now)
        self.rows.add(rows)
        self.wake(self.host.spend(self.env.now, self.host.times.handoff_s, "handoff"))

    def put_first(self, rows: Batch) -> None:
        """Put requests at the front of the queue, at no cost: their worker continues with them."""
        rows.add(self.rows)
        self.rows.add(rows)

    def take(self, limit: int) -> Batch:
        """The first `limit` requests."""
        if limit < len(self.rows):
            taken = self.rows.take(limit)
        else:
            taken, self.rows = self.rows, Batch()
        if self.timed:
            taken.wait_until(self.env.now)
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


class Lanes:
    """The lanes of a policy, and the requests that wait in front of each."""

    def __init__(self, env: Clock, host: SimulatedHost, dynamic: bool = False) -> None:
        self.env, self.host = env, host
        self.dynamic = dynamic  # priorities move with queue length and age
        self.queues: dict[str, Sized] = {}  # by name
        self._lanes: list[Lane] = []

    def open(self, name: str, timed: bool = False) -> Lane:
        """A new lane, named like the stream its launches run on. If `timed`, the wait in it is recorded."""
        lane = Lane(self.env, self.host, name, timed)
        self._lanes.append(lane)
        self.queues.setdefault(name, lane)
        return lane

    def __iter__(self) -> Iterator[Lane]:
        return iter(self._lanes)

    def depth(self, name: str) -> int:
        """Requests that wait in front of a lane."""
        return len(self.queues.get(name, ()))

    def discard(self, request: Request) -> None:
        """Remove a request from the lane that it waits in, if any."""
        for lane in self._lanes:
            if request in lane.rows:
                lane.rows.remove(request)

    def priority(self, name: str, rows: int, since_s: float) -> int:
        """Priority of a launch of `rows` requests: the lane's own or, if dynamic, by queue length and age.

        A dynamic priority is one level above the lane's own if the launch and its queue exceed the queues of all other
        lanes, and one level per `PATIENCE_S` since its first request arrived there. So no lane waits for ever.
        """
        own = PRIORITY[name]
        if not self.dynamic:
            return own
        others = sum(len(queue) for other, queue in self.queues.items() if other != name)
        deep = rows + self.depth(name) > others
        return min(HIGHEST, own + deep + int((self.env.now - since_s) / PATIENCE_S))
