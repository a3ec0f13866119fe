"""Layers without attention by tokens and form of the engine's own matrix product, in microseconds per layer.

    python studies/products.py [MODEL ...]      (on a GPU)

The engine uses its own product up to `SMALL_TOKENS` and the library's beyond. The first row is as shipped; the others
use it up to 64 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from statistics import median

import torch

from pdvsim.profiler.layers import Stack
from pdvsim.realrun.engine import linear
from pdvsim.realrun.engine.arch import preset

MODELS = ("llama-3.1-8b-fp8", "llama-3.1-8b", "tinyllama-1.1b")
TOKENS = (8, 32, 40, 48, 64, 96)
CHANGES: tuple[dict[str, float], ...] = ({}, {"BLOCK_K": 128}, {"BLOCK_N": 128}, {"WARPS": 8}, {"PROGRAMS_PER_SM": 2.0})
FORMS: tuple[dict[str, float], ...] = ({}, *({"SMALL_TOKENS": 64} | change for change in CHANGES))


def main(models: Sequence[str]) -> None:
    """Print a row per model and form."""
    shipped = {name: getattr(linear, name) for form in FORMS for name in form}
    print(f"{'microseconds per layer at tokens':56}", *(f"{tokens:7}" for tokens in TOKENS))
    for name in models or MODELS:
        stack = Stack(preset(name), torch.device("cuda"), 0)
        for form in FORMS:
            for field, value in {**shipped, **form}.items():
                setattr(linear, field, value)
            layer_us = [1e6 * median(stack.seconds(tokens)) / stack.layers for tokens in TOKENS]
            print(f"{name:20} {form!s:35}", *(f"{each:7.1f}" for each in layer_us), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
