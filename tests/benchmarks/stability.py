"""How often the stability label is wrong, and how often it is none: runs at known shares of what a server can do.

    python tests/benchmarks/stability.py [--seeds 20] [--requests 1000 4000] [--arch pd colocated]

Capacity is what a closed loop of 512 requests of the same lengths reaches, behind its warm-up. Below it "overloaded" is
wrong, above it "stable" is.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace

from pdvsim.sim.config import Experiment, Scoring, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

LOADS = (0.8, 0.95, 1.05, 1.2)
LABELS = ("stable", "cannot tell", "overloaded")


def capacity(experiment: Experiment) -> float:
    """Requests a second where there are always more waiting."""
    traffic = replace(experiment.traffic, num_prompts=6000, max_concurrency=512, seed=999)
    run = simulate(replace(experiment, traffic=traffic))
    return float(summarise(run, Scoring(warmup_requests=1500))["request_throughput"])


def labels(experiment: Experiment, rate: float, requests: int, seeds: int) -> Counter[str]:
    """The labels of runs at that rate."""
    traffic = replace(experiment.traffic, request_rate=rate, num_prompts=requests)
    runs = (simulate(replace(experiment, traffic=replace(traffic, seed=seed))) for seed in range(seeds))
    return Counter(summarise(run)["stability"] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--requests", type=int, nargs="+", default=[1000, 4000])
    parser.add_argument("--arch", nargs="+", default=["pd", "colocated"])
    options = parser.parse_args()
    print("| architecture | requests | load | " + " | ".join(LABELS) + " |")
    print("|---|---|---|" + "---|" * len(LABELS))
    for arch in options.arch:
        experiment = Experiment(arch, Traffic())
        most = capacity(experiment)
        for requests in options.requests:
            for load in LOADS:
                found = labels(experiment, load * most, requests, options.seeds)
                shares = " | ".join(f"{found[label] / options.seeds:.0%}" for label in LABELS)
                print(f"| {arch} ({most:.1f} req/s) | {requests} | {load:.0%} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
