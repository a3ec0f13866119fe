"""Check inputs before a run: names, profiles, files, and room for every request."""

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
