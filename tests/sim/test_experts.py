"""Mixtures of experts and quantised weights: sizes, which experts a forward reads, and what that costs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.models.layers import Experts
from pdvsim.sim.models.presets import PRESETS, from_config, model, pair
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.prices.transfer import shipped

H200 = GPUS["h200"]
MIXTURES = sorted(name for name, spec in PRESETS.items() if spec.experts is not None)

# sizes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "billions", "active"), [
    ("mixtral-8x7b", 46.7, 12.9),  # mistral.ai/news/mixtral-of-experts
    ("qwen3-30b-a3b", 30.5, 3.3),  # arXiv 2505.09388; active ones with embeddings
    ("qwen3-235b-a22b", 235.0, 22.0),
    ("gpt-oss-120b", 116.8, 5.1),  # arXiv 2508.10925; active ones without embeddings
    ("gpt-oss-20b", 20.9, 3.6),
    ("deepseek-v3", 671.0, 37.0),  # arXiv 2412.19437
])  # fmt: skip
def test_parameters_are_the_makers(name: str, billions: float, active: float) -> None:
    spec = PRESETS[name]
    assert spec.params / 1e9 == pytest.approx(billions, rel=0.01)
    heads = 1 if name.startswith("gpt-oss") else 2
    assert (spec.active_params + heads * spec.head_params) / 1e9 == pytest.approx(active, rel=0.02)
    assert spec.layer_params == spec.common_params + spec.experts.count * spec.expert_params


def test_the_parameters_of_a_configuration_without_a_preset() -> None:
    """Ling-mini-2.0 (configuration and README of ant-yy/Ling-V2): 16B, of which 789M without embeddings are active."""
    config = {
        "model_type": "bailing_moe_v2", "vocab_size": 157184, "hidden_size": 2048, "intermediate_size": 5120,
        "num_hidden_layers": 20, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 256, "num_experts_per_tok": 8, "num_shared_experts": 1, "moe_intermediate_size": 512,
        "first_k_dense_replace": 1,
    }  # fmt: skip
    spec = from_config(config, "ling-mini-2.0")
    assert spec.params == pytest.approx(16.3e9, rel=0.01)
    assert spec.active_params == pytest.approx(789e6, rel=0.02)


def test_what_a_token_takes_of_the_cache() -> None:
    """Latent attention caches one vector of 512 + 64 values a layer (arXiv 2412.19437)."""
    assert PRESETS["deepseek-v3"].kv_bytes_per_token == 61 * 576 * 2
    assert PRESETS["gpt-oss-20b"].kv_bytes_per_token == 24 * 2 * 8 * 64 * 2


# names ---------------------------------------------------------------------------------------------------------------


def test_a_name_says_that_weights_have_eight_bits() -> None:
    plain, spec = model("llama-3.1-8b"), model("llama-3.1-8b-fp8")
    assert spec.name == "llama-3.1-8b-fp8"
    assert plain.weight_bytes - spec.weight_bytes == plain.layer_params
    assert spec.kv_bytes_per_token == plain.kv_bytes_per_token
    with pytest.warns(UserWarning, match="is read as qwen3-30b-a3b"):
        assert model("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8") == model("qwen3-30b-a3b-fp8")
    assert model("Qwen/Qwen3-30B-A3B-FP8") == model("qwen3-30b-a3b-fp8")
    with pytest.warns(UserWarning, match="is read as llama-3.1-8b"):
        assert model("RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic") == spec


def test_the_head_of_a_quantised_target_is_not() -> None:
    plain, given = pair("eagle3-llama-3.1-8b:llama-3.1-8b"), pair("eagle3-llama-3.1-8b-fp8:llama-3.1-8b-fp8")
    assert given.draft.name == "eagle3-llama-3.1-8b-fp8"
    assert given.draft.weight_bytes == plain.draft.weight_bytes
    assert given.target.weight_bytes < plain.target.weight_bytes
    mixed = pair("qwen2-1.5b:qwen2-7b-fp8")  # each by its own name
    assert (mixed.draft.layer_bytes, mixed.target.layer_bytes) == (None, 1.0)
    assert pair("eagle3-qwen2-7b-fp8:qwen2-7b-fp8").draft.vocab == 16_000


# which experts a forward reads ---------------------------------------------------------------------------------------


def test_distinct_experts_of_independent_tokens_are_drawn_balls() -> None:
    """One token takes its own, and many take all; 256/8 of 8 tokens are 57.4 and of 15 are 97.0."""
    experts = Experts(256, 8, 1)
    assert experts.read(1) == pytest.approx(8)
    assert experts.read(8) == pytest.approx(57.4, abs=0.1)
    assert experts.read(15) == pytest.approx(97.0, abs=0.1)
    assert experts.read(1e4) == pytest.approx(256)


@pytest.mark.parametrize(("count", "per_token", "tokens", "published"), [
    (256, 8, 8, 39.4),  # Laguna XS 2.1, github.com/Luce-Org/lucebox/pull/501
    (256, 8, 15, 58.9),
    (64, 4, 2, 4 * 1.743),  # GLM-4.7-Flash: neighbours share 25.7%, github.com/ml-explore/mlx-lm/pull/1485
])  # fmt: skip
def test_tokens_of_one_request_share_experts_as_published(
    count: int, per_token: int, tokens: int, published: float
) -> None:
    """Within 6% for the default, which is one figure for three counts."""
    experts = Experts(count, per_token, 1)
    assert experts.read(experts.independent(tokens)) == pytest.approx(published, rel=0.06)


# what it costs -------------------------------------------------------------------------------------------------------


def test_a_forward_by_hand() -> None:
    """Roofline of Qwen3-30B-A3B: two rows of three tokens are 2 * 3^0.8 independent ones."""
    spec = PRESETS["qwen3-30b-a3b"]
    experts, latency = spec.experts, CostModel(spec, ForwardTerms.roofline(spec, H200))
    assert experts is not None
    read = 128 * (1 - (1 - 8 / 128) ** (2 * 3**0.8))
    layers = 48 * (2048 * (2 * 4096 + 2 * 512) + 2048 * 128 + read * 3 * 2048 * 768) * 2
    moved = layers + 2048 * 151936 * 2 + 6 * spec.kv_bytes_per_token
    shape = latency.price(2, 3)
    assert shape.bytes_0 == pytest.approx(moved)
    assert shape.seconds_0 == pytest.approx(moved / H200.bandwidth_bytes_per_s)
    active = 48 * (2048 * (2 * 4096 + 2 * 512) + 2048 * 128 + 8 * 3 * 2048 * 768)
    assert shape.flops_0 == pytest.approx(2 * 6 * (active + 2048 * 151936) + 2 * 6 * spec.attention_flops_per_pair)


def test_rows_and_prompts_of_one_forward_read_experts_together() -> None:
    spec = PRESETS["qwen3-30b-a3b"]
    latency, experts = CostModel(spec, ForwardTerms.roofline(spec, H200)), PRESETS["qwen3-30b-a3b"].experts
    both = latency.price(3, 2, prompts=[(0, 5)])
    cached = (3 * 2 + 5) * spec.kv_bytes_per_token
    read = experts.read(3 * 2**0.8 + 5**0.8)
    head = spec.head_params * 2
    assert both.bytes_0 == pytest.approx(spec.common_bytes + read * spec.expert_bytes + head + cached)
    packed = latency.price(3, 4, packed=6)  # rows of two on average
    read = experts.read(3 * 2**0.8)
    padded = 3 * 4 * spec.kv_bytes_per_token
    assert packed.bytes_0 == pytest.approx(spec.common_bytes + read * spec.expert_bytes + head + padded)


@given(st.sampled_from(MIXTURES), st.integers(1, 128), st.integers(1, 9), st.floats(0.05, 1.0))
def test_laws_of_distinct_experts(name: str, rows: int, tokens: int, overlap: float) -> None:
    """At least one token's and at most all; more tokens read more; a request's own share more than others' do."""
    spec = PRESETS[name]
    assert spec.experts is not None
    spec = replace(spec, experts=replace(spec.experts, overlap=overlap))
    latency, experts = CostModel(spec, ForwardTerms.roofline(spec, H200)), spec.experts
    read = latency._distinct(rows, tokens)
    assert experts.per_token * (1 - 1e-9) <= read <= experts.count
    assert read <= latency._distinct(rows * tokens, 1) * (1 + 1e-9)
    assert read <= latency._distinct(rows, tokens + 1) * (1 + 1e-9)
    assert read <= latency._distinct(rows + 1, tokens) * (1 + 1e-9)


@pytest.mark.parametrize("name", [*MIXTURES, "llama-3.1-8b-fp8", "qwen3-30b-a3b-fp8", "mtp-deepseek-v3"])
@pytest.mark.parametrize("card", ["h200", "a100-80gb", "l4"])
def test_predictions_are_above_the_roofline_and_rise(name: str, card: str) -> None:
    """Of the GPU's reachable rates, to 2%: a kernel may be faster than a copy."""
    spec, gpu = model(name), shipped().ceilings(GPUS[card])
    fit, bound = CostModel(spec, shipped().fit(spec, GPUS[card])), CostModel(spec, ForwardTerms.roofline(spec, gpu))
    for rows in (1, 4, 16, 64, 256):
        times = [fit.price(rows, tokens).seconds_0 for tokens in (1, 2, 4, 8)]
        assert all(a <= b * (1 + 1e-9) for a, b in pairwise(times))
        assert times[0] >= 0.98 * bound.price(rows, 1).seconds_0
        assert times[2] >= 0.98 * bound.price(rows, 4).seconds_0


# quantised -----------------------------------------------------------------------------------------------------------


def seconds(spec: ModelSpec, card: str, rows: int, tokens: int = 1) -> float:
    return CostModel(spec, shipped().fit(spec, GPUS[card])).price(rows, tokens).seconds_0


def test_eight_bits_halve_reading_and_arithmetic() -> None:
    """Arithmetic on cards that have such units alone; fixed times stay."""
    plain, spec = model("llama-3.1-8b"), model("llama-3.1-8b-fp8")
    bounds = [ForwardTerms.roofline(m, H200) for m in (plain, spec)]
    half = replace(bounds[0], weights_s=bounds[0].weights_s / 2, token_s=bounds[0].token_s / 2)
    assert replace(bounds[1], expert_s=0.0) == replace(half, expert_s=0.0)
    ampere = [ForwardTerms.roofline(m, GPUS["a100-80gb"]).figures() for m in (plain, spec)]
    assert ampere[1]["token_s"] == ampere[0]["token_s"]
    assert 0.5 < seconds(spec, "h200", 1) / seconds(plain, "h200", 1) < 0.7
    assert seconds(spec, "a100-80gb", 256, 8) > 0.9 * seconds(plain, "a100-80gb", 256, 8)


def test_a_cache_of_eight_bits_halves_its_reading() -> None:
    """Of a measured model: what is read for one query per row. The rest of its times stay, and the output says so."""
    spec = PRESETS["llama-3.1-8b"]
    narrow = replace(spec, kv_dtype_bytes=1)
    assert 2 * narrow.kv_bytes_per_token == spec.kv_bytes_per_token
    h200 = builtin("h200")
    before, after = (h200.covering(Pair(m, m)) for m in (spec, narrow))
    one, other = before.fit(spec), after.fit(narrow)
    read, read_less = (terms.figures()["kv_knots"] for terms in (one, other))
    assert read_less[0][1] == pytest.approx(read[0][1] / 2)
    assert read_less[-1][1] - read_less[0][1] == pytest.approx(read[-1][1] - read[0][1])
    assert other.layer_knots == one.layer_knots
    assert after.foundation == f"{before.foundation}; KV cache of 8 bits by its bytes alone"
