"""The error range of a run is that of comparable real runs, and says what these are; where there are none, why."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import pdvsim
from pdvsim.bench.band import ends, spanned
from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.policies import named
from pdvsim.sim.policies.pd import PD
from pdvsim.sim.run import simulate
from pdvsim.sim.trust import Errors, errors_of, groups

LONG = "llama-3.2-1b:llama-3.1-8b"  # a pair with a long context


class Mine(PD):
    """Somebody's own policy, which does as `pd` does."""


@pytest.fixture
def errors() -> Errors:
    recorded = errors_of(Hardware())
    assert recorded is not None
    return recorded


def serving(arch: str = "pd", users: int = 8, **server: Any) -> Experiment:
    traffic = Traffic("random", num_prompts=8, input_len=32, output_len=4, max_concurrency=users)
    return Experiment(arch, traffic, server=Server(**server))


def bars(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.endswith("_error")}


def test_a_machine_whose_pace_is_known_has_bars_of_its_own(errors: Errors, tmp_path: Path) -> None:
    pace = tmp_path / "run.json"
    pace.write_text(json.dumps({"pace_target": 1.0, "pace_draft": 1.0, "pace_host_s": 2e-4, "pace_row_s": 0.0}))
    other = serving()
    here = replace(other, hardware=Hardware(machine=str(pace)))
    for known, experiment in (("any machine", other), ("this machine", here)):
        like = next(errors.bars[known][group] for group in groups(other, 100.0, 0.0) if group in errors.bars[known])
        assert spanned(simulate(experiment))["mean_tpot_ms_error"] == like["mean_tpot_ms"]
    assert errors.bars["this machine"]["any"]["mean_tpot_ms"] < errors.bars["any machine"]["any"]["mean_tpot_ms"]


def test_groups_differ_by_load_lanes_and_what_is_demanding() -> None:
    closed = serving("pdv")
    assert groups(closed, 100.0, 0.0) == ("closed, lanes", "closed", "any")
    assert groups(closed, 4000.0, 0.0)[0] == "closed, lanes, demanding"
    assert groups(closed, 100.0, 0.83)[0] == "closed, lanes, demanding"
    assert groups(serving("pdv", controller="goodput"), 100.0, 0.0)[0] == "closed, lanes, demanding"
    assert groups(serving("colocated"), 100.0, 0.0)[0] == "closed, one lane"
    assert groups(serving("baseline"), 4000.0, 0.0)[0] == "closed, sequential"
    arrivals = replace(closed, traffic=replace(closed.traffic, request_rate=3.0, max_concurrency=None))
    assert groups(arrivals, 100.0, 0.0)[0] == "open, lanes"


@pytest.mark.parametrize(("experiment", "why"), [
    (serving(named(Mine)), "Mine"),
    (replace(serving(named(Mine)), hardware=Hardware(gpu="a100-80gb")), "Mine"),
    (replace(serving(), hardware=Hardware(replicas=2)), "several GPUs"),
    (replace(serving(), hardware=Hardware(contention="max")), "--contention max"),
    (replace(serving(), hardware=Hardware(profile="roofline")), "roofline"),
    (replace(serving(), host=Host(launch_s=1e-3)), "host costs"),
    (serving(priority="preemptive"), "--priority"),
    (serving(max_prompts_per_forward=2), "--max-prompts-per-forward"),
    (serving("colocated", pair="ngram:llama-3.1-8b"), "real runs padded"),
])  # fmt: skip
def test_what_no_real_run_was_like_has_no_bar_and_says_why(experiment: Experiment, why: str) -> None:
    metrics = spanned(simulate(experiment), ends(experiment))
    assert metrics["error_range"].startswith("none: ")
    assert why in metrics["error_range"]
    assert not bars(metrics)
    assert not [name for name in metrics if name.endswith(("_low", "_high"))]


def test_sizes_that_no_real_run_reached_have_no_bar() -> None:
    """Real runs went a little beyond what was measured; ±3.8% stood next to 83% of the GPU time outside."""
    options: dict[str, Any] = {"dataset_name": "random", "output_len": 4, "num_prompts": 3, "pair": LONG}
    options["engine"] = "pdvsim"
    far = pdvsim.run(arch="colocated", max_concurrency=1, input_len=30_000, **options)
    assert re.match("none: .*context of 30,00.* 8,0", far.metrics["error_range"])
    assert not bars(far.metrics)
    assert far.metrics["error_range"] in " ".join(far.table().split())
    near = pdvsim.run(arch="colocated", max_concurrency=1, input_len=8_000, **options)
    assert near.metrics["outside_measured"]["share"] > 0.01
    assert near.metrics["output_throughput_error"] > 0
