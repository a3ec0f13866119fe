"""Launches without a pause: at the power limit the GPU lowers its clock and launches slow down.

Every point is launched repeatedly, starting on a cool GPU. Each launch is recorded with the time since the first, the
SM clock and the power. Light points also alternate with a heavy one, to measure the cost of a clock that others have
lowered. No setting of the GPU is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter, sleep
from typing import Any

import torch

from pdvsim.profiler.grid import GridPoint, table
from pdvsim.profiler.rig import Drawn, Launcher, Rig, free, settle
from pdvsim.profiler.samples import Part
from pdvsim.realrun.engine.graphs import Ticket
from pdvsim.realrun.telemetry import reader_of

REST_S = 0.15
RUN_S = 0.6  # well past the time a clock takes to settle
QUEUED_LAUNCHES = 4  # so that the card never waits for the host
HEAVY_S = 0.012  # of heavy work, then as much of the light one

CardReading = tuple[float | None, float | None]  # MHz, watts; None where they cannot be read
Heated = tuple[Ticket, Drawn, CardReading, float]


def groups(drafter: bool) -> list[tuple[GridPoint, ...]]:
    """The groups of heat.txt for a model: points alone, in turn with a heavy one, and far into their contexts.

    New ones go last, as samples know them by number.
    """
    return [points for name, points in table("heat.txt") if name == ("drafter" if drafter else "model")]


def heat(rig: Rig, part: Part, group: int, points: Sequence[GridPoint]) -> None:
    """Measure a group into a part."""
    launched = heated(rig, points, card_reader(rig.device))
    for member, (point, rows) in enumerate(zip(points, launched, strict=True)):
        for repeat, (ticket, data, (mhz, watts), since_s) in enumerate(rows):
            part.measured(
                "heat", part.header.name, point, ticket.shape, context_total=data.context_total,
                longest=data.longest, group=group, member=member, members=len(points), repeat=repeat,
                seconds=seconds_of(ticket), start_s=since_s, sm_mhz=mhz, power_w=watts,
            )  # fmt: skip
    free(rig.lane(points[0]))


def heated(rig: Rig, points: Sequence[GridPoint], read: Callable[[], CardReading]) -> list[list[Heated]]:
    """The launches of each point, in turn where there are two, without a pause."""
    launchers = [_ready(rig, point) for point in points]
    each = [1] * len(points)
    if len(points) > 1:
        each = [max(1, round(HEAVY_S / _alone_s(launch))) for launch in launchers]
    sleep(REST_S)
    launches: list[list[Heated]] = [[] for _ in points]
    waiting: deque[Ticket] = deque()
    begin = perf_counter()
    while perf_counter() - begin < RUN_S:
        for launch, rows, count in zip(launchers, launches, each, strict=True):
            for _ in range(count):
                since_s = perf_counter() - begin
                ticket, data = launch()
                rows.append((ticket, data, read(), since_s))
                waiting.append(ticket)
                if len(waiting) > QUEUED_LAUNCHES:
                    waiting.popleft().collect()
    settle(launchers[0].lane)
    return launches


def _ready(rig: Rig, point: GridPoint) -> Launcher:
    """A launcher whose graph is there. Points in turn use the same slots, whose pages suit the longest."""
    launch = rig.launcher(point)
    launch()
    settle(launch.lane)
    return launch


def _alone_s(launch: Launcher) -> float:
    ticket, _ = launch()
    settle(launch.lane)
    return max(seconds_of(ticket), 1e-5)


def seconds_of(ticket: Ticket) -> float:
    """Device seconds of a launch that is over; not a number on the CPU, which has none."""
    return float("nan") if ticket.span is None else ticket.gpu_s()


def card_reader(device: torch.device) -> Callable[[], CardReading]:
    """Return a function that reads the card's clock and power."""
    return reader_of(device, _clock_and_power) or (lambda: (None, None))


def _clock_and_power(nvml: Any, card: Any) -> CardReading:
    [power] = nvml.nvmlDeviceGetFieldValues(card, [nvml.NVML_FI_DEV_POWER_INSTANT])
    return float(nvml.nvmlDeviceGetClockInfo(card, nvml.NVML_CLOCK_SM)), power.value.uiVal / 1000
