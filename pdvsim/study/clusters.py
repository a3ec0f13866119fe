"""The points of a sweep on the workers of a running Dask or Ray cluster.

Both are asked directly, not through joblib: a death is then one point's, not the whole call's, and joblib's Ray backend
has no results to give before all are there. A cluster that does not answer, or goes away in the middle, is a ValueError
within PATIENCE_S; one without workers is waited for, and said to be.

Not modelled here: shared files. The workers of a cluster need pdvsim, in the same version, and every file that the
points name, under the same path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from pdvsim.common.outcomes import DIED, Item, Notice, Outcome, Task, attempt
from pdvsim.common.version import __version__

T = TypeVar("T")

PATIENCE_S = 6.0  # with a cluster that does not answer
FETCH_S = 15.0  # for the result of a finished point: its worker may have died with it, and Dask goes on asking
TICK_S = 1.0  # between looks at a cluster from which nothing comes
HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"


class ClusterLost(ValueError):
    """The cluster that ran the points is gone; what it had finished is not."""


class Watch:
    """Looks after a cluster from which nothing comes: without workers it is said, once, that they are waited for."""

    def __init__(self, cluster: str, notice: Notice) -> None:
        self.cluster, self.notice = cluster, notice
        self._waiting = False

    def look(self, workers: int) -> None:
        if not workers and not self._waiting:
            self.notice(f"{self.cluster} has no workers: waiting for some; Ctrl-C stops, and keeps what is done")
        self._waiting = not workers


def within(seconds: float, ask: Callable[[], T]) -> T:
    """What `ask` returns or raises, or a TimeoutError: a library's own deadline may not be one."""
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
    from distributed import Client

    lost = ClusterLost(f"--scheduler {address}: the Dask scheduler went away")
    points, watch = dict(items), Watch(f"the Dask cluster at {address}", notice)
    ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with _quiet("distributed"):
        try:
            client = Client(address, timeout=PATIENCE_S, set_as_default=False)
        except (OSError, ValueError):
            raise lost from None
        running: dict[Any, int] = {}

        def submit(index: int) -> None:
            future = client.submit(attempt, task, index, points[index], __version__, pure=False)
            running[future] = index
            future.add_done_callback(ready.put)

        def fetched(future: Any) -> Outcome | None:
            """What a finished one gave; None if it failed, or its worker died before the result was fetched."""
            if future.status != "finished":
                return None
            try:
                outcome: Outcome = within(FETCH_S, future.result)
            except TimeoutError:
                return None
            return outcome

        def next_done() -> tuple[int, Any]:
            while True:
                try:
                    future = ready.get(timeout=TICK_S)
                except queue.Empty:
                    if client.status != "running":
                        raise lost from None
                    watch.look(len(client.scheduler_info()["workers"]))
                    continue
                if future.status == "cancelled":  # what Dask does with all of them when it loses its scheduler
                    raise lost
                return running.pop(future), future  # lets the scheduler forget it

        try:
            dead = []
            for index in points:
                submit(index)
            while running:
                index, future = next_done()
                outcome = fetched(future)
                if outcome is None:
                    dead.append(index)
                else:
                    yield outcome
            # Dask blames everything that was on a worker when it died: each again, with nothing beside it
            for index in dead:
                submit(index)
                index, future = next_done()
                why = type(future.exception()).__name__ if future.status == "error" else "its result is lost"
                yield fetched(future) or Outcome(index, None, f"{DIED} ({why})")
        except OSError:  # of a connection that broke
            raise lost from None
        finally:
            with contextlib.suppress(Exception):  # a scheduler that is gone cannot be told
                within(PATIENCE_S, lambda: client.cancel(list(running)) if client.status == "running" else None)
            with contextlib.suppress(Exception):
                within(PATIENCE_S, client.close)


def ray_connected(address: str | None) -> Any:
    """Ray, connected; it has one connection a process, which ends with that."""
    try:
        import ray
    except ImportError:
        raise ValueError("--backend ray needs Ray: pip install 'pdvsim[ray]'") from None
    if not ray.is_initialized():
        where = f"--scheduler {address}" if address else "--backend ray"
        what = "no Ray cluster answers ({}); start one with `ray start --head`"
        at = address or _local_ray()
        if at is not None and not _ray_alive(at):
            raise ValueError(f"{where}: {what.format(at)}")
        try:
            ray.init(address=at or "auto", log_to_driver=False, configure_logging=False)
        except (OSError, ValueError, RuntimeError) as error:
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


def on_ray(task: Task, items: Sequence[Item], address: str | None, notice: Notice) -> Generator[Outcome, None, None]:
    """Every item's outcome, as the workers finish them."""
    ray = ray_connected(address)
    head = address if address and address.startswith("ray://") else ray.get_runtime_context().gcs_address
    lost = ClusterLost(f"--backend ray: the cluster at {head} went away")
    waiting, watch = deque(items), Watch("the Ray cluster", notice)
    running: dict[Any, int] = {}
    try:
        remote = ray.remote(max_retries=1)(attempt)
        most = 4 * max(1, int(ray.cluster_resources().get("CPU", 1)))  # enough to keep every worker busy
        while waiting or running:
            while waiting and len(running) < most:
                index, point = waiting.popleft()
                running[remote.remote(task, index, point, __version__)] = index
            done, _ = ray.wait(list(running), num_returns=1, timeout=TICK_S)
            if not done:
                if not _ray_alive(head):
                    raise lost
                watch.look(int(ray.cluster_resources().get("CPU", 0)))
                continue
            index = running.pop(done[0])
            try:
                outcome: Outcome = ray.get(done[0])
            except ray.exceptions.RayError as error:
                if not _ray_alive(head):
                    raise lost from None
                outcome = Outcome(index, None, f"{DIED} ({type(error).__name__})")
            yield outcome
    finally:
        for reference in running:
            ray.cancel(reference, force=True)
