"""One architecture of a session: the parts of a simulated run, driven from one time to the next."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.live.arrivals import copied
from pdvsim.live.knobs import DROP_S
from pdvsim.sim.assembly import Site, covering_profile, make_controller
from pdvsim.sim.client import Client
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import Request, Work
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.prefix import BLOCK
from pdvsim.sim.policies import own_errors
from pdvsim.sim.policies.base import Policy
from pdvsim.sim.records import Log, Reader

_MASK = (1 << 64) - 1


class Coming(deque[Request]):
    """Requests to send; more may be added at any time."""

    def __iter__(self) -> Iterator[Request]:
        return self

    def __next__(self) -> Request:
        if not self:
            raise StopIteration
        return self.popleft()


class Station:
    """A site on simulated time that accepts new requests and settings while it runs.

    `reader` creates the reader of the log. `traced` keeps the requests of each launch and the host's records.
    """

    def __init__(self, experiment: Experiment, reader: Callable[[Log, Site], Reader], traced: bool = False) -> None:
        self.experiment = experiment
        self.env = Clock()
        self.log = Log.of_everything() if traced else Log()
        # acceptance and settings may change at any time, so rounds are simulated one by one
        self.site = Site(self.env, experiment, covering_profile(experiment), self.log, blocks=False)
        self.reader = reader(self.log, self.site)
        self._coming = Coming()
        self.client = Client(self.env, self._coming, experiment, self.site, None, self.reader)
        self.dropped_until_s = -1.0
        for gpu in self.site.gpus:
            gpu.verdict = self._judge(gpu.verdict)

    def send(self, requests: Sequence[Request]) -> None:
        """Schedule copies of these requests."""
        self._coming.extend(map(copied, requests))
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

    def turn(self, turned: Experiment) -> None:
        """Change settings from the next round on."""
        old, new = self.experiment.server, turned.server
        drafts = ("num_speculative_tokens", "controller")
        for policy in self.site.servers:
            policy.settings = new
            if any(getattr(old, name) != getattr(new, name) for name in drafts):
                policy.controller = make_controller(new, policy.planner)
            policy.kv.lookahead = max(policy.kv.lookahead, turned.longest_draft)
            policy.look_again()
        self.experiment = turned

    def drop(self) -> None:
        """Reduce acceptance for a while, also for requests in the system."""
        self.dropped_until_s = self.env.now + DROP_S

    # what a page shows of it --------------------------------------------------------------------------------------

    @property
    def in_system(self) -> int:
        return len(self.client.inside) + (self.client.held is not None) + len(self._coming)

    @property
    def kv_share(self) -> float:
        """Share of the KV cache in use."""
        caches = [server.kv for server in self.site.servers]
        return sum(kv.used_tokens for kv in caches) / max(1, sum(kv.capacity_tokens for kv in caches))

    def cache(self) -> dict[str, float]:
        """Who uses the KV cache, and what was evicted, where prefixes are cached."""
        return cache_of([server.kv for server in self.site.servers])

    def queues(self) -> dict[str, int]:
        """Requests queued at each lane now."""
        return queues_of(self.site.servers)

    def controller(self) -> dict[str, Any]:
        """The current draft length and its controller's state; of the first server if there are several."""
        return seen_by(self.site.servers[0])

    # -------------------------------------------------------------------------------------------------------------

    def _judge(self, drawn: Callable[[Work], Sequence[int] | None]) -> Callable[[Work], Sequence[int] | None]:
        """The sampled verdict; while acceptance is reduced, each draft token must also pass a random test.

        The test depends on request and position, so it is the same in every architecture.
        """

        def judged(work: Work) -> Sequence[int] | None:
            verdict = drawn(work)
            if verdict is None or self.env._now >= self.dropped_until_s:
                return verdict
            return [_tossed(row, passed) for row, passed in zip(work.rows, verdict, strict=True)]

        return judged


def cache_of(caches: Sequence[KvCache]) -> dict[str, float]:
    """Shares of the KV caches by their users, and evicted blocks; nothing where no prefix is cached."""
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


def queues_of(servers: Sequence[Policy]) -> dict[str, int]:
    """Requests queued at each lane."""
    depths: dict[str, int] = {}
    for server in servers:
        for name in dict.fromkeys(lane.name for lane in server.lanes):
            depth = len(server.waiting) if name == server.prefill_lane else server.backlog(name)
            depths[name] = depths.get(name, 0) + depth
    return depths


def seen_by(server: Policy) -> dict[str, Any]:
    """The draft length of a server and its controller's inputs."""
    controller = server.controller
    if not server.speculates:
        return {}
    seen: dict[str, Any] = {"k": controller.k}
    if controller.acceptance is not None:
        seen["acceptance seen"] = controller.acceptance
    return seen


def _tossed(row: Request, passed: int) -> int:
    """The accepted drafts before the first that fails its test."""
    for at in range(passed):
        mixed = (row.id * 0x9E3779B97F4A7C15 + (row.emitted + at) * 0xBF58476D1CE4E5B9 + 1) & _MASK
        mixed = ((mixed ^ mixed >> 30) * 0x94D049BB133111EB) & _MASK
        if mixed >> 40 & 1:
            return at
    return passed
