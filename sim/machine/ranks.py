"""Data-parallel ranks that step together: each serves its own requests, and the experts of a layer are shared by all.

A step begins when every rank has launched its part or has nothing to do, and takes as long as the slowest rank outside
the experts, and then the experts for the tokens of all (`prices.costs`). A rank without requests steps along: one
that arrives there during a step waits for its end. Drafts come before the target's forwards on all ranks, so that a
rank with a shorter draft, or none, waits for the longest.

Not modelled: padding of all ranks to the tokens of the fullest, and rounds that are simulated in one go.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Role
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import Job, SimulatedGPU
from pdvsim.sim.machine.ledger import Ledger
from pdvsim.sim.machine.node import Device
from pdvsim.sim.prices.costs import Price, Routed, together

PHASES: tuple[Role, ...] = ("draft", "target")  # of a step, in order


class RankGroup:
    """The ranks of one server: it gathers their launches and starts those of a step together."""

    def __init__(self, env: Clock) -> None:
        self.env = env
        self._launched: dict[RankGPU, list[Job]] = {}  # for the next step; the last of a rank's is awaited by its host
        self._stepping: set[RankGPU] = set()  # ranks that have not reported their next launch
        self._begins = False  # a step is about to begin
        self.steps = 0  # that have begun

    def add(self, rank: RankGPU, job: Job) -> None:
        """A rank has launched; its part of a step ends with what its host waits for."""
        self._launched.setdefault(rank, []).append(job)
        if job.launch.watched:
            self._agree()

    def _agree(self) -> None:
        """Begin a step once no rank is left in the last one."""
        if not self._stepping and not self._begins and self._ready():
            self._begins = True
            begin = Event(self.env)
            begin.callbacks.append(lambda _: self._begin())
            self.env.at(self.env.now, begin)  # after the launches of other ranks at the same time

    def _ready(self) -> dict[RankGPU, list[Job]]:
        return {rank: jobs for rank, jobs in self._launched.items() if jobs[-1].launch.watched}

    def _begin(self) -> None:
        ready, self._begins, start_s = self._ready(), False, self.env.now
        self.steps += 1
        for role in PHASES:
            part = {rank: job for rank, jobs in ready.items() for job in jobs if job.launch.role == role}
            if part:
                start_s = self._start(part, start_s)
        for rank, jobs in ready.items():
            del self._launched[rank]
            self._stepping.add(rank)
            # after the policy's own wait for it: by then the rank has launched again, or has nothing to do
            jobs[-1].callbacks.append(partial(self._noticed, rank))

    def _start(self, jobs: dict[RankGPU, Job], start_s: float) -> float:
        """Start one launch on each of these ranks when all hosts have launched theirs; returns when they end."""
        start_s = max(start_s, *(job.ready_s for job in jobs.values()))
        prices = joint_prices([(rank, job.launch) for rank, job in jobs.items()])
        for (rank, job), price in zip(jobs.items(), prices, strict=True):
            rank.start(job, price, start_s)
        return start_s + prices[0].seconds

    def _noticed(self, rank: RankGPU, _: Event) -> None:
        self._stepping.discard(rank)
        self._agree()


class RankGPU(SimulatedGPU, Device):
    """One rank, as its policy sees it: a GPU or tensor-parallel group whose launches wait for the other ranks."""

    def __init__(self, group: RankGroup, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._group = group
        self.own_ledger = Ledger({role: model.own for role, model in self.ledger.models.items()}, self.ledger.log)

    def launch(self, launch: Launch) -> Event:
        """Hold a launch until the next step."""
        if self.lookup is not None and launch.role == "draft":
            return self._look_up(launch, self.lookup)
        launch_s = self.host.times.launched_s(launch.enters())
        job = Job(self, launch, self.host.spend(self.env.now, launch_s, "launch"))
        self._group.add(self, job)
        return job

    def start(self, job: Job, price: Price, start_s: float) -> None:
        """Put a launch on its stream, to begin at `start_s` and to take as long as its step does."""
        job.price, job.solo_s, job.ready_s = price, price.seconds, start_s
        self.enter(job)

    def routed(self, launch: Launch) -> list[Routed]:
        """Return the tokens that a launch sends to shared experts."""
        prompts = [(chunk.start, chunk.tokens) for chunk in launch.chunks]
        model = self.ledger.models[launch.role]
        return model.routed(len(launch.rows), launch.tokens, launch.steps, prompts, launch.packed)


def joint_prices(launches: Sequence[tuple[RankGPU, Launch]]) -> list[Price]:
    """Prices of launches of one role that ranks run together, one on each."""
    own = [rank.own_ledger.price(launch) for rank, launch in launches]
    rank, launch = launches[0]
    model = rank.ledger.models[launch.role]
    shared = model.shared([rank.routed(launch) for rank, launch in launches])
    carries = any(launch.chunks for _, launch in launches)
    return together(own, shared, model.terms.least_s if carries else 0.0)
