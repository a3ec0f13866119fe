"""The architectures of a session, shared out to as many processes as there are cores; in step, as if by one."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from pdvsim.common.workers import cores
from pdvsim.live.knobs import Act, Knobs, Setup
from pdvsim.live.session import GaugedStations

ANSWER_S = 60.0  # a step of a session is simulated in a hundredth of this


class Crew:
    """This process with the first share, and a helper for each of the others. It lives as long as this process."""

    def __init__(self, setup: Setup, processes: int | None = None) -> None:
        archs, most = len(setup.archs), processes or cores()
        self._setup, self._count = setup, min(archs, most)
        self._shares = [range(at, archs, self._count) for at in range(self._count)]
        self._helpers = [_helper(setup, share) for share in self._shares[1:]]
        self._own = GaugedStations(setup, self._shares[0])

    def restart(self) -> None:
        """Go back to the start."""
        for helper in self._helpers:
            helper.send(("restart", ()))
        self._own = GaugedStations(self._setup, self._shares[0])

    def advance(self, time_s: float) -> None:
        """Go on to a time, with every architecture, and take in what happened."""
        self._all("advance", time_s)

    def do(self, act: Act) -> None:
        """Do to every architecture what was done."""
        self._all("do", act)

    def check(self, knobs: Knobs) -> None:
        """Refuse settings that some architecture cannot have."""
        self._all("check", knobs)

    def figures(self, window_s: float) -> list[dict[str, Any]]:
        """What each architecture's last seconds were like, in the order of the setup."""
        of_shares = self._all("figures", window_s)
        return [of_shares[at % self._count][at // self._count] for at in range(len(self._setup.archs))]

    def _all(self, what: str, *args: Any) -> list[Any]:
        """Everyone does the same, at once; a refusal of one is raised when all have answered."""
        for helper in self._helpers:
            helper.send((what, args))
        answers = [_answer(self._own, what, args), *map(_heard, self._helpers)]
        for answer in answers:
            if isinstance(answer, ValueError):
                raise answer
        return answers


def _heard(helper: Connection) -> Any:
    """A helper's answer; the session ends if there is none in `ANSWER_S`."""
    try:
        if helper.poll(ANSWER_S):
            return helper.recv()
    except (EOFError, OSError):
        raise ValueError("one of its processes has died") from None
    raise ValueError(f"one of its processes has not answered for {ANSWER_S:g} s")


def _helper(setup: Setup, share: Sequence[int]) -> Connection:
    context = get_context("spawn")
    pipe, theirs = context.Pipe()
    context.Process(target=_help, args=(theirs, setup, share), daemon=True).start()
    theirs.close()
    return pipe


def _help(pipe: Connection, setup: Setup, share: Sequence[int]) -> None:
    """Do as told until the other end is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mine = GaugedStations(setup, share)
    with suppress(EOFError, OSError):
        while True:
            what, args = pipe.recv()
            if what == "restart":
                mine = GaugedStations(setup, share)
            else:
                pipe.send(_answer(mine, what, args))


def _answer(stations: GaugedStations, what: str, args: tuple[Any, ...]) -> Any:
    try:
        return getattr(stations, what)(*args)
    except ValueError as refusal:
        return refusal
