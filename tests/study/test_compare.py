"""`pdvsim compare`: every pair on every card at its best, the same requests, costs only where a price is given."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pdvsim.cli import main
from pdvsim.cli.compare import prices_usd
from pdvsim.decide import runs as runs_module
from pdvsim.decide.tune import APART
from pdvsim.sim.config import Experiment, Traffic
from pdvsim.sim.hardware import models
from pdvsim.study.compare import COST, Comparison, differences, run_comparison, summary
from pdvsim.study.sweep import SweepInterrupted, run_sweep

SMALL = Experiment(traffic=Traffic("random", num_prompts=6, input_len=32, output_len=8))
PAIRS = ("tinyllama-1.1b:llama-2-7b", "gemma-2b:gemma-7b")
RUN = partial(run_sweep, jobs=1)
FLAGS = ["--num-prompts", "6", "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--jobs", "1"]


@pytest.fixture
def second_card(monkeypatch: pytest.MonkeyPatch) -> str:
    """A card of twice the H200's speed, by data sheet."""
    h200 = models.GPUS["h200"]
    fast = replace(
        h200,
        name="h400",
        bandwidth_bytes_per_s=2 * h200.bandwidth_bytes_per_s,
        flops_per_s=2 * h200.flops_per_s,
        measured=False,
    )
    monkeypatch.setitem(models.GPUS, "h400", fast)
    return "h400"


def small(**changes: Any) -> Comparison:
    return Comparison(**({"pairs": PAIRS, "archs": ("pd", "pdv"), "concurrency": (2,), "base": SMALL} | changes))


def test_every_pair_on_every_card_with_common_seeds(second_card: str) -> None:
    base = replace(SMALL, hardware=replace(SMALL.hardware, profile="roofline"))
    frame = run_comparison(small(gpus=("h200", second_card), num_runs=2, base=base), RUN)
    assert len(frame) == 2 * 2 * 2 * 2
    assert set(zip(frame["pair"], frame["gpu"], strict=True)) == {(p, g) for p in PAIRS for g in ("h200", "h400")}
    entries = {(e["pair"], e["gpu"], e["arch"]): e["output_throughput"].mean for e in summary(frame)}
    assert all(entries[p, "h400", a] > entries[p, "h200", a] for p in PAIRS for a in ("pd", "pdv"))


def test_cost_is_price_over_tokens() -> None:
    frame = run_comparison(small(gpu_hour_usd={"h200": 3.6}), RUN)
    assert frame[COST].tolist() == pytest.approx([1e3 / rate for rate in frame["output_throughput"]])
    assert COST not in run_comparison(small(pairs=PAIRS[:1]), RUN)


def test_pairs_may_have_their_own_acceptance() -> None:
    frame = run_comparison(small(pair_acceptance=(1.0, 0.0)), RUN)
    shown = frame.groupby("pair")["spec_decode_acceptance_rate"].agg(["min", "max"])
    assert shown.loc[PAIRS[0]].tolist() == [100, 100]
    assert shown.loc[PAIRS[1]].tolist() == [0, 0]


def test_differences_are_paired_within_a_pair_and_card() -> None:
    frame = run_comparison(small(num_runs=2), RUN)
    found = differences(frame, ["mean_e2el_ms"], "pd")
    assert [(d["pair"], d["arch"]) for d in found] == [(p, "pdv") for p in PAIRS]
    for entry in found:
        here = frame[frame["pair"] == entry["pair"]].set_index(["arch", "seed"])["mean_e2el_ms"]
        assert entry["difference"].mean == pytest.approx((here["pdv"] - here["pd"]).mean())


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pairs": ()}, "pairs needs at least one value"),
        ({"gpus": ("h200", "h200")}, "gpus names a value twice"),
        ({"gpus": ("z80",)}, "unknown gpu 'z80'; known: "),
        ({"pairs": ("llama-2-7b",)}, "must be written draft:target"),
        ({"pair_acceptance": (0.5,)}, "one rate for each of the 2 pairs"),
        ({"pair_acceptance": (0.5, 2.0)}, "pair-acceptance must be 0 to 1, got 2.0"),
        ({"archs": ("pd", "pd")}, "arch names a value twice"),
    ],
)
def test_what_cannot_be_compared_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        small(**changes)


def test_a_pair_that_does_not_fit_is_refused_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        models.GPUS, "tiny", replace(models.GPUS["h200"], name="tiny", memory_bytes=8e9, measured=False)
    )
    roofline = replace(SMALL, hardware=replace(SMALL.hardware, profile="roofline"))
    with pytest.raises(ValueError, match="does not fit on tiny"):
        small(gpus=("tiny",), base=roofline)


def test_prices() -> None:
    gpus = ("h200", "a100")
    assert prices_usd((), gpus) == {}
    assert prices_usd(("2.5",), gpus) == {"h200": 2.5, "a100": 2.5}
    assert prices_usd(("h200=4", "1"), gpus) == prices_usd(("1", "h200=4"), gpus) == {"h200": 4, "a100": 1}
    for given, says in (
        ("h200=4", "no price for a100"),
        ("b=1", "'b' is not among"),
        ("x", "must be a price"),
        ("0", "0"),
    ):
        with pytest.raises(ValueError, match=says):
            prices_usd((given,), gpus)


def test_table_json_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "compare",
        "--pairs",
        ",".join(PAIRS),
        "--concurrency",
        "2",
        "--arch",
        "baseline,pd,pdv",
        *FLAGS,
        "--num-runs",
        "2",
        "-o",
        str(tmp_path),
    ]
    assert main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert len(document["points"]) == 2 * 3 * 2
    assert [e["arch"] for e in document["summary"][:3]] == ["baseline", "pd", "pdv"]
    assert {d["metric"] for d in document["paired_differences"]} == {"output_throughput", "mean_e2el_ms", "p95_e2el_ms"}
    assert {path.name for path in tmp_path.iterdir()} == {"compare.parquet", "compare.json", "compare.png"}
    assert len(pd.read_parquet(tmp_path / "compare.parquet")) == 12
    assert main([*argv, "--gpu-hour-usd", "h200=4"]) == 0
    out = capsys.readouterr().out
    assert "USD/M out tok" in out
    assert "no cost" not in out
    assert "Paired differences" in out


@pytest.mark.usefixtures("quick_plots")
def test_each_architecture_stands_at_its_own_best(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where no draft passes nobody drafts, where all do everybody does; and the rows say so."""
    argv = ["compare", "--pairs", PAIRS[0], "--arch", "colocated,pd", "--concurrency", "2", *FLAGS, "--json"]
    for rate, drafts in (("0", False), ("1", True)):
        assert main([*argv, "--acceptance-rate", rate, "--num-runs", "2", "-o", str(tmp_path)]) == 0
        document = json.loads(capsys.readouterr().out)
        for entry in document["summary"]:
            assert entry["settings"].startswith("k=0") is not drafts
        assert {point["settings"] for point in document["points"]} == {e["settings"] for e in document["summary"]}


@pytest.mark.usefixtures("quick_plots")
def test_a_difference_counts_beyond_the_profiles_error_over_five_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 1 is far behind everyone; pdv-hybrid is pd while few are there. Four seeds tell nothing."""
    argv = ["compare", "--pairs", PAIRS[0], "--concurrency", "2", *FLAGS, "-o", str(tmp_path)]
    few, alike = "too few runs to tell", "not told apart"
    for arch, num_runs, said in (("baseline,pd", 5, ""), ("baseline,pd", 4, few), ("pd,pdv-hybrid", 5, alike)):
        assert main([*argv, "--arch", arch, "--num-runs", str(num_runs)]) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if " output_throughput " in line]
        assert [[words for words in (few, alike) if line.endswith(words)] for line in lines] == [[said] if said else []]
        assert (alike in out) is (said == alike or num_runs >= 5)
        assert bool(re.search(r"the interval reaches into the profile's own error of \d+\.\d%", out)) is (num_runs >= 5)
        for difference in json.loads((tmp_path / "compare.json").read_text())["paired_differences"]:
            apart = difference["relative"]
            beyond = abs(apart["mean"]) - apart["half_width"] > difference["error"]
            assert difference["told_apart"] is (beyond and num_runs >= 5)


@pytest.mark.parametrize("command", ["compare", "map", "capacity", "frontier", "advise"])
@pytest.mark.parametrize(("runs", "said"), [(3, True), (5, False)])
def test_too_few_runs_are_said_before_anything_is_computed(
    command: str, runs: int, said: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(Exception):
        pass

    def bench(*_: object, **__: object) -> None:
        raise Begun

    module = import_module(f"pdvsim.cli.{command}")
    monkeypatch.setattr(module, "Bench", bench)
    loads = {"compare": ["--concurrency", "4"], "map": ["--concurrency", "4"], "capacity": ["--goodput", "ttft:500"]}
    argv = [*loads.get(command, ["--request-rate", "4"]), "--num-prompts", "20", "--num-runs", str(runs)]
    with pytest.raises(Begun):
        module.main([*argv, "--arch", "pd", "pdv"])
    line = f"pdvsim: {runs} runs per point: no difference can be significant, --num-runs 5 is the least\n"
    assert (line in capsys.readouterr().err) is said


def test_without_a_price_there_is_no_cost_and_the_table_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", "--pairs", PAIRS[0], "--arch", "pd", *FLAGS, "-o", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "USD" not in out.replace("--gpu-hour-usd", "")
    assert "no cost: give the price" in out
    assert f"\n{PAIRS[0]} on h200\n" in out
    assert [float(line.split()[0]) for line in out.splitlines() if line.split()[1:2] == ["pd"]] == [3, 10]


def test_ctrl_c_keeps_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """When everyone is tuned and four runs are done: the first pair's, and one more."""

    def interrupted(points: Any, *rest: Any) -> pd.DataFrame:
        if points[0].experiment.traffic.seed >= APART:
            return run_sweep(points, *rest)
        raise SweepInterrupted(run_sweep(points[:4], *rest))

    monkeypatch.setattr(runs_module, "run_sweep", interrupted)
    argv = ["compare", "--pairs", ",".join(PAIRS), "--concurrency", "2", "--num-runs", "1", *FLAGS, "-o", str(tmp_path)]
    argv += ["--arch", "baseline,pd,pdv"]
    assert main(argv) == 130
    assert "interrupted: 3 of 6 points saved" in capsys.readouterr().err
    assert len(pd.read_parquet(tmp_path / "compare.parquet")) == 3
    assert not math.isnan(json.loads((tmp_path / "compare.json").read_text())["points"][0]["output_throughput"])
