"""Who runs the points of a sweep: this machine's cores (joblib's loky), or the workers of a Dask or Ray cluster.

A backend only decides where a point runs. What comes back is the point's row or the reason why there is none, in the
order of finishing; a worker that dies costs its point one more try, not the sweep. joblib drives loky only; the
clusters are asked directly: there a death is one point's, not the whole call's, and joblib's Ray backend has no results
to give before all are there.

Not modelled here: shared files. The workers of a cluster need pdvsim, in the same version, and every file that the
points name, under the same path.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from pdvsim.sim.limits import check_ranges

Row = dict[str, Any]
Task = Callable[[int, Any], Row]
Item = tuple[int, Any]  # a point's number, and the point
BackendName = Literal["loky", "dask", "ray"]

PATIENCE_S = 10.0  # with a cluster that does not answer
DIED = "its worker process died twice; it was killed, or ran out of memory"


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


@dataclass(frozen=True)
class Outcome:
    """What became of a point: its row, or the reason why there is none and, for an unforeseen error, its traceback."""

    index: int
    row: Row | None
    reason: str = ""
    traceback: str = ""


def finished(task: Task, items: Sequence[Item], backend: Backend) -> Generator[Outcome, None, None]:
    """Every item's outcome, as they finish. Closing the generator gives up what is not finished."""
    if backend.name == "dask":
        return _on_dask(task, items, str(backend.scheduler))
    if backend.name == "ray":
        return _on_ray(task, items, backend.scheduler)
    jobs = min(backend.jobs or cores(), len(items))
    return _in_process(task, items) if jobs <= 1 else _in_workers(task, items, jobs)


def attempt(task: Task, index: int, point: Any, version: str) -> Outcome:
    """Run a point; whatever goes wrong is an outcome, not an exception that ends the sweep."""
    from pdvsim import __version__

    if version != __version__:
        return Outcome(index, None, f"the worker runs pdvsim {__version__}, the sweep was started by {version}")
    try:
        return Outcome(index, task(index, point))
    except ValueError as error:
        return Outcome(index, None, " ".join(str(error).split()))
    except Exception as error:
        return Outcome(index, None, f"{type(error).__name__}: {' '.join(str(error).split())}", traceback.format_exc())


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _version() -> str:
    from pdvsim import __version__

    return __version__


def _in_process(task: Task, items: Sequence[Item]) -> Generator[Outcome, None, None]:
    version = _version()
    for index, point in items:
        yield attempt(task, index, point, version)


def _in_workers(task: Task, items: Sequence[Item], jobs: int) -> Generator[Outcome, None, None]:
    """joblib on loky. When a worker dies, the points it may have been at are run one by one, each in a process alone.

    So a point that kills its worker is told from those that were beside it; it is given up after the second death.
    """
    from joblib.externals.loky import get_reusable_executor
    from joblib.externals.loky.process_executor import BrokenProcessPool

    version, left = _version(), dict(items)
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
        _dask_client(str(backend.scheduler)).close()
    elif backend.name == "ray":
        _ray_connected(backend.scheduler)


def _dask_client(address: str) -> Any:
    try:
        from distributed import Client
    except ImportError:
        raise ValueError("--backend dask needs Dask: pip install 'pdvsim[dask]'") from None
    logger = logging.getLogger("distributed")
    before = logger.level
    logger.setLevel(logging.CRITICAL)  # what it has to say is said below
    try:
        return Client(address, timeout=PATIENCE_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"--scheduler {address}: no Dask scheduler answers ({type(error).__name__})") from None
    finally:
        logger.setLevel(before)


def _on_dask(task: Task, items: Sequence[Item], address: str) -> Generator[Outcome, None, None]:
    client, version = _dask_client(address), _version()
    from distributed import as_completed

    with client:
        points, dead = dict(items), []
        futures = {client.submit(attempt, task, i, point, version, pure=False): i for i, point in items}
        try:
            for future in as_completed(list(futures), loop=client.loop):
                index = futures.pop(future)  # lets the scheduler forget it
                if future.status == "finished":
                    yield future.result()
                else:
                    dead.append(index)
            # Dask blames everything that was on a worker when it died: each again, with nothing beside it
            for index in dead:
                future = client.submit(attempt, task, index, points[index], version, pure=False)
                futures[future] = index
                error = future.exception()
                yield future.result() if error is None else Outcome(index, None, f"{DIED} ({type(error).__name__})")
                del futures[future]
        finally:
            client.cancel(list(futures))


def _ray_connected(address: str | None) -> Any:
    """Ray, connected; it has one connection a process, which ends with that."""
    try:
        import ray
    except ImportError:
        raise ValueError("--backend ray needs Ray: pip install 'pdvsim[ray]'") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto", log_to_driver=False, configure_logging=False)
        except (OSError, ValueError, RuntimeError) as error:
            where = f"--scheduler {address}" if address else "--backend ray"
            what = f"no Ray cluster answers ({type(error).__name__}); start one with `ray start --head`"
            raise ValueError(f"{where}: {what}") from None
    return ray


def _on_ray(task: Task, items: Sequence[Item], address: str | None) -> Generator[Outcome, None, None]:
    ray = _ray_connected(address)
    version, waiting = _version(), deque(items)
    running: dict[Any, int] = {}
    try:
        remote = ray.remote(max_retries=1)(attempt)
        most = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # enough to keep every worker busy
        while waiting or running:
            while waiting and len(running) < most:
                index, point = waiting.popleft()
                running[remote.remote(task, index, point, version)] = index
            [done], _ = ray.wait(list(running), num_returns=1)
            index = running.pop(done)
            try:
                outcome: Outcome = ray.get(done)
            except ray.exceptions.RayError as error:
                outcome = Outcome(index, None, f"{DIED} ({type(error).__name__})")
            yield outcome
    finally:
        for reference in running:
            ray.cancel(reference, force=True)


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
