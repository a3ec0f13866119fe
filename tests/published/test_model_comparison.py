"""`pdvsim reproduce model-comparison`: what explains it is in the published figures, and most rows follow from it."""

from __future__ import annotations

import random

import pytest

from pdvsim.published.models import RATES_PER_S, SAME_PROMPT, ThreeWayModel, possible_orders
from pdvsim.published.program import legacy_arrivals
from pdvsim.published.reproduce import Reproduction, reproduce
from pdvsim.published.tables import THREE_WAY_PAIR, Key, TableRow, load_published

COMPARISON = "model_comparison"
ROWS = load_published().rows(COMPARISON)
QWEN = "Qwen2-1.5B->Qwen2-7B"


@pytest.fixture(scope="module")
def comparison() -> Reproduction:
    return reproduce("model-comparison", load_published(), runs=6)


def published(row: TableRow, metric: str) -> float:
    return load_published().figures[Key(COMPARISON, *row[:3], metric)].value


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_the_arrivals_are_in_the_published_figures(row: TableRow) -> None:
    """The last request to finish took the longest; the total, polled every 10 ms, less its latency is its arrival."""
    arrivals_s = legacy_arrivals(RATES_PER_S[row[3]], most=row[3])
    arrived_s = published(row, "total_time") - published(row, "request_latency_max") / 1e3
    assert min(abs(arrived_s - arrival_s) for arrival_s in arrivals_s) < 0.015


def test_the_seed_of_the_programs_repeats_a_prompt() -> None:
    """A request draws its prompt, then a length; three_way's order, found from latencies, has the same repetition."""
    rng = random.Random(42)
    prompts = [(rng.choice(range(5)), rng.randint(50, 150))[0] for _ in range(5)]
    one, other = SAME_PROMPT
    assert [i for i in range(5) for j in range(i) if prompts[i] == prompts[j]] == [other]
    assert prompts[one] == prompts[other]
    order = ThreeWayModel(load_published()).five["baseline"]
    assert order[one] == order[other]


def test_orders_by_hand() -> None:
    a, b, c, d, e, f = ((100, rounds) for rounds in (30, 40, 50, 60, 70, 80))
    baseline, pdv = possible_orders([a, a, b, c, d], [a, b, d, e, f])
    assert len(baseline) == 6  # b, c and d in the three places left
    assert all(order[0] == order[3] == a for order in baseline)
    assert len(pdv) == 24
    assert all(order[0] == a for order in pdv)
    apart, _ = possible_orders([a, b, c, d, e], [a, b, f, f, f])
    assert {order[0] for order in apart} == {a, b}


def test_one_figure_is_calibrated_on_and_given_back(comparison: Reproduction) -> None:
    [used] = [cell for cell in comparison.cells if cell.used_for_calibration]
    assert (used.pair, used.arch, used.requests, used.metric) == (THREE_WAY_PAIR, "pdv", 5, "request_latency_mean")
    assert used.error == pytest.approx(0, abs=1e-6)


def test_latencies_follow_but_for_one_pair(comparison: Reproduction) -> None:
    """Mean and P95 within 15%, on pairs and loads that nothing was calibrated on; Qwen2 within 20%."""
    assert len(comparison.targeted()) == 24
    assert {(c.pair, c.arch, c.requests): c.error for c in comparison.missed() if c.pair != QWEN} == {}
    assert len(comparison.missed()) <= 4
    assert max(abs(c.error) for c in comparison.missed()) < 0.2


@pytest.mark.parametrize("metric", ["request_latency_p95", "request_latency_mean"])
def test_pdv_is_faster_in_every_scenario_as_published(comparison: Reproduction, metric: str) -> None:
    assert set(comparison.winners(metric).values()) == {("pdv", "pdv")}
    assert len(comparison.winners(metric)) == 6
