"""The error range of a run is that of comparable real runs, and says what these are; where there are none, why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import pdvsim
from pdvsim.sim.config import Experiment, Hardware, Host, Server, Traffic
from pdvsim.sim.policies import named
from pdvsim.sim.policies.pd import PD
from pdvsim.sim.run import simulate
from pdvsim.sim.trust import Errors, errors_of, groups
from pdvsim.study.band import ends, spanned
from pdvsim.study.stats import over_replications
from pdvsim.view.table import comparison_table

LONG = "llama-3.2-1b:llama-3.1-8b"  # a pair with a long context


class Mine(PD):
    """Somebody's own policy, which does as `pd` does."""


@pytest.fixture
def errors() -> Errors:
    found = errors_of(Hardware())
    assert found is not None
    return found


def serving(arch: str = "pd", users: int = 8, **server: Any) -> Experiment:
    traffic = Traffic("random", num_prompts=8, input_len=32, output_len=4, max_concurrency=users)
    return Experiment(arch, traffic, server=Server(**server))


def bars(metrics: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.endswith("_error")}


@pytest.mark.parametrize(
    ("arch", "users", "limit", "rule"),
    [
        ("pd", 8, 4, "as served"),
        ("pd", 8, None, "without limit"),
        ("pd", 8, 16, "without limit"),
        ("pd", 8, 2, None),
        ("pd", 4, None, "as served"),  # there are never more than four to prefill
        ("pd", 2, 2, "as served"),
        ("pdv-unified", 64, None, "as served"),  # prefills one prompt at a time, under any limit
        ("baseline", 64, None, "as served"),
    ],
)
def test_a_bar_knows_the_rule_it_was_validated_under(
    errors: Errors, arch: str, users: int, limit: int | None, rule: str | None
) -> None:
    assert errors.prompts_per_forward == 4
    assert errors.rule(serving(arch, users, max_prompts_per_forward=limit)) == rule


def test_another_rule_has_a_wider_bar_that_says_so() -> None:
    """51% of the real closed loops were inside the bar of P99 TTFT that a run without the engine's limit printed."""
    served = spanned(simulate(serving(max_prompts_per_forward=4)))
    free = spanned(simulate(serving()))
    assert free["p99_ttft_ms_error"] > 3 * served["p99_ttft_ms_error"]
    assert served["error_range"] == "holds 90% of comparable real runs"
    assert "up to 4 prompts per forward" in free["error_range"]


def test_groups_are_told_by_load_lanes_and_what_is_demanding() -> None:
    closed = serving("pdv")
    assert groups(closed, 100.0, 0.0) == ("closed, lanes", "closed", "any")
    assert groups(closed, 4000.0, 0.0)[0] == "closed, lanes, demanding"
    assert groups(closed, 100.0, 0.83)[0] == "closed, lanes, demanding"
    assert groups(serving("pdv", controller="goodput"), 100.0, 0.0)[0] == "closed, lanes, demanding"
    assert groups(serving("colocated"), 100.0, 0.0)[0] == "closed, one lane"
    assert groups(serving("baseline"), 4000.0, 0.0)[0] == "closed, sequential"
    arrivals = replace(closed, traffic=replace(closed.traffic, request_rate=3.0, max_concurrency=None))
    assert groups(arrivals, 100.0, 0.0)[0] == "open, lanes"


def test_long_prompts_have_bars_of_their_own() -> None:
    short = serving("pdv", max_prompts_per_forward=4, pair=LONG)
    long = replace(short, traffic=replace(short.traffic, input_len=2000))
    few, many = (spanned(simulate(experiment)) for experiment in (short, long))
    assert many["p99_itl_ms_error"] > 1.5 * few["p99_itl_ms_error"]


@pytest.mark.parametrize(
    ("experiment", "why"),
    [
        (serving(named(Mine)), "Mine was never validated against real runs"),
        (replace(serving(), hardware=Hardware(replicas=2)), "no real run used several GPUs"),
        (replace(serving(), hardware=Hardware(contention="max")), "--contention max is an ablation"),
        (replace(serving(), hardware=Hardware(profile="roofline")), "a roofline is a bound, not a prediction"),
        (replace(serving(), host=Host(launch_s=1e-3)), "the host costs are not the measured ones"),
        (serving(priority="preemptive"), "no real run had this --priority"),
        (serving(max_prompts_per_forward=2), "real runs prefilled up to 4 prompts per forward, this one fewer"),
    ],
)
def test_what_no_real_run_was_like_has_no_bar_and_says_why(experiment: Experiment, why: str) -> None:
    metrics = spanned(simulate(experiment), ends(experiment))
    assert metrics["error_range"] == f"none: {why}"
    assert not bars(metrics)
    assert not [name for name in metrics if name.endswith(("_low", "_high"))]


def test_a_policy_of_ones_own_has_no_bar_on_any_card() -> None:
    """What forward times are off by is not all that is unknown of it."""
    experiment = replace(serving(named(Mine)), hardware=Hardware(gpu="a100-80gb"))
    metrics = spanned(simulate(experiment), ends(experiment))
    assert metrics["error_range"] == "none: Mine was never validated against real runs"
    assert not [name for name in metrics if name.endswith(("_low", "_high"))]


def test_sizes_that_no_real_run_reached_have_no_bar() -> None:
    """Real runs went a little beyond what was measured; ±3.8% stood next to 83% of the GPU time outside."""
    options: dict[str, Any] = {"dataset_name": "random", "output_len": 4, "num_prompts": 3, "pair": LONG}
    far = pdvsim.run(arch="colocated", max_concurrency=1, input_len=30_000, **options)
    assert far.metrics["error_range"].startswith("none: real runs never had context of 30,00")
    assert "(at most 8,0" in far.metrics["error_range"]
    assert not bars(far.metrics)
    assert "none: real runs never had context" in far.table()
    near = pdvsim.run(arch="colocated", max_concurrency=1, input_len=8_000, **options)
    assert near.metrics["outside_measured"]["share"] > 0.01
    assert near.metrics["output_throughput_error"] > 0


def test_tables_say_what_their_brackets_are() -> None:
    sweep = pdvsim.sweep(
        arch=["pd", "pdv"], concurrency=[8], num_runs=1, jobs=1,
        dataset_name="random", input_len=32, output_len=4, num_prompts=8, max_prompts_per_forward=4,
    )  # fmt: skip
    table = str(comparison_table(over_replications(sweep)))
    assert "error range in brackets: holds 90% of comparable real runs\n" in table
    bar = sweep["output_throughput_error"].iloc[0]
    assert f"(±{100 * bar:.1f}%)" in table
