"""The metrics of a run, with the names and definitions of `vllm bench serve`, from its rows.

Two things differ from vLLM on purpose: a metric without any value is nan, not 0, and `max_output_tokens_per_s` counts
tokens, where vLLM counts chunks (which a speculative server fills with several tokens).

Rates are measured over a window of time; latencies, acceptance and goodput over requests. Without a warm-up the window
is vLLM's, from the first arrival to the last finish, and all requests count. With a warm-up the requests after it
count, and the window opens when the first of them is sent. Every token delivered in the window counts, also of warm-up
requests; a request and its prompt count by the share of its tokens delivered in the window. The window of a closed loop
closes when the last request is sent, because the loop then drains; that of a steady state (`Scoring.steady`) when the
last request is sent that waits for no answer, and later requests do not count. Any other window, and one that would be
empty, closes at the last finish.

Rows of requests are in memory; launches and deliveries, of which there are far more, are read part by part.

Not modelled: clients, the network and detokenisation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from pdvsim.sim.config import Scoring, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.metrics.launches import LaunchTotals, rate
from pdvsim.sim.metrics.spread import Chunks, Spread, in_time, times_of
from pdvsim.sim.metrics.steady import Census, is_closed_loop
from pdvsim.sim.prices.reach import Reaches
from pdvsim.sim.records import LANES, ROLES, Array, Columns, Result, parts, rows_of

if TYPE_CHECKING:
    import pandas as pd

STEPS = ("queue", "prefill", "draft", "wait", "verify", "other")


def summarise(result: Result, scoring: Scoring | None = None) -> dict[str, Any]:
    """Every metric of one run: vLLM's flat keys, then lanes, kinds of launch and where the requests' time went.

    Requests are numbered in order of arrival; those of the warm-up do not count.
    """
    experiment = result.experiment
    if result.streamed is not None:
        if scoring not in (None, experiment.scoring):
            raise ValueError("the records of this run were not kept (--no-detailed): it cannot be scored again")
        return result.streamed
    scoring = scoring or experiment.scoring
    every, finished = _numbered(result.requests), result.requests["finish_s"] >= 0
    window = _window(every, finished, experiment.traffic, scoring)
    counted = finished & (every["id"] >= scoring.warmup_requests) & (every["id"] < window.until)
    served, req = rows_of(every, finished), rows_of(every, counted)
    times_s = times_of(req)
    spreads = {name: Spread() for name in ("ttft", "tpot", "itl", "e2el")}
    for name, values in times_s.items():
        spreads[name].add(values[req["output_tokens"] > 1] if name == "tpot" else values)
    works = _launches(result, window)
    chunks, most_tokens = _deliveries(result, every, finished, counted, window, spreads["itl"])
    e2el, census = spreads["e2el"], Census(every)
    levels = scoring.slo()
    good = in_time(times_s, levels) / len(req["id"]) if levels else None  # a lone token has tpot 0, and is in time
    metrics = _totals(served, chunks.inside[served["id"]], len(every["id"]), good, window)
    metrics["max_output_tokens_per_s"] = float(most_tokens)
    metrics["max_concurrent_requests"] = _most_inside(served, window.start_s)
    metrics |= {name: int(req[name].sum()) for name in ("preemptions", "recomputed_tokens")}
    there = max(1.0, rate(e2el.mean * e2el.count, window.duration_s)) if e2el.count else 1.0  # requests, on average
    keys, ranks = ["median", *map(percentile_name, scoring.metric_percentiles)], [50.0, *scoring.metric_percentiles]
    for name, spread in spreads.items():
        independent = spread.count / there if name == "itl" else spread.count  # chunks of one round are as one
        metrics |= {f"mean_{name}_ms": spread.mean * 1e3, f"std_{name}_ms": spread.std * 1e3}
        marks, errors = spread.percentiles(ranks), spread.standard_errors(ranks, independent)
        metrics |= {f"{key}_{name}_ms": mark * 1e3 for key, mark in zip(keys, marks, strict=True)}
        metrics |= {f"{key}_{name}_ms_se": error * 1e3 for key, error in zip(keys, errors, strict=True)}
    metrics |= _speculation(req, chunks) | _prefixes(req, times_s["ttft"])
    if conversations := int(((req["session"] >= 0) & (req["turn"] == 0)).sum()):
        gpus = experiment.hardware.replicas * experiment.gpus  # a conversation costs the time of all of them
        metrics["conversations"] = conversations
        metrics["gpu_s_per_conversation"] = gpus * window.duration_s / conversations
    metrics["stability"] = census.label(experiment.traffic, metrics["request_throughput"])
    metrics["transient_s"] = census.transient_s()
    metrics["arrival_rate"] = census.arrival_rate()
    # `other` is what lies between: hand-offs, host time, preemption
    steps_s = [(req["admitted_s"] - req["arrival_s"]).sum(), *(req[f"{step}_s"].sum() for step in STEPS[1:-1])]
    means = {step: float(total) / len(req["id"]) * 1e3 for step, total in zip(STEPS, steps_s, strict=False)}
    metrics["breakdown_ms"] = means | {"other": metrics["mean_e2el_ms"] - sum(means.values())}
    metrics["launches"] = works.count
    metrics["lanes"] = works.lanes(window.duration_s, experiment.hardware.replicas)
    metrics["kinds"] = works.kinds()
    return metrics | works.outside.metrics()


def without_rows(result: Result) -> Result:
    """A run with its metrics only."""
    metrics = summarise(result)
    requests, deliveries, launches = (
        rows_of(next(parts(table)), slice(0)) for table in (result.requests, result.deliveries, result.launches)
    )
    return replace(result, requests=requests, deliveries=deliveries, launches=launches, streamed=metrics)


def latencies_s(requests: Columns, deliveries: Columns, warmup: int) -> dict[str, Array]:
    """Samples of each latency metric in seconds: one value per counted request; for itl one per later chunk."""
    every, finished = _numbered(requests), requests["finish_s"] >= 0
    counted = finished & (every["id"] >= warmup)
    req, rows = rows_of(every, counted), _renumbering(requests["id"], every["id"], finished)(deliveries)
    chunks = Chunks(_by_id(every["id"], counted))
    times_s = times_of(req) | {"itl": chunks.add(rows, np.ones(len(rows["request"]), bool))}
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


def _launches(result: Result, window: RateWindow) -> LaunchTotals:
    """What the launches in the window add up to."""
    experiment, meta = result.experiment, result.meta
    gpus = experiment.placement.gpus * experiment.hardware.data_parallel_size
    alike = [float(meta.get("bandwidth_bytes_per_s", math.nan))] * gpus
    works = LaunchTotals(meta.get("reaches", Reaches()), meta.get("bandwidths_bytes_per_s", alike))
    least_s = [float(part["start_s"].min(initial=math.inf)) for part in parts(result.launches, ["start_s"])]
    later_s = list(accumulate(reversed([*least_s[1:], math.inf]), min))  # the earliest start in the parts after each
    for part, settled_s in zip(parts(result.launches), reversed(later_s), strict=True):
        works.add(part, window.start_s, window.end_s, settled_s)
    return works


def _deliveries(
    result: Result, every: Columns, finished: Array, counted: Array, window: RateWindow, itl: Spread
) -> tuple[Chunks, int]:
    """The chunks of each request, whose gaps are added to `itl`; and the most tokens in any one second."""
    renumbered = _renumbering(result.requests["id"], every["id"], finished)
    chunks, per_second = Chunks(_by_id(every["id"], counted)), Counter[int]()
    for part in parts(result.deliveries):
        rows = renumbered(part)
        inside = window.holds(rows["time_s"])
        itl.add(chunks.add(rows, inside))
        seconds, at = np.unique((rows["time_s"][inside] - window.start_s).astype(np.int64), return_inverse=True)
        tokens = np.bincount(at, rows["tokens"][inside]).astype(np.int64)
        per_second.update(dict(zip(seconds.tolist(), tokens.tolist(), strict=True)))
    return chunks, max(per_second.values(), default=0)


def _totals(served: Columns, inside: Array, sent: int, good: float | None, window: RateWindow) -> dict[str, Any]:
    """vLLM's counts of a window and their rates; `inside` are the tokens of each request that it received there.

    Goodput is the throughput times the share of requests that met their levels, so that it agrees with the percentiles,
    which are of the same requests.
    """
    share = inside / served["output_tokens"] if window.trimmed else np.ones(len(inside))
    amounts = np.ones(len(share)), served["prompt_tokens"], served["output_tokens"]
    completed, tokens_in, tokens_out = (float(share @ amount) for amount in amounts)
    duration_s, tokens_out = window.duration_s, round(tokens_out)
    if not window.trimmed:
        completed, tokens_in = int(completed), int(tokens_in)
    return {
        "duration": duration_s,
        "completed": completed,
        "failed": sent - len(share),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": rate(completed, duration_s),
        "request_goodput": None if good is None else rate(completed * good, duration_s),
        "output_throughput": rate(tokens_out, duration_s),
        "total_token_throughput": rate(tokens_in + tokens_out, duration_s),
    }


def _most_inside(served: Columns, since_s: float) -> int:
    """Most concurrent requests at an arrival from then on; who leaves as another arrives is not there any more."""
    came_s, left_s = np.sort(served["arrival_s"]), np.sort(served["finish_s"])
    inside = np.arange(1, len(came_s) + 1) - np.searchsorted(left_s, came_s, side="right")
    return int(inside[came_s >= since_s].max(initial=0))


def _speculation(req: Columns, chunks: Chunks) -> dict[str, Any]:
    """vLLM's spec_decode keys; nothing where nothing was drafted.

    vLLM's acceptance rate is over all drafted tokens. The rate per judged token is what an acceptance rate given to
    the simulator means: drafts after the first refused one of a round are not judged.
    """
    drafts, drafted, accepted, refused = (int(req[name].sum()) for name in ("drafts", "drafted", "accepted", "refused"))
    if not drafted:
        return {}
    shares = chunks.per_position(rows_of(req, np.argsort(req["id"])), drafts)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_judged_acceptance_rate": 100 * accepted / (accepted + refused),
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_judged_tokens": accepted + refused,
        "spec_decode_accepted_tokens": accepted,
    } | ({} if shares is None else {"spec_decode_per_position_acceptance_rates": shares})


def _prefixes(req: Columns, ttft_s: Array) -> dict[str, Any]:
    """vLLM's prefix_cache counters and what follows from them; nothing where no prefix was looked for."""
    cached = req["num_cached_tokens"]
    hit, miss = cached > 0, cached == 0
    queries, hits = int(req["prompt_tokens"][hit | miss].sum()), int(cached[hit].sum())
    if not queries:
        return {}
    return {
        "prefix_cache_queries": queries,
        "prefix_cache_hits": hits,
        "prefix_cache_hit_rate": 100 * hits / queries,
        "mean_num_cached_tokens": hits / int((hit | miss).sum()),
        "mean_ttft_hit_ms": rate(float(ttft_s[hit].sum()) * 1e3, int(hit.sum())),
        "mean_ttft_miss_ms": rate(float(ttft_s[miss].sum()) * 1e3, int(miss.sum())),
    }


def _by_id(ids: Array, column: Array) -> Array:
    """A column of the requests in the order of their numbers."""
    ordered = np.empty_like(column)
    ordered[ids] = column
    return ordered


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
