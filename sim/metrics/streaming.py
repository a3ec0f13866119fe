"""The metrics of a run whose rows are not kept: `metrics.summarise`, key by key, from rows that are seen once.

Rows are taken out of the log now and then, a few thousand requests at a time. Counts, means and deviations are exact,
to rounding; quantiles are a sketch's, within 1%. What is held beyond the requests in the system does not grow with
their number.

Taken for granted of a simulated run: requests are sent in the order of their numbers, every one of them finishes, and
the works of one lane on one GPU follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.config import Experiment
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.hardware.reach import Outside, Reaches
from pdvsim.sim.metrics.sketch import Spread
from pdvsim.sim.metrics.stability import Census, is_closed_loop, judged
from pdvsim.sim.metrics.summary import (
    DRAFTED,
    PREEMPTION,
    STEPS,
    Window,
    cut,
    percentile_name,
    rate,
    reached,
    speculation,
    totals,
)
from pdvsim.sim.records import LANES, Columns, Log, request_columns

Array = NDArray[Any]

REQUESTS = 4096  # served, before they are booked
ROWS = 1 << 18  # of the log, likewise
SUMMED = ("rounds", *DRAFTED, *PREEMPTION, "resumptions")
MOST_ACCEPTED = 64  # of one round; drafts are shorter


class Peak:
    """Most requests in the system at once; one that leaves makes room for one that arrives at the same time."""

    def __init__(self) -> None:
        self._most = self._inside = 0
        self._now_s = -math.inf
        self._someone_came = False

    def moved(self, time_s: float, by: int) -> None:
        if time_s != self._now_s:
            self.most()
            self._now_s, self._someone_came = time_s, False
        self._inside += by
        self._someone_came = self._someone_came or by > 0

    def forget(self) -> None:
        """Count from now on."""
        self._most = 0

    def most(self) -> int:
        if self._someone_came:
            self._most = max(self._most, self._inside)
        return self._most


class Lanes:
    """What each lane and each kind of launch did."""

    def __init__(self, reaches: Reaches) -> None:
        self.launches = 0
        self.outside = Outside(reaches)
        self._lanes: dict[int, Array] = {}  # launches, queue depths, bytes
        self._busy_s: dict[tuple[int, int], float] = {}  # by lane and GPU
        self._reach_s: dict[tuple[int, int], float] = {}
        self._kinds: dict[int, Array] = {}  # launches, rows, tokens, seconds, seconds alone

    def add(self, works: Columns, start_s: float, end_s: float, settled_s: float) -> None:
        """Works in the order of their ends, of which none before `settled_s` is missing.

        What lies outside of the window is cut off.
        """
        inside = (works["start_s"] < end_s) & (works["end_s"] > start_s)
        works = works if inside.all() else {name: column[inside] for name, column in works.items()}
        self.launches += int(inside.sum())
        self.outside.add(works, settled_s)
        place = works["replica"].astype(np.int64) * 256 + works["gpu"]
        for lane in np.unique(works["lane"]).tolist():
            mine = works["lane"] == lane
            begin_s, finish_s, moved = cut({name: column[mine] for name, column in works.items()}, start_s, end_s)
            sums = [mine.sum(), works["queue_depth"][mine].sum(), moved.sum()]
            self._lanes[lane] = self._lanes.get(lane, 0) + np.array(sums, float)
            for gpu in np.unique(place[mine]).tolist():
                here, key = place[mine] == gpu, (lane, gpu)
                before_s = np.concatenate(([self._reach_s.get(key, -math.inf)], finish_s[here][:-1]))
                busy_s = float((finish_s[here] - np.maximum(begin_s[here], before_s)).clip(0).sum())
                self._busy_s[key] = self._busy_s.get(key, 0.0) + busy_s
                self._reach_s[key] = float(finish_s[here][-1])
        for kind in np.unique(works["kind"]).tolist():
            mine = works["kind"] == kind
            columns = (works["rows"], works["tokens"], works["end_s"] - works["start_s"], works["solo_s"])
            sums = [mine.sum(), *(column[mine].sum() for column in columns)]
            self._kinds[kind] = self._kinds.get(kind, 0) + np.array(sums, float)

    def lanes(self, span_s: float, bandwidth: float, replicas: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for lane, (launches, depths, moved) in sorted(self._lanes.items()):
            busy_s = [s for (of, _), s in self._busy_s.items() if of == lane]
            available_s = span_s * max(len(busy_s), replicas)
            found[LANES[lane]] = {
                "launches": int(launches),
                "utilisation": rate(sum(busy_s), available_s),
                "bandwidth_share": rate(float(moved), available_s * bandwidth),
                "mean_queue_depth": float(depths / launches),
            }
        return found

    def kinds(self) -> dict[str, Any]:
        return {
            KINDS[kind]: {
                "launches": int(launches),
                "mean_batch": float(rows / launches),
                "mean_tokens": float(tokens / launches),
                "mean_ms": float(ran_s / launches) * 1e3,
                "stretch": rate(float(ran_s), float(solo_s)),
            }
            for kind, (launches, rows, tokens, ran_s, solo_s) in sorted(self._kinds.items())
        }


class Tally:
    """Books a run of so many requests while it goes on."""

    def __init__(
        self,
        experiment: Experiment,
        requests: int,
        bandwidth: float,
        log: Log,
        reaches: Reaches | None = None,
        settled_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`settled_s` says until when every launch that began is in the log."""
        self.experiment, self.bandwidth = experiment, bandwidth
        self.log, self.settled_s = log, settled_s
        self.warmup = experiment.scoring.warmup_requests
        self.start_s, self.end_s = math.inf, math.inf  # of the window
        self._last_id = requests - 1
        self._left = requests - self.warmup
        self.census, self.peak, self.works = Census(), Peak(), Lanes(reaches or Reaches())
        self.spreads = {name: Spread() for name in ("ttft", "tpot", "itl", "e2el")}
        self.sums = dict.fromkeys(("count", "good", *SUMMED), 0)
        self.amounts = np.zeros(3)  # of the window: requests, prompt tokens and output tokens
        self.steps_s = dict.fromkeys(STEPS[:-1], 0.0)
        self.by_accepted = np.zeros(MOST_ACCEPTED, np.int64)
        self._served: list[Request] = []
        self._last: dict[int, tuple[float, int]] = {}  # of each request in the system: its last delivery
        self._inside: dict[int, int] = {}  # likewise: tokens in the window
        self._seconds: dict[int, int] = {}  # tokens in each of the last seconds
        self._most_tokens = 0
        self._now_s = 0.0

    @property
    def window(self) -> Window:
        """As far as it is known; what has happened so far lies before an end that is not."""
        return Window(self.start_s, self.end_s, self.warmup > 0)

    def arrived(self, request: Request) -> None:
        """A request is sent."""
        self.peak.moved(request.arrival_s, 1)
        if request.id == self.warmup:
            self.start_s = request.arrival_s
            self.peak.forget()
        drains = request.id == self._last_id and self.warmup > 0 and is_closed_loop(self.experiment.traffic)
        if drains and request.arrival_s > self.start_s:
            self.end_s = request.arrival_s

    def finished(self, request: Request) -> None:
        """A request has all its tokens, and they are in the log."""
        self._served.append(request)
        self._now_s = request.finish_s
        self.peak.moved(request.finish_s, -1)
        if request.id >= self.warmup:
            self._left -= 1
            if not self._left:
                self.end_s = min(self.end_s, request.finish_s)
        rows = max(len(self.log.launches), len(self.log.deliveries))
        if len(self._served) >= REQUESTS or rows >= ROWS:
            self._book(self.settled_s())

    def close(self) -> dict[str, Any]:
        """The metrics, when all is done."""
        self._book(math.inf)
        sums, scoring = self.sums, self.experiment.scoring
        count, span_s = sums["count"], self.window.duration_s
        in_time = (sums["good"], count) if scoring.goodput else None
        metrics = totals(self.window, self.amounts.tolist(), 0, in_time)
        metrics["max_output_tokens_per_s"] = float(max([self._most_tokens, *self._seconds.values()]))
        metrics["max_concurrent_requests"] = self.peak.most()
        metrics |= {name: sums[name] for name in PREEMPTION}
        ranks = [50.0, *scoring.metric_percentiles]
        for name, spread in self.spreads.items():
            keys = [f"median_{name}_ms", *(f"{percentile_name(p)}_{name}_ms" for p in ranks[1:])]
            marks = [mark * 1e3 for mark in spread.percentiles(ranks)]
            metrics |= {f"mean_{name}_ms": spread.mean * 1e3, f"std_{name}_ms": spread.std * 1e3}
            metrics |= dict(zip(keys, marks, strict=True))
        metrics |= speculation(sums, self._per_position)
        metrics["stability"] = judged(self.experiment.traffic, self.census)
        means = {step: seconds / count * 1e3 for step, seconds in self.steps_s.items()}
        metrics["breakdown_ms"] = means | {"other": self.spreads["e2el"].mean * 1e3 - sum(means.values())}
        metrics["launches"] = self.works.launches
        metrics["lanes"] = self.works.lanes(span_s, self.bandwidth, self.experiment.hardware.replicas)
        metrics["kinds"] = self.works.kinds()
        return metrics | self.works.outside.metrics()

    def _book(self, settled_s: float) -> None:
        """Take what has happened out of the log and into the sums."""
        deliveries, launches = self.log.deliveries.drain(), self.log.launches.drain()
        if self.start_s < math.inf:
            self.works.add(launches, self.start_s, self.end_s, settled_s)
            self._deliveries(deliveries)
        served, self._served = self._served, []
        if served:
            self._requests(request_columns(served))

    def _deliveries(self, deliveries: Columns) -> None:
        self._tokens(_rows(deliveries, self.window.holds(deliveries["time_s"])))
        counted = deliveries["request"] >= self.warmup
        order = np.argsort(deliveries["request"][counted], kind="stable")  # each request's stay in order
        ids, tokens, time_s = (deliveries[name][counted][order] for name in ("request", "tokens", "time_s"))
        if not len(ids):
            return
        head = np.flatnonzero(np.concatenate(([True], ids[1:] != ids[:-1])))
        tail = np.append(head[1:], len(ids)) - 1
        known = [self._last.get(id) for id in ids[head].tolist()]
        gap_s = np.diff(time_s, prepend=time_s[:1])
        gap_s[head] = time_s[head] - [math.nan if last is None else last[0] for last in known]
        later = ~np.isnan(gap_s)
        self.spreads["itl"].add(gap_s[later])
        self.by_accepted += np.bincount(tokens[later] - 1, minlength=MOST_ACCEPTED)
        self._last.update(
            zip(ids[tail].tolist(), zip(time_s[tail].tolist(), tokens[tail].tolist(), strict=True), strict=True)
        )

    def _tokens(self, deliveries: Columns) -> None:
        """Tokens that are delivered in the window, and in each of its seconds."""
        tokens, time_s = deliveries["tokens"], deliveries["time_s"]
        ids, whose = np.unique(deliveries["request"], return_inverse=True)
        for id, gained in zip(ids.tolist(), np.bincount(whose, weights=tokens).tolist(), strict=True):
            self._inside[id] = self._inside.get(id, 0) + int(gained)
        second, where = np.unique((time_s - self.start_s).astype(np.int64), return_inverse=True)
        for at, gained in zip(second.tolist(), np.bincount(where, weights=tokens).tolist(), strict=True):
            self._seconds[at] = self._seconds.get(at, 0) + int(gained)
        over = [at for at in self._seconds if at < int(self._now_s - self.start_s)]  # none is noted for them any more
        self._most_tokens = max([self._most_tokens, *(self._seconds.pop(at) for at in over)])

    def _requests(self, every: Columns) -> None:
        """Requests that are served; their deliveries have been booked."""
        self.census.add(every)
        share = np.array([self._inside.pop(id, 0) for id in every["id"].tolist()]) / every["output_tokens"]
        self.amounts += (share.sum(), share @ every["prompt_tokens"], share @ every["output_tokens"])
        counted = every["id"] >= self.warmup
        req = {name: column[counted] for name, column in every.items()}
        ttft_s, e2el_s = req["first_token_s"] - req["arrival_s"], req["finish_s"] - req["arrival_s"]
        later = req["output_tokens"] - 1
        tpot_s = np.divide(req["finish_s"] - req["first_token_s"], later, out=np.zeros_like(e2el_s), where=later > 0)
        for name, values in (("ttft", ttft_s), ("tpot", tpot_s[later > 0]), ("e2el", e2el_s)):
            self.spreads[name].add(values)
        per_request = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}
        levels = self.experiment.scoring.slo()
        if levels:
            met = np.logical_and.reduce([per_request[name] <= level for name, level in levels.items()])
            self.sums["good"] += int(met.sum())
        self.sums["count"] += int(counted.sum())
        for name in SUMMED:
            self.sums[name] += int(req[name].sum())
        self.steps_s["queue"] += float((req["admitted_s"] - req["arrival_s"]).sum())
        for step in STEPS[1:-1]:
            self.steps_s[step] += float(req[f"{step}_s"].sum())
        self._correct_last_rounds(req)

    def _correct_last_rounds(self, req: Columns) -> None:
        """A request's last round was cut at its length: what it accepted follows from the request's total."""
        last_tokens = np.array([self._last.pop(id)[1] for id in req["id"].tolist()], np.int64)
        rounds = req["rounds"]
        has = rounds > 0
        seen = last_tokens - 1
        accepted = req["accepted"] - (req["output_tokens"] - 1 - rounds - req["resumptions"]) + seen
        if accepted[has].size and (accepted[has].min() < 0 or accepted[has].max() >= MOST_ACCEPTED):
            self.by_accepted[0] -= 1 << 62  # the rows do not tell
            return
        self.by_accepted -= np.bincount(seen[has], minlength=MOST_ACCEPTED)
        self.by_accepted += np.bincount(accepted[has], minlength=MOST_ACCEPTED)

    def _per_position(self) -> list[float] | None:
        """Share of the drafting rounds that accepted each draft position; None where the rows do not tell."""
        if self.by_accepted.min() < 0 or int(self.by_accepted.sum()) != self.sums["rounds"] + self.sums["resumptions"]:
            return None
        most = int(np.flatnonzero(self.by_accepted)[-1])
        return reached(self.by_accepted[: most + 1], self.sums["drafts"])


def _rows(columns: Columns, which: Array | slice) -> Columns:
    return {name: column[which] for name, column in columns.items()}
