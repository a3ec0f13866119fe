"""Host time of a launch, of polling for its end, and of reading its result, through the calls of the lanes.

`launch_idle` and `launch_busy` time the launch call with nothing and with work ahead of it; `poll` one question that
is answered no; `outcome` reading a finished result; `turnaround` all the time from call to noticing that is not the
device's own; `handoff` one hand-over between two lanes' workers. On the CPU a launch does the work itself, and none
of these mean anything beyond being positive.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter_ns

from pdvsim.profiler.grid import GridPoint, table
from pdvsim.profiler.rig import Launcher, Rig, settle
from pdvsim.realrun.clock import WallClock
from pdvsim.realrun.engine.engine import LaunchShape
from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.lane import Lane
from pdvsim.sim.policies.base import Process
from pdvsim.sim.prices.host import HostCost, SimulatedHost

QUEUED_LAUNCHES = 2  # to keep the device busy
WARM_UP = 3


def host_costs(rig: Rig, repeats: int) -> Iterator[tuple[GridPoint, LaunchShape, str, int, float]]:
    """(point, shape, what, repeat, seconds) of the calls of each launch of host.txt that fits, and of a hand-over."""
    shape: LaunchShape | None = None
    for point in (point for _, (point,) in table("host.txt") if rig.fits(point)):
        launch = rig.launcher(point)
        shape = launch.fire(launch.draw()).shape
        for what, repeat, seconds in timings(launch, repeats):
            yield point, shape, what, repeat, seconds
        settle(launch.lane)
    if shape is not None:
        for repeat in range(repeats):
            yield point, shape, "handoff", repeat, handoff_s()


def timings(launch: Launcher, repeats: int) -> Iterator[tuple[str, int, float]]:
    """(what, repeat, seconds) of one point."""
    lane = launch.lane
    lane.timing = False  # as a server launches
    for repeat in range(-WARM_UP, repeats):
        data = launch.draw()
        settle(lane)
        began = perf_counter_ns()
        ticket = launch.fire(data)
        launched = perf_counter_ns()
        polls, asked = 0, perf_counter_ns()
        while not ticket.done():
            polls += 1
        polled = perf_counter_ns()
        ticket.outcome()
        read = perf_counter_ns()
        if repeat >= 0:
            yield "launch_idle", repeat, (launched - began) / 1e9
            yield "poll", repeat, (polled - asked) / (polls + 1) / 1e9
            yield "outcome", repeat, (read - polled) / 1e9
    for repeat in range(repeats):
        ahead = [launch.fire(launch.draw()) for _ in range(QUEUED_LAUNCHES)]
        data = launch.draw()
        began = perf_counter_ns()
        ticket = launch.fire(data)
        launched = perf_counter_ns()
        still_busy = not lane.gpu or not ahead[-1].done()
        ticket.collect()
        if still_busy:
            yield "launch_busy", repeat, (launched - began) / 1e9
    lane.timing = lane.gpu
    for repeat in range(repeats if lane.gpu else 0):
        data = launch.draw()
        settle(lane)
        began = perf_counter_ns()
        ticket = launch.fire(data)
        while not ticket.done():
            pass
        noticed = perf_counter_ns()
        yield "turnaround", repeat, (noticed - began) / 1e9 - ticket.gpu_s()


def handoff_s(times: int = 2000) -> float:
    """Seconds of one hand-over between two lanes, as policies make it: two workers that wake each other in turn."""
    env = WallClock()
    lanes = [Lane(env, SimulatedHost(HostCost(0.0, 0.0, 0.0)), name) for name in ("decode", "verify")]
    request = Request(0, 0.0, 1, 1, b"")
    over = env.event()

    def worker(mine: Lane, other: Lane, rounds: int) -> Process:
        for _ in range(rounds):
            if not mine:
                yield mine.wait()
            other.put(mine.take(1))
        if not over.triggered:
            over.succeed()

    for mine, other in (lanes, lanes[::-1]):
        env.process(worker(mine, other, times // 2))
    lanes[0].rows.add(Batch([request]))
    begin = perf_counter_ns()
    env.run_to(over)
    return (perf_counter_ns() - begin) / 1e9 / times
