"""Cost of prefix caching: processor time of a run with it over that of the same traffic without, best of several.

    python tests/benchmarks/prefixes.py

The loads are stable with and without caching: an overloaded run has fewer and larger launches, and so costs less.
"""

from __future__ import annotations

import time
from typing import Any

import pdvsim

LOADS: dict[str, dict[str, Any]] = {
    "repeated prefixes": {"dataset_name": "prefix_repetition", "request_rate": 8},
    "system prompts": {"prefix_len": 1000, "num_prefixes": 20, "request_rate": 6},
    "conversations": {"num_turns": 5, "think_time_s": 2, "request_rate": 4},
    "conversations, full cache": {
        "num_turns": 5, "think_time_s": 2, "request_rate": 4, "gpu_memory_utilization": 0.2
    },
    "agents": {
        "dataset_name": "random", "prefix_len": 1500, "input_len": 40, "output_len": 30, "num_turns": 10,
        "think_time_s": 1, "request_rate": 8,
    },
    "nothing shared": {"request_rate": 6},
}  # fmt: skip


def seconds(arch: str, caching: bool, load: dict[str, Any]) -> float:
    """Processor time of a run."""
    begin = time.process_time()
    run = pdvsim.run(arch=arch, num_prompts=1500, enable_prefix_caching=caching, detailed=False, **load)
    assert run.metrics["stability"] == "stable", f"{arch} is {run.metrics['stability']}"
    return time.process_time() - begin


def main() -> None:
    for name, load in LOADS.items():
        for arch in ("autoregressive", "colocated", "pd", "pdv"):
            pairs = [(seconds(arch, True, load), seconds(arch, False, load)) for _ in range(4)]
            cached, plain = (min(column) for column in zip(*pairs, strict=True))
            print(f"{name:28}{arch:16}{cached / plain:.2f}", flush=True)


if __name__ == "__main__":
    main()
