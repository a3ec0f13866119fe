"""The house keeps its order: what is packaged, who imports whom, what is never used."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("pdvsim", "sim", "profiler", "realrun", "calibration")


def sources(*rooms: str) -> list[Path]:
    return [path for room in rooms for path in (ROOT / room).rglob("*.py") if not under_link(path)]


def under_link(path: Path) -> bool:
    """`pdvsim/` holds links to the other rooms, for tools that look names up in folders."""
    return any(parent.is_symlink() for parent in path.parents)


def imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_every_package_is_listed() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    found = {
        path.parent.relative_to(ROOT).as_posix().replace("/", ".")
        for path in sources(*ROOMS)
        if path.name == "__init__.py"
    }
    assert listed == {name if name.startswith("pdvsim") else f"pdvsim.{name}" for name in found}


@pytest.mark.parametrize("path", sources("sim"), ids=lambda p: p.name)
def test_the_simulator_knows_no_device_and_no_picture(path: Path) -> None:
    """A policy that knew its device would make two programs of one; the data flows one way."""
    for name in imports(path):
        assert not name.startswith(("torch", "triton", "seaborn", "matplotlib", "plotly")), name
        assert not name.startswith(("pdvsim.profiler", "pdvsim.realrun", "pdvsim.calibration")), name


@pytest.mark.parametrize("path", sources("sim/policies"), ids=lambda p: p.name)
def test_a_policy_never_sleeps_or_asks_what_runs_it(path: Path) -> None:
    assert not imports(path) & {"time", "threading", "asyncio", "pdvsim.sim.machine.device", "pdvsim.sim.run"}
    text = path.read_text(encoding="utf-8")
    assert "isinstance(self.device" not in text
    assert "type(self.device" not in text


@pytest.mark.parametrize("path", sources(*ROOMS), ids=lambda p: p.relative_to(ROOT).as_posix())
def test_data_is_never_run(path: Path) -> None:
    assert not imports(path) & {"pickle", "dill", "marshal", "shelve"}
    called = {
        node.func.id
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not called & {"eval", "exec"}


def test_simulating_needs_no_torch() -> None:
    code = (
        "import sys, pdvsim; pdvsim.run(arch='pdv', num_prompts=5, request_rate=4);"
        "assert not {'torch', 'transformers', 'seaborn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
