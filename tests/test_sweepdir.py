"""A sweep's folder survives what stops the sweep: no point lost, none twice, no file half written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deadly import doomed

from pdvsim.cli import main
from pdvsim.sim.backends import Row
from pdvsim.sim.models import GPUS
from pdvsim.sim.profile import roofline, save
from pdvsim.sim.sweep import Point, run_point

SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6", "--jobs", "1"]
LOADS = ["--concurrency", "1,2,4,8", "--arch", "pdv,colocated"]

pytestmark = pytest.mark.usefixtures("quick_plots")


def sweep(folder: Path, *argv: str) -> int:
    return main(["sweep", *SMALL, *(argv or LOADS), "-o", str(folder)])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of a refusal."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


def content(folder: Path) -> dict[str, bytes]:
    """Every file that has to be the same however the sweep came about; the date and the lock are not."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*.parquet")}


def check_whole(folder: Path) -> None:
    """Whatever is there can be read to its end."""
    for path in folder.rglob("*.parquet"):
        assert pq.ParquetFile(path).read().num_rows >= 1
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())
    for path in folder.rglob("*.png"):
        assert path.read_bytes().endswith(b"IEND\xaeB`\x82")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    assert sweep(folder) == 0
    return folder


def test_the_summary_is_the_parts_in_order(uninterrupted: Path) -> None:
    parts = [pd.read_parquet(path) for path in sorted(uninterrupted.glob("parts/*.parquet"))]
    assert [p["point"].tolist() for p in parts] == [[i] for i in range(8)]
    pd.testing.assert_frame_equal(
        pd.read_parquet(uninterrupted / "summary.parquet"), pd.concat(parts, ignore_index=True), check_dtype=False
    )
    config = json.loads((uninterrupted / "sweep.json").read_text())
    assert (config["schema_version"], config["num_points"], config["sweep"]["vary"]) == (1, 8, {})


def parts(folder: Path) -> int:
    """How many points are done."""
    return len(list(folder.glob("parts/[0-9]*")))


def test_killed_at_random_moments_and_resumed(tmp_path: Path, uninterrupted: Path) -> None:
    """Killed a dozen times, before a file is on the disk or has its name, or at any moment; then one run to the end.

    Nothing here depends on how far a sweep gets in so much time, which is the machine's business.
    """
    chance = random.Random(0)
    folder = tmp_path / "killed"
    forks = multiprocessing.get_context("forkserver")  # a fresh process each time, without a fresh import
    used = ["pdvsim.commands.sweep", "pdvsim.sim.run", "pdvsim.sweepdir", "pyarrow.parquet", "pdvsim.plots"]
    forks.set_forkserver_preload([*used, "matplotlib.backends.backend_agg", "tyro"])
    argv = ["sweep", *SMALL, *LOADS, "-o", str(folder), "--resume"]
    seen, half_written = [], 0
    for number in range(12):
        by_step = (chance.randint(0, 6), 600.0)
        by_time = (10**6, chance.uniform(0.001, 0.3))
        running = forks.Process(target=doomed, args=(argv, *(by_time if number % 4 == 3 else by_step)))
        running.start()
        running.join()
        check_whole(folder)
        seen.append(parts(folder))
        half_written += len(list(folder.rglob(".*.tmp")))
    assert seen == sorted(seen)  # what is done stays done
    assert any(0 < count < 8 for count in seen)
    assert half_written
    assert main(argv) == 0
    assert content(folder) == content(uninterrupted)
    assert not list(folder.rglob(".*.tmp"))


def test_ctrl_c_leaves_a_folder_to_go_on_with(tmp_path: Path) -> None:
    """A real Ctrl-C at a real sweep on two processes."""
    argv = ["sweep", *SMALL[:-4], "--num-prompts", "500", "--jobs", "2", "--num-runs", "200", "--concurrency", "1"]
    folder = tmp_path / "s"
    command = [sys.executable, "-m", "pdvsim.cli", *argv, "-o", str(folder)]
    running = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, stdout=subprocess.DEVNULL)
    while parts(folder) < 3:
        assert running.poll() is None
        time.sleep(0.01)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate()
    assert running.returncode == 130
    check_whole(folder)
    rows = pd.read_parquet(folder / "summary.parquet")
    assert 3 <= len(rows) < 200
    assert f"interrupted: {len(rows)} of 200 points are in {folder}; --resume goes on" in err


def test_a_folder_with_a_sweep_is_left_alone(
    capsys: pytest.CaptureFixture[str], uninterrupted: Path, tmp_path: Path
) -> None:
    before = content(uninterrupted)
    assert sweep(uninterrupted) == 2
    assert "holds a sweep (8 of 8 points done): give --resume" in said(capsys)
    assert sweep(uninterrupted, *LOADS, "--resume", "--seed", "5", "--controller", "goodput") == 2
    line = said(capsys)
    assert "traffic.seed was 0, is 5" in line
    assert 'server.controller was "fixed", is "goodput"' in line
    assert sweep(uninterrupted, "--concurrency", "1,2", "--arch", "pdv,colocated", "--resume") == 2
    assert "num_points was 8, is 4" in said(capsys)
    assert content(uninterrupted) == before


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"pdvsim_version": "0.0.1"}, "written by pdvsim '0.0.1'"),
        ({"schema_version": 2}, "schema_version is 2, this version reads 1"),
        ({"schema_version": None}, "schema_version is None"),
        ({"sweep": []}, "sweep is missing or broken"),
    ],
)
def test_a_folder_of_another_version_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    assert sweep(tmp_path, "--concurrency", "1") == 0
    capsys.readouterr()
    config = tmp_path / "sweep.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    before = config.read_bytes()
    assert sweep(tmp_path, "--concurrency", "1", "--resume") == 2
    line = said(capsys)
    assert says in line
    assert str(config) in line
    assert config.read_bytes() == before


def test_a_file_that_changed_makes_another_sweep(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    profile = tmp_path / "p.json"
    save(roofline(GPUS["h200"]), profile)
    argv = ["--concurrency", "1", "--profile", str(profile)]
    assert sweep(tmp_path / "s", *argv) == 0
    profile.write_text(profile.read_text() + "\n")
    capsys.readouterr()
    assert sweep(tmp_path / "s", *argv, "--resume") == 2
    assert f"inputs.{profile} was " in said(capsys)


def test_what_is_broken_or_another_points_is_run_again(tmp_path: Path, uninterrupted: Path) -> None:
    folder = tmp_path / "s"
    assert sweep(folder) == 0
    (folder / "parts" / "00001.parquet").write_bytes(b"PAR1")
    (folder / "parts" / "00002.parquet").write_bytes((folder / "parts" / "00003.parquet").read_bytes())
    (folder / "parts" / "00004.parquet").unlink()
    (folder / "summary.parquet").unlink()
    assert sweep(folder, *LOADS, "--resume") == 0
    assert content(folder) == content(uninterrupted)


def test_two_sweeps_in_one_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The second is refused and spoils nothing; when the first is killed, no stale lock is in the way."""
    forks = multiprocessing.get_context("forkserver")
    argv = ["--concurrency", "1", "--num-runs", "300", "--num-prompts", "500"]
    running = forks.Process(target=main, args=(["sweep", *SMALL, *argv, "-o", str(tmp_path)],))
    running.start()
    while not parts(tmp_path):
        assert running.is_alive()
        time.sleep(0.005)
    assert sweep(tmp_path, *argv, "--resume") == 2
    assert "another sweep is writing here" in said(capsys)
    running.kill()
    running.join()
    assert sweep(tmp_path, *argv, "--resume", "--num-runs", "299") == 2
    assert "num_runs was 300, is 299" in said(capsys)


def no_space_from(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The disk is full from the `count`-th file on, as the system says when data is to reach it."""
    real, calls = os.fsync, iter(range(10**6))

    def fsync(file: int) -> None:
        if next(calls) >= count:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)


def test_a_full_disk_is_one_line_and_what_is_done_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "s"
    no_space_from(monkeypatch, 4)  # sweep.json and three parts fit
    assert sweep(folder) == 2
    err = capsys.readouterr().err
    assert err.endswith("parts/00003.parquet: No space left on device\n")
    assert f"stopped: 3 of 8 points are in {folder}; --resume goes on\n" in err
    check_whole(folder)
    assert not list(folder.rglob(".*.tmp"))
    monkeypatch.undo()
    assert sweep(folder, *LOADS, "--resume") == 0
    assert content(folder) == content(uninterrupted)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_disk_that_is_really_full(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True
    ).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        assert sweep(tmp_path / "s", "--concurrency", "1", "--num-runs", "40") == 2
        assert "No space left on device" in capsys.readouterr().err
        check_whole(tmp_path / "s")
        done = len(list(tmp_path.glob("s/parts/*.parquet")))
        assert 0 < done < 40
        subprocess.run(["mount", "-o", "remount,size=16m", str(tmp_path)], check=True)
        assert sweep(tmp_path / "s", "--concurrency", "1", "--num-runs", "40", "--resume") == 0
        assert pd.read_parquet(tmp_path / "s" / "summary.parquet")["run"].tolist() == list(range(40))
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_point_that_fails_is_recorded_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    argv = ["--concurrency", "1", "--vary", "kv-capacity-tokens=1000,10,2000"]
    assert sweep(tmp_path, *argv, "--continue-on-error") == 1
    assert f"1 of 3 points failed: the reasons are in {tmp_path / 'failed'}" in capsys.readouterr().err
    failed = json.loads((tmp_path / "failed" / "00001.json").read_text())
    assert failed["kv_capacity_tokens"] == 10
    assert failed["reason"].startswith("request 0 needs 48 tokens of KV cache and the server has 10")
    assert pd.read_parquet(tmp_path / "summary.parquet")["point"].tolist() == [0, 2]
    before = content(tmp_path)
    assert sweep(tmp_path, *argv, "--resume") == 2  # without the flag it is refused beforehand
    assert "kv_capacity_tokens 10: request 0 needs 48 tokens" in said(capsys)
    assert content(tmp_path) == before


def test_an_unforeseen_error_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int, point: Point) -> Row:
        return run_point(index, point) if index else {"x": 1 // index}

    monkeypatch.setattr("pdvsim.sweepdir.run_point", broken)
    assert sweep(tmp_path, "--concurrency", "1,2", "--continue-on-error") == 1
    failed = json.loads((tmp_path / "failed" / "00000.json").read_text())
    assert failed["reason"].startswith("ZeroDivisionError: ")
    assert "in broken" in failed["traceback"]
    monkeypatch.undo()
    assert sweep(tmp_path, "--concurrency", "1,2", "--resume") == 0
    assert not list(tmp_path.glob("failed/*"))  # it has a row now


def test_details_are_written_beside_the_rows(tmp_path: Path) -> None:
    assert sweep(tmp_path, "--concurrency", "1,2", "--save-detailed") == 0
    names = [f"0000{i}.{name}.parquet" for i in (0, 1) for name in ("deliveries", "launches", "requests")]
    assert sorted(path.name for path in (tmp_path / "details").iterdir()) == names
    rows = pd.read_parquet(tmp_path / "summary.parquet")
    for index, row in rows.iterrows():
        assert len(pd.read_parquet(tmp_path / "details" / f"0000{index}.requests.parquet")) == row["completed"]
    (tmp_path / "details" / names[0]).unlink()
    assert sweep(tmp_path, "--concurrency", "1,2", "--save-detailed", "--resume") == 0
    assert (tmp_path / "details" / names[0]).exists()


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, uninterrupted: Path) -> None:
    assert sweep(tmp_path / "s", *LOADS, "--vary", "num-speculative-tokens=2,4", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "16 of 16 points to run: an estimated " in out
    assert out.count("to do") == 16
    assert not (tmp_path / "s").exists()
    before = content(uninterrupted)
    assert sweep(uninterrupted, *LOADS, "--dry-run", "--resume", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {point["state"] for point in document["points"]} == {"done"}
    assert document["estimate"]["core_s"] == 0
    assert content(uninterrupted) == before
