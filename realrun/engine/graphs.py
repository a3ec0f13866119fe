"""Lanes: cheap launches of an engine from the host, one CUDA graph replay at a time.

A lane has its stream, its input and output buffers and its pool of graphs; its launches run in order, and lanes run
concurrently. A graph keeps the priority of the stream it was captured on, so a lane whose launches have several
priorities has a stream and a set of graphs for each. On the CPU the same calls run immediately.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from time import perf_counter

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pdvsim.realrun.engine.batch import MAX_ROW_TOKENS
from pdvsim.realrun.engine.buckets import most_prompts, packed_size
from pdvsim.realrun.engine.cache import PAGE
from pdvsim.realrun.engine.engine import DraftShape, Engine, ForwardShape, Inputs, LaunchShape, output_size

MOST_WAIT_S = 60.0  # for one launch, which takes milliseconds
STAGES = 8  # launches whose host buffers are kept apart; a ninth waits for the first

HostInputs = dict[str, NDArray[np.int32]]  # by the names of Inputs


@dataclass(frozen=True, slots=True)
class PromptChunk:
    """`tokens` prompt tokens of a slot from position `start`; `final` where its first output token is wanted."""

    slot: int
    start: int
    tokens: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Payload:
    """What a launch works on; what it says of rows is in the order of `slots`."""

    slots: Sequence[int] = ()
    limits: Sequence[int] = ()  # drafts that a row really has
    pins: Sequence[int] = ()  # how many to accept in place of the model's own verdict; -1: its own
    chunks: Sequence[PromptChunk] = ()
    offers: Sequence[Sequence[int]] = ()  # drafts that the host made


@dataclass(frozen=True, slots=True)
class LaunchOutcome:
    """What a launch produced: each row's new tokens, and each chunk's first output token (None unless final)."""

    rows: list[list[int]]
    first: list[int | None]


def wait_for(event: torch.cuda.Event, within_s: float = MOST_WAIT_S) -> None:
    """Wait until the device has reached `event`, but not for ever: a GPU that hangs is an error."""
    end_s = perf_counter() + within_s
    while not event.query():
        if perf_counter() > end_s:
            raise TimeoutError(f"the GPU has not finished a launch within {within_s:g} s")


class Ticket:
    """One launch under way."""

    def __init__(self, shape: LaunchShape, rows: int, chunks: int, host: Tensor) -> None:
        self.shape, self.rows, self.chunks = shape, rows, chunks
        self.event: torch.cuda.Event | None = None  # after the result has reached the host
        self.span: tuple[torch.cuda.Event, torch.cuda.Event] | None = None  # around the graph alone, when timing
        self._host = host
        self._values: NDArray[np.int32] | None = None

    def done(self) -> bool:
        """Return whether the device has finished, without waiting."""
        return self.event is None or bool(self.event.query())

    def gpu_s(self) -> float:
        """Seconds between the graph's start and end on a lane that times its launches. Waits for the device."""
        if self.span is None:
            raise ValueError("the lane was not timing")
        wait_for(self.span[1])
        return float(self.span[0].elapsed_time(self.span[1])) / 1000

    def collect(self) -> None:
        """Wait, and keep the result past the reuse of the launch's host buffer."""
        if self._values is None:
            if self.event is not None:
                wait_for(self.event)
            self._values = self._host.numpy()[: output_size(self.shape)].copy()

    def accepted(self) -> list[int]:
        """Return how many drafts of each row a verify accepted, without unpacking its tokens. Waits for the device."""
        self.collect()
        assert isinstance(self.shape, ForwardShape)
        assert self._values is not None
        width = self.shape.tokens_per_row + 1
        counts: list[int] = self._values[: self.rows * width : width].tolist()
        return counts

    def outcome(self) -> LaunchOutcome:
        """Wait for the device and read the result."""
        self.collect()
        assert self._values is not None
        values, shape = self._values, self.shape
        if isinstance(shape, DraftShape):
            return LaunchOutcome(values.reshape(shape.rows, shape.steps)[: self.rows].tolist(), [])
        rows: list[list[int]] = []
        if shape.rows:
            table = values[: shape.rows * (shape.tokens_per_row + 1)].reshape(shape.rows, -1)
            rows = [line[1 : 2 + line[0]].tolist() for line in table[: self.rows]]
        first: list[int | None] = []
        if shape.emit:
            first = [int(v) if v >= 0 else None for v in values[-most_prompts(shape.chunk) :][: self.chunks]]
        return LaunchOutcome(rows, first or [None] * self.chunks)


class OrderedStreams:
    """Streams of several priorities that run launches in one order; a higher priority takes precedence."""

    def __init__(self, streams: dict[int, torch.cuda.Stream]) -> None:
        self.by_priority = streams
        self.priority = min(streams)  # of the launches to come

    @classmethod
    def of(cls, device: torch.device, priorities: Sequence[int]) -> OrderedStreams:
        """New streams. CUDA's own numbers are the other way round: lower goes first."""
        return cls({priority: torch.cuda.Stream(device, priority=-priority) for priority in priorities})

    @property
    def current(self) -> torch.cuda.Stream:
        return self.by_priority[self.priority]

    def switch(self, priority: int) -> None:
        """Launch with another priority from here on, after all that was launched before."""
        if priority != self.priority:
            before = self.current.record_event()
            self.priority = priority
            self.current.wait_event(before)


class GraphLane:
    """Launches one engine's work in order: on its own stream (higher `priority` goes first), or on those given."""

    def __init__(self, engine: Engine, priority: int = 0, streams: OrderedStreams | None = None) -> None:
        self.engine, device = engine, engine.device
        self.gpu = device.type == "cuda"
        self.streams = (streams or OrderedStreams.of(device, [priority])) if self.gpu else None
        self.pool = torch.cuda.graph_pool_handle() if self.gpu else None
        self.timing = False
        self.graphs_by_priority: dict[int, dict[LaunchShape, tuple[torch.cuda.CUDAGraph, Tensor]]] = {
            each: {} for each in (self.streams.by_priority if self.streams is not None else ())
        }
        rows = engine.row_buckets[-1]
        # a row may enter two new pages in a launch, a prompt as many as it is long
        prompts = most_prompts(engine.chunk_buckets[-1])
        self.most_pages = 2 * rows + engine.chunk_buckets[-1] // PAGE + 2 * prompts
        self.new_pages: list[tuple[int, int]] = []  # (place in the table, page), for the next launch to write
        sizes = (
            rows, rows, rows, prompts, prompts, prompts + 1, prompts, self.most_pages, self.most_pages,
            rows * engine.offered, rows * engine.packs, rows * engine.packs,
        )  # fmt: skip
        self._device_inputs = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.inputs = Inputs(*self._device_inputs.split(sizes))
        self._host_inputs = [torch.zeros(sum(sizes), dtype=torch.int32, pin_memory=self.gpu) for _ in range(STAGES)]
        names = [field.name for field in fields(Inputs)]
        self._host_views: list[HostInputs] = [
            dict(zip(names, (part.numpy() for part in inputs.split(sizes)), strict=True))
            for inputs in self._host_inputs
        ]
        out = rows * (MAX_ROW_TOKENS + 1) + prompts
        self._host_outputs = [torch.zeros(out, dtype=torch.int32, pin_memory=self.gpu) for _ in range(STAGES)]
        self._tickets: list[Ticket | None] = [None] * STAGES
        self._launches = 0
        if self.gpu:
            torch.cuda.synchronize(device)  # weights and caches were filled on another stream

    @property
    def stream(self) -> torch.cuda.Stream | None:
        """The one that the next launch goes on."""
        return None if self.streams is None else self.streams.current

    @property
    def graphs(self) -> dict[LaunchShape, tuple[torch.cuda.CUDAGraph, Tensor]]:
        """Graphs of the next launch's priority; none on the CPU."""
        return {} if self.streams is None else self.graphs_by_priority[self.streams.priority]

    def verify(
        self,
        slots: Sequence[int],
        drafts: int,
        *,
        limits: Sequence[int] = (),
        pins: Sequence[int] | None = None,
        chunks: Sequence[PromptChunk] = (),
        offers: Sequence[Sequence[int]] = (),
    ) -> Ticket:
        """Judge the `drafts` last drafted tokens of each slot and settle what follows; the rest as in `Payload`."""
        assert 0 <= drafts < MAX_ROW_TOKENS, drafts
        rows, limits = self._row_bucket(len(slots)), limits or [drafts] * len(slots)
        packed = 0
        if self.engine.packs and drafts:
            packed = packed_size(rows, drafts + 1, sum(limits) + len(limits))
        shape = ForwardShape(rows, drafts + 1, self._chunk_bucket(chunks), any(c.final for c in chunks), packed)
        return self._launch(shape, Payload(slots, limits, pins or [-1] * len(slots), chunks, offers))

    def prefill(self, chunks: Sequence[PromptChunk]) -> Ticket:
        """Feed stretches of prompts already put into `Sequences`."""
        assert chunks, "nothing to prefill"
        shape = ForwardShape(0, 0, self._chunk_bucket(chunks), any(c.final for c in chunks))
        return self._launch(shape, Payload(chunks=chunks))

    def draft(self, slots: Sequence[int], steps: int, *, width: int = 1) -> Ticket:
        """Draft `steps` tokens for each slot, from its last `width` on: 2 where all of some row's last were accepted.

        A head reads what was accepted again: one more than the most of any row.
        """
        assert 0 < steps < MAX_ROW_TOKENS, steps
        assert not self.engine.model.arch.spec.parallel or width + steps - 1 <= MAX_ROW_TOKENS, (width, steps)
        return self._launch(DraftShape(self._row_bucket(len(slots)), steps, width), Payload(slots))

    def prepare(self, shapes: Sequence[LaunchShape]) -> None:
        """Capture the graphs of these shapes, for every priority, now rather than at their first launch."""
        if self.streams is None:
            return
        for priority in (*self.streams.by_priority, self.streams.priority):
            self.streams.switch(priority)
            for shape in shapes:
                if shape not in self.graphs:
                    self._capture(shape)

    def _row_bucket(self, rows: int) -> int:
        for bucket in self.engine.row_buckets:
            if 0 < rows <= bucket:
                return bucket
        raise ValueError(f"{rows} rows do not fit the buckets {self.engine.row_buckets}")

    def _chunk_bucket(self, chunks: Sequence[PromptChunk]) -> int:
        assert all(c.tokens > 0 for c in chunks), "an empty chunk"
        tokens = sum(c.tokens for c in chunks)
        for bucket in (0, *self.engine.chunk_buckets):
            if tokens <= bucket and len(chunks) <= most_prompts(bucket):
                return bucket
        raise ValueError(
            f"{tokens} tokens of {len(chunks)} prompts do not fit the chunk buckets {self.engine.chunk_buckets}"
        )

    def _launch(self, shape: LaunchShape, payload: Payload) -> Ticket:
        if self.gpu and shape not in self.graphs:
            self._capture(shape)
        stage = self._launches % STAGES
        self._launches += 1
        old = self._tickets[stage]
        if old is not None:
            old.collect()
        self._fill(self._host_views[stage], shape, payload)
        ticket = Ticket(shape, len(payload.slots), len(payload.chunks), self._host_outputs[stage])
        self._tickets[stage] = ticket
        with self.on_stream():
            self._device_inputs.copy_(self._host_inputs[stage], non_blocking=True)
            if self.gpu:
                self._replay(shape, ticket, self._host_outputs[stage])
            else:
                result = self.engine.run(shape, self.inputs)
                self._host_outputs[stage][: result.shape[0]] = result
        return ticket

    def _replay(self, shape: LaunchShape, ticket: Ticket, output: Tensor) -> None:
        graph, result = self.graphs[shape]
        if self.timing:
            ticket.span = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            ticket.span[0].record(self.stream)
        graph.replay()
        if ticket.span is not None:
            ticket.span[1].record(self.stream)
        output[: result.shape[0]].copy_(result, non_blocking=True)
        ticket.event = torch.cuda.Event()
        ticket.event.record(self.stream)

    def on_stream(self) -> AbstractContextManager[None]:
        """Make the lane's stream current, for work that must run in its order."""
        if self.stream is None:
            return nullcontext()
        context: AbstractContextManager[None] = torch.cuda.stream(self.stream)
        return context

    def _fill(self, host: HostInputs, shape: LaunchShape, payload: Payload) -> None:
        """Write what the device needs to know of a launch into the host's copy of its inputs."""
        slots, limits, pins, chunks = payload.slots, payload.limits, payload.pins, payload.chunks
        rows, count, sequences = shape.rows, len(slots), self.engine.sequences
        host["row_slots"][:count], host["row_slots"][count:rows] = slots, sequences.scratch
        host["limits"][: len(limits)], host["limits"][len(limits) : rows] = limits, 0
        host["pins"][: len(pins)], host["pins"][len(pins) : rows] = pins, -1
        if isinstance(shape, ForwardShape) and shape.chunk:
            for name in ("chunk_slots", "chunk_starts", "chunk_final"):
                host[name][:] = 0
            total = 0
            for i, chunk in enumerate(chunks):
                host["chunk_slots"][i], host["chunk_starts"][i] = chunk.slot, chunk.start
                host["chunk_bounds"][i], host["chunk_final"][i] = total, chunk.final
                total += chunk.tokens
            host["chunk_bounds"][len(chunks) :] = total
        # the pages given since the last launch; the rest writes what the scratch slot has there anyway
        if (count := len(self.new_pages)) > self.most_pages:
            raise ValueError(f"{count} new pages in one launch; at most {self.most_pages}")
        host["page_places"][count:], host["page_numbers"][count:] = sequences.scratch * sequences.pages.shape[1], 0
        if count:
            host["page_places"][:count], host["page_numbers"][:count] = zip(*self.new_pages, strict=True)
            self.new_pages.clear()
        if isinstance(shape, ForwardShape) and shape.packed:
            width = shape.tokens_per_row
            within = np.flatnonzero(np.arange(width) <= np.asarray(limits, np.int32)[:, None])
            host["kept"][:] = 0  # the first token again, whose results are not read
            host["kept"][: len(within)] = within
            host["places"][: rows * width] = 0
            host["places"][within] = np.arange(len(within))
        for at, tokens in enumerate(payload.offers):
            begin = at * self.engine.offered
            host["drafts"][begin : begin + len(tokens)] = tokens

    def _capture(self, shape: LaunchShape) -> None:
        """Run the shape once on the scratch slot, to compile and to initialise libraries, then record its graph."""
        assert self.stream is not None
        self.stream.synchronize()
        self._fill(self._host_views[0], shape, Payload())
        with torch.cuda.stream(self.stream):
            self._device_inputs.copy_(self._host_inputs[0])
            self.engine.run(shape, self.inputs)
        self.stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            result = self.engine.run(shape, self.inputs)
        self.graphs[shape] = (graph, result)
