"""The points of a sweep on the workers of a running Dask or Ray cluster.

Both are used directly, not through joblib: a dead worker then fails one point, not the whole call, and joblib's Ray
backend returns no result before all have finished.

Every wait is limited. A cluster that does not answer, or disconnects, is a ValueError within PATIENCE_S or ANSWER_S. A
cluster without workers is waited for up to WORKERS_S, with a message. A point whose worker died is retried in its own
process, to tell its failure from another point's; a point whose result is lost is run again.

Not handled: shared files. Workers need the same version of pdvsim, and every file that the points name under the same
path. A worker that stops responding is left to the cluster, which drops it after five minutes (Dask's worker-ttl) or
about fifteen seconds (Ray's health check).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pdvsim.common.outcomes import DIED, Item, Notice, Outcome, Task, attempt, failure
from pdvsim.common.version import __version__
from pdvsim.common.workers import attempt_alone

T = TypeVar("T")

PATIENCE_S = 6.0  # limit for the first answer of a cluster
ANSWER_S = 30.0  # limit for later answers, when it may be busy
WORKERS_S = 600.0  # limit for a cluster without workers
FETCH_S = 15.0  # limit for fetching the result of a finished point
TICK_S = 1.0  # between checks of a silent cluster
POLL_S = 0.02
TRIES = 3  # of a point; the second and third run in their own process
UNDER_WAY = ("released", "waiting", "no-worker", "queued", "processing")  # Dask's states of a task without a result
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class ClusterLost(ValueError):
    """The cluster was lost; finished points are kept."""


class Watch:
    """Checks a silent cluster: reports that it has no workers, and finally stops waiting."""

    def __init__(self, cluster: str, notice: Notice) -> None:
        self.cluster, self.notice = cluster, notice
        self._since_s: float | None = None

    def look(self, workers: int) -> None:
        now_s = time.monotonic()
        if workers:
            self._since_s = None
        elif self._since_s is None:
            self._since_s = now_s
            self.notice(f"{self.cluster} has no workers: waiting for some; Ctrl-C stops and keeps finished points")
        elif now_s - self._since_s > WORKERS_S:
            raise ClusterLost(f"{self.cluster} has had no workers for {WORKERS_S:g} s")


def within(seconds: float, ask: Callable[[], T]) -> T:
    """Result of `ask`, or a TimeoutError: the library's own time limit may not work."""
    if sys.is_finalizing():  # a new thread would never start
        raise TimeoutError
    answers: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            answers.put((ask(), None))
        except BaseException as error:
            answers.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


@contextmanager
def _quiet(library: str) -> Iterator[None]:
    """Silence a library's log, which is long when a cluster is lost; one line reports it."""
    loggers = [logging.getLogger(name) for name in list(logging.root.manager.loggerDict) if name.startswith(library)]
    before = [logger.disabled for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in zip(loggers, before, strict=True):
            logger.disabled = disabled


def check_dask(address: str) -> None:
    """A ValueError of one line if no Dask scheduler answers at the address."""
    try:
        from distributed import rpc
        from distributed.security import Security
    except ImportError:
        raise ValueError("--backend dask needs Dask: pip install 'pdvsim[dask]'") from None

    async def ask() -> None:
        async with rpc(address, connection_args=Security().get_connection_args("client")) as scheduler:
            await scheduler.identity()

    with _quiet("distributed"):
        try:
            within(PATIENCE_S, lambda: asyncio.run(asyncio.wait_for(ask(), PATIENCE_S)))
        except Exception as error:  # another kind of server may raise anything
            what = f"no Dask scheduler answers ({type(error).__name__})"
            raise ValueError(f"--scheduler {address}: {what}") from None


def on_dask(task: Task, items: Sequence[Item], address: str, notice: Notice) -> Generator[Outcome, None, None]:
    """Every item's outcome, as the workers finish them."""
    check_dask(address)
    from distributed import CancelledError, Client, KilledWorker, as_completed

    lost = ClusterLost(f"--scheduler {address}: the Dask scheduler disconnected")
    points, watch = dict(items), Watch(f"the Dask cluster at {address}", notice)
    tries: Counter[int] = Counter()
    running: dict[Any, int] = {}
    missing_s: dict[Any, float] = {}  # since when a result is missing

    def submit(index: int, function: Callable[..., Outcome]) -> None:
        tries[index] += 1
        future = client.submit(function, task, index, points[index], __version__, pure=False, retries=1)
        running[future] = index
        done.add(future)

    def look() -> list[int]:
        """Check running points; returns those whose results are lost."""
        if client.status != "running":
            raise lost
        watch.look(len(within(ANSWER_S, client.scheduler_info)["workers"]))
        keys, ask = [future.key for future in running], client.scheduler.get_task_status
        states, now_s = within(ANSWER_S, lambda: client.sync(ask, keys=keys)), time.monotonic()
        here = [future for future in running if states[future.key] not in UNDER_WAY]
        for future in set(missing_s) - set(here):
            del missing_s[future]
        late = [future for future in here if now_s - missing_s.setdefault(future, now_s) > FETCH_S]
        return [running.pop(future) for future in late]

    with _quiet("distributed"):
        try:
            client: Any = within(2 * PATIENCE_S, lambda: Client(address, timeout=PATIENCE_S, set_as_default=False))
        except (OSError, ValueError):
            raise lost from None
        try:
            done = as_completed(loop=client.loop, with_results=True, raise_errors=False)
            for index in points:
                submit(index, attempt)
            looked_s = time.monotonic()
            while running:
                if not done.has_ready():
                    time.sleep(POLL_S)
                    if time.monotonic() - looked_s > TICK_S:
                        for index in look():
                            if tries[index] < TRIES:
                                submit(index, attempt)
                            else:
                                yield Outcome(index, None, f"its result was lost {TRIES} times")
                        looked_s = time.monotonic()
                    continue
                for future, result in done.next_batch(block=False):
                    index = running.pop(future, -1)  # lets the scheduler release it
                    if index < 0:  # cancelled before
                        continue
                    if isinstance(result, Outcome):
                        yield result
                        continue
                    error = result if isinstance(result, BaseException) else result[1]
                    if client.status != "running":  # Dask cancels everything when it loses its scheduler
                        raise lost
                    if not isinstance(error, KilledWorker | CancelledError):  # it could not be started
                        yield failure(index, error)
                    elif tries[index] < TRIES:  # Dask blames everything that was on a worker when it died
                        submit(index, attempt_alone if isinstance(error, KilledWorker) else attempt)
                    else:
                        yield Outcome(index, None, f"{DIED} ({type(error).__name__})")
                looked_s = time.monotonic()
        except OSError:  # of a connection that broke, or no answer
            raise lost from None
        finally:
            with contextlib.suppress(Exception):  # the scheduler may be lost
                within(PATIENCE_S, lambda: client.cancel(list(running)) if client.status == "running" else None)
            with contextlib.suppress(Exception):
                within(PATIENCE_S, client.close)


def ray_connected(address: str | None) -> Any:
    """Connected Ray; there is one connection per process."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # hides C++ logs about servers that are not Ray
    try:
        import ray
    except ImportError:
        raise ValueError("--backend ray needs Ray: pip install 'pdvsim[ray]'") from None
    if not ray.is_initialized():
        where = f"--scheduler {address}" if address else "--backend ray"
        what = "no Ray cluster answers ({}); start one with `ray start --head`"
        at = address or _local_ray()
        if at is not None and not (_ray_alive(at) and _is_rays(at)):
            raise ValueError(f"{where}: {what.format(at)}")
        try:
            with _quiet("ray"):
                within(ANSWER_S, lambda: ray.init(address=at or "auto", log_to_driver=False, configure_logging=False))
        except Exception as error:  # a cluster that starts or stops may raise anything
            raise ValueError(f"{where}: {what.format(type(error).__name__)}") from None
    return ray


def _local_ray() -> str | None:
    """Last address of this machine's cluster; Ray would wait for minutes for one that is gone."""
    with contextlib.suppress(ImportError):
        from ray._private.utils import read_ray_address

        return os.environ.get("RAY_ADDRESS") or read_ray_address()
    return None


def _ray_alive(address: str) -> bool:
    """Whether a gRPC server, such as Ray's head, answers there; checked by hand, as Ray has no time limit for it."""
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if not colon or not port.isdecimal():
        return False

    def ask() -> bool:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE_S) as line:
            if os.environ.get("RAY_USE_TLS") == "1":
                return True
            line.sendall(HTTP2_HELLO)
            return line.recv(9)[3:4] == b"\x04"  # its settings come first

    try:
        return within(PATIENCE_S, ask)
    except (OSError, OverflowError):  # TimeoutError is one
        return False


def _is_rays(address: str) -> bool:
    """Whether the gRPC server at an address is the head of a Ray cluster; of a ray:// proxy only `ray.init` knows."""
    if address.startswith("ray://"):
        return True
    from ray._raylet import GcsClient  # type: ignore[attr-defined,unused-ignore]

    try:
        within(PATIENCE_S, lambda: GcsClient(address=address))
    except Exception:
        return False
    return True


def on_ray(task: Task, items: Sequence[Item], address: str | None, notice: Notice) -> Generator[Outcome, None, None]:
    """Every item's outcome, as the workers finish them."""
    ray = ray_connected(address)
    head = address if address and address.startswith("ray://") else ray.get_runtime_context().gcs_address
    lost = ClusterLost(f"--backend ray: the cluster at {head} disconnected")
    points, watch = dict(items), Watch("the Ray cluster", notice)
    tries: Counter[int] = Counter()
    running: dict[Any, int] = {}

    def look() -> int:
        """Check the cluster; returns its cores."""
        if not _ray_alive(head):
            raise lost
        cores = int(within(ANSWER_S, ray.cluster_resources).get("CPU", 0))
        watch.look(cores)
        return cores

    try:
        # retries are decided here: Ray would restart the point in a shared worker
        first, again = (ray.remote(max_retries=0)(function) for function in (attempt, attempt_alone))
        waiting = deque(points)
        most = 4 * max(1, look())  # enough to keep every worker busy
        while waiting or running:
            while waiting and len(running) < most:
                index = waiting.popleft()
                tries[index] += 1
                run = again if tries[index] > 1 else first
                running[run.remote(task, index, points[index], __version__)] = index
            done, _ = ray.wait(list(running), num_returns=1, timeout=TICK_S)
            if not done:
                look()
                continue
            index = running.pop(done[0])
            try:
                outcome: Outcome = ray.get(done[0], timeout=FETCH_S)
            except ray.exceptions.LocalRayletDiedError:  # this machine's connection to the cluster
                raise lost from None
            except ray.exceptions.RayTaskError as error:  # it could not be started
                outcome = failure(index, error.cause or error)
            except ray.exceptions.RayError as error:
                look()
                if tries[index] < TRIES:
                    waiting.append(index)
                    continue
                outcome = Outcome(index, None, f"{DIED} ({type(error).__name__})")
            yield outcome
    except OSError:  # no answer
        raise lost from None
    finally:
        with contextlib.suppress(Exception):
            within(PATIENCE_S, lambda: [ray.cancel(reference, force=True) for reference in running])
