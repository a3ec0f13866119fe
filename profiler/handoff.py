"""What handing requests over between two lanes costs the host, by the policies' own lanes on the wall clock."""

from __future__ import annotations

from time import perf_counter_ns

from pdvsim.realrun.clock import WallClock
from pdvsim.realrun.host import RealHost
from pdvsim.sim.core import Request
from pdvsim.sim.machine.batch import Batch
from pdvsim.sim.machine.lane import Lane
from pdvsim.sim.policies.base import Process


def handoff_s(times: int = 2000) -> float:
    """Seconds of one hand-over between two lanes, as policies make it: two workers that wake each other in turn."""
    env = WallClock()
    lanes = [Lane(env, RealHost(), name) for name in ("decode", "verify")]
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
