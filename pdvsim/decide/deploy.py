"""An experiment as commands to start: of engines (`sim/engines`), `pdvsim run` and `realrun`.

Each command states the minimum version it needs. Features that an engine does not have, such as lanes, are not
translated: the command then starts colocated batching at its best.

Not checked: that the command starts. Nothing of vLLM or SGLang is imported or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pdvsim.common.commandline import command_line
from pdvsim.realrun.machine import Machine, refuse
from pdvsim.sim.assembly import ServerParts
from pdvsim.sim.config import Experiment
from pdvsim.sim.engines import ENGINES
from pdvsim.sim.engines.served import Block, Served, served_as
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


def deployment(experiment: Experiment, fixed: Experiment | None = None) -> list[Block]:
    """Commands for an experiment; if engines do not support it, `fixed` is colocated batching at its best k."""
    served = served_as(experiment, fixed)
    if not isinstance(served, Served):
        blocks = [Block("vLLM, SGLang", "", (served,))]
    elif served.experiment.sides is not None:
        blocks = [block for engine in ENGINES.values() for block in engine.apart(served.experiment)]
    else:
        blocks = [block for engine in ENGINES.values() for block in engine.commands(roomed(served))]
    blocks = [_of_engine(block, experiment) for block in blocks]
    return [*blocks, Block("pdvsim", command_line("pdvsim run", experiment)), realrun(experiment)]


def roomed(served: Served) -> Served:
    """A server with the room of its KV cache, to which its context is limited."""
    return served._replace(cache_tokens=ServerParts(served.experiment).kv_capacity)


def _of_engine(block: Block, experiment: Experiment) -> Block:
    """The block with a note where another engine than its own, or one version of it, was predicted."""
    engine = next((one for one in ENGINES.values() if block.label.startswith(one.title)), None)
    predicted, version = experiment.hardware.predicted_engine, experiment.hardware.engine_version
    if engine is None or not block.text or (engine.name == predicted and not version):
        return block
    note = f"the figures are of the engine {predicted}: --engine {engine.name} predicts its own"
    note = f"predicted: {engine.title} {version}" if engine.name == predicted else note
    return replace(block, notes=(*block.notes, note))


def realrun(experiment: Experiment) -> Block:
    """The run of the same policy on this machine's GPU, or why there is none."""
    try:
        refuse(experiment, Machine())
    except ValueError as error:
        return Block("realrun", "", (str(error),))
    return Block("realrun", command_line("realrun", experiment))
