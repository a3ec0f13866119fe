"""Results read back: sweeps and runs are one table, and what is not a result is refused in one line."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from resultdirs import BASE, WARMUP, asked, edited_sweep, experiment, sweep_folder

from pdvsim.bench.pool import Outcome
from pdvsim.bench.results import Results, label, load, records
from pdvsim.bench.rows import ROWS, Rows
from pdvsim.cli import main
from pdvsim.cli.report import ReportCommand
from pdvsim.common.commandline import parse
from pdvsim.sim.metrics.summary import latencies_s
from pdvsim.sim.run import simulate

RUN = ["run", "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "8"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sweep_folder(tmp_path_factory.mktemp("results") / "sweep")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A folder to spoil."""
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_a_sweep_comes_back_with_its_records(folder: Path) -> None:
    results = load([folder])
    assert results.archs == ["pd", "pdv"]
    assert (len(results.points), results.dims, results.detailed) == (8, (), 8)
    for _, row in results.points.iterrows():
        saved = records(row)
        assert results.warmup(row) == WARMUP
        same = simulate(experiment(row["arch"], row["load"], int(row["seed"])))
        for read, expected in ((saved.requests, same.requests), (saved.launches, same.launches)):
            assert all(np.array_equal(read[name], expected[name]) for name in expected)
        seconds = latencies_s(saved.requests, saved.deliveries, WARMUP)
        assert len(seconds["ttft"]) == BASE.traffic.num_prompts - WARMUP
        for metric, values in seconds.items():  # what the histograms hold is what the metrics were taken over
            assert values.mean() * 1e3 == pytest.approx(row[f"mean_{metric}_ms"])


@pytest.fixture(scope="module")
def detailed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep and a run, with records, as the commands write them."""
    folder = tmp_path_factory.mktemp("detailed")
    small = ["--num-prompts", "8", "--output-len", "8", "--save-detailed"]
    point = ["--arch", "pd", "--request-rate", "8", "--jobs", "1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdvsim.view.plots.sweep_png", lambda points, base: b"")  # tested elsewhere
        assert main(["sweep", *point, *small, "-o", str(folder / "sweep")]) == 0
    assert main(["run", *small, "-o", str(folder / "run.json")]) == 0
    return folder


def test_a_path_may_contain_spaces_and_commas(detailed: Path, tmp_path: Path) -> None:
    folder = str(shutil.copytree(detailed / "sweep", tmp_path / "my sweep, again"))
    run = str(shutil.copy(detailed / "run.json", tmp_path / "a run.json"))
    assert load(parse(ReportCommand, [folder, run]).results).points["results"].tolist() == ["my sweep, again", "a run"]
    assert main(["sweep", "--check", folder]) == 0
    assert main(["report", folder, "-o", str(tmp_path / "a report.html")]) == 0
    assert (tmp_path / "a report.html").exists()


def test_missing_records_are_named(detailed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(detailed / "run.json", tmp_path)
    assert main(["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "report.html")]) == 0
    assert "run: no histograms" in capsys.readouterr().err
    shutil.copytree(detailed / "sweep", tmp_path / "sweep", ignore=shutil.ignore_patterns("details"))
    assert main(["report", str(tmp_path / "sweep"), "-o", str(tmp_path / "report.html")]) == 0
    assert "sweep: no histograms of 1 of 1 points" in capsys.readouterr().err


def test_runs_of_one_workload_are_one_table_and_others_are_kept_apart(tmp_path: Path) -> None:
    loads = {"a": ["--max-concurrency", "2"], "b": ["--max-concurrency", "4"], "c": ["--request-rate", "8"]}
    for name, more in loads.items():
        assert main([*RUN, *more, "-o", str(tmp_path / f"{name}.json")]) == 0
    paths = [tmp_path / f"{name}.json" for name in loads]
    together = load(paths)
    assert together.dims == ()
    assert list(zip(together.points["load_kind"], together.points["load"], strict=True)) == [
        ("concurrency", 2.0), ("concurrency", 4.0), ("request_rate", 8.0)
    ]  # fmt: skip
    assert [label(setting) for setting, _ in together.settings()] == ["load kind concurrency", "load kind request_rate"]
    shutil.copy(paths[0], tmp_path / "again.json")
    assert load([paths[0], tmp_path / "again.json"]).dims == ("results",)  # the same point twice
    assert main([*RUN, "--max-concurrency", "2", "--acceptance-rate", "0.9", "-o", str(tmp_path / "d.json")]) == 0
    apart = load([paths[1], tmp_path / "d.json"])
    assert [label(setting) for setting, _ in apart.settings()] == ["b", "d"]  # not to be compared seed by seed


def test_pairs_and_varied_flags_are_dimensions(copy: Path, tmp_path: Path) -> None:
    edited_sweep(copy, points=2 * asked(copy)["points"])
    with pytest.raises(ValueError, match="occurs twice"):
        load([copy])
    folder = sweep_folder(tmp_path / "k", seeds=1, detailed=False, num_speculative_tokens=(4, 8))
    results: Results = load([folder])
    assert results.dims == ("num_speculative_tokens",)
    assert [label(setting) for setting, _ in results.settings()] == [
        "num speculative tokens 4", "num speculative tokens 8"
    ]  # fmt: skip


def test_what_one_sweep_varies_another_has_from_its_configuration(tmp_path: Path) -> None:
    varied = {"acceptance_rate": (0.5,), "acceptance_concentration": (9.0,), "metric_percentiles": ((50.0, 90.0),)}
    folder = sweep_folder(tmp_path / "v", ("pd",), (20.0,), 1, detailed=False, **varied)
    assert main([*RUN, "--max-concurrency", "2", "-o", str(tmp_path / "r.json")]) == 0
    results = load([folder, tmp_path / "r.json"])
    assert results.dims == tuple(varied)
    [by_rate, by_concurrency] = [label(setting) for setting, _ in results.settings()]
    assert by_rate.startswith("acceptance rate 0.5, acceptance concentration 9, metric percentiles 50.0+90.0")
    assert by_concurrency.startswith("acceptance rate 0.6, acceptance concentration none, metric percentiles 99.0")


@pytest.mark.parametrize(
    ("points", "failed", "says"),
    [(8, 0, []), (20, 0, ["copy: 8 of 20 points"]), (20, 2, ["copy: 8 of 20 points, 2 failed"])],
)
@pytest.mark.usefixtures("quick_plots")
def test_a_sweep_that_lacks_points_says_so(
    copy: Path, points: int, failed: int, says: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    done = asked(copy)["points"]
    keys = [f"{number:016}" for number in range(len(done), points)]
    edited_sweep(copy, points=done + [done[0] | {"key": key} for key in keys])
    for key in keys[:failed]:
        Rows(copy / ROWS).add(key, Outcome(0, None, "why"))
    assert load([copy]).incomplete == says
    for argv in (["plot", str(copy), "--var-y", "duration"], ["report", str(copy), "-o", str(tmp_path / "r.html")]):
        assert main(argv) == 0
        lines = capsys.readouterr().err.splitlines()
        assert [line for line in lines if " points" in line] == [f"pdvsim: {line}" for line in says]
