"""Parallel drafters at their published ends: `python studies/parallel.py`. Gains over plain decoding on one B200.

vLLM pull request 32887 states gpt-oss-120b with P-EAGLE (k=7 at one request: 1.52 times plain, 1.12 times the best
EAGLE-3; k=3 at eight: 1.34 and 1.07) on MT-Bench, and Llama-3.3-70B NVFP4 with PARD's 1B (k=11: 3.1 times plain). It
states no acceptance. Pull request 32628 has that of both heads per position, on HumanEval.
"""

from __future__ import annotations

import sys
import warnings
from typing import Any

import pdvsim

EAGLE3 = (0.72, 0.50, 0.33, 0.21, 0.14, 0.09, 0.06)  # P-EAGLE's is the default
LOAD: dict[str, Any] = {"gpu": "b200", "dataset_name": "random", "input_len": 100, "output_len": 800}
PUBLISHED = {1: ("k=7", 1.52, 1.12), 8: ("k=3", 1.34, 1.07)}  # requests: best P-EAGLE, over plain, over EAGLE-3
PARD = "pard-llama-3.2-1b:llama-3.3-70b-nvfp4"


def speed(concurrency: int, **options: Any) -> float:
    """Output tokens per second of a closed loop."""
    prompts = 24 if concurrency == 1 else 16 * concurrency
    run = pdvsim.run(**{"arch": "colocated"} | LOAD | options, max_concurrency=concurrency, num_prompts=prompts)
    return float(run.metrics["output_throughput"])


def best(plain: float, lengths: tuple[int, ...], concurrency: int, **options: Any) -> tuple[int, float]:
    """The draft length with the largest gain, and that gain."""
    gains = {k: speed(concurrency, num_speculative_tokens=k, **options) / plain for k in lengths}
    k = max(gains, key=lambda length: gains[length])
    return k, gains[k]


def main() -> int:
    """Print predicted and published gains."""
    warnings.simplefilter("ignore")
    for concurrency, (length, gain, over) in PUBLISHED.items():
        target: dict[str, Any] = {"model": "gpt-oss-120b"}
        plain = speed(concurrency, **target, arch="autoregressive")
        k, parallel = best(plain, (3, 5, 7), concurrency, **target, drafter="p-eagle")
        rates: dict[str, Any] = {"drafter": "eagle3", "synthetic_acceptance_rates": list(EAGLE3)}
        other, chain = best(plain, (1, 2, 3, 5), concurrency, **target, **rates)
        print(f"gpt-oss-120b, concurrency {concurrency}: plain {plain:.0f} tok/s")
        print(f"  P-EAGLE k={k}: {parallel:.2f} times plain (published {length}: {gain}), ", end="")
        print(f"{parallel / chain:.2f} times EAGLE-3 at k={other} (published {over})")
    plain = speed(1, pair=PARD.replace("pard-llama-3.2-1b", "none"), arch="autoregressive")
    for rate in (0.7, 0.76, 0.8):
        gain = speed(1, pair=PARD, num_speculative_tokens=11, acceptance_rate=rate) / plain
        print(f"Llama-3.3-70B NVFP4, PARD k=11, acceptance {rate}: {gain:.2f} times plain (published 3.10)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
