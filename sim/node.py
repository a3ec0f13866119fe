"""A server's GPUs as its policy sees them: works are launched on lanes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.core import Role, Work
from pdvsim.sim.device import Job, SimulatedGPU
from pdvsim.sim.host import SimulatedHost


class Device(Protocol):
    """What a policy may ask of its hardware, simulated or real."""

    host: SimulatedHost

    def launch(self, work: Work) -> Event:
        """Submit a work; the event's value is, for a verify, how many drafts of each row were accepted."""


class Node:
    """The simulated GPUs of one server, driven by one host thread."""

    def __init__(
        self, env: Clock, host: SimulatedHost, gpus: Sequence[SimulatedGPU], placement: dict[Role, int]
    ) -> None:
        self.env = env
        self.host = host
        self.gpus = gpus
        self._by_role = {role: gpus[at] for role, at in placement.items()}
        self._latest: dict[str, Job] = {}  # on each lane

    def launch(self, work: Work) -> Event:
        if len(self.gpus) == 1:
            return self.gpus[0].launch(work)
        return self._across(work)

    def _across(self, work: Work) -> Event:
        """The same on two GPUs: a verify waits for the draft of its rows on the other, which the host sees through."""
        gpu, before, job = self._by_role[work.role], self._latest.get(work.lane), Job(self.env, work)
        self._latest[work.lane] = job
        job.device = gpu
        if before is None or before.callbacks is None or before.device is gpu or before.work.rows is not work.rows:
            return gpu.launch(work, job)
        before.work.watched = True

        def drafted(_: Event) -> None:
            gpu.launch(work, job)

        before.callbacks.append(drafted)
        return job
