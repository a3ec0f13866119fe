"""What a policy sees of its hardware: works are launched on lanes. And a server of two GPUs."""

from __future__ import annotations

from typing import Protocol

from simpy.events import Event

from pdvsim.sim.core import Role, Work
from pdvsim.sim.hardware.host import SimulatedHost
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import Job, SimulatedGPU


class Device(Protocol):
    """What a policy may ask of its hardware, simulated or real."""

    host: SimulatedHost

    def launch(self, work: Work) -> Event:
        """Submit a work; the event's value is, for a verify, how many drafts of each row were accepted."""


class Node:
    """The simulated GPUs of one server, driven by one host thread, as one device."""

    def __init__(self, env: Clock, host: SimulatedHost, gpus: dict[Role, SimulatedGPU]) -> None:
        self.env = env
        self.host = host
        self.gpus = gpus
        self._latest: dict[str, Job] = {}  # on each lane

    def launch(self, work: Work) -> Event:
        """A verify waits for the draft of its rows on the other GPU, which the host sees through."""
        gpu, before = self.gpus[work.role], self._latest.get(work.lane)
        if before is None or before.callbacks is None or before.device is gpu or before.work.rows is not work.rows:
            job = self._latest[work.lane] = gpu.launch(work)
            return job
        before.work.watched = True
        verdict = Event(self.env)

        def drafted(_: Event) -> None:
            verified = self._latest[work.lane] = gpu.launch(work)
            verified.callbacks.append(verdict.trigger)

        before.callbacks.append(drafted)
        return verdict
