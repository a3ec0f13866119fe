"""One way to start a process: the pool's. None of them, and no command, runs a file of the current folder."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STARTERS = {"multiprocessing", "subprocess", "concurrent", "joblib"}
POISONED = re.findall(
    r"\w+",
    "abc asyncio array bisect calendar collections concurrent contextlib copy csv dataclasses datetime enum functools "
    "hashlib heapq inspect io json logging multiprocessing numpy pandas pickle queue random shutil signal simpy socket "
    "struct subprocess tempfile threading tornado types typing warnings weakref",
)
START = "import sys; sys.path.remove(''); from pdvsim.cli import main; sys.exit(main())"


def poison(folder: Path) -> dict[str, str]:
    """Files that are named as modules, and leave a trace if they are run; returns the environment of a command."""
    for name in POISONED:
        (folder / f"{name}.py").write_text(f"open({str(folder / 'imported')!r}, 'a').write('{name} ')")
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PDVSIM_CACHE": ""}


def test_only_the_pool_starts_processes() -> None:
    """`realrun` and the profiler, which are other programs, start servers and compilers."""
    found = set()
    for path in (path for room in ("pdvsim", "sim", "calibration") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            found |= {path.name for name in names if name.partition(".")[0] in STARTERS}
    assert found == {"pool.py"}


@pytest.mark.parametrize(
    "line",
    [
        "sweep --arch pd,pdv --concurrency 1,2 --jobs 2 --no-band -o made",
        "acceptance",
    ],
)
def test_no_command_runs_a_file_of_the_current_folder(line: str, tmp_path: Path) -> None:
    small = [] if line == "acceptance" else ["--num-prompts", "6", "--input-len", "32", "--output-len", "8"]
    small += ["--dataset-name", "random"] if small else []
    argv = [sys.executable, "-c", START, *line.split(), *small]
    done = subprocess.run(argv, cwd=tmp_path, env=poison(tmp_path), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "imported").exists(), (tmp_path / "imported").read_text()
