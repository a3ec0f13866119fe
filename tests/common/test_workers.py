"""Workers of this machine: Ctrl-C is answered whenever it comes, and what happens to helpers of theirs is no news."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from joblib.externals.loky import process_executor

from pdvsim.common.outcomes import Outcome
from pdvsim.common.version import __version__
from pdvsim.common.workers import _forget_calls_given_up, attempt_alone, ctrl_c_deferred, finished_here

PATIENCE_S = 60  # on a busy machine
LONG = [
    "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "1000", "--arch", "pdv",
    "--concurrency", "8", "--num-runs", "300", "--jobs", "2",
]  # fmt: skip


def blocked(index: int, point: None) -> dict[str, bool]:
    """Whether the process of this point never hears of a Ctrl-C."""
    return {"blocked": signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())}


def talkative(index: int, point: int) -> dict[str, int]:
    print("a point may print")
    return {"point": point}


def test_ctrl_c_is_deferred_not_lost() -> None:
    steps = []

    def interrupted() -> None:
        with ctrl_c_deferred():
            # to this thread: another, which may wait for a processor, would pass it on later
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            steps.append("the block goes on")
        steps.append("not what follows it")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert steps == ["the block goes on"]
    with ctrl_c_deferred():  # and without one nothing is left over
        pass
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


class Interrupting:
    """A Ctrl-C that comes in a destructor, where Python drops it."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("jobs", [1, 2])
def test_ctrl_c_in_a_destructor_is_not_lost(jobs: int) -> None:
    usual = signal.getsignal(signal.SIGINT)
    outcomes = finished_here(blocked, [(index, None) for index in range(8)], jobs)
    next(outcomes)
    victim = Interrupting()
    del victim
    with pytest.raises(KeyboardInterrupt):
        next(outcomes)
    assert signal.getsignal(signal.SIGINT) is usual


def test_workers_leave_ctrl_c_to_their_parent() -> None:
    outcomes = list(finished_here(blocked, [(index, None) for index in range(4)], 2))
    assert [outcome.row for outcome in outcomes] == [{"blocked": True}] * 4
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with modules named as the standard library's; the file is there once one is imported."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    imported = tmp_path / "imported"
    for name in ("argparse", "json", "pickle", "random", "signal", "socket", "tempfile", "threading"):
        Path(f"{name}.py").write_text(f"open({str(imported)!r}, 'a').write('{name} ')\n")
    return imported


def installed(folder: Path, before: str, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run the command from a script of its own, after `before`."""
    script = folder / "command.py"
    main = "from pdvsim.cli import main\nif __name__ == '__main__':\n    raise SystemExit(main())\n"
    script.write_text(before + main)
    command = [sys.executable, str(script), *argv]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)


def test_workers_import_nothing_from_the_current_folder(hostile: Path, tmp_path: Path) -> None:
    """As the installed command, whose own path has the folder of its script and not the current one."""
    ended = installed(tmp_path, "", "sweep", *LONG, "--num-runs", "2", "--num-prompts", "20", "-o", "s")
    assert ended.returncode == 0, ended.stderr
    assert not hostile.exists(), hostile.read_text()


def test_a_process_of_its_own_imports_nothing_from_the_current_folder(hostile: Path) -> None:
    assert attempt_alone(talkative, 7, 3, __version__) == Outcome(7, {"point": 3})
    assert not hostile.exists(), hostile.read_text()


def children(pid: int) -> list[str]:
    """The command lines of a process's children, and their ids."""
    lines = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
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


def first(running: subprocess.Popen[str], seen: Callable[[], list[Any]]) -> Any:
    """The first of what is waited for."""
    end_s = time.monotonic() + PATIENCE_S
    while not (events := seen()):
        assert running.poll() is None
        assert time.monotonic() < end_s
        time.sleep(0.002)
    return events[0]


def first_child(running: subprocess.Popen[str], words: str) -> int:
    return int(first(running, lambda: [line for line in children(running.pid) if words in line]).split()[0])


def says_how_far(err: str, folder: Path) -> bool:
    """Return whether nothing else is printed; a busy machine may report finished points before the Ctrl-C."""
    end = rf"pdvsim: interrupted: \d+ of 300 points are in {re.escape(str(folder))}; continue with --resume\n"
    progress = r"(pdvsim: \d+ of 300 points after \d+ s(, about \d+ (s|minutes) left)?\n)*"
    return re.fullmatch(progress + end, err) is not None


@pytest.mark.parametrize("moment", ["tracker", "killed tracker", "points"])
def test_ctrl_c_leaves_a_folder_to_go_on_with(tmp_path: Path, moment: str) -> None:
    """A terminal's Ctrl-C reaches every process, here as soon as there is a tracker, a worker, or three points.

    After a killed tracker loky starts another, which has heard of none of the semaphores, and says so of each when they
    are removed: that is no news.
    """
    folder = tmp_path / "s"
    with sweeping(folder) as running:
        if moment == "points":
            first(running, lambda: list(folder.glob("parts/[0-9]*"))[2:])
        else:
            first_child(running, "popen_loky" if moment == "killed tracker" else moment)
            if moment == "killed tracker":
                os.kill(first_child(running, "common.tracker"), signal.SIGKILL)
        os.killpg(running.pid, signal.SIGINT)
        _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 130
    assert says_how_far(err, folder)
    if moment == "points":
        rows = pd.read_parquet(folder / "summary.parquet")
        assert 3 <= len(rows) < 300
        assert f"interrupted: {len(rows)} of 300" in err
        assert [json.loads(path.read_text())["point"] for path in sorted(folder.glob("parts/*"))] == [*rows["point"]]


def test_ctrl_c_after_the_end_is_no_news(tmp_path: Path) -> None:
    """Everything is written when "saved" is printed; Python then waits for its threads, and Ctrl-C has no effect."""
    late = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))\n"
    argv = ["run", *LONG[:6], "--num-prompts", "20", "-o", str(tmp_path / "run.json")]
    ended = installed(tmp_path, late, *argv)
    assert (ended.returncode, ended.stderr) == (0, f"pdvsim: saved {tmp_path / 'run.json'}\n")


def test_calls_given_up_are_not_looked_up() -> None:
    """Ctrl-C may come before loky's thread has passed a call on: it then drops the call, and its id as well."""
    _forget_calls_given_up()
    executor = process_executor.ProcessPoolExecutor(1)
    call = executor._pending_work_items[1] = process_executor._WorkItem(Future(), blocked, (0, 0), {})
    executor._work_ids.put(1)
    manager = process_executor._ExecutorManagerThread(executor)  # not started: its steps are taken here
    executor._flags.flag_as_shutting_down(kill_workers=True)
    manager.flag_executor_shutting_down()
    manager.add_call_item_to_queue()
    assert isinstance(call.future.exception(0), process_executor.ShutdownExecutorError)
    assert manager.running_work_items == []
