"""The published programs: their requests, the time of a forward, one GPU stream, and threads that wait and submit.

A round drafts K tokens and emits the accepted ones plus one correction; after full acceptance there is no bonus token,
so a round emits 1 to K. A request ends with the round that reaches its length, whatever that round emits beyond it.
The published "acceptance" is emitted / drafted, corrections included.

Not modelled: the tokens themselves, acceptance that changes along a request, attention, the spread of repeated
forwards, and the threads' own scheduling and queues, other than that one forward runs at a time.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray
from simpy.events import Event

from pdvsim.sim.models.specs import ModelSpec, Pair

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
    finish_s: float = math.nan  # when the program noticed that its last round was over; nan: not yet
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # time, tokens

    @property
    def over(self) -> bool:
        """Whether its last round is done."""
        return self.rounds == len(self.emits)

    def emit(self, now_s: float) -> None:
        """Emit the tokens of one round."""
        gained = self.emits[self.rounds]
        self.rounds += 1
        self.tokens += gained
        self.deliveries.append((now_s, gained))


def drawn_rounds(rng: np.random.Generator, coin: float, output_tokens: int) -> tuple[int, ...]:
    """Tokens of each round of a request up to its length, if each draft is accepted with chance `coin`."""
    uniform = rng.random(output_tokens)  # a round emits at least one token
    accepted = (uniform[:, None] < coin ** np.arange(1, K + 1)).sum(axis=1)
    emits = np.minimum(accepted + 1, K)
    last = int(np.searchsorted(emits.cumsum(), output_tokens))
    return tuple(emits[: last + 1].tolist())


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


@lru_cache
def coin_for(acceptance: float, output_tokens: int) -> float:
    """The chance of one draft under which requests show `acceptance` on average."""
    coins = np.linspace(0, 1, 1001)
    return float(np.interp(acceptance, mean_acceptance(coins, output_tokens), coins))


def legacy_arrivals(rate_per_s: float, window_s: float = math.inf, most: int = 1000) -> list[float]:
    """Arrival times as `np.random.seed(42)` and `np.random.exponential(1 / rate)` gave them, up to either limit."""
    arrivals_s = np.random.RandomState(42).exponential(1 / rate_per_s, most).cumsum()
    return arrivals_s[arrivals_s < window_s].tolist()  # type: ignore[no-any-return]


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """No KV cache: every forward computes all `rows` x `length` tokens again, padded to the longest row.

    Its launches and its arithmetic are added: a fixed cost per layer, the host's.
    """

    pair: Pair
    layer_s: float  # host time to launch one layer
    flops_per_s: float

    def round(self, rows: int, length: int) -> list[float]:
        """The forwards of a round: one per draft token, each over one more token, and the verify of all."""
        drafts = [self.forward(self.pair.draft, rows, length + i) for i in range(K)]
        return [*drafts, self.forward(self.pair.target, rows, length + K)]

    def forward(self, model: ModelSpec, rows: int, length: int) -> float:
        """Seconds of one forward of a batch whose longest row has that length."""
        flops = 2 * (model.layer_params + model.head_params) * rows / self.flops_per_s
        return model.layers * self.layer_s + flops * length


class Stream:
    """The GPU's one stream, with the requests that wait to be admitted and those that were."""

    def __init__(self, env: simpy.Environment, jobs: Sequence[PublishedJob], free_s: float) -> None:
        self.env = env
        self.free_s = free_s  # when the stream has nothing more to do
        self.active = 0  # requests, or batches, that were admitted and are not finished
        self.waiting: deque[PublishedJob] = deque()
        self.decoding: deque[PublishedJob] = deque()
        self.news = env.event()  # what a thread with nothing to do waits for
        env.process(self.arrivals(jobs))  # before the threads: what arrives at 0 waits when they start

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


@dataclass(frozen=True)
class StaticBatches:
    """Workers that share the stream and one lock, each with a batch that it serves to its end: `three_way`.

    The published lanes have strict priorities, decode before verify before prefill. So pd and pdv admit requests only
    when none is left to decode or verify, and pdv's batches are static.
    """

    forwards: WholeSequence
    workers: int
    batch: int
    overlap_s: float = 0.0  # of a forward, overlapped with another worker's: what the interpreter lock leaves
    first_use_s: float = 0.0  # before the first forward of a process that was not warmed up

    def threads(self, gpu: Stream) -> list[Process]:
        return [self.worker(gpu) for _ in range(self.workers)]

    def worker(self, gpu: Stream) -> Process:
        while True:
            if not gpu.waiting:
                yield gpu.news
                continue
            batch = [gpu.waiting.popleft() for _ in range(min(self.batch, len(gpu.waiting)))]
            gpu.active += 1
            while batch:
                rows, length = len(batch), max(job.prompt_tokens + job.tokens for job in batch)
                for seconds in self.forwards.round(rows, length):
                    yield gpu.run(seconds - (self.overlap_s if gpu.active > 1 else 0.0))
                for job in batch:
                    job.emit(gpu.env.now)
                    if job.over:
                        job.finish_s = gpu.env.now
                batch = [job for job in batch if not job.over]
            gpu.active -= 1


@dataclass(frozen=True)
class PoissonLanes:
    """A prefill thread admits while fewer than `limit` requests are active; a decode thread goes round all of them.

    `poisson_30s`, pd. With a KV cache and short sequences every forward at batch 1 takes the same time: it reads the
    weights.
    """

    limit: int  # the "concurrency" of the table
    draft_s: float
    target_s: float
    first_use_s = 0.0

    def threads(self, gpu: Stream) -> list[Process]:
        return [self.prefill_loop(gpu), self.decode_loop(gpu)]

    def prefill_loop(self, gpu: Stream) -> Process:
        while True:
            if gpu.waiting and gpu.active < self.limit:
                yield from self.prefill(gpu)
                gpu.notify()
            else:
                yield gpu.news

    def decode_loop(self, gpu: Stream) -> Process:
        while True:
            if gpu.decoding:
                yield from self.turn(gpu)
            else:
                yield gpu.news

    def prefill(self, gpu: Stream) -> Process:
        """Admit one request: both models prefill the prompt."""
        gpu.active += 1
        job = gpu.waiting.popleft()
        yield from self.submit(gpu, [self.draft_s, self.target_s])
        gpu.decoding.append(job)

    def turn(self, gpu: Stream) -> Process:
        """Up to `limit` requests get one round each, one after the other; those unfinished queue up again.

        A round is its drafts, and two forwards of the target: the drafts are checked, then the correction enters the
        cache. A request counts as completed when the turn that gave it its last round is over.
        """
        batch = [gpu.decoding.popleft() for _ in range(min(self.limit, len(gpu.decoding)))]
        for job in batch:
            yield from self.submit(gpu, [self.draft_s] * K + [self.target_s] * 2)
            job.emit(gpu.env.now)
        for job in batch:
            if job.over:
                job.finish_s = gpu.env.now
                gpu.active -= 1
                gpu.notify()
            else:
                gpu.decoding.append(job)

    def submit(self, gpu: Stream, forwards: list[float]) -> Process:
        """Forwards one after the other; another thread's may come between."""
        for seconds in forwards:
            yield gpu.run(seconds)


class PoissonUnified(PoissonLanes):
    """One thread: a turn admits at most one request while fewer than `limit` queue to decode, then goes round all.

    `poisson_30s`, pdv-unified. With one admission per turn, the requests in flight limit themselves to about the rounds
    a request needs.
    """

    def threads(self, gpu: Stream) -> list[Process]:
        return [self.loop(gpu)]

    def loop(self, gpu: Stream) -> Process:
        while True:
            if gpu.waiting and len(gpu.decoding) < self.limit:
                yield from self.prefill(gpu)
            if gpu.decoding:
                yield from self.turn(gpu)
            else:
                yield gpu.news

    def submit(self, gpu: Stream, forwards: list[float]) -> Process:
        """Forwards as one event: there is no other thread."""
        yield gpu.run(sum(forwards))


def serve(
    program: StaticBatches | PoissonLanes, jobs: list[PublishedJob], cutoff_s: float | None = None
) -> list[PublishedJob]:
    """Let the jobs, in the order of their arrivals, arrive and be served, up to the cut-off; returns them."""
    env = simpy.Environment()
    gpu = Stream(env, jobs, program.first_use_s)
    for thread in program.threads(gpu):
        env.process(thread)
    env.run(cutoff_s)
    return jobs


def score(jobs: Sequence[PublishedJob], cutoff_s: float = math.nan) -> Score:
    """The metrics of all tables; latencies are those of completed requests, nan where nothing completed.

    poisson_30s counts tokens of completed requests over the time of the last completion, or over the cut-off if any
    request was unfinished then: what that had received counts for nothing.
    """
    done = [job for job in jobs if not math.isnan(job.finish_s)]
    end_s = max(job.finish_s for job in done) if len(done) == len(jobs) else cutoff_s
    latency_ms = [1e3 * (job.finish_s - job.arrival_s) for job in done] or [math.nan]
    since_start_ms = [
        1e3 * (time_s - job.arrival_s) for job in done for time_s, tokens in job.deliveries for _ in range(tokens)
    ]
    mean_ms, (p50, p99) = float(np.mean(latency_ms)), np.percentile(since_start_ms or [math.nan], (50, 99)).tolist()
    return {
        "completions": len(done),
        "total_time": end_s,
        "throughput": len(jobs) / end_s,
        "throughput_completed_only": sum(job.tokens for job in done) / end_s,
        "throughput_all_tokens": sum(job.tokens for job in jobs) / end_s,
        "acceptance_completed": float(np.mean([job.tokens / (K * job.rounds) for job in done])) if done else math.nan,
        "request_latency_mean": mean_ms,
        "request_latency_mean_completed_only": mean_ms,
        "request_latency_min": min(latency_ms),
        "request_latency_max": max(latency_ms),
        **{f"request_latency_p{rank}": float(np.percentile(latency_ms, rank)) for rank in (50, 95, 99)},
        "token_latency_p50_since_request_start": p50,
        "token_latency_p99_since_request_start": p99,
    }
