"""The programs of the published poisson_30s table, calibrated.

A verifier forward reads 34 billion weights at the data sheet's bandwidth; one draft time a labelled pair (three runs of
the same models, on hosts that were not equally fast) is what the lone request's latency leaves.

Not modelled: what the prompts were; rounds are drawn with one coin a row.
"""

from __future__ import annotations

from typing import cast

import numpy as np

from pdvsim.published.forwards import Cached
from pdvsim.published.job import K, PublishedJob, coin_for, drawn_rounds, legacy_arrivals
from pdvsim.published.poisson import Poisson, run_poisson
from pdvsim.published.scoring import Score, score_poisson
from pdvsim.published.tables import POISSON_PAIRS, Constant, Key, Published, TableRow, tokens_and_rounds
from pdvsim.sim.hardware.models import model

BANDWIDTH_BYTES_PER_S = 2.039e12  # A100-80GB's data sheet
OUTPUT_TOKENS = 20
WINDOW_S = 30.0
CUTOFF_S = 60.0
RATE_PER_CONCURRENCY = 0.05
SINGLE = (1, 2)  # the "concurrency" of the rows of one request, the same request in both
SETTLED = "pdv-unified"  # ran second: its single request varies by 2% to 4% between those rows, pd's by 19% to 28%
ALL_COMPLETED = 16  # the last row in which every request completed
LAST_SOUND = 32  # pd: beyond it acceptance is the mean of a handful of lucky requests


class PoissonModel:
    """The poisson_30s programs, calibrated."""

    target = model("codellama-34b")  # under all three labels: see the GPU memory column

    def __init__(self, published: Published) -> None:
        self.published = published
        self.constants: list[Constant] = []
        self.target_s = self.target.weight_bytes / BANDWIDTH_BYTES_PER_S
        self.forwards = {label: Cached(self._draft_s(label), self.target_s) for label in POISSON_PAIRS}
        self._coins: dict[tuple[str, str, int], float] = {}

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]:
        """A row as published, once a replication."""
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
        self.constants.append(Constant("draft_s", value, "s", f"one draft forward, {label}", keys))
        return value


def poisson_jobs(concurrency: int, coin: float, seed: int) -> list[PublishedJob]:
    """The requests of a row: the published arrivals, and rounds drawn from `seed`."""
    rng = np.random.default_rng(seed)
    arrivals = legacy_arrivals(RATE_PER_CONCURRENCY * concurrency, WINDOW_S)
    return [PublishedJob(arrival_s, drawn_rounds(rng, coin, OUTPUT_TOKENS)) for arrival_s in arrivals]


def poisson_scores(arch: Poisson, concurrency: int, coin: float, forwards: Cached, runs: int, seed: int) -> list[Score]:
    """A row as published, once a replication."""
    scores = []
    for run in range(runs):
        jobs = poisson_jobs(concurrency, coin, seed + run)
        run_poisson(arch, jobs, concurrency, forwards, CUTOFF_S)
        scores.append(score_poisson(jobs, CUTOFF_S))
    return scores
