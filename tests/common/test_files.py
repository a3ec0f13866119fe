"""Whatever a command writes is there whole or not at all, and nothing is replaced that is no file."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from pdvsim.bench.output import OLD_S, check_file, save
from pdvsim.cli import main
from pdvsim.common.files import TEMPORARY, check_writable, unbroken, whole, write_all, write_whole

ROOT = Path(__file__).parents[2]
ROOMS = ("pdvsim", "sim", "profiler", "realrun", "calibration")
RUN = ["run", "--dataset-name", "random", "--input-len", "32", "--output-len", "8", "--num-prompts", "20"]


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("before")
    path.chmod(0o600)

    def broken_off() -> None:
        with whole(path) as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    assert path.read_text() == "before"
    write_whole(path, b"after")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("after", 0o600)
    with pytest.raises(NotADirectoryError, match=f"{path.name}/y"):
        write_all({path: b"new", path / "y": b"new"})
    assert path.read_text() == "after"  # not before the other can be written as well
    assert not list(tmp_path.glob(TEMPORARY))


def test_what_a_killed_process_left_goes_at_the_next_start(tmp_path: Path) -> None:
    for name, age_s in (("old", 2 * OLD_S), ("young", 0.0)):
        path = tmp_path / TEMPORARY.replace("*", name)
        path.touch()
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    check_file(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == [TEMPORARY.replace("*", "young")]


def test_one_seed_gives_the_same_bytes_on_another_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = []
    for date in ("20260101-000000", "20260102-000000"):
        monkeypatch.setattr("pdvsim.bench.output.now", lambda date=date: date)
        assert main([*RUN, "-o", str(tmp_path / "r.json"), "--overwrite"]) == 0
        documents.append(json.loads((tmp_path / "r.json").read_text()))
        assert unbroken(documents[-1])
    one, other = documents
    assert {name for name in one if one[name] != other[name]} <= {"date"}


def test_a_link_without_a_folder_says_where_it_leads(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "file")
    with pytest.raises(OSError, match=r"is a link to .*nowhere/file, whose folder does not exist"):
        check_writable(tmp_path / "link")


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", b"through")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"through"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
def test_a_pipe_is_written_to_and_stays(tmp_path: Path) -> None:
    pipe, heard = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: heard.append(pipe.read_text()), daemon=True)
    reader.start()
    assert main([*RUN, "-o", str(pipe)]) == 0
    reader.join(timeout=300)
    assert json.loads(heard[0])["arch"] == "colocated"
    assert pipe.is_fifo()


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs /dev/stdout")
def test_standard_output_is_written_to(tmp_path: Path) -> None:
    """A file that the table goes to as well holds both."""
    command = [sys.executable, "-m", "pdvsim", *RUN, "-o", "/dev/stdout"]
    with open(tmp_path / "out", "wb") as file:
        subprocess.run(command, check=True, stdout=file, stderr=subprocess.DEVNULL)
    text = (tmp_path / "out").read_text()
    document, end = json.JSONDecoder().raw_decode(text)
    assert document["arch"] == "colocated"
    assert text[end:].strip().startswith("============ Serving")
    write_whole(Path(os.devnull), b"x")
    assert Path(os.devnull).is_char_device()


def test_a_protected_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError):
        check_writable(tmp_path)
    (tmp_path / "x").touch(0o444)
    if not os.access(tmp_path / "x", os.W_OK):  # root may write anything
        with pytest.raises(PermissionError):
            check_writable(tmp_path / "x")


def test_one_file_for_two_things_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    path = str(tmp_path / "x.json")
    assert f"{path} cannot be written: two" in refused([*RUN, "-o", path, "--trace-out", path])
    records = str(tmp_path / "x.requests.parquet")
    assert "two options" in refused(
        [*RUN, "-o", path, "--save-detailed", "--trace-out", str(tmp_path / "." / "x.requests.parquet")]
    )
    trace = tmp_path / "rounds.jsonl"
    trace.write_text("[4, 2]\n")
    argv = ["--acceptance-trace", str(trace), "-o", str(trace)]
    assert "reads it" in refused([*RUN, *argv])
    assert trace.read_text() == "[4, 2]\n"
    assert not Path(records).exists()


def test_a_label_stays_in_its_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    argv = ["--save-result", "--result-dir", str(inner), "--label"]
    assert "label" in refused([*RUN, *argv, "../../evil"])
    assert main([*RUN, *argv, ".."]) == 0
    assert [path.parent for path in tmp_path.rglob("*.json")] == [inner]


@pytest.mark.parametrize(("done", "partial"), [(b"part", ["map-interrupted.json"]), (None, [])])
def test_what_is_interrupted_does_not_replace_what_is_finished(
    done: bytes | None, partial: list[str], tmp_path: Path
) -> None:
    (tmp_path / "map.json").write_text("finished")
    assert save({tmp_path / "map.json": done}, "some of 4 cells") == 130
    assert (tmp_path / "map.json").read_text() == "finished"
    assert sorted(path.name for path in tmp_path.iterdir()) == [*partial, "map.json"]


def writes(path: Path) -> list[str]:
    """Calls that write a file past the one writer."""
    calls = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [a.value for a in node.args[-1:] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        modes += [k.value.value for k in node.keywords if k.arg == "mode" and isinstance(k.value, ast.Constant)]
        opens = name == "open" and any(set(mode) & set("wax+") and len(mode) < 4 for mode in modes)
        if opens or name in ("write_text", "write_bytes", "to_json", "dump", "replace_file", "touch"):
            calls.append(f"{path.name}:{node.lineno} {name}")
        content = name in ("to_csv", "to_parquet") and not node.args  # which is returned
        if name in ("savefig", "to_csv", "to_parquet", "write_table", "savez_compressed") and not (
            content or (node.args and isinstance(node.args[-1 if name == "write_table" else 0], ast.Name))
        ):
            calls.append(f"{path.name}:{node.lineno} {name}")
    return calls


def test_there_is_one_writer() -> None:
    sources = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    ours = {path.resolve() for path in sources} - {(ROOT / "pdvsim" / "common" / "files.py").resolve()}
    assert [line for path in sorted(ours) for line in writes(path)] == []
