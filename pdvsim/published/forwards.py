"""What the published programs share: how long a forward takes, the one stream it runs on, and threads that wait.

Not modelled: attention, and the spread of repeated forwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import simpy
from simpy.events import Event

from pdvsim.published.job import K, PublishedJob
from pdvsim.sim.core import Pair

Process = Generator[Event, Any, None]


class Forwards(Protocol):
    """The forwards of one round and of a prefill, in order, in seconds."""

    def draft(self, rows: int, length: int) -> list[float]: ...
    def verify(self, rows: int, length: int) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """No KV cache: every forward computes all `rows` x `length` tokens again, padded to the longest row.

    Its launches and its arithmetic are added: a fixed cost a layer, the host's.
    """

    pair: Pair
    layer_s: float  # host time to launch one layer
    flops_per_s: float

    def draft(self, rows: int, length: int) -> list[float]:
        """One forward per draft token, each over one more token."""
        draft = self.pair.draft
        flops = 2 * (draft.layer_params + draft.head_params) * rows / self.flops_per_s
        return [draft.layers * self.layer_s + flops * (length + i) for i in range(K)]

    def verify(self, rows: int, length: int) -> list[float]:
        """One forward over the sequence and its drafts."""
        target = self.pair.target
        flops = 2 * (target.layer_params + target.head_params) * rows / self.flops_per_s
        return [target.layers * self.layer_s + flops * (length + K)]


@dataclass(frozen=True, slots=True)
class Cached:
    """With a KV cache and short sequences every forward at batch 1 takes the same time: it reads the weights."""

    draft_s: float
    target_s: float

    def draft(self, rows: int, length: int) -> list[float]:
        assert rows == 1, "nothing was batched"
        return [self.draft_s] * K

    def verify(self, rows: int, length: int) -> list[float]:
        """Two forwards: the drafts are checked, then the correction enters the cache."""
        assert rows == 1, "nothing was batched"
        return [self.target_s] * 2

    def prefill(self) -> list[float]:
        """Both models prefill the prompt."""
        return [self.draft_s, self.target_s]


class PublishedProgram:
    """A published program: its threads, one GPU stream, and the requests that wait to be admitted."""

    def __init__(self, env: simpy.Environment, jobs: Sequence[PublishedJob], free_s: float = 0.0) -> None:
        self.env = env
        self.free_s = free_s  # when the stream has nothing more to do
        self.waiting: deque[PublishedJob] = deque()
        self.arriving = True  # more requests may come
        self.news = env.event()  # what a thread with nothing to do waits for
        env.process(self.arrivals(jobs))  # before the threads: what arrives at 0 waits when they start
        for thread in self.threads():
            env.process(thread)

    def threads(self) -> list[Process]:
        raise NotImplementedError

    def arrivals(self, jobs: Sequence[PublishedJob]) -> Process:
        """Submit each job when it arrives."""
        for job in jobs:
            if job.arrival_s > self.env.now:
                yield self.env.timeout(job.arrival_s - self.env.now)
            self.waiting.append(job)
            self.notify()
        self.arriving = False

    def notify(self) -> None:
        """Something changed: wake the threads that have nothing to do."""
        news, self.news = self.news, self.env.event()
        news.succeed()

    def run(self, seconds: float) -> Event:
        """An event for the end of a forward submitted now: forwards run one at a time, in the order of submission."""
        self.free_s = max(self.env.now, self.free_s) + seconds
        return self.env.timeout(self.free_s - self.env.now)
