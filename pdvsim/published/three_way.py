"""The `three_way` and `model_comparison` tables: programs that compute whole sequences again and again; calibrated.

One forward constant, the host's time per layer, and the data sheet's fp32 rate give every forward of any length and
batch. The rest is the workload (which requests, in which order) and what four threads gain over one. "Prefill" is
tokenisation and takes no time here.

Not modelled: prompts of unlike lengths (about 6 to 12 tokens; here 9), which move a request's time by a few percent;
the threads' own scheduling, other than that one forward runs at a time.

The `model_comparison` table: two of these programs on three pairs. They say what differs: bf16 instead of fp32, and
requests that arrive at 2 and 5 per second instead of all at the start. They do not say which machine they ran on, so
the host's time per layer is calibrated again, on one figure. Nothing else is fitted: with bf16 the GPU waits for the
host, so four requests in one forward cost about as much as one, and four threads, which share the interpreter lock,
gain nothing over one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal, cast

import numpy as np
import simpy

from pdvsim.published.program import (
    Process,
    PublishedJob,
    PublishedProgram,
    Score,
    WholeSequence,
    even_rounds,
    legacy_arrivals,
)
from pdvsim.published.tables import (
    THREE_WAY_PAIR,
    CalibratedModel,
    Constant,
    Key,
    Mix,
    Published,
    TableRow,
    five_requests,
    many_requests,
    tokens_and_rounds,
)
from pdvsim.sim.models.presets import pair

ThreeWay = Literal["baseline", "pd", "pdv"]

PROGRAMS: dict[ThreeWay, tuple[int, int]] = {"baseline": (4, 1), "pd": (1, 1), "pdv": (1, 4)}  # workers, batch size
FP32_FLOPS_PER_S = 19.5e12  # A100's data sheet, without tensor cores: PyTorch's default for fp32
PROMPT_TOKENS = 9  # published: about 6 to 12
OUTPUT_TOKENS = 100
SINGLE, FIVE = 1, 3  # the "concurrency" of the rows of one and of five requests


@dataclass(frozen=True, slots=True)
class ThreeWayConfig:
    """What the three programs share."""

    forwards: WholeSequence
    overlap_s: float = 0.0  # of a forward, overlapped with another worker's: what the interpreter lock leaves
    first_use_s: float = 0.0  # before the first forward of a process that was not warmed up


def run_three_way(program: ThreeWay, jobs: list[PublishedJob], config: ThreeWayConfig) -> None:
    """Run the jobs, in the order of their arrivals, to their end."""
    env = simpy.Environment()
    ThreeWayProgram(env, jobs, config, *PROGRAMS[program])
    env.run()


class ThreeWayProgram(PublishedProgram):
    """Worker threads that share the stream and one lock, each with a batch that it serves to its end.

    The published lanes have strict priorities, decode before verify before prefill. So pd and pdv admit requests only
    when none is left to decode or verify, and pdv's batches are static.
    """

    def __init__(
        self, env: simpy.Environment, jobs: list[PublishedJob], config: ThreeWayConfig, workers: int, batch: int
    ) -> None:
        self.config, self.workers, self.batch = config, workers, batch
        self.busy = 0
        super().__init__(env, jobs, config.first_use_s)

    def threads(self) -> list[Process]:
        return [self.loop() for _ in range(self.workers)]

    def loop(self) -> Process:
        forwards = self.config.forwards
        while True:
            if not self.waiting:
                yield self.news
                continue
            batch = [self.waiting.popleft() for _ in range(min(self.batch, len(self.waiting)))]
            self.busy += 1
            while batch:
                rows, length = len(batch), max(job.length for job in batch)
                for seconds in forwards.draft(rows, length) + forwards.verify(rows, length):
                    yield self.run(seconds - (self.config.overlap_s if self.busy > 1 else 0.0))
                for job in batch:
                    job.emit(self.env.now)
                    if job.over:
                        job.finish_s = self.env.now
                batch = [job for job in batch if not job.over]
            self.busy -= 1


def score_three_way(jobs: Sequence[PublishedJob]) -> Score:
    """The metrics of the three_way table; all requests complete."""
    latency_ms = [1e3 * (job.finish_s - job.arrival_s) for job in jobs]
    total_s = _total_s(jobs)
    marks = {f"request_latency_p{rank}": float(np.percentile(latency_ms, rank)) for rank in (50, 95, 99)}
    return {
        "total_time": total_s,
        "throughput": len(jobs) / total_s,
        "request_latency_mean": float(np.mean(latency_ms)),
        **marks,
        "request_latency_min": min(latency_ms),
        "request_latency_max": max(latency_ms),
    }


def served(arch: str, mix: Mix, config: ThreeWayConfig, arrivals_s: Sequence[float] = ()) -> list[PublishedJob]:
    """Requests of these tokens and rounds as a program served them, all submitted at 0 unless times are given."""
    times_s = arrivals_s or [0.0] * len(mix)
    jobs = [PublishedJob(at, even_rounds(*each), PROMPT_TOKENS) for at, each in zip(times_s, mix, strict=True)]
    run_three_way(cast(ThreeWay, arch), jobs, config)
    return jobs


def _total_s(jobs: Sequence[PublishedJob]) -> float:
    return max(job.finish_s for job in jobs)


def linear_solution(figure: Callable[[float], float], wanted: float) -> float:
    """Where a figure that is linear in a constant of some milliseconds has the wanted value."""
    low, high = figure(1e-3), figure(2e-3)
    return 1e-3 * (1 + (wanted - low) / (high - low))


def random_orders(mix: Mix, runs: int, seed: int) -> list[Mix]:
    """The same requests in `runs` random orders."""
    return [[mix[i] for i in np.random.default_rng([seed, run]).permutation(len(mix)).tolist()] for run in range(runs)]


class ThreeWayModel(CalibratedModel):
    """The three_way programs."""

    pair = pair("tinyllama-1.1b:llama-2-7b")

    def __init__(self, published: Published) -> None:
        super().__init__(published)
        self.layer_s = self._layer_s()
        self.first_use_s = self._first_use_s()
        self.five = self._five()
        self.overlap_s = self._overlap_s()

    def config(self, arch: str, requests: int) -> ThreeWayConfig:
        """The configuration of a row; only the first, of one request, met a process that was not warm."""
        warm = self._config(self.layer_s, self.overlap_s)
        return replace(warm, first_use_s=self.first_use_s[arch]) if requests == 1 else warm

    def mixes(self, arch: str, concurrency: int, requests: int, runs: int, seed: int) -> list[Mix]:
        """The requests of a row, in the order they were served or, where that is not known, in `runs` random ones."""
        acceptance = self.published.acceptance((THREE_WAY_PAIR, arch, concurrency))
        if requests == 1:
            return [[tokens_and_rounds(acceptance["mean"], OUTPUT_TOKENS)]]
        if requests == 5:
            return [self.five[arch]]
        mix = many_requests(acceptance, requests, OUTPUT_TOKENS)
        return random_orders(mix, runs, seed)

    def _key(self, arch: str, concurrency: int, metric: str) -> Key:
        return Key("three_way", THREE_WAY_PAIR, arch, concurrency, metric)

    def _config(self, layer_s: float, overlap_s: float = 0.0) -> ThreeWayConfig:
        return ThreeWayConfig(WholeSequence(self.pair, layer_s, FP32_FLOPS_PER_S), overlap_s)

    def _layer_s(self) -> float:
        """Host time per layer that gives pdv's single request its latency."""
        key = self._key("pdv", SINGLE, "request_latency_mean")
        acceptance = self.published.input(self._key("pdv", SINGLE, "acceptance_mean"))
        mix = [tokens_and_rounds(acceptance, OUTPUT_TOKENS)]
        value = linear_solution(
            lambda s: _total_s(served("pdv", mix, self._config(s))), self.published.calibrate(key) / 1e3
        )
        meaning = "host time to launch one transformer layer (fp32, eager)"
        return self.constant("layer_s", value, meaning, key)

    def _first_use_s(self) -> dict[str, float]:
        """Seconds of the first programs of a process that was not warmed up, over the last one's time."""
        keys = {arch: self._key(arch, SINGLE, "request_latency_mean") for arch in ("baseline", "pd", "pdv")}
        warm_ms = self.published.calibrate(keys["pdv"])
        costs = {arch: (self.published.calibrate(key) - warm_ms) / 1e3 for arch, key in keys.items()}
        for arch in ("baseline", "pd"):
            meaning = f"no warm-up: first use of the GPU, paid by {arch}'s single request"
            self.constant(f"first_use_{arch}_s", costs[arch], meaning, keys[arch])
        return costs

    def _five(self) -> dict[str, Mix]:
        """The five requests of the second row, in their order.

        pdv's last one is alone in its batch, unpadded, so its acceptance is pd's: that names the fifth. The order of
        the other four is the one under which pd, first come, first served, gives its least, median and mean latency.
        """
        mixes = {
            arch: five_requests(self.published.acceptance((THREE_WAY_PAIR, arch, FIVE)), OUTPUT_TOKENS)
            for arch in ("pd", "pdv")
        }
        [last] = set(mixes["pd"]) & set(mixes["pdv"])  # the one request that both rows share
        marks = ("request_latency_min", "request_latency_p50", "request_latency_mean")
        keys = {mark: self._key("pd", FIVE, mark) for mark in marks}
        wanted = {mark: self.published.calibrate(key) for mark, key in keys.items()}
        config = self._config(self.layer_s)

        def distance(order: Mix) -> float:
            score = score_three_way(served("pd", [*order, last], config))
            return sum(math.log(score[mark] / wanted[mark]) ** 2 for mark in marks)

        rest = [request for request in mixes["pd"] if request != last]
        orders = [list(order) for order in dict.fromkeys(permutations(rest))]
        best = min(orders, key=distance)
        meaning = f"which of the {len(orders)} orders of the five requests was submitted"
        value = ", ".join(str(rounds) for _, rounds in [*best, last])
        self.constants.append(Constant("order", value, "rounds", meaning, tuple(keys.values())))
        alike = [request for request in mixes["pdv"] if request != last]
        return {"baseline": [*best, last], "pd": [*best, last], "pdv": [*alike, last]}

    def _overlap_s(self) -> float:
        """Seconds that a forward of four workers saves over one worker's, from five requests' totals."""
        keys = {arch: self._key(arch, FIVE, "total_time") for arch in ("pd", "baseline")}
        alone_s, shared_s = (self.published.calibrate(key) for key in keys.values())

        def saved_s(overlap_s: float) -> float:
            return -_total_s(served("baseline", self.five["baseline"], self._config(self.layer_s, overlap_s)))

        value = linear_solution(saved_s, saved_s(0.0) + alone_s - shared_s)
        meaning = "part of a forward hidden by another worker's: the overlap that the interpreter lock allows"
        return self.constant("overlap_s", value, meaning, *keys.values())

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        _, arch, concurrency, requests = row
        mixes, config = self.mixes(arch, concurrency, requests, runs, seed), self.config(arch, requests)
        return [score_three_way(served(arch, mix, config)) for mix in mixes]


# the comparison of models ---------------------------------------------------------------------------------------------


COMPARISON = "model_comparison"
PAIRS = {
    THREE_WAY_PAIR: "tinyllama-1.1b:llama-2-7b",
    "Qwen2-1.5B->Qwen2-7B": "qwen2-1.5b:qwen2-7b",
    "gemma-2b->gemma-7b": "gemma-2b:gemma-7b",
}
BF16_FLOPS_PER_S = 312e12  # A100's data sheet, tensor cores
RATES_PER_S = {5: 2.0, 20: 5.0}  # of arrivals, by the number of requests
SAME_PROMPT = 0, 3  # of five requests: the programs' seed gives these two the same prompt


class ComparisonModel(CalibratedModel):
    """The programs of the model comparison."""

    def __init__(self, published: Published) -> None:
        super().__init__(published)
        self.layer_s = self._layer_s()

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        return self._scores(row, self.layer_s, runs, seed)

    def mixes(self, row: TableRow, runs: int, seed: int) -> list[Mix]:
        """The requests of a row, in at most `runs` orders: of five, those they can have had; of more, random ones."""
        name, arch, concurrency, requests = row
        if requests != 5:
            acceptance = self.published.acceptance((name, arch, concurrency), COMPARISON)
            return random_orders(many_requests(acceptance, requests, OUTPUT_TOKENS), runs, seed)
        baseline, pdv = (
            five_requests(self.published.acceptance((name, each, concurrency), COMPARISON), OUTPUT_TOKENS)
            for each in ("baseline", "pdv")
        )
        orders = possible_orders(baseline, pdv)[0 if arch == "baseline" else 1]
        return orders[:: math.ceil(len(orders) / runs)]

    def _scores(self, row: TableRow, layer_s: float, runs: int, seed: int) -> list[Score]:
        name, arch, _, requests = row
        config = ThreeWayConfig(WholeSequence(pair(PAIRS[name]), layer_s, BF16_FLOPS_PER_S))
        arrivals_s = legacy_arrivals(RATES_PER_S[requests], requests=requests)
        return [score_three_way(served(arch, mix, config, arrivals_s)) for mix in self.mixes(row, runs, seed)]

    def _layer_s(self) -> float:
        """Host time per layer that gives the three_way pair's five requests their mean latency under pdv.

        The first request outlasts the arrivals, so batches do not depend on it and latency is linear in it.
        """
        row = THREE_WAY_PAIR, "pdv", FIVE, 5
        key = Key(COMPARISON, *row[:3], "request_latency_mean")

        def latency_ms(layer_s: float) -> float:
            return float(np.mean([score[key.metric] for score in self._scores(row, layer_s, 1, 0)]))

        meaning = "host time to launch one transformer layer (bf16, eager), on the machine of this table"
        return self.constant("layer_s", linear_solution(latency_ms, self.published.calibrate(key)), meaning, key)


def possible_orders(baseline: Mix, pdv: Mix) -> tuple[list[Mix], list[Mix]]:
    """The orders that the five requests of both programs can have had.

    pdv serves its first request alone and unpadded, so both programs accept it alike. Where baseline, which pads
    nothing, accepts two requests alike, they are the two with the same prompt, the first among them.
    """
    shared = set(baseline) & set(pdv)
    twice = {request for request in shared if baseline.count(request) > 1}
    first = twice or shared
    one, other = SAME_PROMPT
    orders = [order for order in dict.fromkeys(permutations(baseline)) if order[one] in first]
    return (
        [list(order) for order in orders if not twice or order[one] == order[other]],
        [list(order) for order in dict.fromkeys(permutations(pdv)) if order[one] in first],
    )
