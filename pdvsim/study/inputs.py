"""Everything that a run will ask for, asked for beforehand: names, profiles, files, and room for every request.

Of a sweep, the first replication of each setting is asked for: what only another seed's lengths would show is left to
its run.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from pdvsim.sim.config import Experiment
from pdvsim.sim.doubts import vet

if TYPE_CHECKING:
    from pdvsim.sim.assembly import Site
    from pdvsim.sim.core import Request
    from pdvsim.sim.workload.requests import Workload
    from pdvsim.study.sweep import Point


def checked(experiment: Experiment) -> Workload:
    """The requests of a run; a ValueError of one line if it names what is unknown, reads a bad file or has no room.

    Nor may it set an option that does nothing.
    """
    from pdvsim.sim.workload.requests import Workload

    vet([experiment])
    site, workload = _site(experiment), Workload(experiment.traffic, experiment.acceptance)
    site.check([workload.largest()])
    return workload


def check_points(points: Iterable[Point], servable: bool = True) -> None:
    """The same for the points of a sweep, each thing once; without `servable` a request may need more than there is."""
    from pdvsim.sim.workload.requests import Workload

    sites: dict[object, Site] = {}
    largest: dict[object, Request] = {}
    for point in points:
        if point.run:
            continue
        experiment = point.experiment
        # when requests come changes nothing of what they are
        traffic = replace(experiment.traffic, request_rate=float("inf"), burstiness=1, max_concurrency=None)
        whose = (traffic, experiment.acceptance)
        where = (experiment.arch, experiment.server, experiment.hardware)
        if where not in sites:
            sites[where] = _site(experiment)
        if whose not in largest:
            largest[whose] = Workload(experiment.traffic, experiment.acceptance).largest()
        if servable:
            try:
                sites[where].check([largest[whose]])
            except ValueError as error:
                raise ValueError(f"{error} ({point})") from None


def _site(experiment: Experiment) -> Site:
    """The servers: pair, GPU and profile are known and go together."""
    from pdvsim.sim.assembly import Site, covering_profile
    from pdvsim.sim.machine.clock import Clock
    from pdvsim.sim.records import Log

    return Site(Clock(), experiment, covering_profile(experiment), Log())
