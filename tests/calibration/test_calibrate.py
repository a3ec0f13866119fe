"""`pdvsim calibrate`: the shipped samples give the shipped profile; bad ones are refused before anything is written.

All fits are made again. Only the twelve fits of the sharing model without some of its groups, which give its errors on
groups held out, are not: they take two minutes, and test_fit.py holds how they are made. Those errors are the shipped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdvsim.calibration.fit import corun
from pdvsim.calibration.fit.build import as_bytes
from pdvsim.calibration.fit.service import in_service, read_served
from pdvsim.cli import main
from pdvsim.sim.models.presets import pair
from pdvsim.sim.prices.pace import HOST_SHARE, Pace
from pdvsim.sim.prices.profile import builtin

ROOT = Path(__file__).parents[2]
DATA = ROOT / "calibration" / "data"
PAIR = "tinyllama-1.1b:llama-2-7b"


@pytest.fixture(scope="module")
def again(once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the command makes of the shipped samples and runs, and its pictures."""

    def calibrated() -> dict[str, Any]:
        folder = tmp_path_factory.mktemp("calibrated")
        samples, *served = (str(DATA / "h200" / name) for name in ("samples.parquet", "runs.jsonl", "experts.jsonl"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corun, "held_out", lambda groups, *_: np.full(len(corun.measured(groups)), np.nan))
            command = ["calibrate", samples, "--served", *served, "-o", f"{folder}/h200.json", "--plots", str(folder)]
            assert main(command) == 0
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    files = once("calibrated", calibrated)
    return {**files, "profile": json.loads(files["h200.json"])}


def within(tolerance: float, shipped: Any) -> Any:
    """A document like `shipped` whose floats may be off by that share; all else has to be the same."""
    if isinstance(shipped, dict):
        return {key: within(tolerance, value) for key, value in shipped.items()}
    if isinstance(shipped, list):
        return [within(tolerance, value) for value in shipped]
    return pytest.approx(shipped, rel=tolerance, abs=0) if isinstance(shipped, float) else shipped


def test_the_shipped_samples_give_the_shipped_profile(again: dict[str, Any]) -> None:
    """To a millionth: a fit's last digits are the processor's and its linear algebra's, about 1e-13 of each figure."""
    shipped = json.loads(as_bytes(builtin("h200")))
    errors = shipped["provenance"]["corun_held_out_error"]
    shipped["provenance"]["corun_held_out_error"] = {"triples_no_triples": errors["triples_no_triples"]}
    assert again["profile"] == within(1e-6, shipped)
    for name in ("h200.solo.png", "h200.corun.png"):
        assert again[name].startswith(b"\x89PNG")


def test_the_profile_says_how_far_it_is_off() -> None:
    """The held-out errors that the README quotes: medians as promised, and where the tails are."""
    provenance = builtin("h200").provenance
    assert set(provenance["held_out_error"]) == set(builtin("h200").models)
    for model, errors in provenance["held_out_error"].items():
        if "/tp" not in model:
            assert errors["median"] <= 0.02, model
        assert errors["p95"] <= 0.12, model
    corun = provenance["corun_held_out_error"]
    assert corun["triples_by_shape"]["p95"] < corun["triples_no_triples"]["p95"]


def missed(*case: object, reason: str) -> Any:
    return pytest.param(*case, marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))


@pytest.mark.parametrize(("what", "figure", "most"), [
    ("pairs_by_shape", "median", 0.05),
    missed("pairs_by_models", "median", 0.05, reason="5.2%: large prompts next to drafts"),
    ("triples_by_shape", "median", 0.07),
    ("triples_by_shape", "p95", 0.30),
    ("8-bit_by_shape", "p95", 0.30),
])  # fmt: skip
def test_co_running_launches_are_predicted(what: str, figure: str, most: float) -> None:
    assert builtin("h200").provenance["corun_held_out_error"][what][figure] <= most


@pytest.mark.xfail(reason="2.2% for Llama-3.1-70B's over eight, of 68 points", strict=True, raises=AssertionError)
def test_so_are_shards() -> None:
    held_out = builtin("h200").provenance["held_out_error"]
    assert all(errors["median"] <= 0.02 for model, errors in held_out.items() if "/tp" in model)


def test_launches_in_service_make_a_profile_slower(tmp_path: Path) -> None:
    """Each model by the median of its warm-ups, the host by its own.

    A machine's pace takes the place of the first, and its share of what the host deviates by is added to the other.
    """
    files = []
    for number, (target, host_s) in enumerate(((1.02, 2e-4), (1.04, 4e-4), (1.2, 3e-4))):
        files.append(str(tmp_path / f"{number}.json"))
        pace = {"pace_target": target, "pace_draft": 1.1, "pace_host_s": host_s, "pace_row_s": 2e-6}
        Path(files[-1]).write_text(json.dumps({"pair": PAIR, **pace}), encoding="utf-8")
    alone = replace(builtin("h200"), in_service={})
    slower = in_service(alone, read_served(files))
    assert slower.in_service == {"llama-2-7b": 1.04, "tinyllama-1.1b": 1.1}
    assert slower.host.between_s == pytest.approx(3e-4)
    assert slower.host.row_s == 2e-6
    for name, fit in alone.models.items():
        assert slower.models[name] == fit.scaled(slower.in_service.get(name, 1.0))
    here, pace = pair(PAIR), Pace(1.3, 1.4, 1e-4, 1e-6)
    there, before = pace.applied(slower, here), pace.applied(alone, here)
    for now, usual in ((there, slower), (before, alone)):
        deviates_s = 1e-4 - usual.host.between_s
        assert now.host.between_s == pytest.approx(usual.host.between_s + HOST_SHARE * deviates_s)
    for name in slower.in_service:
        layers_s = [one.models[name].layers_s(64) for one in (there, before)]
        assert layers_s[0] == pytest.approx(layers_s[1])


def test_samples_that_are_none_are_refused_before_anything_is_written(
    tmp_path: Path, refused: Callable[..., str]
) -> None:
    target = tmp_path / "out" / "profile.json"
    other = tmp_path / "other.parquet"
    other.write_bytes(b"")
    half = tmp_path / "half"
    half.mkdir()
    shutil.copy(DATA / "h200" / "samples.parquet", half)
    for samples, reason in ((tmp_path / "none", "header.json"), (other, "samples.parquet"), (half, "header.json")):
        assert reason in refused(["calibrate", str(samples), "-o", str(target)])
    refused(["calibrate", "-o", str(target)])
    assert not target.parent.exists()
