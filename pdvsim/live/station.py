"""One architecture of a session: the parts of a simulated run, driven from one time to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

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
