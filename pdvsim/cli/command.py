"""What all commands are: a dataclass of options that can be executed, of which some exclude others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from pdvsim.common.commandline import parse
from pdvsim.common.options import groups_of
from pdvsim.sim.limits import flag_of, hints_of


@dataclass(frozen=True)
class Command:
    """Options of a command line, and what is done with them. A command that prints no tables is `without` json."""

    config: str | None = field(default=None, kw_only=True)
    """TOML file of flags (arch = "pdv"); the command line takes precedence."""
    json: bool = field(default=False, kw_only=True)
    """Print one JSON document instead of text."""

    @classmethod
    def main(cls, argv: Sequence[str], prog: str) -> int:
        """Run a command line; returns the exit code."""
        return parse(cls, argv, prog).execute()

    def execute(self) -> int:
        """Run the command; returns the exit code."""
        raise NotImplementedError


def check_kinds(config: Any, kinds: Mapping[str, Collection[str]], usual: Collection[str]) -> None:
    """Refuse options that do nothing for the kind of work that a command is asked for.

    An option of `kinds` asks for another kind than the `usual` one; both name the options that it takes.
    """
    command: type = type(config)
    defaults = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(command)}
    given = {name for name, value in defaults.items() if getattr(config, name) != value} - {"config"}
    for kind in kinds:
        if kind in given and given - {kind, *kinds[kind]}:
            raise ValueError(f"{flag_of(kind)} can be combined only with {_flags(command, kinds[kind])}")
    if not given & kinds.keys() and (idle := given - set(usual)):
        needed = " or ".join(flag_of(kind) for kind, taken in kinds.items() if idle & set(taken))
        raise ValueError(f"{_flags(command, idle)} can be used only with {needed}")


def _flags(command: type, names: Collection[str]) -> str:
    """Options as an error lists them; those of groups together."""
    own = [name for name in names if name not in groups_of(command) and "redefined" not in hints_of(command)[name][1]]
    *others, last = [*map(flag_of, sorted(own)), *(["server options"] if len(own) < len(names) else [])]
    return f"{', '.join(others)} and {last}" if others else last
