"""The smallest fleet for a load, against Lindley's recursion of each of its servers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pdvsim.calibration.fit.build import save
from pdvsim.decide.advice import Advice
from pdvsim.decide.advise import advise
from pdvsim.decide.goal import Goal
from pdvsim.decide.question import Question
from pdvsim.decide.runs import Bench
from pdvsim.decide.space import Space
from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.hardware.forward import ForwardTerms
from pdvsim.sim.hardware.models import GPUS
from pdvsim.sim.hardware.profile import roofline
from pdvsim.sim.hardware.terms import RooflineLayers
from pdvsim.sim.workload.acceptance import Acceptance
from pdvsim.sim.workload.requests import make_requests

SERVICE_S, LEVEL_S, HOUR_USD = 0.01, 0.015, 3.6
MOST_GPUS = 8


@pytest.fixture(scope="module")
def one_by_one(tmp_path_factory: pytest.TempPathFactory) -> Experiment:
    """A server of one request at a time, each of which takes 10 ms."""
    path: Path = tmp_path_factory.mktemp("profiles") / "queue.json"
    slow = ForwardTerms(RooflineLayers(token_s=SERVICE_S / 100))
    save(replace(roofline(GPUS["h200"]), name="queue", models={"llama-3.1-8b": slow}, uncertainty={}), path)
    return Experiment(
        arch="autoregressive",
        traffic=Traffic("random", input_len=100, output_len=1),
        server=Server("none:llama-3.1-8b", max_num_seqs=1, max_num_batched_tokens=10**6),
        hardware=Hardware(profile=str(path), kv_capacity_tokens=10**9),
        host=Host(launch_s=0.0, completion_s=0.0, handoff_s=0.0),
    )


def arrivals(rate: float) -> NDArray[np.float64]:
    """When each of 20,000 requests arrives."""
    traffic = Traffic("random", num_prompts=20_000, input_len=100, output_len=1, request_rate=rate, seed=77)
    return np.array([request.arrival_s for request in make_requests(traffic, Acceptance())])


def share_in_time(arrival_s: NDArray[np.float64], servers: int) -> float:
    """Share of the requests that wait no longer than the level allows, dealt to the servers in turn."""
    in_time = 0
    for server in range(servers):
        wait_s = 0.0
        for gap_s in np.diff(arrival_s[server::servers], prepend=-1.0):
            wait_s = max(0.0, wait_s + SERVICE_S - gap_s)
            in_time += wait_s + SERVICE_S <= LEVEL_S
    return in_time / len(arrival_s)


def asked(base: Experiment, rate: float) -> Advice:
    space = Space(("autoregressive",), (4,), ("fixed",), (1,), (10**6,), own=False)
    goal = Goal("throughput", (f"ttft:{1e3 * LEVEL_S}",), 0.9)
    loaded = replace(base, traffic=replace(base.traffic, request_rate=rate))
    question = Question(
        loaded, space, goal, gpu_hour_usd=HOUR_USD, most_gpus=MOST_GPUS, fleet_archs=("autoregressive",)
    )
    return advise(question, Bench(1))


def test_the_fleet_is_the_smallest_that_lindley_allows(one_by_one: Experiment, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 100.0
    monkeypatch.setattr("pdvsim.decide.advise.SERVER_GPUS", 1)  # replicas only, no tensor parallelism
    arrival_s = arrivals(rate)
    shares = {servers: share_in_time(arrival_s, servers) for servers in range(2, MOST_GPUS + 1)}
    least = min(servers for servers, share in shares.items() if share >= 0.9)
    assert shares[least] > 0.92  # so that chance does not decide
    assert shares[least - 1] < 0.88
    advice = asked(one_by_one, rate)
    assert advice.recommended.hardware.replicas == least
    assert advice.met
    assert advice.held_rate.mean + advice.held_rate.half_width >= rate
    usd = least * HOUR_USD / 3600 / rate * 1e6  # one token for each request
    assert advice.per_million(advice.recommended).mean == pytest.approx(usd, rel=0.02)
