"""Predictions against the real GPU: the shipped H200 runs, none of which the profile was fitted on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pdvsim.calibration.validate.compare import METRICS, Checked, Validation, document, leads, read, spread, validate
from pdvsim.calibration.validate.runs import Scenario
from pdvsim.cli import main
from pdvsim.decide.error import LEADS
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.run import simulate

RUNS = Path(__file__).parents[2] / "calibration" / "data" / "h200" / "runs.jsonl"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    lines = read(RUNS)
    return document(validate(lines, jobs=1), lines)


def test_predictions_are_within_a_few_percent_of_the_gpu(found: dict[str, Any]) -> None:
    """The project's promise: median error at most 3%, 95th percentile at most 10%, over all metrics and runs."""
    assert len(found["runs"]) >= 32
    assert found["median_abs_error"] <= 0.03
    assert found["p95_abs_error"] <= 0.10
    assert found["by_metric"]["output_throughput"]["p95"] <= 0.05


def test_what_a_lead_must_exceed_is_what_leads_were_off_by(found: dict[str, Any]) -> None:
    """The 95th percentile over every two of seven architectures in eight closed loops, up to a tenth of a percent."""
    assert found["leads"]["pairs"] == 8 * math.comb(7, 2)
    off = {name: found["leads"]["by_metric"][name]["p95"] for name in LEADS}
    assert {name: math.ceil(1e3 * size) / 1e3 for name, size in off.items()} == LEADS


def test_a_predicted_lead_in_throughput_or_latency_is_one(found: dict[str, Any]) -> None:
    """Of two architectures that are over 3% apart on the GPU, the faster one was predicted, every time."""
    for name in ("output_throughput", "mean_tpot_ms", "mean_e2el_ms"):
        lead = found["leads"]["by_metric"][name]
        assert lead["order_right"] == lead["apart"] > 100


def test_the_measured_contention_model_beats_both_ablations() -> None:
    """Where lanes overlap (pd, pdv), neither no overlap nor free overlap predicts as well."""
    lines = [line for line in read(RUNS) if line["load"]["arch"] in ("pd", "pdv")]
    found = document(validate(lines, ("fluid", "serial", "max"), jobs=1), lines)
    for arch in ("pd", "pdv"):
        for other in ("serial", "max"):
            for figure in ("median", "p95"):
                assert found["by_arch"][arch][figure] < found["ablations"][other]["by_arch"][arch][figure]


def test_real_and_simulated_runs_accept_the_same_drafts() -> None:
    """Acceptance is the same under both clocks, so what differs is the model of the GPU alone."""
    for line in read(RUNS)[:3]:
        predicted = summarise(simulate(Scenario(**line["load"]).experiment()))
        for name in ("spec_decode_num_drafts", "spec_decode_draft_tokens", "spec_decode_accepted_tokens"):
            assert line["metrics"][name] == predicted[name]
        assert set(METRICS) <= set(line["metrics"])


def test_every_family_has_mean_and_percentiles() -> None:
    assert len(METRICS) == 17
    for family in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{which}_{family}_ms" for which in ("mean", "median", "p95", "p99")} <= set(METRICS)


def run(arch: str, measured: float, repeat: int = 0, concurrency: int = 8) -> dict[str, Any]:
    """A made run: every metric has the same value."""
    load = {"arch": arch, "pair": "tinyllama-1.1b:llama-2-7b", "concurrency": concurrency, "request_rate": None}
    return {"load": {**load, "num_prompts": 4, "repeat": repeat}, "metrics": dict.fromkeys(METRICS, measured)}


def test_errors_by_hand() -> None:
    """Three runs, predicted at 110: measured 100 (+10%), 125 (-12%) and again 88 of the first experiment (+25%)."""
    lines = [run("pd", 100.0), run("pdv", 125.0), run("pd", 88.0, repeat=1)]
    del lines[1]["metrics"]["p99_itl_ms"]  # a run without it is left out of that metric alone
    predicted = dict.fromkeys(METRICS, 110.0)
    checked = [Checked(Scenario(**line["load"]), line["metrics"], predicted) for line in lines]
    found = document(Validation({"fluid": checked}, "made up", True), lines)
    assert found["runs"][1]["errors"]["mean_ttft_ms"] == pytest.approx(-0.12)
    assert "p99_itl_ms" not in found["runs"][1]["errors"]
    assert found["median_abs_error"] == pytest.approx(0.12)  # 17 of 10%, 16 of 12%, 17 of 25%: the 25th and 26th
    assert found["by_metric"]["mean_ttft_ms"] == pytest.approx({"median": 0.12, "p95": 0.12 + 0.9 * 0.13})
    assert found["by_metric"]["p99_itl_ms"]["median"] == pytest.approx((0.10 + 0.25) / 2)
    assert found["by_arch"]["pd"]["median"] == pytest.approx((0.10 + 0.25) / 2)
    assert found["by_arch"]["pdv"] == pytest.approx({"median": 0.12, "p95": 0.12})
    # the repeats against each other: 100 / 88 and 88 / 100; the one that was not repeated says nothing
    assert found["spread"]["runs"] == 2
    assert found["spread"]["median_abs_error"] == pytest.approx((100 / 88 - 1 + 0.12) / 2)
    assert found["ablations"] == {}


def test_leads_by_hand() -> None:
    """Predicted 110 and 100 where 105 (the mean of its runs) and 125 were measured; a tie where 1% and 5% were."""

    def checked(arch: str, predicted: float, *measured: float, concurrency: int = 8) -> list[Checked]:
        runs = [run(arch, value, repeat, concurrency) for repeat, value in enumerate(measured)]
        return [Checked(Scenario(**r["load"]), r["metrics"], dict.fromkeys(METRICS, predicted)) for r in runs]

    found = leads([*checked("pd", 110.0, 100.0, 110.0), *checked("pdv", 100.0, 125.0), *checked("baseline", 1.0, 9.0)])
    assert found["pairs"] == 1
    by_metric = found["by_metric"]
    assert set(by_metric) == set(METRICS)
    assert by_metric["output_throughput"]["median"] == pytest.approx(1.1 / (105 / 125) - 1)  # pd was to be ahead
    assert by_metric["mean_ttft_ms"]["median"] == pytest.approx(1 - 1 / 1.1 / (125 / 105))  # pdv was, and was not
    assert {(lead["apart"], lead["order_right"]) for lead in by_metric.values()} == {(1, 0)}

    tied = [*checked("pd", 1.0, 1.00), *checked("pdv", 1.0, 1.01), *checked("colocated", 1.0, 1.05)]
    assert leads(tied)["by_metric"]["mean_tpot_ms"]["apart"] == 2
    assert leads(tied)["by_metric"]["mean_tpot_ms"]["order_right"] == 0
    elsewhere = checked("pdv", 100.0, 125.0, concurrency=1)  # no two of these met
    assert leads([*checked("pd", 110.0, 100.0), *elsewhere]) == {"pairs": 0, "by_metric": {}}


def test_spread_needs_repeats() -> None:
    lines = [run("pd", 100.0), run("pd", 90.0, concurrency=16)]
    assert spread(lines) == []
    three = [run("pd", value, repeat) for repeat, value in enumerate((90.0, 100.0, 120.0))]
    assert [s["mean_ttft_ms"] for s in spread(three)] == pytest.approx([90 / 110 - 1, 100 / 105 - 1, 120 / 95 - 1])


def test_repeats_are_simulated_once_and_each_is_compared() -> None:
    done = []
    lines = [run("pd", 100.0, repeat, concurrency=1) for repeat in range(3)]
    found = validate(lines, ("fluid",), jobs=1, progress=lambda n, total: done.append((n, total)))
    assert done == [(1, 1)]
    assert [c.load.repeat for c in found.checked["fluid"]] == [0, 1, 2]
    assert len({c.predicted["output_throughput"] for c in found.checked["fluid"]}) == 1


def test_the_command_prints_tables_or_one_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "runs.jsonl", tmp_path / "runs.png"
    lines = [run("pd", 300.0, concurrency=1), run("pd", 280.0, 1, concurrency=1)]
    lines += [run("autoregressive", 200.0), run("colocated", 150.0)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["validate", str(path), "--jobs", "1", "--plot", str(plot), "--html", str(tmp_path / "page.html")]) == 0
    shown = capsys.readouterr().out
    assert "autoregressive" in shown
    assert "spread of repeated runs" in shown
    assert "serial" in shown
    assert "1 pair of architectures, each in the same closed loop" in shown
    assert plot.read_bytes().startswith(b"\x89PNG")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert all(
        word in page
        for word in (
            "<title>Simulated against real</title>",
            "data:image/png;base64,",
            "Provenance",
            "spread of repeated runs",
        )
    )
    assert main(["validate", str(path), "--jobs", "1", "--no-ablations", "--contention", "max", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"runs", "median_abs_error", "p95_abs_error", "by_metric", "by_arch"} <= set(found)
    assert found["leads"]["pairs"] == 1
    assert found["contention"] == "max"
    assert found["ablations"] == {}
    for checked, line in zip(found["runs"], lines, strict=True):
        error = checked["predicted"]["mean_ttft_ms"] / line["metrics"]["mean_ttft_ms"] - 1
        assert checked["errors"]["mean_ttft_ms"] == pytest.approx(error)
        assert not math.isnan(error)
    sizes = [abs(e) for checked in found["runs"] for e in checked["errors"].values()]
    assert found["median_abs_error"] == pytest.approx(np.median(sizes))


def test_what_is_no_file_of_runs_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "runs.jsonl"
    for text in ("", "{}\n", '{"load": {"arch": "pd"}}\n', "not json\n"):
        bad.write_text(text)
        assert main(["validate", str(bad)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert str(bad) in error
    assert main(["validate", str(tmp_path / "missing")]) == 2


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (["--run"], "needs the file"),
        (["--tiny"], "--tiny goes with --run"),
        (["--archs", "pd"], "--archs goes with --run"),
        (["x", "--run", "--repeats", "0"], "repeats"),
        (["--jobs", "0"], "jobs"),
        (["--contention", "none"], "contention"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", *argv]) == 2
    assert reason in capsys.readouterr().err
