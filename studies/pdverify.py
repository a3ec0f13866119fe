"""The PD-Verify tables scored fairly: `python studies/pdverify.py poisson-30s` (or three-way, model-comparison).

Fairly: every token counts, every request is served to its end, and all programs meet the same requests. (In the
published three_way runs pdv's requests had another acceptance than pd's; here all three get pd's.) pdvsim's policies
run the same arrivals and lengths on a measured profile, batched, in bf16, with a KV cache and a bonus token. They show
what the same traffic costs a present-day engine, not a prediction of the published hardware.

The model comparison is explained by its differences from three_way, added one by one. What was predicted of it before
its figures were known is kept in calibration/data/published/predicted.csv.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import fmean
from typing import get_args

import numpy as np

from pdvsim.published import TableName
from pdvsim.published.models import (
    ALL_COMPLETED,
    BF16_FLOPS_PER_S,
    FP32_FLOPS_PER_S,
    LANES,
    OUTPUT_TOKENS,
    POISSON_TOKENS,
    PROMPT_TOKENS,
    RATES_PER_S,
    ComparisonModel,
    PoissonModel,
    ThreeWayModel,
    batches,
    poisson_jobs,
    poisson_scores,
    served,
)
from pdvsim.published.program import PublishedJob, Score, coin_for, legacy_arrivals, score, serve
from pdvsim.published.tables import THREE_WAY_PAIR, Key, Published, load_published
from pdvsim.sim.config import Acceptance, Arch, Experiment, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import make_requests
from pdvsim.view.table import TextTable, cell

RUNS = 4  # replications
HEADLINE = "TinyLlama-TinyLlama"  # the label of the published +3265%
POISSON_ROWS = (16, 32, 64, 128)
MODERN: tuple[Arch, ...] = ("pd", "pdv", "pdv-unified", "colocated")
FAIR = ("output_throughput", "mean_e2el_ms", "p95_e2el_ms", "duration")

Fair = dict[tuple[int, str, str], Score]  # by concurrency, system and architecture: means over replications


def score_fairly(jobs: Sequence[PublishedJob]) -> Score:
    """All tokens of all requests, served to the end; time runs from the first arrival."""
    latency_ms = [1e3 * (job.finish_s - job.arrival_s) for job in jobs]
    duration_s = max(job.finish_s for job in jobs) - min(job.arrival_s for job in jobs)
    throughput = sum(job.tokens for job in jobs) / duration_s
    return dict(
        zip(FAIR, (throughput, fmean(latency_ms), float(np.percentile(latency_ms, 95)), duration_s), strict=True)
    )


def means(scores: Sequence[Score]) -> Score:
    return {name: fmean(score[name] for score in scores) for name in scores[0]}


def fair_three_way(published: Published, runs: int) -> Fair:
    """The published programs and pdvsim's policies on the same requests, all submitted at the start."""
    model, rows = ThreeWayModel(published), Fair()
    for _, arch, concurrency, count in published.rows("three_way"):
        mixes = model.mixes("pd", concurrency, count, runs, 0)
        scores = [score_fairly(served(model.program(arch, count), mix)) for mix in mixes]
        rows[concurrency, "published", arch] = means(scores) | {"requests": count}
    for concurrency, count in {key[0]: int(row["requests"]) for key, row in rows.items()}.items():
        mean = published.acceptance((THREE_WAY_PAIR, "pd", concurrency))["mean"]
        coin = coin_for(mean, OUTPUT_TOKENS)
        rows |= modern("tinyllama-1.1b:llama-2-7b", concurrency, [0.0] * count, coin, OUTPUT_TOKENS, runs)
    return rows


def fair_poisson(published: Published, runs: int) -> Fair:
    """The same, with one coin for all: that of the last row in which every request completed."""
    model, rows = PoissonModel(published), Fair()
    coin = model.coin(HEADLINE, "pd", ALL_COMPLETED, runs, 0)
    for concurrency in POISSON_ROWS:
        for arch in LANES:
            scores, program = [], model.program(HEADLINE, arch, concurrency)
            for run, cut in enumerate(poisson_scores(program, coin, runs, 0)):
                jobs = serve(program, poisson_jobs(concurrency, coin, run))
                scores.append(score_fairly(jobs) | cut)
            rows[concurrency, "published", arch] = means(scores) | {"requests": len(jobs)}
        arrivals_s = [job.arrival_s for job in jobs]
        rows |= modern("tinyllama-1.1b:codellama-34b", concurrency, arrivals_s, coin, POISSON_TOKENS, runs)
    return rows


def modern(pair: str, concurrency: int, arrivals_s: Sequence[float], coin: float, tokens: int, runs: int) -> Fair:
    """pdvsim's policies on a measured H200 under these arrivals; every request has the same chance of acceptance."""

    def scored(arch: Arch, seed: int) -> Score:
        traffic = Traffic("random", num_prompts=len(arrivals_s), input_len=PROMPT_TOKENS, output_len=tokens, seed=seed)
        scoring = Scoring(metric_percentiles=(95.0,))
        experiment = Experiment(arch, traffic, Acceptance(coin), Server(pair), scoring=scoring)
        requests = make_requests(traffic, experiment.acceptance)
        for request, arrival_s in zip(requests, arrivals_s, strict=True):
            request.arrival_s = arrival_s
        metrics = summarise(simulate(experiment, requests=requests))
        return {name: metrics[name] for name in FAIR}

    requests: Score = {"requests": len(arrivals_s)}
    return {(concurrency, "pdvsim", a): means([scored(a, seed) for seed in range(runs)]) | requests for a in MODERN}


def fair_text(fair: Fair) -> str:
    """The table of a load's programs and policies."""
    rows: list[dict[str, str]] = []
    for (concurrency, system, arch), row in sorted(fair.items(), key=lambda entry: entry[0][0]):
        name = "published program" if system == "published" else "pdvsim on h200"
        rows.append({"C": str(concurrency), "requests": f"{row['requests']:.0f}", "system": name, "arch": arch})
        if any("completions" in other for other in fair.values()):
            rows[-1]["completed by 60 s"] = cell(row.get("completions"), 1)
            rows[-1]["tok/s as published"] = cell(row.get("throughput_completed_only"))
            rows[-1]["all tok/s by 60 s"] = cell(row.get("throughput_all_tokens"))
        rows[-1]["tok/s to the end"] = cell(row["output_throughput"])
        rows[-1] |= {"mean s": cell(row["mean_e2el_ms"] / 1e3), "P95 s": cell(row["p95_e2el_ms"] / 1e3)}
    return str(TextTable(rows))


def differences(published: Published, runs: int) -> dict[str, dict[str, float]]:
    """From three_way to the model comparison, one difference added after another: simulated over published latency.

    By architecture, the geometric mean of mean and P95 over all rows.
    """
    given, own = ThreeWayModel(published), ComparisonModel(published)
    same = {"layer_s": given.layer_s, "flops_per_s": FP32_FLOPS_PER_S, "overlap_s": given.overlap_s}
    fast = same | {"flops_per_s": BF16_FLOPS_PER_S, "overlap_s": 0.0}
    settings = {
        "three-way's program and constants, this table's acceptance": (same, False),
        "requests arrive at 2 and 5 per second": (same, True),
        "bf16: arithmetic 16 times as fast, nothing to overlap": (fast, True),
        f"host: {1e3 * own.layer_s:.2f} ms per layer instead of {1e3 * given.layer_s:.2f}": (
            fast | {"layer_s": own.layer_s}, True,
        ),
    }  # fmt: skip
    ratios = {}
    for what, (setting, spaced) in settings.items():
        by_arch: dict[str, list[float]] = {}
        for name, arch, concurrency, requests in published.rows("model_comparison"):
            program = batches(arch, name, **setting)
            arrivals_s = legacy_arrivals(RATES_PER_S[requests], most=requests) if spaced else ()
            mixes = own.mixes((name, arch, concurrency, requests), runs, 0)
            scores = [score(served(program, mix, arrivals_s)) for mix in mixes]
            for metric in ("request_latency_mean", "request_latency_p95"):
                told_ms = published.figures[Key("model_comparison", name, arch, concurrency, metric)].value
                by_arch.setdefault(arch, []).append(fmean(each[metric] for each in scores) / told_ms)
        ratios[what] = {arch: float(np.exp(np.mean(np.log(of)))) for arch, of in by_arch.items()}
    return ratios


def main(table: TableName) -> None:
    """Print what explains a table."""
    published = load_published()
    if table == "model-comparison":
        print("Differences from three-way, added one by one: simulated over published latency, mean of all rows")
        explained = differences(published, RUNS).items()
        print(TextTable([{"difference": what} | {arch: cell(x) for arch, x in by.items()} for what, by in explained]))
    else:
        fair = fair_three_way if table == "three-way" else fair_poisson
        print(f"Scored fairly\n\n{fair_text(fair(published, RUNS))}")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in get_args(TableName):
        sys.exit(f"usage: python studies/pdverify.py {'|'.join(get_args(TableName))}")
    main(sys.argv[1])  # type: ignore[arg-type]
