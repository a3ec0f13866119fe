"""Decisions hold at their load: found in runs that are long enough, and again in runs three times as long."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pdvsim
from pdvsim.bench import length
from pdvsim.decide.runs import Bench, keeps_up
from pdvsim.sim.config import Experiment, Server, Traffic
from pdvsim.sim.metrics.steady import Length
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

FIXED: dict[str, Any] = {
    "arch": ["colocated"], "engine": "pdvsim", "num_runs": 1, "tolerance": 0.1, "controller": "fixed",
    "max_num_batched_tokens": 2048,
    "goodput": ["ttft:500", "tpot:50"],
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    # runs of the first length showed 7.4
    "conversations": {"num_turns": 4, "think_time_s": 1.0, "num_speculative_tokens": 2, "max_num_seqs": 16},
    # runs that still had the queue of the cold cache in them showed 26
    "prefixes": {
        "dataset_name": "random", "prefix_len": 6000, "num_prefixes": 20, "input_len": 200, "output_len": 50,
        "num_speculative_tokens": 0, "max_num_seqs": 64,
    },
}  # fmt: skip
HELD = {"conversations": (8.1, 9.9), "prefixes": (34.0, 41.0)}  # simulated at length: 9 and 37 req/s hold


@pytest.mark.parametrize("name", CASES)
def test_a_capacity_holds_three_times_as_long_on_another_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth below the rate that was found holds in a long run, a fifth above it does not."""
    with monkeypatch.context() as search:
        search.setattr(length, "MOST", 2000)  # no longer than these loads need
        capacities = pdvsim.capacity(**FIXED | CASES[name])
    [entry], plan = capacities.summary(), capacities.plan
    rate = entry["rate"].mean
    low, high = HELD[name]
    assert low < rate < high
    verdicts = []
    for factor in (0.9, 1.2):
        run = plan.experiment(("colocated", 7), factor * rate)
        [start, measured] = length.length_of(run)
        long = length.with_length(run, Length(start, 3 * measured))
        [row] = Bench(1).rows([replace(long, hardware=replace(long.hardware, band=False))])
        verdicts.append(plan.goal.attains(row) and keeps_up(row))
    assert verdicts == [True, False]


def test_a_sized_run_is_long_enough_for_its_own_figures() -> None:
    """The first run is too short to show the queue of a cold cache, and the one that it asks for is as well."""
    asked: list[int] = []

    def measure(run: Experiment) -> dict[str, Any]:
        asked.append(run.traffic.num_prompts)
        return summarise(simulate(run))

    load = Traffic("random", request_rate=32.0, prefix_len=6000, num_prefixes=20, input_len=200, output_len=50)
    run = length.sized(Experiment("colocated", load, server=Server(max_num_seqs=64, num_speculative_tokens=0)), measure)
    assert asked == sorted(asked)
    assert len(asked) > 2
    assert length.needed_length(run, measure(run)).total <= length.CLOSE * run.traffic.num_prompts


def test_conversations_of_a_closed_loop_are_all_there() -> None:
    """64 users of ten turns: one draft token gives more than two; in 256 requests it was the reverse."""
    talks: dict[str, Any] = {"engine": "pdvsim", "max_concurrency": 64, "num_turns": 10, "steady": True}
    short = {k: pdvsim.run(**talks, num_speculative_tokens=k).metrics["output_throughput"] for k in (1, 2)}
    long = {
        k: pdvsim.run(**talks, num_speculative_tokens=k, num_prompts=4000, seed=5).metrics["output_throughput"]
        for k in (1, 2)
    }
    assert short[1] > short[2]
    assert long[1] > long[2]
    for k in (1, 2):
        assert short[k] == pytest.approx(long[k], rel=0.03)
