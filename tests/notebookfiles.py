"""The notebooks: run from top to bottom, and kept free of what differs from one machine or run to the next.

`python tests/notebookfiles.py` runs them all at their full budget and writes them back with their outputs.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "notebooks"
BUDGET = "PDVSIM_NOTEBOOK_PROMPTS"
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}

# On a reduced budget nothing is tuned: every map has these settings, unless the notebook gives its own, and short
# answers, since a map simulates as many requests as it needs. So few simulations do not pay for worker processes.
UNTUNED = """
import functools, pdvsim, pdvsim.bench.pool
pdvsim.bench.pool.cores = lambda: 1
def reduced(call, **given):
    small = {"num_speculative_tokens": 2, "max_num_seqs": 32, "max_num_batched_tokens": 2048, "controller": "fixed"}
    return call(**small | given | {"output_len": min(16, given.get("output_len", 16))})
pdvsim.winner_map = functools.partial(reduced, pdvsim.winner_map)
"""


def paths() -> list[Path]:
    return sorted(FOLDER.glob("*.ipynb"))


@contextmanager
def kernel(prompts: int | None = None) -> Iterator[KernelManager]:
    """A kernel in the notebooks' folder, for their full budget or a reduced one."""
    env = {key: value for key, value in os.environ.items() if key != BUDGET}
    with tempfile.TemporaryDirectory() as settings:
        if prompts:
            env |= {BUDGET: str(prompts), "IPYTHONDIR": settings}
            startup = Path(settings) / "profile_default" / "startup"
            startup.mkdir(parents=True)
            (startup / "untuned.py").write_text(UNTUNED, encoding="utf-8")
        running = KernelManager(kernel_name="python3")
        running.start_kernel(env=env, cwd=str(FOLDER))
        try:
            yield running
        finally:
            running.shutdown_kernel(now=True)


def execute(notebook: Any, running: KernelManager) -> Any:
    """Run a notebook in a kernel and return it; an error in a cell is raised."""
    patience = {"timeout": 1800, "startup_timeout": 600}  # in seconds: a busy machine is no reason to fail
    return NotebookClient(notebook, km=running, **patience).execute()


def clean(notebook: Any) -> Any:
    """Leave out times and versions."""
    notebook.metadata = {"kernelspec": KERNEL, "language_info": {"name": "python"}}
    for number, cell in enumerate(notebook.cells):
        cell.metadata = {}
        cell.id = f"cell-{number}"
    return notebook


def main() -> None:
    for path in paths():
        with kernel() as running:
            nbformat.write(clean(execute(nbformat.read(path, as_version=4), running)), path)
        print(f"{path.name}: {path.stat().st_size / 1e3:.0f} kB", file=sys.stderr)


if __name__ == "__main__":
    main()
