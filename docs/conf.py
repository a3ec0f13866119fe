"""The documentation site: `make docs`. Its root is the repository, so that links are the same here and on GitHub."""

from __future__ import annotations

import contextlib
import io
import os
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.parsers.rst import Directive

import pdvsim

ROOT = Path(__file__).parents[1]
SCRIPTS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]

project = "pdvsim"
author = "the pdvsim authors"
copyright = f"{author}, Apache-2.0"
version = release = pdvsim.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "docs/notes/*.md", "notebooks/*.ipynb", "CHANGELOG.md", "CONTRIBUTING.md"]
exclude_patterns = [".*", "build", "dist", "docs/_build", "results"]

nb_execution_mode = "off"  # they are committed with their outputs, and run in the tests
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
highlight_language = "text"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "code"  # docstrings write code in single backticks

html_theme = "furo"
html_title = f"pdvsim {version}"
html_show_sphinx = False
html_copy_source = False
templates_path = ["templates"]
html_additional_pages = {"index": "start.html"}  # the root leads to docs/index.html


class Help(Directive):
    """What a command prints for --help-all, and `pdvsim` for --help."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        program, *rest = self.arguments[0].split()
        module, _, function = SCRIPTS[program].partition(":")
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
            getattr(import_module(module), function)([*rest, "--help-all" if rest else "--help"])
        text = printed.getvalue()
        return [nodes.literal_block(text, text, language="text")]


def with_code_blocks(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Make the indented lines of a docstring a block of code, as they would be in Markdown."""
    text = re.sub(r"\n\n(?=    \S)", "\n\n::\n\n", "\n".join(lines))
    lines[:] = text.split("\n")


def setup(app: Any) -> None:
    os.environ["COLUMNS"] = "88"  # of the help texts, wherever the site is built
    app.add_directive("help", Help)
    app.connect("autodoc-process-docstring", with_code_blocks)
