"""How long a sweep may take: a few of its requests are simulated and timed, and the rest is taken in proportion.

An estimate, not a promise: the first requests of an overloaded point cost less than those behind a long queue, and a
machine that does other things as well is slower.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pdvsim.sim.sweep import with_settings

if TYPE_CHECKING:
    from pdvsim.sim.sweep import Point

SAMPLE = 50  # requests of a point that are timed
MOST_TIMED = 8  # points that are


def core_seconds(points: Sequence[Point]) -> float:
    """Processor time that the points may take, on one core like this one."""
    from pdvsim.sim.band import wanted
    from pdvsim.sim.run import simulate

    if not points:
        return 0.0
    timed = points[:: -(-len(points) // MOST_TIMED)]
    a_request_s = []
    for point in timed:
        traffic, scoring = point.experiment.traffic, point.experiment.scoring
        count = min(SAMPLE, traffic.num_prompts)
        few = with_settings(
            point.experiment, {"num_prompts": count, "warmup_requests": min(scoring.warmup_requests, count - 1)}
        )
        begin_s = time.process_time()
        simulate(few)
        a_request_s.append((time.process_time() - begin_s) / count)
    mean_s = sum(a_request_s) / len(a_request_s)
    banded: dict[object, bool] = {}  # whether points have an error bar is the same for thousands of them
    requests = 0
    for experiment in (point.experiment for point in points):
        key = (experiment.arch, experiment.server.pair, experiment.hardware)
        if key not in banded:
            banded[key] = wanted(experiment)
        # both ends of an error bar are runs of their own
        requests += (3 if banded[key] else 1) * experiment.traffic.num_prompts
    return mean_s * requests
