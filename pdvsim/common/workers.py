"""Parallel tasks on this machine's cores, each in a worker process.

An item that raises, or whose worker dies twice, has an outcome with the reason; the others continue. There is no time
limit for an item. A terminal's Ctrl-C reaches only this process, which ends its workers. Idle workers are kept for the
next tasks.
"""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, contextmanager, suppress
from types import FrameType
from typing import IO, Any, TypeVar

from pdvsim.common.outcomes import DIED, Item, Outcome, Task, attempt
from pdvsim.common.version import __version__

T = TypeVar("T")
Call = tuple[Callable[..., Any], tuple[Any, ...]]  # a function and its arguments

# more threads in each worker would only wait for each other, and may round differently
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")


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
    """`function` of each argument, in order; `progress` is called after each."""
    calls = [(function, given) for given in arguments]
    results: dict[int, T] = {}
    with closing(_results(calls, min(cores(), len(calls)))) as finished:
        for at, result in finished:
            if result is None:
                raise RuntimeError(DIED)
            results[at] = result
            progress()
    return [results[at] for at in range(len(calls))]


def attempt_alone(task: Task, index: int, point: Any, version: str) -> Outcome:
    """Run a point in a new process, so that a death is this point's. For points whose worker died before."""
    with closing(_Worker()) as worker:
        return worker.result((attempt, (task, index, point, version))) or Outcome(index, None, DIED)


def _in_process(task: Task, items: Sequence[Item]) -> Generator[Outcome, None, None]:
    for index, point in items:
        yield attempt(task, index, point, __version__)


def _in_workers(task: Task, items: Sequence[Item], jobs: int) -> Generator[Outcome, None, None]:
    calls = [(attempt, (task, index, point, __version__)) for index, point in items]
    with closing(_results(calls, jobs)) as results:
        for at, outcome in results:
            yield outcome or Outcome(items[at][0], None, DIED)


class _Worker:
    """A process that runs one call after the other; in its own session, so that Ctrl-C does not reach it."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "from pdvsim.common.workers import _serve; _serve()"]
        environment = os.environ | ONE_THREAD | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True)

    def result(self, call: Call) -> Any:
        """The result of a call, or its error; None if the process died."""
        from cloudpickle import dumps, loads

        given, (calls, results) = dumps((os.getcwd(), *call)), (self._process.stdin, self._process.stdout)
        assert calls is not None
        assert results is not None
        try:
            _send(calls, given)
            result = _received(results)
        except (EOFError, OSError, ValueError):  # a ValueError if the pipe is closed
            return None
        return loads(result)

    def close(self) -> None:
        self._process.kill()
        with suppress(OSError), self._process:  # closes its pipes
            pass


_idle: list[_Worker] = []


@atexit.register
def _end_idle() -> None:
    while _idle:
        _idle.pop().close()


def _results(calls: Sequence[Call], jobs: int) -> Generator[tuple[int, Any], None, None]:
    """The number and result of each call as it finishes; None if its worker died twice. Closing ends the workers."""
    workers, stopping = list[_Worker](), threading.Event()

    def result(call: Call) -> Any:
        for make in (_idle.pop, _Worker):
            try:
                worker = make()
            except IndexError:
                worker = _Worker()
            workers.append(worker)
            answer = None if stopping.is_set() else worker.result(call)
            workers.remove(worker)
            if answer is not None and not stopping.is_set():
                _idle.append(worker)
                return answer
            worker.close()
        return None

    with ThreadPoolExecutor(jobs) as threads:  # Ctrl-C is raised only in the main thread
        try:
            numbers = {threads.submit(result, call): at for at, call in enumerate(calls)}
            for future in as_completed(numbers):
                if isinstance(future.result(), Exception):
                    raise future.result()
                yield numbers[future], future.result()
        except BaseException:
            stopping.set()
            threads.shutdown(wait=False, cancel_futures=True)
            for worker in [*workers]:
                worker.close()
            raise


def _serve() -> None:
    """The process of a worker: it reads calls from standard input and writes their results to standard output."""
    from cloudpickle import dumps, loads

    calls, results = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # output of a call is not its result
    threading.Thread(target=_die_with, args=(os.getppid(),), daemon=True).start()
    with suppress(EOFError):
        while True:
            given = _received(calls)
            try:
                folder, function, arguments = loads(given)
                os.chdir(folder)
                result = function(*arguments)
            except Exception as error:
                error.add_note(traceback.format_exc())
                result = error
            _send(results, dumps(result))


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(len(message).to_bytes(8) + message)
    pipe.flush()


def _received(pipe: IO[bytes]) -> bytes:
    """The next message; an EOFError if the other process is gone."""
    size = pipe.read(8)
    message = pipe.read(int.from_bytes(size))
    if not size or len(message) < int.from_bytes(size):
        raise EOFError
    return message


def _die_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


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
