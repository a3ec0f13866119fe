"""Our own engine, that of `realrun`: its times come from measured profiles, and it alone has lanes."""

from __future__ import annotations

from pdvsim.sim.engines.base import InferenceEngine


class Pdvsim(InferenceEngine):
    """The engine of `realrun`."""

    name = "pdvsim"
    title = "pdvsim"
    waiting_weight = 4  # data-parallel ranks as in vLLM


PDVSIM = Pdvsim()
