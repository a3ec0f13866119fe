"""Tasks side by side on this machine's cores, by joblib's loky.

An item that raises, or whose worker dies twice, has an outcome that says so; the others go on.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

from pdvsim.common.outcomes import DIED, Item, Outcome, Task, attempt
from pdvsim.common.version import __version__

T = TypeVar("T")


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finished_here(task: Task, items: Sequence[Item], jobs: int | None) -> Generator[Outcome, None, None]:
    """Every item's outcome, as they finish, `jobs` at a time (None: one a core). Closing it gives up the rest."""
    jobs = min(jobs or cores(), len(items))
    return _in_process(task, items) if jobs <= 1 else _in_workers(task, items, jobs)


def parallel_map(
    function: Callable[..., T], arguments: Iterable[tuple[Any, ...]], progress: Callable[[], None]
) -> list[T]:
    """`function` of each of the arguments, in their order, one thread each; `progress` is called after each.

    More threads would only wait for each other, and may round differently.
    """
    from joblib import Parallel, delayed, parallel_config

    calls = [delayed(function)(*given) for given in arguments]
    found: list[T] = []
    with parallel_config(backend="loky", inner_max_num_threads=1):
        # two at least: a single one would run in this process, with its threads
        pool = Parallel(n_jobs=max(2, min(cores(), len(calls))), return_as="generator", batch_size=1)
        for result in pool(calls):
            found.append(result)
            progress()
    return found


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
            outcomes = _pool(task, list(left.items()), jobs, started)
            try:
                for outcome in outcomes:
                    del left[outcome.index]
                    yield outcome
            except BrokenProcessPool:  # joblib's TerminatedWorkerError is one
                for index in sorted(started & set(left)):
                    yield _alone(task, index, left.pop(index))
            finally:
                with warnings.catch_warnings(action="ignore"):  # joblib warns of the points given up
                    outcomes.close()
    except (KeyboardInterrupt, GeneratorExit):
        get_reusable_executor().shutdown(wait=False, kill_workers=True)
        raise


def _pool(task: Task, items: Sequence[Item], jobs: int, started: set[int]) -> Generator[Outcome, None, None]:
    from joblib import Parallel, delayed

    def calls() -> Iterator[Any]:
        for index, point in items:
            started.add(index)
            yield delayed(_in_child)(os.getpid(), task, index, point, __version__)

    pool = Parallel(n_jobs=jobs, return_as="generator_unordered", batch_size=1)
    with _deaf_to_ctrl_c():  # workers inherit it: a terminal's Ctrl-C reaches every process, the parent answers it
        outcomes = pool(calls())
    yield from outcomes


def _in_child(parent: int, task: Task, index: int, point: Any, version: str) -> Outcome:
    _die_with(parent)
    return attempt(task, index, point, version)


@cache
def _die_with(parent: int) -> None:
    """End this worker once the process that started it is gone, even by kill -9; it would idle on for minutes."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _alone(task: Task, index: int, point: Any) -> Outcome:
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    pool = ProcessPoolExecutor(max_workers=1)
    try:
        with _deaf_to_ctrl_c():
            running = pool.submit(_in_child, os.getpid(), task, index, point, __version__)
        outcome: Outcome = running.result()
    except BrokenProcessPool:
        return Outcome(index, None, DIED)
    finally:
        pool.shutdown(kill_workers=True)
    return outcome


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
