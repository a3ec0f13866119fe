"""Throughput next to that of transformers on one GPU, and to predictions: `python studies/peers.py [FILE.json]`.

FILE, by default calibration/data/h200/peers.json, has output tokens per second of every architecture at concurrency 64
on an H200, and of what transformers offered in the same process on models of the same shape: `generate` on a static
batch, `generate` with an assistant, and `generate_batch`. Weights were random, and pdvsim's acceptance pinned. Printed
next to it is what the simulator predicts, with the measured profile, and with roofline latencies and no host cost.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pdvsim.bench.pool import Row
from pdvsim.realrun.machine import as_served
from pdvsim.sim.config import Arch, Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate

if TYPE_CHECKING:
    pass

SHIPPED = Path(__file__).parents[1] / "calibration/data/h200/peers.json"
PAIR = "tinyllama-1.1b:llama-2-7b"
TOKENS = 128  # prompt and output
USERS = 64
REPEATS = 3
ORDER: tuple[Arch, ...] = (
    "pd", "pdv", "colocated", "pdv-hybrid", "baseline", "pdv-unified", "adaptive", "autoregressive",
)  # fmt: skip


def closed_loop(arch: Arch, prompts: int) -> Experiment:
    """Return the load of every architecture, with the engine's limits under both clocks."""
    traffic = Traffic("random", num_prompts=prompts, max_concurrency=USERS, input_len=TOKENS, output_len=TOKENS)
    return applicable(as_served(Experiment(arch, traffic, server=Server(pair=PAIR, max_num_seqs=USERS))))


def table(document: Row) -> str:
    """The comparison, with the simulator's prediction and ceiling of each architecture."""
    lines = [f"{'':56} {'tok/s':>8} {'predicted':>10} {'ceiling':>8} {'reached':>8} {'host idle':>10}"]
    for row in document["rows"]:
        if "failed" in row:
            lines.append(f"{row['name']:56} {row['failed']}")
            continue
        line = f"{row['name']:56} {row['tokens_per_s']:8.0f}"
        if row["name"] in ORDER:
            experiment = closed_loop(row["name"], row["tokens"] // TOKENS)
            ideal = replace(
                experiment,
                hardware=Hardware(profile="roofline"),
                host=Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0),
            )
            ceiling, idle = _throughput(ideal), statistics.median(row["host_idle_share"])
            share = row["tokens_per_s"] / ceiling
            line += f" {_throughput(experiment):10.0f} {ceiling:8.0f} {share:8.0%} {idle:10.1%}"
        lines.append(line)
    return "\n".join(lines)


def _throughput(experiment: Experiment) -> float:
    return float(summarise(simulate(experiment))["output_throughput"])


if __name__ == "__main__":
    chosen = Path(sys.argv[1]) if len(sys.argv) > 1 else SHIPPED
    print(table(json.loads(chosen.read_text(encoding="utf-8"))))
