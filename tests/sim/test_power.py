"""The effect of a power limit on launches: by hand, as laws, and the same whichever way the clock goes."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware import profile as profiles
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.prices.costs import Price
from pdvsim.sim.prices.power import Draw, Power, PowerFit
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate

FIT = PowerFit(
    rest_w=200.0, weight_j=1e-10, cache_j=1e-10, flop_j=1e-12, limit_w=700.0, slope=0.5, calm=0.6, settle_s=0.04
)
POWER = Power(FIT, 4e12)
PAIR = "tinyllama-1.1b:llama-2-7b"


def test_a_draw_by_hand() -> None:
    """10 ms: 20 GB of weights and 4 GB of cache are 2 J + 0.4 J, 3 TFLOP are 3 J; 5.4 J in 10 ms are 540 W, and 200.

    Weights alone would take 5 ms, half of the time, so 1 - 0.6 / 2 of it follows the clock.
    """
    draw = POWER.draw(Price(0.010, 24e9, 3e12, 4e9))
    assert draw.watts == pytest.approx(740)
    assert draw.follows == pytest.approx(0.7)


def test_the_mean_follows_the_draw() -> None:
    assert POWER.mean_w(200.0, 0.04, 1000.0) == pytest.approx(1000 - 800 * exp(-1))
    assert POWER.mean_w(POWER.mean_w(200.0, 0.01, 1000.0), 0.03, 1000.0) == pytest.approx(
        POWER.mean_w(200.0, 0.04, 1000.0)
    )
    assert POWER.mean_w(900.0, 0.0, 200.0) == 900.0


watts = st.floats(200, 1500)


@given(watts, watts, st.floats(0, 1), st.floats(1e-4, 1.0))
@example(FIT.rest_w, 1050.0, 1.0, 1.0)
@example(FIT.rest_w, 1050.0, 0.4, 1.0)
def test_time_is_lost_only_while_the_mean_draw_is_above_the_limit(
    mean_w: float, draw_w: float, follows: float, solo_s: float
) -> None:
    """Against the excess summed step by step."""
    middles_s = (np.arange(20_000) + 0.5) * solo_s / 20_000
    means_w = draw_w + (mean_w - draw_w) * np.exp(-middles_s / FIT.settle_s)
    excess = float(np.maximum(0.0, means_w / FIT.limit_w - 1).mean())
    expected_s = solo_s * (1 + follows * FIT.slope * excess)
    assert POWER.taken_s(mean_w, Draw(draw_w, follows), solo_s) == pytest.approx(expected_s, rel=1e-6)


@given(st.floats(1e-4, 2.0), st.floats(0, 800e12), st.floats(0, 4e12))
def test_the_time_at_full_clock_is_found_from_that_on_a_cool_card(solo_s: float, flops: float, moved: float) -> None:
    """A launch of this many flops and bytes per second, timed alone from rest, however long it is."""
    price = Price(solo_s, moved * solo_s, flops * solo_s, 0.0)
    timed = price._replace(seconds=POWER.taken_s(FIT.rest_w, POWER.draw(price), solo_s))
    assert POWER.full_clock_s(timed) == pytest.approx(solo_s, rel=1e-3)


@given(watts, watts, st.floats(0, 1), st.floats(1e-6, 1.0))
def test_nothing_takes_less_and_what_stays_under_the_limit_takes_no_longer(
    mean_w: float, draw_w: float, follows: float, solo_s: float
) -> None:
    taken_s = POWER.taken_s(mean_w, Draw(draw_w, follows), solo_s)
    assert taken_s >= solo_s
    if max(mean_w, draw_w) <= FIT.limit_w:
        assert taken_s == solo_s
    assert POWER.taken_s(mean_w + 10, Draw(draw_w, follows), solo_s) >= taken_s
    assert POWER.taken_s(mean_w, Draw(draw_w + 10, follows), solo_s) >= taken_s


def at_limit(arch: str, limit_w: float | None, monkeypatch: pytest.MonkeyPatch, users: int = 16) -> Experiment:
    """A closed loop on the shipped card with this limit."""
    shipped = profiles.builtin("h200")
    power = None if limit_w is None else replace(FIT, limit_w=limit_w)
    monkeypatch.setattr("pdvsim.sim.assembly.builtin", lambda name: replace(shipped, power=power))
    traffic = Traffic("random", num_prompts=60, max_concurrency=users, input_len=300, output_len=60)
    return applicable(Experiment(arch, traffic, server=Server(PAIR, 3), hardware=Hardware(gpu="h200")))  # type: ignore[arg-type]


@pytest.mark.parametrize("arch", ARCHS)
def test_a_lower_limit_serves_no_faster(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spans = []
    for limit_w in (None, 1e6, 600.0, 400.0):
        result = simulate(at_limit(arch, limit_w, monkeypatch))
        spans.append(float(result.requests["finish_s"].max()))
        launches = result.launches
        assert (launches["end_s"] - launches["start_s"] >= launches["solo_s"] * (1 - 1e-6)).all()
    assert spans[0] == pytest.approx(spans[1], rel=1e-9)
    assert spans[0] < spans[2] < spans[3]
