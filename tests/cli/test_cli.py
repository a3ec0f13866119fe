"""The command line: what it prints, and where; help and completion. tests/test_refusals.py lists what it refuses."""

from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.cli import COMMANDS, command_class, main
from pdvsim.cli.run import RunCommand
from pdvsim.cli.sweep import SweepCommand
from pdvsim.common.commandline import parse
from pdvsim.common.options import options

SMALL = ["--num-prompts", "8", "--dataset-name", "random", "--input-len", "32", "--output-len", "8"]


def test_unwritable_outputs_are_refused_before_the_run(
    refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("run", "band"):  # before the patch: they would keep None under a name of their own
        importlib.import_module(f"pdvsim.bench.{name}")
    monkeypatch.setattr("pdvsim.sim.run.simulate", None)
    (tmp_path / "file").touch()
    file = str(tmp_path / "file" / "r.json")
    assert "Not a directory" in refused(["run", "--trace-out", file])
    assert "Not a directory" in refused(["run", "-o", file])
    assert "Is a directory" in refused(["run", "-o", str(tmp_path)])
    assert "Not a directory" in refused(["run", "--save-result", "--result-dir", file])
    assert "File exists" in refused(["sweep", "-o", str(tmp_path / "file")])
    assert [p.name for p in tmp_path.iterdir()] == ["file"]  # checking leaves nothing behind


@pytest.mark.parametrize("line", [["run", "-o", "new/er/r.json"], ["advise", "--budget", "9", "-o", "new/er"]])
def test_a_run_that_fails_leaves_no_empty_folder(
    line: list[str], refused: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policy = "from pdvsim.sim.policies.pd import PD\nclass Broken(PD):\n    def admits(self): raise KeyError('why')\n"
    Path("mine.py").write_text(policy, encoding="utf-8")
    assert "mine.py:3: KeyError: 'why'" in refused([*line, "--arch", "mine.py:Broken", *SMALL])
    assert not Path("new").exists()


def test_lists_take_commas_and_spaces() -> None:
    for argv in (["--arch", "pdv,pd"], ["--arch", "pdv", "pd"], ["--arch=pdv,", "pd"], ["--arch", "pdv", ",", "pd"]):
        assert parse(SweepCommand, argv).arch == ("pdv", "pd")
    assert parse(SweepCommand, ["--concurrency", "1,2,", "4"]).concurrency == (1, 2, 4)
    assert parse(SweepCommand, ["--request_rate", "1", "inf"]).request_rate == (1.0, float("inf"))
    for argv in (["--goodput", "ttft:500", "tpot:50"], ["--goodput", "ttft:500,tpot:50"]):
        assert parse(RunCommand, argv).experiment.scoring.goodput == ("ttft:500", "tpot:50")


def test_both_spellings_of_a_flag() -> None:
    hyphens, underscores = ["--request-rate", "8", "--num-prompts=5"], ["--request_rate", "8", "--num_prompts=5"]
    assert parse(RunCommand, hyphens) == parse(RunCommand, underscores)
    assert parse(RunCommand, ["--request-rate", "inf"]).experiment.traffic.request_rate == float("inf")


def test_config_file_is_the_same_flags(refused: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "c.toml"
    path.write_text('arch = "pd"\nrequest_rate = 8\ngoodput = ["ttft:500"]\nsave_result = true\nnum-prompts = 5\n')
    flags = ["--arch", "pd", "--request-rate", "8", "--goodput", "ttft:500", "--save-result", "--num-prompts", "5"]
    given, by_hand = parse(RunCommand, ["--config", str(path)]), parse(RunCommand, flags)
    assert (given.experiment, given.save_result) == (by_hand.experiment, True)
    won = parse(RunCommand, [f"--config={path}", "--request_rate", "2", "--no-save-result"])
    assert (won.experiment.traffic.request_rate, won.experiment.arch, won.save_result) == (2.0, "pd", False)
    for text, says in (
        ("request_rat = 8", "unknown key request_rat; did you mean request_rate?"),
        ("request_rate = [1, 2]", "--request-rate takes one value"),
        ('json = "yes"', "--json must be true or false"),
        ("request_rate = ", "is not TOML"),
        ('config = "c.toml"', "unknown key config"),
        ('num_prompts = "many"', "--num-prompts must be a whole number"),
        ("[traffic]\nseed = 1", "unknown key traffic"),
    ):
        path.write_text(text)
        assert says in refused(["run", "--config", str(path)])


def one_document(capsys: pytest.CaptureFixture[str], *argv: str) -> Any:
    assert main(argv) == 0
    return json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_profiles(capsys: pytest.CaptureFixture[str]) -> None:
    document = one_document(capsys, "profile", "--list", "--json")
    assert {"gpus", "profiles", "models"} == set(document)
    assert all(p["forward_error_bar"] > 0 for p in document["profiles"] if p["engine"] != "pdvsim")
    assert main(["profile", "--list"]) == 0
    assert document["profiles"][0]["foundation"] in capsys.readouterr().out


def test_run_saves_what_it_is_asked_to(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out, trace = tmp_path / "r.json", tmp_path / "t.json"
    files = ["-o", str(out), "--save-detailed", "--trace-out", str(trace)]
    document = one_document(capsys, "run", *SMALL, "--json", *files)
    assert document == json.loads(out.read_text())
    assert document["request_rate"] == "inf"
    assert document["completed"] == 8
    assert document["config"]["traffic"]["output_len"] == 8
    assert document["foundation"]
    assert json.loads(trace.read_text())["traceEvents"]

    import pandas as pd

    frames = {name: pd.read_parquet(tmp_path / f"r.{name}.parquet") for name in ("requests", "launches", "deliveries")}
    assert len(frames["requests"]) == 8
    assert frames["deliveries"]["tokens"].sum() == document["total_output_tokens"] == 64
    assert len(frames["launches"]) == document["launches"]


def test_save_result_is_named_as_vllm_names_it(tmp_path: Path) -> None:
    where = ["--save-result", "--result-dir", str(tmp_path / "new"), "--max-concurrency", "4", "--label", "mine"]
    assert main(["run", *SMALL, *where]) == 0
    [path] = (tmp_path / "new").iterdir()
    assert path.match("mine-infqps-concurrency4-colocated-*.json")


def test_sweep_writes_its_files_and_prints_tables(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "s"
    argv = ["sweep", *SMALL, "--arch", "pdv", "--concurrency", "1,4", "--jobs", "1", "-o", str(folder)]
    assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("concurrency  arch")
    assert captured.out.count("\n") <= 8  # two points, and what they rest on
    assert str(folder / "summary.parquet") in captured.err
    assert main([*argv, "--resume", "--verbose"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("Serving Benchmark Result") == 2
    assert printed.endswith(captured.out)
    names = [".lock", "rows.jsonl", "summary.parquet", "sweep.json", "sweep.png"]
    assert sorted(p.name for p in folder.iterdir()) == names
    config = json.loads((folder / "sweep.json").read_text())
    assert config["sweep"]["loads"] == [{"kind": "concurrency", "load": 1.0}, {"kind": "concurrency", "load": 4.0}]


@pytest.mark.usefixtures("quick_plots")
def test_sweep_json_is_one_document(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    loads = ["--arch", "pdv", "colocated", "--request-rate", "4", "inf", "--num-runs", "2", "--jobs", "1"]
    document = one_document(capsys, "sweep", *SMALL, *loads, "-o", str(tmp_path), "--json")
    assert len(document["points"]) == 8
    assert len(document["summary"]) == 4
    assert document["summary"][0]["output_throughput"]["n"] == 2
    assert {d["arch"] for d in document["paired_differences"]} == {"colocated"}
    assert document["foundation"]


def test_ctrl_c_in_a_run_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("pdvsim.sim.run.simulate", interrupted)
    assert main(["run", *SMALL]) == 130
    assert capsys.readouterr().err == "pdvsim: interrupted\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"pdvsim {pdvsim.__version__}\n"


def test_an_existing_result_is_kept_by_default(
    capsys: pytest.CaptureFixture[str], refused: Callable[..., str], tmp_path: Path
) -> None:
    result, timeline = tmp_path / "r.json", tmp_path / "t.json"
    argv = ["run", *SMALL, "-o", str(result)]
    assert main(argv) == 0
    first = result.read_bytes()
    timeline.touch()
    capsys.readouterr()
    assert f"{result} exists already; use --overwrite to replace it" in refused([*argv, "--seed", "5"])
    assert f"{timeline} exists already" in refused(["run", *SMALL, "--trace-out", str(timeline)])
    assert result.read_bytes() == first
    assert main([*argv, "--seed", "5", "--overwrite"]) == 0
    assert result.read_bytes() != first
    assert main(["run", *SMALL, "-o", "/dev/null"]) == 0  # no file that could be lost


# help and completion -------------------------------------------------------------------------------------------------


def printed(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    with contextlib.suppress(SystemExit):  # of a command's --help
        assert main(argv) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("command", COMMANDS)
def test_help_fits_a_screen_or_two_and_help_all_has_every_flag(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    short, whole = printed(capsys, command, "--help"), printed(capsys, command, "--help-all")
    assert short == printed(capsys, "help", command) == printed(capsys, command, "-h")
    assert whole == printed(capsys, "help", command, "--help-all")
    assert short.count("\n") <= 70
    assert all(len(line) <= 100 for line in (short + whole).splitlines())
    for option in options(command_class(command)).values():
        assert option.text, option.name
        assert option.placed or option.flag in whole or f"--no-{option.flag[2:]}" in whole


def test_python_m_pdvsim(capsys: pytest.CaptureFixture[str]) -> None:
    """The same help as after commands are loaded: their modules are names of the package, one of them is `map`."""
    assert command_class("map")
    done = subprocess.run([sys.executable, "-m", "pdvsim", "help"], capture_output=True, text=True, check=True)
    assert done.stdout == printed(capsys, "--help") == printed(capsys, "help")


def test_realrun_is_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--tiny" in printed(capsys, "realrun", "--help-all")
    assert main(["realrun", "--replicas", "2"]) == 2
    assert "realrun has one GPU" in capsys.readouterr().err


COMPLETED = [
    ("swe", ["sweep"]),
    ("help swe", ["sweep"]),
    ("run --arch pdv-", ["pdv-unified", "pdv-hybrid", "pdv-ahead"]),
    ("sweep --arch colocated,pdv-", ["colocated,pdv-unified", "colocated,pdv-hybrid", "colocated,pdv-ahead"]),
    ("run --gpu h1", ["h100-sxm", "h100-pcie", "h100-nvl"]),
    ("run --priority p", ["preemptive", "partition"]),
    ("run --request-", ["--request-rate"]),
    ("draft-table --max-k", ["--max-k"]),
    ("report --he", ["--help", "--help-all"]),
]


@pytest.mark.parametrize(("typed", "offered"), COMPLETED)
def test_completion(capsys: pytest.CaptureFixture[str], typed: str, offered: list[str]) -> None:
    assert printed(capsys, "--complete", "pdvsim", *typed.split()).split() == offered


def test_bash_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "completion.bash"
    script.write_text(printed(capsys, "--completion", "bash"))
    at = "COMP_WORDS=(realrun --arch pdv-h); COMP_CWORD=2"
    program = f'pdvsim() {{ {sys.executable} -m pdvsim "$@"; }}'
    code = f'{program}; source {script}; {at}; _pdvsim; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["pdv-hybrid"]
