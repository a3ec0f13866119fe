"""Layers with a sliding window: which they are, what they read, and what they keep."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.sim.machine.kv import held_tokens, windows_of
from pdvsim.sim.models.layers import SlidingWindow
from pdvsim.sim.models.presets import PRESETS, from_config
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.transfer import shipped

H200 = GPUS["h200"]
WINDOWED = sorted(name for name, spec in PRESETS.items() if spec.window)
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma2": {},
    "Gemma3Text": {"num_hidden_layers": 34},
    "GptOss": {},
    "Llama4Text": {},
    "Cohere2": {},
    "Mistral": {"sliding_window": 4096, "max_position_embeddings": 32768},
    "Qwen2": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
}


@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_windowed_layers_are_those_of_transformers(family: str, listed: bool) -> None:
    """With the list of layers that newer configurations have, and by the family's rule without it."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    sizes = config.to_dict()
    if not listed:
        sizes.pop("layer_types", None)
    spec = from_config(sizes, family)
    assert spec.window.layers == sum(kind != "full_attention" for kind in kinds) > 0
    assert spec.reach == sizes.get("attention_chunk_size", sizes.get("sliding_window"))


def unbounded(spec: ModelSpec) -> ModelSpec:
    """The same model with a window that no context passes."""
    assert spec.window is not None
    return replace(spec, window=replace(spec.window, tokens=1 << 40))


def windowed_bytes(spec: ModelSpec) -> int:
    """What a token adds to the layers with a window: keys and values of 16 bits, of their own heads."""
    if (window := spec.window) is None:
        return 0
    keys = window.head_dim or spec.head_dim
    return 2 * window.layers * (window.kv_heads or spec.kv_heads) * (keys + (spec.value_dim or keys))


def priced(latency: CostModel, rows: int, tokens: int, context: float, steps: int = 1) -> tuple[float, float, float]:
    return latency.price(rows, tokens, steps, context).at(context)[:3]


@pytest.mark.parametrize("name", WINDOWED)
@given(rows=st.integers(1, 64), tokens=st.integers(1, 6), share=st.floats(0.0, 3.0))
def test_a_window_bounds_what_its_layers_read(name: str, rows: int, tokens: int, share: float) -> None:
    """Bytes of equal rows are those of each layer's own cache; seconds are at most those of full attention."""
    spec = PRESETS[name]
    assert spec.reach is not None
    context = int(share * spec.reach) * rows
    latency = CostModel(spec, ForwardTerms.roofline(spec, H200))
    whole = CostModel(unbounded(spec), latency.terms)
    within = min(context, rows * spec.reach)
    cached_bytes = spec.attending_layers * spec.kv_layer_bytes * context + windowed_bytes(spec) * within
    seconds, moved, flops = priced(latency, rows, tokens, context)
    most = priced(whole, rows, tokens, context)
    assert moved == pytest.approx(priced(whole, rows, tokens, 0)[1] + cached_bytes)
    assert seconds <= most[0] * (1 + 1e-9)
    assert flops <= most[2] * (1 + 1e-9)
    if context <= rows * spec.reach:
        assert (seconds, moved, flops) == most
    if not spec.attending_layers:
        assert moved == pytest.approx(priced(whole, rows, tokens, within)[1])


@pytest.mark.parametrize("name", WINDOWED)
def test_the_price_has_no_jump_at_the_window(name: str) -> None:
    spec = PRESETS[name]
    assert spec.reach is not None
    latency, knee = CostModel(spec, shipped().fit(spec, H200)), 8 * spec.reach
    for steps in (1, 4):
        before, after = (priced(latency, 8, 2 if steps == 1 else 1, knee + more, steps) for more in (0, 1))
        assert after == pytest.approx(before, rel=1e-4)
        assert all(b >= a for a, b in zip(before, after, strict=True))


def pairs(window: int, start: int, tokens: int) -> int:
    return sum(min(position + 1, window) for position in range(start, start + tokens))


@given(window=st.integers(1, 40), start=st.integers(0, 90), tokens=st.integers(1, 60))
def test_a_prompt_is_multiplied_with_the_window_before_it(window: int, start: int, tokens: int) -> None:
    """Counted pair by pair, in a model whose layers all have the window."""
    spec = replace(PRESETS["mistral-7b-v0.1"], window=SlidingWindow(32, window))
    latency = CostModel(spec, ForwardTerms.roofline(spec, H200))
    flops = latency.price(0, prompts=[(start, tokens)]).flops_0 - 2 * spec.active_params * tokens
    assert flops == pytest.approx(pairs(window, start, tokens) * spec.attention_flops_per_pair)


@given(st.integers(0, 20_000), st.sampled_from(WINDOWED), st.sampled_from([*WINDOWED, "qwen3-0.6b"]))
def test_what_a_request_keeps_is_counted_layer_by_layer(tokens: int, target: str, draft: str) -> None:
    models = [PRESETS[target], PRESETS[draft]]

    def kept(spec: ModelSpec) -> int:
        within = min(tokens, spec.reach or tokens)
        return spec.attending_layers * spec.kv_layer_bytes * tokens + windowed_bytes(spec) * within

    full = sum(spec.kv_bytes_per_token for spec in models)
    assert held_tokens(tokens, windows_of(models)) * full == pytest.approx(sum(map(kept, models)))
