"""How an engine pads a forward to the CUDA graphs that it has captured.

vLLM pads the tokens of a step, prompts included: 1, 2, 4, then multiples of 8 to 256, then of 16 to 512
(`max_cudagraph_capture_size`). SGLang and TensorRT-LLM (with `enable_padding`) pad the requests of a step. SGLang:
1 to 8, even numbers to 32, multiples of 4 to 64, of 8 to 256, then of 16. TensorRT-LLM: 1, 2, 4, then multiples
of 8 to 128, then of 64.

Not modelled: what a step larger than the largest graph pays for its launches.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Literal

from pdvsim.sim.hardware.forward import ForwardTerms

Padding = Literal["profile", "vllm", "sglang", "tensorrt-llm"]

VLLM_TOKENS = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))
ROWS: dict[Padding, tuple[int, ...]] = {
    "sglang": (*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, 4097, 16)),
    "tensorrt-llm": (1, 2, 4, *range(8, 129, 8), *range(192, 4097, 64)),
}


@lru_cache(maxsize=64)
def padded(terms: ForwardTerms, padding: Padding) -> ForwardTerms:
    """Return the same forwards, padded as this engine pads them."""
    if padding == "profile":
        return terms
    tokens = VLLM_TOKENS if padding == "vllm" else ()
    return replace(terms, row_buckets=ROWS.get(padding, ()), chunk_buckets=(), token_buckets=tokens)
