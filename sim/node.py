"""A server's GPUs as its policy sees them: launch a work, run a round, foresee rounds that nothing disturbs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.core import Request, Role, Work
from pdvsim.sim.device import SimulatedGPU
from pdvsim.sim.foresight import SHORTEST, Stretch, path_of
from pdvsim.sim.host import SimulatedHost
from pdvsim.sim.lane import Lane
from pdvsim.sim.ledger import Ledger

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

    def stretch(
        self, rows: list[Request], k: int, draft: Maker, verify: Maker, lanes: tuple[Lane, Lane]
    ) -> Stretch | None:
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
        ledger: Ledger,
        foresee: bool,
    ) -> None:
        self.env = env
        self.host = host
        self.gpus = gpus
        self._by_role = {role: gpus[at] for role, at in placement.items()}
        self._first = gpus[0]
        self._ledger = ledger
        self._foresee = foresee and len(gpus) == 1 and gpus[0].sharing.alone_is_full and not host.times.idle_poll_s

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
        ahead = self._foresee_rounds(rows, k, draft, verify, None) if steady else None
        if ahead is not None:
            return ahead.event
        if k:
            self.launch(draft(rows, k))
        return self.launch(verify(rows, k))

    def stretch(
        self, rows: list[Request], k: int, draft: Maker, verify: Maker, lanes: tuple[Lane, Lane]
    ) -> Stretch | None:
        return self._foresee_rounds(rows, k, draft, verify, lanes)

    def _foresee_rounds(
        self, rows: list[Request], k: int, draft: Maker, verify: Maker, lanes: tuple[Lane, Lane] | None
    ) -> Stretch | None:
        """The rounds until the first of `rows` finishes, if there are enough of them and nothing else goes on."""
        gpu = self._first
        if not self._foresee or gpu.stretch is not None or not gpu.idle or self.host.free_at > self.env.now:
            return None
        paths, rounds = [], 1 << 30
        for row in rows:
            if row.owed > 1 and k:
                return None
            path = path_of(row, k)
            at = row.rounds - path.first_round
            left = len(path.positions) - 1 - at
            if left < SHORTEST:
                return None
            if left < rounds:
                rounds = left
            paths.append((path, at))
        gpu.stretch = Stretch(gpu, self._ledger, rows, k, paths, rounds, draft, verify, lanes)
        return gpu.stretch
