"""Everything that points will ask for, asked for beforehand: names, profiles and files, once each.

What depends on the numbers drawn (a request too long for the KV cache under one seed alone) is left to the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pdvsim.sim.config import Experiment, Traffic

if TYPE_CHECKING:
    from pdvsim.sim.sweep import Point


def check_points(points: Sequence[Point]) -> None:
    """A ValueError of one line if a point names what is not there or cannot be read."""
    from pdvsim.sim.workload import make_requests

    seen: set[object] = set()
    for point in points:
        experiment = point.experiment
        hardware = (experiment.arch == "autoregressive", experiment.server.pair, experiment.hardware)
        if hardware not in seen:
            check_hardware(experiment)
            seen.add(hardware)
        if experiment.traffic.dataset_path is None and experiment.acceptance.acceptance_trace is None:
            continue
        whose: Traffic = replace(
            experiment.traffic, seed=0, request_rate=float("inf"), burstiness=1, max_concurrency=None
        )
        if (whose, experiment.acceptance) not in seen:
            make_requests(whose, experiment.acceptance)
            seen.add((whose, experiment.acceptance))


def check_hardware(experiment: Experiment) -> None:
    """A ValueError of one line if pair, GPU or profile are not known, or do not go together."""
    from pdvsim.sim.models import pair
    from pdvsim.sim.run import profile_of

    profile, models = profile_of(experiment), pair(experiment.server.pair)
    profile.fit(models.target)
    if experiment.arch != "autoregressive":
        profile.fit(models.draft)
