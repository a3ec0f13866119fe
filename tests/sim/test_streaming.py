"""A run that keeps no records: the same requests, the same run, the same metrics, in memory that does not grow."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdvsim.bench.sweep import flatten
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Scoring, Server, Traffic
from pdvsim.sim.metrics.sketch import ERROR, Spread
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload, make_requests

numbers = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=60)


@settings(max_examples=50)
@given(parts=st.lists(numbers, min_size=1, max_size=4), rank=st.floats(0, 100))
def test_a_sketch_against_numpy(parts: list[list[float]], rank: float) -> None:
    spread, whole = Spread(rounded=True), np.concatenate(parts)
    for part in parts:
        spread.add(np.array(part))
    assert spread.count == len(whole)
    assert spread.mean == pytest.approx(whole.mean(), rel=1e-12)
    assert spread.std == pytest.approx(whole.std(), rel=1e-9, abs=1e-9 * whole.max())
    assert spread.percentiles([rank])[0] == pytest.approx(np.percentile(whole, rank), rel=ERROR * 1.001)


@settings(max_examples=100)
@given(parts=st.lists(numbers, min_size=1, max_size=4), rank=st.floats(0, 100), times=st.integers(1, 3))
def test_kept_numbers_have_the_percentiles_of_numpy(parts: list[list[float]], rank: float, times: int) -> None:
    """To the last bit, though equal numbers are kept once."""
    exact, whole = Spread(), np.repeat(np.concatenate(parts), times)
    for part in parts:
        exact.add(np.repeat(part, times))
    assert exact.percentiles([rank, 50.0]) == np.percentile(whole, [rank, 50.0]).tolist()


TRACE = "".join(
    f'{{"timestamp": {i * 7}, "input_length": {5 + i % 9}, "output_length": {1 + i % 6}}}\n' for i in range(40)
)


@pytest.mark.parametrize(("dataset", "form"), [
    ({}, {}),
    ({"dataset_name": "random", "random_range_ratio": 0.5, "input_len": 40, "output_len": 9}, {}),
    ({"request_rate": 5.0, "burstiness": 0.3}, {"acceptance_concentration": 3.0}),
    ({"request_rate": 5.0}, {"acceptance_model": "cnn-eagle3"}),
    ({"dataset_name": "mooncake"}, {"synthetic_acceptance_rates": (0.8, 0.4)}),
    ({"dataset_name": "mooncake", "use_trace_timestamps": True, "num_prompts": 37}, {"acceptance_trace": "rounds"}),
])  # fmt: skip
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing(dataset: dict[str, Any], form: dict[str, Any], chunk: int, tmp_path: Path) -> None:
    if "dataset_name" in dataset and dataset["dataset_name"] == "mooncake":
        (tmp_path / "t.jsonl").write_text(TRACE)
        dataset = dataset | {"dataset_path": str(tmp_path / "t.jsonl")}
    if "acceptance_trace" in form:
        (tmp_path / "rounds").write_text("[4, 0, 2]\n[1]\n[3, 3]\n")
        form = {"acceptance_trace": str(tmp_path / "rounds")}
    traffic, acceptance = Traffic(**{"num_prompts": 100, "seed": 3} | dataset), Acceptance(**form)

    def facts(request: Any) -> tuple[object, ...]:
        return request.id, request.arrival_s, request.prompt_tokens, request.output_tokens, request.accept_runs

    workload, whole = Workload(traffic, acceptance, chunk), make_requests(traffic, acceptance)
    assert [facts(r) for r in workload] == [facts(r) for r in whole]
    assert [facts(r) for r in workload] == [facts(r) for r in whole]  # and again
    assert workload.largest().id == max(whole, key=lambda r: r.prompt_tokens + r.output_tokens).id


def check_same(experiment: Experiment) -> None:
    """Every key, in its order: exact but for rounding, percentiles within 1%."""
    streamed = replace(experiment, scoring=replace(experiment.scoring, detailed=False))
    exact, in_parts = flatten(summarise(simulate(experiment))), flatten(summarise(simulate(streamed)))
    assert list(in_parts) == list(exact)
    for name, value in exact.items():
        if isinstance(value, float):
            close = 0.01 if name.startswith(("median_", "p")) else 1e-9
            floor = 1e-6 if name == "breakdown_ms_other" else 1e-9
            if name.endswith("_se"):  # a quarter of the distance between two marks, each within 1%
                floor = 0.005 * (exact[name.removesuffix("_se")] + 4 * value)
            assert in_parts[name] == pytest.approx(value, rel=close, abs=floor, nan_ok=True), name
        else:
            assert in_parts[name] == value, name


@pytest.mark.parametrize("arch", ARCHS)
def test_the_metrics_are_those_of_the_records(arch: Arch, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every policy, however the run is cut into parts."""

    @given(
        seed=st.integers(0, 2**16),
        rate=st.sampled_from([4.0, 40.0, math.inf]),
        limit=st.sampled_from([None, 1, 5]),
        warmup=st.sampled_from([0, 0, 1, 20]),
        cut=st.sampled_from([1, 3, 4096]),
        output_len=st.sampled_from([1, 2, 30]),
        replicas=st.sampled_from([1, 1, 3]),
        room=st.sampled_from([None, 448]),  # the longest request alone: others are preempted
        turns=st.sampled_from([1, 1, 3]),
    )
    @settings(max_examples=8)
    def check(**drawn: Any) -> None:
        monkeypatch.setattr("pdvsim.sim.metrics.summary.REQUESTS", drawn["cut"])
        talking = drawn["turns"] > 1
        traffic = Traffic(
            "random", num_prompts=40, request_rate=drawn["rate"], max_concurrency=drawn["limit"], input_len=200,
            output_len=drawn["output_len"], random_range_ratio=0.9, num_turns=drawn["turns"],
            think_time_s=0.5 * talking, seed=drawn["seed"],
        )  # fmt: skip
        scoring = Scoring(("ttft:60", "tpot:9"), metric_percentiles=(5.0, 99.0), warmup_requests=drawn["warmup"])
        room = None if talking else drawn["room"]
        hardware = Hardware(replicas=drawn["replicas"], kv_capacity_tokens=room)
        acceptance = Acceptance() if arch == "autoregressive" else Acceptance(acceptance_rate=0.7)
        check_same(Experiment(arch, traffic, acceptance, Server(kv_cache="paged"), hardware, scoring=scoring))

    check()


def test_a_closed_loop_draws_no_request_before_its_turn() -> None:
    """However many are due, requests held back by the client are not made."""
    count = 0

    class Counting(Workload):
        def __iter__(self) -> Any:
            nonlocal count
            for request in super().__iter__():
                count += 1
                yield request

    from pdvsim.sim.machine.clock import Clock
    from pdvsim.sim.run import Client

    class Nowhere:
        on_finish: Any = None

        def receive(self, request: Any) -> None:
            pass

    traffic = Traffic(num_prompts=1000, max_concurrency=8)
    env = Clock()
    client = Client(env, Counting(traffic, Acceptance(), chunk=1), Experiment(traffic=traffic), Nowhere(), None)
    env.run()
    assert (len(client.inside), count) == (8, 9)


PEAK = "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM:')))"
WITHOUT_RECORDS = """import sys, pdvsim
run = pdvsim.run(arch='colocated', dataset_name='random', input_len=16, output_len=4, request_rate=200,
                 num_prompts=int(sys.argv[1]), detailed=False)
assert run.metrics['completed'] == int(sys.argv[1])
"""
SAVED_RECORDS = """import sys, pdvsim.sim.records as records
from pdvsim.cli import main
records.HELD_BYTES = 1 << 20
flags = ['--dataset-name', 'random', '--input-len', '16', '--output-len', '200', '--request-rate', '100']
files = ['--save-detailed', '-o', sys.argv[2]]
assert main(['run', '--arch', 'autoregressive', *flags, '--num-prompts', sys.argv[1], *files]) == 0
"""


@pytest.mark.parametrize(("code", "few", "more_mb"), [(WITHOUT_RECORDS, 8000, 8), (SAVED_RECORDS, 2000, 16)])
def test_memory_does_not_grow_with_the_requests(code: str, few: int, more_mb: int, tmp_path: Path) -> None:
    """Four times the requests, within so many MB of the same peak.

    Kept, the records of 24,000 more take 11 MB; saved, whole tables of the 1.2 million more rows took 40 MB. The peak
    is of its own memory: a process's `ru_maxrss` starts at what the one that started it had.
    """
    peaks = []
    for count in (few, 4 * few):
        command = [sys.executable, "-c", code + PEAK, str(count), str(tmp_path / f"{count}.json")]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(float(output.splitlines()[-1]))
    assert peaks[1] < peaks[0] + more_mb * 1024  # kB
