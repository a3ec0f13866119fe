"""The host between launches, from made launches whose gaps are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdvsim.calibration.fit.gaps import gaps_of, join_s
from pdvsim.calibration.validate.launches import TICK_S
from pdvsim.calibration.validate.served import ServedRun
from pdvsim.sim.records import ROLES

RUN = ServedRun("realrun --arch autoregressive --num-prompts 4", 0, False, {}, {}, Path())


def launches(count: int, join_us: float, every: int, drift: float = 0.0) -> pd.DataFrame:
    """Plain steps of 8 rows of 5 ms; some carry a prompt, and the host is `drift` slower at the end."""
    rng, start, rows = np.random.default_rng(0), 0.0, []
    for number in range(count):
        carries = number % every == every - 1
        gap_s = (200e-6 + 5e-6 * rng.standard_normal()) * (1 + drift * number / count) + carries * join_us * 1e-6
        start += 5e-3 + gap_s
        rows.append((round(start / TICK_S), round(5e-3 / TICK_S), 8, 8 + 128 * carries))
    frame = pd.DataFrame(rows, columns=["start", "span", "rows", "tokens"])
    return frame.assign(width=1, steps=1, role=ROLES.index("target"))


@pytest.mark.parametrize("drift", [0.0, 1.0])
@pytest.mark.parametrize("join_us", [0.0, 220.0])
def test_what_a_launch_with_prompts_takes_besides_comes_back(join_us: float, drift: float) -> None:
    """Also on a host that becomes slower by a factor of two meanwhile."""
    gaps = gaps_of(RUN, launches(400, join_us, 7, drift)).assign(whole=True)
    assert 1e6 * join_s(gaps) == pytest.approx(join_us, abs=6.0)
    assert gaps["carried"].mean() == pytest.approx(1 / 7, abs=0.01)


def test_waiting_for_requests_is_no_gap() -> None:
    frame = launches(100, 220.0, 7)
    frame.loc[50:, "start"] += round(0.5 / TICK_S)
    gaps = gaps_of(RUN, frame)
    assert len(gaps) == 98
    assert gaps["gap_s"].max() < 1e-3
