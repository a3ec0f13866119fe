"""How often does the interval of a capacity hold the long-run value?

    python studies/coverage.py [REPETITIONS]

The server takes one request at a time, each for 10 ms. So its long-run capacity is known: the rate at which 90% of
the requests finish within a level, by Lindley's recursion over ten million arrivals. Each repetition has new seeds.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from pdvsim.calibration.fit.build import save
from pdvsim.decide.capacity import Plan
from pdvsim.decide.capacity_search import find_capacities
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench
from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.profile import roofline

SERVICE_S, SHARE, ARRIVALS, SEEDS = 0.01, 0.9, 10_000_000, 5
LEVELS_MS = (20, 50, 200)


def server(folder: Path) -> Experiment:
    """A server of one request at a time."""
    free, slow = (ForwardTerms(token_s=token_s) for token_s in (1e-15, SERVICE_S / 100))
    models = {"llama-3.2-1b": free, "llama-3.1-8b": slow}
    save(replace(roofline(GPUS["h200"]), name="queue", models=models, uncertainty={}), folder / "queue.json")
    return Experiment(
        "autoregressive",
        Traffic("random", input_len=100, output_len=1),
        server=Server(max_num_seqs=1, max_num_batched_tokens=10**6),
        hardware=Hardware(profile=str(folder / "queue.json"), kv_capacity_tokens=10**9),
        host=Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0),
    )


def long_run(level_s: float) -> float:
    """The highest rate at which enough requests meet a level, by bisection."""
    gaps, low, high = np.random.default_rng(0).exponential(1.0, ARRIVALS), 1.0, 1 / SERVICE_S
    while high / low > 1.001:
        rate = (low * high) ** 0.5
        steps = np.concatenate([[0.0], np.cumsum(SERVICE_S - gaps / rate)])
        in_time = np.mean(steps - np.minimum.accumulate(steps) + SERVICE_S <= level_s)
        low, high = (rate, high) if in_time >= SHARE else (low, rate)
    return low


def main(repetitions: int) -> None:
    """Print for each level how many intervals hold the long-run rate, and the mean of the rates found."""
    with tempfile.TemporaryDirectory() as folder:
        one = server(Path(folder))
        for level_ms in LEVELS_MS:
            true, covered, rates = long_run(level_ms / 1e3), 0, []
            for at in range(repetitions):
                base = replace(one, traffic=replace(one.traffic, seed=1000 * at))
                goal = Goal("throughput", (f"ttft:{level_ms}",), SHARE)
                [entry] = find_capacities(Plan(base, ("autoregressive",), SEEDS, goal), Bench(1)).summary()
                low, high = entry["rate"].ends
                covered += low <= true <= high
                rates.append(entry["rate"].mean)
            found = f"found {np.mean(rates):.1f} on average"
            print(f"ttft:{level_ms}: {covered} of {repetitions} intervals hold {true:.1f} req/s; {found}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100)
