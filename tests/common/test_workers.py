"""Workers of this machine: Ctrl-C is answered whenever it comes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pdvsim.common.outcomes import Outcome
from pdvsim.common.version import __version__
from pdvsim.common.workers import attempt_alone, finished_here, parallel_map

PATIENCE_S = 60  # on a busy machine
LONG = [
    "--dataset-name", "random", "--input-len", "32", "--output-len", "64", "--num-prompts", "1000", "--arch", "pdv",
    "--concurrency", "8", "--num-runs", "300", "--jobs", "2",
]  # fmt: skip


def session(index: int, point: None) -> dict[str, int]:
    """The session of the point's process, to all of which a terminal sends Ctrl-C."""
    return {"session": os.getsid(0)}


def talkative(index: int, point: int) -> dict[str, int]:
    print("a point may print")
    return {"point": point}


class Interrupting:
    """A Ctrl-C that comes in a destructor, where Python drops it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_in_a_destructor_is_not_lost(jobs: int) -> None:
    usual, outcomes = (
        signal.getsignal(signal.SIGINT),
        finished_here(session, [(index, None) for index in range(8)], jobs),
    )
    next(outcomes)
    victim = Interrupting()
    del victim
    with pytest.raises(KeyboardInterrupt):
        next(outcomes)
    assert signal.getsignal(signal.SIGINT) is usual


def test_workers_leave_ctrl_c_to_their_parent() -> None:
    found = list(finished_here(session, [(index, None) for index in range(4)], 2))
    assert all(outcome.row is not None and outcome.row["session"] != os.getsid(0) for outcome in found)


def test_a_point_in_a_process_of_its_own() -> None:
    assert attempt_alone(talkative, 7, 3, __version__) == Outcome(7, {"point": 3})


def children(pid: int) -> list[str]:
    """The command lines of a process's children, and their ids."""
    lines = []
    for child in " ".join(path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")).split():
        command = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
        lines.append(f"{child} {command}")
    return lines


@contextmanager
def sweeping(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """A sweep of many minutes in a process group of its own."""
    command = [sys.executable, "-m", "pdvsim.cli", "sweep", *LONG, "-o", str(folder)]
    running = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        yield running
    finally:
        running.kill()
        running.wait()


def first_child(running: subprocess.Popen[str], words: str) -> int:
    end_s = time.monotonic() + PATIENCE_S
    while not (found := [line for line in children(running.pid) if words in line]):
        assert running.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.002)
    return int(found[0].split()[0])


def says_how_far(err: str, folder: Path) -> bool:
    """Whether that is all it says; a busy machine may finish points, and tell so, before it comes to the Ctrl-C."""
    end = rf"pdvsim: interrupted: \d+ of 300 points are in {re.escape(str(folder))}; continue with --resume\n"
    return re.fullmatch(rf"(pdvsim: \d+ of 300 points after \d+ s\n)*{end}", err) is not None


def test_ctrl_c_while_workers_start(tmp_path: Path) -> None:
    """A terminal's Ctrl-C reaches every process of its session, here as soon as there is a worker."""
    with sweeping(tmp_path / "s") as running:
        first_child(running, "_serve")
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert says_how_far(err, tmp_path / "s")


def pid(index: int, point: None) -> dict[str, int]:
    return {"pid": os.getpid()}


def test_workers_are_kept_for_the_next_tasks() -> None:
    pids = [
        {outcome.row["pid"] for outcome in finished_here(pid, [(at, None) for at in range(8)], 2) if outcome.row}
        for _ in range(3)
    ]
    assert os.getpid() not in set.union(*pids)
    assert len(set.union(*pids)) <= 2


def halved(number: int) -> float:
    if number == 3:
        raise ArithmeticError("three is odd")
    return number / 2


def test_results_are_in_order_and_errors_are_raised() -> None:
    steps: list[None] = []
    assert parallel_map(halved, [(2,), (8,), (4,)], lambda: steps.append(None)) == [1.0, 4.0, 2.0]
    assert len(steps) == 3
    with pytest.raises(ArithmeticError, match="three is odd") as raised:
        parallel_map(halved, [(2,), (3,), (4,)], lambda: None)
    assert "in halved" in raised.value.__notes__[0]
