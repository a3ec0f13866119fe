"""A run launch by launch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from pdvsim.bench.output import settings
from pdvsim.calibration.fit.service import gaps_of, join_s
from pdvsim.calibration.validate.launches import TICK_S, compared, gather, launches_of, priced, save_part, simulated
from pdvsim.calibration.validate.served import ServedRun
from pdvsim.common.commandline import command_line, experiment_from, experiment_of
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.launches import busy_share
from pdvsim.sim.prices.profile import builtin
from pdvsim.sim.records import ROLES
from pdvsim.sim.run import simulate

EXPERIMENT = Experiment("pdv", Traffic("random", num_prompts=24, input_len=300, output_len=40, max_concurrency=8))


def launches(**columns: object) -> pd.DataFrame:
    few = {"lane": "main", "kind": "verify", "role": "target", "width": 1, "steps": 1, "context": 0, "prompt_start": 0}
    return pd.DataFrame(few | columns)


def test_saved_settings_are_those_of_the_run() -> None:
    assert experiment_from(settings(EXPERIMENT)) == EXPERIMENT
    other = Experiment("pdv", Traffic(request_rate=3.5), server=Server(max_num_seqs=48))
    assert experiment_from(settings(other)) == other


def test_kept_launches_are_those_of_the_run(tmp_path: Path) -> None:
    """Sizes to the last token, times to a tenth of a microsecond; a second run of the same name takes its place."""
    run = ServedRun(command_line("realrun", EXPERIMENT), 0, False, {}, {}, tmp_path)
    result = simulate(EXPERIMENT)
    for _ in range(2):
        save_part(tmp_path, run.id, result.launches)
        assert gather(tmp_path) == 1
    stored, whole = launches_of(run), simulated(EXPERIMENT, builtin("h200"))
    for name in ("lane", "kind", "role", "rows", "tokens", "steps", "width", "context", "prompt_start"):
        assert stored[name].tolist() == whole[name].tolist()
    for name in ("start_s", "end_s", "solo_s"):
        np.testing.assert_allclose(stored[name], whole[name], rtol=0, atol=1.01e-7)
    with pytest.raises(ValueError, match="no launches were saved"):
        launches_of(ServedRun(run.command, 1, False, {}, {}, tmp_path))


def test_the_profile_prices_a_kept_launch_as_the_simulator_does() -> None:
    whole = simulated(EXPERIMENT, builtin("h200"))
    asked = whole.assign(solo_s=0.0).where(whole["kind"] != "prefill", whole)
    again = priced(asked, EXPERIMENT, builtin("h200"))
    np.testing.assert_allclose(again["solo_s"].astype(float), whole["solo_s"])


def test_a_comparison_by_hand() -> None:
    """Two verifies of 4 rows take 3 ms where 2 were predicted; of 6 rows 1 and 1: 2 of 7 ms are missing."""
    real = launches(
        rows=[4, 4, 6], tokens=[4, 4, 6], start_s=[0.0, 0.004, 0.008], end_s=[0.003, 0.007, 0.009], solo_s=0.002
    )
    sim = launches(
        rows=[4, 4, 6], tokens=[4, 4, 6], start_s=[0.0, 0.002, 0.005], end_s=[0.002, 0.004, 0.006], solo_s=0.002
    )
    comparison = compared(real, sim)
    assert [(row["what"], row["sizes"], row["measured"], row["predicted"]) for row in comparison["rows"]] == [
        ("verify", "3 to 4", 2, 2),
        ("verify", "5 to 8", 1, 1),
    ]
    first, second = comparison["rows"]
    assert (first["measured_ms"], first["predicted_ms"]) == pytest.approx((3.0, 2.0))
    assert (first["measured_stretch"], first["predicted_stretch"]) == pytest.approx((1.5, 1.0))
    assert (first["share"], second["share"], comparison["error"]) == pytest.approx((-2 / 7, 0, -2 / 7))
    gaps = comparison["gaps"]["main"]
    assert gaps["measured"]["median_us"] == pytest.approx(1000)
    assert gaps["measured"]["share"] == pytest.approx(2 / 9)
    assert gaps["predicted"]["share"] == pytest.approx(1 / 6)
    assert comparison["idle"] == pytest.approx({"measured": 2 / 9, "predicted": 1 / 6})


def test_time_in_which_a_launch_runs_is_counted_once() -> None:
    """0 to 2 and 1 to 3 overlap, 5 to 6 stands alone, 5.2 to 5.5 is inside: 4 of 6."""
    starts, ends = np.array([5.0, 0.0, 1.0, 5.2]), np.array([6.0, 2.0, 3.0, 5.5])
    assert busy_share({"start_s": starts, "end_s": ends}) == pytest.approx(4 / 6)
    assert np.isnan(busy_share({"start_s": starts[:0], "end_s": ends[:0]}))


# command lines -------------------------------------------------------------------------------------------------------


def test_a_command_line_is_read_back() -> None:
    for experiment in (
        EXPERIMENT,
        Experiment("colocated", Traffic(request_rate=2.5, burstiness=0.5, seed=3), Acceptance(acceptance_rate=0.9)),
        Experiment("pd", acceptance=Acceptance(synthetic_acceptance_rates=(0.8, 0.5)), hardware=Hardware(band=False)),
        Experiment("pdv", server=Server(kv_cache="reserved", controller="goodput")),
    ):
        assert experiment_of(command_line("realrun", experiment)) == experiment
    for wrong in ("--num-prompts x", "--num-prompts 1 2", "--controller none", "--kv-cache none", "--speed 3"):
        with pytest.raises(ValueError, match=f"{wrong.split()[0]}|unexpected argument '2'"):
            experiment_of(f"realrun --arch pd {wrong}")


# the host between launches, from made launches whose gaps are known ---------------------------------------------------


RUN = ServedRun("realrun --arch autoregressive --num-prompts 4", 0, False, {}, {}, Path())


def steps(count: int, join_us: float, every: int, drift: float = 0.0) -> pd.DataFrame:
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
    gaps = gaps_of(RUN, steps(400, join_us, 7, drift)).assign(whole=True)
    assert 1e6 * join_s(gaps) == pytest.approx(join_us, abs=6.0)
    assert gaps["carried"].mean() == pytest.approx(1 / 7, abs=0.01)


def test_waiting_for_requests_is_no_gap() -> None:
    frame = steps(100, 220.0, 7)
    frame.loc[50:, "start"] += round(0.5 / TICK_S)
    gaps = gaps_of(RUN, frame)
    assert len(gaps) == 98
    assert gaps["gap_s"].max() < 1e-3
