"""The simulated GPU: works queue on streams, the stream heads run together and slow each other, the host sets the pace.

Each stream is a FIFO. What runs is re-solved at every start and finish (`contention`), so progress is piecewise
linear. One host thread launches and completes; since it does one thing at a time, works become ready in launch order,
and the state can be run ahead to the next start without missing one.

Not modelled: memory allocation, graph capture, and host costs that depend on the batch.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from math import inf
from operator import attrgetter

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.contention import Sharing
from pdvsim.sim.core import KINDS, Role, Work
from pdvsim.sim.host import SimulatedHost
from pdvsim.sim.latency import Latency
from pdvsim.sim.records import LANES, Table, launch_code

LANE_CODE = {name: i for i, name in enumerate(LANES)}
KIND_CODE: dict[str, int] = {name: i for i, name in enumerate(KINDS)}
ROLE_CODE: dict[Role, int] = {"draft": 0, "target": 1}

_ready = attrgetter("ready_s")

Verdict = Callable[[Work], "list[int] | None"]


class Job:
    """A work on its way through a stream."""

    __slots__ = (
        "bandwidth", "bytes", "compute", "context", "done", "flops", "kind", "lane", "nimble",
        "priority", "rate", "ready_s", "remaining_s", "share", "solo_s", "start_s", "turn_s", "work",
    )  # fmt: skip

    def __init__(
        self, work: Work, done: Event | None, ready_s: float, solo_s: float, moved: float, flops: float, context: int
    ) -> None:
        self.work = work
        self.done = done
        self.kind: str = work.kind
        self.lane = work.lane
        self.priority = work.priority
        self.ready_s = ready_s  # launched by the host
        self.solo_s = solo_s
        self.remaining_s = solo_s  # at rate 1, as of the GPU's state time
        self.bytes = moved
        self.flops = flops
        self.context = context
        self.compute = 0.0
        self.bandwidth = 0.0
        self.turn_s = 0.0
        self.nimble = False
        self.share = 0.0
        self.rate = 0.0
        self.start_s = -1.0


class Tick(Event):
    """Wakes a GPU up at its next finish."""

    def __init__(self, gpu: SimulatedGPU) -> None:
        super().__init__(gpu.env)
        self.gpu = gpu
        self.callbacks = [gpu.on_tick]


class SimulatedGPU:
    """One GPU. A launch's event happens when the host has noticed its completion; its value is the verdict."""

    def __init__(
        self,
        env: Clock,
        host: SimulatedHost,
        models: dict[Role, Latency],
        sharing: Sharing,
        log: Table,
        verdict: Verdict,
        peak: tuple[float, float],
        replica: int = 0,
        gpu: int = 0,
        transfer_s: float = 0.0,
    ) -> None:
        self.env = env
        self.host = host
        self.models = models
        self.sharing = sharing
        self.log = log
        self.verdict = verdict
        self.flops_per_s, self.bytes_per_s = peak
        self.replica = replica
        self.gpu = gpu
        self.transfer_s = transfer_s  # to reach this GPU from the one that drafts
        self.streams: dict[str, deque[Job]] = {}
        self.running: list[Job] = []  # heads of their streams that have started
        self.coming: list[Job] = []  # heads that the host has yet to launch, in the order it will
        self.time_s = 0.0  # `remaining_s` and the rates are as of then
        self._tick: Tick | None = None
        self._finish_s = inf
        self._next: Job | None = None  # finishes at the tick

    def price(self, work: Work) -> tuple[float, float, float, int]:
        """Seconds alone, bytes moved and flops of a work, and the cached tokens of its rows."""
        context = 0
        for row in work.rows:
            context += row.context
        model, tokens = self.models[work.role], work.tokens
        solo = moved = flops = 0.0
        if tokens > 2 and work.role == "draft":
            solo, _, moved, _, flops, _ = model.behind(work.rows)
            tokens = 2 if any(row.owed == 1 for row in work.rows) else 1
        if work.chunks:
            shape = model.carrying(len(work.rows), tokens, work.steps, work.chunks, work.role == "target")
        else:
            shape = model.shape(len(work.rows), tokens, work.steps)
        solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = shape
        return (
            solo + solo_0 + solo_1 * context,
            moved + bytes_0 + bytes_1 * context,
            flops + flops_0 + flops_1 * context,
            context,
        )

    def job(self, work: Work, ready_s: float, done: Event | None = None) -> Job:
        """The work as it will go through its stream."""
        solo, moved, flops, context = self.price(work)
        job = Job(work, done, ready_s, solo, moved, flops, context)
        if solo > 0:
            job.compute = min(1.0, flops / (solo * self.flops_per_s))
            job.bandwidth = min(1.0, moved / (solo * self.bytes_per_s))
        model = self.models[work.role]
        job.turn_s = solo / (work.steps * model.spec.layers)
        if model.fit.nimble_tokens:
            width = work.tokens if work.steps == 1 else 1
            job.nimble = model.nimble(len(work.rows), width, sum(chunk.tokens for chunk in work.chunks))
        return job

    def launch(self, work: Work, now_s: float, done: Event | None = None) -> Event:
        """Put a work on its lane's stream."""
        if done is None:
            done = Event(self.env)
        job = self.job(work, self.host.spend(now_s, self.host.times.launch_s) + self.transfer_s, done)
        stream = self.streams.get(work.lane)
        if stream is None:
            stream = self.streams[work.lane] = deque()
        stream.append(job)
        if len(stream) == 1:
            self.coming.append(job)
            self._plan()
        return done

    def resume(self, job: Job, time_s: float, remaining_s: float) -> None:
        """The only running work has got this far beside rounds that were foreseen."""
        self.time_s = time_s
        job.remaining_s = remaining_s
        self._plan()

    def _plan(self) -> None:
        """Run ahead through the coming starts to the next finish, and wake up then."""
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
        if finish == self._finish_s and first is self._next:
            return
        self._finish_s, self._next = finish, first
        if first is None:
            self._tick = None
            return
        self._tick = Tick(self)
        self.env.at(finish, self._tick)

    def _share(self) -> None:
        """What runs has changed: set the rates anew."""
        running = self.running
        if len(running) == 1 and self.sharing.alone_is_full:
            running[0].rate = 1.0
        elif running:
            self.sharing.solve(running)
        for job in running:
            if job.start_s < 0 and job.rate > 0:  # at the head of its stream it may still be held back
                job.start_s = self.time_s

    def _advance(self, time_s: float) -> None:
        """Bring the running works' progress up to `time_s`."""
        elapsed = time_s - self.time_s
        for job in self.running:
            job.remaining_s -= elapsed * job.rate
        self.time_s = time_s

    def on_tick(self, tick: Event) -> None:
        """The next finish is due, unless it has moved since."""
        if tick is self._tick:
            self._finish()
            self._plan()

    def _finish(self) -> None:
        """Complete the work that is due, and start the next of its stream."""
        job, end = self._next, self._finish_s
        assert job is not None
        self._finish_s, self._next = inf, None
        self._advance(end)
        self.running.remove(job)
        stream = self.streams[job.lane]
        stream.popleft()
        work = job.work
        self.note(work, job.start_s, end, job.solo_s, job.bytes, job.flops, job.context)
        if work.watched:
            done = self.host.spend(end, self.host.times.completion_s)
            assert job.done is not None
            self.env.at(done, job.done, self.verdict(work))
        if stream:
            following = stream[0]
            if following.ready_s <= end:
                self.running.append(following)
            else:
                insort(self.coming, following, key=_ready)
        self._share()

    def note(
        self, work: Work, start_s: float, end_s: float, solo_s: float, moved: float, flops: float, context: int
    ) -> None:
        """Record a finished work, and its time with its requests."""
        rows = work.rows
        spent_ns = int((end_s - start_s) * 1e9)
        for chunk in work.chunks:
            if work.role == "target":  # the drafter reads behind it or beside it
                chunk.request.prefill_ns += spent_ns
        if work.kind == "draft":
            for row in rows:
                row.draft_ns += spent_ns
        else:
            for row in rows:
                row.verify_ns += spent_ns
        self.log.append((*self.row(work), context, start_s, end_s, solo_s, moved, flops))

    def row(self, work: Work) -> tuple[int, int, int, int, int]:
        """What a launch record says of a work, apart from its context and its times."""
        rows = len(work.rows)
        tokens, start = rows * (work.tokens + work.steps - 1), 0
        for chunk in work.chunks:
            tokens += chunk.tokens
            if chunk.start > start:
                start = chunk.start
        kind, role = KIND_CODE[work.kind], ROLE_CODE[work.role]
        code = launch_code(self.replica, self.gpu, LANE_CODE[work.lane], kind, role, work.steps, work.tokens)
        return code, rows, tokens, work.queue_depth, start
