"""The scripts of examples/ run as they stand, each in an empty folder, and print what they are for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ARGUMENTS = {
    "my_traffic": ([], ("colocated", "request_goodput")),
    "my_model": ([], ("h200", "a100-80gb", "tokens/s")),
    "my_policy": ([], ("Courteous", "TPOT")),
    "sweep_on_a_cluster": (["small"], ("output tokens/s", "colocated", "pdv")),
    "prove_it_on_my_gpu": (["tiny"], ("simulated", "output_throughput", "%")),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in (ROOT / "examples").glob("*.py")} == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    if name == "prove_it_on_my_gpu":
        pytest.importorskip("torch")
    arguments, says = ARGUMENTS[name]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "error::SyntaxWarning", str(ROOT / "examples" / f"{name}.py"), *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in says), done.stdout
    assert list(tmp_path.iterdir()) == []  # run in a checkout, it would leave files there
