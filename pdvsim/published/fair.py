"""The published workloads scored fairly, compared with pdvsim's policies on the same arrivals and lengths.

Fairly: every token counts, every request is served to its end, and all programs meet the same requests. (In the
published three_way runs pdv's requests had another acceptance than pd's; here all three get pd's.)

pdvsim's policies run on a measured profile, batched, in bf16, with a KV cache and a bonus token; they are here to show
what the same traffic costs a present-day engine, not as a prediction of the published hardware.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pdvsim.published.job import PublishedJob, Score, coin_for
from pdvsim.published.poisson import ALL_COMPLETED, Poisson, PoissonModel, poisson_jobs, poisson_scores, run_poisson
from pdvsim.published.poisson import OUTPUT_TOKENS as POISSON_TOKENS
from pdvsim.published.reproduce import TableName
from pdvsim.published.tables import THREE_WAY_PAIR, Key, Published
from pdvsim.published.three_way import OUTPUT_TOKENS as THREE_WAY_TOKENS
from pdvsim.published.three_way import PROMPT_TOKENS, ThreeWayModel, served
from pdvsim.sim.assembly import profile_of
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests

HEADLINE = "TinyLlama-TinyLlama"  # the label of the published +3265%
POISSON_ROWS = (16, 32, 64, 128)
FAIR_METRICS = ("output_throughput", "mean_e2el_ms", "p95_e2el_ms", "duration")
MODERN: tuple[Arch, ...] = ("pd", "pdv", "pdv-unified", "colocated")
MODERN_PAIRS = {"three-way": "tinyllama-1.1b:llama-2-7b", "poisson-30s": "tinyllama-1.1b:codellama-34b"}

Loads = dict[int, tuple[list[float], float]]  # by row: arrival times, and the chance that a draft is accepted


@dataclass(frozen=True)
class FairRow:
    """One program, or one policy of pdvsim, under one row's load; means over replications."""

    concurrency: int
    requests: int
    engine: str  # "published" or "pdvsim"
    arch: str
    output_throughput: float  # all tokens, from the first arrival to the last finish
    mean_e2el_ms: float
    p95_e2el_ms: float
    duration: float  # seconds from the first arrival to the last finish
    completed_only: float | None = None  # poisson_30s: tokens/s as published, with the cut-off
    completions: float | None = None
    all_tokens: float | None = None  # tokens/s up to the cut-off, unfinished requests counted

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Fair:
    """A table's workloads scored fairly."""

    table: TableName
    gpu: str
    foundation: str
    rows: tuple[FairRow, ...]
    published_ratio: float  # largest row, as published: pdv-unified's throughput or pdv's P95 over pd's
    published_pd: float  # and pd's own figure

    def row(self, engine: str, arch: str, concurrency: int) -> FairRow:
        return next(r for r in self.rows if (r.engine, r.arch, r.concurrency) == (engine, arch, concurrency))

    def modern(self, concurrency: int) -> list[FairRow]:
        return [r for r in self.rows if r.engine == "pdvsim" and r.concurrency == concurrency]


def score_both(table: TableName, published: Published, runs: int, seed: int = 0, gpu: str = "h200") -> Fair:
    """The published programs, scored fairly, and pdvsim's policies on `gpu`, under the same loads."""
    rows, loads = _three_way(published, runs, seed) if table == "three-way" else _poisson(published, runs, seed)
    foundation = str(profile_of(Experiment(hardware=Hardware(gpu))).foundation)
    for concurrency, (arrivals, coin) in loads.items():
        for arch in MODERN:
            scores = [_modern(table, arch, arrivals, coin, seed + run, gpu) for run in range(runs)]
            rows.append(FairRow(concurrency, len(arrivals), "pdvsim", arch, **_means(scores)))
    rows.sort(key=lambda row: (row.concurrency, row.engine != "published"))
    pd, other = _headline(table, published)
    return Fair(table, gpu, foundation, tuple(rows), other / pd, pd)


def _headline(table: TableName, published: Published) -> tuple[float, float]:
    """pd's published figure in the largest row, and that of the program it is compared with."""
    if table == "three-way":
        most, metric = max(row[2] for row in published.rows("three_way")), "request_latency_p95"
        keys = [Key("three_way", THREE_WAY_PAIR, arch, most, metric) for arch in ("pd", "pdv")]
    else:
        most, metric = max(POISSON_ROWS), "throughput_completed_only"
        keys = [Key("poisson_30s", HEADLINE, arch, most, metric) for arch in ("pd", "pdv-unified")]
    pd, other = (published.figures[key].value for key in keys)
    return pd, other


def _three_way(published: Published, runs: int, seed: int) -> tuple[list[FairRow], Loads]:
    model = ThreeWayModel(published)
    rows: list[FairRow] = []
    loads: Loads = {}
    for _, arch, concurrency, requests in published.rows("three_way"):
        mixes = model.mixes("pd", concurrency, requests, runs, seed)  # the same requests for all three
        scores = [score_fairly(served(arch, mix, model.config(arch, requests))) for mix in mixes]
        rows.append(FairRow(concurrency, requests, "published", arch, **_means(scores)))
        mean = published.acceptance((THREE_WAY_PAIR, "pd", concurrency))["mean"]
        loads[concurrency] = ([0.0] * requests, coin_for(mean, THREE_WAY_TOKENS))
    return rows, loads


def _poisson(published: Published, runs: int, seed: int) -> tuple[list[FairRow], Loads]:
    """One coin for all rows and programs: that of the last row in which every request completed."""
    model = PoissonModel(published)
    forwards, coin = model.forwards[HEADLINE], model.coin(HEADLINE, "pd", ALL_COMPLETED, runs, seed)
    rows: list[FairRow] = []
    loads: Loads = {}
    programs: tuple[Poisson, ...] = ("pd", "pdv-unified")
    for concurrency in POISSON_ROWS:
        for program in programs:
            cut = poisson_scores(program, concurrency, coin, forwards, runs, seed)
            fair = []
            for run in range(runs):
                jobs = poisson_jobs(concurrency, coin, seed + run)
                run_poisson(program, jobs, concurrency, forwards)
                fair.append(score_fairly(jobs))
            as_published = {
                "completed_only": "throughput_completed_only",
                "completions": "completions",
                "all_tokens": "throughput_all_tokens",
            }
            means = {name: float(np.mean([score[key] for score in cut])) for name, key in as_published.items()}
            rows.append(FairRow(concurrency, len(jobs), "published", program, **_means(fair), **means))
            loads[concurrency] = ([job.arrival_s for job in jobs], coin)
    return rows, loads


def _modern(table: TableName, arch: Arch, arrivals: list[float], coin: float, seed: int, gpu: str) -> Score:
    """One policy of pdvsim under the given arrivals; every request of a row has the same chance of acceptance."""
    tokens = THREE_WAY_TOKENS if table == "three-way" else POISSON_TOKENS
    experiment = Experiment(
        arch,
        Traffic("random", num_prompts=len(arrivals), input_len=PROMPT_TOKENS, output_len=tokens, seed=seed),
        Acceptance(coin),
        Server(MODERN_PAIRS[table]),
        Hardware(gpu),
        scoring=Scoring(metric_percentiles=(95.0,)),
    )
    requests = make_requests(experiment.traffic, experiment.acceptance)
    for request, arrival_s in zip(requests, arrivals, strict=True):
        request.arrival_s = arrival_s
    metrics = summarise(simulate(experiment, requests=requests))
    return {name: metrics[name] for name in FAIR_METRICS}


def _means(scores: list[Score]) -> dict[str, float]:
    return {name: float(np.mean([score[name] for score in scores])) for name in FAIR_METRICS}


def score_fairly(jobs: Sequence[PublishedJob]) -> Score:
    """All tokens of all requests, served to the end; time runs from the first arrival."""
    latency_s = [job.finish_s - job.arrival_s for job in jobs]
    duration_s = max(job.finish_s for job in jobs) - min(job.arrival_s for job in jobs)
    return {
        "duration": duration_s,
        "output_throughput": sum(job.tokens for job in jobs) / duration_s,
        "mean_e2el_ms": 1e3 * float(np.mean(latency_s)),
        "p95_e2el_ms": 1e3 * float(np.percentile(latency_s, 95)),
    }
