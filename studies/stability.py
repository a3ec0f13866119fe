"""How often the stability label is wrong or inconclusive, in runs at known shares of a server's capacity.

    python studies/stability.py

Capacity is the throughput of a closed loop of 512 requests of the same lengths, after a warm-up. Below capacity
"overloaded" is wrong, above it "stable" is.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from pdvsim.sim.config import Experiment, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

SEEDS = 20
LOADS = (0.8, 0.95, 1.05, 1.2)
LABELS = ("stable", "inconclusive", "overloaded")


def capacity(experiment: Experiment) -> float:
    """Requests per second while requests are always waiting."""
    traffic = replace(experiment.traffic, num_prompts=6000, max_concurrency=512, seed=999)
    run = simulate(replace(experiment, traffic=traffic))
    return float(summarise(run, Scoring(warmup_requests=1500))["request_throughput"])


def labels(experiment: Experiment, rate: float, requests: int) -> Counter[str]:
    """The labels of runs at that rate."""
    traffic = replace(experiment.traffic, request_rate=rate, num_prompts=requests)
    runs = (simulate(replace(experiment, traffic=replace(traffic, seed=seed))) for seed in range(SEEDS))
    return Counter(summarise(run)["stability"] for run in runs)


def main() -> None:
    """Print the table."""
    print("| architecture | requests | load | " + " | ".join(LABELS) + " |")
    print("|---|---|---|" + "---|" * len(LABELS))
    for arch in ("pd", "colocated"):
        experiment = Experiment(arch, Traffic(), server=Server("tinyllama-1.1b:llama-2-7b"))
        most = capacity(experiment)
        for requests in (1000, 4000):
            for load in LOADS:
                counts = labels(experiment, load * most, requests)
                shares = " | ".join(f"{counts[label] / SEEDS:.0%}" for label in LABELS)
                print(f"| {arch} ({most:.1f} req/s) | {requests} | {load:.0%} | {shares} |", flush=True)


if __name__ == "__main__":
    main()
