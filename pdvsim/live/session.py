"""A session: one to four architectures serve the same requests in step, with the same changes of settings.

A session is determined by its experiments and its actions, independent of its speed. So it can be run again with all
records. Settings can change while it runs, for all architectures. Not modelled: a rate that changes between two
requests.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from simpy.events import Event

from pdvsim.live.gauge import Gauge, LiveWindow
from pdvsim.sim.assembly import covering_profile, make_controller
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Acceptance, Arch, Experiment, Traffic
from pdvsim.sim.core import Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.prefix import BLOCK
from pdvsim.sim.policies import own_errors
from pdvsim.sim.records import Keeper, Log, Result
from pdvsim.sim.relevance import applicable, refuse_idle
from pdvsim.sim.run import Client, no_collector
from pdvsim.sim.workload.conversations import TURNS
from pdvsim.sim.workload.requests import Workload

MOST_ARCHS = 4
BURST = 50  # requests of a burst
KNOBS = (
    "request_rate", "burstiness", "dataset_name", "input_len", "output_len", "acceptance_rate",
    "num_speculative_tokens", "controller", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
Knobs = dict[str, Any]  # values of KNOBS; lengths of None are the data set's own
STEP_S = 0.25  # simulated time between readings, at most
SAMPLED_REQUESTS = 100_000  # then the next sample starts
CHUNK = 64  # requests sampled together; a change discards the rest
SEEDS = 1 << 53


@dataclass(frozen=True)
class Setup:
    """Start of a session: architectures, and the experiment that all of them run."""

    archs: tuple[Arch, ...]
    base: Experiment

    def __post_init__(self) -> None:
        if not 1 <= len(self.archs) <= MOST_ARCHS or len(set(self.archs)) < len(self.archs):
            raise ValueError(
                f"arch takes one to {MOST_ARCHS} architectures, each once, got {', '.join(self.archs) or 'none'}"
            )
        traffic, server = self.base.traffic, self.base.server
        if math.isinf(traffic.request_rate) or traffic.use_trace_timestamps:
            raise ValueError("live needs a finite --request-rate")
        if not server.longest_draft:
            raise ValueError("start with a draft length of at least 1; it can be set to 0 on the page")
        refuse_idle([replace(self.base, arch=arch) for arch in self.archs])

    @property
    def knobs(self) -> Knobs:
        """The settings at the start."""
        return {name: self.base.setting(name) for name in KNOBS}

    def turned(self, knobs: Knobs) -> Experiment:
        """The experiment with these settings; a ValueError of one line if it cannot have them."""
        traffic = self.base.traffic
        path = traffic.dataset_path if knobs["dataset_name"] == traffic.dataset_name else None
        changed = self.base.with_settings(**knobs, dataset_path=path, random_range_ratio=0.0)
        ratio = traffic.random_range_ratio if changed.traffic.fixed_lengths else 0.0
        return changed.with_settings(random_range_ratio=ratio)

    def experiments(self, knobs: Knobs) -> list[Experiment]:
        """One experiment per architecture with these settings; those without effect in it are ignored."""
        changed = self.turned(knobs)
        return [applicable(replace(changed, arch=arch)) for arch in self.archs]


@dataclass(frozen=True)
class Action:
    """An action at a simulated time: settings changed, or a burst sent."""

    at_s: float
    knobs: Knobs | None = None  # None: a burst


class Arrivals:
    """Requests sampled over time, numbered from 0; without a change they equal those of an ordinary run.

    A change starts a new sample, with its own seed, at the time of the change: pending requests of the old settings are
    dropped, and conversations that have begun continue. The turns of a conversation are drawn with its first one.
    """

    def __init__(self, traffic: Traffic, acceptance: Acceptance) -> None:
        self.sent = self._draws = 0
        self._last_s = 0.0
        self.change(traffic, acceptance, 0.0)

    def change(self, traffic: Traffic, acceptance: Acceptance, now_s: float) -> None:
        """Use this traffic from now on."""
        self._settings, self._from_s = (traffic, acceptance), now_s
        self._pending, self._crowd = self._sample(), self._sample()
        self._next = self._drawn()

    def until(self, time_s: float) -> list[Request]:
        """Requests up to a time, in order, each returned once."""
        requests: list[Request] = []
        while self._next.arrival_s <= time_s:
            requests.append(self._numbered(self._next, self._next.arrival_s))
            self._next = self._drawn()
        return requests

    def burst(self, count: int, now_s: float) -> list[Request]:
        """Further requests that arrive now, `count` of them."""
        return [self._numbered(next(self._crowd), now_s) for _ in range(count)]

    def _drawn(self) -> Request:
        request = next(self._pending, None)
        if request is None:
            self._from_s, self._pending = self._last_s, self._sample()
            request = next(self._pending)
        request.arrival_s += self._from_s
        self._last_s = max(self._last_s, request.arrival_s)
        return request

    def _sample(self) -> Iterator[Request]:
        """A new sample: its conversations and its requests' own texts, which have odd numbers, are in no other."""
        number, (traffic, acceptance) = self._draws, self._settings
        self._draws += 1
        seed = (traffic.seed + number * 1_000_003) % SEEDS
        for request in Workload(_ahead(replace(traffic, seed=seed)), acceptance, CHUNK):
            if request.session >= 0:
                request.session += number * SAMPLED_REQUESTS
            if number and request.chain:
                more = (0, 2 * number * SAMPLED_REQUESTS * TURNS)
                request.chain = tuple((end, text + more[text % 2]) for end, text in request.chain)
            yield request

    def _numbered(self, request: Request, arrival_s: float) -> Request:
        request.id, request.arrival_s = self.sent, arrival_s
        self.sent += 1
        return request


def _ahead(traffic: Traffic) -> Traffic:
    """The traffic of one sample; fewer conversations, as all are drawn first, for their mean number of turns."""
    return replace(traffic, num_prompts=SAMPLED_REQUESTS // 10 if traffic.converses else SAMPLED_REQUESTS)


def _copy_of(request: Request) -> Request:
    """A fresh copy of a request, for another server."""
    asked = request.arrival_s, request.prompt_tokens, request.output_tokens, request.accept_runs, request.chain
    return Request(request.id, *asked, request.think_s, session=request.session, turn=request.turn)


class PendingRequests(deque[Request]):
    """Requests to send; more may be added at any time."""

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if not self:
            raise StopIteration
        return self.popleft()


class Station:
    """One architecture: a cluster on simulated time that accepts new requests and settings while it runs.

    It keeps all records, or the metrics of the last seconds.
    """

    def __init__(self, experiment: Experiment, keep: bool) -> None:
        self.experiment = experiment
        self.env, self.log = Clock(), Log()
        # settings may change at any time, so rounds are simulated one by one
        self.cluster = Cluster(self.env, experiment, covering_profile(experiment), self.log, blocks=False)
        levels_s, replicas = experiment.scoring.slo(), experiment.hardware.replicas
        self.reader = Keeper(self.log) if keep else Gauge(self.log, levels_s, self.cluster.bandwidths, replicas)
        self._pending = PendingRequests()
        self.client = Client(self.env, self._pending, experiment, self.cluster, None, self.reader)

    def send(self, requests: Sequence[Request]) -> None:
        """Schedule copies of these requests."""
        self._pending.extend(map(_copy_of, requests))
        self.client.resume()

    def run_to(self, time_s: float) -> None:
        """Advance to a time; a gauge reads the new rows."""
        with own_errors(self.experiment.arch):
            self.env.run_to(self.env.at(time_s, Event(self.env)))
        if isinstance(self.reader, Gauge):
            self.reader.take(time_s)

    def change(self, experiment: Experiment) -> None:
        """Change settings from the next round on."""
        old, new = self.experiment.server, experiment.server
        drafts = ("num_speculative_tokens", "controller")
        for policy in self.cluster.servers:
            policy.settings = new
            if any(getattr(old, name) != getattr(new, name) for name in drafts):
                policy.controller = make_controller(new, policy.planner)
            policy.kv.lookahead = max(policy.kv.lookahead, experiment.longest_draft)
            policy.wake_prefill()
        self.experiment = experiment

    @property
    def in_system(self) -> int:
        return len(self.client.inside) + (self.client.held is not None) + len(self._pending)

    def state(self) -> dict[str, float]:
        """Metrics of this moment: requests here, use of the KV cache, queues, controller of the first server."""
        servers = self.cluster.servers
        used, capacity = (sum(getattr(s.kv, f"{n}_tokens") for s in servers) for n in ("used", "capacity"))
        metrics: dict[str, float] = {"in_system": self.in_system, "kv_share": used / max(1, capacity)}
        for server in servers:
            for name in dict.fromkeys(lane.name for lane in server.lanes):
                depth = len(server.waiting) if name == server.prefill_lane else server.backlog(name)
                metrics[f"lanes_{name}_queue"] = metrics.get(f"lanes_{name}_queue", 0) + depth
        if servers[0].speculates:
            seen = servers[0].controller.acceptance
            metrics |= {"last draft length": servers[0].controller.k}
            metrics |= {} if seen is None else {"controller: acceptance seen": seen}
        if any(len(server.kv.prefixes) for server in servers):
            shared = BLOCK * sum(server.kv.prefixes.shared for server in servers)
            unused = sum(min(s.kv.cached_tokens, s.kv.capacity_tokens - s.kv.used_tokens) for s in servers)
            tokens = {"shared by requests": shared, "of one request": used - shared, "cached, unused": unused}
            metrics |= {f"KV {words} (%)": 100 * count / max(1, capacity) for words, count in tokens.items()}
            metrics["evicted blocks"] = sum(server.kv.prefixes.evictions for server in servers)
        return metrics

    def served(self) -> Result:
        """The result of an ordinary run of the requests sent, served to their end."""
        with own_errors(self.experiment.arch):
            while self.in_system:
                self.env.step()
        keeper = self.reader
        assert isinstance(keeper, Keeper)
        keeper.take(self.env.now)
        traffic = replace(self.experiment.traffic, num_prompts=max(1, self.client.sent))
        ran = replace(self.experiment, traffic=traffic)
        return Result(ran, keeper.requests(), keeper.deliveries, keeper.launches, self.cluster.meta())


class Session:
    """Stations on one simulated clock, the source of their requests, and the actions so far."""

    def __init__(self, setup: Setup, keep: bool = False) -> None:
        self.setup, self.knobs = setup, setup.knobs
        self.arrivals = Arrivals(setup.base.traffic, setup.base.acceptance)
        self.stations = [Station(e, keep) for e in setup.experiments(self.knobs)]
        self.actions: list[Action] = []
        self.now_s = 0.0
        self._check(self.knobs)

    def advance(self, time_s: float) -> None:
        """Advance all stations to a time."""
        while self.now_s < time_s:
            self.now_s = min(time_s, self.now_s + STEP_S)
            coming = self.arrivals.until(self.now_s)
            for station in self.stations:
                station.send(coming)
                station.run_to(self.now_s)

    def change(self, knobs: Knobs) -> None:
        """Change settings from now on; a ValueError of one line if invalid, without effect."""
        if knobs == self.knobs:
            return
        self._check(knobs)
        old, new = map(self.setup.turned, (self.knobs, knobs))
        if (old.traffic, old.acceptance) != (new.traffic, new.acceptance):
            self.arrivals.change(new.traffic, new.acceptance, self.now_s)
        for station, experiment in zip(self.stations, self.setup.experiments(knobs), strict=True):
            station.change(experiment)
        self.knobs = knobs
        self.actions.append(Action(self.now_s, knobs))

    def burst(self) -> None:
        """Send a burst of requests."""
        crowd = self.arrivals.burst(BURST, self.now_s)
        for station in self.stations:
            station.send(crowd)
        self.actions.append(Action(self.now_s))

    def _check(self, knobs: Knobs) -> None:
        """Reject settings that some architecture does not support, or requests that it could never serve."""
        changed = self.setup.turned(knobs)
        largest = Workload(_ahead(changed.traffic), changed.acceptance, SAMPLED_REQUESTS).largest()
        self.setup.experiments(knobs)
        for station in self.stations:
            station.cluster.check([largest])

    def windows(self, window_s: float) -> list[LiveWindow]:
        """The last seconds of each architecture."""
        return [s.reader.window(self.now_s, window_s, s.state()) for s in self.stations if isinstance(s.reader, Gauge)]


def replay(setup: Setup, actions: Sequence[Action], until_s: float) -> list[Result]:
    """A session run again with all records; requests that arrived by `until_s` are served to their end."""
    session = Session(setup, keep=True)
    with no_collector():
        for action in actions:
            session.advance(action.at_s)
            if action.knobs is None:
                session.burst()
            else:
                session.change(action.knobs)
        session.advance(until_s)
        return [station.served() for station in session.stations]
