"""Profiles composed from an engine's kernels, against the tables themselves and the laws that times obey."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pdvsim.cli.run import RunOptions
from pdvsim.common.options import build
from pdvsim.decide.deploy import deployment
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.engines.sglang import SGLANG
from pdvsim.sim.engines.vllm import VLLM
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.models.presets import model, shard
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.prices.composed import compose
from pdvsim.sim.prices.costs import CostModel
from pdvsim.sim.prices.forward import ForwardTerms, interpolate
from pdvsim.sim.prices.kernels import KernelTables, read_tables, shipped_tables
from pdvsim.sim.prices.links import LINKS, LinkName
from pdvsim.sim.prices.parts import TOKENS, ModelKernels
from pdvsim.sim.prices.shapes import unpacked
from pdvsim.sim.prices.steps import EngineStep
from pdvsim.sim.run import simulate

SHIPPED = list(shipped_tables())
# all products are sizes that were timed: q, k and v 12,288 x 4,096, output, gate and up 16,384, down 8,192
ON_THE_GRID = ModelSpec("on-the-grid", "llama", 10, 4096, 8192, 32, 32, 128, 32_000)
FP4_FLOPS = {"b200": 9e15, "b300": 14e15, "gb200": 10e15, "gb300": 15e15}  # dense, of the data sheets


def tables_of(engine: str, card: str) -> KernelTables:
    return read_tables(next(path for one, name, path in SHIPPED if (one, name) == (engine, card)), gpu(card))


def test_a_timed_product_takes_its_time():
    tables = tables_of("vllm", "a100-80gb")
    m, n, k = (tables.arrays[f"gemm/bfloat16/{axis}"] for axis in "mnk")
    times = np.exp(unpacked(tables.arrays["gemm/bfloat16/t"]))
    for outputs, inputs in ((4096, 4096), (16384, 4096), (1024, 8192)):
        column = times[:, n.tolist().index(outputs), k.tolist().index(inputs)]
        assert tables.product("bfloat16", m.astype(float), outputs, inputs) == pytest.approx(column, rel=1e-6)


def test_a_forward_is_the_sum_of_its_kernels():
    """The same sums taken from the table by hand, of a model whose products were all timed."""
    tables = tables_of("vllm", "a100-80gb")
    times = np.exp(unpacked(tables.arrays["gemm/bfloat16/t"]))
    m, n, k = (tables.arrays[f"gemm/bfloat16/{axis}"].tolist() for axis in "mnk")
    fit = compose(tables, EngineStep(), ON_THE_GRID)
    for tokens in (1, 16, 128, 1024):
        shapes = ((12288, 4096), (4096, 4096), (16384, 4096), (4096, 8192))
        products = sum(times[m.index(tokens), n.index(a), k.index(b)] for a, b in shapes)
        small = ModelKernels(tables, ON_THE_GRID).small(np.array([float(tokens)]))[0]
        assert fit.layers_s(int(tokens)) == pytest.approx(10 * products + small, rel=1e-3)


def test_a_shard_exchanges_two_messages_a_layer():
    tables, spec = tables_of("vllm", "h100-sxm"), shard(ON_THE_GRID, 4)
    sizes = tables.arrays["reduce/graph/elements"].tolist()
    times = np.exp(unpacked(tables.arrays["reduce/graph/t"]))[tables.arrays["reduce/graph/gpus"].tolist().index(4)]
    fit = compose(tables, EngineStep(), spec)
    for tokens in (1, 64, 1024):  # of 4,096 values each: sizes that were timed
        larger = times[sizes.index(tokens * 4096) :]
        assert interpolate(fit.reduce_knots, int(tokens)) == pytest.approx(2 * 10 * larger.min(), rel=1e-6)


@pytest.mark.parametrize(("engine", "card"), [one[:2] for one in SHIPPED])
def test_nothing_is_faster_than_the_card_allows(engine, card):
    """A forward of kernels alone against the bound from the data sheet; of the H200, from its measured rates."""
    tables = tables_of(engine, card)
    for spec in (model("llama-3.1-8b"), shard(model("llama-3.1-70b"), 4)):
        prices = CostModel(spec, compose(tables, EngineStep(), spec))
        bound = CostModel(spec, ForwardTerms.roofline(spec, gpu(card)))
        for rows in (1, 16, 128):
            least, composed = (one.price(rows).seconds(2000 * rows) for one in (bound, prices))
            assert composed > 0.9 * least


@pytest.mark.parametrize(("engine", "card"), [one[:2] for one in SHIPPED])
def test_more_never_takes_less(engine, card):
    profile = engine_profile(engine, card)
    assert profile.tables is not None
    for name in ("llama-3.1-8b", "qwen3-30b-a3b"):
        spec = model(name)
        fit = compose(profile.tables, profile.step, spec)
        layers_s = [fit.layers_s(tokens) for tokens in TOKENS]
        assert layers_s == sorted(layers_s)
        prices = CostModel(spec, fit)
        by_width = [prices.price(8, width).seconds_1 for width in range(1, 10)]
        assert by_width == sorted(by_width)
        assert min(by_width) > 0


def test_older_versions_have_their_own_constants():
    trtllm, vllm, sglang = (ENGINES[name].era for name in ("trtllm", "vllm", "sglang"))
    assert trtllm("1.0.0rc3") != trtllm() == trtllm("1.2.0rc6")
    assert vllm("nightly-5b8c30d6") == vllm()
    assert [vllm(f"0.{n}.0").step.block_products for n in (12, 16, 18)] == ["fp8_block"] * 2 + ["fp8"]
    assert sglang("0.5.6").step.round_s < sglang("0.5.5").step.round_s  # overlapped drafts
    assert sglang("0.5.14") == sglang()


def served(engine: str, **server: object) -> Experiment:
    return Experiment(
        "autoregressive",
        Traffic(
            dataset_name="random", input_len=300, output_len=40, random_range_ratio=0.2, num_prompts=60,
            max_concurrency=8,
        ),
        server=Server(pair="none:llama-3.1-8b", **server),  # type: ignore[arg-type]
        hardware=Hardware(gpu="h100-sxm", engine=engine),
    )  # fmt: skip


@pytest.mark.parametrize("engine", ["sglang", "trtllm"])
def test_a_forward_with_prompts_takes_as_long_as_the_host_or_the_kernels(engine: str) -> None:
    """Whichever is longer; forwards without prompts are in graphs, and those of a dense model are never so short."""
    profile = engine_profile(engine, "b200")
    at_once = replace(profile, step=replace(profile.step, eager_layer_s=0.0))
    for name, many in (("deepseek-v3", True), ("llama-3.1-8b", False)):
        spec = shard(model(name), 8)
        with_host, without = (one.covering(Pair(spec, spec)).cost_model(spec) for one in (profile, at_once))
        host_s = profile.step.eager_layer_s * spec.layers if many else 0.0
        for tokens in (16, 1024, 16_384):
            kernels_s = without.price(0, prompts=[(0, tokens)]).seconds_0
            assert with_host.price(0, prompts=[(0, tokens)]).seconds_0 == pytest.approx(max(kernels_s, host_s))
        assert with_host.price(8) == without.price(8)


def test_sglang_prefills_in_batches_of_their_own():
    for engine, mixes in (("vllm", True), ("sglang", False)):
        launches = simulate(served(engine)).launches
        kind, rows, tokens = (np.asarray(launches[name]) for name in ("kind", "rows", "tokens"))
        both = (kind != KINDS.index("prefill")) & (tokens > rows)
        assert both.any() == mixes


def test_without_graphs_the_host_launches_every_layer():
    """Llama-3.1-8B alone: `data/h200/vllm`, where a held-out server took 24.4 ms per token instead of 4.7."""
    eager = replace(served("vllm"), arch="autoregressive", server=Server("none:llama-3.1-8b", enforce_eager=True))
    assert summarise(simulate(eager))["mean_tpot_ms"] == pytest.approx(24.4, rel=0.15)
    texts = {block.label.split()[0]: block.text for block in deployment(eager)}
    assert "--enforce-eager" in texts["vLLM"]
    assert "--disable-cuda-graph" in texts["SGLang"]


def test_what_are_no_tables_is_refused():
    with pytest.raises(ValueError, match=r"not a file of calibrate --from-kernels"):
        read_tables(Path(__file__), gpu("h200"))


@pytest.mark.parametrize("card", ["h200", "h100-sxm", "l40s", "rtx-4090"])
def test_the_architectures_decide_whose_figures_these_are_and_never_the_card(card):
    def engine(*archs, **given):
        return Hardware(card, **given).serving(archs).predicted_engine

    assert engine("colocated") == engine("autoregressive", "colocated") == engine("pd", disaggregate="1p1d") == "vllm"
    assert engine("pdv") == engine("colocated", "pd") == engine("mine.py:Mine") == "pdvsim"
    assert engine("pdv", engine="vllm") == "vllm"
    assert engine("colocated", engine="pdvsim") == engine("colocated", profile="roofline") == "pdvsim"


def asked(options):
    given = build(RunOptions, options)
    return given.experiment(given.arch)


def test_the_chunk_is_the_engines_own():
    """vLLM's arg_utils.py and SGLang's server_args.py."""
    cards = ("l40s", "a100-80gb", "h100-sxm", "h200", "b200")
    assert [VLLM.chunk(gpu(card)) for card in cards] == [2048, 2048, 8192, 8192, 8192]
    assert [SGLANG.chunk(gpu(card)) for card in cards] == [4096, 8192, 8192, 8192, 16384]
    assert asked({"gpu": "h100"}).server.max_num_batched_tokens == 8192
    assert asked({"gpu": "h100", "max_num_batched_tokens": 512}).server == Server(max_num_batched_tokens=512)
    assert asked({"arch": "pdv"}).server == Server()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_every_engine_has_latent_attention(engine):
    """vLLM's tables lack it, so it comes from pdvsim's formula: within a factor of two of what the others measured."""
    spec = shard(model("deepseek-v3"), 8)
    profile, measured = engine_profile(engine, "b200"), engine_profile("trtllm", "b200")
    assert profile.tables is not None
    assert measured.tables is not None
    own, other = (CostModel(spec, compose(one.tables, EngineStep(), spec)).price(64, 1) for one in (profile, measured))
    assert 0.5 < own.seconds_1 / other.seconds_1 < 2
    assert 0.5 < own.seconds_0 / other.seconds_0 < 2


@pytest.mark.parametrize("card", FP4_FLOPS)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_four_bits_are_read_and_multiplied_faster(engine: str, card: str) -> None:
    """Large products over few and many tokens, and what the data sheet allows at most."""
    tables, size = tables_of(engine, card), 16_384
    few, many = np.array([16.0]), np.array([8192.0])
    times = {kind: tables.product(kind, np.array([16.0, 8192.0]), size, size) for kind in ("bfloat16", "fp8", "nvfp4")}
    assert np.all(times["nvfp4"] < times["fp8"])
    assert np.all(times["fp8"] < times["bfloat16"])
    assert times["nvfp4"][1] > 2 * many[0] * size * size / FP4_FLOPS[card]
    shape = (7168, 2048, 8, 256)
    assert np.all(tables.experts("nvfp4", few, *shape) < tables.experts("fp8_block", few, *shape))


@pytest.mark.parametrize("link", ["nvlink4", "nvlink5"])
def test_all_reduces_over_nvlink_are_those_of_the_tables(link: LinkName) -> None:
    pair = Pair(model("qwen3-32b"), shard(model("qwen3-32b"), 8))
    name = pair.target.name
    for card in ("b200", "gb200"):
        profile = engine_profile("vllm", card)
        assert profile.covering(pair, LINKS[link]).models[name] == profile.covering(pair).models[name]
    slow = engine_profile("vllm", "b200").covering(pair, LINKS["pcie5"]).models[name]
    assert interpolate(slow.reduce_knots, 64) > interpolate(profile.covering(pair).models[name].reduce_knots, 64)


def test_norms_over_all_heads_are_one_more_all_reduce_per_layer() -> None:
    """Of MiniMax's models, where they are sharded: as many small messages as layers."""
    tables, whole = tables_of("vllm", "b200"), model("minimax-m2")
    spec, tokens = shard(whole, 4), np.array([64.0])
    smallest = float(tables.reduce_s(4, 4 * tokens)[0])
    knots = [compose(tables, EngineStep(), one).reduce_knots for one in (spec, replace(spec, family="qwen3"))]
    assert interpolate(knots[0], 64) - interpolate(knots[1], 64) == pytest.approx(spec.layers * smallest, rel=1e-6)
    assert not compose(tables, EngineStep(), whole).reduce_knots


def test_experts_of_integers_are_their_own_kernels() -> None:
    """Kimi-K2.5 as published, and NVIDIA's version with 4-bit floats, which the card multiplies."""
    tables, tokens = tables_of("vllm", "b200"), np.array([4096.0])
    integers, floats = (
        ModelKernels(tables, shard(model(name), 8)).experts(tokens)[0] for name in ("kimi-k2.5", "kimi-k2.5-nvfp4")
    )
    at = tables.arrays["moe/int4_wo/tokens"].tolist().index(4096)
    shape = tables.arrays["moe/int4_wo/shapes"].tolist().index([7168, 256, 8, 384])
    timed = float(np.exp(unpacked(tables.arrays["moe/int4_wo/t"]))[shape, at])
    assert integers == pytest.approx(60 * timed, rel=1e-6)
    assert floats < 0.5 * integers
