"""What every serving policy shares: admission, prompt chunks, room in the KV cache, and rounds.

A policy is a set of SimPy processes over a `Device`. It never learns which device or clock it has. Methods that begin
with an underscore are how it is done: a policy does not need them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Chunk, HeadSpec, Request, Work
from pdvsim.sim.machine.batch import RunningBatch, context_of, drafted_for
from pdvsim.sim.machine.books import book
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.machine.kv import KvCache
from pdvsim.sim.machine.lane import Lane
from pdvsim.sim.machine.node import Device
from pdvsim.sim.policies.controllers import Controller
from pdvsim.sim.policies.facts import Facts
from pdvsim.sim.policies.options import Server
from pdvsim.sim.policies.planner import Planner
from pdvsim.sim.records import Deliveries

Process = Generator[Event, Any, None]

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
    readers: int = 1  # workers that prefill, each on a GPU of its own


class Policy(Facts):
    """Requests enter by `submit` and leave through `on_finish`; subclasses are the processes in between."""

    # a subclass with one of these of its own is asked in every round, unless it lists them again and so vouches for it
    in_a_round: tuple[str, ...] = ("draft_length", "hold", "draft", "verify", "step", "settle")
    at_admission = ("admits", "next_chunks")  # with one of its own it is asked in every round while a request waits
    drafter_follows = True  # the drafter prefills what the target does, as long as anything is drafted

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
        self.lanes: list[Lane] = []
        self.queues: dict[str, Sized] = {self.prefill_lane: self.waiting}  # who waits in front of each lane
        self.readers = [self.lane(self.prefill_lane) for _ in range(context.readers)]  # workers that prefill wait here
        self.reader = 0  # which of them takes prompts
        self._busy_readers = 0
        self._handed = self.hands_over()
        self._untried = False  # since a request was preempted nobody was refused admission
        drafter = context.planner.models["draft"].spec if self.speculates else None
        self._rereads = isinstance(drafter, HeadSpec)  # accepted drafts, with the target's hidden states
        self._looks_up = drafter is not None and drafter.on_host  # the device says which rows have drafts
        early = context.settings.async_scheduling and "async_scheduling" in self.options
        self._drafts_early = early and drafter is not None and not self._looks_up
        self.early = 0  # draft tokens that the running rows are getting already
        written = next(base for base in type(self).__mro__ if "in_a_round" in vars(base))
        foresees = context.device.foresees and not self._drafts_early
        self._foresees = foresees and not _has_own(type(self), written, self.in_a_round)
        self._admits_by_itself = _has_own(type(self), written, self.at_admission)
        for process in self.processes():
            self.env.process(process)

    def processes(self) -> Sequence[Process]:
        """The policy's processes."""
        raise NotImplementedError

    def lane(self, name: str, timed: bool = False) -> Lane:
        """A new lane, named like the stream its launches run on. If `timed`, the wait in it is recorded."""
        lane = Lane(self.env, self.device.host, name, timed)
        self.lanes.append(lane)
        self.queues.setdefault(name, lane)
        return lane

    # arrivals and admission ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)
        self.look_again()

    def look_again(self) -> None:
        """Wake workers that could admit a request: something arrived, or there is room."""
        if self.waiting:
            for reader in self.readers:
                reader.wake(self.env.now)

    def admits(self) -> bool:
        """Whether the policy's own rules let one more request in; the KV cache must have room as well."""
        return self.in_flight < self.settings.max_num_seqs

    def next_chunks(self, budget: int) -> tuple[Chunk, ...]:
        """Chunks to prefill in the next forward, within a token budget: unfinished requests, then new admissions.

        Each of several prefill workers continues its own requests. An admitted request has room in the cache.
        """
        if not self.prefilling and not self.waiting:
            return ()
        chunks: list[Chunk] = []
        inside, most = self.in_flight, 1 if self.workers != "lanes" else self.settings.max_prompts_per_forward
        if self.workers == "lanes" and (free := len(self.readers) - self._busy_readers) > 1:
            share = max(1, -(-len(self.waiting) // free))  # so that other readers who are free get theirs
            most = min(share, most or share)
        for request in [request for request in self.prefilling if request.state.prefill_worker == self.reader]:
            tokens = min(budget, request.to_read - request.state.prefilled)
            if tokens <= 0 or len(chunks) == most:
                break
            if request in self.kv and self._make_room(request, request.state.prefilled + tokens):
                self.kv.name(request, request.state.prefilled + tokens)
                chunks.append(Chunk(request, request.state.prefilled, tokens))
                budget -= tokens
        if self.admitting and self.in_flight == inside:  # as in vLLM, nobody is let in where another gave way
            while budget > 0 and len(chunks) != most and (chunk := self._admit(budget)):
                chunks.append(chunk)
                budget -= chunk.tokens
        return tuple(chunks)

    def _admit(self, budget: int) -> Chunk | None:
        """What the next waiting request reads first; None if it is not let in yet."""
        if self.waiting and self.admits():
            request = self.waiting[0]
            cached = self.kv.cached(request)
            tokens = min(budget, request.to_read - cached)
            if self.kv.admit(request, cached + tokens):
                self.waiting.popleft()
                if request.taken.admitted_s < 0:
                    request.taken.admitted_s = self.env.now
                self.in_flight += 1
                self.prefilling.append(request)
                request.state.prefill_worker = self.reader
                return Chunk(request, cached, tokens)
        self._untried = False
        return None

    # prompts ---------------------------------------------------------------------------------------------------

    def prefill(self, chunks: tuple[Chunk, ...]) -> Generator[Event, Any, list[Request]]:
        """Both models prefill `chunks` on the prefill lane; returns who decodes now, its first token delivered."""
        self._busy_readers += 1
        target, draft = self.start_prefill(chunks)
        yield target
        self._busy_readers -= 1
        ready = self.prefilled(chunks, pinned=True)
        yield draft
        self.kv.unpin(chunk.request for chunk in chunks)
        return ready

    def start_prefill(self, chunks: tuple[Chunk, ...]) -> tuple[Event, Event]:
        """Launch it: when the target is through, and when the drafter is as well."""
        lane, depth = self.prefill_lane, len(self.waiting)
        if lane == self.draft_lane:
            read = self.step([], 0, chunks)
            return read, read
        requests = [chunk.request for chunk in chunks]
        priority, reader = self.priority(lane, requests), requests[0].state.prefill_worker
        read = self.device.launch(
            Work("prefill", "target", lane, [], 1, 1, chunks, priority, depth, worker=reader)
        )  # fmt: skip
        followed = self._for_drafter(chunks)
        if not followed:
            return read, read
        return read, self.device.launch(Work("prefill", "draft", lane, [], 1, 1, followed, priority, depth))

    def prefilled(self, chunks: Sequence[Chunk], pinned: bool = False) -> list[Request]:
        """Take note of chunks that are in the cache; return the requests that now decode, their next token delivered.

        They stay `pinned` in the KV cache while the other model is still reading.
        """
        ready, now = [], self.env.now
        for chunk in chunks:
            request = chunk.request
            request.state.prefilled += chunk.tokens
            if request.state.prefilled < request.to_read:
                continue
            self.prefilling.remove(request)
            request.state.context = request.state.prefilled
            request.state.emitted += 1
            request.state.last_delivery_s = now
            if request.taken.first_token_s < 0:
                request.taken.first_token_s = now
            else:
                request.taken.resumptions += 1
            self.deliveries.append((request.id, 1, now))
            if request.state.emitted == request.output_tokens:
                self._finish(request)
            else:
                ready.append(request)
        if not pinned:
            self.kv.unpin(chunk.request for chunk in chunks)
        return ready

    def _for_drafter(self, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
        """The prompt chunks that the drafter prefills too; it must catch up on the others later.

        While nothing is drafted it prefills nothing, and it later catches up in one chunk. An n-gram search on the host
        needs no prefill.
        """
        if self._looks_up:
            return ()
        follows = self.speculates and self.drafter_follows and self.controller.drafting
        reads = []
        for chunk in chunks:
            request = chunk.request
            if (
                request.state.drafter_cache_gap
            ):  # it reads cached tokens that only the target has, with what follows them
                chunk = Chunk(
                    request,
                    chunk.start - request.state.drafter_cache_gap,
                    chunk.tokens + request.state.drafter_cache_gap,
                )
                request.state.drafter_cache_gap = 0
            if follows and not request.state.drafter_lag:
                reads.append(chunk)
            else:
                request.state.drafter_lag += chunk.tokens
        return tuple(reads)

    # room in the KV cache --------------------------------------------------------------------------------------

    def hold(self, rows: list[Request], k: int) -> list[Request]:
        """Those of `rows` that have room for a round of k draft tokens; the others have been preempted."""
        if isinstance(rows, RunningBatch):
            if rows.k == k and rows.hold():
                return rows
            rows = rows.dissolve()
        if self.kv.grow_all(rows, k + 1):
            return rows
        for row in rows:
            if row in self.kv:
                self._make_room(row, row.state.context + k + 1)
        return [row for row in rows if row in self.kv]

    def _make_room(self, request: Request, tokens: int) -> bool:
        """Make room for a request's first `tokens` tokens; False if the request itself was preempted.

        The last admitted request without a running launch is preempted first. A request alone in the cache always fits.
        """
        while not self.kv.grow(request, tokens):
            last = self.kv.last_admitted()
            self.preempt(last)
            if last is request:
                return False
        return True

    def preempt(self, request: Request) -> None:
        """Take away all that a request holds: it goes to the front of the waiting line, to be prefilled again."""
        for lane in self.lanes:
            lane.discard(request)
        if request in self.prefilling:
            self.prefilling.remove(request)
        self.kv.release(request)
        request.evict()
        self.in_flight -= 1
        self.waiting.appendleft(request)
        self._untried = True

    # rounds ----------------------------------------------------------------------------------------------------

    def draft_length(self, rows: Sequence[Request]) -> int:
        """Draft tokens for the next round of `rows`: those already being made, or as the controller wants; 0: none."""
        if not self.speculates or not rows:
            self.early = 0
            return 0
        if self.early:
            return self.early
        queued = self.backlog(self.verify_lane) if self._handed else 0
        return self.controller.draft_length(rows, queued, self.env.now)

    def draft(self, rows: list[Request], k: int) -> Work:
        """k tokens for each row, by the draft model."""
        tokens, context = 1, 0
        if isinstance(rows, RunningBatch):
            tokens, context = 1 + rows.owed, rows.context
        else:
            for row in rows:
                row.state.k = k
                context += row.state.context
                if row.state.drafter_lag >= tokens:
                    tokens = row.state.drafter_lag + 1
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
        if k and self._looks_up:
            k = drafted_for(rows)
            packed = sum([row.state.k + 1 for row in rows]) if k and not self.settings.pad_drafts else 0
        if k and (drafted is None or self._looks_up) and not isinstance(rows, RunningBatch):
            for row in rows:
                if not row.state.k:
                    row.taken.undrafted_rounds += 1
        context = context_of(rows) if drafted is None else drafted.context
        return Work(
            "verify" if k else "decode", "target", lane, rows, k + 1, 1, (), self.priority(lane, rows),
            self.backlog(lane), True, context, packed=packed,
        )  # fmt: skip

    def _draft_early(self, rows: list[Request]) -> None:
        """Launch the next draft of rows whose verify is running, if drafts are launched early.

        The GPU applies the verdict, so the draft begins when the verify ends, and the host reads the verdict meanwhile.
        The draft of a request that finishes is wasted. Nothing is launched if all may finish, since that would only
        delay the next request; nor while requests wait to join the rows, since these have no drafts yet.
        """
        joining = self.draft_lane != self.prefill_lane and self.backlog(self.draft_lane)
        if not self._drafts_early or joining:
            return
        left = [row.output_tokens - row.state.emitted for row in rows]
        if all(n <= row.state.k + 1 for n, row in zip(left, rows, strict=True)):
            return
        rows = [row for tokens, row in zip(left, rows, strict=True) if tokens > 1]
        k, lane = self.controller.draft_length(rows, 0, self.env.now), self.draft_lane
        if k:
            self.early = k
            unread = 1 + max(row.state.k for row in rows) if self._rereads else 2  # whatever the verdict will be
            self.device.launch(Work(
                "draft", "draft", lane, rows, unread, k, (), self.priority(lane, rows), self.backlog(lane), False,
                context_of(rows), early=True,
            ))  # fmt: skip

    def step(self, rows: list[Request], k: int, chunks: tuple[Chunk, ...] = ()) -> Event:
        """Draft and verify, one after the other on the draft lane, with prompts in the first forwards. The verdict."""
        drafting, lane, followed = None, self.draft_lane, self._for_drafter(chunks) if chunks else ()
        early, self.early = (self.early, 0) if k else (0, self.early)
        if early:
            for row in rows:
                row.state.k = early
        if k and not early:
            drafting = self.draft(rows, k)
            drafting.chunks, drafting.watched = followed, False
            self.device.launch(drafting)
        elif followed:
            reading = self.draft([], 0)
            reading.kind, reading.steps, reading.chunks, reading.watched = "prefill", 1, followed, False
            self.device.launch(reading)
        verifying = self.verify(rows, k, drafting)
        verifying.chunks = chunks
        if not rows:
            verifying.kind = "prefill"
        if verifying.lane != lane:
            verifying.lane, verifying.priority = lane, self.priority(lane, rows)
            verifying.queue_depth = self.backlog(lane)
        verdict = self.device.launch(verifying)
        if not chunks:
            self._draft_early(rows)
        return verdict

    def rounds(self, rows: list[Request], k: int) -> Generator[Event, Any, list[Request]]:
        """Draft and verify `rows` on the draft lane, until something changes; return the rows that continue.

        That is when a row finishes, a request arrives, room runs out or the controller wants another k. A policy may be
        asked sooner: after every round, where the device does not foresee the next.
        """
        if not rows:
            return rows
        rows, passed = self.pass_rounds(rows, k, self.draft_lane)
        if passed:
            assert isinstance(rows, RunningBatch)
            if rows.round == rows.end:
                self._leave(rows.leave())
                return rows
            if self.draft_length(rows) != k or not rows.hold():
                return rows
        verdict = yield self.step(rows, k)
        return self.settle(rows, verdict)

    def settle(self, rows: list[Request], verdict: Sequence[int]) -> list[Request]:
        """Deliver the accepted drafts and one target token per row; return the rows that continue."""
        now = self.env.now
        if rows and self.speculates and self.controller.learns:
            self.controller.observe(rows, verdict, now)
        if isinstance(rows, RunningBatch):
            self._leave(rows.settle(now))
            return rows
        gains, over = book(rows, verdict, now, self._rereads)
        self.kv.unpin(rows)
        self.deliveries.extend([row.id for row in rows], gains, now)
        if not over:
            return rows
        self._leave([row for row in rows if row.state.emitted == row.output_tokens])
        return [row for row in rows if row.state.emitted < row.output_tokens]

    def backlog(self, lane: str) -> int:
        """Requests that wait for a lane when something is launched on it."""
        return len(self.queues.get(lane, ()))

    def priority(self, lane: str, requests: Sequence[Request]) -> int:
        """Priority of a launch for these requests: the lane's own or, if dynamic, by queue length and age.

        A dynamic priority is one level above the lane's own if the launch and its queue exceed the queues of all other
        lanes, and one level per `PATIENCE_S` since its first request arrived there. So no lane waits for ever.
        """
        own = PRIORITY[lane]
        if self.settings.priority != "dynamic" or not requests:
            return own
        others = sum(len(queue) for name, queue in self.queues.items() if name != lane)
        deep = len(requests) + len(self.queues.get(lane, ())) > others
        first = requests[0]
        if lane == self.prefill_lane:
            since_s = first.arrival_s
        else:
            since_s = first.state.ready_s if lane == self.verify_lane and self._handed else first.state.last_delivery_s
        return min(HIGHEST, own + deep + int((self.env.now - since_s) / PATIENCE_S))

    # how it is done --------------------------------------------------------------------------------------------

    def pass_rounds(self, rows: list[Request], k: int, verify_lane: str) -> tuple[list[Request], int]:
        """`rows` after rounds on the fast path, in which nothing else happens, and the number of these rounds.

        There are none if the policy or its controller must be asked in each round, or if a waiting request may be
        admitted before a row finishes or a request arrives.
        """
        controller = self.controller
        if (
            not rows
            or not (self._foresees and controller.by_sums)
            or self._untried
            or (self.waiting and self._admits_by_itself)
        ):
            return rows, 0
        if not isinstance(rows, RunningBatch) or rows.k != k:
            rows = rows.dissolve() if isinstance(rows, RunningBatch) else rows
            rows = RunningBatch(rows, k, self.kv, self.deliveries, self._rereads)
            rows.hold()
        lanes, depth = (self.draft_lane, verify_lane), self.backlog(self.draft_lane)
        if not (self.speculates and controller.learns):
            return rows, self.device.pass_rounds(rows, lanes, depth)
        passed = 0
        while self.device.pass_rounds(rows, lanes, depth, 1):
            passed += 1
            controller.observe(rows, rows.verdict(1), self.env.now)
            if rows.round == rows.end or self.draft_length(rows) != k:
                break
        return rows, passed

    def _leave(self, rows: list[Request]) -> None:
        """Requests that have all their tokens leave."""
        self.controller.finished(rows)
        for row in rows:
            self._finish(row)

    def _finish(self, request: Request) -> None:
        request.taken.finish_s = self.env.now
        self.kv.release(request)
        self.in_flight -= 1
        self.on_finish(request)
        self.look_again()


def _has_own(policy: type[Policy], base: type[Facts], parts: Sequence[str]) -> bool:
    """Whether a policy has methods of its own in place of a base's."""
    return any(getattr(policy, part) is not getattr(base, part) for part in parts)
