"""A benchmark of one's own server against its prediction: the load of the result is what is simulated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_from_bench import bench_of

from pdvsim.calibration.validate.bench import BenchedLoad, TokenTimes, intervals, read_load
from pdvsim.cli import main
from pdvsim.sim.config import Acceptance, Experiment, Host, Server, Traffic
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

PAIR = "tinyllama-1.1b:llama-2-7b"
USUAL, SLOW = Host(), Host(completion_s=2e-3)  # the profile's host, and one that takes longer


def served(k: int, host: Host = USUAL, **traffic: Any) -> Result:
    load = Traffic("random", num_prompts=40, input_len=200, output_len=60, random_range_ratio=0.5, **traffic)
    accepted = Acceptance(synthetic_acceptance_rates=(0.8, 0.6)) if k else Acceptance()
    return simulate(Experiment("colocated", load, accepted, Server(PAIR, k), host=host))


def compared(capsys: pytest.CaptureFixture[str], path: str, *more: str) -> dict[str, Any]:
    assert main(["validate", "--bench", path, *more, "--engine", "pdvsim", "--pair", PAIR, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("k", [0, 2])
@pytest.mark.parametrize("load", [{"request_rate": 12.0}, {"max_concurrency": 8}, {}], ids=["open", "closed", "burst"])
def test_the_load_of_a_result_is_simulated_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], k: int, load: dict[str, Any]
) -> None:
    """A server that is the simulator itself: nothing is off but the coins of acceptance."""
    result = served(k, **load)
    metrics = compared(capsys, bench_of(result, tmp_path / "bench.json"))["metrics"]
    expected = {"request_throughput", "output_throughput", "total_token_throughput"}
    expected |= {f"{mark}_{name}_ms" for mark in ("mean", "median", "p99") for name in ("ttft", "tpot", "itl", "e2el")}
    assert set(metrics) == expected
    for name, row in metrics.items():
        assert row["error"] == row["predicted"] / row["measured"] - 1
        if not k:
            assert row["error"] == pytest.approx(0, abs=1e-6), name
        elif name.startswith(("mean", "output")):
            assert row["error"] == pytest.approx(0, abs=0.1), name


def test_a_closed_loop_is_not_paced_by_the_server_that_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Start times of a slow server would hide how much faster the predicted one is."""
    path = bench_of(served(0, SLOW, max_concurrency=8), tmp_path / "bench.json")
    metrics = compared(capsys, path)["metrics"]
    assert metrics["output_throughput"]["error"] > 0.1
    assert metrics["mean_tpot_ms"]["error"] < -0.1


def test_when_requests_were_due_is_read(tmp_path: Path) -> None:
    queue_s = np.linspace(0, 0.2, 40)
    result = served(0, max_concurrency=8)
    starts = (1000 + result.requests["arrival_s"][np.argsort(result.requests["id"])]).tolist()
    ramp = {"ramp_up_strategy": "linear", "request_rate": "inf"}
    load = read_load(bench_of(result, tmp_path / "a.json", **ramp))
    assert load.arrival_s.tolist() == pytest.approx((np.array(starts) - min(starts)).tolist())
    load = read_load(bench_of(result, tmp_path / "b.json", queue_times=queue_s.tolist()))
    due = np.array(starts) - queue_s
    assert load.arrival_s.tolist() == pytest.approx((due - due.min()).tolist())
    assert not read_load(bench_of(result, tmp_path / "c.json")).arrival_s.any()


@pytest.mark.parametrize(
    ("change", "more", "says"),
    [
        ({"output_throughput": None}, [], "no result of `vllm bench serve`: it has no output_throughput"),
        ({"max_concurrency": 0}, [], "max_concurrency is 0"),
        ({"spec_decode_per_position_acceptance_rates": [2]}, [], "must be shares from 0 to 1"),
        ({"spec_decode_per_position_acceptance_rates": []}, [], "give --acceptance-rate"),
        ({}, ["--held-out"], "--held-out cannot be combined with --bench"),
        ({}, ["--pair", "llama-2-7b"], "name what drafted for llama-2-7b"),
        ({"itls": [[1e5]] * 40}, [], "itls of one request sum to 1e+05 s, in a benchmark of"),
        ({"p90_tpot_ms": 1e22}, [], "p90_tpot_ms is 1e+22 ms, in a benchmark of"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, refused: Callable[..., str], change: dict[str, Any], more: list[str], says: str
) -> None:
    path = bench_of(served(2, max_concurrency=8), tmp_path / "bench.json", **change)
    pair = [] if "--pair" in more else ["--pair", PAIR]
    assert says in refused(["validate", "--bench", path, *pair, *more])


def test_what_drafting_gains(tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]) -> None:
    """Of a server that is the simulator, the ratio of its two results but for the coins; a slower one is outside."""
    plain, slow = (bench_of(served(0, host, max_concurrency=8), tmp_path / f"{host.completion_s}.json")
                   for host in (USUAL, Host(completion_s=1e-2)))  # fmt: skip
    drafted = bench_of(served(2, max_concurrency=8), tmp_path / "k2.json")
    gain = compared(capsys, drafted, plain)["speed_up"]
    throughput = [json.loads(Path(path).read_text())["output_throughput"] for path in (plain, drafted)]
    assert gain["measured"] == pytest.approx(throughput[1] / throughput[0])
    assert gain["error"] == pytest.approx(0, abs=0.1)
    assert gain["inside"] == (abs(np.log1p(gain["error"])) <= np.log1p(gain["range"]))
    assert not compared(capsys, slow, drafted)["speed_up"]["inside"]
    other = bench_of(served(0, max_concurrency=4), tmp_path / "c4.json")
    assert "differ in their load" in refused(["validate", "--bench", other, drafted, "--pair", PAIR])
    assert "two results" in refused(["validate", "--bench", *[drafted] * 3, "--pair", PAIR])


def test_two_results_are_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], refused: Callable[..., str]
) -> None:
    """A server against a slower one: each difference is in its interval, and the clear ones are above zero."""
    fast, slow = (bench_of(served(0, host, max_concurrency=8), tmp_path / f"{host.completion_s}.json")
                  for host in (USUAL, SLOW))  # fmt: skip
    assert main(["compare", fast, slow, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    first, second = (json.loads(Path(path).read_text()) for path in (fast, slow))
    for name, row in document["changes"].items():
        assert row["change"] == pytest.approx(second[name] / first[name] - 1)
        if name.endswith("throughput"):
            assert row["interval"] is None
        elif name.startswith("mean"):
            low, high = row["interval"]
            assert low <= row["change"] <= high, name
    assert document["changes"]["mean_tpot_ms"]["interval"][0] > 0
    bare = bench_of(served(0, SLOW, max_concurrency=8), tmp_path / "bare.json", detailed=False)
    assert main(["compare", fast, bare, "--json"]) == 0
    assert not any(row["interval"] for row in json.loads(capsys.readouterr().out)["changes"].values())
    assert main(["compare", fast, bare]) == 0
    assert "unknown" in capsys.readouterr().out
    assert "two results" in refused(["compare", fast])
    assert "name their models" in refused(["compare", fast, slow, "--gpu", "h100-sxm"])


def test_an_interval_holds_the_long_run_difference() -> None:
    """Of two samples of one distribution 95% of intervals hold zero."""
    rng = np.random.default_rng(3)

    def load() -> BenchedLoad:
        first_s = rng.gamma(4.0, 0.1, 200)
        lengths = np.tile(np.array([10, 1], dtype=np.int64), (200, 1)) + rng.integers(0, 9, (200, 1))
        measured = {"mean_ttft_ms": 1e3 * float(first_s.mean())}
        times = TokenTimes(first_s, [np.zeros(0)] * 200)
        return BenchedLoad(Traffic(), lengths, np.zeros(200), 0, (), measured, (), None, times)

    hits = 0
    for _ in range(100):
        low, high = intervals(load(), load())["mean_ttft_ms"]
        hits += low <= 0 <= high
    assert hits >= 90
