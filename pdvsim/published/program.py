"""What the published programs share: requests, the time of a forward, one GPU stream, and threads that wait.

A round drafts K tokens and emits the accepted ones plus one correction; after full acceptance there is no bonus token,
so a round emits 1 to K. A request ends with the round that reaches its length, whatever that round emits beyond it.
The published "acceptance" is emitted / drafted, corrections included.

Not modelled: the tokens themselves, acceptance that changes along a request, attention, and the spread of repeated
forwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import Event

from pdvsim.sim.models.specs import Pair

Floats = NDArray[np.float64]
Process = Generator[Event, Any, None]
Score = dict[str, float]  # metrics of a run, by name

K = 4  # draft length, in all published runs


@dataclass(slots=True)
class PublishedJob:
    """One request: arrival, tokens per round, and progress."""

    arrival_s: float
    emits: tuple[int, ...]
    prompt_tokens: int = 0
    rounds: int = 0
    tokens: int = 0
    finish_s: float = math.nan
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # time, tokens

    @property
    def length(self) -> int:
        """Tokens of the sequence so far."""
        return self.prompt_tokens + self.tokens

    @property
    def over(self) -> bool:
        """Whether its last round is done; it counts as completed once the program notices (`finish_s`)."""
        return self.rounds == len(self.emits)

    @property
    def completed(self) -> bool:
        return not math.isnan(self.finish_s)

    @property
    def acceptance(self) -> float:
        """Emitted over drafted so far, as published."""
        return self.tokens / (K * self.rounds)

    def emit(self, now_s: float) -> None:
        """Emit the tokens of one round."""
        gained = self.emits[self.rounds]
        self.rounds += 1
        self.tokens += gained
        self.deliveries.append((now_s, gained))


def emitted(accepted: int) -> int:
    """Tokens of a round: the accepted drafts and one correction, but nothing beyond the drafts."""
    return min(accepted + 1, K)


def drawn_rounds(rng: np.random.Generator, coin: float, output_tokens: int) -> tuple[int, ...]:
    """Tokens of each round of a request up to its length, if each draft is accepted with chance `coin`."""
    emits: list[int] = []
    left = output_tokens
    for uniform in rng.random(output_tokens).tolist():  # a round emits at least one token
        accepted = 0
        while accepted < K and uniform < coin ** (accepted + 1):
            accepted += 1
        emits.append(emitted(accepted))
        left -= emits[-1]
        if left <= 0:
            break
    return tuple(emits)


def even_rounds(tokens: int, rounds: int) -> tuple[int, ...]:
    """`tokens` spread over `rounds` as evenly as whole tokens go."""
    if not rounds <= tokens <= K * rounds:
        raise ValueError(f"{rounds} rounds emit {rounds} to {K * rounds} tokens, not {tokens}")
    return tuple((i + 1) * tokens // rounds - i * tokens // rounds for i in range(rounds))


def mean_acceptance(coin: Floats, output_tokens: int) -> Floats:
    """Mean over requests of emitted / drafted, exactly: a request that was lucky drafted less and ends sooner."""
    chances = [(1 - coin) * coin**n for n in range(K - 1)] + [coin ** (K - 1)]  # of 1..K tokens
    alive = {0: np.ones_like(coin)}  # chance of having emitted this number of tokens
    mean = np.zeros_like(coin)
    for rounds in range(1, output_tokens + 1):
        after: dict[int, Floats] = {}
        for tokens, chance in alive.items():
            for gained, share in enumerate(chances, 1):
                total = tokens + gained
                if total >= output_tokens:
                    mean = mean + chance * share * total / (K * rounds)
                else:
                    after[total] = after.get(total, 0.0) + chance * share
        alive = after
    return mean


def coin_for(acceptance: float, output_tokens: int) -> float:
    """The chance of one draft under which requests show `acceptance` on average."""
    coins, shown = _shown(output_tokens)
    return float(np.interp(acceptance, shown, coins))


@lru_cache
def _shown(output_tokens: int) -> tuple[Floats, Floats]:
    coins = np.linspace(0, 1, 1001)
    return coins, mean_acceptance(coins, output_tokens)


def legacy_arrivals(rate_per_s: float, window_s: float = math.inf, requests: int | None = None) -> list[float]:
    """Arrival times as `np.random.seed(42)` and `np.random.exponential(1 / rate)` gave them, up to either limit."""
    return list(islice(_gaps(np.random.RandomState(42), rate_per_s, window_s), requests))


def _gaps(rng: np.random.RandomState, rate_per_s: float, window_s: float) -> Iterator[float]:
    now_s = float(rng.exponential(1 / rate_per_s))
    while now_s < window_s:
        yield now_s
        now_s += float(rng.exponential(1 / rate_per_s))


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """No KV cache: every forward computes all `rows` x `length` tokens again, padded to the longest row.

    Its launches and its arithmetic are added: a fixed cost per layer, the host's.
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

    @property
    def prefill(self) -> list[float]:
        """Both models prefill the prompt."""
        return [self.draft_s, self.target_s]

    @property
    def round(self) -> list[float]:
        """Drafts, and two forwards of the target: the drafts are checked, then the correction enters the cache."""
        return [self.draft_s] * K + [self.target_s] * 2


class PublishedProgram:
    """A published program: its threads, one GPU stream, and the requests that wait to be admitted."""

    def __init__(self, env: simpy.Environment, jobs: Sequence[PublishedJob], free_s: float = 0.0) -> None:
        self.env = env
        self.free_s = free_s  # when the stream has nothing more to do
        self.waiting: deque[PublishedJob] = deque()
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

    def notify(self) -> None:
        """Something changed: wake the threads that have nothing to do."""
        news, self.news = self.news, self.env.event()
        news.succeed()

    def run(self, seconds: float) -> Event:
        """An event for the end of a forward submitted now: forwards run one at a time, in the order of submission."""
        self.free_s = max(self.env.now, self.free_s) + seconds
        return self.env.timeout(self.free_s - self.env.now)
