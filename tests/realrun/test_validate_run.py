"""Real runs as they are planned, on the CPU here: served, kept, gone on with, and looked at launch by launch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdvsim.calibration.validate import runs
from pdvsim.calibration.validate.launches import launches_of
from pdvsim.calibration.validate.served import ServedRun, read_runs, write_runs
from pdvsim.cli import main
from pdvsim.cli.realrun import main as realrun
from pdvsim.common.files import sealed

SMALL = "--dataset-name random --num-prompts 3 --input-len 16 --output-len 8"


def plan(folder: Path) -> Path:
    """Two groups: two loads and a repeat of one server, one of another."""
    commands = [f"realrun --arch pd {SMALL} --max-concurrency {users}" for users in (2, 1)]
    planned = [ServedRun(command, 0, users == 1, {}, {}, folder) for users, command in enumerate(commands)]
    planned.append(ServedRun(commands[0], 1, False, {}, {}, folder))
    planned.append(ServedRun(f"realrun --arch autoregressive {SMALL} --request-rate 50", 0, False, {}, {}, folder))
    write_runs(folder / "plan.jsonl", planned)
    return folder / "plan.jsonl"


def serve(plan_file: Path, output: Path, *more: str) -> int:
    return main(["validate", "--serve", str(plan_file), "-o", str(output), "--tiny", *more])


def test_runs_are_made_kept_and_gone_on_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, output, some = plan(tmp_path), tmp_path / "runs.jsonl", tmp_path / "some.jsonl"
    write_runs(some, [run for run in read_runs(path, planned=True) if "--max-concurrency 2" in run.command])
    assert serve(some, output) == 0
    some.unlink()
    first = output.read_bytes()
    assert [(run.repeat, run.held_out) for run in read_runs(output)] == [(0, False), (1, False)]
    assert serve(path, output) == 0
    assert "0 of 4 runs are left" in capsys.readouterr().err
    assert output.read_bytes().startswith(first)
    done = read_runs(output)
    assert len({run.id for run in done}) == 4
    assert [run.held_out for run in done] == [False, False, True, False]
    assert serve(path, output) == 0  # nothing is left, so nothing is prepared
    assert output.read_bytes().startswith(first)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["launches.parquet", "plan.jsonl", "runs.jsonl"]
    for run in done:
        stored = launches_of(run)
        assert len(stored) == run.metrics["launches"]
        assert run.meta["longest_request"] == 0  # no file
        assert stored["start_s"].is_monotonic_increasing
        assert set(stored["role"]) == ({"draft", "target"} if run.experiment.arch == "pd" else {"target"})
    capsys.readouterr()
    picture = tmp_path / "one.png"
    assert main(["validate", str(output), "--run", "1", "--plot", str(picture)]) == 0
    assert "rows or tokens" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert main(["validate", str(output), "--run", "3"]) == 2
    assert "held out" in capsys.readouterr().err
    assert main(["validate", str(output), "--run", "3", "--held-out", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert sum(row["measured"] for row in compared["rows"]) == done[2].metrics["launches"]


def test_ctrl_c_keeps_what_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, output = plan(tmp_path), tmp_path / "runs.jsonl"
    served, count = runs.Workbench.served, iter(range(9))

    def stopped(bench: runs.Workbench, experiment: object) -> object:
        if next(count) == 1:
            raise KeyboardInterrupt
        return served(bench, experiment)  # type: ignore[arg-type]

    monkeypatch.setattr(runs.Workbench, "served", stopped)
    assert serve(path, output) == 130
    [run] = read_runs(output)
    assert len(launches_of(run)) == run.metrics["launches"]


def test_a_result_of_realrun_is_looked_at_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    argv = ["--device", "cpu", "--tiny", "--arch", "pdv", *SMALL.split(), "-o", str(path), "--save-detailed"]
    assert realrun(argv) == 0
    document = json.loads(path.read_text())
    document["config"]["server"]["pair"] = "tinyllama-1.1b:llama-2-7b"  # the tiny pair cannot be simulated
    path.write_text(json.dumps(document))
    capsys.readouterr()
    assert main(["validate", "--run", str(path)]) == 2  # its seal is of what was written
    assert "it is damaged or was changed" in capsys.readouterr().err
    path.write_text(json.dumps(sealed(document)))
    assert main(["validate", "--run", str(path)]) == 0
    assert "gaps, real / sim" in capsys.readouterr().out
