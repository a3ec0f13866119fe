"""`pdvsim/options.py`, made from the commands' own fields: `python tests/optionfiles.py` writes it anew."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pdvsim.cli.advise import AdviseOptions
from pdvsim.cli.args import SweepOptions, flags
from pdvsim.cli.capacity import CapacityOptions
from pdvsim.cli.draft_table import DraftTableOptions
from pdvsim.cli.map import MapOptions
from pdvsim.sim.config import Experiment

FILE = Path(__file__).parents[1] / "pdvsim" / "options.py"
COMMANDS: dict[str, type] = {
    "RunKeywords": Experiment,
    "SweepKeywords": SweepOptions,
    "CapacityKeywords": CapacityOptions,
    "AdviseKeywords": AdviseOptions,
    "DraftTableKeywords": DraftTableOptions,
    "MapKeywords": MapOptions,
}
CALLS = {"DraftTableKeywords": "draft_table", "MapKeywords": "winner_map"}
HEAD = '''"""The keywords of `pdvsim.run` and the other functions of `pdvsim`, for editors.

Made from the commands\' own fields by tests/optionfiles.py, and held to them by the tests. What each means is in
`pdvsim run --help` and its like.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from pdvsim.sim.policies.base import Policy
'''


def spelt(name: str, hint: Any) -> str:
    """A keyword's type as it is written."""
    origin, inside = get_origin(hint), get_args(hint)
    if name == "arch":
        one = "str | type[Policy]"
        return f"{one} | Sequence[{one}]" if origin is tuple else one
    if name == "vary":
        return "Mapping[str, Sequence[Any]]"
    if origin is tuple:
        one = spelt("", inside[0])
        return f"{one} | Sequence[{one}]"
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys("None" if part is type(None) else spelt(name, part) for part in inside))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, inside))}]".replace("'", '"')
    if hint is str and name.endswith(("path", "profile", "tokenizer", "trace")):
        return "str | os.PathLike[str]"
    return str(hint.__name__)


def source() -> str:
    """The file as it should be, before formatting."""
    known = {name: _keywords(command) for name, command in COMMANDS.items()}
    shared = dict(set.intersection(*(set(found.items()) for found in known.values())))
    parts = [HEAD, _class("Keywords(TypedDict", "All of them have these.", shared)]
    for name, found in known.items():
        call = CALLS.get(name, name.removesuffix("Keywords").lower())
        own = {keyword: hint for keyword, hint in found.items() if keyword not in shared}
        parts.append(_class(f"{name}(Keywords", f"Of `pdvsim.{call}`.", own))
    return "".join(parts)


def _keywords(command: type) -> dict[str, str]:
    names = {flag: flag.replace("-", "_") for flag in flags(command)}
    return {names[flag]: spelt(names[flag], hint) for flag, hint in flags(command).items()}


def _class(head: str, text: str, keywords: dict[str, str]) -> str:
    lines = [f"    {keyword}: {hint}\n" for keyword, hint in sorted(keywords.items())]
    return "".join([f'\n\nclass {head}, total=False):\n    """{text}"""\n\n', *lines])


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")
