"""Predictions against the real GPU: the shipped H200 runs, none of which the profile was fitted on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pdvsim.calibration.runs import Load
from pdvsim.calibration.validate import METRICS, check, document, main, read
from pdvsim.sim.metrics import summarise
from pdvsim.sim.run import simulate

RUNS = Path(__file__).parents[1] / "calibration" / "data" / "h200" / "runs.jsonl"


def test_predictions_are_within_a_few_percent_of_the_gpu() -> None:
    """The project's promise: median error at most 3%, 95th percentile at most 10%, over all metrics and runs."""
    found = document([check(line) for line in read(RUNS)])
    assert len(found["runs"]) >= 32
    assert found["median_abs_error"] <= 0.03
    assert found["p95_abs_error"] <= 0.10
    assert found["by_metric"]["output_throughput"]["p95"] <= 0.05


def test_the_measured_contention_model_beats_both_ablations() -> None:
    """Where lanes overlap (pd, pdv), neither no overlap nor free overlap predicts as well."""
    lines = [line for line in read(RUNS) if line["load"]["arch"] in ("pd", "pdv") and line["load"]["concurrency"] != 1]
    errors = {
        model: [abs(e) for line in lines for e in check(line, model).errors.values()]  # type: ignore[arg-type]
        for model in ("fluid", "serial", "max")
    }
    assert np.mean(errors["fluid"]) < np.mean(errors["serial"])
    assert np.mean(errors["fluid"]) < np.mean(errors["max"])


def test_real_and_simulated_runs_accept_the_same_drafts() -> None:
    """Acceptance is the same under both clocks, so what differs is the model of the GPU alone."""
    for line in read(RUNS)[:6]:
        predicted = summarise(simulate(Load(**line["load"]).experiment()))
        for name in ("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens"):
            assert line["metrics"][name] == predicted[name]
        assert set(METRICS) <= set(line["metrics"])


def test_what_is_no_file_of_runs_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "runs.jsonl"
    for text in ("", "{}\n", '{"load": {"arch": "pd"}}\n', "not json\n"):
        bad.write_text(text)
        assert main([str(bad)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert main([str(tmp_path / "missing")]) == 2
