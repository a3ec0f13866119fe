"""Real signatures of functions whose keywords are the options of a command: for completion, help and type checkers.

A function takes `**options` and builds its command from them. `pdvsim/__init__.pyi`, for editors and type checkers, is
written from the same signatures (`tests/stubfile.py`).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import MISSING, replace
from typing import Any, TypeVar

from pdvsim.common.arguments import MOST_USED, described
from pdvsim.common.options import Option, options, other_spellings

F = TypeVar("F", bound=Callable[..., Any])
WIDTH = 120
TYPES = {int: "int", float: "float", bool: "bool"}
MAPPINGS = ("vary",)  # lists that may be given as dictionaries


def signed(function: F, command: type) -> F:
    """The function with the options of a command as its keywords, and the main ones in its help."""
    known = list(options(command).values())
    others = [replace(options(command)[name], name=other, default=None) for other, name in other_spellings(command)]
    given = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if option.placed else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=python_type(option),
        )
        for option in sorted([*known, *others], key=lambda option: not option.placed)
    ]
    returns = inspect.signature(function).return_annotation
    function.__signature__ = inspect.Signature(given, return_annotation=returns)  # type: ignore[attr-defined]
    function.__doc__ = f"{inspect.getdoc(function)}\n\n{_main_options(known)}"
    return function


def python_type(option: Option) -> str:
    """The values that an option takes in Python, as an annotation."""
    one = TYPES.get(option.one, "str | PathLike[str]")
    if option.values:
        one = f"Literal[{', '.join(map(repr, option.values))}]"
    if option.name == "arch":
        one = "str | type[Policy]"
    if option.is_list:
        one += f" | Sequence[{one}]"
        one += " | Mapping[str, Any]" if option.name in MAPPINGS else ""
    return one if option.default is MISSING or option.default is not None else f"{one} | None"


def _main_options(known: Iterable[Option]) -> str:
    """The options that are used most, with their help."""
    by_name = {option.name: option for option in known}
    shown = (by_name[name] for name in MOST_USED if name in by_name)
    lines = [
        textwrap.fill(f"{one.name}: {described(one)}", WIDTH - 8, subsequent_indent="    ", break_on_hyphens=False)
        for one in shown
    ]
    return "\n".join(["Main options:", "", *(f"- {line}" for line in lines)])
