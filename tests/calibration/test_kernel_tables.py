"""Kernel tables: packed from AIConfigurator's layout, and what their interpolation gives for points left out."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdvsim.calibration.kernels import LEAST_ROWS, SYSTEMS, as_bytes, left_out, pack
from pdvsim.cli import main
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.prices.kernels import read_tables, shipped_tables
from pdvsim.sim.prices.shapes import roofline

SIZES = (128, 256, 512, 1024, 2048, 4096)


@pytest.fixture
def systems(tmp_path: Path) -> Path:
    """A folder as in aiconfigurator-core, whose products take twice the roofline's time."""
    _write_tables(tmp_path, "a100-80gb", gpus=(2,))
    return tmp_path


def _write_tables(path: Path, name_of_card: str, gpus: tuple[int, ...], reduce_ms: float = 1e-3) -> None:
    card = gpu(name_of_card)

    def write(op: str, name: str, rows: list[dict[str, object]], version: str = "0.14.0") -> None:
        folder = path / "data" / SYSTEMS[name_of_card] / op / "vllm" / version
        folder.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_parquet(folder / f"{name}.parquet")

    def product_ms(m: int, n: int, k: int) -> float:
        return 2e3 * float(roofline(card, "bfloat16", *(np.array(float(size)) for size in (m, n, k))))

    products = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": product_ms(m, n, k)}
        for m in (1, 16, 256) for n in SIZES for k in SIZES
    ]  # fmt: skip
    write("gemm", "gemm_perf", products)
    write("gemm", "gemm_perf", [{**row, "latency": 99.0} for row in products], "0.9.0")  # older
    heads = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "kv_cache_dtype": "bfloat16"}
    contexts = (255, 1023, 4095)
    decode = [
        {**heads, "batch_size": rows, "step": context, "latency": 0.01 + 1e-6 * rows * context}
        for rows in (1, 8, 64) for context in contexts
    ]  # fmt: skip
    write("attention", "generation_attention_perf", decode)
    prefill = [
        {**heads, "batch_size": 1, "isl": n, "latency": 0.005 + 1e-9 * n * (n + 1) / 2} for n in (16, 1024, 4096)
    ]
    write("attention", "context_attention_perf", prefill)
    reduce = [
        {"num_gpus": count, "message_size": size, "latency": reduce_ms * size, "backend": "vllm_graph"}
        for count in gpus for size in (4, 8)
    ]  # fmt: skip
    write("comm", "custom_allreduce_perf", reduce)


def test_larger_groups_of_a_rack_are_those_of_the_gb300(tmp_path: Path) -> None:
    _write_tables(tmp_path, "gb200", gpus=(2, 4))
    _write_tables(tmp_path, "gb300", gpus=(2, 4, 8, 16), reduce_ms=1.5e-3)
    experts = [
        {"moe_dtype": "w4a8_mxfp4_mxfp8", "distribution": "balanced", "inter_size": 2048, "hidden_size": 4096,
         "topk": 8, "num_experts": 128, "moe_tp_size": 1, "moe_ep_size": 1, "num_tokens": tokens, "latency": 0.1}
        for tokens in range(1, LEAST_ROWS["moe"] + 2)
    ]  # fmt: skip
    folder = tmp_path / "data" / "gb200" / "moe" / "sglang" / "0.5.14"
    folder.mkdir(parents=True)
    pd.DataFrame(experts).to_parquet(folder / "moe_perf.parquet")  # which vLLM's are taken from
    tables = pack(tmp_path, "vllm", gpu("gb200"))
    one, other = (
        [float(tables.reduce_s(count, np.array([8.0]))[0]) for count in counts] for counts in ((2, 4), (8, 16))
    )
    assert one == pytest.approx([8e-6] * 2, rel=2e-3)
    assert other == pytest.approx([12e-6] * 2, rel=2e-3)
    assert tables.about["borrowed"] == {"w4a8_mxfp4_mxfp8": "sglang", "all-reduces of 8 and 16 GPUs": "gb300"}


def test_packed_tables_give_back_the_times(systems: Path) -> None:
    tables = pack(systems, "vllm", gpu("a100-80gb"))
    assert tables.version == "0.14.0"
    tokens = np.array([1.0, 16.0, 256.0])
    for outputs, inputs in ((512, 4096), (700, 3000)):  # one that was timed, one between
        wanted = 2 * roofline(
            gpu("a100-80gb"), "bfloat16", tokens, np.full(3, float(outputs)), np.full(3, float(inputs))
        )
        assert tables.product("bfloat16", tokens, outputs, inputs) == pytest.approx(wanted, rel=2e-3)
    rows, fixed, slopes = tables.attention("decode", 32, 8, 128, "bfloat16").lines()
    assert rows.tolist() == [1, 8, 64]
    assert fixed == pytest.approx(10e-6, rel=0.02)
    assert slopes == pytest.approx(1e-9, rel=0.02)
    once, pair_s = tables.attention("prefill", 32, 8, 128, "bfloat16").per_pair()
    assert once == pytest.approx(5e-6, rel=0.05)
    assert pair_s == pytest.approx(1e-12, rel=0.02)
    assert tables.reduce_s(2, np.array([8.0, 16.0])) == pytest.approx([8e-6, 16e-6], rel=2e-3)


def test_a_constant_share_of_the_roofline_is_found_again(systems: Path) -> None:
    [products, attention] = left_out(pack(systems, "vllm", gpu("a100-80gb")))
    assert products["p95"] < 0.005
    assert attention["p95"] < 0.005


def test_points_left_out_of_the_a100s_tables() -> None:
    """The aim is 5% in the median and 15% at the 95th percentile."""
    path = next(path for engine, card, path in shipped_tables() if (engine, card) == ("vllm", "a100-80gb"))
    for errors in left_out(read_tables(path, gpu("a100-80gb"))):
        assert errors["median"] < 0.05, errors
        assert errors["p95"] < 0.15, errors


def test_the_command_writes_a_profile(systems: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.npz"
    args = ["--from-kernels", str(systems), "--engine", "vllm", "--gpu", "a100-80gb", "-o", str(path)]
    assert main(["calibrate", *args, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["engine"] == "vllm"
    assert path.read_bytes() == as_bytes(pack(systems, "vllm", gpu("a100-80gb")))


def test_heads_that_were_timed_with_another_cache_alone() -> None:
    """vLLM's tables of Blackwell have heads of 192 with a cache of 8 bits alone: with 16, other heads are taken."""
    for engine, card, path in shipped_tables():
        tables = read_tables(path, gpu(card))
        for head_dim in (64, 128, 160, 192, 256):
            for cache in ("bfloat16", "fp8"):
                assert tables.attention("decode", 32, 8, head_dim, cache).lines()[2].min() > 0, (engine, card)
                assert min(tables.attention("prefill", 32, 8, head_dim, cache).per_pair()) > 0, (engine, card)
