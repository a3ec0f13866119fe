"""What a run says of its machine: the ratios that it was simulated with come back from its launches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware.pace import Pace, pace_in, pace_of, read_pace
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import policy_of
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

TRAFFIC = Traffic("random", num_prompts=24, input_len=64, output_len=100, random_range_ratio=0.5, max_concurrency=8)


def priced_by_the_profile(result: Result, pace: Pace) -> dict[str, float]:
    """The ratios, where launches are priced as the profile says and not as they were simulated."""
    launches = dict(result.launches)
    factors = {0: pace.draft, 1: pace.target}
    profile, policy = covering_profile(result.experiment), policy_of(result.experiment.arch)
    names = {0: result.experiment.pair.draft.name, 1: result.experiment.pair.target.name}
    for role, factor in factors.items():  # the profile's own times are those in service
        launches["solo_s"] = launches["solo_s"].copy()
        launches["solo_s"][launches["role"] == role] *= profile.in_service[names[role]] / factor
    return pace_of(launches, profile, result.experiment.pair, policy.hands_over())


@pytest.mark.parametrize("arch", ["autoregressive", "colocated", "pd", "pdv"])
@pytest.mark.parametrize("pace", [Pace(), Pace(1.04, 1.1, 4e-4, 9e-6), Pace(0.97, 0.9, 1e-4, 2e-6)])
def test_the_pace_comes_back(arch: Arch, pace: Pace) -> None:
    experiment = Experiment(arch, TRAFFIC, server=Server(num_speculative_tokens=3 if arch != "autoregressive" else 4))
    profile = covering_profile(experiment)
    result = simulate(experiment, profile=pace.applied(profile, experiment.pair))
    ratios = priced_by_the_profile(result, pace)
    assert ratios["pace_target"] == pytest.approx(pace.target, rel=0.01)
    if arch != "autoregressive":
        assert ratios["pace_draft"] == pytest.approx(pace.draft, rel=0.01)
    assert ratios["pace_host_s"] == pytest.approx(pace.host_s or profile.host.between_s, rel=0.15)
    row_s = profile.host.row_s if pace.host_s is None else pace.row_s
    assert ratios["pace_row_s"] == pytest.approx(row_s, abs=3e-6)


def test_a_slower_machine_serves_slower(tmp_path: Path) -> None:
    """By its file, as by the profile that it stands for."""
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"pace_target": 1.1, "pace_draft": 1.2, "pace_host_s": 3e-4, "arch": "colocated"}))
    assert read_pace(path) == pace_in(json.loads(path.read_text())) == Pace(1.1, 1.2, 3e-4)
    experiment = Experiment("colocated", TRAFFIC)
    there = replace(experiment, hardware=Hardware(machine=str(path)))
    slower = simulate(experiment, profile=Pace(1.1, 1.2, 3e-4).applied(covering_profile(experiment), experiment.pair))
    assert summarise(simulate(there))["mean_tpot_ms"] == summarise(slower)["mean_tpot_ms"]
    assert summarise(slower)["mean_tpot_ms"] > 1.1 * summarise(simulate(experiment))["mean_tpot_ms"]


@pytest.mark.parametrize("text", ["{}", "[]", '{"pace_target": "x"}', '{"pace_target": -1}', '{"pace_target": 1e9}'])
def test_what_is_no_pace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a result of realrun"):
        simulate(Experiment("colocated", TRAFFIC, hardware=Hardware(machine=str(path))))
