"""The notebooks run from top to bottom, and are committed with their outputs and nothing of the machine they ran on."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import notebookfiles
import pytest
from jupyter_client.manager import KernelManager

PROMPTS = 8
MOST_BYTES = 1_500_000
SHOWS = ("print(", "plt.show()", "display(")

ALL = pytest.mark.parametrize("path", notebookfiles.paths(), ids=lambda path: path.stem)


@pytest.fixture(scope="module")
def kernel() -> Iterator[KernelManager]:
    """One kernel for all of them: each would import the same for seconds."""
    with notebookfiles.kernel(PROMPTS) as running:
        yield running


@ALL
def test_it_runs(path: Path, kernel: KernelManager) -> None:
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))  # the names of another notebook
    done = notebookfiles.execute(notebook, kernel)
    assert any(cell.get("outputs") for cell in done.cells)


@ALL
def test_it_is_committed_with_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "not run from top to bottom"
    for cell in code[1:]:  # the first sets things up
        source = re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE)  # Jupyter's own commands are no Python
        ends_in_value = isinstance(ast.parse(source).body[-1], ast.Expr)
        assert cell.outputs or not (ends_in_value or any(call in source for call in SHOWS)), source
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert notebookfiles.clean(notebook) == nbformat.read(path, as_version=4), "python tests/notebookfiles.py cleans it"


@ALL
def test_it_names_no_machine(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES
    pictures = re.compile(r'"image/png": "[^"]*"')
    assert not re.findall(r"(?:/home|/root|/work|/tmp|/Users|[A-Z]:\\\\)[\w/.]*", pictures.sub("", text))


@ALL
def test_it_begins_with_what_it_finds(path: Path) -> None:
    """Every number of the first cell's conclusion is one that the last cells computed."""
    cells = nbformat.read(path, as_version=4).cells
    summary = re.search(r"\*\*In short:\*\* (.*)", cells[0].source)
    assert summary
    at = next(i for i, cell in enumerate(cells) if cell.source.startswith("## In short"))
    computed = "".join(output.text for output in cells[at + 1].outputs)
    number = re.compile(r"\d+(?:\.\d+)?")
    known = set(number.findall(computed)) | {"95"}  # the percentile
    assert set(number.findall(re.sub(r"Qwen3-30B-A3B|H200", "", summary[1]))) <= known
