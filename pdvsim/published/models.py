"""The published tables as programs with settings: which requests there were, and constants solved from a few cells.

`three_way` (baseline, pd, pdv): programs that compute whole sequences again and again. One forward constant, the host's
time per layer, and the data sheet's fp32 rate give every forward of any length and batch. The rest is the workload
(which requests, in which order) and what four threads gain over one. "Prefill" is tokenisation and takes no time here.
Not modelled: prompts of unlike lengths (about 6 to 12 tokens; here 9), which move a request's time by a few percent.

`model_comparison`: two of these programs on three pairs. They say what differs: bf16 instead of fp32, and requests that
arrive at 2 and 5 per second instead of all at the start. They do not say which machine they ran on, so the host's time
per layer is calibrated again, on one figure. Nothing else is fitted: with bf16 the GPU waits for the host, so four
requests in one forward cost about as much as one, and four threads, which share the interpreter lock, gain nothing.

`poisson_30s` (pd, pdv-unified): every forward at batch 1 in a Python loop. A verifier forward reads 34 billion weights
at the data sheet's bandwidth. One draft time per labelled pair (three runs of the same models, on hosts that were not
equally fast) is what the lone request's latency leaves. Not modelled: what the prompts were; rounds are drawn with one
coin per row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import permutations
from typing import Any

import numpy as np

from pdvsim.published.program import (
    K,
    PoissonLanes,
    PoissonUnified,
    PublishedJob,
    Score,
    StaticBatches,
    WholeSequence,
    coin_for,
    drawn_rounds,
    even_rounds,
    legacy_arrivals,
    score,
    serve,
)
from pdvsim.published.tables import (
    POISSON_PAIRS,
    THREE_WAY_PAIR,
    Constant,
    Key,
    Mix,
    Published,
    TableRow,
    five_requests,
    many_requests,
    tokens_and_rounds,
)
from pdvsim.sim.models.presets import model, pair

PAIRS = {
    THREE_WAY_PAIR: "tinyllama-1.1b:llama-2-7b",
    "Qwen2-1.5B->Qwen2-7B": "qwen2-1.5b:qwen2-7b",
    "gemma-2b->gemma-7b": "gemma-2b:gemma-7b",
}
BATCHES = {"baseline": (4, 1), "pd": (1, 1), "pdv": (1, 4)}  # workers, batch size
FP32_FLOPS_PER_S = 19.5e12  # A100's data sheet, without tensor cores: PyTorch's default for fp32
BF16_FLOPS_PER_S = 312e12  # the same, tensor cores
PROMPT_TOKENS = 9  # published: about 6 to 12
OUTPUT_TOKENS = 100
SINGLE, FIVE = 1, 3  # the "concurrency" of the rows of one and of five requests
RATES_PER_S = {5: 2.0, 20: 5.0}  # of arrivals, by the number of requests: model_comparison
SAME_PROMPT = 0, 3  # of five requests: the programs' seed gives these two the same prompt

LANES: dict[str, type[PoissonLanes]] = {"pd": PoissonLanes, "pdv-unified": PoissonUnified}
BANDWIDTH_BYTES_PER_S = 2.039e12  # A100-80GB's data sheet
POISSON_TOKENS = 20
WINDOW_S, CUTOFF_S = 30.0, 60.0
RATE_PER_CONCURRENCY = 0.05
LONE = (1, 2)  # the "concurrency" of the rows of one request, the same request in both
SETTLED = "pdv-unified"  # ran second: its single request varies by 2% to 4% between those rows, pd's by 19% to 28%
ALL_COMPLETED = 16  # the last row in which every request completed
LAST_SOUND = 32  # pd: beyond it acceptance is the mean of a handful of lucky requests


class CalibratedModel:
    """The programs of a table, with constants that are calibrated on published figures."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.constants: list[Constant] = []

    def constant(self, name: str, value: float, meaning: str, *cells: Key) -> float:
        """Record a constant in seconds, calibrated on these figures; returns its value."""
        self.constants.append(Constant(name, value, "s", meaning, cells))
        return value

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        """A row as published, once per replication or order of its requests."""
        raise NotImplementedError


def linear_solution(figure: Callable[[float], float], wanted: float) -> float:
    """Where a figure that is linear in a constant of some milliseconds has the wanted value."""
    low, high = figure(1e-3), figure(2e-3)
    return 1e-3 * (1 + (wanted - low) / (high - low))


def batches(arch: str, name: str, layer_s: float, flops_per_s: float, **more: Any) -> StaticBatches:
    """A program without a KV cache, on a published pair."""
    return StaticBatches(WholeSequence(pair(PAIRS[name]), layer_s, flops_per_s), *BATCHES[arch], **more)


def served(program: StaticBatches, mix: Mix, arrivals_s: Sequence[float] = ()) -> list[PublishedJob]:
    """Requests of these tokens and rounds as a program served them, all submitted at 0 unless times are given."""
    times_s = arrivals_s or [0.0] * len(mix)
    jobs = [PublishedJob(at, even_rounds(*each), PROMPT_TOKENS) for at, each in zip(times_s, mix, strict=True)]
    return serve(program, jobs)


def random_orders(mix: Mix, runs: int, seed: int) -> list[Mix]:
    """The same requests in `runs` random orders."""
    return [[mix[i] for i in np.random.default_rng([seed, run]).permutation(len(mix)).tolist()] for run in range(runs)]


class ThreeWayModel(CalibratedModel):
    """The three_way programs."""

    def __init__(self, published: Published) -> None:
        super().__init__(published)
        self.overlap_s, self.first_use_s = 0.0, dict[str, float]()
        self.layer_s = self._layer_s()
        self.first_use_s = self._first_use_s()
        self.five = self._five()
        self.overlap_s = self._overlap_s()

    def program(self, arch: str, requests: int, **changed: Any) -> StaticBatches:
        """The program of a row; only the first row, of one request, met a process that was not warm."""
        first_use_s = self.first_use_s.get(arch, 0.0) if requests == 1 else 0.0
        known = {"layer_s": getattr(self, "layer_s", 0.0), "overlap_s": self.overlap_s, "first_use_s": first_use_s}
        return batches(arch, THREE_WAY_PAIR, flops_per_s=FP32_FLOPS_PER_S, **(known | changed))

    def mixes(self, arch: str, concurrency: int, requests: int, runs: int, seed: int) -> list[Mix]:
        """The requests of a row, in the order they were served or, where that is not known, in `runs` random ones."""
        acceptance = self.published.acceptance((THREE_WAY_PAIR, arch, concurrency))
        if requests == 1:
            return [[tokens_and_rounds(acceptance["mean"], OUTPUT_TOKENS)]]
        if requests == 5:
            return [self.five[arch]]
        return random_orders(many_requests(acceptance, requests, OUTPUT_TOKENS), runs, seed)

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        _, arch, concurrency, requests = row
        mixes = self.mixes(arch, concurrency, requests, runs, seed)
        return [score(served(self.program(arch, requests), mix)) for mix in mixes]

    def _key(self, arch: str, concurrency: int, metric: str) -> Key:
        return Key("three_way", THREE_WAY_PAIR, arch, concurrency, metric)

    def _layer_s(self) -> float:
        """Host time per layer that gives pdv's single request its latency."""
        key = self._key("pdv", SINGLE, "request_latency_mean")
        mix = [tokens_and_rounds(self.published.input(self._key("pdv", SINGLE, "acceptance_mean")), OUTPUT_TOKENS)]
        value = linear_solution(
            lambda s: score(served(self.program("pdv", 1, layer_s=s), mix))[key.metric], self.published.calibrate(key)
        )
        return self.constant("layer_s", value, "host time to launch one transformer layer (fp32, eager)", key)

    def _first_use_s(self) -> dict[str, float]:
        """Seconds of the first programs of a process that was not warmed up, over the last one's time."""
        warm_ms = self.published.calibrate(self._key("pdv", SINGLE, "request_latency_mean"))
        costs = {}
        for arch in ("baseline", "pd"):
            key = self._key(arch, SINGLE, "request_latency_mean")
            meaning = f"no warm-up: first use of the GPU, paid by {arch}'s single request"
            value = (self.published.calibrate(key) - warm_ms) / 1e3
            costs[arch] = self.constant(f"first_use_{arch}_s", value, meaning, key)
        return costs

    def _five(self) -> dict[str, Mix]:
        """The five requests of the second row, in their order.

        pdv's last one is alone in its batch, unpadded, so its acceptance is pd's: that names the fifth. The order of
        the other four is the one under which pd, first come, first served, gives its least, median and mean latency.
        """
        pd, pdv = (
            five_requests(self.published.acceptance((THREE_WAY_PAIR, arch, FIVE)), OUTPUT_TOKENS)
            for arch in ("pd", "pdv")
        )
        [last] = set(pd) & set(pdv)  # the one request that both rows share
        keys = [self._key("pd", FIVE, f"request_latency_{mark}") for mark in ("min", "p50", "mean")]
        wanted = {key.metric: self.published.calibrate(key) for key in keys}

        def distance(order: Mix) -> float:
            found = score(served(self.program("pd", FIVE), [*order, last]))
            return sum(math.log(found[metric] / value) ** 2 for metric, value in wanted.items())

        orders = [list(order) for order in dict.fromkeys(permutations(one for one in pd if one != last))]
        best = [*min(orders, key=distance), last]
        meaning = f"which of the {len(orders)} orders of the five requests was submitted"
        value = ", ".join(str(rounds) for _, rounds in best)
        self.constants.append(Constant("order", value, "rounds", meaning, tuple(keys)))
        return {"baseline": best, "pd": best, "pdv": [*(one for one in pdv if one != last), last]}

    def _overlap_s(self) -> float:
        """Seconds that a forward of four workers saves over one worker's, from five requests' totals."""
        keys = {arch: self._key(arch, FIVE, "total_time") for arch in ("pd", "baseline")}
        alone_s, shared_s = (self.published.calibrate(key) for key in keys.values())

        def total_s(overlap_s: float) -> float:
            program = self.program("baseline", FIVE, overlap_s=overlap_s)
            return score(served(program, self.five["baseline"]))["total_time"]

        value = linear_solution(total_s, total_s(0.0) - alone_s + shared_s)
        meaning = "part of a forward hidden by another worker's: the overlap that the interpreter lock allows"
        return self.constant("overlap_s", value, meaning, *keys.values())


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
            acceptance = self.published.acceptance((name, arch, concurrency), "model_comparison")
            return random_orders(many_requests(acceptance, requests, OUTPUT_TOKENS), runs, seed)
        baseline, pdv = (
            five_requests(self.published.acceptance((name, each, concurrency), "model_comparison"), OUTPUT_TOKENS)
            for each in ("baseline", "pdv")
        )
        orders = possible_orders(baseline, pdv)[0 if arch == "baseline" else 1]
        return orders[:: math.ceil(len(orders) / runs)]

    def _scores(self, row: TableRow, layer_s: float, runs: int, seed: int) -> list[Score]:
        name, arch, _, requests = row
        program = batches(arch, name, layer_s, BF16_FLOPS_PER_S)
        arrivals_s = legacy_arrivals(RATES_PER_S[requests], most=requests)
        return [score(served(program, mix, arrivals_s)) for mix in self.mixes(row, runs, seed)]

    def _layer_s(self) -> float:
        """Host time per layer that gives the three_way pair's five requests their mean latency under pdv.

        The first request outlasts the arrivals, so batches do not depend on it and latency is linear in it.
        """
        row = THREE_WAY_PAIR, "pdv", FIVE, 5
        key = Key("model_comparison", *row[:3], "request_latency_mean")

        def latency_ms(layer_s: float) -> float:
            return float(np.mean([found[key.metric] for found in self._scores(row, layer_s, 1, 0)]))

        meaning = "host time to launch one transformer layer (bf16, eager), on the machine of this table"
        return self.constant("layer_s", linear_solution(latency_ms, self.published.calibrate(key)), meaning, key)


def possible_orders(baseline: Mix, pdv: Mix) -> tuple[list[Mix], list[Mix]]:
    """The orders that the five requests of both programs can have had.

    pdv serves its first request alone and unpadded, so both programs accept it alike. Where baseline, which pads
    nothing, accepts two requests alike, they are the two with the same prompt, the first among them.
    """
    shared = set(baseline) & set(pdv)
    twice = {request for request in shared if baseline.count(request) > 1}
    one, other = SAME_PROMPT
    ours, theirs = (
        [list(order) for order in dict.fromkeys(permutations(mix)) if order[one] in (twice or shared)]
        for mix in (baseline, pdv)
    )
    return [order for order in ours if not twice or order[one] == order[other]], theirs


class PoissonModel(CalibratedModel):
    """The poisson_30s programs."""

    def __init__(self, published: Published) -> None:
        super().__init__(published)
        # under all three labels codellama-34b: see the GPU memory column
        self.target_s = model("codellama-34b").weight_bytes / BANDWIDTH_BYTES_PER_S
        self.draft_s = {label: self._draft_s(label) for label in POISSON_PAIRS}
        self._coins: dict[tuple[str, str, int], float] = {}

    def program(self, label: str, arch: str, concurrency: int) -> PoissonLanes:
        """The program of a row."""
        return LANES[arch](concurrency, self.draft_s[label], self.target_s)

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        label, arch, concurrency, _ = row
        coin = self.coin(label, arch, concurrency, runs, seed)
        return poisson_scores(self.program(label, arch, concurrency), coin, runs, seed)

    def coin(self, label: str, arch: str, concurrency: int, runs: int, seed: int) -> float:
        """The chance of a draft under which the requests that complete show the row's published acceptance.

        The quick ones complete, so all requests together are accepted less than those: one step corrects for it.
        """
        row = min(concurrency, LAST_SOUND) if arch == "pd" else concurrency
        if (label, arch, row) not in self._coins:
            wanted = self.published.input(Key("poisson_30s", label, arch, row, "acceptance_mean"))
            coin = coin_for(wanted, POISSON_TOKENS)
            if row > ALL_COMPLETED:
                first = poisson_scores(self.program(label, arch, row), coin, runs, seed)
                shown = float(np.mean([found["acceptance_completed"] for found in first]))
                coin = coin_for(wanted * wanted / shown, POISSON_TOKENS)
            self._coins[label, arch, row] = coin
        return self._coins[label, arch, row]

    def _draft_s(self, label: str) -> float:
        """One draft forward: what the lone request took beyond the verifier's, over the drafts it needed."""
        keys = tuple(Key("poisson_30s", label, SETTLED, c, "request_latency_mean_completed_only") for c in LONE)
        latency_s = sum(map(self.published.calibrate, keys)) / len(keys) / 1e3
        acceptance = self.published.input(Key("poisson_30s", label, SETTLED, LONE[0], "acceptance_mean"))
        rounds = tokens_and_rounds(acceptance, POISSON_TOKENS)[1]
        value = (latency_s - (1 + 2 * rounds) * self.target_s) / (1 + K * rounds)
        return self.constant("draft_s", value, f"one draft forward, {label}", *keys)


def poisson_jobs(concurrency: int, coin: float, seed: int) -> list[PublishedJob]:
    """The requests of a row: the published arrivals, and rounds drawn from `seed`."""
    rng = np.random.default_rng(seed)
    arrivals = legacy_arrivals(RATE_PER_CONCURRENCY * concurrency, WINDOW_S)
    return [PublishedJob(arrival_s, drawn_rounds(rng, coin, POISSON_TOKENS)) for arrival_s in arrivals]


def poisson_scores(program: PoissonLanes, coin: float, runs: int, seed: int) -> list[Score]:
    """A row as published, once per replication."""
    jobs = (poisson_jobs(program.limit, coin, seed + run) for run in range(runs))
    return [score(serve(program, each, CUTOFF_S), CUTOFF_S) for each in jobs]
