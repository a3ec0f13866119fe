"""The figures of the last seconds of a server, simulated or real, from rows that are seen once and then dropped.

Time is cut in slots; each keeps its sums, and those beyond `KEPT_S` are forgotten, so memory is flat. A time to first
token counts when the token comes, the times per token and from end to end when the request is finished. Percentiles of
inter-token latency are within 1%, all others are exact.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.metrics.summary import times_of
from pdvsim.sim.records import LANES, Array, Columns, Log, Reader, request_columns

SLOT_S = 0.25
KEPT_S = 120.0
STRIP_S = 0.2  # of launches, one by one
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MARKS = (50.0, 95.0, 99.0)
LEAST_S, MOST_S, GROWTH = 1e-5, 1e4, 1.02  # of the bins of inter-token latency
BINS = math.ceil(math.log(MOST_S / LEAST_S) / math.log(GROWTH)) + 1
_EDGES = LEAST_S * GROWTH ** np.arange(-1, BINS)  # of bin i: from i to i + 1
_MIDDLES = _EDGES[1:] / math.sqrt(GROWTH)
SHOWN_BINS = 36  # of a histogram
DRAFT = KINDS.index("draft")


@dataclass
class Slot:
    """What happened in one stretch of time."""

    start_s: float
    arrived: int = 0
    finished: int = 0
    in_time: int = 0
    tokens: int = 0
    accepted: int = 0
    refused: int = 0
    in_system: float = 0.0  # at its end
    kv_share: float = 0.0
    k: float = 0.0
    times_s: dict[str, list[float]] = field(default_factory=lambda: {"ttft": [], "tpot": [], "e2el": []})
    itl: Array = field(default_factory=lambda: np.zeros(BINS, np.int64))
    # seconds busy, seconds that the bytes take at full bandwidth, launches, queue depths
    lanes: Array = field(default_factory=lambda: np.zeros((len(LANES), 4)))
    kinds: Array = field(default_factory=lambda: np.zeros((len(KINDS), 4)))  # launches, rows, tokens, steps


class Gauge(Reader):
    """Reads a log as it grows; `levels` are service levels in seconds, `bandwidths` of each GPU of a server."""

    def __init__(self, log: Log, levels: Mapping[str, float], bandwidths: Sequence[float], replicas: int = 1) -> None:
        super().__init__(log, 1 << 62)
        self.levels, self.replicas = levels, replicas
        self._bandwidths = np.array(bandwidths, float)
        self._places = np.zeros((len(LANES), replicas, len(bandwidths)), bool)  # GPUs that have run each lane
        self.now_s = 0.0
        self.slots: deque[Slot] = deque([Slot(0.0)])
        self.queues: dict[str, int] = {}
        self.controller: dict[str, Any] = {}
        self.total_tokens = self.total_finished = 0
        self._inside: dict[int, Request] = {}
        self._last_s: dict[int, float] = {}  # of each request's deliveries
        self._judged = (0, 0)  # accepted and refused of those who are finished
        self._counted = (0, 0)  # of all, up to the last look
        self._strip: deque[Columns] = deque()

    def arrived(self, request: Request) -> None:
        self._inside[request.id] = request
        self.slots[-1].arrived += 1

    def finished(self, request: Request) -> None:
        self.served.append(request)

    def take(self, now_s: float) -> None:
        """Take in what the log holds, which happened up to now."""
        self.launched(self.log.launches.drain())
        self.delivered(self.log.deliveries.drain())
        served, self.served = self.served, []
        self.left(request_columns(served))
        accepted, refused = self._judged
        for request in served:
            self._inside.pop(request.id, None)
            accepted, refused = accepted + request.accepted, refused + request.refused
        self._judged = accepted, refused
        inside = self._inside.values()
        self.judged(accepted + sum(r.accepted for r in inside), refused + sum(r.refused for r in inside))
        self.now_s = now_s

    def launched(self, launches: Columns) -> None:
        """Launches that are over."""
        if not len(launches["start_s"]):
            return
        self._strip.append(launches)
        slot = self.slots[-1]
        before = self.slots[-2] if len(self.slots) > 1 else slot
        lane, start_s, end_s = launches["lane"], launches["start_s"], launches["end_s"]
        self._places[lane, launches["replica"], launches["gpu"]] = True
        whole_s = np.maximum(end_s - start_s, 1e-12)
        early = np.clip((slot.start_s - start_s) / whole_s, 0.0, 1.0) if before is not slot else np.zeros(len(lane))
        for of, share in ((before, early), (slot, 1 - early)):
            for column, weight in enumerate((whole_s, launches["bytes"] / self._bandwidths[launches["gpu"]])):
                of.lanes[:, column] += np.bincount(lane, weight * share, len(LANES))
        slot.lanes[:, 2] += np.bincount(lane, minlength=len(LANES))
        slot.lanes[:, 3] += np.bincount(lane, launches["queue_depth"], len(LANES))
        kind = launches["kind"]
        slot.kinds[:, 0] += np.bincount(kind, minlength=len(KINDS))
        for column, name in enumerate(("rows", "tokens", "steps"), 1):
            slot.kinds[:, column] += np.bincount(kind, launches[name], len(KINDS))

    def delivered(self, deliveries: Columns) -> None:
        """Tokens that reached their requests."""
        if not len(deliveries["time_s"]):
            return
        slot = self.slots[-1]
        tokens = int(deliveries["tokens"].sum())
        slot.tokens += tokens
        self.total_tokens += tokens
        order = np.argsort(deliveries["request"], kind="stable")
        ids, time_s = deliveries["request"][order], deliveries["time_s"][order]
        new = np.concatenate(([True], ids[1:] != ids[:-1]))
        gaps_s = np.diff(time_s, prepend=0.0)
        counted = np.ones(len(ids), bool)
        heads = np.flatnonzero(new)
        lasts = np.append(heads[1:], len(ids)) - 1
        for head, last in zip(heads.tolist(), lasts.tolist(), strict=True):
            id = int(ids[head])
            before_s = self._last_s.get(id)
            if before_s is None:
                counted[head] = False
                if (request := self._inside.get(id)) is not None:
                    slot.times_s["ttft"].append(float(time_s[head]) - request.arrival_s)
            else:
                gaps_s[head] = time_s[head] - before_s
            self._last_s[id] = float(time_s[last])
        at = np.searchsorted(_EDGES, gaps_s[counted], side="right") - 1
        slot.itl += np.bincount(np.clip(at, 0, BINS - 1), minlength=BINS)

    def left(self, requests: Columns) -> None:
        """Requests that have all their tokens; their deliveries have been taken in."""
        slot, count = self.slots[-1], len(requests["id"])
        if not count:
            return
        times_s = times_of(requests)
        slot.times_s["e2el"] += times_s["e2el"].tolist()
        slot.times_s["tpot"] += times_s["tpot"][requests["output_tokens"] > 1].tolist()
        slot.finished += count
        self.total_finished += count
        if self.levels:
            slot.in_time += int(np.logical_and.reduce([times_s[n] <= level for n, level in self.levels.items()]).sum())
        for id in requests["id"].tolist():
            self._last_s.pop(id, None)

    def judged(self, accepted: int, refused: int) -> None:
        """Drafts that the target has accepted and refused, from the start on."""
        slot = self.slots[-1]
        slot.accepted += accepted - self._counted[0]
        slot.refused += refused - self._counted[1]
        self._counted = accepted, refused

    def noted(self, in_system: int, kv_share: float, queues: dict[str, int], controller: dict[str, Any]) -> None:
        """How the server stands now."""
        slot = self.slots[-1]
        slot.in_system, slot.kv_share, slot.k = in_system, kv_share, float(controller.get("k", 0))
        self.queues, self.controller = queues, controller

    def next_slot(self) -> None:
        """A slot is over: the next begins, and what is too old is forgotten."""
        self.slots.append(Slot(self.now_s))
        while self.slots[0].start_s < self.now_s - KEPT_S:
            self.slots.popleft()
        while self._strip and self._strip[0]["end_s"].max() < self.now_s - STRIP_S:
            self._strip.popleft()

    # ------------------------------------------------------------------------------------------------------------------

    def figures(self, window_s: float) -> dict[str, Any]:
        """Every figure over the last `window_s` seconds, and how they went slot by slot."""
        slots = [slot for slot in self.slots if slot.start_s >= self.now_s - window_s - SLOT_S / 2]
        span_s = max(self.now_s - slots[0].start_s, 1e-9) if slots else 1e-9
        finished, in_time = sum(s.finished for s in slots), sum(s.in_time for s in slots)
        accepted, refused = sum(s.accepted for s in slots), sum(s.refused for s in slots)
        lanes = np.sum([s.lanes for s in slots], axis=0) if slots else np.zeros((len(LANES), 4))
        kinds = np.sum([s.kinds for s in slots], axis=0) if slots else np.zeros((len(KINDS), 4))
        spreads = self._spreads(slots)
        # as in a run's metrics: a replica that never ran a lane was idle
        available_s = span_s * np.maximum(self._places.sum(axis=(1, 2)), self.replicas)
        return {
            "now_s": self.now_s,
            "tokens_per_s": sum(s.tokens for s in slots) / span_s,
            "requests_per_s": finished / span_s,
            "arrivals_per_s": sum(s.arrived for s in slots) / span_s,
            "marks_ms": {name: _marks(values, counts) for name, (values, counts) in spreads.items()},
            "spreads": spreads,
            "in_system": self.slots[-1].in_system,
            "kv_share": self.slots[-1].kv_share,
            "queues": self.queues,
            "controller": self.controller,
            "acceptance": accepted / (accepted + refused) if accepted + refused else math.nan,
            "attainment": in_time / finished if self.levels and finished else math.nan,
            "goodput_per_s": in_time / span_s if self.levels else math.nan,
            "draft_length": _mean(kinds[DRAFT, 3], kinds[DRAFT, 0]),
            "batches": {
                kind: _mean(kinds[at, 2 if kind == "prefill" else 1], kinds[at, 0])
                for at, kind in enumerate(KINDS)
                if kinds[at, 0]
            },
            "lanes": {
                LANES[at]: {
                    "busy": min(1.0, busy_s / float(available_s[at])),
                    "bandwidth": copy_s / float(available_s[at]),
                    "queue": _mean(depths, launches),
                }
                for at, (busy_s, copy_s, launches, depths) in enumerate(lanes.tolist())
                if launches
            },
            "series": self._series(slots),
            "strip": self._launches(),
            "total_tokens": self.total_tokens,
            "total_finished": self.total_finished,
        }

    def _spreads(self, slots: Sequence[Slot]) -> dict[str, tuple[Array, Array]]:
        """Values in seconds and how often each was seen, by metric."""
        found: dict[str, tuple[Array, Array]] = {}
        for name in LATENCIES:
            if name == "itl":
                counts = np.sum([s.itl for s in slots], axis=0) if slots else np.zeros(BINS, np.int64)
                seen = np.flatnonzero(counts)
                found[name] = _MIDDLES[seen], counts[seen]
            else:
                values = np.sort(np.array([v for s in slots for v in s.times_s[name]], float))
                found[name] = values, np.ones(len(values), np.int64)
        return found

    def _series(self, slots: Sequence[Slot]) -> dict[str, Array]:
        """One value a slot that is over."""
        over = [s for s in slots if s is not self.slots[-1]]
        judged = [s.accepted + s.refused for s in over]
        drafts = [(s.kinds[DRAFT, 3], s.kinds[DRAFT, 0]) for s in over]
        columns: dict[str, Array] = {
            "time_s": np.array([s.start_s + SLOT_S for s in over]),
            "tokens_per_s": np.array([s.tokens / SLOT_S for s in over]),
            "in_system": np.array([s.in_system for s in over], float),
            "acceptance": np.array([s.accepted / j if j else math.nan for s, j in zip(over, judged, strict=True)]),
            "draft_length": np.array(
                [_mean(steps, count) if count else s.k for s, (steps, count) in zip(over, drafts, strict=True)]
            ),
        }
        for at, lane in enumerate(LANES):
            columns[f"queue_{lane}"] = np.array([s.lanes[at, 3] / max(1.0, s.lanes[at, 2]) for s in over])
        return columns

    def _launches(self) -> Columns:
        """The launches of the last moment: lane, kind, rows, tokens, start and end."""
        names = ("lane", "kind", "rows", "tokens", "start_s", "end_s")
        if not self._strip:
            return {name: np.zeros(0) for name in names}
        rows = {name: np.concatenate([part[name] for part in self._strip]) for name in names}
        late = rows["end_s"] > self.now_s - STRIP_S
        return {name: column[late] for name, column in rows.items()}


def binned(figures: Sequence[dict[str, Any]]) -> None:
    """Put histograms in place of the values, in bins that are the same for all; edges in milliseconds, and shares."""
    for metric in LATENCIES:
        seen = np.concatenate([shown["spreads"][metric][0] for shown in figures])
        seen = seen[seen > 0] * 1e3
        low, high = (float(seen.min()), float(seen.max())) if len(seen) else (1.0, 10.0)
        edges_ms = np.geomspace(low * 0.98, max(high, low * 1.1) * 1.02, SHOWN_BINS + 1)
        for shown in figures:
            values, counts = shown["spreads"][metric]
            heights = np.histogram(values * 1e3, edges_ms, weights=counts)[0]
            shown.setdefault("histograms", {})[metric] = edges_ms, heights / max(1, counts.sum())
    for shown in figures:
        del shown["spreads"]


def _mean(total: float, count: float) -> float:
    return float(total / count) if count else math.nan


def _marks(values: Array, counts: Array) -> list[float]:
    """Percentiles in milliseconds: of values in order that were seen so often."""
    if not len(values):
        return [math.nan] * len(MARKS)
    if counts.max() == 1:
        return [float(mark) * 1e3 for mark in np.percentile(values, MARKS)]
    reached = np.cumsum(counts)
    return [float(values[np.searchsorted(reached, mark / 100 * reached[-1])]) * 1e3 for mark in MARKS]
