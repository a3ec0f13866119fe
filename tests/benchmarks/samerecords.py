"""One line a run with a digest of all its records: two states of the code that print the same lines simulate alike.

    python tests/benchmarks/samerecords.py > before.txt      (then change the code, and compare)

Every architecture, under loads that reach the corners: one request, full batches, full KV caches, every controller,
lanes on several GPUs, hosts that poll, priorities. Floats are compared to the last bit, so on one machine only; the
stages of a request are sums, whose order is nobody's business: they are compared to the nanosecond.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np

import pdvsim
from pdvsim.sim.policies import ARCHS

STAGES = ("draft_s", "wait_s", "verify_s")
LOADS: dict[str, dict[str, Any]] = {
    "one": {"max_concurrency": 1, "num_prompts": 30},
    "eight": {"max_concurrency": 8, "num_prompts": 80},
    "sixty-four": {"max_concurrency": 64, "num_prompts": 200},
    "poisson": {"request_rate": 12, "num_prompts": 300},
    "bursts": {"request_rate": 20, "burstiness": 0.3, "num_prompts": 200, "input_len": 1200, "output_len": 100},
    "full cache": {"max_concurrency": 48, "num_prompts": 120, "kv_capacity_tokens": 6000, "kv_cache": "paged"},
    "sharegpt": {"dataset_name": "sharegpt", "request_rate": 10, "num_prompts": 150},
    "no profile of power": {"gpu": "A100-80GB", "request_rate": 6, "num_prompts": 150},
    "two servers": {"request_rate": 30, "num_prompts": 300, "replicas": 2, "router": "least-loaded"},
    "plain": {"max_concurrency": 16, "num_prompts": 80, "num_speculative_tokens": 0},
    "goodput": {"request_rate": 25, "num_prompts": 250, "controller": "goodput"},
    "feedback": {"request_rate": 25, "num_prompts": 250, "controller": "feedback"},
    "polling host": {"request_rate": 12, "num_prompts": 100, "host": "polling"},
    "notified host": {"request_rate": 12, "num_prompts": 100, "host": "python-threads"},
    "dynamic": {"request_rate": 30, "num_prompts": 250, "priority": "dynamic"},
    "preemptive": {"request_rate": 30, "num_prompts": 250, "priority": "preemptive"},
    "serial": {"request_rate": 20, "num_prompts": 150, "contention": "serial"},
    "max": {"request_rate": 20, "num_prompts": 150, "contention": "max"},
    "small batches": {"request_rate": 30, "num_prompts": 200, "max_num_seqs": 12, "max_num_batched_tokens": 256},
    "two gpus": {"request_rate": 12, "num_prompts": 150, "place": "verify=1"},
}


def digest(result: Any) -> str:
    """Of all rows of a run, column by column."""
    digested = sha256()
    for table in (result.requests, result.launches, result.deliveries):
        for name in sorted(table):
            column = np.ascontiguousarray(table[name])
            if name in STAGES:
                column = np.rint(1e9 * column).astype("i8")
            digested.update(f"{name} {column.dtype} {len(column)}".encode())
            digested.update(column.tobytes())
    return digested.hexdigest()[:16]


def main() -> None:
    for name, load in LOADS.items():
        for arch in ARCHS:
            try:
                outcome = digest(pdvsim.run(arch=arch, pair="tinyllama-1.1b:llama-2-7b", **load).result)
            except ValueError as refusal:
                outcome = f"refused: {refusal}"
            print(f"{name:>20} {arch:<15} {outcome}", flush=True)


if __name__ == "__main__":
    main()
