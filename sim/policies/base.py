"""The base of every serving policy: admission, rounds, and here prompts on a lane of their own.

A policy is a set of SimPy processes over a `Device`. It never learns which device or clock it has.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from simpy.events import Event

from pdvsim.sim.core import Chunk
from pdvsim.sim.machine.batch import Batch, Launch
from pdvsim.sim.policies.admission import Context, Process, finish
from pdvsim.sim.policies.rounds import Rounds, for_drafter, priority

__all__ = ["Context", "Policy", "Process"]


class Policy(Rounds):
    """Requests enter by `submit` and leave through `on_finish`; subclasses are the processes in between."""

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


def start_prefill(policy: Rounds, chunks: tuple[Chunk, ...]) -> tuple[Event, Event]:
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
