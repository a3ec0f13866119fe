"""The timeline is a valid Chrome trace: named tracks, slices that nest, arrows with both ends, counters that end at 0.

Perfetto's rules (docs/getting-started/other-formats.md, and the JSON importer): slices of a thread nest perfectly; a
flow is a start, steps and an end of one number, each bound to the slice that is open on its thread at its time.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.timeline import HOSTS, REQUESTS, trace
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate


def events_of(run: Result) -> list[dict[str, Any]]:
    document = json.loads(b"".join(trace(run)))
    assert document["otherData"]["foundation"] == run.meta["foundation"]
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_requests_in_flight_rise_and_return_to_zero() -> None:
    """Two replicas, requests far enough apart never to share a lane."""
    traffic = Traffic("random", num_prompts=30, request_rate=0.05, input_len=64, output_len=20, seed=3)
    events = events_of(simulate(Experiment("pdv", traffic, hardware=Hardware(replicas=2))))
    gpus, lanes = (
        [e["args"]["name"] for e in events if e["name"] == name and e["pid"] < HOSTS]
        for name in ("process_name", "thread_name")
    )
    assert gpus == ["replica 0, GPU 0", "replica 1, GPU 0"]
    assert sorted(lanes) == ["decode", "decode", "prefill", "prefill", "verify", "verify"]
    counts: dict[int, list[int]] = defaultdict(list)
    for event in events:
        if event["ph"] == "C" and event["name"] == "requests in flight":
            counts[event["pid"]].append(event["args"]["requests"])
    assert len(counts) == 2
    for series in counts.values():
        assert series[-1] == 0
        assert min(series) == 0
        assert max(series) > 0


def traced(arch: str, **more: Any) -> tuple[Result, list[dict[str, Any]]]:
    traffic = Traffic("random", num_prompts=24, request_rate=60, input_len=700, output_len=24, random_range_ratio=0.5)
    server = Server(max_num_batched_tokens=512, max_num_seqs=8)
    run = simulate(Experiment(arch, traffic, server=server, hardware=Hardware(**more)), traced=True)
    return run, json.loads(b"".join(trace(run)))["traceEvents"]


def open_at(slices: list[dict[str, Any]], place: tuple[int, int], ts: float) -> list[dict[str, Any]]:
    return [e for e in slices if (e["pid"], e["tid"]) == place and e["ts"] <= ts < e["ts"] + e["dur"]]


@pytest.mark.parametrize("arch", ARCHS)
def test_slices_nest_and_arrows_have_both_ends(arch: str) -> None:
    run, events = traced(arch)
    slices = [e for e in events if e["ph"] == "X"]
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for e in slices:
        start = round(e["ts"] * 1e3)
        tracks[e["pid"], e["tid"]].append((start, start + round(e["dur"] * 1e3)))
    named = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    assert set(tracks) <= named
    assert {pid for pid, _ in tracks} <= {e["pid"] for e in events if e["name"] == "process_name"}
    for track in tracks.values():
        inside: list[int] = []  # ends of the slices that are open
        for start, end in sorted(track, key=lambda span: (span[0], -span[1])):
            while inside and inside[-1] <= start:
                inside.pop()
            assert not inside or end <= inside[-1]
            inside.append(end)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for e in events:
        if e["ph"] in "stf":
            flows[e["id"]].append(e)
    assert set(flows) == set(run.requests["id"].tolist())  # every request was carried
    assert run.carried is not None
    for id, flow in flows.items():
        assert [e["ph"] for e in flow] == ["s", *("t" * (len(flow) - 2)), "f"]
        times = [e["ts"] for e in flow]
        assert times == sorted(times)
        assert len({(e["name"], e["cat"]) for e in flow}) == 1
        assert flow[-1]["bp"] == "e"
        [outer, *_] = open_at(slices, (flow[0]["pid"], flow[0]["tid"]), flow[0]["ts"])
        assert outer["name"] == f"request {id}"
        bound = [open_at(slices, (e["pid"], e["tid"]), e["ts"]) for e in flow[1:]]
        assert all(len(open_slices) == 1 for open_slices in bound)  # the launch itself
        expected = {at for at, (rows, prompts) in enumerate(run.carried) if id in (*rows, *prompts)}
        assert {launch["args"]["launch"] for [launch] in bound} == expected


def test_a_request_has_its_stages_and_the_launches_in_them() -> None:
    run, events = traced("pdv")
    finish = dict(zip(run.requests["id"].tolist(), run.requests["finish_s"].tolist(), strict=True))
    for id in finish:
        mine = [e for e in events if e["ph"] == "X" and e["pid"] == REQUESTS and e["tid"] == id + 1]
        outer, stages = mine[0], {e["name"]: e for e in mine if e["cat"] == "stage" and "id" in e["args"]}
        assert outer["args"]["id"] == id
        assert outer["ts"] + outer["dur"] == pytest.approx(finish[id] * 1e6, abs=1e-2)
        assert list(stages)[-2:] == ["prefill", "decode"]
        assert sum(e["dur"] for e in stages.values()) == pytest.approx(outer["dur"], abs=1e-2)
        # rounds it took part in: as many drafts as verifies, as the request itself counts them
        drafts, verifies = ([e for e in mine if e["name"] == name] for name in ("draft", "verify"))
        assert len(drafts) == len(verifies) == outer["args"]["rounds"]
    launches = {e["name"] for e in events if e["ph"] == "X" and e["pid"] < HOSTS}
    assert launches == {"target prefill", "draft prefill", "draft", "verify"}


def test_the_host_does_one_thing_at_a_time_and_the_run_is_the_same() -> None:
    run, events = traced("pdv", replicas=2)
    host = [e for e in events if e["ph"] == "X" and HOSTS <= e["pid"] < REQUESTS]
    assert {e["pid"] for e in host} == {HOSTS, HOSTS + 1}
    assert sum(e["name"] == "launch" for e in host) == len(run.launches["start_s"])
    plain = simulate(run.experiment)
    assert plain.carried is None
    assert plain.requests["finish_s"].tolist() == run.requests["finish_s"].tolist()
    assert not [e for e in json.loads(b"".join(trace(plain)))["traceEvents"] if e["ph"] in "stf"]
