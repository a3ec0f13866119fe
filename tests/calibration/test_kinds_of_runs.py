"""Real runs of shared prefixes and conversations, and of mixtures of experts and 8-bit weights, against predictions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdvsim.calibration.validate.compare import Validation, validate
from pdvsim.calibration.validate.served import ServedRun, read_runs
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

DATA = Path(__file__).parents[2] / "calibration" / "data" / "h200"
SHARED = [run for run in read_runs(DATA / "prefixes.jsonl") if run.metrics.get("prefix_cache_queries")]


@pytest.fixture(scope="module", params=["prefixes", "experts"])
def compared(request: pytest.FixtureRequest) -> tuple[str, Validation]:
    return request.param, validate(read_runs(DATA / f"{request.param}.jsonl"), jobs=1)


def held_out(found: Validation) -> list[float]:
    return [abs(error) for one in found.by_machine(held_out=True)["this machine"] for error in one.errors.values()]


def test_held_out_runs_are_within_three_percent(compared: tuple[str, Validation]) -> None:
    assert len(held_out(compared[1])) > 80
    assert np.median(held_out(compared[1])) <= 0.03


def test_nineteen_of_twenty_errors_are_within_a_tenth(
    compared: tuple[str, Validation], request: pytest.FixtureRequest
) -> None:
    if compared[0] == "experts":
        reason = "20%: TTFT of mixtures in lanes, whose prefills are concurrent with decoding"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))
    assert np.quantile(held_out(compared[1]), 0.95) <= 0.10


@pytest.mark.parametrize("run", SHARED, ids=lambda run: run.id)
def test_the_gpu_found_as_many_cached_tokens(run: ServedRun, request: pytest.FixtureRequest) -> None:
    """To the token; where evictions depend on timing, within 1%."""
    if run.id == "47298b040c4d":
        reason = "1.4%: evictions of a small cache follow the host times of the median machine"
        request.applymarker(pytest.mark.xfail(reason=reason, strict=True, raises=AssertionError))
    real, simulated = run.metrics, summarise(simulate(run.experiment))
    assert simulated["prefix_cache_queries"] == real["prefix_cache_queries"]
    small = run.experiment.hardware.kv_capacity_tokens is not None
    assert simulated["prefix_cache_hits"] == pytest.approx(real["prefix_cache_hits"], rel=0.01 if small else 0)


def test_the_runs_cover_what_is_claimed() -> None:
    rates = [run.metrics["prefix_cache_hit_rate"] for run in SHARED]
    assert len(SHARED) >= 16
    assert min(rates) < 50
    assert max(rates) > 90
    assert len({run.experiment.server.pair for run in SHARED}) == 3
