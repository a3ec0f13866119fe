"""One experiment on simulated time: build the servers, let the requests arrive, keep what happened.

The client sends the requests as they arrive, or when another is answered. The turns of a conversation are sent one
after the other: each once the one before is answered, after its think time, and not before its own time if it has one.
`max_concurrency` is the number of conversations that may be open.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from simpy.core import EmptySchedule
from simpy.events import Event

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.metrics.summary import Tally
from pdvsim.sim.policies import own_errors
from pdvsim.sim.policies.base import Policy
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.records import Keeper, Log, Reader, Result
from pdvsim.sim.relevance import refuse_idle
from pdvsim.sim.workload.requests import Workload

STUCK_SHOWN = 10  # requests named when nothing moves any more


def simulate(
    experiment: Experiment,
    progress: Callable[[int], None] | None = None,
    blocks: bool = True,
    requests: list[Request] | Workload | None = None,
    profile: Profile | None = None,
    traced: bool = False,
    end: int = 0,
) -> Result:
    """Run an experiment; `blocks=False` turns the fast path off, with the same result.

    `profile` stands in for the experiment's own. `end` is the end of the error bar to take predicted forward times at,
    +1 slow, -1 fast. `traced` also keeps what a timeline shows: the requests of each launch and the host's
    operations.
    """
    refuse_idle([experiment])
    profile = profile or covering_profile(experiment)
    if requests is None:
        requests = Workload(experiment.traffic, experiment.acceptance)
    env, log = Clock(), Log()
    if traced:
        log.launches.carried, log.host = [], []
    cluster = Cluster(env, experiment, profile, log, end, blocks)
    if isinstance(requests, Workload) and experiment.scoring.detailed:
        requests.check_total()
    cluster.check([requests.largest()] if isinstance(requests, Workload) else requests)
    keeper, tally = Keeper(log), None
    if not experiment.scoring.detailed:
        reaches = profile.reaches(experiment.pair)
        starts = (
            len(requests.arrival_s) if isinstance(requests, Workload) else sum(not request.turn for request in requests)
        )
        tally = Tally(experiment, len(requests), cluster.bandwidths, log, cluster.settled_s, reaches, starts)
    client = Client(env, requests, experiment, cluster, progress, tally or keeper)
    with own_errors(experiment.arch), no_collector():
        client.run()
    metrics = None if tally is None else tally.close()
    keeper.take(env.now)
    return Result(
        experiment, keeper.requests(), keeper.deliveries, keeper.launches, cluster.meta(), metrics,
        log.launches.carried, log.host,
    )  # fmt: skip


@contextmanager
def no_collector() -> Iterator[None]:
    """Spare a run Python's search for reference cycles: millions of rows are kept, and events leave no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Servers(Protocol):
    """What a client sees of a cluster, simulated or real."""

    on_finish: Callable[[Request], None]
    servers: list[Policy]

    def receive(self, request: Request) -> None: ...


class Client:
    """Sends the requests at their times, at most `max_concurrency` concurrently, and counts the finished ones.

    `reader` takes what happened to them out of the log.
    """

    def __init__(
        self,
        env: Clock,
        requests: Collection[Request] | Workload,
        experiment: Experiment,
        cluster: Servers,
        progress: Callable[[int], None] | None,
        reader: Reader | None = None,
    ) -> None:
        self.env = env
        self.cluster = cluster
        self.progress = progress
        self.reader = reader
        self.limit = experiment.traffic.max_concurrency
        self.left = len(requests)
        self.sent = 0
        self.total = len(requests)
        self.inside: dict[int, Request] = {}  # sent, not finished
        self.open = 0  # conversations, and requests that belong to none
        self._later_turns: dict[int, deque[Request]] = {}  # by open conversation
        self._numbers_requests = isinstance(requests, Workload)
        self.held: Request | None = None  # due, but the limit is reached; later ones are not drawn yet
        self._free = Event(env)  # no request is held any more, and the next is due
        self._coming = iter(requests)
        self.all_done = Event(env)
        cluster.on_finish = self.finished
        self._arriving = env.process(self.arrivals())

    def run(self) -> None:
        """Run until every request is served; in a deadlock a RuntimeError names what waits."""
        try:
            self.env.run_to(self.all_done)
        except EmptySchedule:
            waiting = sorted({lane.name for server in self.cluster.servers for lane in server.lanes if lane.waits})
            inside = list(self.inside)
            some = ", ".join(map(str, inside[:STUCK_SHOWN])) + (", …" if len(inside) > STUCK_SHOWN else "")
            raise RuntimeError(
                f"deadlock at {self.env.now:.6f} s: no launch is running; "
                f"waiting lanes: {', '.join(waiting) or 'none'}; "
                f"requests inside: {some or 'none'} ({len(inside)} in total, {self.left} of {self.total} not served)"
            ) from None

    def arrivals(self) -> Generator[Event, Any, None]:
        request = self._next()
        while request is not None:
            if request.arrival_s > self.env.now:
                # one that arrives as a step ends is in time for the next
                yield self.env.at(request.arrival_s, Event(self.env), first=True)
            if self.limit is not None and self.open >= self.limit:
                self.held = request
                request = (yield self._free) or self._next()
            else:
                self.send(request)
                request = self._next()

    def _next(self) -> Request | None:
        """The next request that waits for no answer; the turns before it are kept for later."""
        request = next(self._coming, None)
        while request is not None and request.session in self._later_turns:
            self._later_turns[request.session].append(request)
            request = next(self._coming, None)
        return request

    def resume(self) -> None:
        """Send what was added to the requests after the last of them was sent."""
        if not self._arriving.is_alive:
            self._arriving = self.env.process(self.arrivals())

    def send(self, request: Request) -> None:
        """Send a request. As in vLLM, latency counts from then, not from when it was due."""
        if request.session < 0:
            self.open += 1
        elif request.session not in self._later_turns:
            self.open += 1
            self._later_turns[request.session] = deque()
        if self._numbers_requests:
            request.id = self.sent
        self.sent += 1
        self.inside[request.id] = request
        request.arrival_s = self.env.now
        if self.reader is not None:
            self.reader.arrived(request)
        self.cluster.receive(request)

    def finished(self, request: Request) -> None:
        if self.reader is not None:
            self.reader.finished(request)
        del self.inside[request.id]
        self.left -= 1
        if request.session < 0 or not self._continues(request.session):
            self.open -= 1
        if self.held is not None and self.limit is not None and self.open < self.limit:
            self.send(self.held)
            self.held = self._next()
            if self.held is None or self.held.arrival_s > self.env.now:
                free, self._free = self._free, Event(self.env)
                due_s = self.env.now if self.held is None else self.held.arrival_s
                self.env.at(due_s, free, self.held, first=True)
                self.held = None
        if self.progress is not None:
            self.progress(self.total - self.left)
        if not self.left:
            self.all_done.succeed()

    def _continues(self, session: int) -> bool:
        """Send the next turn of a conversation when it is due; False if there is none."""
        later = self._later_turns[session]
        if not later:
            del self._later_turns[session]
            return False
        turn = later.popleft()
        due_s = max(turn.arrival_s, self.env.now + turn.think_s)
        if due_s > self.env.now:
            due = self.env.at(due_s, Event(self.env), first=True)
            due.callbacks.append(lambda _: self.send(turn))
        else:
            self.send(turn)
        return True
