"""What a run says of its machine: the ratios that it was simulated with come back from its launches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import policy_of
from pdvsim.sim.prices.pace import HOST_SHARE, Pace, pace_in, pace_of, read_pace
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

TRAFFIC = Traffic("random", num_prompts=24, input_len=64, output_len=100, random_range_ratio=0.5, max_concurrency=8)


def recorded(result: Result) -> dict[str, Any]:
    """What the launches of a simulated run say of its machine, through a file."""
    experiment = result.experiment
    host, handed = covering_profile(experiment).host, policy_of(experiment.arch).hands_over()
    record: dict[str, Any] = json.loads(json.dumps(pace_of(result.launches, host, experiment.pair, handed)))
    return record


def read(record: dict[str, Any]) -> Pace:
    pace = pace_in(record)
    assert pace is not None
    return pace


@pytest.mark.parametrize("arch", ["autoregressive", "colocated", "pd", "pdv"])
@pytest.mark.parametrize("pace", [Pace(1.0, 1.0), Pace(1.04, 1.1, 4e-4, 9e-6), Pace(0.97, 0.9, 1e-4, 2e-6)])
def test_the_pace_comes_back(arch: Arch, pace: Pace) -> None:
    experiment = Experiment(arch, TRAFFIC, server=Server(num_speculative_tokens=3 if arch != "autoregressive" else 4))
    profile, pair = covering_profile(experiment), experiment.pair
    measured = read(recorded(simulate(experiment, profile=pace.applied(profile, pair))))
    ratios = measured.ratios(profile, pair)
    assert ratios[pair.target.name] == pytest.approx(pace.target, rel=0.01)
    if arch != "autoregressive":
        assert ratios[pair.draft.name] == pytest.approx(pace.draft, rel=0.01)
    usual = profile.host
    host_s, row_s = (usual.between_s, usual.row_s) if pace.host_s is None else (pace.host_s, pace.row_s)
    believed_s = usual.between_s + HOST_SHARE * (host_s - usual.between_s)
    assert measured.host_s == pytest.approx(believed_s, rel=0.15)
    assert measured.row_s == pytest.approx(usual.row_s + HOST_SHARE * (row_s - usual.row_s), abs=3e-6)


@pytest.mark.parametrize("pair_name", ["tinyllama-1.1b:llama-2-7b", "ngram:llama-3.1-8b"])
def test_a_record_stands_when_the_profile_is_measured_again(pair_name: str) -> None:
    """Whatever a profile says of its machine, the launches of this one take as long as they took."""
    server = Server(pair=pair_name, num_speculative_tokens=3)
    experiment = Experiment("colocated", TRAFFIC, server=server)
    profile, pair = covering_profile(experiment), experiment.pair
    measured = read(recorded(simulate(experiment, profile=Pace(1.2, 1.1).applied(profile, pair))))
    fits = {name: fit.scaled(0.8) for name, fit in profile.models.items()}
    again = replace(profile, models=fits, in_service=dict.fromkeys(profile.in_service, 1.5))
    served, served_again = measured.applied(profile, pair), measured.applied(again, pair)
    for spec in (pair.target, pair.draft):
        if not spec.on_host:
            shape, same = (one.cost_model(spec).price(4, 4) for one in (served, served_again))
            assert same == pytest.approx(shape)
    assert measured.ratios(profile, pair)[pair.target.name] == pytest.approx(1.2, rel=0.01)


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


NO_PACE = (
    '{"pace_target": "x"}', '{"pace_target": 1e9}', '{"pace_launches": "x"}',
    '{"pace_launches": [[1, 4, 20, 1, 5, 9, 99]]}', '{"pace_launches": [[1, 0, 0, 1, 5, 9, 99, 0.1]]}',
    '{"pace_launches": [[1, 4, 20, 1, 5, 9, 99, -0.1]]}', '{"pace_launches": [[1, 4.5, 20, 1, 5, 9, 99, 0.1]]}',
)  # fmt: skip


@pytest.mark.parametrize("text", NO_PACE)
def test_what_is_no_pace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not a result of realrun"):
        simulate(Experiment("colocated", TRAFFIC, hardware=Hardware(machine=str(path))))
