"""A sweep's folder survives what stops the sweep: no point lost, none twice, no file half written."""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import random
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
from deadly import doomed
from resultdirs import content, edited_sweep

import pdvsim
from pdvsim.bench import rows as rows_module
from pdvsim.bench import run as run_module
from pdvsim.bench.pool import Outcome
from pdvsim.bench.rows import ROWS, Rows, cache_rows, locked
from pdvsim.bench.run import SweepDir
from pdvsim.bench.sweep import Sweep
from pdvsim.cli import main
from pdvsim.common.files import TEMPORARY
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

SMALL = ["--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "6", "--jobs", "1"]
LOADS = ["--concurrency", "1,2,4,8", "--arch", "pdv,colocated"]

pytestmark = pytest.mark.usefixtures("quick_plots_in_module")


ONE = ["--arch", "pdv"]
PATIENCE_S = 600
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 512,
}  # fmt: skip


def line(folder: Path, *argv: str) -> list[str]:
    """One architecture, unless the flags name some."""
    return ["sweep", *SMALL, *(() if not argv or "--arch" in argv else ONE), *(argv or LOADS), "-o", str(folder)]


def sweep(folder: Path, *argv: str) -> int:
    return main(line(folder, *argv))


def check_whole(folder: Path) -> None:
    """Whatever is there can be read to its end."""
    for path in folder.rglob("*.parquet"):
        assert pq.ParquetFile(path).read().num_rows >= 1
    for path in folder.rglob("*.json"):
        json.loads(path.read_text())


def done(folder: Path) -> int:
    """How many rows are written to their end."""
    return max(0, (folder / ROWS).read_bytes().count(b"\n") - 1) if (folder / ROWS).exists() else 0


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep") / "whole"
    assert sweep(folder) == 0
    return folder


def test_killed_at_random_moments_and_resumed(tmp_path: Path, uninterrupted: Path) -> None:
    """Killed eight times, before a file is on the disk or has its name, or at any moment; then one run to the end.

    Nothing here depends on how far a sweep gets in so much time, which is the machine's business.
    """
    chance = random.Random(int(os.environ.get("PDVSIM_SOAK", 0)))
    folder = tmp_path / "killed"
    forks = multiprocessing.get_context("forkserver")  # a fresh process each time, without a fresh import
    used = ["pdvsim.cli.sweep", "pdvsim.bench.run", "pyarrow.parquet", "pdvsim.view.plots"]
    forks.set_forkserver_preload([*used, "matplotlib.backends.backend_agg"])
    argv = ["sweep", *SMALL, *LOADS, "-o", str(folder), "--resume"]
    seen = []
    for number in range(8):
        by_step = (chance.randint(0, 3), 600.0)
        by_time = (10**6, chance.uniform(0.001, 0.3))
        running = forks.Process(target=doomed, args=(argv, *(by_step if number % 4 == 3 else by_time)))
        running.start()
        running.join(PATIENCE_S)
        assert running.exitcode is not None
        check_whole(folder)
        seen.append(done(folder))
        if number == 1 and (folder / ROWS).exists():
            with (folder / ROWS).open("ab") as file:  # as a kill within the writing of a line leaves it
                file.write(b'{"key": "0123456789abcdef", "row": {')
    assert seen == sorted(seen)  # what is done stays done
    assert main(argv) == 0
    assert content(folder) == content(uninterrupted)
    assert not list(folder.rglob(TEMPORARY))


def test_a_folder_is_continued_with_other_flags(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, uninterrupted: Path, ran: list[int | None]
) -> None:
    """What is known is not run again."""
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "s"))
    assert sweep(folder, *LOADS[2:], "--concurrency", "1,16", "--resume") == 0
    assert ran == [16, 16]
    summary = pd.read_parquet(folder / "summary.parquet")
    assert summary[["point", "load"]].values.tolist() == [[0, 1], [1, 1], [2, 16], [3, 16]]
    capsys.readouterr()
    assert main(["sweep", "--check", str(folder)]) == 0
    assert "4 of 4 points are complete\n" in (out := capsys.readouterr().out)
    assert "6 rows of other settings" in out
    ran.clear()
    assert sweep(folder, *LOADS, "--resume") == 0
    assert ran == []
    assert content(folder)["summary.parquet"] == content(uninterrupted)["summary.parquet"]


@pytest.mark.parametrize(("change", "says"), [
    ({}, ["8 of 8 points", "--resume"]),
    ({"schema_version": 1}, ["schema_version is 1", ROWS]),
])  # fmt: skip
def test_a_sweep_in_the_folder_is_left_alone(
    change: dict[str, Any], says: list[str], refused: Callable[..., str], uninterrupted: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(uninterrupted, tmp_path / "s"))
    edited_sweep(folder, **change)
    before = content(folder)
    reason = refused(line(folder, *LOADS))
    assert all(part in reason for part in says)
    assert content(folder) == before


def test_one_writer_only_and_no_lock_that_is_a_link(refused: Callable[..., str], tmp_path: Path) -> None:
    with locked(tmp_path / "s"):
        assert "writing" in refused(line(tmp_path / "s", "--concurrency", "1"))
    (tmp_path / "precious").write_text("kept")
    for name in (".lock", ROWS):
        (tmp_path / "s" / name).unlink(missing_ok=True)
        (tmp_path / "s" / name).symlink_to(tmp_path / "precious")
        assert f"{name}: is a link" in refused(line(tmp_path / "s", "--concurrency", "1"))
        (tmp_path / "s" / name).unlink()
    assert (tmp_path / "precious").read_text() == "kept"


class Full(io.FileIO):
    """A file on a full disk."""

    def write(self, data: Any) -> int:
        raise OSError(28, "No space left on device")


def test_a_full_disk_is_one_line_and_what_is_done_stays(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, usual = tmp_path / "s", Path.open

    def opened(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        full = mode == "ab" and done(folder) == 3
        return Full(path, "ab") if full else usual(path, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", opened)
    assert sweep(folder) == 2
    err = capsys.readouterr().err
    assert f"{ROWS}: No space" in err.splitlines()[-1]
    assert re.search(f" 3 of 8 .*{folder}.*--resume\n", err)
    monkeypatch.undo()
    assert sweep(folder, *LOADS, "--resume") == 0
    assert content(folder).keys() == content(uninterrupted).keys()
    assert content(folder)[ROWS] == content(uninterrupted)[ROWS]


def test_a_point_that_fails_is_recorded_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str], refused: Callable[..., str], tmp_path: Path
) -> None:
    argv = ["--concurrency", "1", "--vary", "kv-capacity-tokens=1000,10,2000"]
    assert sweep(tmp_path, *argv, "--continue-on-error") == 1
    assert re.search(f" 1 of 3 .*{tmp_path / ROWS}", capsys.readouterr().err)
    failed = json.loads((tmp_path / ROWS).read_text().splitlines()[2])
    assert failed["failed"].startswith("request 0 needs 48 tokens")  # 44 in pages of 16
    assert pd.read_parquet(tmp_path / "summary.parquet")["point"].tolist() == [0, 2]
    before = content(tmp_path)
    reason = refused(line(tmp_path, *argv, "--resume"))  # without the flag it is refused beforehand
    assert "request 0 needs 48 tokens" in reason
    assert "kv_capacity_tokens 10)" in reason
    assert content(tmp_path) == before


def test_an_unforeseen_error_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(experiment: Experiment) -> Result:
        return simulate(experiment) if experiment.traffic.max_concurrency == 2 else [][1]

    monkeypatch.setattr(run_module, "simulate", broken)
    assert sweep(tmp_path, "--concurrency", "1,2", "--continue-on-error") == 1
    failed = json.loads((tmp_path / ROWS).read_text().splitlines()[1])
    assert failed["failed"].startswith("IndexError: ")
    assert "in broken" in failed["traceback"]
    monkeypatch.undo()
    assert sweep(tmp_path, "--concurrency", "1,2", "--resume") == 0
    assert not Rows(tmp_path / ROWS).failed  # it has a row now


def test_a_dry_run_writes_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path, uninterrupted: Path) -> None:
    assert sweep(tmp_path / "s", *LOADS, "--vary", "num-speculative-tokens=2,4", "--dry-run") == 0
    out = capsys.readouterr().out
    assert "\n16 of 16 points " in out
    assert out.count("to do") == 16
    assert not (tmp_path / "s").exists()
    before = content(uninterrupted)
    assert sweep(uninterrupted, *LOADS, "--dry-run", "--resume", "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert {point["state"] for point in document["points"]} == {"done"}
    assert document["estimate"]["core_s"] == 0
    assert content(uninterrupted) == before


def test_every_file_that_is_read_is_part_of_the_key(tmp_path: Path) -> None:
    """A tokenizer's folder too, but for the weights next to it; a model's, a card, a profile, a machine, a trace."""
    tokenizer, model = tmp_path / "tokenizer", tmp_path / "model"
    for folder in (tokenizer, model):
        folder.mkdir()
        (folder / "model.safetensors").write_text("weights")
    names = ["talk.json", "rounds.jsonl", "p.json", "m.json", "my.toml", "model/config.json", "tokenizer/t.json"]
    for name in names:
        text = json.dumps(LLAMA) if name.startswith("model/") else "[]" if "talk" in name else "{}"
        (tmp_path / name).write_text(text)
    experiment = Experiment(
        traffic=Traffic(dataset_path=str(tmp_path / "talk.json"), tokenizer=str(tokenizer)),
        acceptance=Acceptance(acceptance_trace=str(tmp_path / "rounds.jsonl")),
        server=Server(pair=f"tinyllama-1.1b:{model}"),
        hardware=Hardware(
            str(tmp_path / "my.toml"), profile=str(tmp_path / "p.json"), machine=str(tmp_path / "m.json")
        ),
    )
    inputs = SweepDir(tmp_path / "s", Sweep(base=experiment)).config["inputs"]
    assert {Path(path) for path in inputs} == {tmp_path / name for name in names}
    before = Rows().key(experiment)
    for name in names:
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text + " ")
        assert Rows().key(experiment) != before
        (tmp_path / name).write_text(text)
        assert Rows().key(experiment) == before
    (tokenizer / "added_tokens.json").write_text("{}")
    assert Rows().key(experiment) != before


QUESTION: dict[str, Any] = {
    "request_rate": 8, "num_prompts": 20, "num_runs": 2, "budget": 20, "jobs": 1, "goodput": ["ttft:500"],
}  # fmt: skip


def test_decisions_remember_their_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ran: list[int | None]) -> None:
    """Interrupted, a question goes on where it was; asked again, it runs nothing; the answer is the same."""

    def answer() -> str:
        return re.sub(r"in \d+ s\n", "", repr(pdvsim.advise(**QUESTION)))

    without = answer()
    needed = len(ran)
    monkeypatch.setenv(rows_module.CACHE, str(tmp_path))
    ran.clear()
    usual = Rows.add

    def added(rows: Rows, key: str, outcome: Outcome, write: bool) -> None:
        usual(rows, key, outcome, write)
        if len(ran) == needed // 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Rows, "add", added)
    with suppress(KeyboardInterrupt):
        pdvsim.advise(**QUESTION)
    monkeypatch.setattr(Rows, "add", usual)
    assert answer() == without
    assert len(ran) == needed
    assert answer() == without
    assert len(ran) == needed
    [file] = tmp_path.glob("rows-*.jsonl")
    file.write_bytes(file.read_bytes()[:-40])  # killed while it wrote
    assert answer() == without
    assert len(ran) == needed + 1


def test_rows_of_another_program_or_of_own_policies_are_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(rows_module.CACHE, str(tmp_path))
    rows, row = cache_rows(), Outcome(0, {"row": {"x": 1.5}, "details": {}})
    rows.add(key := rows.key(Experiment()), row)
    rows.add("0" * 16, row, write=False)
    assert [cache_rows().get(one) is not None for one in (key, "0" * 16)] == [True, False]
    monkeypatch.setattr(rows_module, "program", lambda: "f" * 64)
    assert len(cache_rows()) == 0
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(rows_module.CACHE, str(blocked))  # no folder can be made: nothing is kept, nothing is said
    assert cache_rows().path is None
