"""One architecture of a session: the parts of a simulated run, driven from one time to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from simpy.events import Event

from pdvsim.live.arrivals import copy_of
from pdvsim.sim.assembly import covering_profile, make_controller
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.prefix import BLOCK
from pdvsim.sim.policies import own_errors
from pdvsim.sim.records import Log, Reader
from pdvsim.sim.run import Client


@dataclass(frozen=True)
class StationState:
    """What a page shows of a station at one time."""

    in_system: int = 0
    kv_share: float = 0.0  # of the KV cache in use
    queues: dict[str, int] = field(default_factory=dict)  # requests queued, by lane
    controller: dict[str, Any] = field(default_factory=dict)  # draft length and state of the first server's controller
    cache: dict[str, float] = field(default_factory=dict)  # shares of the KV cache by user, and evicted blocks


class PendingRequests(deque[Request]):
    """Requests to send; more may be added at any time."""

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if not self:
            raise StopIteration
        return self.popleft()


class Station:
    """A cluster on simulated time that accepts new requests and settings while it runs.

    `reader` creates the reader of the log.
    """

    def __init__(self, experiment: Experiment, reader: Callable[[Log, Cluster], Reader]) -> None:
        self.experiment = experiment
        self.env = Clock()
        self.log = Log()
        # settings may change at any time, so rounds are simulated one by one
        self.cluster = Cluster(self.env, experiment, covering_profile(experiment), self.log, blocks=False)
        self.reader = reader(self.log, self.cluster)
        self._pending = PendingRequests()
        self.client = Client(self.env, self._pending, experiment, self.cluster, None, self.reader)

    def send(self, requests: Sequence[Request]) -> None:
        """Schedule copies of these requests."""
        self._pending.extend(map(copy_of, requests))
        self.client.resume()

    def run_to(self, time_s: float) -> None:
        """Advance to a time."""
        with own_errors(self.experiment.arch):
            self.env.run_to(self.env.at(time_s, Event(self.env)))

    def finish(self) -> None:
        """Serve the requests in the system, and no others."""
        with own_errors(self.experiment.arch):
            while self.in_system:
                self.env.step()

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

    def state(self) -> StationState:
        caches = [server.kv for server in self.cluster.servers]
        share = sum(kv.used_tokens for kv in caches) / max(1, sum(kv.capacity_tokens for kv in caches))
        return StationState(self.in_system, share, self._queues(), self._controller(), self._cache())

    def _cache(self) -> dict[str, float]:
        """Nothing where no prefix is cached."""
        caches = [server.kv for server in self.cluster.servers]
        if not any(len(kv.prefixes) for kv in caches):
            return {}
        shared = BLOCK * sum(kv.prefixes.shared for kv in caches)
        tokens = {
            "shared by requests": shared,
            "of one request": sum(kv.used_tokens for kv in caches) - shared,
            "cached, unused": sum(min(kv.cached_tokens, kv.capacity_tokens - kv.used_tokens) for kv in caches),
        }
        percent = 100 / max(1, sum(kv.capacity_tokens for kv in caches))
        shares = {f"KV {words} (%)": percent * count for words, count in tokens.items()}
        return shares | {"evicted blocks": float(sum(kv.prefixes.evictions for kv in caches))}

    def _queues(self) -> dict[str, int]:
        depths: dict[str, int] = {}
        for server in self.cluster.servers:
            for name in dict.fromkeys(lane.name for lane in server.lanes):
                depth = len(server.waiting) if name == server.prefill_lane else server.backlog(name)
                depths[name] = depths.get(name, 0) + depth
        return depths

    def _controller(self) -> dict[str, Any]:
        server = self.cluster.servers[0]
        if not server.speculates:
            return {}
        seen = {} if server.controller.acceptance is None else {"acceptance seen": server.controller.acceptance}
        return {"k": server.controller.k, **seen}
