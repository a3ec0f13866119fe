"""The probe: rates of a device, and what the ratio of two says of a run."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pdvsim.calibration.validate.cards import Slower, probed_reference, slowdown, slower
from pdvsim.cli import main
from pdvsim.profiler.probe import RATES, probe
from pdvsim.sim.config import Experiment
from pdvsim.sim.records import Result


def test_a_probe_gives_rates_and_their_spread() -> None:
    found = probe("cpu", 0.01)
    for name in RATES:
        assert found[name] > 0
        assert found[f"{name}_spread"] >= 0


def test_a_card_of_half_the_rates_takes_twice_as_long() -> None:
    reference = dict.fromkeys(RATES, 10.0)
    assert slower(reference, reference) == (1, 1, 1)
    assert slower({"bytes_per_s": 5.0, "flops_per_s": 10.0, "kernels_per_s": 20.0}, reference) == (2, 1, 0.5)
    assert slower(None, reference) is None
    assert slower(reference, None) is None
    with pytest.raises(ValueError, match="not a probe"):
        slower({"bytes_per_s": 1.0}, reference)


def test_a_runs_forwards_are_slowed_by_what_bounds_them() -> None:
    """At 10 bytes and 10 flops a second: 4 s of reading in 5 s, 2 s of arithmetic in 3 s; the rest is starting."""
    launches = {"solo_s": np.array([5.0, 3.0]), "bytes": np.array([40.0, 10.0]), "flops": np.array([10.0, 20.0])}
    meta = {"bandwidth_bytes_per_s": 10.0, "flops_per_s": 10.0}
    result = Result(Experiment(), {}, {}, launches, meta)
    assert slowdown(result, Slower(1.0, 1.0, 1.0)) == pytest.approx(1)
    assert slowdown(result, Slower(2.0, 1.0, 1.0)) == pytest.approx((2 * 4 + 2 + 2) / 8)
    assert slowdown(result, Slower(1.0, 3.0, 1.0)) == pytest.approx((4 + 3 * 2 + 2) / 8)
    assert slowdown(result, Slower(1.0, 1.0, 2.0)) == pytest.approx((4 + 2 + 2 * 2) / 8)


def test_the_command_sets_it_beside_the_profiles_card(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pdvsim.profiler.probe.SECONDS", 0.01)
    assert main(["validate", "--probe", "--tiny", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    if probed_reference(None) is None:
        assert found["speed"] is None
    assert main(["validate", "--probe", "--tiny"]) == 0
    assert "starting small kernels" in capsys.readouterr().out
    assert main(["validate", "--probe", "--profile", "missing.json", "--tiny"]) == 2
