"""A session in step with the wall clock, in its own process: the page and the session never wait for each other.

Orders arrive over a pipe, and updates are sent back. If the simulator cannot keep up with the requested speed, it runs
as fast as it can, and the page shows that speed.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from time import perf_counter
from typing import Any

from pdvsim.common.console import say
from pdvsim.live.gauge import KEPT_S, binned
from pdvsim.live.knobs import Action, Knobs, Setup
from pdvsim.live.session import Session
from pdvsim.sim.policies import PolicyError

START_S = 120.0  # limit for the start of a session
MOST_UNREAD = 50  # orders; more would fill the pipe and block
UPDATE_S = 0.12
MOST_CATCH_UP_S = 2.0  # after a pause of the machine
SLICE_S = 0.05  # least simulated time between checks of the wall clock
SLICES = 4  # approximate number per update
SPEEDS = (1.0, 10.0, 100.0, float("inf"))
WINDOWS_S = (10.0, 30.0, KEPT_S)
WINDOW_S = 30.0
SAFE_PATH = "PYTHONSAFEPATH"


@dataclass
class Update:
    """Update for the page, several times per second."""

    now_s: float
    knobs: Knobs
    figures: list[dict[str, Any]]
    running: bool
    speed: float
    measured_speed: float  # recent speed in simulated seconds per second
    window_s: float
    actions: list[Action]
    orders: int  # executed or rejected so far
    refusal: str  # of the last order, one line


class Pacer:
    """Drives a session and executes orders."""

    def __init__(self, setup: Setup, speed: float, window_s: float) -> None:
        self.setup, self.speed, self.window_s = setup, speed, window_s
        self.session, self.running = Session(setup), True
        self.orders = 0
        self.refusal = ""
        self._measured_speed = self._due_s = 0.0
        self._last = perf_counter()

    def execute(self, order: str, value: Any = None) -> None:
        """Execute an order; a failure is shown on the page."""
        self.orders, self.refusal = self.orders + 1, ""
        try:
            if order == "turn":
                self.session.change(replace(self.session.knobs, **value))
            elif order == "burst":
                self.session.burst()
            elif order == "on":
                self.session.advance(self.session.now_s + value)
            elif order == "restart":
                self.session = Session(self.setup)
            elif order in ("running", "speed", "window_s"):
                setattr(self, order, value)
        except PolicyError:
            raise
        except ValueError as error:
            self.refusal = str(error)

    def tick(self) -> None:
        """Advance by the elapsed time times the speed, for at most a tick; the rest is caught up later."""
        began, session = perf_counter(), self.session
        passed_s, self._last = began - self._last, began
        if not self.running:
            self._measured_speed = self._due_s = 0.0
            return
        from_s = session.now_s
        self._due_s = min(self._due_s + passed_s * self.speed, MOST_CATCH_UP_S * self.speed)
        to_s, slice_s = from_s + self._due_s, max(SLICE_S, self._measured_speed * UPDATE_S / SLICES)
        while session.now_s < to_s and perf_counter() - began < UPDATE_S:
            session.advance(min(to_s, session.now_s + slice_s))
        self._due_s -= session.now_s - from_s
        went = (session.now_s - from_s) / max(passed_s, 1e-6)
        self._measured_speed += 0.2 * (went - self._measured_speed)

    def shown(self) -> Update:
        """The current update."""
        session, figures = self.session, self.session.figures(self.window_s)
        binned(figures)  # here: a pipe is slow for every value
        return Update(
            session.now_s, session.knobs, figures, self.running, self.speed, self._measured_speed, self.window_s,
            list(session.actions), self.orders, self.refusal,
        )  # fmt: skip


def drive(pipe: Connection, setup: Setup, speed: float, window_s: float) -> None:
    """Run a session until it is stopped or the pipe is closed; one that ends by itself sends the page the reason."""
    with suppress(EOFError, OSError):
        try:
            paced = Pacer(setup, speed, window_s)
            while True:
                began = perf_counter()
                paced.tick()
                pipe.send(paced.shown())
                while pipe.poll(max(0.0, UPDATE_S - (perf_counter() - began))):
                    order, value = pipe.recv()
                    if order == "end":
                        return
                    paced.execute(order, value)
                    began = 0.0  # show an order immediately
        except ValueError as error:
            pipe.send(str(error))


class Child:
    """A function in a process of its own, at the other end of a pipe.

    The process imports nothing from the current folder, and leaves Ctrl-C to this one, which then ends it.
    """

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_uninterrupted, args=(function, theirs, *args), daemon=True)
        before = os.environ.get(SAFE_PATH)
        os.environ[SAFE_PATH] = "1"  # a signal.py in the current folder would run in place of the standard library's
        try:
            self.process.start()
        finally:
            if before is None:
                del os.environ[SAFE_PATH]
            else:
                os.environ[SAFE_PATH] = before
        theirs.close()


def _uninterrupted(function: Callable[..., None], *args: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    function(*args)


class Feed:
    """The latest update of the process, and its orders."""

    def __init__(self, driver: Callable[..., None], *args: Any) -> None:
        child = Child(driver, *args)
        self._pipe, self._process = child.pipe, child.process
        self.pictures = self.ordered = 0
        self.ended = ""  # reason, if it ended by itself
        try:
            if not self._pipe.poll(START_S):
                raise ValueError(f"the session could not start: its process sent nothing in {START_S:g} s")
            first: Update | str = self._pipe.recv()  # a page always has an update
        except EOFError:
            raise ValueError("the session could not start: its process has ended") from None
        except (KeyboardInterrupt, ValueError):
            self.close()
            raise
        if isinstance(first, str):
            raise ValueError(first)
        self.latest = first
        Thread(target=self._listen, daemon=True).start()

    def order(self, what: str, value: Any = None) -> None:
        """Send an order; its effect is shown soon. A session that stopped reading gets no more orders."""
        if self.ordered - self.latest.orders < MOST_UNREAD:
            self.ordered += 1
            self._pipe.send((what, value))

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):
            self._pipe.send(("end", None))
        self._process.join(2)
        self._process.kill()  # if still running

    def _listen(self) -> None:
        try:
            while True:
                shown: Update | str = self._pipe.recv()
                if isinstance(shown, str):
                    self.ended = shown
                    say("pdvsim", f"error: the session has ended: {shown}")
                    return
                self.latest = shown
                self.pictures += 1
        except (EOFError, OSError):
            return
