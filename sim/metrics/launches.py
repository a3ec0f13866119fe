"""Totals of launches: how busy each lane was, and how long each kind of launch took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.sketch import Union
from pdvsim.sim.prices.reach import Outside, Reaches
from pdvsim.sim.records import LANES, Array, Columns, Table, rows_of


class LaunchTotals:
    """What each lane and each kind of launch did."""

    def __init__(self, reaches: Reaches, bandwidths: Sequence[float]) -> None:
        """`bandwidths` are bytes per second of each GPU of a server."""
        self.count = 0
        self.outside = Outside(reaches)
        self._bandwidths = np.array(bandwidths, float)
        self._lanes: dict[int, Array] = {}  # launches, queue depths, seconds that their bytes take at full bandwidth
        self._busy: dict[tuple[int, int], Union] = {}  # by lane and GPU
        self._kinds: dict[int, Array] = {}  # launches, rows, tokens, seconds, seconds alone

    def add(self, launches: Columns, start_s: float, end_s: float, settled_s: float) -> None:
        """More launches. What lies outside of the window is cut off; a launch moves its bytes evenly over its time."""
        inside = (launches["start_s"] < end_s) & (launches["end_s"] > start_s)
        launches = launches if inside.all() else rows_of(launches, inside)
        self.count += int(inside.sum())
        self.outside.add(launches, settled_s)
        whole_s = launches["end_s"] - launches["start_s"]
        begin_s, finish_s = launches["start_s"].clip(start_s), launches["end_s"].clip(max=end_s)
        copy_s = launches["bytes"] / self._bandwidths[launches["gpu"]]
        copy_s *= np.divide(finish_s - begin_s, whole_s, out=np.ones_like(whole_s), where=whole_s > 0)
        place = launches["replica"].astype(np.int64) * 256 + launches["gpu"]
        for lane, chosen, count in _groups(launches["lane"]):
            sums = [count, launches["queue_depth"][chosen].sum(), copy_s[chosen].sum()]
            self._lanes[lane] = self._lanes.get(lane, 0) + np.array(sums, float)
            for gpu, here, _ in _groups(place[chosen]):
                busy = self._busy.setdefault((lane, gpu), Union())
                busy.add(begin_s[chosen][here], finish_s[chosen][here], settled_s)
        for kind, chosen, count in _groups(launches["kind"]):
            columns = (launches["rows"], launches["tokens"], whole_s, launches["solo_s"])
            sums = [count, *(column[chosen].sum() for column in columns)]
            self._kinds[kind] = self._kinds.get(kind, 0) + np.array(sums, float)

    def lanes(self, span_s: float, replicas: int) -> dict[str, Any]:
        """Per lane, averaged over the GPUs it runs on: launches, busy share, share of the bandwidth, mean queue."""
        figures: dict[str, Any] = {}
        for lane, (launches, depths, copy_s) in sorted(self._lanes.items()):
            busy_s = [busy.length_s() for (of, _), busy in sorted(self._busy.items()) if of == lane]
            available_s = span_s * max(len(busy_s), replicas)  # a replica that never ran it was idle
            figures[LANES[lane]] = {
                "launches": int(launches),
                "utilisation": rate(sum(busy_s), available_s),
                "bandwidth_share": rate(float(copy_s), available_s),
                "mean_queue_depth": float(depths / launches),
            }
        return figures

    def kinds(self) -> dict[str, Any]:
        """Per kind of launch: count, mean batch, mean time, and slowdown by sharing the GPU."""
        return {
            KINDS[kind]: {
                "launches": int(launches),
                "mean_batch": float(rows / launches),  # decoding rows: a prefill has none
                "mean_tokens": float(tokens / launches),
                "mean_ms": float(ran_s / launches) * 1e3,
                "stretch": rate(float(ran_s), float(solo_s)),
            }
            for kind, (launches, rows, tokens, ran_s, solo_s) in sorted(self._kinds.items())
        }


def rate(count: float, duration_s: float) -> float:
    """`count` per second; nan for a duration of 0."""
    return count / duration_s if duration_s > 0 else math.nan


def _groups(codes: Array) -> list[tuple[int, Array | slice, int]]:
    """Each number that occurs, the rows where it does, and how many: without a copy where it is the only one."""
    counts = np.bincount(codes)
    seen = np.flatnonzero(counts).tolist()
    return [(code, np.flatnonzero(codes == code) if len(seen) > 1 else slice(None), int(counts[code])) for code in seen]


def busy_share(launches: Table) -> float:
    """Share of the time from the first launch's start to the last one's end in which at least one launch ran."""
    start_s, end_s = launches["start_s"], launches["end_s"]
    if not len(start_s):
        return math.nan
    busy = Union()
    busy.add(start_s, end_s, math.inf)
    return rate(busy.length_s(), float(end_s.max() - start_s.min()))
