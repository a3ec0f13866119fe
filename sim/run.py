"""One experiment on simulated time: build the servers, let the requests arrive, keep what happened."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.client import Client
from pdvsim.sim.cluster import Cluster
from pdvsim.sim.config import Experiment
from pdvsim.sim.core import Request
from pdvsim.sim.machine.clock import Clock
from pdvsim.sim.metrics.summary import Tally
from pdvsim.sim.policies import own_errors
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.records import Keeper, Log, Result
from pdvsim.sim.relevance import refuse_idle
from pdvsim.sim.workload.requests import Workload


def simulate(
    experiment: Experiment,
    progress: Callable[[int], None] | None = None,
    blocks: bool = True,
    requests: list[Request] | Workload | None = None,
    profile: Profile | None = None,
    traced: bool = False,
    end: int = 0,
) -> Result:
    """Run an experiment; `blocks=False` turns the fast path off, with the same result.

    `profile` stands in for the experiment's own. `end` is the end of the error bar to take predicted forward times at,
    +1 slow, -1 fast. `traced` also keeps what a timeline shows: the requests of each launch and the host's
    operations.
    """
    refuse_idle([experiment])
    if profile is None:
        profile = covering_profile(experiment)
    if requests is None:
        requests = Workload(experiment.traffic, experiment.acceptance)
    log = Log.of_everything() if traced else Log()
    env = Clock()
    cluster = Cluster(env, experiment, profile, log, end, blocks)
    if isinstance(requests, Workload) and experiment.scoring.detailed:
        requests.check_total()
    cluster.check([requests.largest()] if isinstance(requests, Workload) else requests)
    keeper, tally = Keeper(log), None
    if not experiment.scoring.detailed:
        reaches = profile.reaches(experiment.pair)
        starts = requests.starts if isinstance(requests, Workload) else sum(not request.turn for request in requests)
        tally = Tally(experiment, len(requests), cluster.bandwidths, log, cluster.settled_s, reaches, starts)
    client = Client(env, requests, experiment, cluster, progress, tally or keeper)
    with own_errors(experiment.arch), no_collector():
        client.run()
    metrics = None if tally is None else tally.close()
    keeper.take(env.now)
    return Result(
        experiment, keeper.requests(), keeper.deliveries, keeper.launches, cluster.meta(), metrics,
        log.launches.carried, log.host,
    )  # fmt: skip


@contextmanager
def no_collector() -> Iterator[None]:
    """Spare a run Python's search for reference cycles: millions of rows are kept, and events leave no cycles."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
