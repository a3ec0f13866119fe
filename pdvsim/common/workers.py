"""Parallel tasks on this machine's cores, with joblib's loky.

An item that raises, or whose worker dies twice, has an outcome with the reason; the others continue. There is no time
limit for an item.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
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
DEATH_S = 5.0  # limit for the death of a killed worker
# Otherwise a random.py in the current folder would be imported, and executed, in place of the standard library's.
SAFE_PATH = {"PYTHONSAFEPATH": "1"}


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finished_here(task: Task, items: Sequence[Item], jobs: int | None) -> Generator[Outcome, None, None]:
    """The outcome of every item as it finishes, `jobs` in parallel (None: one per core). Closing cancels the rest."""
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
    """`function` of each argument, in order, with one thread each; `progress` is called after each.

    More threads would only wait for each other, and may round differently.
    """
    given = list(arguments)
    results: list[T] = []
    # at least two: a single one would run in this process, with its threads
    jobs, calls = max(2, min(cores(), len(given))), ((function, one) for one in given)
    for result in _started(calls, jobs, "generator", threads=1):
        results.append(result)
        progress()
    return results


def _in_process(task: Task, items: Sequence[Item]) -> Generator[Outcome, None, None]:
    for index, point in items:
        yield attempt(task, index, point, __version__)


def _in_workers(task: Task, items: Sequence[Item], jobs: int) -> Generator[Outcome, None, None]:
    """joblib with loky. If a worker dies, the points it may have been running are run again, each in its own process.

    This identifies the point that kills its worker, which fails after the second death.
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
        # joblib's executor: without `reuse`, loky would first wait for all running tasks
        executor = get_reusable_executor(reuse=True, kill_workers=True)
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, kill_workers=True)
        for process in processes:  # none writes a file once this returns
            process.join(DEATH_S)
        raise


def _calls(task: Task, items: Sequence[Item], started: set[int]) -> Iterator[Call]:
    for index, point in items:
        started.add(index)
        yield attempt, (task, index, point, __version__)


def _started(
    calls: Iterable[Call], jobs: int, return_as: str, threads: int | None = None
) -> Generator[Any, None, None]:
    """The results of the calls. Ctrl-C waits until the workers have started, and never reaches them."""
    from joblib import Parallel, delayed
    from joblib.externals.loky.backend import resource_tracker

    resource_tracker.main = tracker.main
    warnings.filterwarnings("ignore", tracker.DIED)
    _forget_calls_given_up()
    warnings.filterwarnings("ignore", module=r"joblib\.parallel")  # it warns about cancelled points
    with _environment(_imports_as_here()):
        resource_tracker.ensure_running()
        if hasattr(signal, "pthread_sigmask"):
            ensure_running()  # it unblocks SIGINT at its end, so before the block below
    pool = Parallel(n_jobs=jobs, return_as=return_as, batch_size=1, backend=_backend()(inner_max_num_threads=threads))
    with ctrl_c_deferred():
        results: Generator[Any, None, None] = pool(
            delayed(_in_folder)(os.getcwd(), os.getpid(), *call) for call in calls
        )
    return results


@cache
def _backend() -> type[Any]:
    """loky, whose workers start without the current folder on their path; they receive this process's path later."""
    from joblib._parallel_backends import LokyBackend

    class SafeLoky(LokyBackend):  # type: ignore[misc]
        def _prepare_worker_env(self, n_jobs: int) -> dict[str, str]:
            environment: dict[str, str] = super()._prepare_worker_env(n_jobs)
            return environment | SAFE_PATH

    return SafeLoky


def _imports_as_here() -> dict[str, str]:
    """Environment of a process that imports from where this one does, and not from the current folder."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | SAFE_PATH


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block: loky passes its own environment to the trackers."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@cache
def _forget_calls_given_up() -> None:
    """Make loky's thread drop the ids of the calls that it cancels when its workers are killed.

    It drops only the calls and then looks up the ids, which prints a KeyError if Ctrl-C comes early.
    """
    from joblib.externals.loky import process_executor

    class Manager(process_executor._ExecutorManagerThread):  # type: ignore[misc]
        def flag_executor_shutting_down(self) -> None:
            super().flag_executor_shutting_down()
            if not self.pending_work_items:
                self.work_ids_queue = SimpleQueue[int]()  # empty: no more calls are added

    process_executor._ExecutorManagerThread = Manager


def _in_folder(folder: str, *call: Any) -> Any:
    """A call where its caller stands: a worker may have been started elsewhere, and files are named from here."""
    os.chdir(folder)
    return _in_child(*call)


def _in_child(parent: int, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    _die_with(parent)
    return function(*arguments)


@cache
def _die_with(parent: int) -> None:
    """End this worker when its parent process is gone, even by kill -9; otherwise it would idle for minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def attempt_alone(task: Task, index: int, point: Any, version: str) -> Outcome:
    """Run a point in a new process, so that a death is this point's. For points whose worker died before."""
    from joblib.externals.loky.backend.reduction import dumps, loads

    command = [sys.executable, "-c", "from pdvsim.common.workers import _answer; _answer()"]
    environment = os.environ | _imports_as_here()
    given = dumps((os.getpid(), attempt, (task, index, point, version)))
    child = subprocess.run(
        command, input=given, stdout=subprocess.PIPE, env=environment, start_new_session=True, check=False
    )
    if child.returncode:
        return Outcome(index, None, DIED)
    outcome: Outcome = loads(child.stdout)
    return outcome


def _answer() -> None:
    """The process of one point: it reads the call from standard input and writes the result to standard output."""
    from joblib.externals.loky.backend.reduction import dumps, loads

    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # output of the point is not its result
        out.write(dumps(_in_child(*loads(sys.stdin.buffer.read()))))


@contextmanager
def ctrl_c_kept() -> Iterator[list[int]]:
    """Record every Ctrl-C in addition to raising it: Python drops one raised in a destructor or callback."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
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
    """Delay Ctrl-C until the end of the block. Threads and processes started in it never receive one.

    A terminal sends Ctrl-C to all processes; the parent handles it and ends its workers.
    """
    received: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)

    main = threading.current_thread() is threading.main_thread()  # only the main thread may set handlers
    handler = signal.signal(signal.SIGINT, note) if main else None
    # Windows has no signal masks.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT}) if hasattr(signal, "pthread_sigmask") else None
    try:
        yield
    finally:
        if mask is not None:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)  # a pending signal arrives here
        if main:
            signal.signal(signal.SIGINT, handler)
        if received:
            signal.raise_signal(signal.SIGINT)
