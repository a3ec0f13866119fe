"""`python -m pdvsim.cli.utilisation`: what it would serve, and a run of tiny models on the CPU to its report."""

from __future__ import annotations

from pathlib import Path

import pytest

from pdvsim.calibration.validate.served import read_runs
from pdvsim.cli.utilisation import AT_ONCE, WORKERS, grows, main, planned, row_of
from pdvsim.sim.policies import ARCHS


def test_every_architecture_at_every_load_and_more_and_more_workers(tmp_path: Path) -> None:
    plan = [run.experiment for run in planned(tmp_path)]
    loads = [(e.arch, e.traffic.max_concurrency) for e in plan[: len(ARCHS) * len(AT_ONCE)]]
    assert loads == [(arch, at_once) for arch in ARCHS for at_once in AT_ONCE]
    workers = [(e.arch, e.server.num_workers, e.traffic.max_concurrency) for e in plan[len(loads) :]]
    assert workers == [("baseline", count, count) for count in WORKERS]
    assert len({run.id for run in planned(tmp_path)}) == len(plan)


def test_a_run_and_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("pyarrow")
    runs = tmp_path / "runs.jsonl"
    for only in (["--arch pd ", "--max-concurrency 8 "], ["--arch baseline", "--num-workers 2 "]):
        assert main(["run", "--tiny", "--device", "cpu", "-o", str(runs), "--only", *only]) == 0
    capsys.readouterr()
    assert main(["report", "-o", str(runs)]) == 0
    said = capsys.readouterr().out
    assert "SM busy %" in said
    assert (tmp_path / "utilisation.png").stat().st_size > 0
    rows = [row_of(run) for run in read_runs(runs)]
    assert [(row["arch"], row["at_once"]) for row in rows] == [("pd", 8), ("baseline", 2)]
    assert [row["workers"] for row in grows(rows)] == [2]
    assert all(0 < row["busy"] <= 1 and 0 < row["simulated_busy"] <= 1 for row in rows)
    assert all(row["samples"] == 0 for row in rows)  # a CPU has no NVML
