"""Before a run: its inputs are checked (names, profiles, files, room for every request), its time and memory estimated.

A few of its requests are simulated and timed, the rest is extrapolated. The first requests of an overloaded point cost
less than later ones, which wait in a long queue, and a busy machine is slower.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from pdvsim.bench.pool import cores
from pdvsim.common.console import say
from pdvsim.sim.config import Experiment
from pdvsim.sim.reading import memory_bytes
from pdvsim.sim.relevance import vet

if TYPE_CHECKING:
    from pdvsim.bench.sweep import Point
    from pdvsim.sim.cluster import Cluster
    from pdvsim.sim.core import Request


TIMED_REQUESTS = 50  # per point
MOST_STEPS = 2_000  # most output tokens and prompt chunks timed; longer requests are cut and scaled
MOST_TIMED_POINTS = 8
HELD = 3.0  # memory of a run, relative to the rows of its requests
SMALL_STEPS = 5_000_000  # runs below this are always short
LONG_S = 600.0
LARGE_MEMORY_SHARE = 0.5


def checked(experiment: Experiment) -> None:
    """A ValueError of one line for an unknown name, a bad file, too little memory, or an option without effect."""
    vet([experiment])
    _check([(experiment, "")], servable=True)


def check_points(points: Iterable[Point], servable: bool = True) -> None:
    """The same for the points of a sweep, each input once; without `servable` memory is not checked.

    The first replication of each setting is checked; other seeds may have longer requests, which their runs check.
    """
    _check([(point.experiment, f" ({point})") for point in points if not point.run], servable)


def _check(experiments: Iterable[tuple[Experiment, str]], servable: bool) -> None:
    from pdvsim.sim.assembly import covering_profile
    from pdvsim.sim.cluster import Cluster
    from pdvsim.sim.machine.clock import Clock
    from pdvsim.sim.records import Log
    from pdvsim.sim.workload.requests import Workload

    clusters: dict[object, Cluster] = {}
    largest: dict[object, Request] = {}
    for experiment, name in experiments:
        # arrival times do not change the requests
        traffic = replace(experiment.traffic, request_rate=float("inf"), burstiness=1, max_concurrency=None)
        whose = (traffic, experiment.acceptance)
        where = (experiment.arch, experiment.server, experiment.hardware)
        if where not in clusters:
            clusters[where] = Cluster(Clock(), experiment, covering_profile(experiment), Log())
        if whose not in largest:
            largest[whose] = Workload(experiment.traffic, experiment.acceptance).largest()
        if servable:
            try:
                clusters[where].check([largest[whose]])
            except ValueError as error:
                raise ValueError(f"{error}{name}") from None


class Cost(NamedTuple):
    """CPU time of all runs on one core of this machine, and memory of one run."""

    core_s: float
    run_bytes: float


def cost(experiments: Sequence[Experiment]) -> Cost:
    """Estimated time and memory of these experiments."""
    if not experiments:
        return Cost(0.0, 0.0)
    from_file = experiments[0].traffic.dataset_path is not None  # read again for every point timed
    timed = experiments[:: -(-len(experiments) // (1 if from_file else MOST_TIMED_POINTS))]
    sampled = list(map(_of_a_request, timed))
    mean_s, mean_bytes = (sum(figures) / len(sampled) for figures in zip(*sampled, strict=True))
    from pdvsim.bench.band import wanted

    place = attrgetter("arch", "server.pair", "hardware")
    times = {place(e): 3 if wanted(e) else 1 for e in {place(e): e for e in experiments}.values()}  # both ends of a bar
    runs = sum(times[place(e)] * e.traffic.num_prompts for e in experiments)
    recorded = (e.traffic.num_prompts for e in experiments if e.scoring.detailed)
    return Cost(mean_s * runs, mean_bytes * max(recorded, default=0))


def _of_a_request(experiment: Experiment) -> tuple[float, float]:
    """CPU time, and bytes of its row; other records go to disk."""
    from pdvsim.sim.run import simulate
    from pdvsim.sim.workload.requests import Workload

    count = min(TIMED_REQUESTS, experiment.traffic.num_prompts)
    warmup = min(experiment.scoring.warmup_requests, count - 1)
    few = experiment.with_settings(num_prompts=count, warmup_requests=warmup, detailed=True)
    lengths = Workload(few.traffic, few.acceptance).lengths.mean(axis=0)
    chunks = lengths[0] / few.server.max_num_batched_tokens
    times = max(1.0, count * float(lengths[1] + chunks) / MOST_STEPS)
    if times > 1:
        prompt, output = (max(1, int(length / times)) for length in lengths)
        few = few.with_settings(input_len=prompt, output_len=output)
    begin_s = time.process_time()
    result = simulate(few)
    spent_s = time.process_time() - begin_s
    held = HELD * sum(column.nbytes for column in result.requests.values())
    return spent_s * times / count, held / count


def forewarn(experiments: Sequence[Experiment], jobs: int | None = 1) -> None:
    """Say so before long runs, or runs that need much memory."""
    if text := forewarning(experiments, jobs):
        say("pdvsim", text)


def forewarning(experiments: Sequence[Experiment], jobs: int | None) -> str:
    """Warning before long runs or runs that need much memory; empty otherwise."""
    if sum(map(_steps, experiments)) < SMALL_STEPS:
        return ""
    estimate, concurrent = cost(experiments), min(jobs or cores(), len(experiments))
    wall_s, needed = estimate.core_s / concurrent, estimate.run_bytes * concurrent
    total = memory_bytes()
    if wall_s <= LONG_S and needed <= LARGE_MEMORY_SHARE * total:
        return ""
    took = f"{wall_s / 60:.0f} minutes" if wall_s < 2 * 3600 else f"{wall_s / 3600:.0f} hours"
    memory = f" and {needed / 1e9:.0f} GB of this machine's {total / 1e9:.0f} GB" if needed > 0.1 * total else ""
    return f"this takes an estimated {took} on {concurrent} core{'s' * (concurrent > 1)}{memory}"


def _steps(experiment: Experiment) -> float:
    traffic, server = experiment.traffic, experiment.server
    chunks = (traffic.input_len or 1024) / server.max_num_batched_tokens
    return traffic.num_prompts * ((traffic.output_len or 200) + chunks)
