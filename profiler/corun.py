"""Co-running drafts, verifies and prefills: two engines over shared sequences, each kind of launch on its own lane.

Each launch is first timed alone on its lane. Then the members of a group are launched repeatedly with full queues, and
the start and end of every launch are recorded. Members have their own slots. On the CPU lanes take
turns: the same code, no overlap.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import numpy as np
import torch

from pdvsim.profiler.grid import GridPoint, table
from pdvsim.profiler.hostcost import host_costs
from pdvsim.profiler.rig import QUICK, Effort, Launcher, Rig, sample, settle
from pdvsim.profiler.samples import Part
from pdvsim.realrun.engine.engine import LaunchShape
from pdvsim.realrun.engine.graphs import GraphLane, Ticket

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
    plan = [(number, setting, points) for number, (setting, points) in enumerate(table("groups.txt"))]
    return plan[:QUICK_GROUPS] if quick else plan


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


class CoRuns:
    """The measurements of a pair, into a part: what the host spends, and groups next to their members alone."""

    def __init__(self, rig: Rig, part: Part, quick: bool) -> None:
        self._rig, self._part, self._quick = rig, part, quick
        self._solos: dict[tuple[GridPoint, int], tuple[float, LaunchShape]] = {}

    def host(self) -> None:
        """What the host spends on each kind of launch."""
        for point, shape, what, repeat, seconds in host_costs(self._rig, 4 if self._quick else 20):
            self._add("host", point, shape, what=what, repeat=repeat, seconds=seconds)

    def group(self, number: int, setting: str, points: Sequence[GridPoint]) -> None:
        """A group of launches that run concurrently."""
        members = [(point, SETTINGS[setting].get(point.kind, 0)) for point in points]
        solo = [self._alone(*member) for member in members]
        launchers = [self._rig.launcher(*member) for member in members]
        seconds = min(LONGEST_S, max(SHORTEST_S, RUNS * max(solo_s for solo_s, _ in solo)))
        spans_of = side_by_side(launchers, seconds)
        for member, ((point, priority), (_, shape), spans) in enumerate(zip(members, solo, spans_of, strict=True)):
            for repeat, (start, end, cached) in enumerate(spans):
                self._add(
                    "corun", point, shape, group=number, member=member, members=len(members), priority=priority,
                    repeat=repeat, seconds=end - start, start_s=start, end_s=end, context_total=cached,
                )  # fmt: skip

    def _alone(self, point: GridPoint, priority: int) -> tuple[float, LaunchShape]:
        """Median seconds of a point alone on its lane, measured once."""
        if (point, priority) not in self._solos:
            samples, shape = sample(self._rig.launcher(point, priority), QUICK if self._quick else Effort())
            settle(self._rig.lane(point, priority))
            for repeat, (seconds, data) in enumerate(samples):
                context = {"context_total": data.context_total}
                self._add("corun", point, shape, priority=priority, repeat=repeat, seconds=seconds, **context)
            self._solos[point, priority] = float(np.median([seconds for seconds, _ in samples])), shape
        return self._solos[point, priority]

    def _add(self, section: str, point: GridPoint, shape: LaunchShape, **values: Any) -> None:
        self._part.measured(section, self._rig.engines[point.kind].model.arch.spec.name, point, shape, **values)
