"""Metrics of the last seconds of a server, from the rows of its log; rows older than `KEPT_S` are dropped.

They have the names and definitions of a run's. TTFT counts when the first token arrives, TPOT and end-to-end latency
when the request finishes, an inter-token latency if both of its chunks are in the window.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pdvsim.bench.sweep import flatten
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.metrics.launches import LaunchTotals, rate
from pdvsim.sim.metrics.summary import in_time, times_of
from pdvsim.sim.prices.reach import Reaches
from pdvsim.sim.records import Array, Columns, Log, Reader, request_columns, rows_of
from pdvsim.view.series import Floats, over_time, present

KEPT_S = 120.0
STRIP_S = 0.2  # the latest launches
MARKS = {"median": 50.0, "p95": 95.0, "p99": 99.0}
BINS = 100  # of a window
SLOT_S = 0.25
QUARTERS, LEAST_SLOTS = 4, 16  # for judging whether a queue grows


class Recent(NamedTuple):
    """What happened up to a time, since the time before."""

    end_s: float
    requests: Columns  # that finished
    launches: Columns
    deliveries: Columns
    verdicts: Array  # draft tokens accepted and refused


class Gauge(Reader):
    """Reads a log as it grows; `levels` are service levels in seconds, `bandwidths` of each GPU of a server."""

    def __init__(self, log: Log, levels: Mapping[str, float], bandwidths: Sequence[float], replicas: int = 1) -> None:
        super().__init__(log, 1 << 62)
        self.levels, self.bandwidths, self.replicas = levels, bandwidths, replicas
        self.recent: deque[Recent] = deque()
        self.inside: dict[int, Request] = {}
        self._verdicts = np.zeros((2, 2), np.int64)  # of the finished requests, and of all at the last reading

    def arrived(self, request: Request) -> None:
        self.inside[request.id] = request

    def finished(self, request: Request) -> None:
        self.served.append(request)

    def take(self, now_s: float) -> None:
        """Read new rows of the log, up to now."""
        served, self.served = self.served, []
        for request in served:
            self.inside.pop(request.id, None)
        gone = self._verdicts[0] + _verdicts(served)
        verdicts = gone + _verdicts(self.inside.values())
        launches, deliveries = self.log.launches.drain(), self.log.deliveries.drain()
        self.recent.append(Recent(now_s, request_columns(served), launches, deliveries, verdicts - self._verdicts[1]))
        self._verdicts = np.stack((gone, verdicts))
        while self.recent[0].end_s <= now_s - KEPT_S:
            self.recent.popleft()

    def window(self, now_s: float, window_s: float, state: Mapping[str, float]) -> LiveWindow:
        """What happened in the last `window_s` seconds; `state` are metrics of now."""
        empty = Log()
        inside = Recent(now_s, request_columns([*self.inside.values()]), empty.launches.drain(),
                        empty.deliveries.drain(), np.zeros(2, np.int64))  # fmt: skip
        parts = [*(part for part in self.recent if part.end_s > now_s - window_s), inside]
        return LiveWindow(self, state, max(0.0, now_s - window_s), now_s, parts)


@dataclass(frozen=True)
class LiveWindow:
    """The last seconds of a server."""

    gauge: Gauge
    state: Mapping[str, float]
    start_s: float
    end_s: float
    parts: Sequence[Recent]

    @cached_property
    def requests(self) -> Columns:
        """The requests that finished, and those that have not."""
        return _joined([part.requests for part in self.parts])

    @cached_property
    def launches(self) -> Columns:
        """The launches, with those of which only the end is in the window."""
        return _joined([part.launches for part in self.parts])

    @property
    def latest(self) -> Columns:
        """The launches of the last moment."""
        rows = _joined([part.launches for part in self.parts if part.end_s > self.end_s - STRIP_S])
        return rows_of(rows, rows["end_s"] > self.end_s - STRIP_S)

    @cached_property
    def deliveries(self) -> Columns:
        """The chunks of tokens."""
        rows = _joined([part.deliveries for part in self.parts])
        return rows_of(rows, rows["time_s"] > self.start_s)

    @cached_property
    def latencies_ms(self) -> dict[str, Array]:
        """Samples of each latency."""
        requests, deliveries = self.requests, self.deliveries
        first = times_of(rows_of(requests, requests["first_token_s"] > self.start_s))["ttft"]
        done, order = self._finished, np.argsort(deliveries["request"], kind="stable")
        gaps = np.diff(deliveries["time_s"][order])[np.diff(deliveries["request"][order]) == 0]
        times_s = times_of(done)
        samples = times_s | {"ttft": first, "tpot": times_s["tpot"][done["output_tokens"] > 1], "itl": gaps}
        return {name: 1e3 * samples[name] for name in ("ttft", "tpot", "itl", "e2el")}

    @cached_property
    def metrics(self) -> dict[str, float]:
        """The metrics, by the names of a run's; without those of which nothing is known."""
        span_s, done, levels = max(self.end_s - self.start_s, 1e-9), self._finished, self.gauge.levels
        metrics: dict[str, float] = {
            "output_throughput": float(self.deliveries["tokens"].sum()) / span_s,
            "request_throughput": len(done["id"]) / span_s,
            "arrival_rate": float((self.requests["arrival_s"] > self.start_s).sum()) / span_s,
        }
        for name, values in self.latencies_ms.items():
            marks = np.percentile(values, [*MARKS.values()]).tolist() if len(values) else [math.nan] * len(MARKS)
            metrics |= {f"{mark}_{name}_ms": value for mark, value in zip(MARKS, marks, strict=True)}
        if levels:
            good = in_time(times_of(done), levels)
            metrics |= {"attainment": rate(good, len(done["id"])), "request_goodput": good / span_s}
        looked_up = done["num_cached_tokens"] >= 0
        if queries := int(done["prompt_tokens"][looked_up].sum()):
            metrics["prefix_cache_hit_rate"] = 100 * int(done["num_cached_tokens"][looked_up].sum()) / queries
        drafts = self.launches["steps"][self.launches["kind"] == KINDS.index("draft")]
        accepted, refused = np.sum([part.verdicts for part in self.parts], axis=0)
        metrics["draft_length"] = float(drafts.mean()) if len(drafts) else math.nan
        metrics["spec_decode_judged_acceptance_rate"] = 100 * rate(accepted, accepted + refused)
        works = LaunchTotals(Reaches(), self.gauge.bandwidths)
        works.add(self.launches, self.start_s, self.end_s, self.end_s)
        lanes = works.lanes(span_s, self.gauge.replicas)
        metrics |= flatten({"kinds": works.kinds(), "lanes": lanes})
        return {**metrics, **self.state}

    @cached_property
    def series(self) -> dict[str, Any]:
        """The metrics over time, as a report has them."""
        width_s = max(self.end_s - self.start_s, 10.0) / BINS
        first, last = math.ceil(self.start_s / width_s), math.floor(self.end_s / width_s)
        edges: Floats = width_s * np.arange(first, max(first, last) + 1, dtype=np.float64)
        read_s, verdicts = [part.end_s for part in self.parts], np.array([part.verdicts for part in self.parts])
        accepted, refused = (np.histogram(read_s, edges, weights=counts)[0] for counts in verdicts.T)
        judged = accepted + refused
        tokens = np.histogram(self.deliveries["time_s"], edges, weights=self.deliveries["tokens"])[0]
        return over_time(self.requests, self.launches, self.gauge.bandwidths, edges) | {
            "tokens_per_s": tokens / width_s,
            "acceptance": np.divide(100 * accepted, judged, out=np.full(len(judged), math.nan), where=judged > 0),
        }

    @cached_property
    def overloaded(self) -> bool:
        """Whether the requests without a token become ever more."""
        unanswered = present(self.requests["arrival_s"], self.requests["first_token_s"])
        slots_s = np.arange(self.start_s, self.end_s, SLOT_S)
        return grows(unanswered.at(slots_s), int((self.requests["arrival_s"] > self.start_s).sum()))

    @property
    def _finished(self) -> Columns:
        return rows_of(self.requests, self.requests["finish_s"] > self.start_s)


def grows(waiting: Array, arrived: int) -> bool:
    """Whether the queue of a window kept growing: its minimum in each quarter exceeds that of the quarter before.

    The total growth must exceed the random variation of the arrivals. A burst that is being served does not count, nor
    does a window of few slots.
    """
    if len(waiting) < LEAST_SLOTS:
        return False
    shortest = [int(part.min()) for part in np.array_split(waiting, QUARTERS)]
    return shortest == sorted(set(shortest)) and shortest[-1] - shortest[0] > math.sqrt(arrived)


def _joined(parts: Sequence[Columns]) -> Columns:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _verdicts(requests: Iterable[Request]) -> Array:
    """Draft tokens that were accepted, and refused."""
    taken = [request.taken for request in requests]
    return np.array([sum(t.accepted for t in taken), sum(t.refused for t in taken)], np.int64)
