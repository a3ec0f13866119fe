"""Launches without a pause: at the power limit the GPU lowers its clock and launches slow down.

Every point is launched repeatedly, starting on a cool GPU. Each launch is recorded with the time since the first, the
SM clock and the power. Light points also alternate with a heavy one, to measure the cost of a clock that others have
lowered. No setting of the GPU is changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter, sleep

import torch

from pdvsim.profiler import grid
from pdvsim.profiler.grid import GridPoint
from pdvsim.profiler.rig import Drawn, Launcher, Rig, free, settle
from pdvsim.realrun.engine.graphs import Ticket
from pdvsim.realrun.telemetry import nvml_of

REST_S = 0.15
RUN_S = 0.6  # well past the time a clock takes to settle
QUEUED_LAUNCHES = 4  # so that the card never waits for the host
HEAVY_S = 0.012  # of heavy work, then as much of the light one

CardReading = tuple[float, float]  # MHz, watts
Heated = tuple[Ticket, Drawn, CardReading, float]


def heat_points(drafter: bool) -> list[GridPoint]:
    """Return the points that are launched alone: from memory-bound to compute-bound."""
    if drafter:
        return [
            grid.draft(8, 4, 512), grid.draft(64, 4, 512), grid.decode(64, 1, 512), grid.decode(64, 5, 512),
            grid.prefill(512),
        ]  # fmt: skip
    return [
        grid.decode(1, 1, 512), grid.decode(8, 1, 512), grid.decode(8, 5, 512), grid.decode(64, 1, 512),
        grid.decode(32, 1, 1500), grid.decode(64, 2, 512), grid.decode(64, 5, 512), grid.prefill(128),
        grid.prefill(512), grid.prefill(2048), grid.mixed(8, 5, 512, 256), grid.mixed(32, 3, 512, 512),
    ]  # fmt: skip


def far_points(drafter: bool) -> list[GridPoint]:
    """Prompt chunks far into their context, by themselves: attention over prompts takes much of their time."""
    if drafter:
        return [grid.prefill(512, 3000)]
    return [
        grid.prefill(512, 3000), grid.prefill(256, 6000), grid.prefill(1024, 6000), grid.mixed(32, 3, 1500, 512, 1500),
        grid.mixed(8, 5, 3000, 256, 3000),
    ]  # fmt: skip


def groups(drafter: bool) -> list[list[GridPoint]]:
    """Launches that run one after the other without a pause; new ones go last, as samples know them by number."""
    alone = [[point] for point in heat_points(drafter)]
    light = [grid.draft(8, 4, 512), grid.draft(64, 4, 512)] if drafter else [grid.decode(8, 1, 512)]
    in_turn = [[grid.prefill(512), point] for point in light]
    return alone + in_turn + [[point] for point in far_points(drafter)]


def heat(rig: Rig, add: Callable[..., None], todo: Mapping[int, Sequence[GridPoint]]) -> None:
    """Measure groups, each by its number; `add` takes the values of a row."""
    read = card_reader(rig.device)
    for group, points in todo.items():
        if all(rig.fits(point) for point in points):
            for member, (point, rows) in enumerate(zip(points, heated(rig, points, read), strict=True)):
                for repeat, (ticket, data, (mhz, watts), since_s) in enumerate(rows):
                    add(
                        section="heat", model=rig.arch.spec.name, **point.as_dict(), bucket_rows=ticket.shape.rows,
                        bucket_chunk=getattr(ticket.shape, "chunk", 0), context_total=data.context_total,
                        longest=data.longest, group=group, member=member, members=len(points), repeat=repeat,
                        seconds=seconds_of(ticket), start_s=since_s, sm_mhz=mhz, power_w=watts,
                    )  # fmt: skip
        free(rig.lane)


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
    settle(rig.lane)
    return launches


def _ready(rig: Rig, point: GridPoint) -> Launcher:
    """A launcher whose graph is there. Points in turn use the same slots, whose pages suit the longest."""
    launch = rig.launcher(point)
    launch()
    settle(rig.lane)
    return launch


def _alone_s(launch: Launcher) -> float:
    ticket, _ = launch()
    settle(launch.lane)
    return max(seconds_of(ticket), 1e-5)


def seconds_of(ticket: Ticket) -> float:
    """Device seconds of a launch that is over; not a number on the CPU, which has none."""
    return float("nan") if ticket.span is None else ticket.gpu_s()


def card_reader(device: torch.device) -> Callable[[], CardReading]:
    """Return a function that reads the card's clock and power; nan where they cannot be read."""
    nothing = float("nan"), float("nan")
    if device.type != "cuda":
        return lambda: nothing
    try:
        nvml, handle = nvml_of(device)

        def read() -> CardReading:
            [power] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_POWER_INSTANT])
            return float(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)), power.value.uiVal / 1000

        read()
    except Exception:  # not installed, or a driver that refuses: times alone are still useful
        return lambda: nothing
    return read
