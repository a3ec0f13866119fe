"""Time series of a run from its records: queues, batches, draft lengths, utilisation and bandwidth of each lane.

Everything is a step function of time, averaged over equal bins. A lane's queue is known at each of its launches and
kept until the next; after its last launch it is empty. A launch's bytes are spread evenly over its duration, so a bin
that cuts through launches is approximate; over whole launches it is exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.bench.results import Records
from pdvsim.sim.core import KINDS
from pdvsim.sim.records import LANES, Columns

Floats = NDArray[np.float64]

BINS = 600


@dataclass(frozen=True)
class Steps:
    """A step function: 0 before the first time, then each value from its time on."""

    times_s: Floats
    values: Floats

    @classmethod
    def summed(cls, times_s: Floats, changes: Floats) -> Steps:
        """The running sum of changes; those at one time happen together."""
        at, where = np.unique(times_s, return_inverse=True)
        return cls(at, np.bincount(where, changes, len(at)).cumsum())

    def mean(self, edges_s: Floats) -> Floats:
        """Time averages between neighbouring edges."""
        times = np.concatenate((edges_s[:1], self.times_s.clip(edges_s[0], edges_s[-1]), edges_s[-1:]))
        values = np.concatenate(([0.0], self.values))
        area = np.concatenate(([0.0], np.cumsum(values * np.diff(times))))
        return np.diff(np.interp(edges_s, times, area)) / np.diff(edges_s)

    def at(self, times_s: Floats) -> Floats:
        """The value at some times."""
        return np.append(0.0, self.values)[np.searchsorted(self.times_s, times_s, "right")]


def present(start_s: Floats, end_s: Floats, weight: Floats | None = None) -> Steps:
    """Number of intervals that cover a time, or the sum of their weights; one that ends before its start never ends."""
    weight = np.ones(len(start_s)) if weight is None else weight
    ends = end_s >= start_s
    return Steps.summed(np.concatenate((start_s, end_s[ends])), np.concatenate((weight, -weight[ends])))


def waiting(requests: Columns) -> Steps:
    """Requests that have arrived and have no launch yet."""
    return present(requests["arrival_s"], requests["admitted_s"])


def in_flight(requests: Columns) -> Steps:
    """Requests that have arrived and not finished."""
    return present(requests["arrival_s"], requests["finish_s"])


def queue(launches: Columns) -> Steps:
    """Requests queued at a lane of one GPU, as recorded at each of its launches."""
    order = np.argsort(launches["start_s"], kind="stable")
    times = np.append(launches["start_s"][order], launches["end_s"].max())
    return Steps(times, np.append(launches["queue_depth"][order], 0).astype(float))


def busy(launches: Columns) -> Steps:
    """1 while any launch of a lane of one GPU runs, else 0."""
    running = present(launches["start_s"], launches["end_s"])
    return Steps(running.times_s, (running.values > 0.5).astype(float))


def bytes_per_s(launches: Columns) -> Steps:
    """Bytes per second moved by a lane of one GPU."""
    took_s = launches["end_s"] - launches["start_s"]
    some = took_s > 0
    return present(launches["start_s"][some], launches["end_s"][some], launches["bytes"][some] / took_s[some])


def parts_of(records: Records, bins: int = BINS) -> Floats:
    """The edges of `bins` equal parts of a run."""
    requests, launches = records.requests, records.launches
    start_s = float(requests["arrival_s"].min())
    end_s = max(float(requests["finish_s"].max()), float(launches["end_s"].max(initial=start_s)), start_s + 1e-6)
    return np.linspace(start_s, end_s, bins + 1)


def over_time(requests: Columns, launches: Columns, bandwidths: Sequence[float], edges: Floats) -> dict[str, Any]:
    """A run between equally distant edges: lanes by name; shares of one GPU are averaged over the GPUs of the lane.

    `bandwidths` are bytes per second of each GPU of a server.
    """
    series: dict[str, Any] = {
        "edges_s": edges,
        "waiting": waiting(requests).mean(edges),
        "in_flight": in_flight(requests).mean(edges),
        "queue": {},
        "busy": {},
        "bandwidth": {},
        "batch": {},
        "draft_length": [],
    }
    replicas, copies = len(np.unique(requests["replica"])), dict(enumerate(bandwidths))
    place = launches["replica"].astype(np.int64) * 256 + launches["gpu"]
    for code in np.unique(launches["lane"]).tolist():
        lane = LANES[code]
        at = [place == p for p in np.unique(place[launches["lane"] == code])]
        mine = [{k: v[here & (launches["lane"] == code)] for k, v in launches.items()} for here in at]
        gpus = max(len(mine), replicas)  # replicas without launches were idle
        series["queue"][lane] = sum(queue(part).mean(edges) for part in mine)
        series["busy"][lane] = sum(busy(part).mean(edges) for part in mine) / gpus
        shares = [bytes_per_s(part).mean(edges) / copies.get(int(part["gpu"][0]), math.nan) for part in mine]
        if np.isfinite(shares).all():
            series["bandwidth"][lane] = np.maximum(sum(shares) / gpus, 0.0)  # rounding may leave a sum slightly below 0
    for code, kind in enumerate(KINDS):
        chosen = launches["kind"] == code
        if kind != "prefill" and chosen.any():
            series["batch"][kind] = _mean_in_bins(launches, chosen, launches["rows"], edges)
    drafts = (launches["kind"] == KINDS.index("draft")) & (launches["rows"] > 0)
    if drafts.any():
        series["draft_length"] = _mean_in_bins(launches, drafts, launches["steps"], edges, launches["rows"])
    return series


def _mean_in_bins(
    launches: Columns,
    chosen: NDArray[np.bool_],
    values: NDArray[Any],
    edges: Floats,
    weight: NDArray[Any] | None = None,
) -> Floats:
    """The mean over launches that start in a bin; nan if none does."""
    at, values = launches["start_s"][chosen], values[chosen].astype(float)
    heavy = np.ones(len(at)) if weight is None else weight[chosen].astype(float)
    total = np.histogram(at, edges, weights=heavy)[0]
    summed = np.histogram(at, edges, weights=heavy * values)[0]
    means: Floats = np.divide(summed, total, out=np.full(len(total), math.nan), where=total > 0)
    return means
