"""What all commands are: a dataclass of options that can be executed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from pdvsim.common.commandline import parse


@dataclass(frozen=True)
class Command:
    """Options of a command line, and what is done with them. A command that prints no tables is `without` json."""

    key: ClassVar[str | None] = None  # of a kind of a command: the option that asks for it; None: the usual kind

    config: str | None = field(default=None, kw_only=True)
    """TOML file of flags (arch = "pdv"); the command line takes precedence."""
    json: bool = field(default=False, kw_only=True)
    """Print one JSON document instead of text."""

    @classmethod
    def main(cls, argv: Sequence[str], prog: str) -> int:
        """Run a command line; returns the exit code."""
        return parse(cls, argv, prog).execute()

    def show(self, document: Any, text: object) -> None:
        """Print a result: one JSON document, or its text."""
        from pdvsim.bench.output import dumps

        print(dumps(document) if self.json else text)

    def execute(self) -> int:
        """Run the command; returns the exit code."""
        raise NotImplementedError
