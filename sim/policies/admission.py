"""What a command must know of an architecture; and admission: arrivals, prompt chunks, room and preemption."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from simpy.events import Event

from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.lane import Lane, Lanes
from pdvsim.sim.machine.node import Device
from pdvsim.sim.policies.controllers import Controller
from pdvsim.sim.policies.gates import gate_of
from pdvsim.sim.policies.options import Server
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.records import Deliveries

Process = Generator[Event, Any, None]
OwnOptions = tuple[str, ...]
MethodNames = tuple[str, ...]
Tuned = tuple[str, tuple[Any, ...]] | None
Workers = Literal["lanes", "turns", "requests"]
Asked = Literal["on change", "while waiting", "every round"]
_ASKED: tuple[Asked, ...] = get_args(Asked)


class PolicyTraits:
    """Facts that stand on the class of a policy, which inherits what it does not state."""

    speculates = True  # has a draft model, and uses it
    draft_lane = "main"
    verify_lane = "main"
    prefill_lane = "main"
    # lanes: each lane has a worker of its own; turns: one worker serves all lanes in turn, with one prompt per turn;
    # requests: each worker serves one request to its end
    workers: Workers = "lanes"
    atomic_rounds = False  # may also verify on the draft lane
    plain_rounds = False  # may go on without draft tokens whatever the draft length is
    drafts_ahead = False  # drafts while a request is verified, from guesses of the verdict
    verifies_all = False  # plans with drafts that are all verified
    least_gpus = 1  # with fewer it is not worth trying
    options: OwnOptions = ()  # server settings that act in it alone
    tuned: Tuned = None  # one of them, and the values that a search tries
    not_in_engines = ""  # what it does that no flag of a serving engine asks for
    # when its workers are asked for a decision: when something changes (an arrival, a finish, another draft length),
    # also in every round while a request waits, or in every round. A class that overrides one of the methods that its
    # bases name below is asked as often as that needs, unless it states this itself
    asked: Asked = "on change"
    while_waiting: MethodNames = ()
    every_round: MethodNames = ()

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "asked" in vars(cls):
            return
        stated = [part is not cls and "asked" in vars(part) for part in cls.__mro__]
        first = stated.index(True)  # the policy that it derives from; before it, what is mixed in
        own = {name for part in cls.__mro__[:first] for name in vars(part)}
        needs = [cls.asked]
        for base in cls.__mro__[first:]:
            needs += ["while waiting"] if own.intersection(vars(base).get("while_waiting", ())) else []
            needs += ["every round"] if own.intersection(vars(base).get("every_round", ())) else []
        cls.asked = max(needs, key=_ASKED.index)

    @classmethod
    def lane_names(cls) -> tuple[str, ...]:
        """The names of its streams."""
        return tuple(dict.fromkeys((cls.prefill_lane, cls.draft_lane, cls.verify_lane)))

    @classmethod
    def in_steps(cls) -> bool:
        """Return whether one lane serves the whole batch step by step, as continuous batching does."""
        return len(cls.lane_names()) == 1 and cls.workers != "requests"

    @classmethod
    def placeable(cls) -> bool:
        """Return whether its lanes may be on different GPUs."""
        return len(cls.lane_names()) > 1 and cls.workers == "lanes"

    @classmethod
    def hands_over(cls) -> bool:
        """Return whether two workers draft and verify concurrently, and hand requests over to each other."""
        return cls.placeable() and cls.verify_lane != cls.draft_lane

    @classmethod
    def disaggregates(cls) -> bool:
        """Return whether its lanes may be engines: some prefill, the others decode whole rounds."""
        return cls.placeable() and not cls.hands_over()

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        """Most requests that it admits concurrently."""
        return settings.max_num_seqs


@dataclass(frozen=True)
class Context:
    """What a policy is given."""

    env: Clock
    device: Device
    settings: Server
    controller: Controller
    planner: Planner  # the calibrated latency model, to plan with
    kv: KvCache
    deliveries: Deliveries
    on_finish: Callable[[Request], None]
    prefill_workers: int = 1  # each on a GPU of its own


class Admission(PolicyTraits):
    """Requests enter by `submit` and leave through `on_finish`."""

    drafter_follows = True  # the drafter prefills what the target does, as long as anything is drafted
    while_waiting: MethodNames = ("admits", "next_chunks")
    every_round: MethodNames = ("reserve",)

    def __init__(self, context: Context) -> None:
        self.env = context.env
        self.device = context.device
        self.settings = context.settings
        self.controller = context.controller
        self.planner = context.planner
        self.kv = context.kv
        self.deliveries = context.deliveries
        self.on_finish = context.on_finish
        self.speculates = self.speculates and context.settings.longest_draft > 0
        self.waiting: deque[Request] = deque()  # arrived, not admitted
        self.prefilling: list[Request] = []  # admitted, not yet prefilled to the end
        self.in_flight = 0  # admitted, not finished
        self.admitting = True  # else `next_chunks` only goes on with prompts that are begun
        self.admission_pending = False  # some may fit: one was preempted since the last try, or a gate held them
        self.gate = gate_of(context.settings)
        self.lanes = Lanes(context.env, context.device.host, context.settings.priority == "dynamic")
        self.lanes.queues[self.prefill_lane] = self.waiting
        self.prefill_workers: list[Lane] = []  # those without a prompt wait here
        for _ in range(context.prefill_workers):
            self.prefill_workers.append(self.lanes.open(self.prefill_lane))
        self.busy_prefill_workers = 0
        drafter = context.planner.models["draft"].spec if self.speculates else None
        self.rereads = drafter is not None and drafter.rereads
        self.looks_up = drafter is not None and drafter.on_host  # the device says which rows have drafts
        early = context.settings.async_scheduling and "async_scheduling" in self.options
        self.drafts_early = early and drafter is not None and not self.looks_up
        self.handed = self.hands_over()
        self.early = 0  # draft tokens that the running rows are getting already

    def processes(self) -> Sequence[Process]:
        """The policy's processes; its servers start them once it is made."""
        raise NotImplementedError

    @property
    def load(self) -> int:
        """Number of its requests, admitted or not."""
        return self.in_flight + len(self.waiting)

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)
        self.wake_prefill()

    def wake_prefill(self) -> None:
        """Wake workers that could admit a request: something arrived, or there is room."""
        if self.waiting:
            for worker in self.prefill_workers:
                worker.wake(self.env.now)

    def admits(self) -> bool:
        """Return whether the policy's own rules let one more request in; the KV cache must have room as well."""
        return self.in_flight < self.settings.max_num_seqs

    def next_chunks(self, budget: int, worker: int = 0) -> tuple[Chunk, ...]:
        """Chunks to prefill in the next forward, within a token budget: unfinished requests, then new admissions.

        Each of several prefill workers continues its own requests. An admitted request has room in the cache.
        """
        if not self.prefilling and not self.waiting:
            return ()
        chunks: list[Chunk] = []
        inside, most = self.in_flight, 1 if self.workers != "lanes" else self.settings.max_prompts_per_forward
        if self.workers == "lanes" and (free := len(self.prefill_workers) - self.busy_prefill_workers) > 1:
            share = max(1, -(-len(self.waiting) // free))  # so that other free workers get theirs
            most = min(share, most or share)
        for request in list(self.prefilling):
            prefilled = request.state.prefilled
            if request.state.prefill_worker != worker:
                continue
            tokens = min(budget, request.to_read - prefilled)
            if tokens <= 0 or len(chunks) == most:
                break
            if request in self.kv and make_room(self, request, prefilled + tokens):
                self.kv.name(request, prefilled + tokens)
                chunks.append(Chunk(request, prefilled, tokens))
                budget -= tokens
        if self.admitting and self.in_flight == inside:  # as in vLLM, none is admitted after a preemption
            while budget > 0 and len(chunks) != most and (chunk := _admit(self, budget, worker)):
                chunks.append(chunk)
                budget -= chunk.tokens
        return tuple(chunks)

    def reserve(self, rows: Batch, k: int) -> Batch:
        """Reserve room for a round of k draft tokens for each row; requests that were preempted for it leave `rows`."""
        if not rows.reserve(self.kv, k):
            for row in rows:
                if row in self.kv:
                    make_room(self, row, row.state.context + k + 1)
            for row in [row for row in rows if row not in self.kv]:
                rows.remove(row)
        return rows

    def preempt(self, request: Request) -> None:
        """Take away all that a request holds: it goes to the front of the waiting line, to be prefilled again."""
        self.lanes.discard(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.kv.release(request)
        request.evict()
        self.in_flight -= 1
        self.waiting.appendleft(request)
        self.admission_pending = True


def _admit(policy: Admission, budget: int, worker: int) -> Chunk | None:
    """The first chunk of the next waiting request; None if it is not admitted yet. Some first fetch a prefix."""
    tiers = policy.kv.tiers
    while policy.waiting and policy.admits():
        request = policy.waiting[0]
        cached = policy.kv.cached(request)
        fetch = None if tiers is None else tiers.plan(request, cached, policy.env.now)
        fetched = 0 if fetch is None else fetch.total
        tokens = fetched or min(budget, request.to_read - cached)
        if not policy.kv.admit(request, cached + tokens):
            break
        policy.waiting.popleft()
        if request.taken.admitted_s < 0:
            request.taken.admitted_s = policy.env.now
        policy.in_flight += 1
        request.state.prefill_worker = worker
        arrives_s = policy.env.now if fetch is None or tiers is None else tiers.begin(fetch, cached, policy.env.now)
        if not fetched:
            policy.prefilling.append(request)
            return Chunk(request, cached, tokens)
        _wait_for_prefix(policy, request, fetched, arrives_s)
    policy.admission_pending = False
    return None


def _wait_for_prefix(policy: Admission, request: Request, fetched: int, arrives_s: float) -> None:
    """Let an admitted request prefill on when its fetched prefix has arrived; until then it is pinned."""
    if request.taken.preemptions:
        request.taken.recomputed_tokens = max(0, request.taken.recomputed_tokens - fetched)
    else:
        request.taken.num_cached_tokens += fetched

    def arrived(_: Event) -> None:
        request.state.prefilled += fetched
        policy.kv.unpin([request])
        policy.prefilling.append(request)
        policy.prefill_workers[request.state.prefill_worker].wake(policy.env.now)

    event = Event(policy.env)
    event.callbacks.append(arrived)
    policy.env.at(arrives_s, event)


def make_room(policy: Admission, request: Request, tokens: int) -> bool:
    """Make room for a request's first `tokens` tokens; False if the request itself was preempted.

    The last admitted request without a running launch is preempted first. A request alone in the cache always fits.
    """
    while not policy.kv.grow(request, tokens):
        last = policy.kv.last_admitted()
        policy.preempt(last)
        if last is request:
            return False
    return True


def finish(policy: Admission, request: Request) -> None:
    """A request has all its tokens, and leaves."""
    request.taken.finish_s = policy.env.now
    policy.kv.release(request)
    policy.in_flight -= 1
    policy.on_finish(request)
    policy.wake_prefill()
