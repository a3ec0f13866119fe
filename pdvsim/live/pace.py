"""A session in step with the wall clock, in a process of its own: the page never waits for it, nor it for the page.

Orders come in over a pipe, and what is shown goes out. Where the simulator cannot keep up with the speed that is asked
for, it goes as fast as it can, and the page says how fast that is.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from threading import Thread
from time import perf_counter
from typing import Any

from pdvsim.common.console import say
from pdvsim.live.gauge import KEPT_S, LATENCIES, binned
from pdvsim.live.knobs import Act, Knobs, Setup
from pdvsim.live.session import Session
from pdvsim.live.wire import Heard, connected
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import PolicyError

START_S = 120.0  # until a session has begun
MOST_UNREAD = 50  # orders, which a pipe holds: sending one more would wait for the reader
TICK_S = 0.12  # from one picture to the next
MOST_S = 2.0  # is made up for: after a longer pause of the machine, time has stood still
SLICE_S = 0.05  # of simulated time at least, before the wall clock is looked at again
SLICES = 4  # about so many a tick
SPEEDS = (1.0, 10.0, 100.0, float("inf"))
WINDOWS_S = (10.0, 30.0, KEPT_S)
WINDOW_S = 30.0
ERRORS = ("tokens/s", *(f"{name.upper()} p50" for name in LATENCIES))


@dataclass
class Shown:
    """What a page is told, several times a second."""

    archs: tuple[str, ...]
    now_s: float
    knobs: Knobs
    figures: list[dict[str, Any]]
    running: bool
    speed: float
    went: float  # simulated seconds a second, lately
    window_s: float
    tape: list[Act] = field(default_factory=list)
    orders: int = 0  # obeyed or refused so far
    refusal: str = ""  # of the last order, in one line


class Pacer:
    """Drives a session, and obeys."""

    def __init__(self, setup: Setup, speed: float, window_s: float) -> None:
        self.setup, self.speed, self.window_s = setup, speed, window_s
        self.session, self.running = Session(setup), True
        self.orders = 0
        self.refusal = ""
        self._went = self._owed_s = 0.0
        self._last = perf_counter()

    def obey(self, order: str, value: Any = None) -> None:
        """Do what a page asks; what cannot be done is said there."""
        self.orders, self.refusal = self.orders + 1, ""
        try:
            if order == "turn":
                self.session.turn(value)
            elif order in ("burst", "drop"):
                getattr(self.session, order)()
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
        """Go on by the time that has passed, times the speed; no longer than a tick, and the rest is owed."""
        began, session = perf_counter(), self.session
        passed_s, self._last = began - self._last, began
        if not self.running:
            self._went = self._owed_s = 0.0
            return
        from_s = session.now_s
        self._owed_s = min(self._owed_s + passed_s * self.speed, MOST_S * self.speed)
        to_s, slice_s = from_s + self._owed_s, max(SLICE_S, self._went * TICK_S / SLICES)
        while session.now_s < to_s and perf_counter() - began < TICK_S:
            session.advance(min(to_s, session.now_s + slice_s))
        self._owed_s -= session.now_s - from_s
        went = (session.now_s - from_s) / max(passed_s, 1e-6)
        self._went += 0.2 * (went - self._went)

    def shown(self) -> Shown:
        """What there is to show now."""
        session, figures = self.session, self.session.figures(self.window_s)
        binned(figures)
        return Shown(
            self.setup.archs, session.now_s, session.knobs, figures, self.running, self.speed,
            self._went, self.window_s, list(session.tape), self.orders, self.refusal,
        )  # fmt: skip


def drive(pipe: Connection, setup: Setup, speed: float, window_s: float) -> None:
    """Pace a session until it is told to end, or the other end of the pipe is gone."""
    _drive(pipe, lambda: Pacer(setup, speed, window_s))


def drive_beside(pipe: Connection, pair: str | None, window_s: float) -> None:
    """Show a real run and the same run simulated, in step with the real one's clock, until told to end."""
    _drive(pipe, lambda: Beside(pair, window_s))


def _drive(pipe: Connection, make: Callable[[], Pacer | Beside]) -> None:
    """Go on tick by tick, and obey; a session that ends by itself tells the page why, if anybody listens."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the page's affair, whose end is ours
    with suppress(EOFError, OSError):
        try:
            paced = make()
            while True:
                began = perf_counter()
                paced.tick()
                pipe.send(paced.shown())
                while pipe.poll(max(0.0, TICK_S - (perf_counter() - began))):
                    order, value = pipe.recv()
                    if order == "end":
                        return
                    paced.obey(order, value)
                    began = 0.0  # an order is shown at once
        except ValueError as error:
            pipe.send(str(error))


class Beside:
    """A real run that is listened to, and its simulation."""

    def __init__(self, pair: str | None, window_s: float) -> None:
        self.heard, self.window_s, self.orders = Heard(connected()), window_s, 0
        self.setup = setup_beside(self.heard.experiment, pair)
        self.session = Session(self.setup)
        self.errors: deque[tuple[float, ...]] = deque(maxlen=2000)

    def obey(self, order: str, value: Any = None) -> None:
        """Show another window; a real run takes no other order."""
        self.orders += 1
        if order == "window_s":
            self.window_s = value

    def tick(self) -> None:
        """Hear what is new, and simulate up to there."""
        began = perf_counter()
        self.heard.listen()
        to_s = self.heard.gauge.now_s
        while self.session.now_s < to_s and perf_counter() - began < TICK_S:
            self.session.advance(min(to_s, self.session.now_s + SLICE_S))

    def shown(self) -> Shown:
        """Both; the simulation's differences to the real run are its errors."""
        real, [simulated] = self.heard.gauge.figures(self.window_s), self.session.figures(self.window_s)
        real["card"] = self.heard.card
        if self.session.now_s >= self.heard.gauge.now_s - SLICE_S and not self.heard.over:
            self.errors.append((self.session.now_s, *errors(real, simulated)))
        columns = list(zip(*self.errors, strict=True)) or [()] * (1 + len(ERRORS))
        simulated["errors"] = dict(zip(("time_s", *ERRORS), columns, strict=True))
        binned([real, simulated])
        return Shown(
            self.setup.archs * 2, self.heard.gauge.now_s, self.session.knobs, [real, simulated], not self.heard.over,
            1.0, 1.0, self.window_s, orders=self.orders,
        )  # fmt: skip


def setup_beside(experiment: Experiment, pair: str | None) -> Setup:
    """The simulation of a real run; `pair` stands in where the real one has models that no profile knows."""
    if pair is not None:
        experiment = replace(experiment, server=replace(experiment.server, pair=pair))
    return Setup((experiment.arch,), experiment, experiment.traffic.num_prompts)


def errors(real: dict[str, Any], simulated: dict[str, Any]) -> list[float]:
    """By how many percent the simulation is off, metric by metric, in the order of ERRORS."""
    pairs = [(f["tokens_per_s"], *(f["marks_ms"][name][0] for name in LATENCIES)) for f in (real, simulated)]
    return [100 * (s / r - 1) if r else math.nan for r, s in zip(*pairs, strict=True)]


class Feed:
    """The latest of what a process shows, and the way to give it orders."""

    def __init__(self, driver: Callable[..., None], *args: Any) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=driver, args=(theirs, *args), daemon=True)
        self._process.start()
        theirs.close()
        self.pictures = self.ordered = 0
        self.ended = ""  # why, where it ended by itself
        try:
            if not self._pipe.poll(START_S):
                raise ValueError(f"the session could not start: its process sent nothing in {START_S:g} s")
            first: Shown | str = self._pipe.recv()  # a page is never without
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
        """Ask for something; what comes of it is shown soon. A session that has stopped reading is asked no more."""
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
        self._process.kill()  # if it is still there

    def _listen(self) -> None:
        try:
            while True:
                shown: Shown | str = self._pipe.recv()
                if isinstance(shown, str):
                    self.ended = shown
                    say("pdvsim", f"error: the session has ended: {shown}")
                    return
                self.latest = shown
                self.pictures += 1
        except (EOFError, OSError):
            return
