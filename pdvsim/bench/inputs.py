"""Check inputs before a run: names, profiles, files, and room for every request.

Of a sweep, the first replication of each setting is checked; other seeds may have longer requests, which their runs
check.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pdvsim.sim.config import Experiment
from pdvsim.sim.relevance import vet

if TYPE_CHECKING:
    from pdvsim.bench.sweep import Point
    from pdvsim.sim.cluster import Cluster
    from pdvsim.sim.core import Request
    from pdvsim.sim.workload.requests import Workload


def checked(experiment: Experiment) -> Workload:
    """The requests of a run; a ValueError of one line for an unknown name, a bad file or too little memory.

    Options without effect are rejected too.
    """
    from pdvsim.sim.workload.requests import Workload

    vet([experiment])
    cluster, workload = _cluster(experiment), Workload(experiment.traffic, experiment.acceptance)
    cluster.check([workload.largest()])
    return workload


def check_points(points: Iterable[Point], servable: bool = True) -> None:
    """The same for the points of a sweep, each input once; without `servable` memory is not checked."""
    from pdvsim.sim.workload.requests import Workload

    clusters: dict[object, Cluster] = {}
    largest: dict[object, Request] = {}
    for point in points:
        if point.run:
            continue
        experiment = point.experiment
        # arrival times do not change the requests
        traffic = replace(experiment.traffic, request_rate=float("inf"), burstiness=1, max_concurrency=None)
        whose = (traffic, experiment.acceptance)
        where = (experiment.arch, experiment.server, experiment.hardware)
        if where not in clusters:
            clusters[where] = _cluster(experiment)
        if whose not in largest:
            largest[whose] = Workload(experiment.traffic, experiment.acceptance).largest()
        if servable:
            try:
                clusters[where].check([largest[whose]])
            except ValueError as error:
                raise ValueError(f"{error} ({point})") from None


def _cluster(experiment: Experiment) -> Cluster:
    """Check servers: pair, GPU and profile are known and compatible."""
    from pdvsim.sim.assembly import covering_profile
    from pdvsim.sim.cluster import Cluster
    from pdvsim.sim.machine.clock import Clock
    from pdvsim.sim.records import Log

    return Cluster(Clock(), experiment, covering_profile(experiment), Log())
