"""The `model_comparison` table: two of the three_way programs on three pairs; calibrated.

The programs say what differs: bf16 instead of fp32, and requests that arrive at 2 and 5 per second instead of all at
the start. They do not say which machine they ran on, so the host's time per layer is calibrated again, on one figure.
Nothing else is fitted: with bf16 the GPU waits for the host, so four requests in one forward cost about as much as one,
and four threads, which share the interpreter lock, gain nothing over one.
"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np

from pdvsim.published.program import Score, WholeSequence, legacy_arrivals
from pdvsim.published.tables import (
    THREE_WAY_PAIR,
    CalibratedModel,
    Key,
    Mix,
    Published,
    TableRow,
    five_requests,
    many_requests,
)
from pdvsim.published.three_way import (
    FIVE,
    OUTPUT_TOKENS,
    ThreeWayConfig,
    linear_solution,
    random_orders,
    score_three_way,
    served,
)
from pdvsim.sim.models.presets import pair

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
