"""CONTRIBUTING's way to ship a policy: one file, and one line of the table."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("pdvsim", "sim", "realrun", "calibration", "profiler")
POLICY = '''"""Continuous batching in which prompts wait until nobody decodes."""

from pdvsim.sim.core import Chunk
from pdvsim.sim.policies.colocated import Colocated


class Polite(Colocated):
    """Prompts go last."""

    not_in_engines = "prefills only while nobody decodes"

    def next_chunks(self, budget: int) -> tuple[Chunk, ...]:
        return () if self.running else super().next_chunks(budget)
'''
LOAD = ("--dataset-name", "random", "--input-len", "20", "--output-len", "8", "--num-prompts", "20")
FEW = ("--budget", "9", "--num-runs", "2", "--jobs", "1")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with one more architecture."""
    root = tmp_path_factory.mktemp("shipped")
    for room in ROOMS:
        shutil.copytree(ROOT / room, root / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "h200"))
    (root / "sim" / "policies" / "polite.py").write_text(POLICY, encoding="utf-8")
    table = root / "sim" / "policies" / "__init__.py"
    last = '    "pdv-ahead": "ahead:Ahead",\n'
    text = table.read_text(encoding="utf-8")
    assert text.count(last) == 1
    table.write_text(text.replace(last, f'{last}    "polite": "polite:Polite",\n'), encoding="utf-8")
    return root


COMMANDS = [
    ("pdvsim.cli", "run", "--arch", "polite", "--max-concurrency", "4", *LOAD),
    ("pdvsim.cli", "sweep", "--arch", "polite,colocated", "--concurrency", "4", "--jobs", "1", *LOAD, "-o", "out"),
    ("pdvsim.cli", "advise", "--arch", "polite", "--request-rate", "9", *FEW, *LOAD),
    ("pdvsim.cli.realrun", "--arch", "polite", "--max-concurrency", "4", "--device", "cpu", "--tiny", *LOAD),
]  # fmt: skip
PROGRAM = f"""
from importlib import import_module
for module, *argv in {COMMANDS!r}:
    print("began", flush=True)
    assert import_module(module).main(argv) == 0, argv
"""


def test_every_command_takes_it(shipped: Path) -> None:
    where = {**os.environ, "PYTHONPATH": str(shipped)}
    line = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(line, cwd=shipped, env=where, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert ["polite" in printed for printed in done.stdout.split("began\n")[1:]] == [True] * len(COMMANDS)
