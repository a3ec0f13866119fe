"""A server's GPUs as its policy sees them: launch a work, run a round, run a batch ahead where that is possible."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.core import Request, Role, Work
from pdvsim.sim.device import SimulatedGPU
from pdvsim.sim.foresight import Foresight
from pdvsim.sim.host import SimulatedHost

Maker = Callable[[list[Request], int], Work]


class Device(Protocol):
    """What a policy may ask of its hardware, simulated or real."""

    host: SimulatedHost

    def launch(self, work: Work) -> Event:
        """Submit a work; the event's value is, for a verify, how many drafts of each row were accepted."""

    def round(self, rows: list[Request], k: int, draft: Maker, verify: Maker, steady: bool, alone: bool) -> Event:
        """Draft and verify `rows` on one lane: the verdict.

        A device that can foresee may run more rounds before that, and gives the verdict of the last; only if the draft
        length and the batch stay as they are (`steady`). `alone`: no other process launches anything.
        """

    def run_ahead(self, rows: list[Request], k: int, draft: Maker, verify: Maker) -> Event | None:
        """Rounds of the only batch in two lanes, as far as they can be foreseen, or None.

        The event has the last verdict if that finishes a request; else none, and the drafting lane has the batch back.
        """


class Node:
    """The simulated GPUs of one server, driven by one host thread."""

    def __init__(
        self,
        env: Clock,
        host: SimulatedHost,
        gpus: Sequence[SimulatedGPU],
        placement: dict[Role, int],
        foresight: Foresight | None,
    ) -> None:
        self.env = env
        self.host = host
        self.gpus = gpus
        self._by_role = {role: gpus[at] for role, at in placement.items()}
        simple = len(gpus) == 1 and gpus[0].sharing.alone_is_full and host.times.wakes_at_once
        self._foresight = foresight if simple else None

    def launch(self, work: Work) -> Event:
        return self._by_role[work.role].launch(work, self.env.now)

    def round(self, rows: list[Request], k: int, draft: Maker, verify: Maker, steady: bool, alone: bool) -> Event:
        if steady and self._foresight is not None:
            verdict = self._foresight.one_lane(rows, k, draft, verify, alone)
            if verdict is not None:
                return verdict
        if not k:
            return self.launch(verify(rows, k))
        work = draft(rows, k)
        if self._by_role["draft"] is self._by_role["target"]:
            self.launch(work)  # the stream keeps the order
            return self.launch(verify(rows, k))
        return self._across(work, rows, k, verify)

    def _across(self, work: Work, rows: list[Request], k: int, verify: Maker) -> Event:
        """Draft on one GPU, then verify on the other: the host sees the draft through."""
        verdict = Event(self.env)
        work.watched = True

        def drafted(_: Event) -> None:
            self._by_role["target"].launch(verify(rows, k), self.env.now, verdict)

        self.launch(work).callbacks.append(drafted)
        return verdict

    def run_ahead(self, rows: list[Request], k: int, draft: Maker, verify: Maker) -> Event | None:
        return self._foresight.two_lanes(rows, k, draft, verify) if self._foresight is not None else None
