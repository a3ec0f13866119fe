"""Intervals of percentiles over few replications have their stated coverage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from numpy.random import Generator
from numpy.typing import NDArray

from pdvsim.bench.stats import interval, over_replications
from pdvsim.sim.config import Experiment, Hardware, Scoring, Traffic
from pdvsim.sim.metrics.sketch import Spread
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

RUNS, EACH = 600, 3  # 200 intervals over three runs
SIMULATED, DRAWN = 160, 300  # runs, and threes drawn of them
METRICS = tuple(f"{mark}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for mark in ("median", "p90", "p99"))


def waves(rng: Generator) -> NDArray[np.float64]:
    """Of 100 requests 8 to 12 wait for a prompt before theirs: P90 is in one cluster or in the other."""
    return rng.normal(np.where(rng.random(100) < 0.1, 40.0, 10.0), 0.5)


def two_kinds(rng: Generator) -> NDArray[np.float64]:
    """A hundredth of the gaps has a prompt in it: P99 is in one cluster or in the other."""
    return rng.normal(np.where(rng.random(500) < 0.01, 25.0, 10.0), 0.3)


def smooth(rng: Generator) -> NDArray[np.float64]:
    return rng.lognormal(0.0, 0.8, 200)


@pytest.mark.parametrize(("draw", "rank", "now"), [(waves, 90.0, 0.8), (two_kinds, 99.0, 0.8), (smooth, 99.0, 1.0)])
def test_two_hundred_intervals_of_a_tail_cover_it(
    draw: Callable[[Generator], NDArray[np.float64]], rank: float, now: float
) -> None:
    """95% is nominal; the deviation between three runs alone covers less than `now`."""
    rng = np.random.default_rng(7)
    tails, errors = np.empty(RUNS), np.empty(RUNS)
    for run in range(RUNS):
        spread = Spread()
        spread.add(draw(rng))
        [tails[run]], [errors[run]] = spread.percentiles([rank]), spread.standard_errors([rank], spread.count)
    truth = tails.mean()
    covered = {True: 0, False: 0}
    for first in range(0, RUNS, EACH):
        values, within = tails[first : first + EACH].tolist(), errors[first : first + EACH].tolist()
        for inside in covered:
            covering = interval(values, within=within if inside else ())
            covered[inside] += abs(covering.mean - truth) <= covering.half_width
    count = RUNS // EACH
    assert covered[False] < now * count
    assert 0.93 * count <= covered[True]


@pytest.mark.parametrize("scatter", [0.1, 0.3, 1.0])
def test_intervals_of_rounded_values_cover_what_was_rounded(scatter: float) -> None:
    """Two values rounded down to a grid, as rates held are, often agree; what was rounded may be anywhere between."""
    rng = np.random.default_rng(11)
    covered = {0.0: 0, 1.0: 0}
    for _ in range(400):
        truth = rng.uniform(0, 1)
        values = np.floor(rng.normal(truth, scatter, 2)).tolist()
        for grid in covered:
            covering = interval(values, grid=grid)
            covered[grid] += abs(covering.mean + 0.5 - truth) <= covering.half_width
    assert covered[0.0] < 0.8 * 400
    assert covered[1.0] >= 0.93 * 400


def test_runs_of_a_server_are_covered_by_three_each() -> None:
    """Poisson arrivals: every percentile, in intervals over random threes of 160 runs; 62% of medians of ITL before."""
    traffic = Traffic("random", num_prompts=24, input_len=128, output_len=10, random_range_ratio=0.5, request_rate=60.0)
    scoring = Scoring(metric_percentiles=(90.0, 99.0))
    base = Experiment("colocated", traffic, hardware=Hardware(band=False), scoring=scoring)
    runs = [summarise(simulate(replace(base, traffic=replace(traffic, seed=seed)))) for seed in range(SIMULATED)]
    rows = pd.DataFrame([{"arch": "colocated", "load_kind": "request_rate", "load": 60.0} | run for run in runs])
    rows = rows[["arch", "load_kind", "load", *METRICS, *(f"{metric}_se" for metric in METRICS)]]
    rng = np.random.default_rng(3)
    covered = dict.fromkeys(METRICS, 0)
    for _ in range(DRAWN):
        [entry] = over_replications(rows.iloc[rng.choice(SIMULATED, EACH, replace=False)])
        for metric in METRICS:
            off = abs(entry[metric].mean - rows[metric].mean())
            covered[metric] += int(off <= entry[metric].half_width * (1 + 1e-9))
    assert {metric: count for metric, count in covered.items() if count < 0.93 * DRAWN} == {}


def test_the_standard_error_of_a_percentile_by_hand() -> None:
    """0 to 400: the median's rank is off by 2 * 2.5%, which is the values 180 and 220; a quarter of the distance."""
    spread = Spread()
    spread.add(np.arange(401.0))
    assert spread.standard_errors([50.0], 400) == pytest.approx([10.0])
    low = 99 - 2 * 100 * np.sqrt(0.0099 / 100)  # its upper end is the largest value
    assert spread.standard_errors([99.0], 100) == pytest.approx([(400 - 4 * low) / 4])
    assert spread.standard_errors([50.0], 100) == pytest.approx([20.0])  # fewer of them are independent


def test_within_widens_and_never_narrows() -> None:
    assert interval([1.0, 3.0], within=[0.1, 0.1]) == interval([1.0, 3.0])
    assert interval([2.0, 2.1], within=[3.0, 4.0]).half_width == pytest.approx(12.7062 * np.sqrt(12.5 / 2), rel=1e-5)
    assert interval([2.0, 2.0], within=[3.0, 4.0]).half_width == 0  # nothing random is in it
    assert np.isnan(interval([2.0], within=[3.0]).half_width)
