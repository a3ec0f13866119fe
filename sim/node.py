"""A server's GPUs as its policy sees them: launch a work, run a round, foresee rounds that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.core import Request, Role, Work
from pdvsim.sim.device import SimulatedGPU
from pdvsim.sim.foresight import SHORTEST, Lap, Stretch, path_of
from pdvsim.sim.host import SimulatedHost
from pdvsim.sim.lane import Lane

Maker = Callable[[list[Request], int], Work]


class Device(Protocol):
    """What a policy may ask of its hardware, simulated or real."""

    host: SimulatedHost

    def launch(self, work: Work) -> Event:
        """Submit a work; the event's value is, for a verify, how many drafts of each row were accepted."""

    def round(self, rows: list[Request], k: int, draft: Maker, verify: Maker, steady: bool) -> Event:
        """Draft and verify `rows` on one lane; `steady` says that draft length and batch will not change by themselves.

        Then a device that can foresee may run several rounds; the event is always the verdict of the last one.
        """

    def stretch(self, rows: list[Request], k: int, draft: Maker, verify: Maker, lanes: tuple[Lane, Lane]) -> Stretch | None:
        """Foresee rounds of the only batch in two lanes, or None."""

    def disturb(self) -> None:
        """Something is about to happen that the device could not foresee."""

    def shorten(self) -> None:
        """The batch may change after the round under way."""


class Node:
    """The simulated GPUs of one server, driven by one host thread."""

    def __init__(
        self,
        env: Clock,
        host: SimulatedHost,
        gpus: Sequence[SimulatedGPU],
        placement: dict[Role, int],
        laps: list[Lap],
        foresee: bool,
    ) -> None:
        self.env = env
        self.host = host
        self.gpus = gpus
        self._by_role = {role: gpus[at] for role, at in placement.items()}
        self._first = gpus[0]
        self._laps = laps
        self._foresee = (
            foresee and len(gpus) == 1 and gpus[0].sharing.alone_is_full and not host.times.idle_poll_s
        )

    def launch(self, work: Work) -> Event:
        stretch = self._first.stretch
        if stretch is not None:
            stretch.cut()
        return self._by_role[work.role].launch(work, self.env.now)

    def disturb(self) -> None:
        stretch = self._first.stretch
        if stretch is not None:
            stretch.cut()

    def shorten(self) -> None:
        stretch = self._first.stretch
        if stretch is not None:
            stretch.shorten()

    def round(self, rows: list[Request], k: int, draft: Maker, verify: Maker, steady: bool) -> Event:
        rounds = self._undisturbed(rows, k) if steady else 0
        if rounds:
            return self._begin(Stretch(self._first, self._laps, rows, k, rounds, draft, verify, None)).event
        if k:
            self.launch(draft(rows, k))
        return self.launch(verify(rows, k))

    def stretch(self, rows: list[Request], k: int, draft: Maker, verify: Maker, lanes: tuple[Lane, Lane]) -> Stretch | None:
        rounds = self._undisturbed(rows, k)
        if not rounds:
            return None
        return self._begin(Stretch(self._first, self._laps, rows, k, rounds, draft, verify, lanes))

    def _begin(self, stretch: Stretch) -> Stretch:
        self._first.stretch = stretch
        return stretch

    def _undisturbed(self, rows: list[Request], k: int) -> int:
        """How many rounds there are until the first of `rows` finishes; 0 if too few to gain by it."""
        if not self._foresee or not self._first.idle or self._first.stretch or self.host.free_at > self.env.now:
            return 0
        if k and any(r.owed > 1 for r in rows):
            return 0
        rounds = 1 << 30
        for row in rows:
            path = path_of(row, k)
            left = len(path.positions) - 1 - (row.rounds - path.first_round)
            if left < rounds:
                rounds = left
        return rounds if rounds >= SHORTEST else 0
