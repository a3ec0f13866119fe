"""One experiment on simulated time: build the servers, let the requests arrive, keep what happened."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
from simpy.core import EmptySchedule
from simpy.events import Event

from pdvsim.sim.config import BESIDE, ONE_LANE, Acceptance, Experiment, Hardware, Server
from pdvsim.sim.core import ModelSpec, Pair, Request, Role, Work
from pdvsim.sim.hardware.contention import Sharing
from pdvsim.sim.hardware.host import HostTimes, SimulatedHost, WatchedHost
from pdvsim.sim.hardware.latency import Latency
from pdvsim.sim.hardware.models import gpu
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.hardware.profile import Profile, builtin, covering, load, roofline
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.device import SimulatedGPU
from pdvsim.sim.machine.kv import KvCache, capacity_tokens
from pdvsim.sim.machine.node import Node
from pdvsim.sim.metrics.streaming import Tally
from pdvsim.sim.policies import policy_of
from pdvsim.sim.policies.base import Context, Policy
from pdvsim.sim.policies.controllers import Controller, Goodput
from pdvsim.sim.policies.feedback import Feedback
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.records import Keeper, Log, Reader, Result
from pdvsim.sim.relevance import refuse_idle
from pdvsim.sim.workload.acceptance import Coins, accepted_at, rate_at
from pdvsim.sim.workload.requests import Workload

STUCK_SHOWN = 10  # requests named when nothing moves any more


def simulate(
    experiment: Experiment,
    progress: Callable[[int], None] | None = None,
    direct: bool = True,
    requests: list[Request] | Workload | None = None,
    profile: Profile | None = None,
    traced: bool = False,
) -> Result:
    """Run an experiment; `direct=False` sends everything through the event queue, with the same result.

    `profile` stands in for the experiment's own, as when its error bar is asked for. `traced` keeps what a timeline
    shows beside the rows: whom each launch carried, and what the host did.
    """
    refuse_idle([experiment])
    if profile is None:
        profile = covering_profile(experiment)
    if requests is None:
        requests = Workload(experiment.traffic, experiment.acceptance)
    log = Log.of_everything() if traced else Log()
    env = Clock(direct and not traced)  # on the short cut the host is not asked
    site = Site(env, experiment, profile, log)
    if isinstance(requests, Workload) and experiment.scoring.detailed:
        requests.check_total()
    site.check([requests.largest()] if isinstance(requests, Workload) else requests)
    keeper, tally = Keeper(log), None
    if not experiment.scoring.detailed:
        bandwidth, reaches = profile.gpu.bandwidth_bytes_per_s, profile.reaches(site.pair)
        tally = Tally(experiment, len(requests), bandwidth, log, site.settled_s, reaches)
    client = Client(env, requests, experiment, Door(site, tally or keeper), progress)
    with no_collector():
        client.run()
    metrics = None if tally is None else tally.close()
    keeper.take(env.now)
    return Result(
        experiment, keeper.requests(), keeper.deliveries, keeper.launches, site.meta(), metrics,
        log.launches.carried, log.host,
    )  # fmt: skip


class Door:
    """In front of a site: whoever reads its log learns of the requests that go in and out."""

    def __init__(self, site: Site, reader: Reader) -> None:
        self.on_finish: Callable[[Request], None] = lambda request: None
        self._site, self._reader, self.servers = site, reader, site.servers
        site.on_finish = self._finished

    def route(self, request: Request) -> Policy:
        self._reader.arrived(request)
        return self._site.route(request)

    def _finished(self, request: Request) -> None:
        self._reader.finished(request)
        self.on_finish(request)


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


def profile_of(experiment: Experiment) -> Profile:
    """The profile an experiment runs on."""
    hardware = experiment.hardware
    if hardware.profile == "roofline":
        return roofline(gpu(hardware.gpu))
    if not hardware.profile:
        return builtin(hardware.gpu)
    found = load(hardware.profile)
    if hardware.gpu not in (Hardware.gpu, found.gpu.name):
        raise ValueError(f"--profile {hardware.profile} is of {found.gpu.name}, not of --gpu {hardware.gpu}")
    return found


def covering_profile(experiment: Experiment) -> Profile:
    """The same with both models of the pair, predicted where the profile lacks them."""
    pair = named_pair(experiment.server.pair)
    if not experiment.speculates:
        pair = Pair(pair.target, pair.target)  # its drafter is never run
    profile = profile_of(experiment)
    if profile.whole_steps:
        if experiment.kin not in ONE_LANE:
            raise ValueError(
                f"profile {profile.name} has {profile.foundation}: it knows {' and '.join(ONE_LANE)}, and nothing of "
                f"lanes side by side as {experiment.arch} has them"
            )
        for spec in (pair.draft, pair.target):
            profile.fit(spec)  # a step of a model that was not in it cannot be told from the others'
    return covering(profile, pair)


def bar_of(experiment: Experiment, profile: Profile) -> float:
    """The error bar of an experiment's forward times: the wider of its models'; 0 where both were measured."""
    return max(profile.uncertainty.get(model.name, 0.0) for model in models_of(experiment))


def models_of(experiment: Experiment) -> list[ModelSpec]:
    """The models that an experiment runs."""
    pair = named_pair(experiment.server.pair)
    return [pair.draft, pair.target] if experiment.speculates else [pair.target]


def host_times(experiment: Experiment, profile: Profile) -> HostTimes:
    """The host's costs: the experiment's own figures, else the profile's."""
    host, measured = experiment.host, profile.host
    return HostTimes(
        launch_s=measured.launch_s if host.launch_s is None else host.launch_s,
        completion_s=measured.completion_s if host.completion_s is None else host.completion_s,
        handoff_s=measured.handoff_s if host.handoff_s is None else host.handoff_s,
        idle_poll_s=host.idle_poll_s,
        idle_poll_cost_s=host.idle_poll_cost_s,
        notify_s=host.notify_s,
    )


def make_controller(settings: Server, planner: Planner) -> Controller:
    """The draft-length controller that the settings name."""
    if settings.controller == "feedback":
        return Feedback(settings)
    if settings.controller == "goodput":
        return Goodput(settings, planner)
    return Controller(settings)


def make_planner(experiment: Experiment, profile: Profile) -> Planner:
    """The latency model of an experiment's GPU, to plan with."""
    pair, settings = named_pair(experiment.server.pair), experiment.server
    models: dict[Role, Latency] = {"target": Latency(pair.target, profile.fit(pair.target))}
    if experiment.speculates:
        models["draft"] = Latency(pair.draft, profile.fit(pair.draft))
    shares = dict(zip(BESIDE, settings.partition, strict=True))
    sharing = Sharing(experiment.hardware.contention, settings.priority, profile.contention, shares, settings.weights())
    peak = (profile.gpu.flops_per_s, profile.gpu.bandwidth_bytes_per_s)
    return Planner(models, sharing, peak, host_times(experiment, profile), policy_of(experiment.arch).hands_over)


def kv_capacity(experiment: Experiment, profile: Profile, pair: Pair) -> int:
    """Tokens of KV cache that a server has, of whichever GPU has the least room."""
    hardware = experiment.hardware
    if hardware.kv_capacity_tokens is not None:
        return hardware.kv_capacity_tokens
    placed: list[list[ModelSpec]]
    if not experiment.speculates:
        placed = [[pair.target]]
    elif hardware.verify_gpu:
        placed = [[pair.draft], [pair.target]]
    else:
        placed = [[pair.draft, pair.target]]
    return min(capacity_tokens(profile.gpu, models, hardware.gpu_memory_utilization) for models in placed)


def drawn_verdict(acceptance: Acceptance, work: Work) -> list[int] | None:
    """How many of each row's drafts the target accepts, by the coins drawn before the run."""
    if work.role == "draft":
        return None
    if not acceptance.acceptance_temperature_slope:
        return [k if (run := row.runs[row.emitted]) > (k := row.k) else run for row in work.rows]
    verdict = []
    for row in work.rows:
        assert isinstance(row.coins, Coins)
        rate = rate_at(acceptance, row.coins.rate, row.temperature)
        verdict.append(accepted_at(row, row.k, rate) if row.k else 0)
    return verdict


def check_context(models: Iterable[ModelSpec], requests: Sequence[Request]) -> None:
    """Refuse a request that is longer than a model's context."""
    known = [(limit, model.name) for model in models if (limit := model.max_position_embeddings) is not None]
    longest = max(requests, key=lambda request: request.prompt_tokens + request.output_tokens)
    tokens = longest.prompt_tokens + longest.output_tokens
    if known and tokens > min(known)[0]:
        limit, name = min(known)
        raise ValueError(
            f"request {longest.id} has {tokens} tokens and the context of {name} ends at {limit}: lower --input-len or "
            "--output-len, or choose a --pair of longer context"
        )


def check_kv(kv: KvCache, requests: Sequence[Request]) -> None:
    """Refuse a request that the KV cache could never hold."""
    if not kv.capacity_tokens:
        raise ValueError(
            "the models' weights leave no room for a KV cache on this GPU: choose a larger card or smaller models"
        )
    largest = max(requests, key=kv.need)
    if kv.need(largest) > kv.capacity_tokens:
        raise ValueError(
            f"request {largest.id} needs {kv.need(largest)} tokens of KV cache and the server has "
            f"{kv.capacity_tokens}: lower --input-len or --output-len, or raise --gpu-memory-utilization"
        )


class Site:
    """The servers behind the router."""

    def __init__(self, env: Clock, experiment: Experiment, profile: Profile, log: Log) -> None:
        self.env = env
        self.experiment = experiment
        self.profile = profile
        self.log = log
        self.pair = named_pair(experiment.server.pair)
        self.capacity_tokens = kv_capacity(experiment, profile, self.pair)
        self.on_finish: Callable[[Request], None] = lambda request: None
        self.servers: list[Policy] = []
        self.gpus: list[SimulatedGPU] = []
        self._turn = 0
        self._rng = np.random.default_rng([experiment.traffic.seed, 7])
        for replica in range(experiment.hardware.replicas):
            self.servers.append(self._server(env, replica))

    def _server(self, env: Clock, replica: int) -> Policy:
        experiment, profile = self.experiment, self.profile
        settings, hardware = experiment.server, experiment.hardware
        planner = make_planner(experiment, profile)
        host = SimulatedHost(times := host_times(experiment, profile))
        if (spans := self.log.host) is not None:
            host = WatchedHost(times, lambda what, start_s, end_s: spans.append((replica, what, start_s, end_s)))
        verdict = partial(drawn_verdict, experiment.acceptance)
        gpus = [
            SimulatedGPU(
                env, host, planner.models, planner.sharing, self.log.launches, verdict, planner.peak,
                replica, gpu, hardware.transfer_s if gpu else 0.0,
            )
            for gpu in range(1 + hardware.verify_gpu)
        ]  # fmt: skip
        self.gpus += gpus
        context = Context(
            env=env,
            device=gpus[0] if len(gpus) == 1 else Node(env, host, {"draft": gpus[0], "target": gpus[1]}),
            settings=settings,
            controller=make_controller(settings, planner),
            planner=planner,
            kv=KvCache(self.capacity_tokens, experiment.longest_draft, experiment.paged),
            deliveries=self.log.deliveries,
            on_finish=lambda request: self.on_finish(request),
        )
        policy: Policy = policy_of(experiment.arch)(context)
        return policy

    def check(self, requests: Sequence[Request]) -> None:
        """Refuse what could never be served."""
        check_context(models_of(self.experiment), requests)
        check_kv(self.servers[0].kv, requests)

    def route(self, request: Request) -> Policy:
        """The server that takes a request."""
        servers, router = self.servers, self.experiment.hardware.router
        if len(servers) == 1:
            at = 0
        elif router == "least-loaded":
            at = min(range(len(servers)), key=lambda i: servers[i].in_flight + len(servers[i].waiting))
        elif router == "random":
            at = int(self._rng.integers(len(servers)))
        else:
            at, self._turn = self._turn, (self._turn + 1) % len(servers)
        request.replica = at
        return servers[at]

    def settled_s(self) -> float:
        """Until when every launch that began is in the log."""
        running = (job.start_s for gpu in self.gpus for job in gpu.running if job.start_s >= 0)
        now_s: float = self.env.now
        return min(now_s, *running, math.inf)

    def meta(self) -> dict[str, Any]:
        """Where the records came from."""
        gpu = self.profile.gpu
        return {
            "clock": "simulated",
            "profile": self.profile.name,
            "foundation": self.profile.foundation,
            "provenance": self.profile.provenance,
            **({"forward_error_bar": bar} if (bar := bar_of(self.experiment, self.profile)) else {}),
            "gpu": gpu.name,
            "gpus": self.experiment.hardware.replicas * (1 + self.experiment.hardware.verify_gpu),
            "bandwidth_bytes_per_s": gpu.bandwidth_bytes_per_s,
            "flops_per_s": gpu.flops_per_s,
            "kv_capacity_tokens": self.capacity_tokens,
            "kv_peak_tokens": max(server.kv.peak_tokens for server in self.servers),
            "reaches": self.profile.reaches(self.pair),
        }


class Servers(Protocol):
    """What a client sees of a site, simulated or real."""

    on_finish: Callable[[Request], None]
    servers: list[Policy]

    def route(self, request: Request) -> Policy: ...


class Client:
    """Sends the requests at their times, never more than `max_concurrency` at once, and counts them back in."""

    def __init__(
        self,
        env: Clock,
        requests: Collection[Request] | Workload,
        experiment: Experiment,
        site: Servers,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.env = env
        self.site = site
        self.progress = progress
        self.limit = experiment.traffic.max_concurrency
        self.left = len(requests)
        self.total = len(requests)
        self.inside: dict[int, Request] = {}  # sent, not finished
        self.held: Request | None = None  # due, but the limit is reached; those behind it are not drawn yet
        self._free = Event(env)  # nobody is held any more, and the next is due
        self._coming = iter(requests)
        self.all_done = Event(env)
        site.on_finish = self.finished
        env.process(self.arrivals())

    def run(self) -> None:
        """Until every request is served; a RuntimeError that says who waits where that can never be."""
        try:
            self.env.run_to(self.all_done)
        except EmptySchedule:
            waiting = sorted({lane.name for server in self.site.servers for lane in server.lanes if lane.waits})
            inside = list(self.inside)
            some = ", ".join(map(str, inside[:STUCK_SHOWN])) + (", …" if len(inside) > STUCK_SHOWN else "")
            raise RuntimeError(
                f"deadlock at {self.env.now:.6f} s: no work is under way; "
                f"lanes that wait: {', '.join(waiting) or 'none'}; "
                f"requests inside: {some or 'none'} ({len(inside)} in all, {self.left} of {self.total} not served)"
            ) from None

    def arrivals(self) -> Generator[Event, Any, None]:
        request = next(self._coming, None)
        while request is not None:
            if request.arrival_s > self.env.now:
                # one that arrives as a step ends is in time for the next
                yield self.env.at(request.arrival_s, Event(self.env), first=True)
            if self.limit is not None and len(self.inside) >= self.limit:
                self.held = request
                request = yield self._free
            else:
                self.send(request)
                request = next(self._coming, None)

    def send(self, request: Request) -> None:
        """As in vLLM, latency counts from the sending, not from when the request was due."""
        self.inside[request.id] = request
        request.arrival_s = self.env.now
        self.site.route(request).submit(request)

    def finished(self, request: Request) -> None:
        del self.inside[request.id]
        self.left -= 1
        if self.held is not None:
            self.send(self.held)
            self.held = next(self._coming, None)
            if self.held is not None and self.held.arrival_s > self.env.now:
                free, self._free = self._free, Event(self.env)
                self.env.at(self.held.arrival_s, free, self.held, first=True)
                self.held = None
        if self.progress is not None:
            self.progress(self.total - self.left)
        if not self.left:
            self.all_done.succeed()
