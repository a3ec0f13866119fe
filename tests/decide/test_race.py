"""Who is best, and how sure: enough seeds, a lead that counts, and the interval that is printed decides."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import LEAST_SEEDS, Contest, contest, enough, exceeds, threshold_text, unsure_text
from pdvsim.sim.config import Experiment, Hardware, Server
from pdvsim.sim.trust import errors_of

figures = st.floats(0.1, 1e6)


@st.composite
def fields(draw: st.DrawFn, least: int = 2, most: int = 8) -> dict[str, list[float]]:
    """Contenders with a figure a seed."""
    seeds = draw(st.integers(least, most))
    names = draw(st.integers(2, 4))
    return {"abcd"[i]: draw(st.lists(figures, min_size=seeds, max_size=seeds)) for i in range(names)}


signs = st.sampled_from([1, -1])


@given(
    seeds=st.integers(LEAST_SEEDS, 12),
    confidence=st.floats(0.95, 0.999),
    leads=st.lists(st.floats(-1, 1), min_size=12, max_size=12),
    threshold=st.floats(0, 0.3),
)
def test_what_a_few_seeds_settle_more_do_not_undo(
    seeds: int, confidence: float, leads: list[float], threshold: float
) -> None:
    """A lead that in the mean of the first is no more than the threshold; with one of them fewer it could be undone."""
    few = enough(seeds, confidence)
    off = max(0.0, sum(leads[:few]) / few - threshold)
    sample = [*(lead - off - 1e-9 for lead in leads[:few]), *leads[few:seeds]]
    assert not exceeds(interval(sample, confidence), threshold)
    if few > 1:
        undone = [threshold] * (few - 1) + [threshold + 1.0] * (seeds - few + 1)
        assert exceeds(interval(undone, confidence), threshold - 1e-9)


@given(values=fields(most=LEAST_SEEDS - 1), sign=signs)
def test_fewer_than_five_seeds_never_tell_apart(values: dict[str, list[float]], sign: int) -> None:
    held = contest(values, sign)
    assert not held.sure
    assert held.unsure == held.others
    assert f"at least {LEAST_SEEDS}" in threshold_text([held], 0.0)


@given(values=fields(LEAST_SEEDS), sign=signs, threshold=st.floats(0, 0.5), comparisons=st.integers(1, 50))
def test_significant_is_an_interval_above_the_threshold(
    values: dict[str, list[float]], sign: int, threshold: float, comparisons: int
) -> None:
    held = contest(values, sign, comparisons, threshold)
    assert held.confidence == pytest.approx(1 - 0.05 / comparisons)
    for other in held.others:
        shares = [sign * (a - b) / b for a, b in zip(values[held.best], values[other], strict=True)]
        lead = interval(shares, held.confidence)
        assert held.leads[other] == lead
        assert (other not in held.unsure) is (lead.mean - lead.half_width > threshold)


@given(values=fields(), sign=signs)
def test_the_first_is_never_worse_than_another(values: dict[str, list[float]], sign: int) -> None:
    held = contest(values, sign)
    assert next(iter(held.values)) == held.best
    means = [sign * value.mean for value in held.values.values()]
    assert means == sorted(means, reverse=True)


@given(values=fields(LEAST_SEEDS), sign=signs, threshold=st.floats(0, 0.5))
def test_the_order_of_contenders_decides_nothing(values: dict[str, list[float]], sign: int, threshold: float) -> None:
    held = contest(values, sign, indifference=threshold)
    again = contest(dict(reversed(values.items())), sign, indifference=threshold)
    if len({value.mean for value in held.values.values()}) == len(values):
        assert held == again


def test_a_tie_is_no_win() -> None:
    assert contest({"a": [1.0, 2.0] * 3, "b": [1.0, 2.0] * 3}, 1).unsure == ("b",)
    assert not contest({"a": [0.0] * 5, "b": [0.0] * 5}, 1).sure
    assert contest({"a": [5.0] * 5, "b": [0.0] * 5}, 1).sure
    assert contest({"a": [5.0] * 5, "b": [0.0] * 5}, 1).lead_text("b") == "+>999%"


def printed(held: Contest, other: str) -> tuple[float, float]:
    """A lead and the half width of its interval, as shares, from the text."""
    match = re.fullmatch(r"([+-]\d+\.\d)(?: ±(\d+\.\d))? %", held.lead_text(other))
    return float(match[1]) / 100, float(match[2] or 0) / 100


@given(values=fields(LEAST_SEEDS), sign=signs, comparisons=st.integers(1, 50))
def test_the_lead_printed_is_the_one_that_decided(values: dict[str, list[float]], sign: int, comparisons: int) -> None:
    held = contest(values, sign, comparisons)
    for other in held.others:
        if held.leads[other].mean < 10:
            mean, half = printed(held, other)
            assert mean == pytest.approx(held.leads[other].mean, abs=0.0005001)
            assert half == pytest.approx(held.leads[other].half_width, abs=0.0005001)


def test_a_lead_must_exceed_the_larger_error_of_the_two() -> None:
    values = {"a": [1.2] * 5, "b": [1.0] * 5, "c": [1.0] * 5}
    held = contest(values, 1, None, 0.01, {"a": 0.04, "b": 0.3, "c": 0.03})
    assert held.thresholds == {"b": 0.3, "c": 0.04}
    assert held.unsure == ("b",)


@given(
    values=fields(LEAST_SEEDS),
    sign=signs,
    indifference=st.floats(0, 0.2),
    error=st.floats(0, 0.5),
    family=st.integers(4, 50),
)
def test_the_profiles_error_makes_nobody_alike(
    values: dict[str, list[float]], sign: int, indifference: float, error: float, family: int
) -> None:
    """Alike is what this contest's own seeds leave open; neither the error nor a larger family of comparisons is."""
    held = contest(values, sign, family, indifference, dict.fromkeys(values, error))
    assert held.alike == contest(values, sign, None, indifference).unsure
    assert set(held.alike) <= set(held.unsure)


SHIPPED = errors_of(Hardware())
LEADS = SHIPPED.leads
METRICS = [*LEADS, "p80_ttft_ms", "p99.9_tpot_ms", "p60_e2el_ms"]


@pytest.mark.parametrize("metric", METRICS)
def test_the_error_of_a_lead_is_the_profiles_or_more(metric: str) -> None:
    """On the measured card the error of its leads; on a card that was not, at least the bar of its forward times."""
    error = lead_error(Experiment("autoregressive"), metric)
    assert error in LEADS.values()
    elsewhere = lead_error(Experiment("autoregressive", hardware=Hardware(gpu="a100-40gb")), metric)
    assert elsewhere >= max(error, 0.2)


def test_a_percentile_has_the_error_of_the_nearest_measured() -> None:
    here = Experiment("pdv")
    assert lead_error(here, "p80_ttft_ms") == lead_error(here, "p90_ttft_ms") == LEADS["p90_ttft_ms"]
    assert lead_error(here, "p99.9_tpot_ms") == LEADS["p99_tpot_ms"]
    assert lead_error(here, "p60_e2el_ms") == LEADS["median_e2el_ms"]


def test_under_levels_the_error_is_that_of_the_level_that_binds() -> None:
    goal = Goal("headroom", ("ttft:300", "tpot:30"))
    binds = [{"p90_ttft_ms": 250.0, "p90_tpot_ms": 10.0}, {"p90_ttft_ms": 200.0, "p90_tpot_ms": 10.0}]
    loose = [{"p90_ttft_ms": 50.0, "p90_tpot_ms": 20.0}]
    assert (goal.error_metric(binds), goal.error_metric(loose)) == ("p90_ttft_ms", "p90_tpot_ms")
    assert replace(goal, objective="goodput").error_metric(binds) == "p90_ttft_ms"
    assert replace(goal, objective="throughput").error_metric(binds) == "output_throughput"
    assert replace(goal, objective="ttft").error_metric(loose) == "mean_ttft_ms"


def test_the_bar_is_one_for_a_pair_and_card() -> None:
    """Of the A100's models the target was measured better than the drafter: who drafts none meets rivals that do."""
    hardware = Hardware(gpu="a100-80gb")
    plain, drafting = Experiment("autoregressive", hardware=hardware), Experiment("pdv", hardware=hardware)
    undrafted = Experiment("pdv", server=Server(num_speculative_tokens=0), hardware=hardware)
    assert len({lead_error(each, "mean_e2el_ms") for each in (plain, drafting, undrafted)}) == 1


@pytest.mark.parametrize(
    ("lead", "alike", "says"),
    [
        (Interval(0.235, 0.038, 5), False, "within the profile's error (±26.5%)"),
        (Interval(-0.235, 0.038, 5), False, "within the profile's error (±26.5%)"),
        (Interval(0.28, 0.038, 5), False, "not clearly beyond the profile's error (±26.5%)"),
        (Interval(0.235, 0.3, 5), True, "not significant"),
        (Interval(0.235, 0.038, 4), False, "too few runs"),
    ],
)
def test_a_lead_that_does_not_count_has_its_reason(lead: Interval, alike: bool, says: str) -> None:
    assert unsure_text(lead, 0.265, alike) == says
