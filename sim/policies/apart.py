"""A disaggregated server, as engines have it: engines that prefill, engines that decode, and the KV cache in between.

Every engine is continuous batching with its own GPUs, host thread, batch and KV cache. A prompt is prefilled by the
prefill engine with the fewest requests, and decoded by the decode engine with the fewest. That engine takes it when it
has room, and its KV cache is sent over a port of each GPU. Blocks that the decode engine has cached are not sent.
The prefill engine keeps what it has sent as a cached prefix, without the answer.

Layer by layer, a layer is on its way while the next ones are computed. What is sent after the prefill is then the last
layer, or what the link could not carry in that time. A request that waits for room is sent whole.

The first token comes from the first step of the decode engine, which runs the last token of the prompt again, as in
vLLM; in SGLang and TensorRT-LLM it is sent with the KV cache. A request that the decode engine preempts is prefilled
there.

Not modelled: KV cache that is sent back, and room that an engine reserves before the prefill has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from simpy.events import Event

from pdvsim.sim.core import Chunk, Request, RequestState
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.kv import Windows, held_tokens
from pdvsim.sim.policies.admission import finish
from pdvsim.sim.policies.base import Context, Process
from pdvsim.sim.policies.colocated import Colocated
from pdvsim.sim.prices.links import Fabric, Piece


@dataclass(frozen=True)
class KvShipping:
    """How the KV cache of prompts gets from one engine to another."""

    fabric: Fabric  # ports of prefill engines first
    layers: int  # that are sent one by one; 1: a prompt is sent when it is prefilled
    token_bytes: float  # over the busiest port of a group, of both models where the drafter's is sent
    windows: Windows = ()
    state_bytes: float = 0.0  # what a request keeps whatever its length, sent with the end of a prompt
    drafter: bool = False  # the drafter's is sent too
    first_token: bool = False  # the prefill's token is sent too
    handover_s: float = 0.0  # of every request besides: router, connector, and waits for a step of either engine

    def bytes_after(self, tokens: int) -> float:
        """Return the bytes of the first `tokens` tokens of a prompt."""
        return self.token_bytes * held_tokens(tokens, self.windows)


class PrefillEngine(Colocated):
    """Prefills prompts. They keep their room until they are sent."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.on_prompt: Callable[[Request], None] = lambda request: None
        self.computed: dict[Request, list[tuple[float, float, int]]] = {}  # begin, end and last token of each forward

    def loop(self) -> Process:
        while True:
            chunks = self.next_chunks(self.settings.max_num_batched_tokens)
            if not chunks:
                yield self.prefill_workers[0].wait()
                continue
            began_s = self.env.now
            yield self.step(Batch(), 0, chunks)
            self._computed(chunks, began_s)

    def _computed(self, chunks: Sequence[Chunk], began_s: float) -> None:
        now_s = self.env.now
        for request, start, tokens in ((chunk.request, chunk.start, chunk.tokens) for chunk in chunks):
            state, forwards = request.state, self.computed.setdefault(request, [(began_s, began_s, start)])
            state.prefilled = start + tokens
            forwards.append((began_s, now_s, state.prefilled))
            if state.prefilled < request.to_read:
                self.kv.unpin([request])
            else:
                self.prefilling.remove(request)
                self.in_flight -= 1
                self.on_prompt(request)

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self.computed.pop(request, None)

    def release(self, request: Request) -> None:
        """A prompt has been sent."""
        del self.computed[request]
        self.kv.release(request)
        self.wake_prefill()


@dataclass(frozen=True)
class Parcel:
    """A prefilled prompt on its way: the request, and the copy of it that the prefill engine holds."""

    request: Request
    copy: Request
    source: int  # number of the prefill engine
    ready_s: float  # when its prefill ended


class DecodeEngine(Colocated):
    """Decodes requests whose prompts come from elsewhere."""

    asked = "on change"  # of the chunks it only says how they are computed

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self.offered: deque[Parcel] = deque()  # prefilled, no room yet
        self.fetch: Callable[[DecodeEngine, Parcel, int], None] = lambda engine, parcel, cached: None
        self.received: set[Request] = set()  # prompts of which the last token is to be computed
        self.started: list[Request] = []  # arrived with their first token, not running yet
        self._early = self.drafts_early

    @property
    def load(self) -> int:
        return super().load + len(self.offered)

    def offer(self, parcel: Parcel) -> None:
        """A prompt is ready to be sent."""
        self.offered.append(parcel)
        self._take()

    def _take(self) -> None:
        """Reserve room for prompts, in order, and have them sent; preempted ones are first."""
        while self.offered and not self.waiting and self.admits():
            parcel = self.offered[0]
            cached = self.kv.cached(parcel.request)
            if not self.kv.admit(parcel.request, parcel.request.prompt_tokens):
                return
            self.offered.popleft()
            self.in_flight += 1
            self.fetch(self, parcel, cached)

    def arrive(self, request: Request, drafter_lag: int, first_token: bool) -> None:
        """A prompt is there, with its first token or without."""
        state, now_s = request.state, self.env.now
        self.kv.unpin([request])
        state.prefilled = request.prompt_tokens - (not first_token)
        state.drafter_lag, state.drafter_cache_gap = min(drafter_lag, state.prefilled), 0
        if not first_token:
            self.prefilling.append(request)
            self.received.add(request)
        else:
            state.context, state.emitted, state.last_delivery_s = state.prefilled, 1, now_s
            request.taken.first_token_s = now_s
            self.deliveries.append((request.id, 1, now_s))
            if request.output_tokens == 1:
                finish(self, request)
                return
            self.started.append(request)
        self.prefill_workers[0].wake(now_s)

    def loop(self) -> Process:
        while True:
            self._take()
            self.drafts_early = self._early and not self.started
            if self.started and not self.early:  # else some would have drafts, and some none
                self.running.add(Batch(self.started))
                self.started = []
            yield from self.turn()

    def next_chunks(self, budget: int, worker: int = 0) -> tuple[Chunk, ...]:
        chunks = super().next_chunks(budget, worker)
        if not self.received:
            return chunks
        marked = [chunk._replace(as_row=chunk.request in self.received) for chunk in chunks]
        self.received.difference_update(chunk.request for chunk in chunks)
        return tuple(marked)

    def preempt(self, request: Request) -> None:
        super().preempt(request)
        self.received.discard(request)
        if request in self.started:
            self.started.remove(request)


class Disaggregated:
    """The engines of one server, and the way of each request through them."""

    def __init__(
        self, prefill: Sequence[PrefillEngine], decode: Sequence[DecodeEngine], shipping: KvShipping, aware: bool
    ) -> None:
        """`aware`: of the prefill engines, the one that has most of a prompt cached is chosen."""
        self.prefill = prefill
        self.decode = decode
        self.shipping = shipping
        self.aware = aware
        self._asked: dict[Request, Request] = {}  # by the copy that is prefilled
        self._turns = [list(range(len(side))) for side in (prefill, decode)]  # least recently chosen first
        for source, engine in enumerate(prefill):
            engine.on_prompt = partial(self._prefilled, source)
        for receiver in decode:
            receiver.fetch = self._send

    @property
    def load(self) -> int:
        """Number of its requests, admitted or not."""
        waiting = sum(engine.in_flight + len(engine.waiting) for engine in self.prefill)
        return waiting + sum(engine.load for engine in self.decode)

    def submit(self, request: Request) -> None:
        """A request arrives."""
        copy = replace(request, output_tokens=1, accept_runs=b"", state=RequestState())
        self._asked[copy] = request
        cached = [engine.kv.cached(copy) if self.aware else 0 for engine in self.prefill]
        loads = [engine.in_flight + len(engine.waiting) for engine in self.prefill]
        at = self._next(0, [(-tokens, load) for tokens, load in zip(cached, loads, strict=True)])
        self.prefill[at].submit(copy)

    def _next(self, side: int, keys: Sequence[tuple[int, ...]]) -> int:
        """The engine with the smallest key; of several, the least recently chosen."""
        turns = self._turns[side]
        at = min(turns, key=lambda number: keys[number])
        turns.remove(at)
        turns.append(at)
        return at

    def _prefilled(self, source: int, copy: Request) -> None:
        at = self._next(1, [(engine.load,) for engine in self.decode])
        engine, request = self.decode[at], self._asked.pop(copy)
        engine.offer(Parcel(request, copy, source, engine.env.now))

    def _send(self, engine: DecodeEngine, parcel: Parcel, cached: int) -> None:
        """Send what the decode engine does not have; it has reserved room for it."""
        shipping, now_s, source = self.shipping, engine.env.now, self.prefill[parcel.source]
        pieces, last = [], cached
        for begin_s, end_s, stop in source.computed[parcel.copy]:
            if stop > last:
                size = shipping.bytes_after(stop) - shipping.bytes_after(last)
                size += shipping.state_bytes if stop == parcel.copy.prompt_tokens else 0.0
                overlaps = shipping.layers > 1 and now_s == parcel.ready_s
                pieces.append(Piece(begin_s, end_s, size) if overlaps else Piece(now_s, now_s, size))
                last = stop
        target = len(self.prefill) + self.decode.index(engine)
        arrives_s = shipping.fabric.stream(parcel.source, target, pieces, shipping.layers)
        lag = parcel.copy.state.drafter_lag if shipping.drafter else parcel.request.prompt_tokens

        def arrived(_: Event) -> None:
            source.release(parcel.copy)
            engine.arrive(parcel.request, lag, shipping.first_token)

        event = Event(engine.env)
        event.callbacks.append(arrived)
        engine.env.at(arrives_s + shipping.handover_s, event)
