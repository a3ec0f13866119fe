"""A map against one architecture: everyone's figures and paired differences."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.cli import main

PAIRS = ("tinyllama-1.1b:llama-2-7b", "gemma-2b:gemma-7b")
TRAFFIC = ["--num-prompts", "6", "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--jobs", "1"]
SMALL: dict[str, Any] = {"dataset_name": "random", "num_prompts": 6, "input_len": 32, "output_len": 8, "jobs": 1}
FIXED: dict[str, Any] = {"num_speculative_tokens": 2, "max_num_seqs": 8, "max_num_batched_tokens": 512}


def compared(**options: Any) -> Any:
    differences = pdvsim.winner_map(**{"concurrency": 2, "num_runs": 2, **SMALL, **FIXED} | options).differences
    assert differences is not None
    return differences


def test_differences_are_paired_within_a_pair() -> None:
    differences = compared(y="size", pairs=PAIRS, arch=["pd", "pdv"], against="pd")
    frame = differences.points
    assert len(frame) == 2 * 2 * 2
    for entry in differences.paired:
        here = frame[frame["place"] == entry["place"]].set_index(["arch", "seed"])[entry["metric"]]
        assert entry["difference"].mean == pytest.approx((here["pdv"] - here["pd"]).mean())
    assert [d["pair"] for d in differences.paired if d["metric"] == "mean_e2el_ms"] == sorted(PAIRS, reverse=True)


def test_everyone_is_compared_finalist_or_not() -> None:
    """The best four and plain decoding are finalists; six compete, and all stand in the table."""
    archs = ["baseline", "colocated", "pd", "pdv-unified", "pdv", "pdv-hybrid"]
    differences = compared(acceptances=0.6, arch=archs, against="baseline")
    assert [entry["arch"] for entry in differences.summary] == archs
    assert {entry["replications"] for entry in differences.summary} == {2}


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--against", "pd", "--arch", "pdv,colocated"], "--against pd is not one of those compared: pdv, colocated"),
        (["--y", "card"], "try-cards needs at least one value"),
        (["--y", "card", "--try-cards", "z80"], "unknown gpu 'z80'"),
        (["--y", "card", "--try-cards", "h200,h200"], "try-cards names a value twice"),
        (["--try-cards", "h200"], "--try-cards needs --y card"),
    ],
)
def test_what_cannot_be_compared_is_refused(flags: list[str], says: str, refused: Callable[..., str]) -> None:
    assert says in refused(["map", *flags])


@pytest.mark.usefixtures("quick_plots")
def test_a_difference_counts_beyond_the_profiles_error_over_five_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Batch 1 is far behind everyone; pdv-hybrid is pd while few are there. Four seeds tell nothing."""
    argv = ["map", "--acceptances", "0.6", "--concurrency", "2", *TRAFFIC, "-o", str(tmp_path)]
    argv += [f"--{name.replace('_', '-')}={value}" for name, value in FIXED.items()]
    few, alike = "too few runs", "not significant"
    for arch, num_runs, said in (("baseline,pd", 5, ""), ("baseline,pd", 4, few), ("pd,pdv-hybrid", 5, alike)):
        assert main([*argv, "--arch", arch, "--against", arch.split(",")[0], "--num-runs", str(num_runs)]) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if " output_throughput " in line]
        assert [[words for words in (few, alike) if line.endswith(words)] for line in lines] == [[said] if said else []]
        assert bool(re.search(r"the interval overlaps the profile's error of \d+\.\d%", out)) is (num_runs >= 5)
        for difference in json.loads((tmp_path / "map.json").read_text())["paired_differences"]:
            apart = difference["relative"]
            beyond = abs(apart["mean"]) - apart["half_width"] > difference["error"]
            assert difference["significant"] is (beyond and num_runs >= 5)
    assert {path.name for path in tmp_path.iterdir()} == {"map.parquet", "map.json", "map.png", "differences.png"}


@pytest.mark.parametrize("command", ["map", "capacity", "advise"])
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
    loads = {"map": ["--concurrency", "4"], "capacity": ["--goodput", "ttft:500"]}
    argv = [*loads.get(command, ["--request-rate", "4"]), "--num-prompts", "20", "--num-runs", str(runs)]
    with pytest.raises(Begun):
        module.main([*argv, "--arch", "pd", "pdv"])
    line = f"pdvsim: {runs} runs per point: no difference can be significant; use at least --num-runs 5\n"
    assert (line in capsys.readouterr().err) is said
