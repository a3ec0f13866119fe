"""Metrics of the last seconds of a server, from rows that are read once and dropped.

Time is divided into slots, and slots older than `KEPT_S` are dropped, so memory is constant. The metrics are those of a
run (`sim.metrics`) over the slots of a window. TTFT counts when the first token arrives, TPOT and end-to-end latency
when the request finishes. Percentiles of inter-token latency are within 1%; all others are exact.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdvsim.live.station import StationState
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.metrics.chunks import Chunks
from pdvsim.sim.metrics.launches import LaunchTotals, rate
from pdvsim.sim.metrics.sketch import Spread
from pdvsim.sim.metrics.summary import in_time, times_of
from pdvsim.sim.prices.reach import Reaches
from pdvsim.sim.records import LANES, LAUNCH_DTYPES, Array, Columns, Launches, Log, Reader, request_columns, rows_of

SLOT_S = 0.25
KEPT_S = 120.0
STRIP_S = 0.2  # window of single launches; less than a slot
LATENCIES = ("ttft", "tpot", "itl", "e2el")
MARKS = (50.0, 95.0, 99.0)
DRAFT = KINDS.index("draft")
HISTOGRAM_BINS = 36
QUARTERS, LEAST_SLOTS = 4, 16  # for judging whether a queue grows


def _spreads() -> dict[str, Spread]:
    return {name: Spread(rounded=name == "itl") for name in LATENCIES}


@dataclass
class Slot:
    """Events of one time slot."""

    start_s: float
    state: StationState = field(default_factory=StationState)  # at its end
    unanswered: int = 0  # requests without a token, at its end
    counts: Counter[str] = field(default_factory=Counter)  # of requests and tokens
    draft_length: float = 0.0
    spreads: dict[str, Spread] = field(default_factory=_spreads)
    launches: list[Columns] = field(default_factory=list)  # that ended in the slot
    queues: dict[str, float] = field(default_factory=dict)  # mean depth by lane, once the slot ends


class Gauge(Reader):
    """Reads a log as it grows; `levels` are service levels in seconds, `bandwidths` of each GPU of a server."""

    def __init__(self, log: Log, levels: Mapping[str, float], bandwidths: Sequence[float], replicas: int = 1) -> None:
        super().__init__(log, 1 << 62)
        self.levels, self.replicas = levels, replicas
        self._bandwidths = bandwidths
        self.now_s = 0.0
        self.slots: deque[Slot] = deque([Slot(0.0)])
        self.total_tokens = self.total_finished = 0
        self._inside: dict[int, Request] = {}
        self._unanswered: dict[int, float] = {}  # arrival times of requests without a token
        self._chunks = Chunks()
        self._finished_drafts = Counter[str]()
        self._drafts_at_last_update = Counter[str]()

    def arrived(self, request: Request) -> None:
        self._inside[request.id] = request
        self._unanswered[request.id] = request.arrival_s
        self.slots[-1].counts["arrived"] += 1

    def finished(self, request: Request) -> None:
        self.served.append(request)

    def take(self, now_s: float) -> None:
        """Read new rows of the log, up to now."""
        slot, launches, deliveries = self.slots[-1], self.log.launches.drain(), self.log.deliveries.drain()
        if len(launches["start_s"]):
            slot.launches.append(launches)
        if len(deliveries["time_s"]):
            self._delivered(slot, deliveries)
        served, self.served = self.served, []
        if served:
            self._left(slot, request_columns(served))
        for request in served:
            self._inside.pop(request.id, None)
        self._finished_drafts += _verdicts(served)
        verdicts = self._finished_drafts + _verdicts(self._inside.values())
        slot.counts += verdicts - self._drafts_at_last_update
        self._drafts_at_last_update = verdicts
        self.now_s, slot.unanswered = now_s, len(self._unanswered)

    def _delivered(self, slot: Slot, deliveries: Columns) -> None:
        """Count deliveries of tokens, in order of time."""
        time_s = deliveries["time_s"]
        tokens = int(deliveries["tokens"].sum())
        slot.counts["tokens"] += tokens
        self.total_tokens += tokens
        slot.spreads["itl"].add(self._chunks.add(deliveries, np.ones(len(time_s), bool), (0, math.inf)))
        ids, heads = np.unique(deliveries["request"], return_index=True)
        firsts = zip(ids.tolist(), time_s[heads].tolist(), strict=True)
        ttft_s = [first_s - self._unanswered.pop(id) for id, first_s in firsts if id in self._unanswered]
        slot.spreads["ttft"].add(np.array(ttft_s, float))

    def _left(self, slot: Slot, requests: Columns) -> None:
        """Count finished requests; their deliveries have been read."""
        count, times_s = len(requests["id"]), times_of(requests)
        slot.spreads["e2el"].add(times_s["e2el"])
        slot.spreads["tpot"].add(times_s["tpot"][requests["output_tokens"] > 1])
        looked_up = requests["num_cached_tokens"] >= 0
        slot.counts["looked_up"] += int(requests["prompt_tokens"][looked_up].sum())
        slot.counts["cached"] += int(requests["num_cached_tokens"][looked_up].sum())
        slot.counts["finished"] += count
        self.total_finished += count
        if self.levels:
            slot.counts["in_time"] += in_time(times_s, self.levels)
        self._chunks.leave(requests["id"])

    def next_slot(self) -> None:
        """Start the next slot and drop old ones."""
        over = self.slots[-1]
        launches = _joined([over])
        over.launches = [launches]
        lanes = self._works(launches, over).lanes(SLOT_S, self.replicas)
        over.queues = {lane: figures["mean_queue_depth"] for lane, figures in lanes.items()}
        drafted = _draft_length(launches)
        over.draft_length = float(over.state.controller.get("k", 0)) if math.isnan(drafted) else drafted
        self.slots.append(Slot(self.now_s, over.state, over.unanswered))
        while self.slots[0].start_s < self.now_s - KEPT_S:
            self.slots.popleft()

    # ------------------------------------------------------------------------------------------------------------------

    def figures(self, window_s: float) -> dict[str, Any]:
        """Every metric over the last `window_s` seconds, and its values per slot."""
        slots = [slot for slot in self.slots if slot.start_s >= self.now_s - window_s - SLOT_S / 2]
        span_s = max(self.now_s - slots[0].start_s, 1e-9)
        counts, state = sum((s.counts for s in slots), Counter[str]()), self.slots[-1].state
        launches, spreads = _joined(slots), _spreads()
        for slot in slots:
            for name, spread in slot.spreads.items():
                spreads[name].merge(spread)
        works = self._works(launches, slots[0])
        return {
            "now_s": self.now_s,
            "tokens_per_s": counts["tokens"] / span_s,
            "requests_per_s": counts["finished"] / span_s,
            "arrivals_per_s": counts["arrived"] / span_s,
            "marks_ms": {name: [mark * 1e3 for mark in spreads[name].percentiles([*MARKS])] for name in LATENCIES},
            "spreads": {name: spread.counted() for name, spread in spreads.items()},
            "overloaded": grows([s.unanswered for s in slots], counts["arrived"]),
            **vars(state),
            "acceptance": _acceptance(counts),
            "hit_rate": rate(counts["cached"], counts["looked_up"]),
            "attainment": rate(counts["in_time"], counts["finished"]) if self.levels else math.nan,
            "goodput_per_s": counts["in_time"] / span_s if self.levels else math.nan,
            "draft_length": _draft_length(launches),
            "kinds": works.kinds(),
            "lanes": works.lanes(span_s, self.replicas),
            "series": self._series(slots),
            "strip": self._strip(),
            "total_tokens": self.total_tokens,
            "total_finished": self.total_finished,
        }

    def _works(self, launches: Columns, first: Slot) -> LaunchTotals:
        works = LaunchTotals(Reaches(), self._bandwidths)
        works.add(launches, first.start_s, self.now_s, self.now_s)
        return works

    def _series(self, slots: Sequence[Slot]) -> dict[str, Array]:
        """One value per finished slot."""
        over = [s for s in slots if s is not self.slots[-1]]
        columns: dict[str, Array] = {
            "time_s": np.array([s.start_s + SLOT_S for s in over]),
            "tokens_per_s": np.array([s.counts["tokens"] / SLOT_S for s in over]),
            "in_system": np.array([s.state.in_system for s in over], float),
            "acceptance": np.array([_acceptance(s.counts) for s in over]),
            "draft_length": np.array([s.draft_length for s in over]),
        }
        return columns | {f"queue_{lane}": np.array([s.queues.get(lane, 0.0) for s in over]) for lane in LANES}

    def _strip(self) -> Columns:
        """The latest launches."""
        rows = _joined([*self.slots][-2:])
        return rows_of(rows, rows["end_s"] > self.now_s - STRIP_S)


def grows(waiting: Sequence[int], arrived: int) -> bool:
    """Whether the queue of a window kept growing: its minimum in each quarter exceeds that of the quarter before.

    The total growth must exceed the random variation of the arrivals. A burst that is being served does not count, nor
    does a window of few slots.
    """
    if len(waiting) < LEAST_SLOTS:
        return False
    shortest = [int(part.min()) for part in np.array_split(np.array(waiting), QUARTERS)]
    return shortest == sorted(set(shortest)) and shortest[-1] - shortest[0] > math.sqrt(arrived)


def binned(figures: Sequence[dict[str, Any]]) -> None:
    """Replace values by their counts between edges in milliseconds that all have in common."""
    for metric in LATENCIES:
        seen = np.concatenate([shown["spreads"][metric][0] for shown in figures])
        seen = seen[seen > 0] * 1e3
        low, high = (float(seen.min()), float(seen.max())) if len(seen) else (1.0, 10.0)
        edges_ms = np.geomspace(low * 0.98, max(high, low * 1.1) * 1.02, HISTOGRAM_BINS + 1)
        for shown in figures:
            values, counts = shown["spreads"].pop(metric)
            found = np.histogram(values * 1e3, edges_ms, weights=counts)[0]
            shown.setdefault("histograms", {})[metric] = edges_ms, found


def _joined(slots: Sequence[Slot]) -> Columns:
    """The launches of some slots."""
    parts = [part for slot in slots for part in slot.launches] or [Launches().drain()]
    return {name: np.concatenate([part[name] for part in parts]) for name in LAUNCH_DTYPES}


def _verdicts(requests: Iterable[Request]) -> Counter[str]:
    """Draft tokens that were accepted and rejected."""
    verdicts = Counter[str]()
    for request in requests:
        verdicts["accepted"] += request.taken.accepted
        verdicts["rejected"] += request.taken.refused
    return verdicts


def _acceptance(counts: Counter[str]) -> float:
    return rate(counts["accepted"], counts["accepted"] + counts["rejected"])


def _draft_length(launches: Columns) -> float:
    """Mean number of steps of a draft."""
    steps = launches["steps"][launches["kind"] == DRAFT]
    return float(steps.mean()) if len(steps) else math.nan
