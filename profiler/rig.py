# mypy: disable-error-code="no-untyped-call"
# (torch leaves streams and split untyped.)
"""One model ready to be measured: random weights, random caches, and a launch for every point of the grid.

Slots of several lengths share one piece of memory (one point is measured at a time), so that many short rows and few
long ones both fit. Rows are drawn anew from all slots at every launch: successive launches read other cache lines.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from pdvsim.profiler.grid import CONTEXTS, SPREAD, GridPoint
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.cache import HEADROOM, KVCache, Sequences
from pdvsim.realrun.engine.engine import Engine, ForwardShape, LaunchShape
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk, Ticket
from pdvsim.realrun.engine.model import Transformer
from pdvsim.realrun.engine.weights import random_weights
from pdvsim.sim.core import ModelSpec

MAX_SLOTS = 160
MEMORY_SHARE = 0.92  # of the card
RESERVE_BYTES = 6e9  # activations, logits and graphs
ANCHOR = ForwardShape(1, 1)  # a graph every lane keeps: a graph pool that was empty once cannot be captured into again
LONG_S = 0.005
DEPTH = 6  # launches kept queued, so that no span holds the host's delay
TIERS = tuple(-(-int(c * (1 + SPREAD) + HEADROOM + 32) // 64) * 64 for c in CONTEXTS[1:])  # slot lengths


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
    """The slots one launch works on."""

    rows: list[int]
    chunks: list[PromptChunk]
    context_total: int


@dataclass(frozen=True, slots=True)
class Sample:
    """One launch: seconds on the device, and the tokens its rows had cached."""

    seconds: float
    context_total: int


class SharedCache(KVCache):
    """A KV cache laid over memory that others use too."""

    def __init__(self, memory: Tensor, spec: ModelSpec, slots: int, capacity: int) -> None:
        self.slots, self.capacity = slots, capacity
        shape = (spec.layers, 2, slots + 1, spec.kv_heads, capacity, spec.head_dim)
        self.data = memory[: int(np.prod(shape))].view(shape)
        self.layers = list(self.data.unbind(0))


class SharingTransformer(Transformer):
    """A model whose caches all lie over the same memory."""

    memory: Tensor

    def new_cache(self, slots: int) -> KVCache:
        return SharedCache(self.memory, self.arch.spec, slots, self.capacity)


def slots_that_fit(spec: ModelSpec, capacity: int, memory_bytes: float) -> int:
    """Slots of `capacity` tokens beside the weights, one of them spare for padding."""
    for_caches = memory_bytes - spec.weight_bytes - (spec.head_params * spec.dtype_bytes if spec.tied_embeddings else 0)
    return max(0, min(MAX_SLOTS, int(for_caches // (spec.kv_bytes_per_token * capacity)) - 1))


def usable_bytes(device: torch.device) -> float:
    """Memory that weights and caches may take. The same for every process on the card, whatever else it holds."""
    if device.type != "cuda":
        return 2e9 + RESERVE_BYTES
    return float(torch.cuda.get_device_properties(device).total_memory) * MEMORY_SHARE - RESERVE_BYTES


class Rig:
    """A model, its engines of several slot lengths, and the lane each is launched on."""

    def __init__(
        self, arch: ModelArchitecture, device: torch.device, seed: int, slots_of: ModelSpec | None = None
    ) -> None:
        self.arch, self.device = arch, device
        self.rng = np.random.default_rng(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        fits = {c: slots_that_fit(slots_of or arch.spec, c, usable_bytes(device)) for c in TIERS}
        self.slots = {c: slots for c, slots in fits.items() if slots}
        weights = random_weights(arch, device, dtype, seed)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # scratch of making the weights
        spec = arch.spec
        per_token = spec.kv_bytes_per_token // spec.dtype_bytes
        size = max((slots + 1) * c * per_token for c, slots in self.slots.items()) if self.slots else 0
        memory = torch.empty(size, device=device, dtype=dtype)
        _fill(memory, seed)
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.lanes: dict[int, GraphLane] = {}
        for capacity, slots in self.slots.items():
            model = SharingTransformer(arch, weights, capacity)
            model.memory = memory
            sequences = Sequences(slots, capacity, device)
            sequences.tokens.random_(0, spec.vocab)
            self.lanes[capacity] = lane = GraphLane(Engine(model, sequences, seed=seed), stream=stream)
            lane.timing = lane.gpu
            lane.prepare([ANCHOR])

    def tier(self, point: GridPoint) -> int | None:
        """The shortest slots that hold the point, or None where none do."""
        for capacity, slots in self.slots.items():
            if point.positions + HEADROOM <= capacity and point.slots <= slots:
                return capacity
        return None

    def launcher(self, point: GridPoint) -> Launcher:
        """What launches a point: on other slots every time."""
        capacity = self.tier(point)
        if capacity is None:
            raise ValueError(f"{point.label()} does not fit into memory")
        lane = self.lanes[capacity]
        return Launcher(lane, point, self.rng, range(lane.engine.sequences.slots))

    def measure(self, point: GridPoint, effort: Effort) -> tuple[list[Sample], LaunchShape]:
        """Samples of one point and the shape it was padded to; its graph is freed afterwards."""
        launch = self.launcher(point)
        try:
            return sample(launch, effort)
        finally:
            free(launch.lane)


class Launcher:
    """Launches of one point on slots drawn from `slots`, whose lengths are set again before each."""

    def __init__(self, lane: GraphLane, point: GridPoint, rng: np.random.Generator, slots: range) -> None:
        self.lane, self.point, self.slots, self._rng = lane, point, slots, rng
        low, high = int(point.context * (1 - SPREAD)), int(point.context * (1 + SPREAD))
        self._cached = rng.integers(low, high + 1, len(slots))
        # the newest token is settled but not cached; a drafter that catches up lacks one more
        lengths = np.maximum(self._cached + (2 if point.catch_up else 1), 2).astype(np.int32)
        self._settled = torch.from_numpy(lengths).to(lane.engine.device)

    def __call__(self) -> tuple[Ticket, int]:
        """Launch; returns the ticket and the tokens the rows had cached."""
        drawn = self.draw()
        return self.fire(drawn), drawn.context_total

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
        )

    def fire(self, drawn: Drawn) -> Ticket:
        """The lane's own call, as a server makes it."""
        point = self.point
        if point.kind == "draft":
            return self.lane.draft(drawn.rows, point.steps, catch_up=point.catch_up)
        if point.rows:
            return self.lane.verify(drawn.rows, point.tokens - 1, chunks=drawn.chunks)
        return self.lane.prefill(drawn.chunks)


def sample(launch: Launcher, effort: Effort) -> tuple[list[Sample], LaunchShape]:
    """Device seconds of repeated launches with the queue kept full; on the CPU, seconds by the host's clock."""
    samples: list[Sample] = []
    waiting: deque[tuple[Ticket, int, float]] = deque()
    depth = DEPTH
    while not effort.enough([s.seconds for s in samples[effort.warm_up :]]):
        begin = perf_counter()
        ticket, context = launch()
        waiting.append((ticket, context, perf_counter() - begin))
        while len(waiting) >= depth:
            earlier, context, host_s = waiting.popleft()
            seconds = host_s if earlier.span is None else earlier.gpu_s()
            samples.append(Sample(seconds, context))
            depth = DEPTH if seconds < LONG_S else 2  # a long launch gives the host time enough
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


def _fill(memory: Tensor, seed: int) -> None:
    """Normal values, piece by piece: a tensor of over 2^31 elements in one go is not every kernel's size."""
    generator = torch.Generator(device=memory.device).manual_seed(seed)
    for piece in memory.split(2**28):
        piece.normal_(generator=generator)
