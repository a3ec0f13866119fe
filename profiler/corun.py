# mypy: disable-error-code="no-untyped-call"
# (torch leaves events untyped.)
"""Co-running drafts, verifies and prefills: two engines over shared sequences, each kind of launch on its own lane.

Each launch is first timed alone on its lane. Then the members of a group are launched repeatedly with full queues, and
the start and end of every launch are recorded. Members have their own slots. On the CPU lanes take
turns: the same code, no overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
import torch

from pdvsim.profiler.grid import GridPoint, labelled
from pdvsim.profiler.hostcost import host_costs
from pdvsim.profiler.parts import Part
from pdvsim.profiler.rig import CAPACITY, QUICK, Effort, Launcher, pages_a_slot, sample, settle, usable_bytes
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.cache import PAGE, SCRATCH_PAGES, Sequences
from pdvsim.realrun.engine.engine import Engine, LaunchShape
from pdvsim.realrun.engine.graphs import GraphLane, Ticket
from pdvsim.realrun.engine.model import Transformer

PLACE = {"draft": 0, "verify": 1, "decode": 1, "mixed": 1, "prefill": 2, "read": 2}  # whose slots a kind uses
PROMPT_SLOTS = 8
MAX_ROWS = 64
QUICK_GROUPS = 8
QUEUED_PER_LANE = 3
RUNS = 6  # launches of the slowest member a group should last for, were it alone
SHORTEST_S, LONGEST_S = 0.04, 0.3
STALLED_S = 10.0
SETTINGS: dict[str, dict[str, int]] = {"equal": {}, "ordered": {"draft": 2, "verify": 1, "decode": 1}}  # else 0

GroupPlan = tuple[int, str, tuple[GridPoint, ...]]  # number, priority setting, members
Span = tuple[float, float, int]  # start, end, cached tokens


def groups(quick: bool = False) -> list[GroupPlan]:
    """The groups of groups.txt in measuring order; samples know them by their numbers, so new ones go last.

    Kinds interleaved in both settings, of which `quick` takes the first. Then by priority: long contexts, chunks of
    long prompts, several prompts, the drafter's prompts, and sizes at which the library changes its kernels.
    """
    lines = (Path(__file__).parent / "groups.txt").read_text(encoding="utf-8").splitlines()
    plan = [line.partition(": ")[::2] for line in (lines[:QUICK_GROUPS] if quick else lines)]
    return [(n, setting, tuple(map(labelled, text.split(" + ")))) for n, (setting, text) in enumerate(plan)]


def side_by_side(launchers: Sequence[Launcher], seconds: float, stalled_s: float = STALLED_S) -> list[list[Span]]:
    """Launch all again and again for about `seconds`; when each launch ran, since the common start."""
    origin = _common_start([launch.lane for launch in launchers])
    begin = perf_counter()
    waiting: list[deque[tuple[Ticket, int]]] = [deque() for _ in launchers]
    spans: list[list[Span]] = [[] for _ in launchers]
    while (now := perf_counter() - begin) < seconds or any(waiting):
        if now > seconds + stalled_s:
            raise TimeoutError(f"not finished {stalled_s:g} s after its time limit")
        for launch, queue, done in zip(launchers, waiting, spans, strict=True):
            while queue and queue[0][0].done():
                ticket, cached = queue.popleft()
                assert ticket.span is not None
                start, end = (origin.elapsed_time(event) / 1000 for event in ticket.span)
                done.append((start, end, cached))
            if now < seconds and len(queue) < QUEUED_PER_LANE:
                start = perf_counter() - begin
                ticket, data = launch()
                cached = data.context_total
                if launch.lane.gpu:
                    queue.append((ticket, cached))
                else:
                    done.append((start, perf_counter() - begin, cached))
    return spans


def _common_start(lanes: Sequence[GraphLane]) -> Any:
    if not lanes[0].gpu:
        return None
    torch.cuda.synchronize(lanes[0].engine.device)
    origin = torch.cuda.Event(enable_timing=True)
    origin.record()
    for lane in lanes:
        assert lane.stream is not None
        lane.stream.wait_event(origin)
    return origin


class Duo:
    """A draft and a target model on one device, with a lane for each kind of launch and priority."""

    def __init__(
        self,
        pair: str,
        draft: ModelArchitecture,
        target: ModelArchitecture,
        device: torch.device,
        seed: int,
        quick: bool = False,
    ) -> None:
        self.pair, self.quick = pair, quick
        self.rng = np.random.default_rng(seed)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        specs = (draft.spec, target.spec)
        free = usable_bytes(device) - sum(s.weight_bytes + s.head_params * s.dtype_bytes for s in specs)
        slots = 2 * MAX_ROWS + PROMPT_SLOTS
        pages = min(slots * CAPACITY // PAGE, int(free // (PAGE * sum(s.kv_bytes_per_token for s in specs))))
        self.sequences = sequences = Sequences(slots, CAPACITY, device, SCRATCH_PAGES + max(0, pages))
        sequences.tokens.random_(0, min(s.vocab for s in specs))
        self.engines: dict[str, Engine] = {}
        for arch, roles in ((draft, ("draft", "read")), (target, ("verify", "decode", "prefill", "mixed"))):
            engine = Engine(Transformer.random(arch, CAPACITY, device, dtype, seed), sequences)
            engine.cache.randomize(seed)
            self.engines |= dict.fromkeys(roles, engine)
        self.device = device
        self.lanes: dict[tuple[str, int], GraphLane] = {}
        self.solos: dict[tuple[GridPoint, int], tuple[float, LaunchShape]] = {}

    def run(self, part: Part, budget_s: float) -> None:
        """Host costs, then groups until the budget is spent; what a part already has is skipped."""
        begin = monotonic()
        if not any(row["section"] == "host" for row in part.rows):
            for point, shape, what, repeat, seconds in host_costs(self.fits, self.launcher, 4 if self.quick else 20):
                self.add(part, "host", point, shape, what=what, repeat=repeat, seconds=seconds)
            part.save()
        done = {row["group"] for row in part.rows if row["section"] == "corun"}
        stalled = ""
        for number, setting, members in (entry for entry in groups(self.quick) if entry[0] not in done):
            reason = stalled
            if not all(self.fits(point) for point in members):
                reason = reason or "does not fit into memory"
            elif monotonic() - begin > budget_s:
                reason = reason or f"budget of {budget_s:g} s spent"
            try:
                if not reason:
                    self._group(part, number, setting, members)
            except TimeoutError as error:
                reason, stalled = str(error), "a group before it stalled"
            except RuntimeError as error:  # out of memory, or a kernel that does not fit the card
                reason = str(error)
            if reason:
                part.leave_out(f"{setting}: {' + '.join(p.label() for p in members)}", reason)
            part.save()

    def launcher(self, point: GridPoint, priority: int = 0) -> Launcher:
        """Return a launcher of a point on the lane of its kind, on slots no other kind touches."""
        key = (point.kind, priority)
        if key not in self.lanes:
            self.lanes[key] = lane = GraphLane(self.engines[point.kind], priority)
            lane.timing = lane.gpu
        slots = self._slots(point)
        self.sequences.deal(slots, pages_a_slot(point), self.rng, self._pages(point))
        return Launcher(self.lanes[key], point, self.rng, slots)

    def _pages(self, point: GridPoint) -> range:
        """A third of the pool for each of draft, target and prompts."""
        third = (self.sequences.pool - SCRATCH_PAGES) // 3
        return range(*(SCRATCH_PAGES + third * (PLACE[point.kind] + i) for i in (0, 1)))

    def _slots(self, point: GridPoint) -> range:
        """A kind's slots, as many as it has pages for."""
        room = PROMPT_SLOTS if point.kind in ("prefill", "read") else MAX_ROWS
        first = MAX_ROWS * PLACE[point.kind]
        return range(first, first + min(room, len(self._pages(point)) // pages_a_slot(point)))

    def fits(self, point: GridPoint) -> bool:
        """Return whether there are slots enough for a point."""
        return point.slots <= len(self._slots(point))

    def _solo(self, part: Part, point: GridPoint, priority: int) -> tuple[float, LaunchShape]:
        """Median seconds of a point alone on its lane, measured once."""
        key = (point, priority)
        if key not in self.solos:
            samples, shape = sample(self.launcher(point, priority), QUICK if self.quick else Effort())
            settle(self.lanes[point.kind, priority])
            for repeat, (seconds, data) in enumerate(samples):
                self.add(part, "corun", point, shape, priority=priority, repeat=repeat, seconds=seconds,
                         context_total=data.context_total)  # fmt: skip
            self.solos[key] = float(np.median([seconds for seconds, _ in samples])), shape
        return self.solos[key]

    def _group(self, part: Part, number: int, setting: str, members: Sequence[GridPoint]) -> None:
        priorities = [SETTINGS[setting].get(point.kind, 0) for point in members]
        solos = [self._solo(part, *member) for member in zip(members, priorities, strict=True)]
        launchers = [self.launcher(*member) for member in zip(members, priorities, strict=True)]
        seconds = min(LONGEST_S, max(SHORTEST_S, RUNS * max(solo for solo, _ in solos)))
        spans_of = side_by_side(launchers, seconds)
        for member, (point, spans) in enumerate(zip(members, spans_of, strict=True)):
            for repeat, (start, end, cached) in enumerate(spans):
                self.add(
                    part, "corun", point, solos[member][1], group=number, member=member, members=len(members),
                    priority=priorities[member], repeat=repeat, seconds=end - start, start_s=start, end_s=end,
                    context_total=cached,
                )  # fmt: skip

    def add(self, part: Part, section: str, point: GridPoint, shape: LaunchShape, **values: Any) -> None:
        """A row of a point measured on this pair."""
        model = self.engines[point.kind].model.arch.spec.name
        part.measured(section, model, point, shape, pair=self.pair, **values)
