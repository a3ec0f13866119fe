"""The functions of the Python API. Keywords are the flags of the command of the same name, with underscores.

A function builds its command from its keywords and returns the command's `answer`. Its signature has them, for
completion, help and type checkers; `pdvsim/__init__.pyi` is written from the same signatures (`tests/stubfile.py`).
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, replace
from importlib import import_module
from typing import Any

from pdvsim.common.commandline import MOST_USED, described
from pdvsim.common.options import Option, build, by_name, options, other_spellings
from pdvsim.view.run import Run as Run

COMMANDS = {  # whose options are a function's keywords; imported with the function
    "advise": "advise.AdviseCommand",
    "capacity": "capacity.CapacityCommand",
    "draft_table": "drafting.DraftTableCommand",
    "run": "run.RunOptions",
    "speedup": "drafting.SpeedupCommand",
    "sweep": "sweep.SweepCommand",
    "traffic": "traffic.TrafficCommand",
    "validate": "validate.Comparison",
    "winner_map": "map.MapCommand",
}
PRINTED = (  # options of what is printed and written, and of a folder's sweep
    "check", "config", "continue_on_error", "csv", "dry_run", "html", "json", "output", "overwrite", "resume",
    "save_detailed", "verbose",
)  # fmt: skip
WIDTH = 120
TYPES = {int: "int", float: "float", bool: "bool"}
MAPPINGS = ("vary",)  # lists that may be given as dictionaries


def function(name: str) -> Callable[..., Any]:
    """The function of that name: its keywords are the options of its command, and its help has the main ones."""
    module, _, command = COMMANDS[name].rpartition(".")
    kind: type = getattr(import_module(f"pdvsim.cli.{module}"), command)
    known = {option.name: option for option in options(kind).values() if option.name not in PRINTED}
    answer: Callable[..., Any] = kind.answer  # type: ignore[attr-defined]
    places = [option.name for option in known.values() if option.placed]

    def call(*placed: Any, **given: Any) -> Any:
        if len(placed) > len(places):
            raise TypeError(f"{name}() takes {len(places)} positional arguments, got {len(placed)}")
        given = dict(zip(places, placed, strict=False)) | given
        return build(kind, by_name(given, known, "unknown option")).answer()

    others = [replace(known[name], name=other, default=None) for other, name in other_spellings(known)]
    keywords = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.POSITIONAL_OR_KEYWORD if option.placed else inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if option.default is MISSING else option.default,
            annotation=python_type(option),
        )
        for option in sorted([*known.values(), *others], key=lambda option: not option.placed)
    ]
    returns = inspect.signature(answer).return_annotation
    call.__name__ = call.__qualname__ = name
    call.__signature__ = inspect.Signature(keywords, return_annotation=returns)  # type: ignore[attr-defined]
    main = (f"{name}: {described(known[name])}" for name in MOST_USED if name in known)
    filled = (textwrap.fill(text, WIDTH - 8, subsequent_indent="    ", break_on_hyphens=False) for text in main)
    about = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    returned = answer.__doc__ or "An answer, which prints as text."
    head = f"{about}\n\nReturns: {returned[0].lower()}{returned[1:]}\n\nMain options:\n"
    call.__doc__ = "\n".join([head, *(f"- {text}" for text in filled)])
    return call


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
