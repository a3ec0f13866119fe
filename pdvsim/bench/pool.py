"""Many independent tasks: on this machine's cores (joblib with loky), or on the workers of a running Dask cluster.

Each item has an outcome, in order of completion: its row, or the reason why it failed. An item whose worker dies runs
once more on its own, so that only the one that kills its worker fails. There is no time limit for an item.

Not handled: shared files. The workers of a cluster need the same version of pdvsim, and every file that the items name
under the same path.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import chain
from multiprocessing import resource_tracker
from typing import Any, TypeVar

from pdvsim.common.version import __version__
from pdvsim.sim.limits import Jobs, check_ranges
from pdvsim.sim.policies import PolicyError

T = TypeVar("T")
Row = dict[str, Any]
Task = Callable[[int, Any], Row]
Item = tuple[int, Any]  # a point's number, and the point
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments

DIED = "its worker process died twice: it was killed or ran out of memory"
PATIENCE_S = 6.0  # limit for an answer of a scheduler
WAIT_S = 60.0  # limit for the first worker of a cluster


@dataclass(frozen=True)
class Backend:
    """Where points run: `jobs` local processes (None: one per core), or the Dask cluster at the address `scheduler`."""

    jobs: Jobs | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self)


HERE = Backend()  # one process per core


@dataclass(frozen=True)
class Outcome:
    """Outcome of a point: its row, or the reason why it failed, with a traceback for internal errors."""

    index: int
    row: Row | None
    reason: str = ""
    traceback: str = ""


def attempt(task: Task, index: int, point: Any, version: str) -> Outcome:
    """Run a point; errors become outcomes and do not end the others."""
    if version != __version__:
        return Outcome(index, None, f"the worker runs pdvsim {__version__}, the sweep was started by {version}")
    try:
        return Outcome(index, task(index, point))
    except Exception as error:
        reason, expected = " ".join(str(error).split()), isinstance(error, ValueError)
        details = "" if expected and not isinstance(error, PolicyError) else traceback.format_exc()
        return Outcome(index, None, reason if expected else f"{type(error).__name__}: {reason}", details)


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def finished(task: Task, items: Sequence[Item], backend: Backend = HERE) -> Generator[Outcome, None, None]:
    """The outcome of every item, in order of completion. Closing the generator ends the rest; so does Ctrl-C.

    A cluster that is not there, or is lost, is a ValueError.
    """
    jobs = min(backend.jobs or cores(), len(items))
    if backend.scheduler is not None and items:
        yield from _on_dask(task, items, backend.scheduler)
    elif jobs > 1:
        yield from _on_cores(task, items, jobs)
    else:
        yield from (attempt(task, index, point, __version__) for index, point in items)


def _on_cores(task: Task, items: Sequence[Item], jobs: int) -> Generator[Outcome, None, None]:
    """With joblib, which ends all calls if a worker dies: then the points it may have been running run one by one."""
    from joblib.externals.loky.process_executor import BrokenProcessPool

    left, alone = dict(items), list[int]()
    while left:
        now = alone[:1] or list(left)
        calls = ((attempt, (task, index, left[index], __version__)) for index in now)
        try:
            with closing(_results(calls, jobs, "generator_unordered")) as outcomes:
                for outcome in outcomes:
                    del left[outcome.index]
                    yield outcome
        except BrokenProcessPool:  # joblib's TerminatedWorkerError is one
            if not alone:
                alone = list(left)[: 2 * jobs]  # joblib starts them in order, twice as many as there are workers
                continue
            del left[now[0]]
            yield Outcome(now[0], None, DIED)
        alone = alone[1:]


def parallel_map(
    function: Callable[..., T], arguments: Iterable[tuple[Any, ...]], progress: Callable[[], None]
) -> list[T]:
    """`function` of each argument, in order; `progress` is called after each."""
    given = list(arguments)
    results: list[T] = []
    jobs = max(2, min(cores(), len(given)))  # a single one would run in this process, with its threads
    for result in _results(((function, one) for one in given), jobs, "generator"):
        results.append(result)
        progress()
    return results


def _prepare(folder: str, parent: int) -> None:
    """Prepare a worker: it is where its caller is, leaves Ctrl-C to it, and ends with it, even by kill -9."""
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _results(calls: Iterable[Call], jobs: int, return_as: str) -> Generator[Any, None, None]:
    """The results of the calls. Workers start with Ctrl-C blocked, which a terminal sends to them too.

    Each has one thread: more would only wait for each other, and may round differently.
    """
    from joblib import Parallel, delayed, parallel_config
    from joblib.externals.loky.backend import resource_tracker as loky_tracker

    warnings.filterwarnings("ignore", module=r"joblib\.parallel")  # it warns about cancelled points
    prepared = {"initializer": _prepare, "initargs": (os.getcwd(), os.getpid()), "inner_max_num_threads": 1}
    loky_tracker.ensure_running()  # both trackers unblock Ctrl-C after their start
    resource_tracker.ensure_running()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with parallel_config("loky", **prepared):
            pool = Parallel(jobs, return_as=return_as, batch_size=1)
            results: Generator[Any, None, None] = pool(delayed(function)(*given) for function, given in calls)
            return results
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def check_reachable(address: str) -> None:
    """A ValueError of one line if the cluster does not answer, or Dask is not installed."""
    try:
        from distributed import rpc
        from distributed.security import Security
    except ImportError:
        raise ValueError("--scheduler needs Dask: pip install 'pdvsim[dask]'") from None

    async def ask() -> None:  # a client of Dask would wait for ever for a server that does not speak
        async with rpc(address, connection_args=Security().get_connection_args("client")) as scheduler:
            await scheduler.identity()

    try:
        asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    except Exception as error:  # another kind of server may raise anything
        what = f"no Dask scheduler answers ({type(error).__name__})"
        raise ValueError(f"--scheduler {address}: {what}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Without Dask's log, which is long when a cluster is lost."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def _on_dask(task: Task, items: Sequence[Item], address: str) -> Generator[Outcome, None, None]:
    """Without joblib, whose backend for Dask waits for ever for a point that killed its worker."""
    check_reachable(address)
    from distributed import CancelledError, Client, KilledWorker, as_completed

    with _quiet(), Client(address, timeout=PATIENCE_S, set_as_default=False) as client:
        points, running, suspects = dict(items), dict[Any, int](), list[int]()

        def submitted(index: int) -> Any:
            future = client.submit(attempt, task, index, points[index], __version__, pure=False)
            running[future] = index
            return future

        try:
            client.wait_for_workers(1, WAIT_S)
        except TimeoutError:
            raise ValueError(f"--scheduler {address}: the Dask cluster has no worker after {WAIT_S:g} s") from None
        first = as_completed(list(map(submitted, points)), loop=client.loop)
        # Dask blames all that was on a worker when it died, begun or not: these points run again, one by one, and twice
        for future in chain(first, (submitted(index) for index in suspects)):
            index = running.pop(future)
            try:
                outcome: Outcome = future.result()
            except (KilledWorker, CancelledError, OSError) as error:
                if not isinstance(error, KilledWorker) or client.status != "running":
                    raise ValueError(f"--scheduler {address}: the Dask scheduler disconnected") from None
                if suspects.count(index) < 2:
                    suspects.append(index)
                    continue
                outcome = Outcome(index, None, DIED)
            except Exception as error:  # it could not be started
                outcome = Outcome(index, None, f"{type(error).__name__}: {' '.join(str(error).split())}")
            yield outcome
