"""The scripts of examples/ run as they stand, each in an empty folder, and print what they are for."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
ARGUMENTS = {
    "my_traffic": ([], ("colocated", "request_goodput")),
    "my_model": ([], ("h200", "a100-80gb", "tokens/s")),
    "my_policy": ([], ("Courteous", "TPOT")),
    "sweep_on_a_cluster": (["small"], ("output tokens/s", "colocated", "pdv")),
    "prove_it_on_my_gpu": (["tiny"], ("simulated", "output_throughput", "%")),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(ARGUMENTS)


@pytest.mark.filterwarnings("error::SyntaxWarning")
@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_example_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "prove_it_on_my_gpu":
        pytest.importorskip("torch")
    arguments, says = ARGUMENTS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert all(word in printed for word in says), printed
    assert list(tmp_path.iterdir()) == []  # run in a checkout, it would leave files there
