"""A profile from an engine's own log: lines of vLLM are read, known steps come back, and others are predicted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pdvsim.calibration.fit.engine import LoggedSteps, fit_steps, read_bench, read_logs
from pdvsim.cli import main
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.iterations import iteration_lines
from pdvsim.sim.run import simulate
from pdvsim.view.run import Run
from studies.own_engine import prove

KEPT = Path(__file__).parents[2] / "calibration" / "data" / "h200" / "own-engine"
# As vLLM 0.27.1 writes them (v1/metrics/loggers.py); a data-parallel dummy step, and the older line without usage.
START = (
    "(EngineCore pid=1) INFO 08-14 09:00:00 [core.py:97] Initializing a V1 LLM engine (v0.27.1) with "
    "config: model='x'\n"
    "(EngineCore pid=1) INFO 08-14 09:00:30 [kv_cache_utils.py:1087] GPU KV cache size: 200,000 tokens\n"
)
LINE = (
    "(APIServer pid=7) INFO 08-14 09:01:02 [loggers.py:182] Engine 000: Iteration({i}): 1 context requests, "
    "512 context tokens, 6 generation requests, 24 generation tokens, iteration elapsed time: 18.42 ms{dummy}, "
    "GPU KV cache usage: 12.5%\n"
)
OLDER = (
    "(EngineCore_DP0 pid=5) INFO 07-09 03:15:05 [core.py:359] Iteration(15): 0 context requests, 0 context tokens, "
    "14 generation requests, 56 generation tokens, iteration elapsed time: 11.64 ms\n"
)
BENCH = {
    "duration": 9.0, "completed": 2, "max_concurrency": 14, "input_lens": [5, 5], "output_lens": [9, 9],
    "ttfts": [0.02, 0.02], "itls": [[0.012, 0.012, 0.0], [0.012]], "spec_decode_num_drafts": 10,
    "spec_decode_draft_tokens": 30, "spec_decode_acceptance_length": 2.0,
}  # fmt: skip


def test_lines_of_vllm(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    lines = [LINE.format(i=i, dummy="") for i in range(40)]
    path.write_text(START + "".join(lines) + LINE.format(i=40, dummy=" (dummy)") + OLDER * 20, encoding="utf-8")
    log = read_logs((str(path),))
    assert (log.engine, log.cache_tokens, log.steps.seconds.size) == ("vLLM 0.27.1", 200_000, 60)
    assert [column[0] for column in log.steps] == pytest.approx([1, 512, 6, 24, 3, 25_000, 0.01842])
    assert np.isnan(log.steps.kv[-1])
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps(BENCH), encoding="utf-8")
    read = read_bench(str(bench))
    assert (read.concurrency, read.k, read.gap_s) == (14, 3, 0.012)


def test_what_is_no_log_is_refused(tmp_path: Path, refused: Callable[..., str]) -> None:
    path, bench = tmp_path / "server.log", tmp_path / "bench.json"
    command = ["calibrate", "--from-vllm", str(path), "--pair", "tinyllama-1.1b:llama-2-7b", "--gpu", "h200"]
    command += ["-o", str(tmp_path / "p.json")]

    def refusal(text: str) -> str:
        path.write_text(text, encoding="utf-8")
        return refused(command)

    assert "0 steps, and a fit needs 50" in refusal("INFO nothing here\n")
    assert "--no-async-scheduling" in refusal(START + OLDER.replace("11.64", "0.03") * 60)
    assert "one without speculation" in refusal(START + OLDER * 60)
    bench.write_text(json.dumps({"max_concurrency": None}), encoding="utf-8")
    command += ["--bench", str(bench)]
    assert "bench with --max-concurrency" in refusal(START + OLDER * 60)
    assert not (tmp_path / "p.json").exists()


def test_known_steps_come_back() -> None:
    """Steps of a known law, with 1% of noise: times come back within 1% where no step was logged, and the padding."""
    rng = np.random.default_rng(0)

    def steps(rows: list[int], drafts: list[int], count: int, noise: float, sizes: tuple[int, ...] = ()) -> LoggedSteps:
        row, k = rng.choice(rows, count).astype(float), rng.choice(drafts, count).astype(float)
        prompt = np.where(rng.random(count) < 0.1, rng.integers(64, 2048, count), 0).astype(float)
        kv, tokens = row * rng.uniform(200, 900, count), row * (k + 1)
        read = np.array([0, *sizes])[np.searchsorted([0, *sizes], prompt)] if sizes else prompt
        seconds = 6e-3 + 20e-6 * (tokens + read) + 40e-9 * kv + 5e-4 * (prompt > 0)
        seconds += np.where(k > 0, (k + (prompt > 0)) * 7e-4 + 2e-6 * (k * row + read), 0)
        seconds *= 1 + noise * rng.standard_normal(count)
        return LoggedSteps((prompt > 0) * 1.0, prompt, row, tokens, k, kv, seconds)

    for sizes in ((), (128, 256, 512, 768, 1024, 1536, 2048), (128, 512, 2048)):
        fit = fit_steps(steps([1, 4, 16, 64], [0, 4], 3000, 0.01, sizes))
        assert tuple(size for size in fit.padded_to if 128 <= size <= 2048) == sizes
        other = steps([2, 8, 32, 48], [0, 2, 6], 500, 0.0, sizes)
        assert np.abs(fit.seconds(other) / other.seconds - 1).max() < 0.01


def test_real_runs_are_predicted_from_a_real_log(tmp_path: Path) -> None:
    """Twelve runs on an H200, from the log of eight others: every metric meets the targets set beforehand."""
    document = prove(KEPT, tmp_path)
    assert len(document["runs"]) == 12
    for metric, error in document["errors"]["log"].items():
        assert error["median"] <= 0.04, metric
        assert error["p95"] <= 0.12, metric
    padded_to = fit_steps(read_logs((str(KEPT / "k0.log"), str(KEPT / "k4.log"))).steps).padded_to
    logged = [size for size in CHUNK_BUCKETS if 256 <= size <= 1536]  # prompts of 180 to 1,147 tokens per step
    assert [size for size in padded_to if 256 <= size <= 1536] == logged


def experiment(k: int, users: int, profile: str | None = None) -> Experiment:
    traffic = Traffic(
        dataset_name="random", num_prompts=max(12, 3 * users), input_len=256, output_len=120, max_concurrency=users,
        random_range_ratio=0.3,
    )  # fmt: skip
    server = Server("tinyllama-1.1b:llama-2-7b", k)
    return Experiment("colocated", traffic, Acceptance(acceptance_rate=0.7), server, Hardware(profile=profile))


def test_a_profile_from_a_log_predicts_other_runs(tmp_path: Path) -> None:
    """Two logs and two benchmarks of an engine; runs of other draft lengths and loads within 5%."""
    logs, benches = [], []
    for k in (0, 4):
        lines: list[str] = []
        for users in (1, 4, 16, 64):
            result = simulate(experiment(k, users))
            lines += iteration_lines(result, "pdvsim", "0")
            if users == 16:
                metrics = Run(result).metrics
                bench = {"max_concurrency": users, "median_itl_ms": metrics["median_itl_ms"]}
                bench |= {"spec_decode_num_drafts": 10, "spec_decode_draft_tokens": 10 * k} if k else {}
                benches.append(tmp_path / f"{k}.json")
                benches[-1].write_text(json.dumps(bench), encoding="utf-8")
        logs.append(tmp_path / f"{k}.log")
        logs[-1].write_text("\n".join(lines) + "\n", encoding="utf-8")
    profile = tmp_path / "engine.json"
    command = ["calibrate", "--from-vllm", *map(str, logs), "--bench", *map(str, benches)]
    assert main([*command, "--pair", "tinyllama-1.1b:llama-2-7b", "--gpu", "h200", "-o", str(profile)]) == 0
    for k, users in ((2, 8), (6, 8), (0, 32), (4, 32), (3, 48)):
        real, predicted = (Run(simulate(experiment(k, users, path))).metrics for path in (None, str(profile)))
        for metric in ("output_throughput", "mean_tpot_ms"):
            assert predicted[metric] == pytest.approx(real[metric], rel=0.05), (k, users, metric)
    with pytest.raises(ValueError, match="whole steps of pdvsim 0: it supports autoregressive and colocated"):
        simulate(Experiment("pdv", server=Server("tinyllama-1.1b:llama-2-7b"), hardware=Hardware(profile=str(profile))))
    other = Server(pair="qwen2-1.5b:qwen2-7b")
    with pytest.raises(ValueError, match="does not cover"):
        simulate(Experiment("colocated", server=other, hardware=Hardware(profile=str(profile))))
