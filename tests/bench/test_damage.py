"""Damage to a result: `sweep --check` and every reader name the file, and --resume restores it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from resultdirs import content

from pdvsim.bench.rows import ROWS
from pdvsim.cli import main
from pdvsim.sim.config import Experiment
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6", "--save-detailed"]
SWEEP = ["sweep", *SMALL, "--arch", "pdv", "--concurrency", "1,2", "--jobs", "1"]

pytestmark = pytest.mark.usefixtures("quick_plots_in_module")


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
    "a list": lambda path: path.write_text("[]"),
    "not text": lambda path: path.write_bytes(b"\xff"),
    "a link to a device": linked,
}
RECORDS = "details/00001.requests.parquet"
SPOILT = [
    *((ROWS, how) for how in ("altered", "cut", "gone", "empty", "not text")),
    *((RECORDS, how) for how in ("flipped", "gone", "cut", "a link to a device")),
]


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


@pytest.mark.parametrize(("name", "how"), SPOILT)
def test_a_damaged_sweep_is_named_and_made_again(
    name: str,
    how: str,
    whole: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path(shutil.copytree(whole / "sweep", tmp_path / "sweep"))
    SPOIL[how](folder / name)
    capsys.readouterr()
    assert main(["sweep", "--check", str(folder)]) == 1
    assert name in capsys.readouterr().out
    assert str(folder / name) in refused(["report", str(folder), "-o", str(tmp_path / "report.html")])
    ran: list[int | None] = []

    def counted(experiment: Experiment) -> Result:
        ran.append(experiment.traffic.max_concurrency)
        return simulate(experiment)

    monkeypatch.setattr("pdvsim.bench.run.simulate", counted)
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
