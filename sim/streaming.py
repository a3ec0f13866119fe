"""The metrics of a run whose rows are not kept: `metrics.summarise`, key by key, from rows that are seen once.

Rows are taken out of the log now and then, a few thousand requests at a time. Counts, means and deviations are exact,
to rounding; quantiles are a sketch's, within 1%. What is held beyond the requests in the system does not grow with
their number. Stability is judged from arrivals and departures counted in at least 8,192 bins of time.

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
from pdvsim.sim.ledger import SumLedger
from pdvsim.sim.metrics import STEPS, judged, percentile_name, rate, reached, speculation
from pdvsim.sim.reach import Outside, Reaches
from pdvsim.sim.records import LANES, Columns, Log, by_time, launch_columns, request_columns
from pdvsim.sim.sketch import Moments, Spread

Array = NDArray[Any]

REQUESTS = 4096  # served, before they are booked
ROWS = 1 << 18  # of the log, likewise
SUMMED = ("prompt_tokens", "output_tokens", "rounds", "drafted", "accepted")
MOST_ACCEPTED = 64  # of one round; drafts are shorter


class BinnedCensus:
    """Who was there when, for `judged`: from counts."""

    ways_out = 2

    def __init__(self) -> None:
        self.count = 0
        self._arrival, self._left = Moments(), (Moments(), Moments())

    def add(self, requests: Columns) -> None:
        self.count += len(requests["id"])
        self._arrival.add(requests["arrival_s"])
        for moments, name in zip(self._left, ("finish_s", "admitted_s"), strict=True):
            moments.add(requests[name])

    @property
    def first_s(self) -> float:
        return self._arrival.first_s

    @property
    def last_s(self) -> float:
        return self._arrival.last_s

    def present(self, way_out: int, start_s: float, stop_s: float) -> float:
        came, left = self._arrival, self._left[way_out]
        area = came.elapsed_s(stop_s) - came.elapsed_s(start_s) - (left.elapsed_s(stop_s) - left.elapsed_s(start_s))
        return max(0.0, area / (stop_s - start_s))

    def arrived(self, after_s: float, until_s: float) -> float:
        return self._arrival.before(until_s) - self._arrival.before(after_s)


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
            sums = [mine.sum(), works["queue_depth"][mine].sum(), works["bytes"][mine].sum()]
            self._lanes[lane] = self._lanes.get(lane, 0) + np.array(sums, float)
            for gpu in np.unique(place[mine]).tolist():
                here, key = mine & (place == gpu), (lane, gpu)
                begin_s, finish_s = works["start_s"][here].clip(start_s), works["end_s"][here].clip(max=end_s)
                before_s = np.concatenate(([self._reach_s.get(key, -math.inf)], finish_s[:-1]))
                busy_s = float((finish_s - np.maximum(begin_s, before_s)).clip(0).sum())
                self._busy_s[key] = self._busy_s.get(key, 0.0) + busy_s
                self._reach_s[key] = float(finish_s[-1])
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
    """Books a run while it goes on."""

    def __init__(
        self,
        experiment: Experiment,
        bandwidth: float,
        log: Log,
        ledger: SumLedger,
        reaches: Reaches | None = None,
        settled_s: Callable[[], float] = lambda: -math.inf,
    ) -> None:
        """`settled_s` says until when every launch that began is in the log."""
        self.experiment, self.bandwidth = experiment, bandwidth
        self.log, self.ledger, self.settled_s = log, ledger, settled_s
        self.warmup = experiment.scoring.warmup_requests
        self.start_s, self.end_s = math.inf, -math.inf  # first counted arrival, last counted finish
        self.census, self.peak, self.works = BinnedCensus(), Peak(), Lanes(reaches or Reaches())
        self.spreads = {name: Spread() for name in ("ttft", "tpot", "itl", "e2el")}
        self.sums = dict.fromkeys(("count", "good", *SUMMED), 0)
        self.steps_s = dict.fromkeys(STEPS[:-1], 0.0)
        self.by_accepted = np.zeros(MOST_ACCEPTED, np.int64)
        self._served: list[Request] = []
        self._last: dict[int, tuple[float, int]] = {}  # of each request in the system: its last delivery
        self._seconds: dict[int, int] = {}  # tokens in each of the last seconds
        self._most_tokens = 0
        self._now_s = 0.0

    def arrived(self, request: Request) -> None:
        """A request is sent."""
        if request.id >= self.warmup:
            if math.isinf(self.start_s):
                self.start_s = request.arrival_s
            self.peak.moved(request.arrival_s, 1)

    def finished(self, request: Request) -> None:
        """A request has all its tokens, and they are in the log."""
        self._served.append(request)
        self._now_s = request.finish_s
        if request.id >= self.warmup:
            self.end_s = request.finish_s
            self.peak.moved(request.finish_s, -1)
        log, ledger = self.log, self.ledger
        rows = max(len(log.launches), len(log.deliveries), len(ledger.gains), len(ledger.rounds))
        if len(self._served) >= REQUESTS or rows >= ROWS or ledger.launches:
            self._book(math.inf, self.settled_s())

    def close(self) -> dict[str, Any]:
        """The metrics, when all is done."""
        self._book(self.end_s, math.inf)
        sums, scoring = self.sums, self.experiment.scoring
        count, span_s = sums["count"], self.end_s - self.start_s
        tokens_in, tokens_out = sums["prompt_tokens"], sums["output_tokens"]
        metrics: dict[str, Any] = {
            "duration": span_s,
            "completed": count,
            "failed": 0,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": rate(count, span_s),
            "request_goodput": rate(sums["good"], span_s) if scoring.goodput else None,
            "output_throughput": rate(tokens_out, span_s),
            "total_token_throughput": rate(tokens_in + tokens_out, span_s),
            "max_output_tokens_per_s": float(max([self._most_tokens, *self._seconds.values()])),
            "max_concurrent_requests": self.peak.most(),
        }
        ranks = [50.0, *scoring.metric_percentiles]
        for name, spread in self.spreads.items():
            keys = [f"median_{name}_ms", *(f"{percentile_name(p)}_{name}_ms" for p in ranks[1:])]
            marks = [mark * 1e3 for mark in spread.percentiles(ranks)]
            metrics |= {f"mean_{name}_ms": spread.mean * 1e3, f"std_{name}_ms": spread.std * 1e3}
            metrics |= dict(zip(keys, marks, strict=True))
        metrics |= speculation(sums["rounds"], sums["drafted"], sums["accepted"], self._per_position)
        metrics["stability"] = judged(self.experiment.traffic, self.census)
        steps_s = self.steps_s | {
            step: self.steps_s[step] + self.ledger.total_ns.get(f"{step}_ns", 0) * 1e-9 for step in STEPS[1:-1]
        }
        means = {step: seconds / count * 1e3 for step, seconds in steps_s.items()}
        metrics["breakdown_ms"] = means | {"other": self.spreads["e2el"].mean * 1e3 - sum(means.values())}
        metrics["launches"] = self.works.launches
        metrics["lanes"] = self.works.lanes(span_s, self.bandwidth, self.experiment.hardware.replicas)
        metrics["kinds"] = self.works.kinds()
        return metrics | self.works.outside.metrics()

    def _book(self, end_s: float, settled_s: float) -> None:
        """Take what has happened out of the log and into the sums."""
        log, ledger = self.log, self.ledger
        ledger.pack()
        deliveries = by_time([log.deliveries.columns(), *ledger.deliveries], ("request", "time_s"))
        written = by_time([log.launches.columns(), *ledger.launches], ("code", "end_s"))
        for rows in (log.deliveries, log.launches, ledger.deliveries, ledger.launches):
            rows.clear()
        if math.isinf(self.start_s):  # the warm-up is on: only what was run ahead may reach beyond it
            ahead = written["end_s"] > self._now_s
            if ahead.any():
                ledger.launches.append({name: column[ahead] for name, column in written.items()})
        else:
            self.works.add(launch_columns(written), self.start_s, end_s, settled_s)
        self._deliveries(deliveries)
        served, self._served = self._served, []
        if served:
            self._requests(request_columns(served))

    def _deliveries(self, deliveries: Columns) -> None:
        counted = deliveries["request"] >= self.warmup
        order = np.argsort(deliveries["request"][counted], kind="stable")  # each request's stay in order
        ids, tokens, time_s = (deliveries[name][counted][order] for name in ("request", "tokens", "time_s"))
        if not len(ids):
            return
        second, where = np.unique((time_s - self.start_s).astype(np.int64), return_inverse=True)
        for at, gained in zip(second.tolist(), np.bincount(where, weights=tokens).tolist(), strict=True):
            self._seconds[at] = self._seconds.get(at, 0) + int(gained)
        over = [at for at in self._seconds if at < int(self._now_s - self.start_s)]  # none is noted for them any more
        self._most_tokens = max([self._most_tokens, *(self._seconds.pop(at) for at in over)])

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

    def _requests(self, every: Columns) -> None:
        """Requests that are served; their deliveries have been booked."""
        self.census.add(every)
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
        accepted = req["accepted"] - (req["output_tokens"] - 1 - rounds) + seen
        if accepted[has].size and (accepted[has].min() < 0 or accepted[has].max() >= MOST_ACCEPTED):
            self.by_accepted[0] -= 1 << 62  # the rows do not tell
            return
        self.by_accepted -= np.bincount(seen[has], minlength=MOST_ACCEPTED)
        self.by_accepted += np.bincount(accepted[has], minlength=MOST_ACCEPTED)

    def _per_position(self) -> list[float] | None:
        """Share of the rounds that accepted each draft position; None where the rows do not tell."""
        if self.by_accepted.min() < 0 or int(self.by_accepted.sum()) != self.sums["rounds"]:
            return None
        most = int(np.flatnonzero(self.by_accepted)[-1])
        return reached(self.by_accepted[: most + 1], self.sums["rounds"])
