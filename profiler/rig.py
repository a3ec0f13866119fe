"""Models ready to be measured: random weights, random caches, and a launch for every point of the grid.

Every point redistributes the cache's pages to as many slots of its length as they make, so that many short rows and few
long ones both fit. Rows are redrawn from all slots at every launch: successive launches read other cache lines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter, sleep

import numpy as np
import torch
from numpy.typing import NDArray

from pdvsim.profiler.grid import KINDS, LONG_CONTEXT, LONGEST_UNEVEN_CONTEXT, SIGMAS, SPREAD, GridPoint
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS
from pdvsim.realrun.engine.cache import HEADROOM, PAGE, SCRATCH_PAGES, Sequences
from pdvsim.realrun.engine.engine import Engine, ForwardShape, LaunchShape
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk, Ticket
from pdvsim.realrun.engine.head import Head, states_width
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.memory import copied_bytes
from pdvsim.sim.machine.kv import capacity_tokens
from pdvsim.sim.models.specs import ModelSpec

MAX_SLOTS = 264
PLACE = {"draft": 0, "verify": 1, "decode": 1, "mixed": 1, "prefill": 2, "read": 2}  # whose slots a kind of a pair has
MAX_ROWS, PROMPT_SLOTS = 64, 8  # of a kind of a pair
DRAFTER_KINDS = ("draft", "read")
CARD_MEMORY_SHARE = 0.92
RESERVE_BYTES = 6e9  # activations, logits and graphs
ANCHOR = ForwardShape(1, 1)  # a graph every lane keeps: a graph pool that was empty once cannot be captured into again
LONG_S = 0.005
BURST_S, REST_S = 0.025, 0.075  # bursts of power-hungry work, with rests so that the clock stays full
DEPTH = 6  # launches kept queued, so that no span holds the host's delay
CAPACITY = -(-int(LONG_CONTEXT * (1 + SPREAD) + HEADROOM + 32) // 64) * 64  # positions of a slot


@dataclass(frozen=True, slots=True)
class Effort:
    """How often a point is run."""

    warm_up: int = 4
    least: int = 12
    most: int = 25
    seconds: float = 0.8  # past `floor` samples, the most a point may take
    floor: int = 6
    stable: float = 0.005  # medians of both halves this near each other end a point

    def enough(self, samples: list[float]) -> bool:
        if len(samples) >= self.most or (len(samples) >= self.floor and sum(samples) > self.seconds):
            return True
        half = len(samples) // 2
        if len(samples) < self.least:
            return False
        early, late = float(np.median(samples[:half])), float(np.median(samples[half:]))
        return abs(early - late) <= self.stable * late


QUICK = Effort(warm_up=2, least=5, most=8, seconds=0.3, floor=3)


@dataclass(frozen=True, slots=True)
class Drawn:
    """The slots of one launch, and the tokens its rows have cached, together and the longest."""

    rows: list[int]
    chunks: list[PromptChunk]
    context_total: int
    longest: int


Sample = tuple[float, Drawn]  # seconds on the device, and what was launched


def pages_that_fit(specs: Sequence[ModelSpec], memory_bytes: float) -> int:
    """Pages of KV cache that fit next to the weights."""
    return min(MAX_SLOTS * CAPACITY, capacity_tokens(memory_bytes - copied_bytes(specs), specs)) // PAGE


def usable_bytes(device: torch.device) -> float:
    """Memory that weights and caches may take. The same for every process on the card, whatever else it holds."""
    if device.type != "cuda":
        return 2e9 + RESERVE_BYTES
    return float(torch.cuda.get_device_properties(device).total_memory) * CARD_MEMORY_SHARE - RESERVE_BYTES


class Rig:
    """One model on one lane; or a draft and a target model over shared sequences.

    Of the two each kind of launch has its own lane, slots and third of the pages, so that they run concurrently. A
    point has as many slots of its length as there are pages.
    """

    def __init__(
        self, archs: Sequence[ModelArchitecture], device: torch.device, seed: int, pages_of: ModelSpec | None = None
    ) -> None:
        self.device, self.alone = device, len(archs) == 1
        self.rng = np.random.default_rng(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        specs = [arch.spec for arch in archs]
        pages = pages_that_fit([pages_of] if pages_of else specs, usable_bytes(device))
        self.sequences = sequences = Sequences(MAX_SLOTS, CAPACITY, device, SCRATCH_PAGES + pages)
        sequences.tokens.random_(0, min(spec.vocab for spec in specs))
        self.engines: dict[str, Engine] = {}  # by kind of launch
        for arch in archs:
            head = arch.spec.is_head
            model = (Head if head else Transformer).random(arch, CAPACITY, device, dtype, seed)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # scratch of making the weights
            if head:
                sequences.keep_states(states_width(arch), CHUNK_BUCKETS[-1], dtype)
                for states in (sequences.states, sequences.chunk_states):
                    assert states is not None
                    states.normal_()
            engine = Engine(model, sequences)
            engine.cache.randomize(seed)
            taken = DRAFTER_KINDS if arch is not archs[-1] else [kind for kind in KINDS if kind not in self.engines]
            self.engines |= dict.fromkeys(taken, engine)
        self.lanes: dict[tuple[str, int], GraphLane] = {}

    def room(self, point: GridPoint) -> tuple[range, range]:
        """Return slots of the point's length, as many as it has pages for, and these pages."""
        sequences, place = self.sequences, PLACE[point.kind]
        pages, first, most = range(SCRATCH_PAGES, sequences.pool), 0, MAX_SLOTS
        if not self.alone:
            third = len(pages) // 3
            pages = pages[third * place : third * (place + 1)]
            first, most = MAX_ROWS * place, PROMPT_SLOTS if place == PLACE["prefill"] else MAX_ROWS
        return range(first, first + min(most, len(pages) // pages_a_slot(point))), pages

    def fits(self, point: GridPoint) -> bool:
        """Return whether memory holds the point."""
        return point.slots <= len(self.room(point)[0])

    def launcher(self, point: GridPoint, priority: int = 0) -> Launcher:
        """A function that launches a point, on other slots each time, with pages scattered as after long service."""
        if not self.fits(point):
            raise ValueError(f"{point.label()} does not fit into memory")
        slots, pages = self.room(point)
        lane = self.lane(point, priority)
        self.sequences.deal(slots, pages_a_slot(point), self.rng, pages)
        return Launcher(lane, point, self.rng, slots)

    def lane(self, point: GridPoint, priority: int = 0) -> GraphLane:
        """The lane of a point's kind and priority."""
        key = "" if self.alone else point.kind, priority
        if key not in self.lanes:
            self.lanes[key] = lane = GraphLane(self.engines[point.kind], priority)
            lane.timing = lane.gpu
            if self.alone:
                lane.prepare([ANCHOR])
        return self.lanes[key]

    def measure(self, point: GridPoint, effort: Effort) -> tuple[list[Sample], LaunchShape]:
        """Samples of one point and the shape it was padded to; its graph is freed afterwards."""
        launch = self.launcher(point)
        try:
            return sample(launch, effort)
        finally:
            free(launch.lane)


def pages_a_slot(point: GridPoint) -> int:
    """Pages that hold a slot of the point, with what a verify of discarded drafts writes."""
    return -(-(point.positions + HEADROOM) // PAGE)


class Launcher:
    """Launches of one point on slots drawn from `slots`, whose lengths are set again before each."""

    def __init__(self, lane: GraphLane, point: GridPoint, rng: np.random.Generator, slots: range) -> None:
        self.lane, self.point, self.slots, self._rng = lane, point, slots, rng
        self._cached = contexts(point, len(slots), rng)
        # the newest token is settled but not cached; a drafter lacks all that its first forward reads
        unread = point.tokens if point.kind == "draft" else 1
        lengths = np.maximum(self._cached + unread, 2).astype(np.int32)
        self._settled = torch.from_numpy(lengths).to(lane.engine.device)

    def __call__(self) -> tuple[Ticket, Drawn]:
        """Launch; returns the ticket and its slots."""
        data = self.draw()
        return self.fire(data), data

    def draw(self) -> Drawn:
        """Choose slots, and set their lengths on the device."""
        point = self.point
        chosen = self._rng.permutation(len(self.slots))[: point.slots]
        named = (chosen + self.slots.start).tolist()
        each = point.chunk_tokens // max(1, point.chunks)
        with self.lane.on_stream():
            self.lane.engine.sequences.length[self.slots.start : self.slots.stop].copy_(self._settled)
        return Drawn(
            rows=named[: point.rows],
            chunks=[PromptChunk(s, point.chunk_start, each, point.emits) for s in named[point.rows :]],
            context_total=int(self._cached[chosen[: point.rows]].sum()),
            longest=int(self._cached[chosen[: point.rows]].max(initial=0)),
        )

    def fire(self, data: Drawn) -> Ticket:
        """The lane's own call, as a server makes it."""
        point = self.point
        if point.kind == "draft":
            return self.lane.draft(data.rows, point.steps, width=point.tokens)
        if point.rows:
            return self.lane.verify(data.rows, point.tokens - 1, chunks=data.chunks)
        return self.lane.prefill(data.chunks)


def contexts(point: GridPoint, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Cached tokens of each slot of a point: about even, or drawn from a long tail with the same mean."""
    if point.lengths == "even":
        return rng.integers(int(point.context * (1 - SPREAD)), int(point.context * (1 + SPREAD)) + 1, count)
    sigma = SIGMAS[point.lengths]
    lengths = rng.lognormal(np.log(point.context) - sigma**2 / 2, sigma, count)
    return np.clip(lengths, 1, LONGEST_UNEVEN_CONTEXT).astype(np.int64)


def sample(launch: Launcher, effort: Effort) -> tuple[list[Sample], LaunchShape]:
    """Device seconds of repeated launches with the queue kept full; on the CPU, seconds by the host's clock."""
    samples: list[Sample] = []
    waiting: deque[tuple[Ticket, Drawn, float]] = deque()
    depth, spent_s = DEPTH, 0.0
    rests = launch.point.throttles and launch.lane.gpu
    while not effort.enough([seconds for seconds, _ in samples[effort.warm_up :]]):
        begin = perf_counter()
        ticket, data = launch()
        waiting.append((ticket, data, perf_counter() - begin))
        while len(waiting) >= depth:
            earlier, data, host_s = waiting.popleft()
            seconds = host_s if earlier.span is None else earlier.gpu_s()
            samples.append((seconds, data))
            depth = DEPTH if seconds < LONG_S else 2  # a long launch gives the host time enough
            spent_s += seconds
        if rests and spent_s + len(waiting) * (samples[-1][0] if samples else 0.0) > BURST_S:
            settle(launch.lane)
            sleep(REST_S)
            spent_s = 0.0
    return samples[effort.warm_up :], ticket.shape


def settle(lane: GraphLane) -> None:
    """Wait until the lane has nothing under way."""
    if lane.stream is not None:
        lane.stream.synchronize()


def free(lane: GraphLane) -> None:
    """Wait, then let go of the lane's graphs: most are used for one point only, and caches need the memory."""
    settle(lane)
    for shape in [shape for shape in lane.graphs if shape != ANCHOR]:
        lane.graphs.pop(shape)
