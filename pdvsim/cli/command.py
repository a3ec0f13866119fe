"""What all commands are: a dataclass of options that can be executed."""

from __future__ import annotations

from collections.abc import Sequence

from pdvsim.common.commandline import parse


class Command:
    """Options of a command line, and what is done with them."""

    @classmethod
    def main(cls, argv: Sequence[str], prog: str) -> int:
        """Run a command line; returns the exit code."""
        return parse(cls, argv, prog).execute()

    def execute(self) -> int:
        """Run the command; returns the exit code."""
        raise NotImplementedError
