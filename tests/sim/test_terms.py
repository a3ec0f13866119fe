"""Every cost term against its own law, their sum against a forward, and files of earlier versions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.calibration.fit.build import save
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.models.presets import MODELS, PRESETS
from pdvsim.sim.models.specs import Pair
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms, in_waves, interpolate, large_products_s
from pdvsim.sim.prices.profile import builtin, load, roofline

EARLIER = json.loads((Path(__file__).parent / "data" / "earlier_profile.json").read_text(encoding="utf-8"))
LLAMA = PRESETS["llama-2-7b"]  # 32 layers, 32 KV heads of 128
seconds = st.floats(1e-6, 1e-1)
counts = st.integers(1, 4096)
chunks = st.tuples(st.integers(0, 9000), st.integers(1, 3000))


@given(seconds, seconds, seconds, counts, st.integers(0, 100))
def test_layers_at_the_roofline(fixed_s: float, read_s: float, token_s: float, tokens: int, experts: int) -> None:
    """A fixed time and the larger of memory and arithmetic, or their p-norm."""
    terms = ForwardTerms(fixed_s, read_s, token_s, expert_s=1e-4)
    memory_s, compute_s = read_s + 1e-4 * experts, tokens * token_s
    assert terms.layers_s(tokens, experts) == pytest.approx(fixed_s + max(memory_s, compute_s))
    soft = replace(terms, sharpness=2.0).layers_s(tokens, experts)
    assert soft == pytest.approx(fixed_s + (memory_s**2 + compute_s**2) ** 0.5)


def test_measured_layers_are_straight_between_their_knots() -> None:
    terms = ForwardTerms(layer_knots=((10, 1e-3), (20, 3e-3), (40, 4e-3)), expert_s=1e-4)
    for tokens, expected in ((1, 1e-3), (10, 1e-3), (15, 2e-3), (20, 3e-3), (30, 3.5e-3), (60, 5e-3)):
        assert terms.layers_s(tokens) == pytest.approx(expected)
        assert terms.layers_s(tokens, 7) == pytest.approx(expected + 7e-4)


def test_small_kernels_are_those_of_few_tokens_outside_the_large_products() -> None:
    """Of 10 ms, 4 ms in large products; a forward of more tokens, or of large products alone, has none."""
    terms = ForwardTerms(small_kernel_tokens=32, large_s=4e-3)
    shares = [terms.small_share(*of) for of in ((32, 10e-3), (33, 10e-3), (1, 4e-3))]
    assert shares == pytest.approx([0.6, 0.0, 0.0])
    gate_and_up = LLAMA.layers * 2 * LLAMA.hidden * 2 * LLAMA.intermediate  # the one product above 150 MB
    assert large_products_s(LLAMA, 1.5e8, 1e12) == pytest.approx(gate_and_up / 1e12)


@given(st.integers(0, 300), st.integers(0, 300))
def test_padding_is_up_to_a_graph_and_none_above_the_largest(few: int, many: int) -> None:
    terms = ForwardTerms(row_buckets=(1, 8, 64), chunk_buckets=(128,), token_buckets=(16, 256))
    pads = (terms.padded_rows, terms.row_buckets), (terms.padded_prompt, terms.chunk_buckets)
    for pad, sizes in (*pads, (terms.padded_tokens, terms.token_buckets)):
        assert pad(many) >= many
        assert pad(many) in (0, many, *sizes)
        assert (pad(many) == many) or many < sizes[-1]
        assert pad(min(few, many)) <= pad(max(few, many))
    assert terms.padded_rows(0) == terms.padded_prompt(0) == 0


@given(st.integers(1, 64), st.integers(1, 9))
def test_attention_of_rows_is_linear_in_their_context(rows: int, tokens: int) -> None:
    """At the roofline the larger of reading and multiplying, of the offset and of the slope."""
    own, pairs = rows * tokens, rows * tokens * (tokens + 1) / 2
    fixed_s, slope_s = ForwardTerms(kv_s=2e-9, pair_s=1e-9).rows_line(32, rows, rows, tokens, own, pairs)
    assert slope_s == pytest.approx(max(2e-9, tokens * 1e-9))
    assert fixed_s == pytest.approx(max(2e-9 * own, 1e-9 * pairs))
    kv = (1, 2e-9), (9, 4e-9)
    measured = ForwardTerms(kv_knots=kv, row_s=1e-7, width_knots=((1, 1e-5), (9, 2e-5)))
    fixed_s, slope_s = measured.rows_line(32, rows, rows, tokens, own, pairs)
    assert slope_s == pytest.approx(interpolate(kv, tokens))
    assert fixed_s == pytest.approx(own * slope_s + rows * 1e-7 + 1e-5 * (1 + (tokens - 1) / 8))


@given(st.lists(chunks, min_size=1, max_size=4), st.sampled_from([0, 512]))
def test_attention_over_prompts(prompts: list[tuple[int, int]], window: int) -> None:
    waves = ForwardTerms(prompt_sms=132, prompt_wave_s=1e-8)
    assert waves.prefill_s(32, 128, prompts, window) == pytest.approx(1e-8 * in_waves(prompts, 32, 128, 132, window))
    assert 0 <= waves.empty_share(32, 128, prompts, 0.5) < 0.5
    multiplied = sum(min(at + 1, window or at + 1) for start, n in prompts for at in range(start, start + n))
    assert ForwardTerms(pair_s=1e-9).prefill_s(32, 128, prompts, window) == pytest.approx(1e-9 * multiplied)


@given(st.floats(0.1, 10), st.integers(1, 200), st.integers(1, 6), st.integers(1, 4))
def test_times_scale_and_nothing_else_does(factor: float, rows: int, tokens: int, steps: int) -> None:
    spec = PRESETS["qwen3-30b-a3b"]
    terms = builtin("h200").models[spec.name]
    once, scaled = (CostModel(spec, one).price(rows, tokens, steps) for one in (terms, terms.scaled(factor)))
    assert scaled.seconds(500.0 * rows) == pytest.approx(factor * once.seconds(500.0 * rows))
    assert scaled[2:] == once[2:]
    assert terms.scaled(factor).row_buckets == terms.row_buckets


def test_a_forward_is_the_sum_of_its_terms() -> None:
    """Three rows of two tokens and a prompt of 100. Each term is a different power of two: none is counted twice."""
    terms = ForwardTerms(
        layer_knots=((1, 1.0), (2, 1.0)), head_weights_s=2.0, kv_knots=((1, 0.0), (2, 0.0)),
        width_knots=((1, 4.0), (2, 4.0)), prompt_sms=10**6, prompt_wave_s=8.0 / 100, mixed_s=16.0,
        prompt_token_s=32.0 / 100, reduce_knots=((1, 64.0), (2, 64.0)), gather_knots=((1, 128.0), (2, 128.0)),
        draft_ratio=3.0,
    )  # fmt: skip
    model = CostModel(LLAMA, terms)
    assert model.price(3, 2, prompts=[(0, 100)], first_tokens=1).seconds_0 == pytest.approx(255)
    assert model.price(3, 2).seconds_0 == pytest.approx(1 + 2 + 4 + 64 + 128)
    assert model.price(0, prompts=[(0, 100)]).seconds_0 == pytest.approx(1 + 8 + 32 + 64)  # no logits
    assert model.price(3, 2, steps=2).seconds_0 == pytest.approx(3 * 2 * (1 + 2 + 4 + 64 + 128))


# files ---------------------------------------------------------------------------------------------------------------


def test_a_profile_of_an_earlier_version_is_read_and_prices_the_same(tmp_path: Path) -> None:
    """A measured, a roofline and an engine's model as version 0.1 wrote them, with the costs that it worked out."""
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(EARLIER["profile"]), encoding="utf-8")
    profile = load(path)
    assert set(profile.models) == {point["model"] for point in EARLIER["prices"]}
    for point in EARLIER["prices"]:
        prompts = [(start, tokens) for start, tokens in point["prompts"]]
        sizes = point["rows"], point["tokens"], point["steps"], 0, prompts, len(prompts)
        assert profile.cost_model(PRESETS[point["model"]]).price(*sizes) == pytest.approx(point["cost"], rel=1e-12)


def test_a_profile_that_is_saved_is_the_one_that_is_read(tmp_path: Path) -> None:
    mixture = PRESETS["qwen3-30b-a3b"]
    engine = engine_profile("vllm", "h200").covering(Pair(mixture, mixture))
    for profile in (builtin("h200"), roofline(GPUS["h200"]), replace(builtin("h200"), models=engine.models)):
        save(profile, tmp_path / "p.json")
        assert load(tmp_path / "p.json") == profile
        assert load(tmp_path / "p.json") is load(tmp_path / "p.json")  # read once, until it is another


@pytest.mark.parametrize("name", ["kv_s", "span_knots", "prompt_wave_s"])
def test_a_figure_is_checked_whether_or_not_it_is_used(name: str, tmp_path: Path) -> None:
    document = json.loads(json.dumps(EARLIER["profile"]))
    document["models"]["tinyllama-1.1b"][name] = [[1, -1.0], [2, 1.0]] if name.endswith("knots") else -1.0
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ValueError, match=rf"p\.json: models\.tinyllama-1\.1b\.{name}"):
        load(path)


# padding -------------------------------------------------------------------------------------------------------------


# a forward that takes a second per token computed, so that its time counts them
COUNTS = ForwardTerms(token_s=1.0, row_buckets=(16, 48, 128), chunk_buckets=(64, 256))


def counted(padding: str) -> CostModel:
    graphs = {engine.padding: engine.graphs._asdict() for engine in ENGINES.values()} | {"profile": {}}
    return CostModel(MODELS["llama-2-7b"], replace(COUNTS, **graphs[padding]))


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
def test_the_tokens_that_are_computed(padding: str, rows: int, tokens: int, computed: int) -> None:
    assert counted(padding).price(rows, tokens).seconds_0 == computed
    if tokens == 1:  # every later step of a draft is such a forward
        assert counted(padding).price(rows, 1, 4).seconds_0 == 4 * computed


def test_prompts_are_padded_with_the_rows_or_apart() -> None:
    prompts = [(0, 100)]
    assert counted("profile").price(5, 2, prompts=prompts, first_tokens=1).seconds_0 == 16 * 2 + 256
    assert counted("vllm").price(5, 2, prompts=prompts, first_tokens=1).seconds_0 == 112
    assert counted("tensorrt-llm").price(5, 2, prompts=prompts, first_tokens=1).seconds_0 == 8 * 2 + 100
