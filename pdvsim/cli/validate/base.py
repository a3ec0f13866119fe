"""What all kinds of validation share: a class that owns its options, what it compared, and its tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from pdvsim.bench.output import dumps
from pdvsim.calibration.validate.served import SHIPPED, ServedRun, read_runs
from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.sim.config import Contention
from pdvsim.sim.limits import Paths, Placed, check_ranges


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

    key: ClassVar[str | None] = None  # the option that asks for it; None: what is done without one

    def __post_init__(self) -> None:
        check_ranges(self)

    def answer(self) -> Compared:
        """Measurements and what is predicted for them. Prints as tables."""
        raise NotImplementedError

    def execute(self) -> int:
        return self.printed(self.answer())

    def printed(self, comparison: Compared) -> int:
        """Print a comparison as one JSON document or as tables; returns the exit code."""
        print(dumps(comparison.document) if self.json else comparison)
        if comparison.unfinished:
            say("pdvsim", f"interrupted: {comparison.unfinished}")
        return 130 if comparison.unfinished else 0


@dataclass(frozen=True)
class RecordedRuns(ValidationCommand):
    """Real runs on a GPU"""

    runs: Placed[Paths] = ()
    """Files of real runs, one JSON object per line; default: the H200 runs included in pdvsim."""
    own_policies: bool = False
    """Execute the policy files that the runs name as file.py:Class. Use this only for files you trust."""
    held_out: bool = False
    """Use the rows that were held out: no constant was fitted to them. Of real runs, show them too."""
    profile: str | None = None
    """Profile file (JSON) instead of the built-in one of the H200."""
    contention: Contention = "fluid"
    """How streams share the simulated GPU."""
    plot: str | None = None
    """Plot predicted against measured metrics to this file (PNG)."""

    def served_runs(self) -> list[ServedRun]:
        """The real runs to compare."""
        paths = [Path(path) for path in self.runs] or shipped()
        return [run for path in paths for run in read_runs(path, own_policies=self.own_policies)]


def shipped() -> list[Path]:
    """The files of real runs that are included in pdvsim."""
    folder = Path(str(files("pdvsim.calibration"))) / "data" / "h200"
    return [folder / name for name in SHIPPED]
