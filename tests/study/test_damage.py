"""Damage to a result: `sweep --check` and every reader name the file, and --resume restores it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from resultdirs import content

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
    changed = text.replace('"output_throughput": ', '"output_throughput": 1')
    path.write_text(changed if changed != text else text.replace('"date": "2', '"date": "3'))
    assert path.read_text() != text


def flipped(path: Path) -> None:
    """One bit is another."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def replaced(make: Callable[[Path], None]) -> Callable[[Path], None]:
    """Something that is no file in the place of one."""

    def spoil(path: Path) -> None:
        path.unlink()
        make(path)

    return spoil


SPOIL: dict[str, Callable[[Path], object]] = {
    "altered": altered,
    "flipped": flipped,
    "gone": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "a list": lambda path: path.write_text("[]"),
    "not text": lambda path: path.write_bytes(b"\xff"),
    "without its sweep": lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"sweep": []})),
    "another point's": lambda path: path.write_bytes(path.with_name("00000.json").read_bytes()),
    "a pipe": replaced(os.mkfifo),
    "a link to a device": replaced(lambda path: path.symlink_to("/dev/zero")),
    "a link to itself": replaced(lambda path: path.symlink_to(path.name)),
}
PART, RECORDS = "parts/00001.json", "details/00001.requests.parquet"
SPOILT = [
    *((PART, how) for how in ("altered", "gone", "cut", "another point's", "a pipe")),
    *((RECORDS, how) for how in ("flipped", "gone", "cut", "a link to itself")),
    *(("summary.parquet", how) for how in ("flipped", "gone", "a link to a device")),
    *(("sweep.json", how) for how in ("altered", "empty", "cut", "a list", "not text", "without its sweep")),
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
    assert (PART[6:11] if (name, how) == (PART, "gone") else name) in capsys.readouterr().out
    blamed = RECORDS if how == "another point's" else name  # which are not the other point's
    assert str(folder / blamed) in refused(["report", str(folder), "-o", str(tmp_path / "report.html")])
    if name == "sweep.json" and how != "altered":  # parts have the identity of their sweep: no other flags repair it
        damaged = (folder / name).read_bytes()
        for flags, says in (([], "repairs it"), (["--resume", "--seed", "5"], "the points are of another sweep")):
            assert says in refused([*SWEEP, *flags, "-o", str(folder)])
            assert (folder / name).read_bytes() == damaged
    ran: list[int | None] = []

    def counted(experiment: Experiment) -> Result:
        ran.append(experiment.traffic.max_concurrency)
        return simulate(experiment)

    monkeypatch.setattr("pdvsim.study.folder.simulate", counted)
    assert main([*SWEEP, "--resume", "-o", str(folder)]) == 0
    assert ran == ([2] if name in (PART, RECORDS) else [])  # only the point that was hit
    assert content(folder) == content(whole / "sweep")
    assert not (folder / name).is_symlink()
    assert main(["sweep", "--check", str(folder)]) == 0


def test_files_of_nobody_are_named_and_left(whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(shutil.copytree(whole / "sweep", tmp_path / "sweep"))
    for name in ("99999.json", "abc.parquet", "0001.json"):
        (folder / "parts" / name).write_bytes(b"stranger")
    capsys.readouterr()
    assert main(["sweep", "--check", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "parts/0001.json, parts/99999.json, parts/abc.parquet\n" in out
    assert (folder / "parts" / "abc.parquet").read_bytes() == b"stranger"


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
