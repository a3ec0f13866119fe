"""The base of every serving policy: rounds of drafts and verifies, and prompts on a lane of their own.

A policy is a set of SimPy processes over a `Device`. It never learns which device or clock it has, nor whether that
passes over rounds in which nothing else happens.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Chunk, Request
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.machine.lane import PRIORITY, Lane
from pdvsim.sim.policies.admission import Admission, Context, MethodNames, Process, finish

__all__ = ["Context", "Policy", "Process"]


class Policy(Admission):
    """Requests enter by `submit` and leave through `on_finish`; subclasses are the processes in between."""

    every_round: MethodNames = ("draft_length", "draft", "verify", "step", "settle")

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.decode_steps = 0  # rounds of the draft lane that are over
        self.stands = not self.drafts_early and self.asked != "every round"  # its decisions, as long as nothing changes

    def draft_length(self, rows: Batch) -> int:
        """Draft tokens for the next round of `rows`: those already being made, or as the controller wants; 0: none."""
        if not self.speculates or not rows:
            self.early = 0
            return 0
        if self.early:
            return self.early
        queued = self.backlog(self.verify_lane) if self.handed else 0
        self.controller.scheduled = len(rows) + len(self.prefilling)
        return self.controller.draft_length(rows, queued, self.env.now)

    def draft(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = (), atomic: bool = False) -> Launch:
        """k tokens for each row, by the draft model.

        `chunks` are prompts that it reads first. If `atomic`, the verify follows on the same lane, and the host does
        not wait in between.
        """
        rows.k = k
        lane = self.draft_lane
        watched = not atomic and lane != self.verify_lane
        return Launch(
            "draft", "draft", lane, rows, 1 + rows.drafter_lag, k, chunks, priority(self, lane, rows),
            self.backlog(lane), watched, rows.context,
        )  # fmt: skip

    def verify(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = (), atomic: bool = False) -> Launch:
        """The target model's verdict on each row's drafts; with k=0, one plain token each.

        `chunks` are prompts that it reads too. If `atomic`, it runs on the draft lane.
        """
        lane, packed = self.draft_lane if atomic else self.verify_lane, 0
        if k and self.looks_up:
            k = rows.k
            packed = sum([row.state.k + 1 for row in rows]) if k and not self.settings.pad_drafts else 0
        elif k and rows and self.controller.selects:
            self.controller.select(rows, chunks)
            packed = sum([row.state.k + 1 for row in rows])
            k, packed = (k, packed) if packed > len(rows) else (0, 0)
        if k and (not atomic or self.looks_up or packed):
            rows.count_undrafted()
        return Launch(
            ("verify" if k else "decode") if rows else "prefill", "target", lane, rows, k + 1, 1, chunks,
            priority(self, lane, rows), self.backlog(lane), True, rows.context, packed=packed,
        )  # fmt: skip

    def step(self, rows: Batch, k: int, chunks: tuple[Chunk, ...] = ()) -> Event:
        """Draft and verify, one after the other on the draft lane, with prompts in the first forwards. The verdict."""
        lane, followed = self.draft_lane, for_drafter(self, chunks) if chunks else ()
        early, self.early = (self.early, 0) if k else (0, self.early)
        if early:
            rows.k = early
        elif k:
            self.device.launch(self.draft(rows, k, followed, atomic=True))
            followed = ()
        if followed:
            self.device.launch(Launch(
                "prefill", "draft", lane, Batch(), 1, 1, followed, PRIORITY[lane], self.backlog(lane), False, 0
            ))  # fmt: skip
        verdict = self.device.launch(self.verify(rows, k, chunks, atomic=True))
        if self.drafts_early and not chunks:
            _draft_early(self, rows)
        return verdict

    def rounds(self, rows: Batch, k: int) -> Generator[Event, Any, Batch]:
        """Draft and verify `rows` on the draft lane, until something changes; return the rows that continue.

        That is when a row finishes, a request arrives, room runs out or the controller wants another k. A policy may be
        asked sooner: after every round, where the device does not fast-forward.
        """
        if not rows:
            return rows
        waiting = len(self.waiting)
        if passed := advance(self, rows, k, self.draft_lane):
            self.decode_steps += passed
            if finished := rows.finished():
                leave(self, finished)
                return rows
            if len(self.waiting) > waiting or self.draft_length(rows) != k or not rows.reserve(self.kv, k):
                return rows
        verdict = yield self.step(rows, k)
        self.decode_steps += 1
        return self.settle(rows, verdict)

    def handed_over(self, rows: Batch, k: int, lane: Lane) -> Generator[Event, Any, tuple[Batch, int]]:
        """Rounds of `rows` in two lanes, until something changes: drafted for, handed over, verified and handed back.

        No request is elsewhere. Returns the rows that continue in `lane`, reserved for, with their draft length.
        """
        if advance(self, rows, k, self.verify_lane):
            if finished := rows.finished():  # the verify lane sees them leave, and hands the others back
                leave(self, finished)
                handed_back = lane.wait()
                lane.put(rows)
                yield handed_back
                return Batch(), 0
            k = self.draft_length(rows)
            rows = self.reserve(rows, k)
        return rows, k

    def settle(self, rows: Batch, verdict: Sequence[int]) -> Batch:
        """Deliver the accepted drafts and one target token per row; return the rows that continue."""
        now = self.env.now
        if rows and self.speculates and self.controller.learns:
            self.controller.observe(rows, verdict, now)
        if finished := rows.settle(verdict, now, self.kv, self.deliveries, self.rereads):
            leave(self, finished)
        return rows

    def backlog(self, lane: str) -> int:
        """Requests that wait for a lane when something is launched on it."""
        return self.lanes.depth(lane)

    def prefill(self, chunks: tuple[Chunk, ...]) -> Generator[Event, Any, Batch]:
        """Both models prefill `chunks` on the prefill lane; returns requests that now decode, first token delivered."""
        self.busy_prefill_workers += 1
        target, draft = start_prefill(self, chunks)
        yield target
        self.busy_prefill_workers -= 1
        ready = self.prefilled(chunks, pinned=True)
        yield draft
        self.kv.unpin(chunk.request for chunk in chunks)
        return ready

    def prefilled(self, chunks: Sequence[Chunk], pinned: bool = False) -> Batch:
        """Take note of chunks that are in the cache; return the requests that now decode, their next token delivered.

        They stay `pinned` in the KV cache while the other model is still reading.
        """
        ready, now = [], self.env.now
        for chunk in chunks:
            request = chunk.request
            state, taken = request.state, request.taken
            state.prefilled += chunk.tokens
            if state.prefilled < request.to_read:
                continue
            self.prefilling.remove(request)
            state.context = state.prefilled
            state.emitted += 1
            state.last_delivery_s = now
            if taken.first_token_s < 0:
                taken.first_token_s = now
            else:
                taken.resumptions += 1
            self.deliveries.append((request.id, 1, now))
            if state.emitted == request.output_tokens:
                finish(self, request)
            else:
                ready.append(request)
        if not pinned:
            self.kv.unpin(chunk.request for chunk in chunks)
        return Batch(ready)


def start_prefill(policy: Policy, chunks: tuple[Chunk, ...]) -> tuple[Event, Event]:
    """Launch the prefill of `chunks`: when the target is through, and when the drafter is as well."""
    lane, depth = policy.prefill_lane, len(policy.waiting)
    if lane == policy.draft_lane:
        read = policy.step(Batch(), 0, chunks)
        return read, read
    requests = [chunk.request for chunk in chunks]
    level, worker = priority(policy, lane, requests), requests[0].state.prefill_worker
    read = policy.device.launch(
        Launch("prefill", "target", lane, Batch(), 1, 1, chunks, level, depth, context=0, worker=worker)
    )
    followed = for_drafter(policy, chunks)
    if not followed:
        return read, read
    return read, policy.device.launch(
        Launch("prefill", "draft", lane, Batch(), 1, 1, followed, level, depth, context=0)
    )


def priority(policy: Policy, lane: str, requests: Sequence[Request]) -> int:
    """Priority of a launch for these requests: the lane's own or, if dynamic, by queue length and age."""
    if not policy.lanes.dynamic or not requests:
        return PRIORITY[lane]
    first = requests[0]
    if lane == policy.prefill_lane:
        since_s = first.arrival_s
    elif lane == policy.verify_lane and policy.handed:
        since_s = first.state.ready_s
    else:
        since_s = first.state.last_delivery_s
    return policy.lanes.priority(lane, len(requests), since_s)


def for_drafter(policy: Policy, chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """The prompt chunks that the drafter prefills too; it must catch up on the others later.

    While nothing is drafted it prefills nothing, and it later catches up in one chunk. An n-gram search on the host
    needs no prefill.
    """
    if policy.looks_up:
        return ()
    follows = policy.speculates and policy.drafter_follows and policy.controller.drafting
    reads = []
    for chunk in chunks:
        state, gap = chunk.request.state, chunk.request.state.drafter_cache_gap
        if gap:  # it reads cached tokens that only the target has, with what follows them
            chunk = Chunk(chunk.request, chunk.start - gap, chunk.tokens + gap)
            state.drafter_cache_gap = 0
        if follows and not state.drafter_lag and not chunk.as_row:
            reads.append(chunk)
        else:
            state.drafter_lag += chunk.tokens
    return tuple(reads)


def advance(policy: Policy, rows: Batch, k: int, verify_lane: str) -> int:
    """Say that rounds of `rows` with k draft tokens stand until something changes; how many the device passes over.

    None where the policy or its controller must be asked in each round, or where a waiting request may be admitted
    before a row finishes or a request arrives.
    """
    controller = policy.controller
    if not rows or not policy.stands or not controller.sums_suffice or policy.admission_pending:
        return 0
    if policy.waiting and (policy.asked == "while waiting" or policy.kv.tiers is not None):  # links become free
        return 0

    def enough(verdict: Sequence[int]) -> bool:
        """Show the controller a verdict; True if it wants another draft length, or a row is finished."""
        controller.observe(rows, verdict, policy.env.now)
        return rows.over or policy.draft_length(rows) != k

    lanes, depth = (policy.draft_lane, verify_lane), policy.backlog(policy.draft_lane)
    return policy.device.advance(rows, k, lanes, depth, enough if policy.speculates and controller.learns else None)


def _draft_early(policy: Policy, rows: Batch) -> None:
    """Launch the next draft of rows whose verify is running.

    The GPU applies the verdict, so the draft begins when the verify ends, and the host reads the verdict meanwhile. The
    draft of a request that finishes is wasted. Nothing is launched if all may finish, since that would only delay the
    next request; nor while requests wait to join the rows, since these have no drafts yet.
    """
    lane = policy.draft_lane
    if lane != policy.prefill_lane and policy.backlog(lane):
        return
    left = [row.output_tokens - row.state.emitted for row in rows]
    if all(n <= row.state.k + 1 for n, row in zip(left, rows, strict=True)):
        return
    drafted = Batch(row for tokens, row in zip(left, rows, strict=True) if tokens > 1)
    k = policy.controller.draft_length(drafted, 0, policy.env.now)
    if k:
        policy.early = k
        unread = 1 + drafted.k if policy.rereads else 2  # whatever the verdict will be
        policy.device.launch(Launch(
            "draft", "draft", lane, drafted, unread, k, (), priority(policy, lane, drafted), policy.backlog(lane),
            False, drafted.context, early=True,
        ))  # fmt: skip


def leave(policy: Policy, rows: list[Request]) -> None:
    """Requests that have all their tokens leave."""
    policy.controller.finished(rows)
    for row in rows:
        finish(policy, row)
