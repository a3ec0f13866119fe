"""The three programs of the `three_way` and `model_comparison` tables: whole sequences computed again and again.

"Prefill" is tokenisation and takes no time here. Not modelled: the threads' own scheduling, other than that one forward
runs at a time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import simpy
from simpy.events import Event

from pdvsim.published.forwards import Forwards, Stream
from pdvsim.published.job import PublishedJob

ThreeWay = Literal["baseline", "pd", "pdv"]
Process = Generator[Event, Any, None]

WORKERS = 4
BATCH = 4


@dataclass(frozen=True, slots=True)
class ThreeWayConfig:
    """What the three programs share."""

    forwards: Forwards
    overlap_s: float = 0.0  # of a forward, hidden behind another worker's: what the interpreter lock leaves
    first_use_s: float = 0.0  # before the first forward of a process that was not warmed up


def run_three_way(program: ThreeWay, jobs: list[PublishedJob], config: ThreeWayConfig) -> None:
    """Run the jobs, in the order of their arrivals, to their end."""
    env = simpy.Environment()
    {"baseline": ThreeWayBaseline, "pd": ThreeWayPd, "pdv": ThreeWayPdv}[program](env, jobs, config)
    env.run()


class ThreeWayProgram:
    """What is waiting, the stream, and the forwards."""

    threads = 1
    arrival: Event  # of the next request

    def __init__(self, env: simpy.Environment, jobs: list[PublishedJob], config: ThreeWayConfig) -> None:
        self.env = env
        self.config = config
        self.stream = Stream(env)
        self.stream.free_s += config.first_use_s
        self.waiting: deque[PublishedJob] = deque()
        env.process(self.arrivals(jobs))  # before the loops: what arrives at 0 waits when they start
        for _ in range(self.threads):
            env.process(self.loop())

    def arrivals(self, jobs: list[PublishedJob]) -> Process:
        """Submit each job when it arrives; a loop with nothing to do waits for `arrival`."""
        self.arrival = self.env.event()
        for job in jobs:
            if job.arrival_s > self.env.now:
                yield self.env.timeout(job.arrival_s - self.env.now)
            self.waiting.append(job)
            self.arrival.succeed()
            self.arrival = self.env.event()

    def loop(self) -> Process:
        raise NotImplementedError

    def settle(self, job: PublishedJob) -> None:
        """One round's tokens, and the end if it was the last."""
        job.emit(self.env.now)
        if job.over:
            job.finish_s = self.env.now


class ThreeWayBaseline(ThreeWayProgram):
    """Four worker threads, each with one request to its end at batch 1; they share the stream and one lock."""

    threads = WORKERS
    busy = 0

    def loop(self) -> Process:
        forwards = self.config.forwards
        while True:
            if not self.waiting:
                yield self.arrival
                continue
            job = self.waiting.popleft()
            self.busy += 1
            while not job.over:
                for seconds in forwards.draft(1, job.length) + forwards.verify(1, job.length):
                    yield self.stream.run(seconds - (self.config.overlap_s if self.busy > 1 else 0.0))
                self.settle(job)
            self.busy -= 1


class ThreeWayPd(ThreeWayProgram):
    """One thread, decode strictly before prefill: a request is admitted only when none is left to decode."""

    def loop(self) -> Process:
        forwards = self.config.forwards
        decoding: deque[PublishedJob] = deque()
        while True:
            if not decoding:
                if self.waiting:
                    decoding.append(self.waiting.popleft())
                else:
                    yield self.arrival
                continue
            job = decoding[0]
            yield self.stream.run(sum(forwards.draft(1, job.length) + forwards.verify(1, job.length)))
            self.settle(job)
            if job.over:
                decoding.popleft()


class ThreeWayPdv(ThreeWayProgram):
    """One thread, decode > verify > prefill: a prefill only when both other lanes are empty, so batches are static."""

    def loop(self) -> Process:
        forwards = self.config.forwards
        decoding: deque[PublishedJob] = deque()
        verifying: deque[PublishedJob] = deque()
        while True:
            if decoding:
                batch = _take(decoding)
                yield self.stream.run(sum(forwards.draft(len(batch), max(job.length for job in batch))))
                verifying.extend(batch)
            elif verifying:
                batch = _take(verifying)
                yield self.stream.run(sum(forwards.verify(len(batch), max(job.length for job in batch))))
                for job in batch:
                    self.settle(job)
                decoding.extend(job for job in batch if not job.over)
            elif self.waiting:
                decoding.extend(_take(self.waiting))
            else:
                yield self.arrival


def _take(queue: deque[PublishedJob]) -> list[PublishedJob]:
    return [queue.popleft() for _ in range(min(BATCH, len(queue)))]
