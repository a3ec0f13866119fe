"""Results read back: sweeps and runs are one table, and what is not a result is refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from resultdirs import BASE, WARMUP, asked, content, edited_sweep, experiment, sweep_folder

from pdvsim.bench.pool import Outcome
from pdvsim.bench.results import Results, label, load, records
from pdvsim.bench.rows import ROWS, Rows
from pdvsim.cli import main
from pdvsim.sim.metrics.summary import latencies_s
from pdvsim.sim.run import simulate

SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6", "--save-detailed"]
SWEEP = ["sweep", *SMALL, "--arch", "pdv", "--concurrency", "1,2", "--jobs", "1"]
RUN = ["run", *SMALL[:-1]]

pytestmark = pytest.mark.usefixtures("quick_plots_in_module")


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
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep and a run, with records, as the commands write them."""
    folder = tmp_path_factory.mktemp("whole")
    assert main([*SWEEP, "-o", str(folder / "sweep")]) == 0
    assert main(["run", *SMALL, "-o", str(folder / "run.json")]) == 0
    for result in ("sweep", "run.json"):
        assert main(["sweep", "--check", str(folder / result)]) == 0
        assert main(["report", str(folder / result), "-o", str(folder / "report.html")]) == 0
    return folder


def test_missing_records_are_named(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(whole / "run.json", tmp_path)
    assert main(["report", str(tmp_path / "run.json"), "-o", str(tmp_path / "report.html")]) == 0
    assert "run: no histograms" in capsys.readouterr().err
    shutil.copytree(whole / "sweep", tmp_path / "sweep", ignore=shutil.ignore_patterns("details"))
    assert main(["report", str(tmp_path / "sweep"), "-o", str(tmp_path / "report.html")]) == 0
    assert "sweep: no histograms of 2 of 2 points" in capsys.readouterr().err


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


# damage: `sweep --check` and every reader name the file, and --resume restores it ------------------------------------


def altered(path: Path) -> None:
    """Other figures in the same form: only the digest differs."""
    text = path.read_text()
    before, name, after = text.rpartition('"output_throughput": ')
    path.write_text(f"{before}{name}1{after}" if name else text.replace('"date": "2', '"date": "3'))
    assert path.read_text() != text


def flipped(path: Path) -> None:
    """One bit is another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def linked(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


SPOIL: dict[str, Callable[[Path], object]] = {
    "altered": altered,
    "flipped": flipped,
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "not text": lambda path: path.write_bytes(b"\xff"),
    "a link to a device": linked,
}
RECORDS = "details/00001.requests.parquet"
SPOILT = [
    *((ROWS, how) for how in ("altered", "cut", "gone", "empty", "not text")),
    *((RECORDS, how) for how in ("flipped", "gone", "cut", "a link to a device")),
]


@pytest.mark.parametrize(("name", "how"), SPOILT)
def test_a_damaged_sweep_is_named_and_made_again(
    name: str,
    how: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refused: Callable[..., str],
    ran: list[int | None],
) -> None:
    folder = Path(shutil.copytree(whole / "sweep", tmp_path / "sweep"))
    SPOIL[how](folder / name)
    capsys.readouterr()
    assert main(["sweep", "--check", str(folder)]) == 1
    assert name in capsys.readouterr().out
    assert str(folder / name) in refused(["report", str(folder), "-o", str(tmp_path / "report.html")])
    ran.clear()
    assert main([*SWEEP, "--resume", "-o", str(folder)]) == 0
    assert ran == (
        [1, 2] if name == ROWS and how in ("gone", "empty", "not text") else [2] if name in (ROWS, RECORDS) else []
    )  # what was hit
    assert {**content(folder), ROWS: b""} == {**content(whole / "sweep"), ROWS: b""}
    assert not (folder / name).is_symlink()
    assert main(["sweep", "--check", str(folder)]) == 0


@pytest.mark.parametrize(("name", "how"), [
    ("run.json", "altered"),
    ("run.requests.parquet", "flipped"),
    ("run.deliveries.parquet", "flipped"),
    ("run.launches.parquet", "gone"),
])  # fmt: skip
def test_a_damaged_run_is_named(
    name: str, how: str, whole: Path, tmp_path: Path, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    for path in whole.glob("run.*"):
        shutil.copy(path, tmp_path)
    SPOIL[how](tmp_path / name)
    result = str(tmp_path / "run.json")
    capsys.readouterr()
    assert main(["sweep", "--check", result, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[result]["whole"] is False
    assert str(tmp_path / name) in refused(["report", result, "-o", str(tmp_path / "report.html")])
    if name == "run.json":  # pictures are of the figures, not of the records
        refused(["plot", result, "--var-y", "mean_ttft_ms", "-o", str(tmp_path / "plots")])
