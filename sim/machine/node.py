"""The hardware as a policy sees it, which launches on lanes; and a server with several GPUs.

A launch starts once its inputs from other GPUs have arrived: drafts for a verify, verdicts for
a draft, the KV cache of a prompt that was prefilled elsewhere. Inputs are sent when the host has launched; the KV cache
of a prompt when the host has noticed the end of its prefill. Prompts come with the launch, to every GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from simpy.events import Event

from pdvsim.sim.core import Placement, Request
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import Job, SimulatedGPU
from pdvsim.sim.prices.host import SimulatedHost
from pdvsim.sim.prices.links import Fabric, draft_bytes, verdict_bytes


class Device(Protocol):
    """What a policy may ask of its hardware, simulated or real."""

    host: SimulatedHost

    def launch(self, launch: Launch) -> Event:
        """Submit a launch; for a verify, the event's value is the number of accepted drafts per row."""

    def advance(
        self, batch: Batch, k: int, lanes: tuple[str, str], depth: int, enough: Callable[[Sequence[int]], bool] | None
    ) -> int:
        """Go through rounds of a batch, with k draft tokens each, that are over before anything else happens.

        Returns how many: none where the device takes them one by one. `lanes` are those of the draft and the verify.
        Where they differ the host sees the draft through, and hands the rows over to the other lane, and back. `depth`
        requests are queued in front of the first. `enough` is shown each round's verdict, and says whether it was the
        last. Room for the first round has been reserved.
        """
        return 0


class Node(Device):
    """The simulated GPUs of one server, driven by one host thread, as one device."""

    def __init__(
        self,
        env: Clock,
        host: SimulatedHost,
        gpus: Sequence[SimulatedGPU],
        placement: Placement,
        fabric: Fabric,
        kv_token_bytes: int,
        state_bytes: int = 0,
    ) -> None:
        """`kv_token_bytes` are a target GPU's of a token: each shard sends its own, by its own port.

        So are `state_bytes`, of a request.
        """
        self.env = env
        self.host = host
        self.gpus = gpus
        self.placement = placement
        self.fabric = fabric
        self.kv_token_bytes, self.state_bytes = kv_token_bytes, state_bytes
        self._last_launches: dict[str, tuple[Batch, list[Job]]] = {}  # rows and jobs, by lane
        self._last_ready_s: dict[tuple[int, str], float] = {}  # by GPU and lane
        self._kv_arrival_s: dict[Request, float] = {}  # of prompts prefilled elsewhere, until they are decoded
        self._next_drafter = 0

    def launch(self, launch: Launch) -> Event:
        """A verify waits for the draft of its rows on other GPUs, which the host sees through."""
        parts = self._parts(launch)
        gpu = self.gpus[parts[0][1]]
        rows, before = self._last_launches.get(launch.lane, (None, []))
        pending = [job for job in before if job.callbacks is not None and job.device is not gpu]
        if rows is not launch.rows or not pending:
            return self._launch(launch, parts)
        verdict = Event(self.env)

        def drafted(_: Event) -> None:
            self._launch(launch, parts).callbacks.append(verdict.trigger)

        for job in pending:
            job.launch.watched = True
        self._over(pending).callbacks.append(drafted)
        return verdict

    def _launch(self, launch: Launch, parts: list[tuple[Launch, int]]) -> Event:
        jobs = [self._start(part, at) for part, at in parts]
        self._last_launches[launch.lane] = launch.rows, jobs
        if launch.kind == "prefill" and launch.role == "target" and parts[0][1] != self.placement.verify:
            jobs[0].callbacks.append(lambda _: self._move_kv(launch, parts[0][1]))
        elif len(jobs) == 1:
            return jobs[0]
        return self._over(jobs)

    def _over(self, jobs: list[Job]) -> Event:
        """Happens when all of them have; not a job itself, whose callbacks the clock passes over where one waits."""
        last, left = Event(self.env), len(jobs)

        def one(job: Event) -> None:
            nonlocal left
            left -= 1
            if not left:
                last.trigger(job)

        for job in jobs:
            job.callbacks.append(one)
        return last

    def _parts(self, launch: Launch) -> list[tuple[Launch, int]]:
        """The GPU of a launch; a draft on several GPUs is one launch on each, with its own requests."""
        placement = self.placement
        if launch.role == "target":
            return [(launch, placement.prefill[launch.worker] if launch.kind == "prefill" else placement.verify)]
        if len(placement.draft) == 1:
            return [(launch, placement.draft[0])]
        parts = []
        for at in placement.draft:
            rows = Batch(row for row in launch.rows if self._drafter(row) == at)
            chunks = tuple(chunk for chunk in launch.chunks if self._drafter(chunk.request) == at)
            if rows or chunks:
                tokens = (
                    1 + max((row.state.drafter_lag for row in rows), default=0)
                    if launch.kind == "draft"
                    else launch.tokens
                )
                parts.append((replace(launch, rows=rows, chunks=chunks, tokens=tokens, context=-1, watched=True), at))
        return parts

    def _drafter(self, request: Request) -> int:
        """The GPU that drafts for a request and holds its KV; requests are assigned in turn."""
        if request.state.drafter < 0:
            request.state.drafter = self.placement.draft[self._next_drafter]
            self._next_drafter = (self._next_drafter + 1) % len(self.placement.draft)
        return request.state.drafter

    def _start(self, launch: Launch, at: int) -> Job:
        """Launch on a GPU; the launch enters its stream when all its inputs have arrived."""
        env, host = self.env, self.host
        job = Job(self.gpus[at], launch, host.spend(env.now, host.times.launched_s(launch.enters()), "launch"))
        self._at(job.ready_s, lambda: self._launched(job, at))
        return job

    def _launched(self, job: Job, at: int) -> None:
        """Send the inputs of a launch after the host has launched it."""
        launch, now = job.launch, self.env.now
        ready_s = max(now, self._last_ready_s.get((at, launch.lane), 0.0))  # a stream keeps its order
        for source, size in self._needs(launch):
            if source != at:
                ready_s = max(ready_s, self.fabric.send(now, source, at, size))
        if self._kv_arrival_s and launch.role == "target":
            ready_s = max([ready_s, *(self._kv_arrival_s.pop(row, 0.0) for row in launch.rows)])
        job.ready_s = self._last_ready_s[at, launch.lane] = ready_s
        if ready_s > now:
            self._at(ready_s, lambda: job.device.enter(job))
        else:
            job.device.enter(job)

    def _needs(self, launch: Launch) -> list[tuple[int, float]]:
        """The inputs of a launch, and their origin."""
        drafters = self.placement.draft
        if launch.kind == "verify":
            if len(drafters) == 1:
                return [(drafters[0], draft_bytes(sum(row.state.k for row in launch.rows)))]
            drafts = [(at, sum(row.state.k for row in launch.rows if self._drafter(row) == at)) for at in drafters]
            return [(at, draft_bytes(tokens)) for at, tokens in drafts if tokens]
        if launch.kind == "draft":
            # a lag of one token is the drafter's own last draft token
            lags = sum(row.state.drafter_lag for row in launch.rows if row.state.drafter_lag > 1)
            return [(self.placement.verify, verdict_bytes(len(launch.rows), lags))]
        return []

    def _move_kv(self, launch: Launch, at: int) -> None:
        """Send on what was read of prompts that will be decoded."""
        for chunk in launch.chunks:
            request = chunk.request
            if request.prompt_tokens + request.output_tokens - 1 == chunk.start + chunk.tokens:
                self._kv_arrival_s.pop(request, None)  # this forward gives its last token
            else:
                size = self.kv_token_bytes * chunk.tokens
                if chunk.start + chunk.tokens >= request.to_read:
                    size += self.state_bytes
                self._kv_arrival_s[request] = self.fabric.send(self.env.now, at, self.placement.verify, size)

    def _at(self, time_s: float, what: Callable[[], None]) -> None:
        event = Event(self.env)
        event.callbacks.append(lambda _: what())
        self.env.at(time_s, event)
