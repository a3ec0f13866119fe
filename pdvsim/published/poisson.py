"""The two programs of the `poisson_30s` table: every forward at batch 1 in a Python loop, on one stream.

A request counts as completed when the turn that gave it its last round is over. Not modelled: the interpreter lock
between pd's two threads, and the time that queues take.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator
from typing import Any, Literal

import simpy
from simpy.events import Event

from pdvsim.published.forwards import Cached, Stream
from pdvsim.published.job import PublishedJob

Poisson = Literal["pd", "pdv-unified"]
Process = Generator[Event, Any, None]


def run_poisson(
    program: Poisson, jobs: list[PublishedJob], limit: int, forwards: Cached, cutoff_s: float = math.inf
) -> None:
    """Let the jobs arrive and serve them, up to the cut-off; `limit` is the "concurrency" of the table."""
    env = simpy.Environment()
    server = {"pd": PoissonPd, "pdv-unified": PoissonUnified}[program](env, limit, forwards)
    env.process(_arrive(env, jobs, server))
    env.run(None if math.isinf(cutoff_s) else cutoff_s)


def _arrive(env: simpy.Environment, jobs: list[PublishedJob], server: PoissonProgram) -> Process:
    for job in jobs:
        yield env.timeout(job.arrival_s - env.now)
        server.waiting.append(job)
        server.notify()
    server.arriving = False


class PoissonProgram:
    """Two queues, the stream, and what the threads wait for."""

    def __init__(self, env: simpy.Environment, limit: int, forwards: Cached) -> None:
        self.env = env
        self.limit = limit
        self.forwards = forwards
        self.stream = Stream(env)
        self.waiting: deque[PublishedJob] = deque()
        self.decoding: deque[PublishedJob] = deque()
        self.arriving = True  # more requests may come
        self.news = env.event()
        for thread in self.threads():
            env.process(thread)

    def threads(self) -> list[Process]:
        raise NotImplementedError

    def notify(self) -> None:
        """Something changed: wake the threads that found nothing to do."""
        news, self.news = self.news, self.env.event()
        news.succeed()

    def prefill(self) -> Process:
        """Admit one request."""
        job = self.waiting.popleft()
        yield from self.submit(self.forwards.prefill())
        self.decoding.append(job)

    def turn(self) -> Process:
        """Up to `limit` requests get one round each, one after the other; those unfinished queue up again."""
        batch = [self.decoding.popleft() for _ in range(min(self.limit, len(self.decoding)))]
        for job in batch:
            yield from self.submit(self.forwards.draft(1, job.length) + self.forwards.verify(1, job.length))
            job.emit(self.env.now)
        for job in batch:
            if job.over:
                job.finish_s = self.env.now
                self.finished(job)
            else:
                self.decoding.append(job)

    def submit(self, forwards: list[float]) -> Process:
        """Forwards one after the other; another thread's may come between."""
        for seconds in forwards:
            yield self.stream.run(seconds)

    def finished(self, job: PublishedJob) -> None:
        """A request has left."""


class PoissonPd(PoissonProgram):
    """A prefill thread admits while fewer than `limit` requests are active; a decode thread goes round all of them."""

    active = 0
    prefilling = False

    def threads(self) -> list[Process]:
        return [self.prefill_loop(), self.decode_loop()]

    def prefill_loop(self) -> Process:
        while True:
            if self.waiting and self.active < self.limit:
                self.active += 1
                self.prefilling = True
                yield from self.prefill()
                self.prefilling = False
                self.notify()
            else:
                yield self.news

    def decode_loop(self) -> Process:
        while True:
            if self.decoding:
                yield from self.turn()
            else:
                yield self.news

    def submit(self, forwards: list[float]) -> Process:
        """Forwards as one event while the other thread has nothing to submit and will not have."""
        room = self.active < self.limit
        if self.prefilling or (room and (self.waiting or self.arriving)):
            yield from super().submit(forwards)
        else:
            yield self.stream.run(sum(forwards))

    def finished(self, job: PublishedJob) -> None:
        self.active -= 1
        self.notify()


class PoissonUnified(PoissonProgram):
    """One thread: a turn admits at most one request while fewer than `limit` queue to decode, then goes round all.

    With one admission a turn, the requests in flight limit themselves to about the rounds a request needs.
    """

    def threads(self) -> list[Process]:
        return [self.loop()]

    def submit(self, forwards: list[float]) -> Process:
        """Forwards as one event: there is no other thread."""
        yield self.stream.run(sum(forwards))

    def loop(self) -> Process:
        while True:
            if self.waiting and len(self.decoding) < self.limit:
                yield from self.prefill()
            if self.decoding:
                yield from self.turn()
            else:
                yield self.news
