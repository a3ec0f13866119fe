"""A run launch by launch."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from pdvsim.sim.config import Experiment, Traffic
from pdvsim.sim.hardware.profile import builtin
from studies.launches import compared, priced, simulated

EXPERIMENT = Experiment("pdv", Traffic("random", num_prompts=24, input_len=300, output_len=40, max_concurrency=8))


def launches(**columns: object) -> pd.DataFrame:
    few = {"lane": "main", "kind": "verify", "role": "target", "width": 1, "steps": 1, "context": 0, "prompt_start": 0}
    return pd.DataFrame(few | columns)


def test_the_profile_prices_a_kept_launch_as_the_simulator_does() -> None:
    whole = simulated(EXPERIMENT, builtin("h200"))
    asked = whole.assign(solo_s=0.0).where(whole["kind"] != "prefill", whole)
    found = priced(asked, EXPERIMENT, builtin("h200"))
    np.testing.assert_allclose(found["solo_s"].astype(float), whole["solo_s"])


def test_a_comparison_by_hand() -> None:
    """Two verifies of 4 rows take 3 ms where 2 were predicted; of 6 rows 1 and 1: 2 of 7 ms are missing."""
    real = launches(
        rows=[4, 4, 6], tokens=[4, 4, 6], start_s=[0.0, 0.004, 0.008], end_s=[0.003, 0.007, 0.009], solo_s=0.002
    )
    sim = launches(
        rows=[4, 4, 6], tokens=[4, 4, 6], start_s=[0.0, 0.002, 0.005], end_s=[0.002, 0.004, 0.006], solo_s=0.002
    )
    found = compared(real, sim)
    assert [(row["what"], row["sizes"], row["measured"], row["predicted"]) for row in found["rows"]] == [
        ("verify", "3 to 4", 2, 2),
        ("verify", "5 to 8", 1, 1),
    ]
    first, second = found["rows"]
    assert (first["measured_ms"], first["predicted_ms"]) == pytest.approx((3.0, 2.0))
    assert (first["measured_stretch"], first["predicted_stretch"]) == pytest.approx((1.5, 1.0))
    assert (first["share"], second["share"], found["error"]) == pytest.approx((-2 / 7, 0, -2 / 7))
    gaps = found["gaps"]["main"]
    assert gaps["measured"]["median_us"] == pytest.approx(1000)
    assert gaps["measured"]["share"] == pytest.approx(2 / 9)
    assert gaps["predicted"]["share"] == pytest.approx(1 / 6)
    assert found["idle"] == pytest.approx({"measured": 2 / 9, "predicted": 1 / 6})
