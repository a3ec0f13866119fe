"""`pdvsim validate --run`: real runs first, on the CPU here, then the same ones simulated."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdvsim.calibration.validate import runs
from pdvsim.cli import main


def test_runs_are_made_kept_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "CONCURRENCY", {2: 4})
    monkeypatch.setattr(runs, "TOKENS", 16)
    path = tmp_path / "runs.jsonl"
    argv = ["validate", str(path), "--run", "--tiny", "--archs", "pd", "--jobs", "1", "--no-ablations", "--json"]
    assert main(argv) == 0
    first = json.loads(capsys.readouterr().out)
    assert [run["load"]["concurrency"] for run in first["runs"]] == [2]
    assert first["spread"] is None
    written = path.read_bytes()
    assert main([*argv, "--repeats", "2"]) == 0  # goes on where the first stopped
    second = json.loads(capsys.readouterr().out)
    assert path.read_bytes().startswith(written)
    assert [run["load"]["repeat"] for run in second["runs"]] == [0, 1]
    assert second["runs"][0] == first["runs"][0]
    assert second["spread"]["runs"] == 2


def test_without_a_gpu_it_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    assert main(["validate", str(tmp_path / "runs.jsonl"), "--run"]) == 2
    assert "CUDA" in capsys.readouterr().err
    assert not (tmp_path / "runs.jsonl").exists()
