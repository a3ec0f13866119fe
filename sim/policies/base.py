"""What every serving policy shares: the waiting line, admission, prompt chunks, and the books after a verify.

A policy is a set of SimPy processes over a `Device`. It never learns which device or clock it has.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

from simpy.events import Event

from pdvsim.sim.clock import Clock
from pdvsim.sim.config import Server
from pdvsim.sim.controllers import Controller
from pdvsim.sim.core import Chunk, Request, Work
from pdvsim.sim.kv import KvCache
from pdvsim.sim.lane import Lane
from pdvsim.sim.node import Device
from pdvsim.sim.planner import Planner
from pdvsim.sim.records import Deliveries

Process = Generator[Event, Any, None]

PRIORITY = {"decode": 2, "verify": 1, "prefill": 0, "main": 0}


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


class Policy:
    """Requests enter by `submit` and leave through `on_finish`; subclasses are the processes in between."""

    speculates = True  # has a draft model, and uses it
    hands_over = False  # drafts and verifies are made by two workers, side by side
    draft_lane = "main"
    verify_lane = "main"
    prefill_lane = "main"

    def __init__(self, context: Context) -> None:
        self.env = context.env
        self.device = context.device
        self.settings = context.settings
        self.controller = context.controller
        self.speculates = self.speculates and context.settings.speculates
        self.planner = context.planner
        self.kv = context.kv
        self.deliveries = context.deliveries
        self.on_finish = context.on_finish
        self.waiting: deque[Request] = deque()  # arrived, not admitted
        self.prefilling: deque[Request] = deque()  # admitted, prompt not yet read to its end
        self.in_flight = 0  # admitted, not finished
        self.door = self.lane(self.prefill_lane)  # where the process that admits waits
        for process in self.processes():
            self.env.process(process)

    def processes(self) -> Sequence[Process]:
        """The policy's processes."""
        raise NotImplementedError

    def lane(self, name: str) -> Lane:
        return Lane(self.env, self.device.host, name)

    # arrivals and admission ------------------------------------------------------------------------------------

    def submit(self, request: Request) -> None:
        """A request arrives."""
        self.waiting.append(request)
        self.open_door()

    def open_door(self) -> None:
        """Let whoever admits look again: something arrived, or there is room."""
        if self.waiting:
            self.door.wake(self.env.now)

    def admits(self) -> bool:
        """Whether the policy's own rules let one more request in."""
        return self.in_flight < self.settings.max_num_seqs

    def admit(self) -> Request | None:
        """The next waiting request, if rules and KV cache have room for it."""
        if self.waiting and self.admits() and self.kv.reserve(self.waiting[0]):
            request = self.waiting.popleft()
            request.admitted_s = self.env.now
            self.in_flight += 1
            return request
        return None

    def next_chunks(self, budget: int) -> tuple[Chunk, ...]:
        """Prompt stretches for the next forward, within a token budget: unfinished prompts, then new admissions."""
        chunks: list[Chunk] = []
        most = self.settings.max_prompts_per_forward
        for request in self.prefilling:
            if budget <= 0 or len(chunks) == most:
                return tuple(chunks)
            tokens = min(budget, request.prompt_tokens - request.prefilled)
            chunks.append(Chunk(request, request.prefilled, tokens))
            budget -= tokens
        while budget > 0 and len(chunks) < most:
            admitted = self.admit()
            if admitted is None:
                break
            self.prefilling.append(admitted)
            tokens = min(budget, admitted.prompt_tokens)
            chunks.append(Chunk(admitted, 0, tokens))
            budget -= tokens
        return tuple(chunks)

    def prefilled(self, chunks: Sequence[Chunk]) -> list[Request]:
        """Take note of chunks that are in the cache; return the requests that now decode, first token delivered."""
        ready = []
        for chunk in chunks:
            request = chunk.request
            request.prefilled += chunk.tokens
            if request.prefilled < request.prompt_tokens:
                continue
            self.prefilling.remove(request)
            request.context = request.prompt_tokens
            request.emitted = 1
            request.first_token_s = request.turn_s = self.env.now
            self.deliveries.append((request.id, 1, self.env.now))
            if request.output_tokens == 1:
                self.finish(request)
            else:
                ready.append(request)
        return ready

    def for_drafter(self, chunks: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Of the prompt stretches that the target reads, those that the drafter reads as well; it owes the others.

        While nothing is drafted it reads nothing, and what it has begun to owe it reads as one stretch later on.
        """
        follows = self.speculates and self.controller.drafting
        reads = []
        for chunk in chunks:
            if follows and not chunk.request.owed:
                reads.append(chunk)
            else:
                chunk.request.owed += chunk.tokens
        return tuple(reads)

    # rounds ----------------------------------------------------------------------------------------------------

    def taking_turn(self, rows: list[Request]) -> tuple[list[Request], list[Request]]:
        """Whom the next round is for, and who waits: nobody, unless the controller tries drafts on a few."""
        chosen = self.controller.turn(rows)
        if len(chosen) == len(rows):
            return rows, []
        ids = {row.id for row in chosen}
        return chosen, [row for row in rows if row.id not in ids]

    def draft(self, rows: list[Request], k: int) -> Work:
        """k tokens for each row, by the draft model."""
        tokens = 1
        temperature = self.controller.temperature
        for row in rows:
            row.k = k
            row.temperature = temperature
            if row.owed >= tokens:
                tokens = row.owed + 1
        lane = self.draft_lane
        watched = lane != self.verify_lane
        return Work(
            "draft", "draft", lane, rows, tokens, k, (), PRIORITY[lane], self.backlog(lane), watched
        )  # fmt: skip

    def verify(self, rows: list[Request], k: int) -> Work:
        """The target model's verdict on each row's drafts; with k=0, one plain token each."""
        lane = self.verify_lane
        if not k:
            for row in rows:
                row.k = 0
        return Work(
            "verify" if k else "decode", "target", lane, rows, k + 1, 1, (), PRIORITY[lane], self.backlog(lane)
        )  # fmt: skip

    def backlog(self, lane: str) -> int:
        """Requests waiting in front of a lane, when a work is launched on it."""
        raise NotImplementedError

    def settle(self, rows: list[Request], verdict: Sequence[int]) -> list[Request]:
        """Deliver what a verify yielded: the accepted drafts and one token of the target's; return who goes on."""
        now = self.env.now
        deliver = self.deliveries.append
        going = []
        for row, accepted in zip(rows, verdict, strict=True):
            deliver((row.id, row.book(accepted), now))
            if row.emitted == row.output_tokens:
                self.finish(row)
            else:
                going.append(row)
        if rows and not self.controller.steady:
            self.controller.observe(rows, verdict, now)
            for row in rows:
                row.turn_s = now
        return going

    def finish(self, request: Request) -> None:
        """A request has all its tokens."""
        request.finish_s = self.env.now
        self.kv.release(request)
        self.in_flight -= 1
        self.on_finish(request)
        self.open_door()
