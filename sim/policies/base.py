"""What every serving policy shares: the waiting line, admission, preemption, prompt chunks, and the books of a round.

A policy is a set of SimPy processes over a `Device`. It never learns which device or clock it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdvsim.sim.config import Server
from pdvsim.sim.core import Chunk, HeadSpec, Request, Work
from pdvsim.sim.machine.batch import RunningBatch, Way, context_of, drafted_for
from pdvsim.sim.machine.books import book
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.lane import Lane
from pdvsim.sim.machine.node import Device
from pdvsim.sim.policies.controllers import Controller
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.records import Deliveries

Process = Generator[Event, Any, None]
OwnOptions = tuple[str, ...]
Tuned = tuple[str, tuple[Any, ...]] | None

PRIORITY = {"decode": 2, "verify": 1, "prefill": 0, "main": 0}
PATIENCE_S = 0.2  # dynamic priority: a work is a level higher for each that its first request has waited
HIGHEST = 5  # as many levels as CUDA's streams have, less one


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
    readers: int = 1  # workers that read prompts, each on a GPU of its own


class Policy:
    """Requests enter by `submit` and leave through `on_finish`; subclasses are the processes in between."""

    # facts that commands need before a run; a subclass inherits what it does not state
    speculates = True  # has a draft model, and uses it
    hands_over = False  # drafts and verifies are made by two concurrent workers
    draft_lane = "main"
    verify_lane = "main"
    prefill_lane = "main"
    own_workers = True  # each lane has a worker of its own, and may be placed on a GPU of its own
    atomic_rounds = False  # may also verify on the draft lane
    one_by_one = False  # serves each request to its end by itself
    one_prompt = False  # prefills one prompt per forward
    plain_rounds = False  # may go on without draft tokens whatever the draft length is
    least_gpus = 1  # with fewer it is not worth trying
    options: OwnOptions = ()  # server settings that act in it alone
    tuned: Tuned = None  # one of them, and the values that a search tries
    beyond = ""  # what it does that no flag of a serving engine asks for

    def __init__(self, context: Context) -> None:
        self.env = context.env
        self.device = context.device
        self.settings = context.settings
        self.controller = context.controller
        self.dynamic = context.settings.priority == "dynamic"
        self.speculates = self.speculates and context.settings.longest_draft > 0
        self.planner = context.planner
        drafter = context.planner.models["draft"].spec if self.speculates else None
        self.rereads = isinstance(drafter, HeadSpec)  # accepted drafts, with the target's hidden states
        self.looks_up = drafter is not None and drafter.on_host  # drafts: the device says which rows have one
        self.learns = self.speculates and self.controller.learns
        early = context.settings.async_scheduling and "async_scheduling" in self.options
        self.drafts_early = early and self.speculates and not self.looks_up
        self.early = 0  # draft tokens that the running rows are getting already
        # rounds pass without asking the policy, unless it has a say of its own in one
        parts = ("hold", "draft", "verify", "draft_and_verify", "settle")
        foresees = context.device.foresees and self.controller.by_sums and not self.drafts_early
        self.foresees = foresees and not self.has_own(Policy, *parts)
        self.admits_by_itself = self.has_own(Policy, "admits", "admit", "next_chunks", "most_prompts")
        self.kv = context.kv
        self.deliveries = context.deliveries
        self.on_finish = context.on_finish
        self.waiting: deque[Request] = deque()  # arrived, not admitted
        self.prefilling: deque[Request] = deque()  # admitted, not yet read to its end
        self.in_flight = 0  # admitted, not finished
        self.lanes: list[Lane] = []
        self.queues = [self.prefilling]  # where an admitted request may rest between its works
        self.preempting = False  # in this step: as in vLLM, nobody is let in then
        self.doors = [self.lane(self.prefill_lane) for _ in range(context.readers)]  # where those who admit wait
        self.door = self.doors[0]
        self.reader = 0  # whose turn it is to take prompts
        for process in self.processes():
            self.env.process(process)

    @classmethod
    def lane_names(cls) -> tuple[str, ...]:
        """Its streams."""
        return tuple(dict.fromkeys((cls.prefill_lane, cls.draft_lane, cls.verify_lane)))

    @classmethod
    def in_steps(cls) -> bool:
        """Whether one lane serves the whole batch step by step, as continuous batching does."""
        return len(cls.lane_names()) == 1 and not cls.one_by_one

    @classmethod
    def placeable(cls) -> bool:
        """Whether its lanes may be on different GPUs."""
        return len(cls.lane_names()) > 1 and cls.own_workers

    @classmethod
    def most_in_flight(cls, settings: Server) -> int:
        """Most requests that it admits concurrently."""
        return settings.max_num_seqs

    def processes(self) -> Sequence[Process]:
        """The policy's processes."""
        raise NotImplementedError

    def has_own(self, base: type[Policy], *parts: str) -> bool:
        """Whether it has methods of its own in place of a class's."""
        return any(getattr(type(self), part) is not getattr(base, part) for part in parts)

    def lane(self, name: str) -> Lane:
        """A new lane; its name is the stream that its works run on."""
        self.lanes.append(Lane(self.env, self.device.host, name))
        return self.lanes[-1]

    # arrivals and admission ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)
        self.open_door()

    def open_door(self) -> None:
        """Let whoever admits look again: something arrived, or there is room."""
        if self.waiting:
            for door in self.doors:
                door.wake(self.env.now)

    def admits(self) -> bool:
        """Whether the policy's own rules let one more request in."""
        return self.in_flight < self.settings.max_num_seqs

    def admit(self, budget: int) -> Chunk | None:
        """What the next waiting request reads first, of `budget` tokens at most; None if it is not let in yet."""
        if not self.waiting or not self.admits():
            return None
        request = self.waiting[0]
        tokens = min(budget, request.to_read)
        if not self.kv.admit(request, tokens):
            return None
        self.waiting.popleft()
        if request.admitted_s < 0:
            request.admitted_s = self.env.now
        self.in_flight += 1
        self.prefilling.append(request)
        return Chunk(request, 0, tokens)

    def go_on(self, request: Request, budget: int) -> Chunk | None:
        """What a request that is being read reads next; None if it has been preempted."""
        tokens = min(budget, request.to_read - request.prefilled)
        return Chunk(request, request.prefilled, tokens) if self.room(request, request.prefilled + tokens) else None

    def most_prompts(self) -> int | None:
        """Prompts of a forward at most; None: as many as the token budget holds."""
        return self.settings.max_prompts_per_forward

    def next_chunks(self, budget: int) -> tuple[Chunk, ...]:
        """Stretches to read in the next forward, within a token budget: unfinished requests, then new admissions.

        Of several readers each goes on with the requests that it has begun.
        """
        if not self.prefilling and not self.waiting:
            return ()
        chunks: list[Chunk] = []
        most = self.most_prompts()
        unfinished = deque([request for request in self.prefilling if request.reader == self.reader])
        while budget > 0 and len(chunks) != most:
            if unfinished:
                request = unfinished.popleft()
                chunk = self.go_on(request, budget) if request in self.kv else None
            else:
                chunk = None if self.preempting else self.admit(budget)
                if chunk is None:
                    break
                chunk.request.reader = self.reader
            if chunk is not None:
                chunks.append(chunk)
                budget -= chunk.tokens
        return tuple(chunks)

    def prefilled(self, chunks: Sequence[Chunk]) -> list[Request]:
        """Take note of chunks that are in the cache; return the requests that now decode, their next token delivered.

        They stay pinned in the KV cache: the other model may still be reading.
        """
        ready, now = [], self.env.now
        for chunk in chunks:
            request = chunk.request
            request.prefilled += chunk.tokens
            if request.prefilled < request.to_read:
                continue
            self.prefilling.remove(request)
            request.context = request.prefilled
            request.emitted += 1
            request.turn_s = now
            if request.first_token_s < 0:
                request.first_token_s = now
            else:
                request.resumptions += 1
            self.deliveries.append((request.id, 1, now))
            if request.emitted == request.output_tokens:
                self.finish(request)
            else:
                ready.append(request)
        return ready

    def drafter_follows(self) -> bool:
        """Whether the drafter prefills what the target does; it need not while nothing is drafted."""
        return self.controller.drafting

    def for_drafter(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Of the prompt stretches that the target reads, those that the drafter reads as well; it owes the others.

        While nothing is drafted it reads nothing, and what it has begun to owe it reads as one stretch later on. A
        search on the host reads none.
        """
        if self.looks_up:
            return ()
        follows = self.speculates and self.drafter_follows()
        reads = []
        for chunk in chunks:
            if follows and not chunk.request.owed:
                reads.append(chunk)
            else:
                chunk.request.owed += chunk.tokens
        return tuple(reads)

    # room in the KV cache --------------------------------------------------------------------------------------

    def hold(self, rows: list[Request], k: int) -> list[Request]:
        """Those of `rows` that have room for a round of k drafts; the others have been preempted."""
        if isinstance(rows, RunningBatch):
            if rows.k == k and rows.hold():
                return rows
            rows = rows.dissolve()
        if self.kv.grow_all(rows, k + 1):
            return rows
        for row in rows:
            if row in self.kv:
                self.room(row, row.context + k + 1)
        return [row for row in rows if row in self.kv]

    def room(self, request: Request, tokens: int) -> bool:
        """Make room for a request's first `tokens` tokens; False if the request itself was preempted.

        Those admitted last give way first, of those with no work under way. A request alone in the cache always fits.
        """
        while not self.kv.grow(request, tokens):
            last = self.kv.last_admitted()
            self.preempt(last)
            if last is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take away all that a request holds: it goes to the front of the waiting line, to be read again."""
        for lane in self.lanes:
            lane.dissolve()
        for queue in self.queues:
            if request in queue:
                queue.remove(request)
        self.kv.release(request)
        request.evict()
        self.in_flight -= 1
        self.waiting.appendleft(request)
        self.preempting = True

    # rounds ----------------------------------------------------------------------------------------------------

    def draft(self, rows: list[Request], k: int) -> Work:
        """k tokens for each row, by the draft model."""
        tokens, context = 1, 0
        if isinstance(rows, RunningBatch):
            tokens, context = 1 + rows.owed, rows.context
        else:
            for row in rows:
                row.k = k
                context += row.context
                if row.owed >= tokens:
                    tokens = row.owed + 1
        lane = self.draft_lane
        watched = lane != self.verify_lane
        return Work(
            "draft", "draft", lane, rows, tokens, k, (), self.priority(lane, rows), self.backlog(lane), watched, context
        )  # fmt: skip

    def verify(self, rows: list[Request], k: int, drafted: Work | None = None) -> Work:
        """The target model's verdict on each row's drafts; with k=0, one plain token each.

        `drafted` is the draft right before it, where that was of the same rows.
        """
        lane, packed = self.verify_lane, 0
        if k and self.looks_up:
            k = drafted_for(rows)
            packed = 0 if self.settings.pad_drafts else sum([row.k + 1 for row in rows])
        if not isinstance(rows, RunningBatch):
            if not k:
                packed = 0
                for row in rows:
                    row.k = 0
            elif drafted is None or self.looks_up:
                for row in rows:
                    if not row.k:
                        row.bare += 1
        context = context_of(rows) if drafted is None else drafted.context
        return Work(
            "verify" if k else "decode", "target", lane, rows, k + 1, 1, (), self.priority(lane, rows),
            self.backlog(lane), True, context, packed=packed,
        )  # fmt: skip

    def draft_length(self, rows: list[Request]) -> int:
        """Draft tokens of the next round: those that are being made already, or as many as the controller wants."""
        if not rows:
            self.early = 0
        return self.early or self.controller.draft_length(rows, 0, self.env.now)

    def draft_early(self, rows: list[Request]) -> None:
        """Launch the next draft of rows whose verify is under way, if drafts are launched early.

        The GPU applies the verdict, so the draft begins when the verify ends, and the host reads the verdict meanwhile.
        Whoever finishes was drafted for in vain.
        """
        left = [row.output_tokens - row.emitted for row in rows]
        if not self.drafts_early or all(tokens <= row.k + 1 for tokens, row in zip(left, rows, strict=True)):
            return  # where all may finish, the draft would only be in the way of whoever comes next
        rows = [row for tokens, row in zip(left, rows, strict=True) if tokens > 1]
        k, lane = self.controller.draft_length(rows, 0, self.env.now), self.draft_lane
        if k:
            self.early = k
            unread = 1 + max(row.k for row in rows) if self.rereads else 2  # whatever the verdict will be
            self.device.launch(Work(
                "draft", "draft", lane, rows, unread, k, (), self.priority(lane, rows), self.backlog(lane), False,
                context_of(rows), early=True,
            ))  # fmt: skip

    def drafted_early(self, rows: list[Request]) -> bool:
        """Whether the draft of the round that begins was launched early."""
        early, self.early = self.early, 0
        if early:
            for row in rows:
                row.k = early
        return early > 0

    def draft_and_verify(self, rows: list[Request], k: int) -> Event:
        """Both, one after the other on the draft lane: the stream keeps the order. The verdict."""
        drafting = self.draft(rows, k) if k and not self.drafted_early(rows) else None
        if drafting is not None:
            drafting.watched = False
            self.device.launch(drafting)
        verifying, lane = self.verify(rows, k, drafting), self.draft_lane
        if verifying.lane != lane:
            verifying.lane, verifying.priority = lane, self.priority(lane, rows)
            verifying.queue_depth = self.backlog(lane)
        verdict = self.device.launch(verifying)
        self.draft_early(rows)
        return verdict

    def rounds(self, rows: list[Request], k: int) -> Generator[Event, Any, list[Request]]:
        """Draft and verify `rows` on the draft lane, round after round, until something changes; return who goes on.

        That is when a row finishes, a request arrives, room runs out or the controller wants another k. A policy may be
        asked sooner: after every round, where the device does not foresee the next.
        """
        if self.stands():
            rows = self.batch(rows, k)
            lane = self.draft_lane
            if self.pass_rounds(rows, Way(lane, lane, False, False, self.backlog(lane))):
                if rows.round == rows.end:
                    self.leave(rows.leave())
                    return rows
                if (self.learns and self.controller.draft_length(rows, 0, self.env.now) != k) or not rows.hold():
                    return rows
        verdict = yield self.draft_and_verify(rows, k)
        return self.settle(rows, verdict)

    def pass_rounds(self, rows: RunningBatch, way: Way) -> int:
        """Let rounds of `rows` pass in which nothing else happens, until the controller wants another draft length."""
        if not self.learns:
            return self.device.pass_rounds(rows, way)
        passed = 0
        while self.device.pass_rounds(rows, way, 1):
            passed += 1
            verdict = rows.verdict(1)
            self.controller.observe(rows, verdict, self.env.now)
            if rows.round == rows.end:
                break
            if self.controller.draft_length(rows, 0, self.env.now) != rows.k:
                break
        return passed

    def stands(self) -> bool:
        """Whether a decision holds until a row finishes or a request arrives: nobody who waits is let in before."""
        return self.foresees and not self.preempting and not (self.waiting and self.admits_by_itself)

    def batch(self, rows: list[Request], k: int) -> RunningBatch:
        """`rows`, which have room for a round, as one batch."""
        if isinstance(rows, RunningBatch):
            if rows.k == k:
                return rows
            rows = rows.dissolve()
        batch = RunningBatch(rows, k, self.kv, self.deliveries, self.rereads)
        batch.hold()
        return batch

    def backlog(self, lane: str) -> int:
        """Requests waiting in front of a lane, when a work is launched on it."""
        raise NotImplementedError

    def priority(self, lane: str, requests: Sequence[Request]) -> int:
        """Of a work that is launched now for these requests: the lane's own, or, if it is dynamic, by queues and ages.

        Then a work is a level above its lane's own if it and what waits behind it are more than waits in front of all
        other lanes, and a level for each `PATIENCE_S` since its first request came there. So no lane waits for ever.
        """
        own = PRIORITY[lane]
        if not self.dynamic:
            return own
        others = sum(len(queue) for name, queue in self.lines().items() if name != lane)
        deep = len(requests) + len(self.lines().get(lane, ())) > others
        first = requests[0]
        if lane == self.prefill_lane:
            since_s = first.arrival_s
        else:
            since_s = first.ready_s if self.hands_over and lane == self.verify_lane else first.turn_s
        return min(HIGHEST, own + deep + int((self.env.now - since_s) / PATIENCE_S))

    def lines(self) -> dict[str, Sized]:
        """Who waits in front of each lane."""
        return {self.prefill_lane: self.waiting}

    def settle(self, rows: list[Request], verdict: Sequence[int]) -> list[Request]:
        """Deliver what a verify yielded: the accepted drafts and one token of the target's; return who goes on."""
        now = self.env.now
        if rows and self.learns:
            self.controller.observe(rows, verdict, now)
        if isinstance(rows, RunningBatch):
            self.leave(rows.settle(now))
            return rows
        gains, over = book(rows, verdict, self.rereads)
        self.kv.unpin(rows)
        self.deliveries.extend([row.id for row in rows], gains, now)
        if self.looks_up:
            for row in rows:
                row.missed = False
        if self.learns or self.dynamic:
            for row in rows:
                row.turn_s = now
        if not over:
            return rows
        self.leave([row for row in rows if row.emitted == row.output_tokens])
        return [row for row in rows if row.emitted < row.output_tokens]

    def leave(self, rows: list[Request]) -> None:
        """Requests that have all their tokens leave."""
        self.controller.finished(rows)
        for row in rows:
            self.finish(row)

    def finish(self, request: Request) -> None:
        """A request has all its tokens."""
        request.finish_s = self.env.now
        self.kv.release(request)
        self.in_flight -= 1
        self.on_finish(request)
        self.open_door()
