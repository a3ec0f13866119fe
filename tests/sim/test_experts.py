"""Mixtures of experts and quantised weights: sizes, which experts a forward reads, and what that costs."""

from __future__ import annotations

import pytest

from pdvsim.sim.core import Experts, HeadSpec
from pdvsim.sim.hardware.models import PRESETS, model, pair

# sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "billions", "active"),
    [
        ("mixtral-8x7b", 46.7, 12.9),  # mistral.ai/news/mixtral-of-experts
        ("qwen3-30b-a3b", 30.5, 3.3),  # arXiv 2505.09388; active ones with embeddings
        ("qwen3-235b-a22b", 235.0, 22.0),
        ("gpt-oss-120b", 116.8, 5.1),  # arXiv 2508.10925; active ones without embeddings
        ("gpt-oss-20b", 20.9, 3.6),
        ("deepseek-v3", 671.0, 37.0),  # arXiv 2412.19437
    ],
)
def test_parameters_are_the_makers(name: str, billions: float, active: float) -> None:
    spec = PRESETS[name]
    assert spec.params / 1e9 == pytest.approx(billions, rel=0.01)
    heads = 1 if name.startswith("gpt-oss") else 2
    assert (spec.active_params + heads * spec.head_params) / 1e9 == pytest.approx(active, rel=0.02)
    assert spec.layer_params == spec.common_params + spec.routes * spec.expert_params


def test_latent_attention_caches_one_vector() -> None:
    """DeepSeek-V3: 512 + 64 values in each of 61 layers, which are 70 KB per token of 16 bits (arXiv 2412.19437)."""
    assert PRESETS["deepseek-v3"].kv_bytes_per_token == 61 * 576 * 2


def test_windows_of_128_tokens_are_left_out_of_the_cache() -> None:
    spec = PRESETS["gpt-oss-20b"]
    assert spec.kv_bytes_per_token == 12 * 2 * 8 * 64 * 2


@pytest.mark.parametrize(
    ("target", "intermediate"),
    [("qwen3-30b-a3b", 6144), ("qwen3-235b-a22b", 24_576), ("gpt-oss-120b", 17_280), ("deepseek-v3", 40_960)],
)
def test_heads_of_mixtures_have_a_plain_layer(target: str, intermediate: int) -> None:
    """As in SpecForge's configurations."""
    head = pair(f"eagle3-{target}:{target}").draft
    assert isinstance(head, HeadSpec)
    assert (head.experts, head.latent, head.intermediate, head.vocab) == (None, None, intermediate, 32_000)


def test_an_mtp_layer_has_its_targets_experts() -> None:
    """DeepSeek-V3's has 11.5 billion parameters of its own (its model card lists 14, embedding and output included)."""
    head = pair("mtp-deepseek-v3:deepseek-v3").draft
    assert head.params / 1e9 == pytest.approx(11.5, rel=0.01)
    assert head.layer_bytes == 1.0


# names ---------------------------------------------------------------------------------------------------------------


def test_a_name_says_that_weights_have_eight_bits() -> None:
    plain, spec = model("llama-3.1-8b"), model("llama-3.1-8b-fp8")
    assert spec.name == "llama-3.1-8b-fp8"
    assert plain.weight_bytes - spec.weight_bytes == plain.layer_params
    assert spec.kv_bytes_per_token == plain.kv_bytes_per_token
    with pytest.warns(UserWarning, match="is read as qwen3-30b-a3b"):
        assert model("Qwen/Qwen3-30B-A3B-FP8") == model("qwen3-30b-a3b-fp8")


def test_the_head_of_a_quantised_target_is_not() -> None:
    plain, given = pair("eagle3-llama-3.1-8b:llama-3.1-8b"), pair("eagle3-llama-3.1-8b-fp8:llama-3.1-8b-fp8")
    assert given.draft.name == "eagle3-llama-3.1-8b-fp8"
    assert given.draft.weight_bytes == plain.draft.weight_bytes
    assert given.target.weight_bytes < plain.target.weight_bytes
    mixed = pair("qwen2-1.5b:qwen2-7b-fp8")  # each by its own name
    assert (mixed.draft.layer_bytes, mixed.target.layer_bytes) == (None, 1.0)
    assert pair("eagle3-qwen2-7b-fp8:qwen2-7b-fp8").draft.vocab == 16_000


@pytest.mark.parametrize("name", ["gpt-oss-20b-fp8", "deepseek-v3-fp8", "llama-3.1-8b-fp8-fp8"])
def test_weights_are_quantised_once(name: str) -> None:
    with pytest.raises(ValueError, match="has quantised weights as it is published"):
        model(name)


# which experts a forward reads ---------------------------------------------------------------------------------------


def test_distinct_experts_of_independent_tokens_are_drawn_balls() -> None:
    """One token takes its own, and many take all; 256/8 of 8 tokens are 57.4 and of 15 are 97.0."""
    experts = Experts(256, 8, 1)
    assert experts.read(1) == pytest.approx(8)
    assert experts.read(8) == pytest.approx(57.4, abs=0.1)
    assert experts.read(15) == pytest.approx(97.0, abs=0.1)
    assert experts.read(1e4) == pytest.approx(256)


@pytest.mark.parametrize(
    ("count", "per_token", "tokens", "published"),
    [
        (256, 8, 8, 39.4),  # Laguna XS 2.1, github.com/Luce-Org/lucebox/pull/501
        (256, 8, 15, 58.9),
        (64, 4, 2, 4 * 1.743),  # GLM-4.7-Flash: neighbours share 25.7%, github.com/ml-explore/mlx-lm/pull/1485
    ],
)
def test_tokens_of_one_request_share_experts_as_published(
    count: int, per_token: int, tokens: int, published: float
) -> None:
    """Within 6% for the default, which is one figure for three counts."""
    experts = Experts(count, per_token, 1)
    assert experts.read(tokens**experts.overlap) == pytest.approx(published, rel=0.06)
