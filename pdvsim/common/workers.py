"""Tasks side by side on this machine's cores, by joblib's loky.

An item that raises, or whose worker dies twice, has an outcome that says so; the others go on. An item may take as long
as its worker process lives: there is no other limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import cache
from multiprocessing.resource_tracker import ensure_running
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from pdvsim.common import tracker
from pdvsim.common.outcomes import DIED, Item, Outcome, Task, attempt
from pdvsim.common.version import __version__

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finished_here(task: Task, items: Sequence[Item], jobs: int | None) -> Generator[Outcome, None, None]:
    """Every item's outcome, as they finish, `jobs` at a time (None: one a core). Closing it gives up the rest."""
    jobs = min(jobs or cores(), len(items))
    outcomes = _in_process(task, items) if jobs <= 1 else _in_workers(task, items, jobs)
    with closing(outcomes), ctrl_c_kept() as pending:
        for outcome in outcomes:
            yield outcome
            if pending:
                raise KeyboardInterrupt


def parallel_map(
    function: Callable[..., T], arguments: Iterable[tuple[Any, ...]], progress: Callable[[], None]
) -> list[T]:
    """`function` of each of the arguments, in their order, one thread each; `progress` is called after each.

    More threads would only wait for each other, and may round differently.
    """
    from joblib import parallel_config

    given = list(arguments)
    results: list[T] = []
    with parallel_config(backend="loky", inner_max_num_threads=1):
        # two at least: a single one would run in this process, with its threads
        jobs, calls = max(2, min(cores(), len(given))), ((function, one) for one in given)
        for result in _started(calls, jobs, "generator"):
            results.append(result)
            progress()
    return results


def _in_process(task: Task, items: Sequence[Item]) -> Generator[Outcome, None, None]:
    for index, point in items:
        yield attempt(task, index, point, __version__)


def _in_workers(task: Task, items: Sequence[Item], jobs: int) -> Generator[Outcome, None, None]:
    """joblib on loky. When a worker dies, the points it may have been at are run one by one, each in a process alone.

    So a point that kills its worker is told from those that were beside it; it is given up after the second death.
    """
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    left = dict(items)
    try:
        while left:
            started: set[int] = set()
            outcomes = _started(_calls(task, list(left.items()), started), jobs, "generator_unordered")
            try:
                for outcome in outcomes:
                    del left[outcome.index]
                    yield outcome
            except BrokenProcessPool:  # joblib's TerminatedWorkerError is one
                for index in sorted(started & set(left)):
                    yield attempt_alone(task, index, left.pop(index), __version__)
            finally:
                outcomes.close()
    except (KeyboardInterrupt, GeneratorExit):
        # joblib's own: asked for without `reuse`, loky would first wait until all that it has begun is done
        get_reusable_executor(reuse=True, kill_workers=True).shutdown(wait=False, kill_workers=True)
        raise


def _calls(task: Task, items: Sequence[Item], started: set[int]) -> Iterator[Call]:
    for index, point in items:
        started.add(index)
        yield attempt, (task, index, point, __version__)


def _started(calls: Iterable[Call], jobs: int, return_as: str) -> Generator[Any, None, None]:
    """The results of the calls, whose workers have been started: Ctrl-C waits for that, and never reaches them."""
    from joblib import Parallel, delayed
    from joblib.externals.loky.backend import resource_tracker

    resource_tracker.main = tracker.main
    warnings.filterwarnings("ignore", tracker.DIED)
    _forget_calls_given_up()
    warnings.filterwarnings("ignore", module=r"joblib\.parallel")  # it warns of the points given up
    if hasattr(signal, "pthread_sigmask"):
        ensure_running()  # which ends with SIGINT unblocked, so not in the block below
    pool = Parallel(n_jobs=jobs, return_as=return_as, batch_size=1)
    with ctrl_c_deferred():
        results: Generator[Any, None, None] = pool(delayed(_in_child)(os.getpid(), *call) for call in calls)
    return results


@cache
def _forget_calls_given_up() -> None:
    """Make loky's thread drop the ids of the calls that it gives up when its workers are killed.

    It drops the calls alone, and then looks the ids up: a KeyError on standard error, if Ctrl-C comes early.
    """
    from joblib.externals.loky import process_executor

    class Manager(process_executor._ExecutorManagerThread):  # type: ignore[misc]
        def flag_executor_shutting_down(self) -> None:
            super().flag_executor_shutting_down()
            if not self.pending_work_items:
                self.work_ids_queue = SimpleQueue[int]()  # an empty one: no call can be added any more

    process_executor._ExecutorManagerThread = Manager


def _in_child(parent: int, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    _die_with(parent)
    return function(*arguments)


@cache
def _die_with(parent: int) -> None:
    """End this worker once the process that started it is gone, even by kill -9; it would idle on for minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def attempt_alone(task: Task, index: int, point: Any, version: str) -> Outcome:
    """Run a point in a new process, whose death is this point's own. For a point whose worker has died before."""
    from joblib.externals.loky.backend.reduction import dumps, loads

    command = [sys.executable, "-c", "from pdvsim.common.workers import _answer; _answer()"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    given = dumps((os.getpid(), attempt, (task, index, point, version)))
    child = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, env=environment, start_new_session=True, check=False
    )
    if child.returncode:
        return Outcome(index, None, DIED)
    outcome: Outcome = loads(child.stdout)
    return outcome


def _answer() -> None:
    """The process of one point: the call comes in on standard input, and its result goes out on standard output."""
    from joblib.externals.loky.backend.reduction import dumps, loads

    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever the point prints is not its result
        out.write(dumps(_in_child(*loads(sys.stdin.buffer.read()))))


@contextmanager
def ctrl_c_kept() -> Iterator[list[int]]:
    """Note every Ctrl-C besides raising it: Python drops one that is raised in a destructor or in a callback."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # no other may set handlers
        yield received
        return
    usual = signal.getsignal(signal.SIGINT) or signal.SIG_DFL

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if callable(usual):
            usual(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, usual)


@contextmanager
def ctrl_c_deferred() -> Iterator[None]:
    """Hold back a Ctrl-C until the end of the block. Threads and processes that are started in it never receive one.

    A terminal sends Ctrl-C to every process at once; the parent answers it, and ends its workers.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    main = threading.current_thread() is threading.main_thread()  # no other may set handlers
    handler = signal.signal(signal.SIGINT, note) if main else None
    # On Windows there are no masks, and each process looks after itself.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a signal that is pending arrives here
        if main:
            signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)
