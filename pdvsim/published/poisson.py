"""The `poisson_30s` table: its two programs, every forward at batch 1 in a Python loop on one stream; calibrated.

A verifier forward reads 34 billion weights at the data sheet's bandwidth. One draft time per labelled pair (three runs
of the same models, on hosts that were not equally fast) is what the lone request's latency leaves. A request counts as
completed when the turn that gave it its last round is over. The table counts tokens of completed requests over the time
of the last completion, or over the cut-off if any request was unfinished then: what that had received counts for
nothing.

Not modelled: the interpreter lock between pd's two threads, the time that queues take, and what the prompts were;
rounds are drawn with one coin per row.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from typing import Literal, cast

import numpy as np
import simpy

from pdvsim.published.program import (
    Cached,
    K,
    Process,
    PublishedJob,
    PublishedProgram,
    Score,
    coin_for,
    drawn_rounds,
    legacy_arrivals,
)
from pdvsim.published.tables import POISSON_PAIRS, CalibratedModel, Key, Published, TableRow, tokens_and_rounds
from pdvsim.sim.models.presets import model

Poisson = Literal["pd", "pdv-unified"]

BANDWIDTH_BYTES_PER_S = 2.039e12  # A100-80GB's data sheet
OUTPUT_TOKENS = 20
WINDOW_S = 30.0
CUTOFF_S = 60.0
RATE_PER_CONCURRENCY = 0.05
SINGLE = (1, 2)  # the "concurrency" of the rows of one request, the same request in both
SETTLED = "pdv-unified"  # ran second: its single request varies by 2% to 4% between those rows, pd's by 19% to 28%
ALL_COMPLETED = 16  # the last row in which every request completed
LAST_SOUND = 32  # pd: beyond it acceptance is the mean of a handful of lucky requests


def run_poisson(
    program: Poisson, jobs: list[PublishedJob], limit: int, forwards: Cached, cutoff_s: float = math.inf
) -> None:
    """Let the jobs arrive and serve them, up to the cut-off; `limit` is the "concurrency" of the table."""
    env = simpy.Environment()
    {"pd": PoissonPd, "pdv-unified": PoissonUnified}[program](env, jobs, limit, forwards)
    env.run(None if math.isinf(cutoff_s) else cutoff_s)


class PoissonProgram(PublishedProgram):
    """A queue of requests to decode, and turns over it."""

    def __init__(self, env: simpy.Environment, jobs: list[PublishedJob], limit: int, forwards: Cached) -> None:
        super().__init__(env, jobs)
        self.limit = limit
        self.forwards = forwards
        self.decoding: deque[PublishedJob] = deque()

    def prefill(self) -> Process:
        """Admit one request."""
        job = self.waiting.popleft()
        yield from self.submit(self.forwards.prefill)
        self.decoding.append(job)

    def turn(self) -> Process:
        """Up to `limit` requests get one round each, one after the other; those unfinished queue up again."""
        batch = [self.decoding.popleft() for _ in range(min(self.limit, len(self.decoding)))]
        for job in batch:
            yield from self.submit(self.forwards.round)
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
            yield self.run(seconds)

    def finished(self, job: PublishedJob) -> None:
        """A request has left."""


class PoissonPd(PoissonProgram):
    """A prefill thread admits while fewer than `limit` requests are active; a decode thread goes round all of them."""

    active = 0

    def threads(self) -> list[Process]:
        return [self.prefill_loop(), self.decode_loop()]

    def prefill_loop(self) -> Process:
        while True:
            if self.waiting and self.active < self.limit:
                self.active += 1
                yield from self.prefill()
                self.notify()
            else:
                yield self.news

    def decode_loop(self) -> Process:
        while True:
            if self.decoding:
                yield from self.turn()
            else:
                yield self.news

    def finished(self, job: PublishedJob) -> None:
        self.active -= 1
        self.notify()


class PoissonUnified(PoissonProgram):
    """One thread: a turn admits at most one request while fewer than `limit` queue to decode, then goes round all.

    With one admission per turn, the requests in flight limit themselves to about the rounds a request needs.
    """

    def threads(self) -> list[Process]:
        return [self.loop()]

    def submit(self, forwards: list[float]) -> Process:
        """Forwards as one event: there is no other thread."""
        yield self.run(sum(forwards))

    def loop(self) -> Process:
        while True:
            if self.waiting and len(self.decoding) < self.limit:
                yield from self.prefill()
            if self.decoding:
                yield from self.turn()
            else:
                yield self.news


def score_poisson(jobs: Sequence[PublishedJob], cutoff_s: float) -> Score:
    """The metrics of the poisson_30s table; latencies are nan where nothing completed."""
    done = [job for job in jobs if job.completed]
    end_s = max(job.finish_s for job in done) if len(done) == len(jobs) else cutoff_s
    since_start_ms = [
        1e3 * (time_s - job.arrival_s) for job in done for time_s, tokens in job.deliveries for _ in range(tokens)
    ]
    p50, p99 = np.percentile(since_start_ms, (50, 99)).tolist() if since_start_ms else (np.nan, np.nan)
    return {
        "completions": len(done),
        "throughput_completed_only": sum(job.tokens for job in done) / end_s,
        "request_latency_mean_completed_only": (
            1e3 * float(np.mean([job.finish_s - job.arrival_s for job in done])) if done else np.nan
        ),
        "token_latency_p50_since_request_start": p50,
        "token_latency_p99_since_request_start": p99,
        "acceptance_completed": float(np.mean([job.acceptance for job in done])) if done else np.nan,
        "throughput_all_tokens": sum(job.tokens for job in jobs) / end_s,
    }


class PoissonModel(CalibratedModel):
    """The poisson_30s programs."""

    target = model("codellama-34b")  # under all three labels: see the GPU memory column

    def __init__(self, published: Published) -> None:
        super().__init__(published)
        self.target_s = self.target.weight_bytes / BANDWIDTH_BYTES_PER_S
        self.forwards = {label: Cached(self._draft_s(label), self.target_s) for label in POISSON_PAIRS}
        self._coins: dict[tuple[str, str, int], float] = {}

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        label, name, concurrency, _ = row
        arch = cast(Poisson, name)
        coin = self.coin(label, arch, concurrency, runs, seed)
        return poisson_scores(arch, concurrency, coin, self.forwards[label], runs, seed)

    def coin(self, label: str, arch: Poisson, concurrency: int, runs: int, seed: int) -> float:
        """The chance of a draft under which the requests that complete show the row's published acceptance.

        The quick ones complete, so all requests together are accepted less than those: one step corrects for it.
        """
        row = min(concurrency, LAST_SOUND) if arch == "pd" else concurrency
        if (label, arch, row) not in self._coins:
            wanted = self.published.input(Key("poisson_30s", label, arch, row, "acceptance_mean"))
            coin = coin_for(wanted, OUTPUT_TOKENS)
            if row > ALL_COMPLETED:
                first = poisson_scores(arch, row, coin, self.forwards[label], runs, seed)
                shown = float(np.mean([score["acceptance_completed"] for score in first]))
                coin = coin_for(wanted * wanted / shown, OUTPUT_TOKENS)
            self._coins[label, arch, row] = coin
        return self._coins[label, arch, row]

    def _draft_s(self, label: str) -> float:
        """One draft forward: what the lone request took beyond the verifier's, over the drafts it needed."""
        keys = tuple(Key("poisson_30s", label, SETTLED, c, "request_latency_mean_completed_only") for c in SINGLE)
        latency_s = sum(map(self.published.calibrate, keys)) / len(keys) / 1e3
        acceptance = self.published.input(Key("poisson_30s", label, SETTLED, SINGLE[0], "acceptance_mean"))
        rounds = tokens_and_rounds(acceptance, OUTPUT_TOKENS)[1]
        value = (latency_s - (1 + 2 * rounds) * self.target_s) / (1 + K * rounds)
        return self.constant("draft_s", value, f"one draft forward, {label}", *keys)


def poisson_jobs(concurrency: int, coin: float, seed: int) -> list[PublishedJob]:
    """The requests of a row: the published arrivals, and rounds drawn from `seed`."""
    rng = np.random.default_rng(seed)
    arrivals = legacy_arrivals(RATE_PER_CONCURRENCY * concurrency, WINDOW_S)
    return [PublishedJob(arrival_s, drawn_rounds(rng, coin, OUTPUT_TOKENS)) for arrival_s in arrivals]


def poisson_scores(arch: Poisson, concurrency: int, coin: float, forwards: Cached, runs: int, seed: int) -> list[Score]:
    """A row as published, once per replication."""
    scores = []
    for run in range(runs):
        jobs = poisson_jobs(concurrency, coin, seed + run)
        run_poisson(arch, jobs, concurrency, forwards, CUTOFF_S)
        scores.append(score_poisson(jobs, CUTOFF_S))
    return scores
