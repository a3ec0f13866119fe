"""The metrics of a run, with the names and definitions of `vllm bench serve`, summed over its rows part by part.

Two things differ from vLLM on purpose: a metric without any value is nan, not 0, and `max_output_tokens_per_s` counts
tokens, where vLLM counts chunks (which a speculative server fills with several tokens).

Rates are measured over a window of time; latencies, acceptance and goodput over requests. Without a warm-up the window
is vLLM's, from the first arrival to the last finish, and all requests count. With a warm-up the requests after it
count, and the window opens when the first of them is sent. Every token delivered in the window counts, also of warm-up
requests; a request and its prompt count by the share of its tokens delivered in the window. The window of a closed loop
closes when the last request is sent, because the loop then drains; that of a steady state (`Scoring.steady`) when the
last request is sent that waits for no answer, and later requests do not count. Any other window, and one that would be
empty, closes at the last finish.

Only what later parts may still change is kept: running launches and requests in the system. `settled_s` guarantees that
everything in later parts starts or happens no earlier.

Not modelled: clients, the network and detokenisation.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdvsim.sim.config import Experiment, Scoring, Traffic
from pdvsim.sim.core import KINDS, Request
from pdvsim.sim.metrics.chunks import Chunks
from pdvsim.sim.metrics.launches import LaunchTotals, rate
from pdvsim.sim.metrics.sketch import Crowd, Seconds, Spread
from pdvsim.sim.metrics.stability import Census, is_closed_loop, label_of
from pdvsim.sim.prices.reach import Reaches
from pdvsim.sim.records import (
    LANES,
    REQUESTS,
    ROLES,
    Array,
    Columns,
    Log,
    Reader,
    Result,
    Table,
    parts,
    request_columns,
    rows_of,
)

if TYPE_CHECKING:
    import pandas as pd

DRAFTED = ("drafts", "drafted", "accepted", "refused")  # what the speculation metrics are counted from
STEPS = ("queue", "prefill", "draft", "wait", "verify", "other")
PREEMPTION = ("preemptions", "recomputed_tokens")
CACHED = ("prefix_cache_queries", "prefix_cache_hits", "cached_requests", "missed_requests", "conversations")


def summarise(result: Result, scoring: Scoring | None = None) -> dict[str, Any]:
    """Every metric of one run: vLLM's flat keys, then lanes, kinds of launch and where the requests' time went."""
    if result.streamed is not None:
        if scoring not in (None, result.experiment.scoring):
            raise ValueError("the records of this run were not kept (--no-detailed): it cannot be scored again")
        return result.streamed
    scoring = scoring or result.experiment.scoring
    traffic, meta = result.experiment.traffic, result.meta
    every, finished = _numbered(result.requests), result.requests["finish_s"] >= 0
    alike = [float(meta.get("bandwidth_bytes_per_s", math.nan))] * (
        result.experiment.placement.gpus * result.experiment.hardware.data_parallel_size
    )
    bandwidths = meta.get("bandwidths_bytes_per_s", alike)
    sums = Sums(result.experiment, scoring, bandwidths, meta.get("reaches", Reaches()))
    sums.window = _window(every, finished, traffic, scoring)
    for launches, settled_s in _in_time(result.launches, "start_s"):
        sums.launches(launches, settled_s)
    served = every
    if not finished.all():
        served = rows_of(every, finished)
        sums.census.add(rows_of(every, ~finished))
        sums.failed = int((~finished).sum())
    sums.crowd.add(served["arrival_s"], served["finish_s"], sums.window.start_s, math.inf)
    by_finish, done = np.argsort(served["finish_s"], kind="stable"), 0
    renumbered = _renumbering(result.requests["id"], every["id"], finished)
    for deliveries, settled_s in _in_time(result.deliveries, "time_s"):
        sums.deliveries(renumbered(deliveries), settled_s)
        upto = int(np.searchsorted(served["finish_s"], settled_s, sorter=by_finish))
        sums.requests(rows_of(served, np.sort(by_finish[done:upto])))
        done = upto
    return sums.metrics()


def latencies_s(requests: Columns, deliveries: Columns, warmup: int) -> dict[str, Array]:
    """Samples of each latency metric in seconds: one value per counted request; for itl one per later chunk."""
    every, finished = _numbered(requests), requests["finish_s"] >= 0
    req = rows_of(every, finished & (every["id"] >= warmup))
    chunks = _renumbering(requests["id"], every["id"], finished)(deliveries)
    times_s = times_of(req) | {"itl": Chunks().add(chunks, np.ones(len(chunks["request"]), bool), (warmup, math.inf))}
    return times_s | {"tpot": times_s["tpot"][req["output_tokens"] > 1]}


def frames(result: Result) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Requests, launches and deliveries as pandas frames, with lane, kind and role by name."""
    if result.streamed is not None:
        raise ValueError("the records of this run were not kept (--no-detailed)")
    import pandas as pd

    names = {"lane": LANES, "kind": KINDS, "role": ROLES}
    launches = pd.DataFrame(dict(result.launches))
    for column, words in names.items():
        launches[column] = pd.Categorical.from_codes(launches[column], pd.Index(words))
    return pd.DataFrame(result.requests), launches, pd.DataFrame(dict(result.deliveries))


def percentile_name(percentile: float) -> str:
    """The percentile as vLLM writes it in a key: p99, p99.9."""
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


class RateWindow(NamedTuple):
    """The stretch of time that a run's rates are of."""

    start_s: float
    end_s: float
    trimmed: bool  # a warm-up was left out
    until: float = math.inf  # number of the first request that is sent too late to count

    def holds(self, time_s: Array) -> Array:
        """Mask of the times in it. What a batch delivers at the very moment that a window opens is from before it."""
        early = time_s <= self.start_s if self.trimmed else time_s < self.start_s
        return ~early & (time_s <= self.end_s)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


class Sums:
    """The sums of a run, and its metrics. Requests are numbered in order of arrival; those of the warm-up do not count.

    With `rounded` latencies memory does not grow with their number.
    """

    def __init__(
        self,
        experiment: Experiment,
        scoring: Scoring,
        bandwidths: Sequence[float],
        reaches: Reaches,
        rounded: bool = False,
    ) -> None:
        self._experiment, self._scoring = experiment, scoring
        # as far as it is known: what has happened so far lies before an end that is not
        self.window = RateWindow(math.inf, math.inf, scoring.warmup_requests > 0 or scoring.steady)
        self.census, self.crowd, self.failed = Census(), Crowd(), 0
        self._launches, self._chunks, self._seconds = LaunchTotals(reaches, bandwidths), Chunks(), Seconds()
        self._spreads = {name: Spread(rounded) for name in ("ttft", "tpot", "itl", "e2el")}
        self._counts = dict.fromkeys(("count", "good", *DRAFTED, *PREEMPTION, *CACHED), 0)
        self._amounts = np.zeros(3)  # of the window: requests, prompt tokens and output tokens
        self._steps_s = dict.fromkeys(STEPS[:-1], 0.0)
        self._ttft_s = {"hit": 0.0, "miss": 0.0}

    def launches(self, launches: Columns, settled_s: float) -> None:
        """Add launches, in any order."""
        self._launches.add(launches, self.window.start_s, self.window.end_s, settled_s)

    def deliveries(self, deliveries: Columns, settled_s: float) -> None:
        """Add deliveries; those of a request in the order of time."""
        inside = self.window.holds(deliveries["time_s"])
        start_s = self.window.start_s
        self._seconds.add(deliveries["time_s"][inside] - start_s, deliveries["tokens"][inside], settled_s - start_s)
        counted = (self._scoring.warmup_requests, self.window.until)
        self._spreads["itl"].add(self._chunks.add(deliveries, inside, counted))

    def requests(self, every: Columns) -> None:
        """Add finished requests, whose deliveries have been added."""
        if not len(every["id"]):
            return
        self.census.add(every)
        got = self._chunks.leave(every["id"])
        share = got["inside"] / every["output_tokens"] if self.window.trimmed else np.ones(len(every["id"]))
        self._amounts += [share @ by for by in (np.ones(len(share)), every["prompt_tokens"], every["output_tokens"])]
        counted = (every["id"] >= self._scoring.warmup_requests) & (every["id"] < self.window.until)
        req = rows_of(every, counted)
        times_s = times_of(req)
        for name, values in times_s.items():
            self._spreads[name].add(values[req["output_tokens"] > 1] if name == "tpot" else values)
        if levels := self._scoring.slo():  # a lone token has tpot 0 and is always in time
            self._counts["good"] += in_time(times_s, levels)
        self._counts["count"] += int(counted.sum())
        for name in (*DRAFTED, *PREEMPTION):
            self._counts[name] += int(req[name].sum())
        self._look_up(req, times_s["ttft"])
        self._steps_s["queue"] += float((req["admitted_s"] - req["arrival_s"]).sum())
        for step in STEPS[1:-1]:
            self._steps_s[step] += float(req[f"{step}_s"].sum())
        self._chunks.correct_last(req, rows_of(got, counted))

    def _look_up(self, req: Columns, ttft_s: Array) -> None:
        """Count prompt tokens that were looked for in the prefix cache, and found."""
        cached = req["num_cached_tokens"]
        hit, miss = cached > 0, cached == 0
        amounts = (
            req["prompt_tokens"][hit | miss].sum(), cached[hit].sum(), hit.sum(), miss.sum(),
            ((req["session"] >= 0) & (req["turn"] == 0)).sum(),
        )  # fmt: skip
        for name, amount in zip(CACHED, amounts, strict=True):
            self._counts[name] += int(amount)
        self._ttft_s["hit"] += float(ttft_s[hit].sum())
        self._ttft_s["miss"] += float(ttft_s[miss].sum())

    def _prefixes(self) -> dict[str, Any]:
        """vLLM's prefix_cache counters and what follows from them; nothing where no prefix was looked for.

        A conversation costs the time of all GPUs over the number of conversations that were begun.
        """
        queries, hits, cached, missed, conversations = (self._counts[name] for name in CACHED)
        metrics: dict[str, Any] = {}
        if queries:
            metrics = {
                "prefix_cache_queries": queries,
                "prefix_cache_hits": hits,
                "prefix_cache_hit_rate": 100 * hits / queries,
                "mean_num_cached_tokens": hits / (cached + missed),
                "mean_ttft_hit_ms": rate(self._ttft_s["hit"] * 1e3, cached),
                "mean_ttft_miss_ms": rate(self._ttft_s["miss"] * 1e3, missed),
            }
        if conversations:
            gpus = self._experiment.hardware.replicas * self._experiment.gpus
            metrics["conversations"] = conversations
            metrics["gpu_s_per_conversation"] = gpus * self.window.duration_s / conversations
        return metrics

    def metrics(self) -> dict[str, Any]:
        """vLLM's flat keys, then lanes, kinds of launch and where the requests' time went; when all is added."""
        metrics = self._totals()
        metrics["max_output_tokens_per_s"] = self._seconds.most
        metrics["max_concurrent_requests"] = self.crowd.most
        metrics |= {name: self._counts[name] for name in PREEMPTION}
        percentiles = self._scoring.metric_percentiles
        for name, spread in self._spreads.items():
            metrics |= {f"mean_{name}_ms": spread.mean * 1e3, f"std_{name}_ms": spread.std * 1e3}
            keys, ranks = ["median", *map(percentile_name, percentiles)], [50.0, *percentiles]
            marks, errors = spread.percentiles(ranks), spread.standard_errors(ranks, self._independent(name))
            metrics |= {f"{key}_{name}_ms": mark * 1e3 for key, mark in zip(keys, marks, strict=True)}
            metrics |= {f"{key}_{name}_ms_se": error * 1e3 for key, error in zip(keys, errors, strict=True)}
        metrics |= self._speculation() | self._prefixes()
        metrics["stability"] = label_of(self._experiment.traffic, self.census, metrics["request_throughput"])
        metrics["transient_s"] = self.census.transient_s()
        metrics["arrival_rate"] = self.census.arrival_rate()
        # `other` is what lies between: hand-offs, host time, preemption
        means = {step: seconds / self._counts["count"] * 1e3 for step, seconds in self._steps_s.items()}
        metrics["breakdown_ms"] = means | {"other": metrics["mean_e2el_ms"] - sum(means.values())}
        metrics["launches"] = self._launches.count
        metrics["lanes"] = self._launches.lanes(self.window.duration_s, self._experiment.hardware.replicas)
        metrics["kinds"] = self._launches.kinds()
        return metrics | self._launches.outside.metrics()

    def _independent(self, name: str) -> float:
        """Return how many of a latency's values are taken as independent: those of one batch of deliveries are one."""
        count, e2el = self._spreads[name].count, self._spreads["e2el"]
        if name != "itl" or not e2el.count:
            return count
        return count / max(1.0, rate(e2el.mean * e2el.count, self.window.duration_s))  # requests there on average

    def _totals(self) -> dict[str, Any]:
        """vLLM's counts of a window and their rates.

        Goodput is the throughput times the share of requests that met their levels, so that it agrees with the
        percentiles, which are of the same requests.
        """
        completed, tokens_in, tokens_out = self._amounts.tolist()
        duration_s, tokens_out = self.window.duration_s, round(tokens_out)
        if not self.window.trimmed:
            completed, tokens_in = int(completed), int(tokens_in)
        good = completed * self._counts["good"] / self._counts["count"]
        return {
            "duration": duration_s,
            "completed": completed,
            "failed": self.failed,
            "total_input_tokens": tokens_in,
            "total_output_tokens": tokens_out,
            "request_throughput": rate(completed, duration_s),
            "request_goodput": rate(good, duration_s) if self._scoring.goodput else None,
            "output_throughput": rate(tokens_out, duration_s),
            "total_token_throughput": rate(tokens_in + tokens_out, duration_s),
        }

    def _speculation(self) -> dict[str, Any]:
        """vLLM's spec_decode keys; nothing where nothing was drafted.

        vLLM's acceptance rate is over all drafted tokens. The rate per judged token is what an acceptance rate given to
        the simulator means: drafts after the first refused one of a round are not judged.
        """
        drafts, drafted, accepted, refused = (self._counts[name] for name in DRAFTED)
        if not drafted:
            return {}
        shares = self._chunks.per_position(drafts)
        return {
            "spec_decode_acceptance_rate": 100 * accepted / drafted,
            "spec_decode_judged_acceptance_rate": 100 * accepted / (accepted + refused),
            "spec_decode_acceptance_length": 1 + accepted / drafts,
            "spec_decode_num_drafts": drafts,
            "spec_decode_draft_tokens": drafted,
            "spec_decode_judged_tokens": accepted + refused,
            "spec_decode_accepted_tokens": accepted,
        } | ({} if shares is None else {"spec_decode_per_position_acceptance_rates": shares})


def times_of(req: Columns) -> dict[str, Array]:
    """Seconds to the first token, per later token (0 where there is none) and from end to end."""
    e2el_s = req["finish_s"] - req["arrival_s"]
    later = req["output_tokens"] - 1
    tpot_s = np.divide(req["finish_s"] - req["first_token_s"], later, out=np.zeros_like(e2el_s), where=later > 0)
    return {"ttft": req["first_token_s"] - req["arrival_s"], "tpot": tpot_s, "e2el": e2el_s}


def in_time(times_s: dict[str, Array], levels: Mapping[str, float]) -> int:
    """Requests that meet all service levels, of those with these latencies."""
    return int(np.logical_and.reduce([times_s[name] <= level for name, level in levels.items()]).sum())


def _numbered(requests: Columns) -> Columns:
    """The requests with their place in the order of arrival for an id."""
    number = np.empty(len(requests["id"]), np.int64)
    number[np.argsort(requests["arrival_s"], kind="stable")] = np.arange(len(number))
    return requests | {"id": number}


def _renumbering(ids: Array, numbers: Array, finished: Array) -> Callable[[Columns], Columns]:
    """Return a function that renumbers the requests of deliveries and drops unfinished requests."""
    if finished.all() and np.array_equal(ids, numbers):
        return lambda deliveries: deliveries
    order = np.argsort(ids)

    def renumbered(deliveries: Columns) -> Columns:
        row = order[np.searchsorted(ids, deliveries["request"], sorter=order)]
        return rows_of(deliveries | {"request": numbers[row]}, finished[row])

    return renumbered


def _window(every: Columns, finished: Array, traffic: Traffic, scoring: Scoring) -> RateWindow:
    warmup, arrival_s = scoring.warmup_requests, every["arrival_s"]
    counted = finished & (every["id"] >= warmup)
    if not counted.any():
        raise ValueError(f"no request is left to measure: {len(counted)} requests, none finished after the warm-up")
    start_s = float(arrival_s[counted].min())
    last_s, last = float(arrival_s.max()), len(arrival_s) - 1
    if scoring.steady:
        last = int(every["id"][every["turn"] == 0].max())
        last_s = float(arrival_s[every["id"] == last][0])
    trimmed = scoring.steady or warmup > 0
    if last_s > start_s and (scoring.steady or (warmup > 0 and is_closed_loop(traffic))):
        return RateWindow(start_s, last_s, trimmed, last + 1)
    return RateWindow(start_s, float(every["finish_s"][counted].max()), trimmed)


def _in_time(table: Table, when: str) -> Iterator[tuple[Columns, float]]:
    """The parts of a table, each with the earliest time in the parts after it."""
    least_s = [float(part[when].min(initial=math.inf)) for part in parts(table, [when])]
    later_s = list(accumulate(reversed([*least_s[1:], math.inf]), min))
    return zip(parts(table), reversed(later_s), strict=True)


class Tally(Reader):
    """Accumulates the metrics of a run whose rows are not kept: those of `summarise`, from rows that are seen once.

    Rows are taken out of the log now and then. Counts, means and deviations are exact, to rounding; quantiles are a
    sketch's, within 1%. What is held beyond the requests in the system does not grow with their number. Taken for
    granted: requests are sent in the order of their numbers, and every one of them finishes.
    """

    def __init__(
        self,
        experiment: Experiment,
        requests: int,
        bandwidths: Sequence[float],
        log: Log,
        settled_s: Callable[[], float],
        reaches: Reaches | None = None,
        starts: int = 0,
    ) -> None:
        """`settled_s` says until when every launch that began is in the log; `starts` requests wait for no answer."""
        super().__init__(log, REQUESTS)
        self.sums = Sums(experiment, experiment.scoring, bandwidths, reaches or Reaches(), rounded=True)
        self._settled_s = settled_s
        scoring = experiment.scoring
        self._warmup, self._to_send = scoring.warmup_requests, requests
        self._steady, self._starts = scoring.steady, starts
        self._drains = self._warmup > 0 and is_closed_loop(experiment.traffic)
        self._left = requests - self._warmup
        self._came_s = array("d")

    def arrived(self, request: Request) -> None:
        self._came_s.append(request.arrival_s)
        window = self.sums.window
        if request.id == self._warmup:
            self.sums.window = window._replace(start_s=request.arrival_s)
        self._to_send -= 1
        self._starts -= request.turn == 0
        last = request.turn == 0 and not self._starts if self._steady else self._drains and not self._to_send
        if last and request.arrival_s > self.sums.window.start_s:
            self.sums.window = self.sums.window._replace(end_s=request.arrival_s, until=request.id + 1)

    def finished(self, request: Request) -> None:
        if request.id >= self._warmup:
            self._left -= 1
            if not self._left:
                window = self.sums.window
                self.sums.window = window._replace(end_s=min(window.end_s, request.taken.finish_s))
        super().finished(request)

    def take(self, now_s: float) -> None:
        self._drain(now_s, self._settled_s())

    def close(self) -> dict[str, Any]:
        """The metrics, when all is done."""
        self._drain(math.inf, math.inf)
        return self.sums.metrics()

    def _drain(self, now_s: float, settled_s: float) -> None:
        served, self.served = request_columns(self.served), []
        came_s, self._came_s = np.frombuffer(self._came_s), array("d")
        self.sums.launches(self.log.launches.drain(), settled_s)
        self.sums.deliveries(self.log.deliveries.drain(), now_s)
        self.sums.crowd.add(came_s, served["finish_s"], self.sums.window.start_s, now_s)
        self.sums.requests(served)
