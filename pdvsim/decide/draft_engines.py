"""What engines do with draft lengths by batch size (`sim/engines`), by the name of their padding."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from pdvsim.sim.engines import ENGINES as EVERY_ENGINE
from pdvsim.sim.engines.idle import IDLE_DRAFTER as IDLE_DRAFTER
from pdvsim.sim.prices.options import Padding

EngineName = Literal["vllm", "sglang", "tensorrt-llm"]


class EngineFacts(NamedTuple):
    """What an engine does with draft lengths by batch size."""

    padding: Padding
    lowest_k: int  # at k=0 the drafter still runs
    pads: str
    at_0: str


_PADDED = {one.padding: EngineFacts(one.padding, one.lowest_k, one.pads, one.at_0) for one in EVERY_ENGINE.values()}
ENGINES: dict[EngineName, EngineFacts] = {name: _PADDED[name] for name in get_args(EngineName)}
