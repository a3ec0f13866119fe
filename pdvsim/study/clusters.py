"""The points of a sweep on the workers of a running Dask or Ray cluster.

Both are asked directly, not through joblib: a death is then one point's, not the whole call's, and joblib's Ray backend
has no results to give before all are there.

Every wait has an end. A cluster that does not answer, or goes away in the middle, is a ValueError within PATIENCE_S or
ANSWER_S. One without workers is waited for, which is said, for WORKERS_S. A point whose worker died is begun again in a
process of its own, so that its death is known from its neighbour's; a point whose result is lost is begun again.

Not modelled here: shared files. The workers of a cluster need pdvsim, in the same version, and every file that the
points name, under the same path. A worker that stops without a word is left to the cluster, which gives it up after
five minutes (Dask's worker-ttl) or some fifteen seconds (Ray's health check).
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

PATIENCE_S = 6.0  # until a cluster answers at the start
ANSWER_S = 30.0  # until it answers a question later on, when it may be busy
WORKERS_S = 600.0  # until a cluster without workers has some
FETCH_S = 15.0  # until the result of a finished point is here
TICK_S = 1.0  # between looks at a cluster from which nothing comes
POLL_S = 0.02
TRIES = 3  # of a point, of which the second and third run in a process of their own
UNDER_WAY = ("released", "waiting", "no-worker", "queued", "processing")  # Dask's states of a task without a result
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class ClusterLost(ValueError):
    """The cluster that ran the points is gone; what it had finished is not."""


class Watch:
    """Looks after a cluster from which nothing comes: says that it has no workers, and in the end stops waiting."""

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
    """What `ask` returns or raises, or a TimeoutError: a library's own deadline may not be one."""
    if sys.is_finalizing():  # a new thread would never begin
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
    """Without a library's log, in which a cluster that is gone fills screens: it is said in one line."""
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
        except Exception as error:  # what another kind of server makes of it is not foreseen
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
    missing_s: dict[Any, float] = {}  # since when a result that should be here is not

    def submit(index: int, function: Callable[..., Outcome]) -> None:
        tries[index] += 1
        future = client.submit(function, task, index, points[index], __version__, pure=False, retries=1)
        running[future] = index
        done.add(future)

    def look() -> list[int]:
        """Ask after what is running; returns the points whose results are lost."""
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
                    index = running.pop(future, -1)  # lets the scheduler forget it
                    if index < 0:  # given up before
                        continue
                    if isinstance(result, Outcome):
                        yield result
                        continue
                    error = result if isinstance(result, BaseException) else result[1]
                    if client.status != "running":  # Dask cancels everything when it loses its scheduler
                        raise lost
                    if not isinstance(error, KilledWorker | CancelledError):  # it could not be begun
                        yield failure(index, error)
                    elif tries[index] < TRIES:  # Dask blames everything that was on a worker when it died
                        submit(index, attempt_alone if isinstance(error, KilledWorker) else attempt)
                    else:
                        yield Outcome(index, None, f"{DIED} ({type(error).__name__})")
                looked_s = time.monotonic()
        except OSError:  # of a connection that broke, or no answer
            raise lost from None
        finally:
            with contextlib.suppress(Exception):  # a scheduler that is gone cannot be told
                within(PATIENCE_S, lambda: client.cancel(list(running)) if client.status == "running" else None)
            with contextlib.suppress(Exception):
                within(PATIENCE_S, client.close)


def ray_connected(address: str | None) -> Any:
    """Ray, connected; it has one connection a process, which ends with that."""
    os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # what its C++ logs of a server that is not Ray's
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
        except Exception as error:  # what a cluster that starts or ends makes of it is not foreseen
            raise ValueError(f"{where}: {what.format(type(error).__name__)}") from None
    return ray


def _local_ray() -> str | None:
    """Where this machine's cluster was last; Ray would wait for minutes for one that is gone."""
    with contextlib.suppress(ImportError):
        from ray._private.utils import read_ray_address

        return os.environ.get("RAY_ADDRESS") or read_ray_address()
    return None


def _ray_alive(address: str) -> bool:
    """Whether a gRPC server answers there, as Ray's head is; asked by hand, for Ray has no deadline for it."""
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
        """Ask after the cluster; returns its cores."""
        if not _ray_alive(head):
            raise lost
        cores = int(within(ANSWER_S, ray.cluster_resources).get("CPU", 0))
        watch.look(cores)
        return cores

    try:
        # a worker's death is for us to judge: Ray would begin the point again as it was
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
            except ray.exceptions.RayTaskError as error:  # it could not be begun
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
