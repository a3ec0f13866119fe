"""What a policy sees of its hardware: works are launched on lanes. And a server of several GPUs.

A work starts once what it needs from other GPUs is there: drafts and their probabilities for a verify, verdicts for a
draft, the KV cache of a prompt that was read elsewhere. What it needs is sent when the host has launched it, a prompt's
KV cache when the host has noticed that it is read. Prompts themselves come with the launch, to every GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from simpy.events import Event

from pdvsim.sim.core import Request, Seats, Work
from pdvsim.sim.hardware.host import SimulatedHost
from pdvsim.sim.hardware.links import Cargo, Fabric
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import Job, SimulatedGPU


class Device(Protocol):
    """What a policy may ask of its hardware, simulated or real."""

    host: SimulatedHost

    def launch(self, work: Work) -> Event:
        """Submit a work; the event's value is, for a verify, how many drafts of each row were accepted."""


class Node:
    """The simulated GPUs of one server, driven by one host thread, as one device."""

    def __init__(
        self, env: Clock, host: SimulatedHost, gpus: list[SimulatedGPU], seats: Seats, fabric: Fabric, cargo: Cargo
    ) -> None:
        self.env = env
        self.host = host
        self.gpus = gpus
        self.seats = seats
        self.fabric = fabric
        self.cargo = cargo
        self._latest: dict[str, Job] = {}  # on each lane
        self._free_s: dict[tuple[int, str], float] = {}  # when the last work launched on a stream could start
        self._kv_there_s: dict[Request, float] = {}  # of prompts that were read elsewhere, until they are decoded

    def launch(self, work: Work) -> Event:
        """A verify waits for the draft of its rows on the other GPU, which the host sees through."""
        at, before = self._seat(work), self._latest.get(work.lane)
        gpu = self.gpus[at]
        if before is None or before.callbacks is None or before.device is gpu or before.work.rows is not work.rows:
            return self._start(work, at)
        before.work.watched = True
        verdict = Event(self.env)

        def drafted(_: Event) -> None:
            self._start(work, at).callbacks.append(verdict.trigger)

        before.callbacks.append(drafted)
        return verdict

    def _seat(self, work: Work) -> int:
        seats = self.seats
        return seats.draft if work.role == "draft" else seats.prefill if work.kind == "prefill" else seats.verify

    def _start(self, work: Work, at: int) -> Event:
        """Launch a work on a GPU; it goes on its stream when all it needs is there."""
        env, host, gpu = self.env, self.host, self.gpus[at]
        job = self._latest[work.lane] = Job(gpu, work, host.spend(env.now, host.times.launch_s))
        self._at(job.ready_s, lambda: self._launched(job, at))
        if work.kind != "prefill" or work.role == "draft" or self.seats.prefill == self.seats.verify:
            return job
        job.callbacks.append(lambda _: self._move_kv(work))
        read = Event(env)  # not the job itself, whose callbacks the clock passes over where its process alone waits
        job.callbacks.append(read.trigger)
        return read

    def _launched(self, job: Job, at: int) -> None:
        """The host is through: send what the work needs from elsewhere."""
        work, now = job.work, self.env.now
        ready_s = max(now, self._free_s.get((at, work.lane), 0.0))  # a stream keeps its order
        for source, size in self._needs(work):
            if source != at:
                ready_s = max(ready_s, self.fabric.send(now, source, at, size))
        if self._kv_there_s and work.role == "target":
            ready_s = max([ready_s, *(self._kv_there_s.pop(row, 0.0) for row in work.rows)])
        job.ready_s = self._free_s[at, work.lane] = ready_s
        if ready_s > now:
            self._at(ready_s, lambda: job.device.enter(job))
        else:
            job.device.enter(job)

    def _needs(self, work: Work) -> list[tuple[int, float]]:
        """What a work is sent, and from where."""
        if work.kind == "verify":
            return [(self.seats.draft, self.cargo.drafts(sum(row.k for row in work.rows)))]
        if work.kind == "draft":
            owed = sum(row.owed for row in work.rows if row.owed > 1)  # one is its own last draft
            return [(self.seats.verify, self.cargo.verdicts(len(work.rows), owed))]
        return []

    def _move_kv(self, work: Work) -> None:
        """Send on what was read of prompts that will be decoded."""
        for chunk in work.chunks:
            request = chunk.request
            if request.prompt_tokens + request.output_tokens - 1 == chunk.start + chunk.tokens:
                self._kv_there_s.pop(request, None)  # this forward gives its last token
            else:
                there_s = self.fabric.send(
                    self.env.now, self.seats.prefill, self.seats.verify, self.cargo.kv(chunk.tokens)
                )
                self._kv_there_s[request] = there_s

    def _at(self, time_s: float, what: Callable[[], None]) -> None:
        event = Event(self.env)
        event.callbacks.append(lambda _: what())
        self.env.at(time_s, event)
