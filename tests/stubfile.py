"""The signatures of the Python API as `pdvsim/__init__.pyi`, for editors and type checkers.

python tests/stubfile.py    # writes it
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pdvsim

FILE = Path(__file__).parents[1] / "pdvsim" / "__init__.pyi"
WIDTH = 120
HEAD = """# Written by tests/stubfile.py from the options of the commands.
from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from pdvsim.cli.validate.base import Compared
from pdvsim.decide.advice import Advice
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.draft_table import DraftTable
from pdvsim.decide.speedup import Speedup
from pdvsim.decide.winners import WinnerMap
from pdvsim.sim.policies.base import Policy
from pdvsim.view.plots import SweepPoints
from pdvsim.view.run import Run as Run
from pdvsim.view.traffic import TraceAccount

__version__: str
"""


def text() -> str:
    """The file as it should be."""
    functions = (getattr(pdvsim, name) for name in pdvsim.__all__ if name[0].islower())
    return "\n".join([HEAD, *map(signature_text, functions)])


def signature_text(function: Callable[..., Any]) -> str:
    """One function with its keywords and its help."""
    signature = inspect.signature(function)
    parts, placed = [], True
    for one in signature.parameters.values():
        if placed and one.kind is inspect.Parameter.KEYWORD_ONLY:
            parts, placed = [*parts, "*"], False
        default = "" if one.default is inspect.Parameter.empty else " = ..."
        parts.append(f"{one.name}: {one.annotation}{default}")
    listed = textwrap.indent(textwrap.fill(", ".join(parts), WIDTH - 5, break_on_hyphens=False), "    ")
    docstring = textwrap.indent(f'"""{inspect.getdoc(function)}\n"""', "    ")
    return f"def {function.__name__}(\n{listed},\n) -> {signature.return_annotation}:\n{docstring}\n"


if __name__ == "__main__":
    FILE.write_text(text(), encoding="utf-8")
