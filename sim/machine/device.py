"""The simulated GPU: launches queue on streams, and the heads of the streams run concurrently and slow each other.

Each stream is a FIFO. Progress rates are solved again at every start and finish (`contention`), so progress is
piecewise linear. One host thread launches and completes. It does one thing at a time, so launches become ready in
order, and the state can advance to the next start without missing one. A completion costs the host a fixed time and,
on profiles that measured it, a time per row.

Drafts that are looked up take host time instead of GPU time, and rows get one only where it is found, of any length.

Not modelled: memory allocation, graph capture, and other host costs that depend on the batch.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from math import inf
from operator import attrgetter

from simpy.events import NORMAL, Event

from pdvsim.sim.core import Role
from pdvsim.sim.machine.batch import Launch
from pdvsim.sim.machine.clock import NEVER, Clock
from pdvsim.sim.machine.ledger import Ledger
from pdvsim.sim.prices.contention import Sharing
from pdvsim.sim.prices.costs import CostModel, Load
from pdvsim.sim.prices.host import SimulatedHost
from pdvsim.sim.prices.power import Draw, Power, PowerFit
from pdvsim.sim.records import Launches
from pdvsim.sim.workload.lookup import Lookup

_ready = attrgetter("ready_s")

Verdict = Callable[[Launch], "Sequence[int] | None"]


class Job(Event, Load):
    """A launch on its stream. Its demand on the GPU is computed only if another launch shares it."""

    device: SimulatedGPU
    remaining_s: float  # at rate 1, as of the GPU's state time
    layer_s = -1.0
    start_s = -1.0
    draw: Draw  # where the card's power is modelled

    def __init__(self, device: SimulatedGPU, launch: Launch, ready_s: float) -> None:
        self.env = device.env
        self.callbacks = []
        self.device = device
        self.launch = launch
        self.ready_s = ready_s  # launched by the host
        self.price = price = device.ledger.price(launch)
        self.solo_s = price.seconds


class SimulatedGPU:
    """One GPU. A launch is an event that fires when the host notices its completion; its value is the verdict."""

    def __init__(
        self,
        env: Clock,
        host: SimulatedHost,
        models: dict[Role, CostModel],
        sharing: Sharing,
        log: Launches,
        verdict: Verdict,
        peak: tuple[float, float],
        replica: int = 0,
        gpu: int = 0,
        power: PowerFit | None = None,
        lookup: Lookup | None = None,
    ) -> None:
        self.lookup = lookup  # None: drafts are not looked up
        self.env = env
        self.host = host
        self.ledger = Ledger(models, log, replica, gpu)
        self.sharing = sharing
        self.verdict = verdict
        self.flops_per_s, self.bytes_per_s = peak
        self.power = Power(power, self.bytes_per_s) if power is not None else None
        self.flop_factors = {role: power.flop_factor(model.spec) if power else 1.0 for role, model in models.items()}
        self.mean_w = power.rest_w if power is not None else 0.0  # drawn lately, as of `time_s`
        self.streams: dict[str, deque[Job]] = defaultdict(deque)
        self.fresh: list[Job] = []  # launched, not on their streams yet
        self.running: list[Job] = []  # heads of their streams that have started
        self.coming: list[Job] = []  # heads that the host has yet to launch, in the order it will
        self.time_s = 0.0  # `remaining_s` and the rates are as of then
        self.due = NEVER  # the next finish
        self._next_to_finish: Job | None = None
        env.machines.append(self)

    def launch(self, launch: Launch) -> Event:
        """Put a launch on its lane's stream."""
        host, env = self.host, self.env
        if self.lookup is not None and launch.role == "draft":
            return self._look_up(launch, self.lookup)
        job = Job(self, launch, host.spend(env._now, host.times.launched_s(launch.enters()), "launch"))
        if not self.fresh:
            env.launched.append(self)
        self.fresh.append(job)
        return job

    def _look_up(self, launch: Launch, lookup: Lookup) -> Event:
        """Let the host look up drafts; rows without a match get none."""
        env, host = self.env, self.host
        solo_s = self.ledger.models["draft"].price(len(launch.rows)).seconds(launch.context)
        done_s = host.spend(env._now, solo_s, "lookup")
        for row in launch.rows:
            row.taken.draft_s += solo_s
            row.state.k = lookup.length(row, row.state.k)
            row.state.missed = not row.state.k
        done = Event(env)
        return env.at(done_s, done) if launch.watched else done

    def enter(self, job: Job) -> None:
        """Put a launch on its lane's stream that was launched before, and is ready now."""
        if not self.fresh:
            self.env.launched.append(self)
        self.fresh.append(job)

    # as the clock drives it ------------------------------------------------------------------------------------

    @property
    def ready_s(self) -> float:
        """When the host has launched the first of what is not on its stream yet."""
        return self.fresh[0].ready_s

    def take_in(self) -> None:
        """Put what was launched on its stream."""
        for job in self.fresh:
            stream = self.streams[job.launch.lane]
            stream.append(job)
            job.remaining_s = job.solo_s
            if self.power is not None:
                job.draw = self.power.draw(job.price, self.flop_factors[job.launch.role])
            if len(stream) == 1:
                self.coming.append(job)
        self.fresh.clear()
        self._plan()

    def end_next(self) -> tuple[Job | None, float]:
        """Complete the launch that is due and start the next of its stream."""
        job, end = self._next_to_finish, self.due[0]
        assert job is not None
        running = self.running
        self._advance(end)
        running.remove(job)
        launch = job.launch
        stream = self.streams[launch.lane]
        stream.popleft()
        self.ledger.note(launch, job.start_s, end, job.price)
        ended, noticed_s = None, end
        if launch.watched:
            ended, noticed_s = job, self.host.spend(end, self.host.times.completed_s(len(launch.rows)), "completion")
            job._value = self.verdict(launch)
        if stream:
            following = stream[0]
            if following.ready_s <= end:
                running.append(following)
            else:
                insort(self.coming, following, key=_ready)
        self._share()
        self._plan()
        return ended, noticed_s

    # which launches run, and how fast ---------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Run ahead through the coming starts to the next finish."""
        running, coming = self.running, self.coming
        while True:
            finish, first = inf, None
            for job in running:
                if job.rate > 0:
                    at = self.time_s + job.remaining_s / job.rate
                    if at < finish:
                        finish, first = at, job
            if not coming or coming[0].ready_s >= finish:
                break
            job = coming.pop(0)
            if job.ready_s > self.time_s:
                self._advance(job.ready_s)
            running.append(job)
            self._share()
        if first is None:
            self.due = NEVER
        elif first is not self._next_to_finish or finish != self.due[0]:
            self.due = (finish, NORMAL, self.env.number())
        self._next_to_finish = first

    def _share(self) -> None:
        """Recompute the rates after a change of running launches."""
        running = self.running
        if len(running) == 1:
            running[0].rate = 1.0
        elif running:
            for job in running:
                if job.layer_s < 0:
                    self.demand(job)
            self.sharing.solve(running)
        for job in running:
            if job.start_s < 0 and job.rate > 0:  # at the head of its stream it may still be held back
                job.start_s = self.time_s
                if self.power is not None:
                    job.remaining_s = self.power.taken_s(self.mean_w, job.draw, job.solo_s)

    def demand(self, job: Job) -> None:
        """Compute the demand of a launch on the GPU, for the launches that share it."""
        launch = job.launch
        model, peak = self.ledger.models[launch.role], (self.flops_per_s, self.bytes_per_s)
        job.priority = launch.priority
        prompts = [(chunk.start, chunk.tokens) for chunk in launch.chunks]
        model.demand(
            job, peak, job.price.bytes, job.price.flops, len(launch.rows), launch.tokens, launch.steps, prompts
        )

    def _advance(self, time_s: float) -> None:
        """Advance the running launches to `time_s`, and the mean power with their draw."""
        power, elapsed = self.power, time_s - self.time_s
        if power is None:
            for job in self.running:
                job.remaining_s -= elapsed * job.rate
        else:
            rest_w, more_w = power.fit.rest_w, 0.0
            for job in self.running:
                rate = job.rate
                more_w += rate * (job.draw.watts - rest_w)
                job.remaining_s -= elapsed * rate
            if elapsed > 0.0:
                self.mean_w = power.mean_w(self.mean_w, elapsed, rest_w + more_w)
        self.time_s = time_s
