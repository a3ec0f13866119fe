"""The `three_way` programs on pairs of models that no published table gives: predicted, with an error bar.

What is carried over from the calibrated pair: the programs, the host's time a layer, the card's fp32 rate, what four
threads gain, and the prompts. What is assumed of the others is drawn anew in every replication:

- forwards lie anywhere between `WholeSequence` and `Overlapped`, which the calibrated pair cannot tell apart;
- a request is accepted as the calibrated pair's request in its place or, as likely, as any of its program's fifty;
- then all requests of a pair move together: its draft and target are one maker's and nearer in size, so a little up.

An interval also holds how far the predictions of the calibrated pair missed, as a factor on every time.

Not modelled: requests that end before their length, and kernels that one family launches and another does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import product
from statistics import NormalDist
from typing import Any

import numpy as np

from pdvsim.published.forwards import Between, Forwards, Overlapped, WholeSequence
from pdvsim.published.job import K
from pdvsim.published.poisson_fit import PoissonModel
from pdvsim.published.scoring import Score, score_three_way
from pdvsim.published.tables import THREE_WAY_PAIR, Constant, Key, Mix, Published, many_requests, tokens_and_rounds
from pdvsim.published.three_way import ThreeWay, ThreeWayConfig, run_three_way
from pdvsim.published.three_way_fit import FP32_FLOPS_PER_S, OUTPUT_TOKENS, SINGLE, ThreeWayModel, jobs_of
from pdvsim.sim.core import Pair
from pdvsim.sim.hardware.models import pair

PAIRS = {
    THREE_WAY_PAIR: "tinyllama-1.1b:llama-2-7b",
    "Qwen2-1.5B->Qwen2-7B": "qwen2-1.5b:qwen2-7b",
    "Gemma-2B->Gemma-7B": "gemma-2b:gemma-7b",
}
SYSTEMS: tuple[ThreeWay, ...] = ("baseline", "pdv")
LOADS = ((3, 5), (10, 20))  # concurrency and requests
ROWS = tuple(product(PAIRS, LOADS, SYSTEMS))
METRICS = {"request_latency_mean": "ms", "request_latency_p95": "ms", "throughput": "req/s"}
MANY = 25, 50  # the row whose requests are the pool
SHIFT, SHIFT_SPREAD = 0.2, 0.35  # of a pair's acceptance, in log odds
INTERVAL = 5.0, 95.0  # percentiles of the replications
MEASURED: tuple[ThreeWay, ...] = ("baseline", "pd", "pdv")
BISECTIONS = 40
FACTORS = 101  # by which a replication may miss
ERROR_RUNS = 8  # orders of the requests behind the model's own error


@dataclass(frozen=True)
class PredictedCell:
    """One figure that is not known, predicted."""

    pair: str
    system: str
    concurrency: int
    requests: int
    metric: str
    unit: str
    simulated: float  # mean over replications
    interval: tuple[float, float]  # nine in ten replications, with the model's own error

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ModelComparison:
    """Every pair, program and load."""

    constants: tuple[Constant, ...]
    cells: tuple[PredictedCell, ...]
    model_error: float  # root mean square of the calibrated pair's errors, latencies not calibrated on
    replications: int

    def cell(self, pair: str, system: str, requests: int, metric: str) -> PredictedCell:
        wanted = (pair, system, requests, metric)
        return next(c for c in self.cells if (c.pair, c.system, c.requests, c.metric) == wanted)


class ComparisonModel:
    """The three_way programs, for any pair."""

    def __init__(self, published: Published) -> None:
        self.published = published
        self.given = ThreeWayModel(published)
        self.constants = list(self.given.constants)
        self.launch_s = self._launch_s()
        self.weight_s = self._weight_s()

    def forwards(self, models: Pair, share: float) -> Forwards:
        """Of a pair: 0 adds launches and arithmetic, 1 overlaps them."""
        added = WholeSequence(models, self.given.layer_s, FP32_FLOPS_PER_S)
        return Between(added, self._overlapped(models, self.weight_s), share)

    def scores(self, name: str, system: ThreeWay, load: tuple[int, int], runs: int, seed: int) -> list[Score]:
        """A row, once for every replication; the calibrated pair's as `three_way` has them."""
        concurrency, requests = load
        if name == THREE_WAY_PAIR:
            scores = self.given.scores(system, concurrency, requests, runs, seed)
            return scores * (runs // len(scores))  # the order of the five is known: one outcome
        models = pair(PAIRS[name])
        found = []
        for run, mix in enumerate(self.mixes(name, system, load, runs, seed)):
            share = _assumed(name, seed, run).random()
            jobs = jobs_of(mix)
            run_three_way(system, jobs, ThreeWayConfig(self.forwards(models, share), self.given.overlap_s))
            found.append(score_three_way(jobs))
        return found

    def mixes(self, name: str, system: ThreeWay, load: tuple[int, int], runs: int, seed: int) -> list[Mix]:
        """The requests of a row of a pair that was never measured."""
        concurrency, requests = load
        pool = many_requests(self.published.acceptance((THREE_WAY_PAIR, system, MANY[0])), MANY[1], OUTPUT_TOKENS)
        own = self.given.mixes(system, concurrency, requests, runs, seed)
        found = []
        for run in range(runs):
            rng = np.random.default_rng([seed, run, requests])
            row = own[run % len(own)]
            mix = [request if rng.random() < 0.5 else pool[rng.integers(len(pool))] for request in row]
            shift = SHIFT + SHIFT_SPREAD * _assumed(name, seed, run).standard_normal()
            found.append([shifted(request, shift) for request in mix])
        return found

    def model_error(self, runs: int, seed: int) -> float:
        """Root mean square error of the calibrated pair's latencies, over the rows of several requests."""
        errors = []
        for arch, (concurrency, requests) in product(MEASURED, (*LOADS, MANY)):
            scores = self.given.scores(arch, concurrency, requests, runs, seed)
            for metric in ("request_latency_mean", "request_latency_p95"):
                told = self.published.figures[Key("three_way", THREE_WAY_PAIR, arch, concurrency, metric)].value
                errors.append(math.log(float(np.mean([score[metric] for score in scores])) / told))
        return float(np.sqrt(np.mean(np.square(errors))))

    def _overlapped(self, models: Pair, weight_s: float) -> Overlapped:
        return Overlapped(models, self.launch_s, weight_s, FP32_FLOPS_PER_S)

    def _launch_s(self) -> float:
        """Host time a layer where the host alone decides: the cached draft forwards of poisson_30s."""
        cached = PoissonModel(self.published)
        drafts = [forwards.draft_s for forwards in cached.forwards.values()]
        value = float(np.mean(drafts)) / self.given.pair.draft.layers
        keys = tuple(key for constant in cached.constants for key in constant.cells)
        meaning = "host time to launch one layer where nothing else takes as long (poisson_30s' drafts)"
        self.constants.append(Constant("launch_s", value, "s", meaning, keys))
        return value

    def _weight_s(self) -> float:
        """GPU time a weight if launches and arithmetic overlap: what gives the single request its latency."""
        key = Key("three_way", THREE_WAY_PAIR, "pdv", SINGLE, "request_latency_mean")
        told_s = self.published.calibrate(key) / 1e3
        acceptance = self.published.input(Key("three_way", THREE_WAY_PAIR, "pdv", SINGLE, "acceptance_mean"))
        low, high = 0.0, told_s / self.given.pair.target.layer_params
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            jobs = jobs_of([tokens_and_rounds(acceptance, OUTPUT_TOKENS)])
            run_three_way("pdv", jobs, ThreeWayConfig(self._overlapped(self.given.pair, middle)))
            low, high = (low, middle) if jobs[0].finish_s > told_s else (middle, high)
        meaning = "GPU time of a forward a billion weights, however few the tokens (fp32), if launches overlap it"
        self.constants.append(Constant("weight_s", low * 1e9, "s", meaning, (key,)))
        return low


def shifted(request: tuple[int, int], log_odds: float) -> tuple[int, int]:
    """A request accepted more or less often; emitted over drafted stays between 1 / K and 1."""
    tokens, rounds = request
    least = 1 / K
    part = min(max((tokens / (K * rounds) - least) / (1 - least), 1e-6), 1 - 1e-6)
    moved = 1 / (1 + math.exp(-math.log(part / (1 - part)) - log_odds))
    return OUTPUT_TOKENS, math.ceil(OUTPUT_TOKENS / (K * (least + (1 - least) * moved)) - 1e-9)


def compare_models(
    published: Published, runs: int, seed: int = 0, progress: Callable[[int], None] | None = None
) -> ModelComparison:
    """Predict every cell; `progress` is called with the rows done."""
    model = ComparisonModel(published)
    error = model.model_error(min(runs, ERROR_RUNS), seed)
    factors = np.exp([error * NormalDist().inv_cdf((i + 0.5) / FACTORS) for i in range(FACTORS)])
    cells = []
    for done, (name, load, system) in enumerate(ROWS, 1):
        scores = model.scores(name, system, load, runs, seed)
        for metric, unit in METRICS.items():
            values = np.array([score[metric] for score in scores])
            missed = np.outer(values, factors)
            low, high = np.percentile(missed, INTERVAL).tolist()
            cells.append(PredictedCell(name, system, *load, metric, unit, float(values.mean()), (low, high)))
        if progress:
            progress(done)
    return ModelComparison(tuple(model.constants), tuple(cells), error, runs)


def _assumed(name: str, seed: int, run: int) -> np.random.Generator:
    """What one replication assumes of a pair: the same for every program and load."""
    return np.random.default_rng([seed, run, list(PAIRS).index(name), 1])
