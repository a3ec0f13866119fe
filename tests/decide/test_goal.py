"""Service levels: those that name a percentile are met each by itself, those that name none together."""

from __future__ import annotations

import math

import pytest

from pdvsim.bench.pool import Row
from pdvsim.decide.goal import Goal
from pdvsim.sim.config import Experiment, Level, Scoring


def row(**figures: float) -> Row:
    """A run that kept up, in which nine requests of ten met all levels."""
    kept_up: Row = {"stability": "stable", "load": math.inf, "breakdown_ms_queue": 0.0, "completed": 10}
    return kept_up | {"request_goodput": 9.0, "request_throughput": 10.0} | figures


def test_a_level_may_name_its_percentile() -> None:
    levels = Scoring(goodput=("p99_ttft:200", "p50_tpot:20", "e2el:5000")).levels()
    assert levels == (Level("ttft", 0.2, 99.0), Level("tpot", 0.02, 50.0), Level("e2el", 5.0, None))


def test_of_two_levels_of_a_metric_a_request_must_meet_the_longer() -> None:
    assert Scoring(goodput=("p50_ttft:100", "p99_ttft:500")).slo() == {"ttft": 0.5}


@pytest.mark.parametrize("text", ["p_ttft:1", "q99_ttft:1", "99_ttft:1", "p100_ttft:1", "p0_ttft:1", "p99_itl:1"])
def test_what_is_no_level_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="goodput"):
        Scoring(goodput=(text,))


def test_each_is_met_at_its_own_percentile_and_the_others_at_the_highest() -> None:
    goal = Goal("headroom", ("p50_ttft:100", "p99_ttft:500", "tpot:20"))
    assert goal.levels_ms == {"p50_ttft": 100.0, "p99_ttft": 500.0, "p99_tpot": 20.0}
    assert goal.percentile == "p99"
    met = row(p50_ttft_ms=100.0, p99_ttft_ms=400.0, p99_tpot_ms=10.0)
    assert goal.met([met])
    assert goal.attains(met)
    assert goal.value(met) == pytest.approx(1.0)
    assert not goal.met([met | {"p50_ttft_ms": 101.0}])
    assert goal.met([met | {"p50_ttft_ms": 101.0}, met | {"p50_ttft_ms": 99.0}])  # on average
    assert goal.levels_text == "P50 TTFT <= 100 ms and P99 TTFT <= 500 ms and P99 TPOT <= 20 ms"
    assert goal.share_text == ""


def test_without_a_percentile_a_share_of_the_requests_meets_all() -> None:
    goal = Goal("headroom", ("ttft:100", "tpot:20"))
    assert goal.attains(row(p90_ttft_ms=1e9, p90_tpot_ms=1e9))
    assert not Goal("headroom", ("ttft:100",), 0.95).attains(row())
    assert goal.levels_text + goal.share_text == "TTFT <= 100 ms and TPOT <= 20 ms for 90% of the requests"


def test_the_attainment_follows_from_the_percentile() -> None:
    with pytest.raises(ValueError, match="--attainment needs service levels without a percentile"):
        Goal("headroom", ("p99_ttft:200",), 0.95)


def test_a_run_has_every_percentile_that_is_named() -> None:
    goal = Goal("headroom", ("p50_ttft:100", "p99.9_ttft:500"))
    assert goal.prepared(Experiment()).scoring.metric_percentiles == (99.9, 50.0, 99.0)
