"""What all kinds of validation share: a class that owns its options, what it compared, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.sim.limits import check_ranges


@dataclass(frozen=True, repr=False)
class Compared:
    """A comparison of measurements with predictions. Prints as tables."""

    document: Mapping[str, Any]
    text: str
    unfinished: str = ""  # after Ctrl-C: how much was compared

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ValidationCommand(Command):
    """One kind of validation."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def answer(self) -> Compared:
        """Measurements and what is predicted for them. Prints as tables."""
        raise NotImplementedError

    def execute(self) -> int:
        return self.printed(self.answer())

    def printed(self, comparison: Compared) -> int:
        """Print a comparison as one JSON document or as tables; returns the exit code."""
        self.show(comparison.document, comparison)
        if comparison.unfinished:
            say("pdvsim", f"interrupted: {comparison.unfinished}")
        return 130 if comparison.unfinished else 0
