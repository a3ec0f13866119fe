"""Where points run changes nothing in them: on this machine or on a real Dask cluster; and workers may die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from deadly import deadly, deadly_once, slow
from resultdirs import content

from pdvsim.cli import main
from pdvsim.common.outcomes import DIED, Outcome, attempt
from pdvsim.study.backends import Backend, finished

SWEEP = ["--arch", "pdv,colocated", "--concurrency", "2,8", "--num-runs", "2", "--vary", "num-speculative-tokens=2,4"]
SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6"]

PATIENCE_S = 60  # with what has to start or to end, on a busy machine

pytestmark = pytest.mark.usefixtures("quick_plots")


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
def test_a_point_that_kills_its_worker_is_found_out(name: str, request: pytest.FixtureRequest) -> None:
    """Only it fails, not concurrent points; and the others are not lost."""
    where = Backend(scheduler=request.getfixturevalue("dask").scheduler_address)
    ended = outcomes(deadly, 3, Backend(jobs=2) if name == "loky" else where)
    assert [outcome.index for outcome in ended if outcome.row is None] == [3]
    assert ended[3].reason.startswith(DIED)


def test_a_worker_killed_once_costs_nothing(tmp_path: Path) -> None:
    ended = outcomes(deadly_once, str(tmp_path / "marker"), Backend(jobs=2))
    assert [outcome.row for outcome in ended] == [{"index": index} for index in range(8)]


def test_a_worker_of_another_version_is_not_trusted() -> None:
    outcome = attempt(deadly, 0, -1, "0.0.0")
    assert outcome.row is None
    assert "the sweep was started by 0.0.0" in outcome.reason


@pytest.mark.parametrize(
    ("where", "says"),
    [
        ("tcp://127.0.0.1:9", "no Dask scheduler answers"),
        ("nonsense:x", "no Dask scheduler answers"),
        ("foo://bar", "no Dask scheduler answers"),
        ("127.0.0.1:{silent}", "--scheduler 127.0.0.1:{silent}: no "),  # it says nothing, and is not waited for
        ("tcp://127.0.0.1:9 --jobs 2", "the cluster of --scheduler has its own workers"),
    ],
)
def test_a_cluster_that_is_not_there_is_one_line(
    refused: Callable[..., str], tmp_path: Path, where: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdvsim.study.backends.PATIENCE_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        where, says = (text.replace("{silent}", str(listening.getsockname()[1])) for text in (where, says))
        assert says in refused(["sweep", *SMALL, "-o", str(tmp_path / "s"), "--scheduler", *where.split()])
    assert not (tmp_path / "s").exists()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    pytest.importorskip("distributed")
    with socket.create_server(("127.0.0.1", 0)) as free:
        started = Cluster(f"tcp://127.0.0.1:{free.getsockname()[1]}", tmp_path)
    started.start("dask_scheduler", "--port", started.address.rpartition(":")[2])
    started.wait()
    yield started
    for process in started.processes:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


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

    def wait(self) -> None:
        """Until the scheduler can be reached."""
        host, _, port = self.address.removeprefix("tcp://").rpartition(":")
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


@pytest.mark.parametrize(
    ("which", "number", "says"),
    [(1, signal.SIGKILL, "has no workers"), (0, signal.SIGSTOP, "does not answer")],
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
    with pytest.raises(ValueError, match=f"the Dask cluster at {cluster.address} {says}, for 1 s"):
        list(every)
    assert heard[0].startswith(f"the Dask cluster at {cluster.address} {says}: waiting up to 1 s; Ctrl-C")


def test_a_scheduler_that_dies_in_the_middle(tmp_path: Path, cluster: Cluster) -> None:
    """A missing worker is reported. When the scheduler is killed, finished points are named, kept and resumed."""
    address, folder = cluster.address, tmp_path / "s"
    argv = ["sweep", *SMALL, "--arch", "pdv", "--concurrency", "1", "--num-runs", "300", "-o", str(folder)]
    program = "import sys, pdvsim.study.backends as c; c.PATIENCE_S = 30; from pdvsim.cli import main; sys.exit(main())"
    sweep = subprocess.Popen(
        [sys.executable, "-c", program, *argv, "--scheduler", address],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    message = sweep.stderr.readline()
    assert message.startswith(f"pdvsim: the Dask cluster at {address} has no workers: waiting up to 600 s")
    cluster.start_worker()
    while len(list(folder.glob("parts/*.json"))) < 3:
        assert sweep.poll() is None
        time.sleep(0.01)
    cluster.processes[0].kill()
    *_, stopped, error = sweep.communicate(timeout=60)[1].splitlines()
    assert sweep.returncode == 2
    done = len(list(folder.glob("parts/*.json")))
    assert 3 <= done < 300
    assert stopped == f"pdvsim: stopped: {done} of 300 points are in {folder}; continue with --resume"
    assert error == f"pdvsim: error: --scheduler {address}: the Dask scheduler disconnected"
