"""Commands and files as blocks of text, printed or on a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pdvsim.sim.engines.served import Block
from pdvsim.sim.engines.served import Served as Served
from pdvsim.sim.engines.served import served_as as served_as
from pdvsim.sim.engines.served import unknown_head as unknown_head
from pdvsim.view.report.sheet import command_html
from pdvsim.view.table import continued


@dataclass(frozen=True)
class Deployment:
    """Every block with its notes, printed or on a page."""

    blocks: Sequence[Block]

    def __str__(self) -> str:
        parts = []
        for block in self.blocks:
            body = [continued(line) for line in block.text.splitlines()]
            parts.append("\n".join([f"{block.label}:", *body, *(f"- {note}" for note in block.notes)]))
        return "\n\n".join(parts)

    def html(self) -> str:
        return "".join(command_html(block.label, block.text, block.notes) for block in self.blocks)
