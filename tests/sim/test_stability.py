"""The stability label on textbook queues, whose capacity is known; on bins of time; and at a client that holds back."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.sim.config import Traffic
from pdvsim.sim.metrics.sketch import Timeline
from pdvsim.sim.metrics.stability import Census, label_of, stability
from pdvsim.sim.records import Columns


def queue(load: float, count: int, servers: int, spread: float, seed: int) -> Columns:
    """Poisson arrivals at `load` per second, served by `servers` that together can do one per second."""
    rng = np.random.default_rng(seed)
    arrival_s = rng.exponential(1 / load, count).cumsum()
    sigma = math.sqrt(math.log(1 + spread))
    service_s = servers * np.exp(rng.normal(-(sigma**2) / 2, sigma, count))
    free_s, admitted_s = [0.0] * servers, np.empty(count)
    for i, at_s in enumerate(arrival_s.tolist()):
        admitted_s[i] = max(at_s, heapq.heappop(free_s))
        heapq.heappush(free_s, admitted_s[i] + service_s[i])
    return {"arrival_s": arrival_s, "admitted_s": admitted_s, "finish_s": admitted_s + service_s}


def labels(load: float, count: int, servers: int, spread: float, seeds: int) -> Counter[str]:
    traffic = Traffic(request_rate=load, num_prompts=count)
    return Counter(stability(queue(load, count, servers, spread, seed), traffic) for seed in range(seeds))


@pytest.mark.parametrize("servers", [1, 16, 128])
@pytest.mark.parametrize("spread", [0.0, 1.0])
def test_textbook_queues_are_classified(servers: int, spread: float) -> None:
    """M/D/c and M/G/c, 2000 requests: never the wrong label far from saturation, and seldom none."""
    seeds = 10
    below, above = labels(0.8, 2000, servers, spread, seeds), labels(1.2, 2000, servers, spread, seeds)
    assert not below["overloaded"]
    assert not above["stable"]
    assert below["stable"] >= 0.9 * seeds
    assert above["overloaded"] >= 0.9 * seeds


@pytest.mark.parametrize("servers", [1, 16, 128])
def test_at_saturation_no_label_is_given_lightly(servers: int) -> None:
    """Either label has a chance of about one in twenty at exactly full load: of 40 runs 6 or fewer."""
    given = labels(1.0, 1500, servers, 1.0, 40)
    assert given["stable"] <= 6
    assert given["overloaded"] <= 6


def test_a_run_shorter_than_its_requests_is_inconclusive() -> None:
    assert set(labels(0.8, 300, 128, 1.0, 10)) == {"inconclusive"}
    at_s = np.array([0.0, 1e-4])
    brief = {"arrival_s": at_s, "admitted_s": at_s + 1, "finish_s": at_s + 100}
    assert stability(brief, Traffic(request_rate=1.0)) == "inconclusive"


def test_a_line_that_grows_slowly_is_an_overload() -> None:
    """32 requests per second at a server that admits 29: requests in service hide the growth, those in line do not."""
    number = np.arange(1000)
    arrival_s = number / 32
    admitted_s = np.maximum(arrival_s, number / 29)
    traffic = Traffic(request_rate=32)
    requests = {"arrival_s": arrival_s, "admitted_s": admitted_s, "finish_s": admitted_s + 1.4}
    assert stability(requests, traffic) == "overloaded"
    assert stability(requests | {"admitted_s": arrival_s, "finish_s": arrival_s + 1.4}, traffic) == "stable"


def test_a_load_without_a_rate_has_no_label() -> None:
    requests = {"arrival_s": np.zeros(4), "admitted_s": np.zeros(4), "finish_s": np.ones(4)}
    assert stability(requests, Traffic(num_prompts=4)) == "burst"
    assert stability(requests, Traffic(num_prompts=4, max_concurrency=2)) == "closed loop"


def test_requests_held_back_by_the_client_are_an_overload() -> None:
    at_s = np.arange(400) / 10.0
    requests = {"arrival_s": at_s, "admitted_s": at_s, "finish_s": at_s + 0.4}
    traffic = Traffic(request_rate=20.0, max_concurrency=4, num_prompts=400)
    assert stability(requests, traffic) == "overloaded"
    assert stability({k: v / 2 for k, v in requests.items()}, replace(traffic, max_concurrency=5)) == "stable"


@given(seed=st.integers(0, 1000), load=st.floats(0.3, 2.0), parts=st.integers(2, 9))
@settings(max_examples=10, deadline=None)
def test_parts_in_any_order_give_the_same_label(seed: int, load: float, parts: int) -> None:
    requests, census = queue(load, 800, 4, 1.0, seed), Census()
    for part in np.array_split(np.random.default_rng(seed).permutation(800), parts):
        census.add({name: column[part] for name, column in requests.items()})
    traffic = Traffic(request_rate=load, num_prompts=800)
    assert label_of(traffic, census) == stability(requests, traffic)


@settings(max_examples=25)
@given(times=st.lists(st.floats(0, 1e5), min_size=1, max_size=50), share=st.floats(0, 1))
def test_a_timeline_against_all_of_its_times(times: list[float], share: float) -> None:
    timeline, in_order = Timeline(2), np.sort(times)
    for part in (times[: len(times) // 2], times[len(times) // 2 :]):
        timeline.add(1, np.array(part))
    edge = int(share * timeline.BINS)
    assert timeline.counts[1, :edge].sum() == np.searchsorted(in_order, edge * timeline.width_s)
    assert not timeline.counts[0].any()
    assert max(times) < timeline.BINS * timeline.width_s <= max(2 * max(times), 1e-6 * timeline.BINS)
