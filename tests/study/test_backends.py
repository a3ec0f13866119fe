"""Where points run changes nothing in them: on this machine or on a real Dask cluster; and workers may die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deadly import deadly, slow
from resultdirs import content

from pdvsim.cli import main
from pdvsim.common.outcomes import DIED, Outcome, attempt
from pdvsim.study.backends import Backend, finished

SWEEP = ["--arch", "pdv,colocated", "--concurrency", "2,8", "--num-runs", "2", "--vary", "num-speculative-tokens=2,4"]
SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6"]

PATIENCE_S = 60  # with what has to start or to end, on a busy machine

pytestmark = pytest.mark.usefixtures("quick_plots_in_module")


def result(folder: Path, *where: str) -> dict[str, bytes]:
    """The parts and the summary of one sweep, run there."""
    assert main(["sweep", *SMALL, *SWEEP, *where, "-o", str(folder)]) == 0
    return content(folder)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The sweep in one process, without any backend."""
    return result(tmp_path_factory.mktemp("alone"), "--jobs", "1")


@pytest.fixture(scope="module")
def dask() -> Iterator[Any]:
    """A scheduler and two worker processes.

    One death is enough for a verdict: Dask's own three restarts would have the worker killed as soon as it is up, and a
    nanny gives up on a worker that dies before it has heard of it. Real points take longer than that.
    """
    distributed, config = pytest.importorskip("distributed"), pytest.importorskip("dask.config")
    patience = {f"distributed.comm.timeouts.{which}": f"{PATIENCE_S}s" for which in ("connect", "tcp")}
    settings = {**patience, "distributed.scheduler.allowed-failures": 0}
    with config.set(settings), pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdvsim.study.backends.PATIENCE_S", PATIENCE_S)
        with distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster:
            yield cluster


@pytest.mark.parametrize("name", ["loky", "dask"])
def test_every_backend_gives_the_same_bytes(name: str, alone: dict[str, bytes], tmp_path: Path, dask: Any) -> None:
    where = ["--jobs", "2"] if name == "loky" else ["--scheduler", dask.scheduler_address]
    assert result(tmp_path, *where) == alone


def outcomes(task: Any, argument: Any, backend: Backend) -> list[Outcome]:
    every = list(finished(task, [(index, argument) for index in range(8)], backend))
    assert sorted(outcome.index for outcome in every) == list(range(8))  # none lost, none twice
    return sorted(every, key=lambda outcome: outcome.index)


@pytest.mark.parametrize("name", ["loky", "dask"])
def test_a_point_that_kills_its_worker_is_found_out(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Only it fails, not concurrent points, the others are not lost, and a worker killed once costs nothing."""
    if name == "loky":
        ended = outcomes(deadly, (3, 5, str(tmp_path / "killed")), Backend(jobs=2))
        assert (tmp_path / "killed").exists()
    else:  # one death is enough for a verdict there
        ended = outcomes(deadly, (3,), Backend(scheduler=request.getfixturevalue("dask").scheduler_address))
    assert [outcome.row for outcome in ended] == [None if index == 3 else {"index": index} for index in range(8)]
    assert ended[3].reason.startswith(DIED)


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
    monkeypatch.setattr("pdvsim.study.backends.PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where = where.replace("{silent}", str(listening.getsockname()[1]))
        assert f"--scheduler {where}: " in refused(["sweep", *SMALL, "-o", str(tmp_path / "s"), "--scheduler", where])
    assert not (tmp_path / "s").exists()


@dataclass
class Cluster:
    """A scheduler, the first of the processes, and workers without a nanny."""

    address: str
    folder: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, program: str, *more: str) -> None:
        command = [sys.executable, "-m", f"distributed.cli.{program}", *more, "--no-dashboard"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self.processes.append(subprocess.Popen(command, env=environment, cwd=self.folder, **quiet))

    def start_scheduler(self) -> None:
        """Start it, and wait until it can be reached."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
        self.start("dask_scheduler", "--port", port)
        end_s = time.monotonic() + PATIENCE_S
        while True:
            try:
                socket.create_connection((host, int(port))).close()
            except OSError:
                assert time.monotonic() < end_s
                time.sleep(0.05)
            else:
                return

    def start_worker(self) -> None:
        self.start("dask_worker", self.address, "--nthreads", "1", "--no-nanny", "--local-directory", str(self.folder))

    def stop(self, keep: int = 0) -> None:
        """Kill all processes but the first few."""
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        for process in self.processes[keep:]:
            process.kill()
            process.wait()
        del self.processes[keep:]


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        cluster = Cluster(f"tcp://127.0.0.1:{free.getsockname()[1]}", tmp_path_factory.mktemp("cluster"))
    yield cluster
    cluster.stop()


@pytest.fixture
def cluster(clusters: Cluster) -> Iterator[Cluster]:
    """A scheduler without workers."""
    if not clusters.processes:
        clusters.start_scheduler()
    yield clusters
    clusters.stop(keep=clusters.processes[0].poll() is None)


@pytest.mark.parametrize(
    ("which", "number", "says"), [(1, signal.SIGKILL, "has no workers"), (0, signal.SIGSTOP, "does not answer")]
)
def test_a_cluster_that_fails_in_the_middle_is_reported_and_not_waited_for_for_ever(
    which: int, number: signal.Signals, says: str, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All workers are killed, or the scheduler stops; what is finished has been given."""
    cluster.start_worker()
    heard: list[str] = []
    monkeypatch.setattr("pdvsim.study.backends.PATIENCE_S", PATIENCE_S)
    every = finished(slow, [(index, 0.2) for index in range(1000)], Backend(scheduler=cluster.address), heard.append)
    first = next(every)
    assert first.row == {"index": first.index}
    for name, limit_s in (("PATIENCE_S", 1.0), ("LOOK_S", 0.2), ("WAIT_S", 1.0)):
        monkeypatch.setattr(f"pdvsim.study.backends.{name}", limit_s)
    cluster.processes[which].send_signal(number)
    heard.clear()
    with pytest.raises(ValueError, match=f"{cluster.address} {says}"):
        list(every)
    assert f"{cluster.address} {says}" in heard[0]


def test_a_scheduler_that_dies_in_the_middle(
    tmp_path: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing worker is reported. When the scheduler is killed, finished points are named, kept and resumed."""
    address, folder = cluster.address, tmp_path / "s"
    heard: list[str] = []

    def parts() -> int:
        return len(list(folder.glob("parts/[0-9]*.json")))

    def kill() -> None:
        end_s = time.monotonic() + PATIENCE_S
        while parts() < 3 and time.monotonic() < end_s:
            time.sleep(0.01)
        cluster.processes[0].kill()

    killer = threading.Thread(target=kill)

    def notice(text: str) -> None:
        if not heard:
            cluster.start_worker()
            killer.start()
        heard.append(text)

    monkeypatch.setattr("pdvsim.study.backends.PATIENCE_S", 30)
    monkeypatch.setattr("pdvsim.cli.sweep._notice", notice)
    argv = ["sweep", *SMALL, "--arch", "pdv", "--concurrency", "1", "--num-runs", "300", "-o", str(folder)]
    assert main([*argv, "--scheduler", address]) == 2
    killer.join()
    assert f"{address} has no workers" in heard[0]
    assert 3 <= parts() < 300
    assert f" {parts()} of 300 " in heard[-1]
    assert str(folder) in heard[-1]
    assert "--resume" in heard[-1]
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"pdvsim: error: --scheduler {address}: ")
