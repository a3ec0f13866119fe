"""The timeline is a valid Chrome trace: named tracks, launches that never overlap on one, counters that return to 0."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from synthetic import result, served_alone

from pdvsim.sim.config import Experiment, Traffic
from pdvsim.sim.metrics.timeline import trace
from pdvsim.sim.records import Result


def events_of(run: Result) -> list[dict[str, Any]]:
    document = json.loads(b"".join(trace(run)))
    assert document["otherData"]["foundation"] == "made up for a test"
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


@pytest.fixture
def sparse() -> Result:
    """Two replicas, requests far enough apart never to share a lane."""
    return served_alone(Experiment(traffic=Traffic(num_prompts=30, request_rate=0.05, seed=3)), replicas=2)


def test_one_named_track_per_lane_and_gpu(sparse: Result) -> None:
    events = events_of(sparse)
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert sorted(names.values()) == ["decode", "decode", "prefill", "prefill", "verify", "verify"]
    gpus = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert gpus == ["replica 0, GPU 0", "replica 1, GPU 0"]
    assert {(e["pid"], e["tid"]) for e in events if e["ph"] == "X"} == set(names)


def test_every_launch_is_there_and_none_overlap(sparse: Result) -> None:
    launches = [e for e in events_of(sparse) if e["ph"] == "X"]
    assert len(launches) == len(sparse.launches["start_s"])
    tracks: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for event in launches:
        tracks[event["pid"], event["tid"]].append(event)
    for track in tracks.values():
        track.sort(key=lambda e: float(e["ts"]))
        for one, two in pairwise(track):
            assert one["ts"] + one["dur"] <= two["ts"] + 1e-3
    assert launches[0]["ts"] == pytest.approx(sparse.launches["start_s"][0] * 1e6, abs=1e-3)
    assert set(launches[0]["args"]) == {"rows", "tokens", "steps", "queue_depth", "solo_us"}


def test_requests_in_flight_rise_and_return_to_zero(sparse: Result) -> None:
    counts: dict[int, list[int]] = defaultdict(list)
    for event in events_of(sparse):
        if event["ph"] == "C" and event["name"] == "requests in flight":
            counts[event["pid"]].append(event["args"]["requests"])
    assert len(counts) == 2
    for series in counts.values():
        assert series[-1] == 0
        assert min(series) == 0
        assert max(series) > 0


def test_an_empty_run_is_still_a_trace() -> None:
    assert [e["ph"] for e in events_of(result(Experiment(), []))] == ["M", "M"]
