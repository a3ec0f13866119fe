"""A sweep's folder survives what stops the sweep: no point lost, none twice, no file half written."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deadly import doomed
from resultdirs import content

from pdvsim.cli import main
from pdvsim.common.files import TEMPORARY, read_sealed, write_whole
from pdvsim.common.outcomes import Row
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.study.folder import SweepDir
from pdvsim.study.sweep import Point, Sweep, run_point

SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6", "--jobs", "1"]
LOADS = ["--concurrency", "1,2,4,8", "--arch", "pdv,colocated"]

pytestmark = pytest.mark.usefixtures("quick_plots_in_module")


ONE = ["--arch", "pdv"]
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


def line(folder: Path, *argv: str) -> list[str]:
    """One architecture, unless the flags name some."""
    return ["sweep", *SMALL, *(() if not argv or "--arch" in argv else ONE), *(argv or LOADS), "-o", str(folder)]


def sweep(folder: Path, *argv: str) -> int:
    return main(line(folder, *argv))


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
    parts = [json.loads(path.read_text()) for path in sorted(uninterrupted.glob("parts/*.json"))]
    assert [part["point"] for part in parts] == list(range(8))
    summary = pd.read_parquet(uninterrupted / "summary.parquet")
    pd.testing.assert_frame_equal(summary, pd.DataFrame([part["row"] for part in parts]))
    config = json.loads((uninterrupted / "sweep.json").read_text())
    assert (config["schema_version"], config["num_points"], config["sweep"]["vary"]) == (1, 8, {})


def parts(folder: Path) -> int:
    """How many points are done."""
    return len(list(folder.glob("parts/[0-9]*")))


def test_killed_at_random_moments_and_resumed(tmp_path: Path, uninterrupted: Path) -> None:
    """Killed eight times, before a file is on the disk or has its name, or at any moment; then one run to the end.

    Nothing here depends on how far a sweep gets in so much time, which is the machine's business.
    """
    chance = random.Random(int(os.environ.get("PDVSIM_SOAK", 0)))
    folder = tmp_path / "killed"
    forks = multiprocessing.get_context("forkserver")  # a fresh process each time, without a fresh import
    used = ["pdvsim.cli.sweep", "pdvsim.sim.run", "pdvsim.study.folder", "pyarrow.parquet", "pdvsim.view.plots"]
    forks.set_forkserver_preload([*used, "matplotlib.backends.backend_agg"])
    argv = ["sweep", *SMALL, *LOADS, "-o", str(folder), "--resume"]
    seen, half_written = [], 0
    for number in range(8):
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
    assert not list(folder.rglob(TEMPORARY))


@pytest.mark.parametrize(("change", "flags", "says"), [
    ({}, [], ["8 of 8 points", "--resume"]),
    ({}, ["--resume", "--seed", "5", "--controller", "goodput"], ["seed was 0, is 5", "controller"]),
    ({}, ["--resume", "--concurrency", "1,2"], ["num_points was 8, is 4"]),
    ({"pdvsim_version": "0.0.1"}, ["--resume"], ["written by pdvsim '0.0.1'", "sweep.json"]),
    ({"schema_version": 2}, ["--resume"], ["schema_version is 2", "sweep.json"]),
    ({"schema_version": None}, ["--resume"], ["schema_version is None", "sweep.json"]),
])  # fmt: skip
def test_a_folder_of_another_sweep_is_left_alone(
    change: dict[str, Any],
    flags: list[str],
    says: list[str],
    refused: Callable[..., str],
    uninterrupted: Path,
    tmp_path: Path,
) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "s"))
    config = folder / "sweep.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | change))
    before = content(folder), config.read_bytes()
    reason = refused(line(folder, *LOADS, *flags))
    assert all(part in reason for part in says)
    assert (content(folder), config.read_bytes()) == before


def test_a_lock_that_is_a_link_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "precious").write_text("kept")
    (tmp_path / "s" / ".lock").symlink_to(tmp_path / "precious")
    assert ".lock: is a link" in refused(line(tmp_path / "s", "--concurrency", "1"))
    assert (tmp_path / "precious").read_text() == "kept"


def ended(pid: str) -> bool:
    """Whether a process is gone, or would be once its parent collects its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_two_sweeps_in_one_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    """The second is refused and spoils nothing; when the first is killed, its workers end and no stale lock is left.

    It is killed at its first part, with hundreds of points of a tenth of a second to go.
    """
    argv = [*ONE, "--concurrency", "1", "--num-runs", "300", "--num-prompts", "500"]
    command = [sys.executable, "-m", "pdvsim.cli", *line(tmp_path, *argv), "--jobs", "2"]
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not parts(tmp_path):
        assert running.poll() is None
        time.sleep(0.01)
    assert "writing" in refused(line(tmp_path, *argv, "--resume"))
    children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
    assert len(children) >= 2
    running.kill()
    running.wait()
    deadline_s = time.monotonic() + 120  # left alone, loky's workers would end after 300
    while not all(map(ended, children)):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    assert "num_runs was 300, is 299" in refused(line(tmp_path, *argv, "--resume", "--num-runs", "299"))


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
    assert "parts/00003.json: No space" in err.splitlines()[-1]
    assert re.search(f" 3 of 8 .*{folder}.*--resume\n", err)
    check_whole(folder)
    assert not list(folder.rglob(TEMPORARY))
    monkeypatch.undo()
    assert sweep(folder, *LOADS, "--resume") == 0
    assert content(folder) == content(uninterrupted)


def test_a_point_that_fails_is_recorded_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], refused: Callable[..., str], tmp_path: Path
) -> None:
    argv = ["--concurrency", "1", "--vary", "kv-capacity-tokens=1000,10,2000"]
    assert sweep(tmp_path, *argv, "--continue-on-error") == 1
    assert re.search(f" 1 of 3 .*{tmp_path / 'failed'}", capsys.readouterr().err)
    failed = json.loads((tmp_path / "failed" / "00001.json").read_text())
    assert failed["kv_capacity_tokens"] == 10
    assert failed["reason"].startswith("request 0 needs 48 tokens")  # 44 in pages of 16
    assert pd.read_parquet(tmp_path / "summary.parquet")["point"].tolist() == [0, 2]
    before = content(tmp_path)
    reason = refused(line(tmp_path, *argv, "--resume"))  # without the flag it is refused beforehand
    assert "request 0 needs 48 tokens" in reason
    assert "kv_capacity_tokens 10)" in reason
    assert content(tmp_path) == before


def test_an_unforeseen_error_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(index: int, point: Point) -> Row:
        return run_point(index, point) if index else {"x": 1 // index}

    monkeypatch.setattr("pdvsim.study.folder.run_point", broken)
    assert sweep(tmp_path, "--concurrency", "1,2", "--continue-on-error") == 1
    failed = json.loads((tmp_path / "failed" / "00000.json").read_text())
    assert failed["reason"].startswith("ZeroDivisionError: ")
    assert "in broken" in failed["traceback"]
    monkeypatch.undo()
    assert sweep(tmp_path, "--concurrency", "1,2", "--resume") == 0
    assert not list(tmp_path.glob("failed/*"))  # it has a row now


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, uninterrupted: Path) -> None:
    assert sweep(tmp_path / "s", *LOADS, "--vary", "num-speculative-tokens=2,4", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "\n16 of 16 points " in out
    assert out.count("to do") == 16
    assert not (tmp_path / "s").exists()
    before = content(uninterrupted)
    assert sweep(uninterrupted, *LOADS, "--dry-run", "--resume", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {point["state"] for point in document["points"]} == {"done"}
    assert document["estimate"]["core_s"] == 0
    assert content(uninterrupted) == before


def test_results_of_another_configuration_are_not_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Without its sweep.json a folder still knows what its parts are of."""
    loads = ["--arch", "pdv,pd", "--request-rate", "4,8"]
    assert sweep(tmp_path / "d", *loads) == 0
    (tmp_path / "d" / "sweep.json").unlink()
    capsys.readouterr()
    assert sweep(tmp_path / "d", *loads, "--acceptance-rate", "0.9") == 0
    assert "parts/00000.json, parts/00001.json" in capsys.readouterr().err
    assert sweep(tmp_path / "fresh", *loads, "--acceptance-rate", "0.9") == 0
    assert content(tmp_path / "d") == content(tmp_path / "fresh")
    assert main(["sweep", "--check", str(tmp_path / "d")]) == 0


def test_every_file_that_is_read_is_part_of_the_sweep(tmp_path: Path) -> None:
    """A tokenizer's folder too, but for the weights next to it; and a model's, a card, a profile, a trace."""
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    for folder in (tokenizer, model):
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
    names = ["talk.json", "rounds.jsonl", "p.json", "my.toml", "model/config.json", "tokenizer/tokenizer.json"]
    for name in names:
        (tmp_path / name).write_text(
            json.dumps(LLAMA) if name.startswith("model/") else "[]" if "talk" in name else "{}"
        )
    experiment = Experiment(
        traffic=Traffic(dataset_path=str(tmp_path / "talk.json"), tokenizer=str(tokenizer)),
        acceptance=Acceptance(acceptance_trace=str(tmp_path / "rounds.jsonl")),
        server=Server(pair=f"tinyllama-1.1b:{model}"),
        hardware=Hardware(gpu=str(tmp_path / "my.toml"), profile=str(tmp_path / "p.json")),
    )

    def folder() -> SweepDir:
        return SweepDir(tmp_path / "s", Sweep(base=experiment))

    with folder().opened("today", False):
        assert {Path(path) for path in folder().config["inputs"]} == {tmp_path / name for name in names}
    folder().check(resume=True)
    for name in names:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + " ")
        with pytest.raises(ValueError, match=f"inputs.{tmp_path / name} was .*, is "):
            folder().check(resume=True)
        (tmp_path / name).write_text(text)
    (tokenizer / "added_tokens.json").write_text("{}")
    with pytest.raises(ValueError, match=r"added_tokens\.json"):
        folder().check(resume=True)


def test_what_killed_workers_leave_is_removed_at_the_end(tmp_path: Path) -> None:
    folder = SweepDir(tmp_path / "s", Sweep())
    left_over = folder.path / "details" / TEMPORARY.replace("*", "1")

    def interrupted() -> None:
        with folder.opened("today", False):
            left_over.parent.mkdir()
            left_over.touch()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not left_over.exists()


def test_a_point_whose_file_is_written_is_in_the_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C may come between the two."""

    def written(path: Path, *args: Any, **kwargs: Any) -> None:
        write_whole(path, *args, **kwargs)
        if path.parent.name == "parts":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("pdvsim.study.folder.write_whole", written)
    assert sweep(tmp_path) == 130
    assert [path.name for path in tmp_path.glob("parts/*")] == ["00000.json"]
    assert [*pd.read_parquet(tmp_path / "summary.parquet")["point"]] == [0]


def test_a_finished_sweep_is_read_once_and_drawn_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--concurrency", "1", "--num-runs", "5"]
    assert sweep(tmp_path, *argv) == 0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"}
    monkeypatch.setattr("pdvsim.view.plots.sweep_png", None)
    reads: list[Path] = []
    monkeypatch.setattr("pdvsim.study.sweepcheck.read_sealed", lambda path: (reads.append(path), read_sealed(path))[1])
    assert sweep(tmp_path, *argv, "--resume") == 0
    assert len(reads) == 5
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.name != ".lock"} == before


def test_a_long_list_of_points_is_made_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments: list[Experiment] = []
    asked: list[Experiment] = []
    check = Experiment.__post_init__
    monkeypatch.setattr(Experiment, "__post_init__", lambda self: (experiments.append(self), check(self))[1])
    monkeypatch.setattr("pdvsim.study.band.wanted", lambda experiment: bool(asked.append(experiment)))
    assert main(["sweep", *SMALL, *ONE, "--concurrency", "1", "--num-runs", "400", "--dry-run"]) == 0
    assert "400 of 400 points" in capsys.readouterr().out
    assert 400 <= len(experiments) < 450
    assert len(asked) == 1
