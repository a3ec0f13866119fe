"""Requests are drawn, and rows read, in parts: the parts change nothing, and memory does not grow with the rows."""

from __future__ import annotations

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
from pdvsim.sim.config import Acceptance, Experiment, Scoring, Traffic
from pdvsim.sim.metrics.spread import Spread
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate
from pdvsim.sim.workload.requests import Workload, make_requests

numbers = st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=60)


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


def test_a_run_without_records_has_the_metrics_of_its_records() -> None:
    experiment = Experiment("pdv", Traffic("random", num_prompts=40, request_rate=40.0, input_len=200, output_len=30))
    kept, dropped = simulate(experiment), simulate(replace(experiment, scoring=Scoring(detailed=False)))
    assert summarise(dropped) == summarise(kept)
    assert not any(len(table["replica"]) for table in (dropped.requests, dropped.launches))
    with pytest.raises(ValueError, match="cannot be scored again"):
        summarise(dropped, Scoring(warmup_requests=3))


def test_parts_change_no_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """However a run is cut into parts."""
    for warmup in (0, 20):
        traffic = Traffic("random", num_prompts=40, request_rate=40.0, input_len=200, output_len=30, num_turns=3)
        experiment = Experiment("pdv", traffic, scoring=Scoring(("ttft:60", "tpot:9"), warmup_requests=warmup))
        monkeypatch.setattr("pdvsim.sim.records.REQUESTS", 4096)
        whole = flatten(summarise(simulate(experiment)))
        monkeypatch.setattr("pdvsim.sim.records.REQUESTS", 3)
        in_parts = flatten(summarise(simulate(experiment)))
        assert list(in_parts) == list(whole)
        for name, value in whole.items():
            exact = value if not isinstance(value, float) else pytest.approx(value, rel=1e-9, abs=1e-6, nan_ok=True)
            assert in_parts[name] == exact, name


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
SAVED_RECORDS = """import sys, pdvsim.sim.records as records
from pdvsim.cli import main
records.HELD_BYTES = 1 << 20
flags = ['--dataset-name', 'random', '--input-len', '16', '--output-len', '200', '--request-rate', '100']
files = ['--save-detailed', '-o', sys.argv[2]]
assert main(['run', '--arch', 'autoregressive', *flags, '--num-prompts', sys.argv[1], *files]) == 0
"""


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """Four times the requests, within 16 MB of the same peak: whole tables of the 1.2 million more rows took 40 MB.

    The peak is of its own memory: a process's `ru_maxrss` starts at what the one that started it had.
    """
    peaks = []
    for count in (2000, 8000):
        command = [sys.executable, "-c", SAVED_RECORDS + PEAK, str(count), str(tmp_path / f"{count}.json")]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        peaks.append(float(output.splitlines()[-1]))
    assert peaks[1] < peaks[0] + 16 * 1024  # kB
