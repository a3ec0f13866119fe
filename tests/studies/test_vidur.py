"""Vidur's files as a measured source: what was measured is given back, what cannot be true is refused in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from refusals import one_line

from pdvsim.sim.hardware.forward import in_waves
from pdvsim.sim.hardware.models import GPUS, MODELS, shard
from pdvsim.sim.hardware.profile import load
from pdvsim.sim.hardware.transfer import TOKENS, Prices, shipped
from pdvsim.sim.specs import ModelSpec
from studies import shards, vidur

A100 = GPUS["a100-80gb"]
LLAMA = MODELS["llama-2-7b"]


def mlp(spec: ModelSpec = LLAMA, bandwidth: float = 0.74, flops: float = 0.75, workers: int = 1) -> pd.DataFrame:
    """A made mlp.csv of a card that reaches these shares of the A100's data sheet, layer times by the transfer."""
    from dataclasses import replace

    card = replace(
        A100,
        bandwidth_bytes_per_s=A100.bandwidth_bytes_per_s * bandwidth,
        flops_per_s=A100.flops_per_s * flops,
        measured=True,
    )
    tokens = np.array(TOKENS, float)
    prices = Prices(spec, card, 108, vidur.library_only(shipped()))
    share = prices.layers(tokens) / spec.layers / len(vidur.LAYER) * 1e3  # ms, spread evenly
    frame = pd.DataFrame({f"time_stats.{name}.median": share for name in vidur.LAYER})
    frame["time_stats.emb.median"] = 0.002
    shape = (spec.heads, spec.kv_heads, spec.hidden, spec.intermediate)
    for name, value in zip(vidur.SHAPE, shape, strict=True):
        frame[name] = value
    frame["vocab_size"], frame["use_gated_mlp"] = spec.vocab, True
    frame["num_tokens"], frame["num_tensor_parallel_workers"] = np.array(TOKENS), workers
    return frame


def attention(kv_s: float, fixed_s: float, wave_s: float) -> pd.DataFrame:
    """A made attention.csv of one layer that obeys a straight line, and of prompts waves on 108 multiprocessors."""
    rows: list[dict[str, float | None]] = [
        {"batch_size": b, "prefill_chunk_size": 0, "kv_cache_size": c, "attn_decode": fixed_s + kv_s * b * c}
        for b in (1, 8, 64)
        for c in (128, 1024, 4096)
    ]
    rows += [
        {
            "batch_size": 1, "prefill_chunk_size": n, "kv_cache_size": c,
            "attn_prefill": wave_s * in_waves([(c, n)], LLAMA.heads, LLAMA.head_dim, 108),
        }
        for n in (128, 1024)
        for c in (0, 512)
    ]  # fmt: skip
    frame = pd.DataFrame(rows)
    for name in ("attn_decode", "attn_prefill"):
        frame[f"time_stats.{name}.median"] = frame.pop(name) * 1e3
    frame["num_tensor_parallel_workers"] = 1
    return frame


def test_measured_layers_are_given_back(tmp_path: Path) -> None:
    both = pd.concat([mlp(), mlp(workers=2) * 99.0])  # rows of other tensor-parallel degrees are not read
    both.loc[both["num_tensor_parallel_workers"] == 198, "num_tensor_parallel_workers"] = 2
    both.to_csv(tmp_path / "mlp.csv", index=False)
    profile = vidur.build_vidur(tmp_path, A100)
    frame = mlp()
    layer_s = frame[[f"time_stats.{n}.median" for n in vidur.LAYER]].sum(axis=1) / 1e3
    for (tokens, seconds), expected in zip(profile.models["llama-2-7b"].figures()["layer_knots"], layer_s, strict=True):
        assert tokens in TOKENS
        assert seconds == pytest.approx(LLAMA.layers * expected + 2e-6)
    assert profile.foundation == "published kernels + transfer"
    assert set(profile.models) == set(MODELS)
    assert profile.uncertainty["llama-2-7b"] <= profile.uncertainty["qwen2-7b"]


def test_ceilings_that_made_the_layers_are_found(tmp_path: Path) -> None:
    for name in ("llama-2-7b", "codellama-34b"):
        mlp(MODELS[name], bandwidth=0.7, flops=0.8).to_csv(tmp_path / f"{name}_mlp.csv", index=False)
    card = vidur.fitted_ceilings(vidur.read(tmp_path, A100), A100, shipped())
    assert card.bandwidth_bytes_per_s == pytest.approx(0.7 * A100.bandwidth_bytes_per_s, rel=1e-3)
    assert card.flops_per_s == pytest.approx(0.8 * A100.flops_per_s, rel=1e-3)


def test_attention_that_made_the_file_is_found(tmp_path: Path) -> None:
    mlp().to_csv(tmp_path / "mlp.csv", index=False)
    attention(9e-9, 4e-6, 3e-8).to_csv(tmp_path / "attention.csv", index=False)
    figures = vidur.build_vidur(tmp_path, A100).models["llama-2-7b"].figures()
    assert figures["kv_knots"][0][1] == pytest.approx(32 * 9e-9, rel=1e-6)
    assert figures["width_knots"][0][1] == pytest.approx(32 * 4e-6, rel=1e-6)
    assert figures["prompt_wave_s"] == pytest.approx(32 * 3e-8, rel=1e-6)


def test_only_files_of_the_card_are_read(tmp_path: Path) -> None:
    for folder, model in (("h100/meta", "llama-2-7b"), ("a100/meta", "codellama-34b")):
        (tmp_path / folder).mkdir(parents=True)
        mlp(MODELS[model]).to_csv(tmp_path / folder / "mlp.csv", index=False)
    assert [layer.spec.name for layer in vidur.read(tmp_path, A100)] == ["codellama-34b"]
    with pytest.raises(ValueError, match=r"mlp\.csv .* l40s"):
        vidur.read(tmp_path, GPUS["l40s"])


def drop(name: str) -> Callable[[pd.DataFrame], pd.DataFrame]:
    return lambda frame: frame.drop(columns=name)


def put(name: str, row: int, value: object) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def change(frame: pd.DataFrame) -> pd.DataFrame:
        frame[name] = frame[name].astype(object)
        frame.loc[row, name] = value
        return frame

    return change


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (drop("time_stats.mlp_act.median"), "column time_stats.mlp_act.median"),
        (put("time_stats.add.median", 3, None), "time_stats.add.median: line 5: "),
        (put("time_stats.add.median", 0, "fast"), "time_stats.add.median: must"),
        (put("n_embd", 0, 2048), "holds 2 models"),
        (lambda frame: frame.assign(num_tensor_parallel_workers=2), "one worker"),
        (lambda frame: frame[frame["num_tokens"] == frame["num_tokens"].iloc[0]], "num_tokens"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(
    tmp_path: Path, change: Callable[[pd.DataFrame], pd.DataFrame], says: str
) -> None:
    change(mlp()).to_csv(tmp_path / "mlp.csv", index=False)
    out = tmp_path / "out.json"
    with one_line(says):
        vidur.main([str(tmp_path), "a100-80gb", str(out)])
    assert not out.exists()


def test_the_program_writes_a_profile_that_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mlp().to_csv(tmp_path / "mlp.csv", index=False)
    out = tmp_path / "a100.json"
    vidur.main([str(tmp_path), "a100-80gb", str(out)])
    assert "llama-2-7b on a100-80gb" in capsys.readouterr().out
    assert load(out) == vidur.build_vidur(tmp_path, A100)


@pytest.mark.parametrize("factor", [1e-3, 1e3])
def test_other_units_are_refused(tmp_path: Path, factor: float) -> None:
    frame = mlp()
    times = [name for name in frame if name.startswith("time_stats")]
    frame[times] *= factor
    frame.to_csv(tmp_path / "mlp.csv", index=False)
    with pytest.raises(ValueError, match="milliseconds"):
        vidur.read(tmp_path, A100)


def test_shards_are_compared_with_shards_and_with_the_whole(tmp_path: Path) -> None:
    """Made by the formula they have no error; twice as slow, they are off by that, and so is their share."""
    shares = shipped().bandwidth_share, shipped().flops_share
    whole, half = mlp(LLAMA, *shares), mlp(shard(LLAMA, 2), *shares, workers=2)
    shape = (LLAMA.heads, LLAMA.kv_heads, LLAMA.hidden, LLAMA.intermediate)  # Vidur names the whole model's
    for name, value in zip(vidur.SHAPE, shape, strict=True):
        half[name] = value
    for slower in (1, 2):
        times = [column for column in half if column.startswith("time_stats.")]
        slow = half.assign(**{column: half[column] * slower for column in times})
        pd.concat([whole, slow]).to_csv(tmp_path / "mlp.csv", index=False)
        [part] = shards.compare(tmp_path, A100)
        assert part.name == "llama-2-7b/tp2"
        assert np.abs(part.layer - np.log(slower)).max() < 0.01  # the embedding's time is not in the formula
        assert np.abs(part.share - np.log(slower)).max() < 0.01
