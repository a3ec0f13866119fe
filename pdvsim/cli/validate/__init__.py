"""`pdvsim validate`: compare measurements with simulations. Each kind of validation is a class that owns its options.

- `runs`: real runs of `realrun`, all of them (the default); `launches`: one of them (--run); `serve`: made first
- `bench`: a benchmark of your own server; `silicon`: published measurements of servers; `speculation`: pairs of servers
"""

from __future__ import annotations

from dataclasses import dataclass

from pdvsim.cli.command import Command
from pdvsim.cli.validate.base import ValidationCommand
from pdvsim.cli.validate.bench import ValidateBench
from pdvsim.cli.validate.runs import ValidateLaunches, ValidateRuns
from pdvsim.cli.validate.serve import ValidateServing
from pdvsim.cli.validate.servers import ValidateSilicon, ValidateSpeculation


@dataclass(frozen=True)
class ValidateCommand(Command):
    """Compare real serving runs with simulations of the same experiments and seeds."""

    kinds = (ValidateServing, ValidateLaunches, ValidateBench, ValidateSilicon, ValidateSpeculation, ValidateRuns)


@dataclass(frozen=True)
class Comparison(ValidationCommand):
    """Compare measurements with simulations; nothing is served or written."""

    kinds = (ValidateBench, ValidateSilicon, ValidateSpeculation, ValidateRuns)
    without = ("config", "json", "plot", "html", "write")
