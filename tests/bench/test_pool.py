"""Where points run changes nothing in them: here or on a Dask cluster; workers may die, and Ctrl-C loses nothing."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from deadly import deadly, slow
from resultdirs import content

from pdvsim.bench import pool
from pdvsim.bench.pool import DIED, Backend, Outcome, attempt, finished
from pdvsim.bench.rows import ROWS
from pdvsim.cli import main

SWEEP = ["--arch", "pdv,colocated", "--concurrency", "2,8", "--num-runs", "2", "--vary", "num-speculative-tokens=2,4"]
SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6"]
LONG = [
    "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "1000", "--arch", "pdv",
    "--concurrency", "8", "--num-runs", "300", "--jobs", "2",
]  # fmt: skip
PATIENCE_S = 60  # with what has to start or to end, on a busy machine

pytestmark = pytest.mark.usefixtures("quick_plots_in_module")


def result(folder: Path, *where: str) -> dict[str, bytes]:
    """The rows and the summary of one sweep, run there."""
    assert main(["sweep", *SMALL, *SWEEP, *where, "-o", str(folder)]) == 0
    return content(folder)


@pytest.fixture(scope="module")
def dask() -> Iterator[Any]:
    """A scheduler and two worker processes; the first death is a verdict, else each is killed three times."""
    distributed, config = pytest.importorskip("distributed"), pytest.importorskip("dask.config")
    patience = {f"distributed.comm.timeouts.{which}": f"{PATIENCE_S}s" for which in ("connect", "tcp")}
    settings = {**patience, "distributed.scheduler.allowed-failures": 0}
    with config.set(settings), pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "PATIENCE_S", PATIENCE_S)
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
            yield cluster


def test_every_backend_gives_the_same_bytes(tmp_path: Path, dask: Any) -> None:
    alone = result(tmp_path / "alone", "--jobs", "1")
    assert result(tmp_path / "loky", "--jobs", "2") == alone
    assert result(tmp_path / "dask", "--scheduler", dask.scheduler_address) == alone


@pytest.mark.parametrize("name", ["loky", "dask"])
def test_a_point_that_kills_its_worker_is_found_out(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Only it fails, not concurrent points, the others are not lost, and a worker killed once costs nothing."""
    where = Backend(2) if name == "loky" else Backend(scheduler=request.getfixturevalue("dask").scheduler_address)
    every = list(finished(deadly, [(index, (3, 5, str(tmp_path / "killed"))) for index in range(8)], where))
    ended = {outcome.index: outcome for outcome in every}
    assert len(every) == len(ended) == 8  # none lost, none twice
    assert [ended[index].row for index in range(8)] == [None if i == 3 else {"index": i} for i in range(8)]
    assert ended[3].reason == DIED
    assert (tmp_path / "killed").exists()


def test_a_worker_of_another_version_is_not_trusted() -> None:
    outcome = attempt(deadly, 0, (), "0.0.0")
    assert outcome.row is None
    assert "0.0.0" in outcome.reason


@pytest.mark.parametrize(
    "where",
    ["tcp://127.0.0.1:9", "nonsense:x", "foo://bar", "127.0.0.1:{silent}"],  # the last says nothing
)
def test_a_cluster_that_is_not_there_is_one_line(
    refused: Callable[..., str], tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = where.replace("{silent}", str(listening.getsockname()[1]))
        assert f"--scheduler {where}: " in refused(["sweep", *SMALL, "-o", str(tmp_path / "s"), "--scheduler", where])
    assert not (tmp_path / "s").exists()


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """The address of a scheduler, and its process and those of its workers, which have no nanny."""
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, processes = f"tcp://127.0.0.1:{port}", list[subprocess.Popen[bytes]]()

    def start(program: str, *more: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.{program}", *more, "--no-dashboard"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        processes.append(subprocess.Popen(command, env=environment, cwd=folder, **quiet))

    try:
        start("dask_scheduler", "--port", str(port))
        for _ in range(workers):
            start("dask_worker", address, "--nthreads", "1", "--no-nanny", "--local-directory", str(folder))
        end_s = time.monotonic() + PATIENCE_S
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < end_s
            time.sleep(0.05)
        yield address, processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_cluster_without_workers_and_one_that_is_lost_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "PATIENCE_S", PATIENCE_S)
    items = [(index, 0.2) for index in range(1000)]
    with cluster(tmp_path, workers=0) as (address, _):
        monkeypatch.setattr(pool, "WAIT_S", 1.0)
        with pytest.raises(ValueError, match=f"{address}: .* no worker"):
            list(finished(slow, items, Backend(scheduler=address)))
    monkeypatch.setattr(pool, "WAIT_S", PATIENCE_S)
    with cluster(tmp_path, workers=1) as (address, processes):
        every = finished(slow, items, Backend(scheduler=address))
        first = next(every)
        assert first.row == {"index": first.index}
        processes[0].kill()
        with pytest.raises(ValueError, match=f"{address}: .* disconnected"):
            list(every)


def state(index: int, point: int) -> dict[str, Any]:
    """What a worker's process is like."""
    print("a point may print")
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return {"point": point, "ignored": ignored, "folder": os.getcwd()}


def test_workers_leave_ctrl_c_to_their_parent_and_are_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in (tmp_path, Path(os.getcwd())):
        monkeypatch.chdir(folder)
        outcomes = list(finished(state, [(index, 7) for index in range(3)], Backend(2)))
        wanted = {"point": 7, "ignored": True, "folder": str(folder)}
        assert sorted(outcomes, key=lambda one: one.index) == [Outcome(index, wanted) for index in range(3)]


def installed(folder: Path, before: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command from a script of its own, after `before`."""
    script = folder / "command.py"
    script.write_text(
        before + "from pdvsim.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n"
    )
    command = [sys.executable, str(script), *argv]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)


def test_ctrl_c_after_the_end_is_no_news(tmp_path: Path) -> None:
    """Everything is written when "saved" is printed; Python then waits for its threads, and Ctrl-C has no effect."""
    late = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    argv = ["run", *LONG[:6], "--num-prompts", "20", "-o", str(tmp_path / "run.json")]
    ended = installed(tmp_path, late, *argv)
    assert (ended.returncode, ended.stderr) == (0, f"pdvsim: saved {tmp_path / 'run.json'}\n")


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def rows(folder: Path) -> int:
    file = folder / ROWS
    return max(0, file.read_bytes().count(b"\n") - 1) if file.exists() else 0  # the first says what was asked


def ended(pid: str) -> bool:
    """Whether a process is gone, or would be once its parent collects its exit code."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.parametrize("when", ["tracker", "worker", "rows", "kill"])
def test_ctrl_c_and_kills_leave_a_folder_to_continue(tmp_path: Path, when: str) -> None:
    """A terminal's Ctrl-C reaches every process: as soon as there is a tracker, a worker, or three rows.

    It prints one line. The processes of a killed sweep end too.
    """
    folder, chance = tmp_path / "s", random.Random(int(os.environ.get("PDVSIM_SOAK", 0)))
    command = [sys.executable, "-m", "pdvsim", "sweep", *LONG, "-o", str(folder)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    running = subprocess.Popen(command, text=True, start_new_session=True, **quiet)
    try:
        end_s = time.monotonic() + PATIENCE_S
        least = {"tracker": 1, "worker": 2}.get(when)
        while rows(folder) < 3 if least is None else len(children(running.pid)) < least:
            assert running.poll() is None
            assert time.monotonic() < end_s
            time.sleep(0.002)
        time.sleep(chance.uniform(0, 0.3))
        processes = children(running.pid)
        os.killpg(running.pid, signal.SIGINT) if when != "kill" else running.kill()
        _, err = running.communicate(timeout=PATIENCE_S)
        while not all(map(ended, processes)):  # left alone, loky's workers would end after 300 s
            assert time.monotonic() < end_s
            time.sleep(0.05)
    finally:
        running.kill()
    if when == "kill":
        assert rows(folder) >= 3
        return
    assert running.returncode == 130
    progress = r"(pdvsim: \d+ of 300 points after \d+ s(, about \d+ (s|minutes) left)?\n)*"
    end = (
        rf"pdvsim: interrupted: {rows(folder)} of 300 points are in {re.escape(str(folder))}; continue with --resume\n"
    )
    assert re.fullmatch(progress + end, err), err
    if rows(folder):
        assert len(pd.read_parquet(folder / "summary.parquet")) == rows(folder)
