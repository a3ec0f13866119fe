"""What a run amounts to, in the names and definitions of `vllm bench serve`, computed from the rows of a Result.

Two things differ from vLLM on purpose: a metric without any value is nan, not 0, and `max_output_tokens_per_s` counts
tokens, where vLLM counts chunks (which a speculative server fills with several tokens). Times run from the first
counted arrival to the last counted finish. What is not modelled: clients, the network and detokenisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.config import Scoring, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.reach import Outside
from pdvsim.sim.records import LANES, Columns, Result

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[Any]

OVERLOADED = 0.10  # share of the arrivals that stay behind, from which a queue grows without bound
BACKLOGGED = 0.02
GROWTH_SIGMAS = 2.0  # growth below this many standard deviations of a Poisson count is noise
STEPS = ("queue", "prefill", "draft", "wait", "verify", "other")


def summarise(result: Result, scoring: Scoring | None = None) -> dict[str, Any]:
    """Every metric of one run: vLLM's flat keys, then lanes, kinds of launch and where the requests' time went."""
    if result.streamed is not None:
        if scoring not in (None, result.experiment.scoring):
            raise ValueError("the records of this run were not kept (--no-detailed): it cannot be scored again")
        return result.streamed
    scoring = scoring or result.experiment.scoring
    traffic: Traffic = result.experiment.traffic
    every = result.requests
    counted = _counted(every, scoring.warmup_requests)
    req = {name: column[counted] for name, column in every.items()}
    if not len(req["id"]):
        raise ValueError(f"no request is left to measure: {len(every['id'])} requests, none finished after the warm-up")
    start_s, end_s = float(req["arrival_s"].min()), float(req["finish_s"].max())
    duration_s = end_s - start_s

    ttft_s, tpot_s, e2el_s = _times(req)
    several = req["output_tokens"] > 1
    chunks = _chunks(result.deliveries, every["id"], counted)
    completed, tokens_in, tokens_out = len(ttft_s), int(req["prompt_tokens"].sum()), int(req["output_tokens"].sum())

    levels = scoring.slo()
    per_request = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}  # a lone token has tpot 0 and is always in time
    good = np.logical_and.reduce([per_request[name] <= level for name, level in levels.items()]) if levels else None

    metrics: dict[str, Any] = {
        "duration": duration_s,
        "completed": completed,
        "failed": int((every["finish_s"] < 0).sum()),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": rate(completed, duration_s),
        "request_goodput": None if good is None else rate(int(good.sum()), duration_s),
        "output_throughput": rate(tokens_out, duration_s),
        "total_token_throughput": rate(tokens_in + tokens_out, duration_s),
        "max_output_tokens_per_s": _peak_tokens(chunks, start_s),
        "max_concurrent_requests": _peak_concurrency(req["arrival_s"], req["finish_s"]),
    }
    for name, values in (
        ("ttft", ttft_s),
        ("tpot", tpot_s[several]),
        ("itl", chunks["gap_s"][~chunks["first"]]),
        ("e2el", e2el_s),
    ):
        metrics |= _spread(name, values, scoring.metric_percentiles)
    metrics |= _speculation(req, chunks)
    metrics["stability"] = stability(every["arrival_s"], every["finish_s"], traffic, every["admitted_s"])
    metrics["breakdown_ms"] = _breakdown(req, e2el_s)
    inside = (result.launches["start_s"] < end_s) & (result.launches["end_s"] > start_s)
    launches = result.launches if inside.all() else {n: column[inside] for n, column in result.launches.items()}
    bandwidth = float(result.meta.get("bandwidth_bytes_per_s", math.nan))
    metrics["launches"] = int(inside.sum())
    metrics["lanes"] = _lanes(launches, start_s, end_s, bandwidth, int(result.experiment.hardware.replicas))
    metrics["kinds"] = _kinds(launches)
    if "reaches" in result.meta:
        outside = Outside(result.meta["reaches"])
        outside.add(launches)
        metrics |= outside.metrics()
    return metrics


def latencies_s(requests: Columns, deliveries: Columns, warmup: int) -> dict[str, Array]:
    """What the latency metrics are taken over, in seconds: one value a counted request; for itl one a later chunk."""
    counted = _counted(requests, warmup)
    req = {name: column[counted] for name, column in requests.items()}
    ttft_s, tpot_s, e2el_s = _times(req)
    chunks = _chunks(deliveries, requests["id"], counted)
    itl_s = chunks["gap_s"][~chunks["first"]]
    return {"ttft": ttft_s, "tpot": tpot_s[req["output_tokens"] > 1], "itl": itl_s, "e2el": e2el_s}


def stability(arrival_s: Array, finish_s: Array, traffic: Traffic, admitted_s: Array | None = None) -> str:
    """Did the server keep up? "stable", "backlogged" or "overloaded"; "closed loop" and "burst" cannot be told.

    The arrival window is cut into eighths. If N5 and N8 are the mean requests in the system in the fifth and the last,
    then (N8 - N5) over the arrivals between them is the share that stayed behind: above 10% the run is overloaded,
    above 2% backlogged. Growth within two standard deviations of a Poisson count of N5 + N8 is noise, so a short run
    near saturation reads stable. The same is asked of the requests that wait to be admitted, whose number moves less by
    chance; either tells. A window shorter than a request reads overloaded: nothing leaves in it.
    Where --max-concurrency holds requests back, sending them 10% slower than --request-rate is overloaded as well.
    """
    return judged(traffic, _Rows(arrival_s, [left_s for left_s in (finish_s, admitted_s) if left_s is not None]))


class Census(Protocol):
    """Who was there when."""

    @property
    def count(self) -> int:
        """Arrivals in all."""

    @property
    def first_s(self) -> float:
        """The first arrival."""

    @property
    def last_s(self) -> float:
        """The last."""

    @property
    def ways_out(self) -> int:
        """Of how many kinds of leaving (finish, admission) it knows."""

    def present(self, way_out: int, start_s: float, stop_s: float) -> float:
        """Mean number, in that stretch of time, of those who have arrived and not left."""

    def arrived(self, after_s: float, until_s: float) -> float:
        """Arrivals in a stretch of time."""


class _Rows:
    """A census from rows."""

    def __init__(self, arrival_s: Array, left_s: list[Array]) -> None:
        self.count, self.ways_out = len(arrival_s), len(left_s)
        self.first_s, self.last_s = float(arrival_s.min()), float(arrival_s.max())
        self._arrival_s = arrival_s
        self._left_s = [np.where(column < 0, math.inf, column) for column in left_s]

    def present(self, way_out: int, start_s: float, stop_s: float) -> float:
        left_s = self._left_s[way_out].clip(start_s, stop_s)
        return float((left_s - self._arrival_s.clip(start_s, stop_s)).sum()) / (stop_s - start_s)

    def arrived(self, after_s: float, until_s: float) -> float:
        return float(((self._arrival_s > after_s) & (self._arrival_s <= until_s)).sum())


def judged(traffic: Traffic, census: Census) -> str:
    """The label that `stability` explains."""
    trace = traffic.use_trace_timestamps
    if math.isinf(traffic.request_rate) and not trace:
        return "burst" if traffic.max_concurrency is None else "closed loop"
    first_s, last_s = census.first_s, census.last_s
    if last_s <= first_s:
        return "burst"
    eighth_s = (last_s - first_s) / 8
    middle_s, end_s = first_s + 4 * eighth_s, first_s + 7 * eighth_s
    growth = 0.0
    for way_out in range(census.ways_out):
        before, after = (census.present(way_out, at_s, at_s + eighth_s) for at_s in (middle_s, end_s))
        if after - before > GROWTH_SIGMAS * math.sqrt(before + after):
            growth = max(growth, after - before)
    if traffic.max_concurrency is not None and not trace:
        noise = GROWTH_SIGMAS / math.sqrt(census.count * traffic.burstiness)
        if census.count / (last_s - first_s) < (1 - OVERLOADED - noise) * traffic.request_rate:
            return "overloaded"
    arrivals = census.arrived(middle_s + eighth_s / 2, end_s + eighth_s / 2)
    if not arrivals:
        return "stable"
    behind = growth / arrivals
    return "overloaded" if behind > OVERLOADED else "backlogged" if behind > BACKLOGGED else "stable"


def frames(result: Result) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Requests, launches and deliveries as pandas frames, with lane, kind and role by name."""
    if result.streamed is not None:
        raise ValueError("the records of this run were not kept (--no-detailed)")
    import pandas as pd

    names = {"lane": LANES, "kind": KINDS, "role": ("draft", "target")}
    launches = pd.DataFrame(result.launches)
    for column, words in names.items():
        launches[column] = pd.Categorical.from_codes(launches[column], pd.Index(words))
    return pd.DataFrame(result.requests), launches, pd.DataFrame(result.deliveries)


def percentile_name(percentile: float) -> str:
    """The percentile as vLLM writes it in a key: p99, p99.9."""
    return f"p{int(percentile) if percentile == int(percentile) else percentile}"


def _counted(requests: Columns, warmup: int) -> Array:
    """Mask of the finished requests behind the first `warmup` arrivals."""
    counted = requests["finish_s"] >= 0
    counted[np.argsort(requests["arrival_s"], kind="stable")[:warmup]] = False
    return counted


def _times(req: Columns) -> tuple[Array, Array, Array]:
    """Time to first token, per later token (0 where there is none) and end to end."""
    e2el_s = req["finish_s"] - req["arrival_s"]
    later = req["output_tokens"] - 1
    tpot_s = np.divide(req["finish_s"] - req["first_token_s"], later, out=np.zeros_like(e2el_s), where=later > 0)
    return req["first_token_s"] - req["arrival_s"], tpot_s, e2el_s


def rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else math.nan


def _chunks(deliveries: Columns, ids: Array, counted: Array) -> Columns:
    """Deliveries to the counted requests, request by request in time order, with the gap since the one before."""
    order = np.argsort(ids, kind="stable")
    row = deliveries["request"] if _is_range(ids) else order[np.searchsorted(ids, deliveries["request"], sorter=order)]
    time_s, tokens = deliveries["time_s"], deliveries["tokens"]
    if not counted.all():
        keep = counted[row]
        row, time_s, tokens = row[keep], time_s[keep], tokens[keep]
    order = np.argsort(row, kind="stable")  # rows are written in time order, so a request's stay in order
    row, time_s, tokens = row[order], time_s[order], tokens[order]
    first = np.empty(len(row), bool)
    first[:1] = True
    np.not_equal(row[1:], row[:-1], out=first[1:])
    gap_s = np.diff(time_s, prepend=time_s[:1])
    return {"row": row, "time_s": time_s, "tokens": tokens, "first": first, "gap_s": gap_s}


def _is_range(ids: Array) -> bool:
    return bool(np.array_equal(ids, np.arange(len(ids))))


def _spread(name: str, values_s: Array, percentiles: tuple[float, ...]) -> dict[str, float]:
    ranks = [50.0, *percentiles]
    keys = [f"median_{name}_ms", *(f"{percentile_name(p)}_{name}_ms" for p in percentiles)]
    if not len(values_s):
        return dict.fromkeys((f"mean_{name}_ms", f"std_{name}_ms", *keys), math.nan)
    marks = np.percentile(values_s, ranks) * 1e3
    mean, std = float(values_s.mean()) * 1e3, float(values_s.std()) * 1e3
    return {f"mean_{name}_ms": mean, f"std_{name}_ms": std} | dict(zip(keys, marks.tolist(), strict=True))


def _peak_tokens(chunks: Columns, start_s: float) -> float:
    """Most tokens in any one second, counted from the start."""
    second = (chunks["time_s"] - start_s).astype(np.int64)
    return float(np.bincount(second, weights=chunks["tokens"]).max()) if len(second) else 0.0


def _peak_concurrency(arrival_s: Array, finish_s: Array) -> int:
    """Most requests in the system at once; one that leaves makes room for one that arrives at the same time."""
    arrived = np.arange(1, len(arrival_s) + 1)
    return int((arrived - np.searchsorted(np.sort(finish_s), np.sort(arrival_s), side="right")).max())


def _speculation(req: Columns, chunks: Columns) -> dict[str, Any]:
    """vLLM's spec_decode keys; nothing where nothing was drafted."""
    rounds, drafted, accepted = int(req["rounds"].sum()), int(req["drafted"].sum()), int(req["accepted"].sum())
    return speculation(rounds, drafted, accepted, lambda: _per_position(req, chunks, rounds))


def speculation(
    rounds: int, drafted: int, accepted: int, per_position: Callable[[], list[float] | None]
) -> dict[str, Any]:
    """vLLM's spec_decode keys from their counts; nothing where nothing was drafted."""
    if not drafted:
        return {}
    metrics: dict[str, Any] = {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / rounds,
        "spec_decode_num_drafts": rounds,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
    }
    shares = per_position()
    return metrics | ({} if shares is None else {"spec_decode_per_position_acceptance_rates": shares})


def _per_position(req: Columns, chunks: Columns, rounds: int) -> list[float] | None:
    """Share of the rounds that accepted each draft position; None where the rows do not tell.

    A round delivers its accepted drafts plus one token, but the last is cut at the request's length. What the last
    accepted is the request's total less the rounds before it. Rows tell only if every later chunk is a round.
    """
    heads = np.flatnonzero(chunks["first"])
    counts = np.diff(heads, append=len(chunks["first"]))
    if len(heads) != len(req["id"]) or not np.array_equal(counts - 1, req["rounds"]):
        return None
    accepted = chunks["tokens"].astype(np.int64) - 1
    accepted[heads] = 0
    has_rounds = counts > 1
    lasts = (heads + counts - 1)[has_rounds]
    accepted[lasts] = 0
    accepted[lasts] = (req["accepted"] - np.add.reduceat(accepted, heads))[has_rounds]
    if accepted.min() < 0:
        return None
    return reached(np.bincount(accepted[~chunks["first"]]), rounds)


def reached(by_count: Array, rounds: int) -> list[float]:
    """Share of the rounds that accepted each draft position, from how many accepted how many."""
    return (by_count[::-1].cumsum()[::-1][1:] / rounds).tolist()  # type: ignore[no-any-return]


def _breakdown(req: Columns, e2el_s: Array) -> dict[str, float]:
    """Mean milliseconds of a request's life by step; `other` is hand-offs and host time between the steps."""
    means = {"queue": float((req["admitted_s"] - req["arrival_s"]).mean()) * 1e3}
    means |= {step: float(req[f"{step}_s"].mean()) * 1e3 for step in STEPS[1:-1]}
    return means | {"other": float(e2el_s.mean()) * 1e3 - sum(means.values())}


def _busy_s(start_s: Array, end_s: Array) -> float:
    """Length of the union of the intervals."""
    order = np.argsort(start_s, kind="stable")
    start_s, reach_s = start_s[order], np.maximum.accumulate(end_s[order])
    begin_s = np.maximum(start_s, np.concatenate(([-math.inf], reach_s[:-1])))
    return float((reach_s - begin_s).clip(0).sum())


def _lanes(launches: Columns, start_s: float, end_s: float, bandwidth: float, replicas: int) -> dict[str, Any]:
    """Per lane, averaged over the GPUs it runs on: launches, busy share, share of the bandwidth, queue behind it."""
    lanes: dict[str, Any] = {}
    place = launches["replica"].astype(np.int64) * 256 + launches["gpu"]
    for code in np.unique(launches["lane"]).tolist():
        mine = launches["lane"] == code
        begin_s, finish_s = launches["start_s"][mine].clip(start_s), launches["end_s"][mine].clip(max=end_s)
        places = np.unique(place[mine])
        busy_s = sum(_busy_s(begin_s[at], finish_s[at]) for at in (place[mine] == p for p in places))
        available_s = (end_s - start_s) * max(len(places), replicas)  # a replica that never ran it was idle
        lanes[LANES[code]] = {
            "launches": int(mine.sum()),
            "utilisation": rate(busy_s, available_s),
            "bandwidth_share": rate(float(launches["bytes"][mine].sum()), available_s * bandwidth),
            "mean_queue_depth": float(launches["queue_depth"][mine].mean()),
        }
    return lanes


def _kinds(launches: Columns) -> dict[str, Any]:
    """Per kind of work: launches, mean batch, mean time, and how much sharing the GPU stretched it."""
    kinds: dict[str, Any] = {}
    for code in np.unique(launches["kind"]).tolist():
        mine = launches["kind"] == code
        ran_s, solo_s = (launches["end_s"] - launches["start_s"])[mine], launches["solo_s"][mine]
        kinds[KINDS[code]] = {
            "launches": int(mine.sum()),
            "mean_batch": float(launches["rows"][mine].mean()),  # decoding rows: a prefill has none
            "mean_tokens": float(launches["tokens"][mine].mean()),
            "mean_ms": float(ran_s.mean()) * 1e3,
            "stretch": rate(float(ran_s.sum()), float(solo_s.sum())),
        }
    return kinds
