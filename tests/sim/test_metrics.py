"""Metrics against sums done by hand and against a slow oracle that follows vLLM's definitions request by request."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import result

from pdvsim.bench.sweep import flatten
from pdvsim.sim.config import Experiment, Hardware, Scoring, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

POISSON = Traffic(request_rate=1.0, num_prompts=2)
ONE, PLAIN = Hardware(), Scoring()
DRAFTERS = Hardware(place=("decode=0+1", "verify=2", "prefill=2"))  # two GPUs draft concurrently


def two_requests(**changes: Any) -> Result:
    """Request 7 gets 1+3+2 tokens (the last round accepted 3, cut at 2); request 3 a single token."""
    requests = [
        {"id": 7, "arrival_s": 1.0, "admitted_s": 1.5, "first_token_s": 2.0, "finish_s": 5.0, "prompt_tokens": 10}
        | {"output_tokens": 6, "rounds": 2, "drafts": 2, "drafted": 8, "accepted": 5, "refused": 2}
        | {"prefill_s": 0.5, "draft_s": 1.0, "wait_s": 0.25, "verify_s": 1.5},
        {"id": 3, "arrival_s": 4.0, "admitted_s": 4.0, "first_token_s": 4.5, "finish_s": 4.5, "prompt_tokens": 20}
        | {"output_tokens": 1, "prefill_s": 0.5},
    ]
    deliveries = [(7, 1, 2.0), (7, 3, 4.0), (3, 1, 4.5), (7, 2, 5.0)]
    launches = [
        {"lane": "prefill", "kind": "prefill", "rows": 1, "start_s": 1.5, "end_s": 2.0, "solo_s": 0.5, "bytes": 4e9},
        {"lane": "verify", "kind": "verify", "rows": 2, "start_s": 3.0, "end_s": 4.0, "solo_s": 0.5, "queue_depth": 3},
        {"lane": "verify", "kind": "verify", "rows": 4, "start_s": 3.5, "end_s": 5.0, "solo_s": 0.75},
    ]
    scoring = Scoring(**changes)
    return result(Experiment(traffic=POISSON, scoring=scoring), requests, deliveries, launches)


def test_totals_by_hand() -> None:
    m = summarise(two_requests())
    assert m["duration"] == 4.0  # from the first arrival to the last finish
    assert (m["completed"], m["failed"]) == (2, 0)
    assert (m["total_input_tokens"], m["total_output_tokens"]) == (30, 7)
    assert m["request_throughput"] == 0.5
    assert m["output_throughput"] == 7 / 4
    assert m["total_token_throughput"] == 37 / 4
    assert m["request_goodput"] is None  # no service level was given
    assert m["max_output_tokens_per_s"] == 4.0  # the second [4, 5): 3 at 4.0 and 1 at 4.5
    assert m["max_concurrent_requests"] == 2


def test_speculation_by_hand() -> None:
    m = summarise(two_requests())
    assert m["spec_decode_acceptance_rate"] == 100 * 5 / 8
    assert m["spec_decode_judged_acceptance_rate"] == 100 * 5 / 7  # a round is judged up to its first refusal
    assert m["spec_decode_judged_tokens"] == 7
    assert m["spec_decode_acceptance_length"] == 1 + 5 / 2
    assert (m["spec_decode_num_drafts"], m["spec_decode_draft_tokens"], m["spec_decode_accepted_tokens"]) == (2, 8, 5)
    assert m["spec_decode_per_position_acceptance_rates"] == [1.0, 1.0, 0.5]  # rounds accepted 2 and 3


def test_a_round_without_drafts_is_no_draft() -> None:
    """Request 7 drafts once, accepts 2 of 4, and then decodes two tokens plainly."""
    row = {"id": 7, "arrival_s": 1.0, "first_token_s": 2.0, "finish_s": 5.0, "prompt_tokens": 10, "output_tokens": 6}
    row |= {"rounds": 3, "drafts": 1, "drafted": 4, "accepted": 2, "refused": 1}
    deliveries = [(7, 1, 2.0), (7, 3, 3.0), (7, 1, 4.0), (7, 1, 5.0)]
    m = summarise(result(Experiment(traffic=POISSON), [row], deliveries))
    assert (m["spec_decode_num_drafts"], m["spec_decode_acceptance_length"]) == (1, 3.0)
    assert m["spec_decode_per_position_acceptance_rates"] == [1.0, 1.0]


def test_nothing_drafted_no_speculation_keys() -> None:
    run = two_requests()
    run.requests["drafted"][:] = 0
    assert not [key for key in summarise(run) if key.startswith("spec_decode")]


def test_lanes_by_hand() -> None:
    m = summarise(two_requests())
    assert m["launches"] == 3
    assert m["lanes"]["verify"]["utilisation"] == 2.0 / 4.0  # [3, 4] and [3.5, 5] overlap
    assert m["kinds"]["verify"]["mean_batch"] == 3.0
    assert m["lanes"]["verify"]["mean_queue_depth"] == 1.5
    assert m["lanes"]["prefill"]["bandwidth_share"] == 1.0  # 4 GB in 4 s of 1 GB/s
    assert m["kinds"]["verify"]["stretch"] == 2.0
    assert m["breakdown_ms"]["queue"] == 250.0
    assert sum(m["breakdown_ms"].values()) == pytest.approx(m["mean_e2el_ms"])


def test_goodput_counts_requests_within_every_level() -> None:
    assert summarise(two_requests(goodput=("ttft:500",)))["request_goodput"] == 0.25
    assert summarise(two_requests(goodput=("ttft:1000", "tpot:599")))["request_goodput"] == 0.25  # tpot of one token: 0
    assert summarise(two_requests(goodput=("ttft:1000", "tpot:600")))["request_goodput"] == 0.5
    assert summarise(two_requests(goodput=("e2el:100",)))["request_goodput"] == 0.0


def test_after_a_warm_up_what_is_delivered_in_the_window_counts() -> None:
    """Request 7 arrives at 1 and is the warm-up; the window is request 3's life, from 4 to 4.5, or a second longer."""
    run = two_requests(warmup_requests=1)
    m = summarise(run)
    assert (m["completed"], m["duration"], m["mean_ttft_ms"]) == (1, 0.5, 500.0)
    assert (m["total_output_tokens"], m["max_output_tokens_per_s"]) == (1, 1.0)  # what comes at 4.0 is from before it
    assert m["max_concurrent_requests"] == 2  # request 7 is still there
    assert m["lanes"]["verify"]["utilisation"] == 1.0
    assert math.isnan(m["mean_tpot_ms"])  # nothing to average is not zero
    run.requests["finish_s"][1] = run.deliveries["time_s"][2] = 5.5
    m = summarise(run)
    assert (m["duration"], m["total_output_tokens"]) == (1.5, 3)  # request 7's last two are in it
    assert m["completed"] == pytest.approx(1 + 2 / 6)
    assert m["total_input_tokens"] == pytest.approx(20 + 10 * 2 / 6)
    assert m["request_throughput"] == pytest.approx((1 + 2 / 6) / 1.5)
    assert m["mean_e2el_ms"] == 1500.0  # of request 3 alone


def served(count: int, rate: float, seed: int, hardware: Hardware = ONE, scoring: Scoring = PLAIN) -> Result:
    """A run of three lanes; its requests may be changed."""
    traffic = Traffic("random", num_prompts=count, request_rate=rate, seed=seed, input_len=50, output_len=20)
    traffic = replace(traffic, random_range_ratio=0.95)
    run = simulate(Experiment("pdv", traffic, hardware=hardware, scoring=scoring))
    run.requests = {name: column.copy() for name, column in run.requests.items()}
    return run


def oracle(run: Result) -> dict[str, float]:
    """vLLM's calculate_metrics as one would write it without numpy."""
    finishes = run.requests["finish_s"].tolist()
    arrivals = run.requests["arrival_s"].tolist()
    ttfts: list[float] = []
    tpots: list[float] = []
    itls: list[float] = []
    e2els: list[float] = []
    per_second: dict[int, int] = {}
    for i, id in enumerate(run.requests["id"].tolist()):
        times = [
            t for r, t in zip(*(run.deliveries[n].tolist() for n in ("request", "time_s")), strict=True) if r == id
        ]
        ttfts.append(times[0] - arrivals[i])
        e2els.append(times[-1] - arrivals[i])
        output = int(run.requests["output_tokens"][i])
        if output > 1:
            tpots.append((e2els[-1] - ttfts[-1]) / (output - 1))
        itls += [b - a for a, b in pairwise(times)]
    for tokens, t in zip(run.deliveries["tokens"].tolist(), run.deliveries["time_s"].tolist(), strict=True):
        second = int(t - min(arrivals))
        per_second[second] = per_second.get(second, 0) + tokens
    events = sorted([(t, 1) for t in arrivals] + [(t, -1) for t in finishes])
    now = peak = 0
    for _, change in events:
        now += change
        peak = max(peak, now)
    expected: dict[str, float] = {"max_output_tokens_per_s": max(per_second.values()), "max_concurrent_requests": peak}
    for name, values in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", e2els)):
        ms = sorted(1000 * v for v in values)
        if not ms:
            continue
        rank = 0.99 * (len(ms) - 1)
        low = math.floor(rank)
        high = min(low + 1, len(ms) - 1)
        expected |= {f"mean_{name}_ms": statistics.fmean(ms), f"median_{name}_ms": statistics.median(ms)}
        expected |= {
            f"std_{name}_ms": statistics.pstdev(ms),
            f"p99_{name}_ms": ms[low] + (rank - low) * (ms[high] - ms[low]),
        }
    return expected


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**16), count=st.integers(1, 40), rate=st.sampled_from([0.5, 5.0, 50.0, math.inf]),
    shuffled=st.booleans(),
)  # fmt: skip
def test_agrees_with_the_oracle(seed: int, count: int, rate: float, shuffled: bool) -> None:
    run = served(count, rate, seed)
    if shuffled:  # ids are names, not places
        order = np.random.default_rng(seed).permutation(count)
        run.requests = {name: column[order] for name, column in run.requests.items()}
    metrics = summarise(run)
    for name, value in oracle(run).items():
        assert metrics[name] == pytest.approx(value, rel=1e-9, abs=1e-6), name
    per_position = metrics.get("spec_decode_per_position_acceptance_rates", [])
    assert sum(per_position) == pytest.approx(metrics.get("spec_decode_acceptance_length", 1.0) - 1)
    assert sum(metrics["breakdown_ms"].values()) == pytest.approx(metrics["mean_e2el_ms"])
    assert all(0 <= lane["utilisation"] <= 1 + 1e-9 for lane in metrics["lanes"].values())


@settings(max_examples=20)
@given(
    seed=st.integers(0, 2**16), count=st.integers(2, 30), rate=st.sampled_from([0.5, 50.0]),
    warmup=st.integers(0, 1), hardware=st.sampled_from([ONE, Hardware(replicas=2), DRAFTERS]),
    rows=st.sampled_from([1, 7, 50]), lost=st.booleans(),
)  # fmt: skip
def test_parts_give_what_the_whole_gives(
    seed: int, count: int, rate: float, warmup: int, hardware: Hardware, rows: int, lost: bool
) -> None:
    """Also where launches of a lane overlap, and where a request was never served. Percentiles to the last bit."""
    run = served(count, rate, seed, hardware, Scoring(("ttft:20", "e2el:150"), warmup_requests=warmup))
    if lost:
        run.requests["finish_s"][0] = -1
    whole = flatten(summarise(run))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdvsim.sim.records.ROWS", rows)
        in_parts = flatten(summarise(run))
    assert list(in_parts) == list(whole)
    for name, value in whole.items():
        off = 0.0 if name.startswith(("median_", "p99_")) else 1e-9
        close = pytest.approx(value, rel=off, abs=off, nan_ok=True) if isinstance(value, float) else value
        assert in_parts[name] == close, name
