"""What a run amounts to, in the names and definitions of `vllm bench serve`, computed from the rows of a Result.

Two things differ from vLLM on purpose: a metric without any value is nan, not 0, and `max_output_tokens_per_s` counts
tokens, where vLLM counts chunks (which a speculative server fills with several tokens).

Rates are of a window of time; latencies, acceptance and the share of requests in time are of requests. Without a
warm-up the window is vLLM's, from the first arrival to the last finish, and the requests are all. With one, the
requests are those behind it, and the window opens as the first of them is sent. What is delivered in it counts, to
whomever: a request counts, as does its prompt, by the share of its tokens delivered in the window. A closed loop's
window closes as the last request is sent, since from then on the loop runs dry and is no longer so many at once; any
other, and one that would be empty, closes at the last finish.

What is not modelled: clients, the network and detokenisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.config import Scoring, Traffic
from pdvsim.sim.core import KINDS
from pdvsim.sim.hardware.reach import Outside
from pdvsim.sim.metrics.stability import is_closed_loop, stability
from pdvsim.sim.records import LANES, Columns, Result

if TYPE_CHECKING:
    import pandas as pd

Array = NDArray[Any]

DRAFTED = ("drafts", "drafted", "accepted", "refused")  # what the speculation metrics are counted from
STEPS = ("queue", "prefill", "draft", "wait", "verify", "other")
PREEMPTION = ("preemptions", "recomputed_tokens")


def summarise(result: Result, scoring: Scoring | None = None) -> dict[str, Any]:
    """Every metric of one run: vLLM's flat keys, then lanes, kinds of launch and where the requests' time went."""
    if result.streamed is not None:
        if scoring not in (None, result.experiment.scoring):
            raise ValueError("the records of this run were not kept (--no-detailed): it cannot be scored again")
        return result.streamed
    scoring = scoring or result.experiment.scoring
    traffic: Traffic = result.experiment.traffic
    every = result.requests
    finished, counted = every["finish_s"] >= 0, _counted(every, scoring.warmup_requests)
    req = {name: column[counted] for name, column in every.items()}
    if not len(req["id"]):
        raise ValueError(f"no request is left to measure: {len(every['id'])} requests, none finished after the warm-up")
    window = _window(every, req, traffic, scoring.warmup_requests)
    start_s, end_s = window.start_s, window.end_s

    ttft_s, tpot_s, e2el_s = _times(req)
    several = req["output_tokens"] > 1
    delivered = _chunks(result.deliveries, every["id"], finished)
    chunks = delivered if counted.sum() == finished.sum() else _of(delivered, counted[delivered["row"]])
    inside = _of(delivered, window.holds(delivered["time_s"]))

    levels = scoring.slo()
    per_request = {"ttft": ttft_s, "tpot": tpot_s, "e2el": e2el_s}  # a lone token has tpot 0 and is always in time
    good = np.logical_and.reduce([per_request[name] <= level for name, level in levels.items()]) if levels else None

    share = finished.astype(float)
    if window.trimmed:
        share = np.bincount(inside["row"], inside["tokens"], len(share)) / every["output_tokens"]
    amounts = [float(share @ column) for column in (finished, every["prompt_tokens"], every["output_tokens"])]
    in_time = None if good is None else (int(good.sum()), len(good))
    metrics = totals(window, amounts, int((~finished).sum()), in_time)
    metrics["max_output_tokens_per_s"] = _peak_tokens(inside, start_s)
    metrics["max_concurrent_requests"] = _peak_concurrency(_of(every, finished), start_s)
    metrics |= {name: int(req[name].sum()) for name in PREEMPTION}
    for name, values in (
        ("ttft", ttft_s),
        ("tpot", tpot_s[several]),
        ("itl", chunks["gap_s"][~chunks["first"]]),
        ("e2el", e2el_s),
    ):
        metrics |= _spread(name, values, scoring.metric_percentiles)
    metrics |= _speculation(req, chunks)
    metrics["stability"] = stability(every, traffic)
    metrics["breakdown_ms"] = _breakdown(req, e2el_s)
    ran = (result.launches["start_s"] < end_s) & (result.launches["end_s"] > start_s)
    launches = result.launches if ran.all() else _of(result.launches, ran)
    bandwidth = float(result.meta.get("bandwidth_bytes_per_s", math.nan))
    metrics["launches"] = int(ran.sum())
    metrics["lanes"] = _lanes(launches, start_s, end_s, bandwidth, int(result.experiment.hardware.replicas))
    metrics["kinds"] = _kinds(launches)
    if "reaches" in result.meta:
        outside = Outside(result.meta["reaches"])
        outside.add_all(launches)
        metrics |= outside.metrics()
    return metrics


class Window(NamedTuple):
    """The stretch of time that a run's rates are of."""

    start_s: float
    end_s: float
    trimmed: bool  # a warm-up was left out

    def holds(self, time_s: Array) -> Array:
        """Mask of the times in it. What a batch delivers at the very moment that a window opens is from before it."""
        early = time_s <= self.start_s if self.trimmed else time_s < self.start_s
        return ~early & (time_s <= self.end_s)

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


def totals(window: Window, amounts: Sequence[float], failed: int, in_time: tuple[int, int] | None) -> dict[str, Any]:
    """vLLM's counts of a window and their rates, from its requests, prompt tokens and output tokens.

    `in_time` is how many requests met their levels, of how many. Goodput is the throughput times that share, so that it
    agrees with the percentiles, which are of the same requests.
    """
    completed, tokens_in, tokens_out = amounts
    duration_s, tokens_out = window.duration_s, round(tokens_out)
    if not window.trimmed:
        completed, tokens_in = int(completed), int(tokens_in)
    return {
        "duration": duration_s,
        "completed": completed,
        "failed": failed,
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": rate(completed, duration_s),
        "request_goodput": None if in_time is None else rate(completed * in_time[0] / in_time[1], duration_s),
        "output_throughput": rate(tokens_out, duration_s),
        "total_token_throughput": rate(tokens_in + tokens_out, duration_s),
    }


def latencies_s(requests: Columns, deliveries: Columns, warmup: int) -> dict[str, Array]:
    """What the latency metrics are taken over, in seconds: one value a counted request; for itl one a later chunk."""
    counted = _counted(requests, warmup)
    req = {name: column[counted] for name, column in requests.items()}
    ttft_s, tpot_s, e2el_s = _times(req)
    chunks = _chunks(deliveries, requests["id"], counted)
    itl_s = chunks["gap_s"][~chunks["first"]]
    return {"ttft": ttft_s, "tpot": tpot_s[req["output_tokens"] > 1], "itl": itl_s, "e2el": e2el_s}


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


def _window(every: Columns, req: Columns, traffic: Traffic, warmup: int) -> Window:
    start_s, last_s = float(req["arrival_s"].min()), float(every["arrival_s"].max())
    early = warmup > 0 and is_closed_loop(traffic) and last_s > start_s
    return Window(start_s, last_s if early else float(req["finish_s"].max()), warmup > 0)


def _of(columns: Columns, rows: Array) -> Columns:
    return {name: column[rows] for name, column in columns.items()}


def _times(req: Columns) -> tuple[Array, Array, Array]:
    """Time to first token, per later token (0 where there is none) and end to end."""
    e2el_s = req["finish_s"] - req["arrival_s"]
    later = req["output_tokens"] - 1
    tpot_s = np.divide(req["finish_s"] - req["first_token_s"], later, out=np.zeros_like(e2el_s), where=later > 0)
    return req["first_token_s"] - req["arrival_s"], tpot_s, e2el_s


def rate(count: float, duration_s: float) -> float:
    return count / duration_s if duration_s > 0 else math.nan


def _chunks(deliveries: Columns, ids: Array, some: Array) -> Columns:
    """Deliveries to some of the requests, request by request in time order, with the gap since the one before."""
    order = np.argsort(ids, kind="stable")
    row = deliveries["request"] if _is_range(ids) else order[np.searchsorted(ids, deliveries["request"], sorter=order)]
    time_s, tokens = deliveries["time_s"], deliveries["tokens"]
    if not some.all():
        keep = some[row]
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


def _peak_concurrency(req: Columns, since_s: float) -> int:
    """Most requests in the system at once; one that leaves makes room for one that arrives at the same time."""
    arrival_s, finish_s = np.sort(req["arrival_s"]), np.sort(req["finish_s"])
    inside = np.arange(1, len(arrival_s) + 1) - np.searchsorted(finish_s, arrival_s, side="right")
    return int(inside[arrival_s >= since_s].max())


def _speculation(req: Columns, chunks: Columns) -> dict[str, Any]:
    """vLLM's spec_decode keys; nothing where nothing was drafted."""
    sums = {name: int(req[name].sum()) for name in DRAFTED}
    return speculation(sums, lambda: _per_position(req, chunks, sums["drafts"]))


def speculation(sums: Mapping[str, int], per_position: Callable[[], list[float] | None]) -> dict[str, Any]:
    """vLLM's spec_decode keys from their counts; nothing where nothing was drafted.

    vLLM's acceptance rate is over all drafted tokens. The rate per judged token is what an acceptance rate given to the
    simulator means: drafts behind a round's first refused one were never judged.
    """
    drafts, drafted, accepted = sums["drafts"], sums["drafted"], sums["accepted"]
    if not drafted:
        return {}
    metrics: dict[str, Any] = {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_judged_acceptance_rate": 100 * accepted / (accepted + sums["refused"]),
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_judged_tokens": accepted + sums["refused"],
        "spec_decode_accepted_tokens": accepted,
    }
    shares = per_position()
    return metrics | ({} if shares is None else {"spec_decode_per_position_acceptance_rates": shares})


def _per_position(req: Columns, chunks: Columns, drafts: int) -> list[float] | None:
    """Share of the drafting rounds that accepted each draft position; None where the rows do not tell.

    A round delivers its accepted drafts plus one token, but the last is cut at the request's length. What the last
    accepted is the request's total less the rounds before it. Rows tell only if every later chunk is a round, or the
    one token of a request that was read again. A round without drafts accepts none, and only the number of those that
    drafted divides.
    """
    heads = np.flatnonzero(chunks["first"])
    counts = np.diff(heads, append=len(chunks["first"]))
    if len(heads) != len(req["id"]) or not np.array_equal(counts - 1, req["rounds"] + req["resumptions"]):
        return None
    accepted = chunks["tokens"].astype(np.int64) - 1
    accepted[heads] = 0
    has_rounds = counts > 1
    lasts = (heads + counts - 1)[has_rounds]
    accepted[lasts] = 0
    accepted[lasts] = (req["accepted"] - np.add.reduceat(accepted, heads))[has_rounds]
    if accepted.min() < 0:
        return None
    return reached(np.bincount(accepted[~chunks["first"]]), drafts)


def reached(by_count: Array, drafts: int) -> list[float]:
    """Share of the drafting rounds that accepted each draft position, from how many accepted how many."""
    return (by_count[::-1].cumsum()[::-1][1:] / drafts).tolist()  # type: ignore[no-any-return]


def _breakdown(req: Columns, e2el_s: Array) -> dict[str, float]:
    """Mean milliseconds of a request's life by step; `other` is what lies between: hand-offs, host time, preemption."""
    means = {"queue": float((req["admitted_s"] - req["arrival_s"]).mean()) * 1e3}
    means |= {step: float(req[f"{step}_s"].mean()) * 1e3 for step in STEPS[1:-1]}
    return means | {"other": float(e2el_s.mean()) * 1e3 - sum(means.values())}


def cut(launches: Columns, start_s: float, end_s: float) -> tuple[Array, Array, Array]:
    """Launches' starts, ends and bytes within a window; a launch moves its bytes evenly over its time."""
    begin_s, finish_s = launches["start_s"].clip(start_s), launches["end_s"].clip(max=end_s)
    whole_s = launches["end_s"] - launches["start_s"]
    share = np.divide(finish_s - begin_s, whole_s, out=np.ones_like(whole_s), where=whole_s > 0)
    return begin_s, finish_s, launches["bytes"] * share


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
        begin_s, finish_s, moved = cut(_of(launches, mine), start_s, end_s)
        places = np.unique(place[mine])
        busy_s = sum(_busy_s(begin_s[at], finish_s[at]) for at in (place[mine] == p for p in places))
        available_s = (end_s - start_s) * max(len(places), replicas)  # a replica that never ran it was idle
        lanes[LANES[code]] = {
            "launches": int(mine.sum()),
            "utilisation": rate(busy_s, available_s),
            "bandwidth_share": rate(float(moved.sum()), available_s * bandwidth),
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
