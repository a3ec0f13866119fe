"""Where the points of a sweep run: on this machine's cores, or on the workers of a running Dask cluster.

Each point's row, or the reason why it failed, is returned in the order of completion. Dask is used directly, not
through joblib: a dead worker then fails one point, not the whole call. A point whose worker died is run again in its
own process, to distinguish its failure from another point's.

Not handled: shared files. Workers need the same version of pdvsim, and every file that the points name under the same
path.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pdvsim.common.outcomes import DIED, Item, Notice, Outcome, Task, attempt, failure
from pdvsim.common.version import __version__
from pdvsim.common.workers import attempt_alone, finished_here
from pdvsim.sim.limits import Jobs, check_ranges

PATIENCE_S = 6.0  # limit for an answer of a scheduler
WAIT_S = 600.0  # limit for a cluster that has no workers or does not answer
LOOK_S = 2.0  # between questions to a cluster from which nothing comes
POLL_S = 0.05


@dataclass(frozen=True)
class Backend:
    """Where points run: `jobs` local processes (None: one per core), or the Dask cluster at the address `scheduler`."""

    jobs: Jobs | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.jobs is not None and self.scheduler is not None:
            raise ValueError(
                "--jobs sets the processes of this machine; the cluster of --scheduler has its own workers"
            )


def finished(
    task: Task, items: Sequence[Item], backend: Backend, notice: Notice = lambda text: None
) -> Generator[Outcome, None, None]:
    """The outcome of every item, in order of completion. Closing the generator cancels the rest.

    A lost cluster is a ValueError. One that has no workers or does not answer is reported to `notice`, and waited for
    up to `WAIT_S`.
    """
    if backend.scheduler is None or not items:
        return finished_here(task, items, backend.jobs)
    return _on_dask(task, items, backend.scheduler, notice)


def check_reachable(backend: Backend) -> None:
    """A ValueError of one line if the cluster does not answer, or Dask is not installed."""
    if backend.scheduler is None:
        return
    try:
        from distributed import rpc
        from distributed.security import Security
    except ImportError:
        raise ValueError("--scheduler needs Dask: pip install 'pdvsim[dask]'") from None

    async def ask() -> None:  # a client of Dask would wait for ever for a server that does not speak
        async with rpc(backend.scheduler, connection_args=Security().get_connection_args("client")) as scheduler:
            await scheduler.identity()

    try:
        asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    except Exception as error:  # another kind of server may raise anything
        what = f"no Dask scheduler answers ({type(error).__name__})"
        raise ValueError(f"--scheduler {backend.scheduler}: {what}") from None


@contextmanager
def _client(address: str) -> Iterator[Any]:
    """A connection to the scheduler; Dask's log, which is long when a cluster is lost, is silent meanwhile."""
    check_reachable(Backend(scheduler=address))
    from distributed import Client

    logging.disable(logging.CRITICAL)
    try:
        with Client(address, timeout=PATIENCE_S, set_as_default=False) as client:
            yield client
    finally:
        logging.disable(logging.NOTSET)


class _Watch:
    """Reports a cluster that has no workers or does not answer; a ValueError ends the wait after `WAIT_S`."""

    def __init__(self, client: Any, cluster: str, notice: Notice) -> None:
        self._client, self._cluster, self._notice = client, cluster, notice
        self._state = ""
        self._since_s = self._next_s = 0.0

    def arrivals(self, done: Any) -> Iterator[Any]:
        """The futures as they finish; Dask's own iterator would wait for ever for a cluster without workers."""
        self._look()
        while not done.is_empty():
            batch = done.next_batch(block=False)
            if batch:
                self._state = ""
                yield from batch
            else:
                self._look()
                time.sleep(POLL_S)

    def result(self, future: Any) -> Outcome:
        """The outcome of a future that has finished; its worker may have died since."""
        while True:
            try:
                outcome: Outcome = future.result(timeout=LOOK_S)
            except TimeoutError:
                if future.status == "error":  # the point's own
                    raise
                self._look()
            else:
                return outcome

    def _look(self) -> None:
        if time.monotonic() < self._next_s:
            return
        state = self._state_now()
        now_s = time.monotonic()
        self._next_s = now_s + LOOK_S
        if state and state != self._state:
            self._since_s = now_s
            wait = f"waiting up to {WAIT_S:g} s; Ctrl-C stops and keeps finished points"
            self._notice(f"{self._cluster} {state}: {wait}")
        elif state and now_s - self._since_s >= WAIT_S:
            raise ValueError(f"{self._cluster} {state}, for {WAIT_S:g} s")
        self._state = state

    def _state_now(self) -> str:
        """The error state of the cluster; empty if there is none."""
        try:
            threads = self._client.sync(self._client.scheduler.ncores, callback_timeout=PATIENCE_S)
        except TimeoutError:
            return "does not answer"
        except OSError:  # a lost scheduler: Dask cancels the futures
            return ""
        return "" if threads else "has no workers"


def _on_dask(task: Task, items: Sequence[Item], address: str, notice: Notice) -> Generator[Outcome, None, None]:
    """Every item's outcome, as the workers finish them."""
    with _client(address) as client:
        from distributed import CancelledError, KilledWorker, as_completed

        points, alone, watch = dict(items), set(), _Watch(client, f"the Dask cluster at {address}", notice)
        running = {client.submit(attempt, task, index, point, __version__, pure=False): index for index, point in items}
        done = as_completed(running, loop=client.loop)
        lost = ValueError(f"--scheduler {address}: the Dask scheduler disconnected")
        for future in watch.arrivals(done):
            index = running.pop(future)
            try:
                outcome = watch.result(future)
            except (KilledWorker, CancelledError) as error:
                if client.status != "running":  # Dask cancels everything when it loses its scheduler
                    raise lost from None
                if index in alone:
                    outcome = Outcome(index, None, f"{DIED} ({type(error).__name__})")
                else:  # Dask blames everything that was on a worker when it died
                    alone.add(index)
                    again = client.submit(attempt_alone, task, index, points[index], __version__, pure=False)
                    running[again] = index
                    done.add(again)
                    continue
            except OSError:
                raise lost from None
            except Exception as error:  # it could not be started
                outcome = failure(index, error)
            yield outcome
