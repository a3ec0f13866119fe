"""What all commands are: a dataclass of options that can be executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pdvsim.common.commandline import parse


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
