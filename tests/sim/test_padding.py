"""Padding to CUDA graphs: how many tokens a forward computes, by the sizes that each engine captures."""

from __future__ import annotations

import pytest

from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.hardware.forward import ForwardTerms
from pdvsim.sim.hardware.models import MODELS
from pdvsim.sim.hardware.padding import Padding, padded
from pdvsim.sim.hardware.profile import builtin
from pdvsim.sim.hardware.terms import GraphSizes, RooflineLayers

# a forward that takes a second per token computed, so that its time counts them
COUNTS = ForwardTerms(RooflineLayers(token_s=1.0), graphs=GraphSizes((16, 48, 128), (64, 256)))


def counted(padding: Padding) -> CostModel:
    return CostModel(MODELS["llama-2-7b"], padded(COUNTS, padding))


@pytest.mark.parametrize(("padding", "rows", "tokens", "computed"), [
    ("profile", 17, 1, 48), ("profile", 17, 3, 48 * 3), ("profile", 200, 1, 200),
    # vllm/config/compilation.py: [1, 2, 4] + range(8, 256, 8) + range(256, 513, 16), of a step's tokens
    ("vllm", 1, 1, 1), ("vllm", 3, 1, 4), ("vllm", 5, 1, 8), ("vllm", 5, 3, 16), ("vllm", 17, 1, 24),
    ("vllm", 17, 2, 40), ("vllm", 31, 8, 248), ("vllm", 127, 2, 256), ("vllm", 129, 2, 272), ("vllm", 256, 2, 512),
    ("vllm", 257, 2, 514),  # larger than any graph: as it is
    # sglang: range(1, 9) + range(10, 33, 2) + range(40, 65, 4) + range(72, 257, 8) + range(272, …, 16), of requests
    ("sglang", 7, 2, 14), ("sglang", 9, 2, 20), ("sglang", 33, 1, 40), ("sglang", 65, 3, 72 * 3),
    ("sglang", 257, 1, 272),
    # TensorRT-LLM: [1, 2, 4] + range(8, 129, 8), then steps of 64, of requests
    ("tensorrt-llm", 3, 5, 20), ("tensorrt-llm", 17, 2, 48), ("tensorrt-llm", 129, 1, 192),
])  # fmt: skip
def test_the_tokens_that_are_computed(padding: Padding, rows: int, tokens: int, computed: int) -> None:
    assert counted(padding).price(rows, tokens).seconds_0 == computed
    if tokens == 1:  # every later step of a draft is such a forward
        assert counted(padding).price(rows, 1, 4).seconds_0 == 4 * computed


def test_prompts_are_padded_with_the_rows_or_apart() -> None:
    prompts = [(0, 100)]
    assert counted("profile").price(5, 2, prompts=prompts, first_tokens=1).seconds_0 == 16 * 2 + 256
    assert counted("vllm").price(5, 2, prompts=prompts, first_tokens=1).seconds_0 == 112
    assert counted("tensorrt-llm").price(5, 2, prompts=prompts, first_tokens=1).seconds_0 == 8 * 2 + 100


def test_a_profile_is_padded_in_all_its_models() -> None:
    mine = builtin("h200").padded("vllm")
    assert all(fit.graphs.token_buckets and not fit.graphs.row_buckets for fit in mine.models.values())
    assert builtin("h200").padded("profile") is builtin("h200")
