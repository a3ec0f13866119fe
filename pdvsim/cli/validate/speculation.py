"""`pdvsim validate --speculation`: measured pairs of servers, without and with speculation, against simulations."""

from __future__ import annotations

from dataclasses import dataclass

from pdvsim.cli.validate.base import Compared, MeasuredEngine, MeasuredServers
from pdvsim.decide.measured_pairs import compared_pairs


@dataclass(frozen=True)
class ValidateSpeculation(MeasuredServers):
    """Compare measured pairs of servers, without and with speculation (--speculation)"""

    key = "speculation"

    speculation: MeasuredEngine | None = None
    """Instead of recorded runs: compare measured pairs of servers of this engine, or of all, with simulations."""

    def answer(self) -> Compared:
        return Compared(*compared_pairs(str(self.speculation), self.held_out, self.rows, self.jobs, self.json))
