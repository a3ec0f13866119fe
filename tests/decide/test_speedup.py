"""What drafting gains: against single runs, at the edge, and beside what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.bench.stats import Interval
from pdvsim.calibration.validate.speculation import read_pairs
from pdvsim.cli import main
from pdvsim.decide.error import gain_ranged
from pdvsim.decide.figures import speedup_figure
from pdvsim.decide.fleet import Contender
from pdvsim.decide.report import nearest_pair
from pdvsim.decide.runs import Bench
from pdvsim.decide.speedup import Drafting, Speedup, SpeedupQuestion, find_speedup, measured_pairs
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.run import simulate

HEAD = "eagle3-llama-3.1-8b:llama-3.1-8b"
TRAFFIC = Traffic("random", input_len=64, output_len=48, random_range_ratio=0.3)


def asked(**other: Any) -> SpeedupQuestion:
    base = Experiment(
        "colocated", TRAFFIC, Acceptance(0.6), Server(HEAD, 1, max_num_seqs=256), Hardware("h100-sxm", engine="vllm")
    )
    drafters = (Contender("", "colocated", pair=HEAD, acceptance=base.acceptance),)
    return replace(SpeedupQuestion(base, drafters, (1, 4), (2, 256), 2), **other)


@pytest.fixture
def answer(once: Callable[..., Any]) -> Speedup:
    found: Speedup = once("speedup", lambda: find_speedup(asked(), Bench(1)))
    return found


def test_a_gain_is_the_ratio_of_two_runs_of_the_same_requests(answer: Speedup) -> None:
    name = Drafting("eagle3", 4)
    drafting, plain = (answer.question.loops(one, 2) for one in (name, None))
    ratios = []
    for mine, theirs in zip(drafting, plain, strict=True):
        assert replace(mine.server, num_speculative_tokens=0) == theirs.server
        speeds = [pdvsim.Run(simulate(one)).metrics["output_throughput"] for one in (mine, theirs)]
        ratios.append(speeds[0] / speeds[1])
    assert answer.gains[name, 2].mean == pytest.approx(sum(ratios) / 2)
    assert answer.gains[name, 2].mean > 1.2


def test_a_loss_begins_between_a_gain_and_a_loss(answer: Speedup) -> None:
    name = Drafting("eagle3", 4)
    assert answer.gains[name, 2].mean > 1 > answer.gains[name, 256].mean
    at = answer.loses_from[name]
    assert 2 < at < 256
    near = find_speedup(asked(lengths=(4,), concurrency=(round(at / 1.3), round(at * 1.3))), Bench(1))
    before, after = (near.gains[name, load].mean for load in near.question.concurrency)
    assert before > 1 > after


def test_the_range_holds_seeds_and_the_error_of_gains(answer: Speedup) -> None:
    one = answer.question.server(Drafting("eagle3", 4))
    exact, spread = (gain_ranged(one, Interval(1.5, half, 5)) for half in (0.0, 0.15))
    known = json.loads((Path(pdvsim.__file__).parent / "calibration/data/speculation/ratios.json").read_text())
    low, high = known["vllm eagle3"]["ratio_range"]
    assert (exact.low, exact.high) == pytest.approx((1.5 / high, 1.5 / low))
    assert spread.low < exact.low < 1.5 < exact.high < spread.high
    assert math.log(spread.high / 1.5) == pytest.approx(math.hypot(math.log(exact.high / 1.5), 0.1))


def test_measured_servers_are_on_the_picture(answer: Speedup) -> None:
    measured = measured_pairs([answer.question.server(name) for name in answer.question.options])
    pairs = measured[Drafting("eagle3", 1)]
    assert pairs
    assert {pair.drafted.experiment.server.pair for pair in pairs} == {HEAD}
    [axes] = speedup_figure(answer).axes
    marks = {tuple(point) for line in axes.lines for point in zip(line.get_xdata(), line.get_ydata(), strict=True)}
    assert {(pair.clients, pair.measured["speedup"]) for pair in pairs} <= marks


def test_the_command_says_what_to_do_at_each_load(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = ["--dataset-name", "random", "--input-len", "64", "--output-len", "32", "--num-prompts", "64"]
    flags = ["--concurrency", "1,64", "--num-speculative-tokens", "2", "--num-runs", "2", "-o", str(tmp_path / "out")]
    assert main(["speedup", "--model", "qwen3-8b", "--gpu", "h200", *load, *flags]) == 0
    text = capsys.readouterr().out
    assert "1 concurrent: " in text
    assert "vLLM on h200" in text
    document = json.loads((tmp_path / "out" / "speedup.json").read_text())
    assert {gain["concurrency"] for gain in document["gains"]} == {1, 64}
    assert all(gain["low"] < gain["gain"]["mean"] < gain["high"] for gain in document["gains"])
    assert (tmp_path / "out" / "speedup.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "flags", [["--num-speculative-tokens", "0,2"], ["--num-runs", "1"], ["--concurrency", ""], ["--drafter", "none"]]
)
def test_what_cannot_be_compared_is_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["speedup", "--model", "llama-3.1-8b", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_was_measured_nearest_is_of_this_model_or_says_so() -> None:
    def nearest(pair: str, clients: float) -> list[str]:
        return nearest_pair(Experiment(server=Server(pair, 2), hardware=Hardware("h200", engine="vllm")), clients)

    assert len(nearest(HEAD, 64)) == 1
    assert "of another model" not in nearest(HEAD, 64)[0]
    assert "of another model" in nearest("eagle3-qwen3-8b:qwen3-8b", 64)[0]
    mixture = nearest("eagle3-qwen3-30b-a3b:qwen3-30b-a3b", 64)
    gains = [p.measured["speedup"] for p in read_pairs() if p.method == "eagle3" and "30b-a3b" in p.target]
    assert min(gains) < 1 < max(gains), "which is why an answer says it"
    assert mixture[1].startswith("a mixture of experts")
