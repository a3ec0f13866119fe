"""What `pdvsim COMMAND --help` prints: the options most used, then the command's own; all of them with --help-all.

Made from the command's dataclass: names, types and defaults of its fields, and the texts below them in its source.
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
import types
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass
from dataclasses import Field as DataField
from functools import cache
from shutil import get_terminal_size
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

MOST_USED = (
    "arch", "pair", "pairs", "gpu", "gpus", "request_rate", "concurrency", "max_concurrency", "num_prompts", "goodput",
    "dataset_name", "dataset_path", "use_trace_timestamps", "input_len", "output_len", "num_speculative_tokens",
    "acceptance_rate", "num_runs", "output", "json", "config",
)  # fmt: skip
WIDEST = 100
INDENT = 30  # where the texts begin


@dataclass(frozen=True)
class Option:
    """One argument of a command, as its help shows it; `group` is the dataclass it belongs to, "" the command's own."""

    name: str
    hint: Any
    text: str
    default: Any
    group: str
    aliases: tuple[str, ...]
    placed: bool

    @property
    def values(self) -> tuple[str, ...]:
        """The values it takes, where they can be listed."""
        hint = _inner(self.hint)
        return tuple(map(str, get_args(hint))) if get_origin(hint) is Literal else ()

    @property
    def is_text(self) -> bool:
        return _inner(self.hint) is str

    @property
    def is_switch(self) -> bool:
        return self.hint is bool

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}"

    def shown(self) -> str:
        """The flag with what it takes."""
        if self.placed:
            return self.name.upper() + (" ..." if get_origin(self.hint) is tuple else "")
        spelt = ", ".join((*self.aliases, f"--no-{self.flag[2:]}" if self.is_switch and self.default else self.flag))
        return spelt if self.is_switch else f"{spelt} {self._takes()}"

    def _takes(self) -> str:
        if self.values:
            return f"{{{','.join(self.values)}}}"
        word = {int: "N", float: "X"}.get(_inner(self.hint), "TEXT")
        return f"{word},..." if get_origin(self.hint) is tuple else word

    def described(self) -> str:
        """Its text with the default, unless the text or its being left out says that."""
        value = self.default
        said = "default" in self.text or value is MISSING or value is None or value == () or isinstance(value, bool)
        listed = ",".join(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
        return self.text if said else f"{self.text} (default: {listed})"


def help_text(command: type, prog: str, everything: bool = False) -> str:
    """The help of a command: what is most used, or everything by group."""
    found = list(options(command))
    placed = [option for option in found if option.placed]
    flagged = [option for option in found if not option.placed]
    own = [option for option in flagged if not option.group]
    usual = sorted((o for o in flagged if o.name in MOST_USED), key=lambda o: MOST_USED.index(o.name))
    width = min(WIDEST, get_terminal_size().columns)
    places = (o.shown() if o.default is MISSING else f"[{o.shown()}]" for o in placed)
    usage = " ".join([prog, *places, "[OPTIONS]"])
    parts = [f"usage: {usage}", ""]
    for paragraph in (inspect.getdoc(command) or "").split("\n\n"):
        parts += [*textwrap.wrap(paragraph, width, break_on_hyphens=False), ""]
    if placed:
        parts += _section("arguments", placed, width)
    if everything or len(flagged) <= len(MOST_USED):
        parts += _section("options", own, width)
        for group in dict.fromkeys(o.group for o in flagged if o.group):
            parts += _section(group, [o for o in flagged if o.group == group], width)
        return "\n".join(parts[:-1]) + "\n"
    parts += _section("most used", usual, width)
    parts += _section("of this command", [o for o in own if o not in usual], width)
    left = len(flagged) - len({o.flag for o in (*usual, *own)})
    return "\n".join(parts) + f"\n{left} more options: {prog} --help-all\n"


def options(command: type, group: str = "") -> Iterator[Option]:
    """Every argument of a command, an outer one in place of an inner one of its name; hidden ones are left out."""
    hints = get_type_hints(command, include_extras=True)
    mine: list[DataField[Any]] = [f for f in fields(command) if not is_dataclass(_bare(hints[f.name]))]
    texts = _texts(command)
    for field in mine:
        marks = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Suppress in marks:
            continue
        given = [mark for mark in marks if hasattr(mark, "aliases")]
        text = next((mark.help for mark in given if mark.help), texts.get(field.name, ""))
        aliases = tuple(alias for mark in given for alias in mark.aliases or ())
        hint = _bare(hints[field.name])
        yield Option(field.name, hint, text, field.default, group, aliases, tyro.conf.Positional in marks)
    hidden = {field.name for field in mine}
    for field in fields(command):
        inner = _bare(hints[field.name])
        if is_dataclass(inner):
            marks = getattr(hints[field.name], "__metadata__", ())
            part_of_it = any(getattr(mark, "name", None) == "" for mark in marks)
            for option in options(inner, group if part_of_it else f"{field.name} ({_first_line(inner)})"):  # type: ignore[arg-type]
                if option.name not in hidden:
                    yield option


def _section(title: str, found: list[Option], width: int) -> list[str]:
    lines = [f"{title}:"] if found else []
    for option in found:
        text = textwrap.wrap(option.described(), max(20, width - INDENT), break_on_hyphens=False)
        head = f"  {option.shown()}"
        if len(head) > INDENT - 2:
            lines.append(head)
            head = ""
        lines += [f"{head if not at else '':<{INDENT}}{line}".rstrip() for at, line in enumerate(text or [""])]
    return [*lines, ""] if lines else []


@cache
def _texts(command: type) -> dict[str, str]:
    """The text below each field of a dataclass and of those it extends."""
    found: dict[str, str] = {}
    for cls in reversed(command.__mro__):
        if not is_dataclass(cls):
            continue
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        for line, below in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(below, ast.Expr):
                text = ast.literal_eval(below.value)
                found[line.target.id] = " ".join(text.split("\n\n")[0].split())
    return found


def _bare(hint: Any) -> Any:
    """A type without what tyro is told about it."""
    return hint.__origin__ if hasattr(hint, "__metadata__") else hint


def _inner(hint: Any) -> Any:
    """The type of one value: of a list's items, of what may also be None."""
    if get_origin(hint) is tuple:
        return get_args(hint)[0]
    if get_origin(hint) in (Union, types.UnionType):
        return next(part for part in get_args(hint) if part is not type(None))
    return hint


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else str(value)


def _first_line(command: type) -> str:
    """The contract of a class, to stand in brackets."""
    text = (inspect.getdoc(command) or "").split("\n")[0].rstrip(".")
    return text[:1].lower() + text[1:]
