"""Who runs the points of a sweep: this machine's cores (joblib's loky), or the workers of a Dask or Ray cluster.

A backend only decides where a point runs. What comes back is the point's row or the reason why there is none, in the
order of finishing; a worker that dies costs its point one more try, not the sweep. joblib drives loky only; the
clusters are asked directly (`clusters`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pdvsim.sim.limits import check_ranges
from pdvsim.study import clusters
from pdvsim.study.outcomes import DIED, Item, Notice, Outcome, Row, Task, attempt, version_here

__all__ = ["DIED", "Backend", "BackendName", "Outcome", "Row", "attempt", "check_reachable", "cores", "finished"]

BackendName = Literal["loky", "dask", "ray"]


@dataclass(frozen=True)
class Backend:
    """Where the points run: `jobs` processes here (None: one a core), or an existing cluster at an address."""

    name: BackendName = "loky"
    jobs: int | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.jobs is not None and self.name != "loky":
            raise ValueError(f"--jobs counts processes of this machine: the {self.name} cluster has its own workers")
        if self.scheduler is not None and self.name == "loky":
            raise ValueError("--scheduler needs --backend dask or ray")
        if self.scheduler is None and self.name == "dask":
            raise ValueError(
                "--backend dask needs --scheduler with the address of a running one, e.g. tcp://10.0.0.1:8786; "
                "start it with `dask scheduler`, and `dask worker ADDRESS` on each machine"
            )


def finished(
    task: Task, items: Sequence[Item], backend: Backend, notice: Notice = lambda text: None
) -> Generator[Outcome, None, None]:
    """Every item's outcome, as they finish. Closing the generator gives up what is not finished.

    A cluster that goes away is a ValueError; one without workers is waited for, and `notice` hears of it.
    """
    if backend.name == "dask" and items:
        return clusters.on_dask(task, items, str(backend.scheduler), notice)
    if backend.name == "ray" and items:
        return clusters.on_ray(task, items, backend.scheduler, notice)
    jobs = min(backend.jobs or cores(), len(items))
    return _in_process(task, items) if jobs <= 1 else _in_workers(task, items, jobs)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _in_process(task: Task, items: Sequence[Item]) -> Generator[Outcome, None, None]:
    version = version_here()
    for index, point in items:
        yield attempt(task, index, point, version)


def _in_workers(task: Task, items: Sequence[Item], jobs: int) -> Generator[Outcome, None, None]:
    """joblib on loky. When a worker dies, the points it may have been at are run one by one, each in a process alone.

    So a point that kills its worker is told from those that were beside it; it is given up after the second death.
    """
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    version, left = version_here(), dict(items)
    try:
        while left:
            started: set[int] = set()
            outcomes = _pool(task, list(left.items()), jobs, version, started)
            try:
                for outcome in outcomes:
                    del left[outcome.index]
                    yield outcome
            except BrokenProcessPool:  # joblib's TerminatedWorkerError is one
                for index in sorted(started & set(left)):
                    yield _alone(task, index, left.pop(index), version)
            finally:
                with warnings.catch_warnings(action="ignore"):  # joblib warns of the points given up
                    outcomes.close()
    except (KeyboardInterrupt, GeneratorExit):
        get_reusable_executor().shutdown(wait=False, kill_workers=True)
        raise


def _pool(
    task: Task, items: Sequence[Item], jobs: int, version: str, started: set[int]
) -> Generator[Outcome, None, None]:
    from joblib import Parallel, delayed

    def calls() -> Iterator[Any]:
        for index, point in items:
            started.add(index)
            yield delayed(_in_child)(os.getpid(), task, index, point, version)

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


def _alone(task: Task, index: int, point: Any, version: str) -> Outcome:
    from joblib.externals.loky import ProcessPoolExecutor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    pool = ProcessPoolExecutor(max_workers=1)
    try:
        with _deaf_to_ctrl_c():
            running = pool.submit(_in_child, os.getpid(), task, index, point, version)
        outcome: Outcome = running.result()
    except BrokenProcessPool:
        return Outcome(index, None, DIED)
    finally:
        pool.shutdown(kill_workers=True)
    return outcome


def check_reachable(backend: Backend) -> None:
    """A ValueError of one line if the cluster does not answer, or its package is not installed."""
    if backend.name == "dask":
        clusters.check_dask(str(backend.scheduler))
    elif backend.name == "ray":
        clusters.ray_connected(backend.scheduler)


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
