"""What is to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdvsim.sim.hardware.models import drafter_kind


@dataclass(frozen=True)
class Options:
    """What to measure, where to, and for how long."""

    models: tuple[str, ...]
    pairs: tuple[str, ...]
    output: Path
    budget_s: float = 100.0  # a model
    pair_budget_s: float = 60.0
    quick: bool = False
    seed: int = 0
    device: str = "cuda"
    jobs: int = 0  # processes that compile kernels ahead
    command: str = ""

    def __post_init__(self) -> None:
        for pair in self.pairs:
            if drafter_kind(pair) != "model":
                raise ValueError(f"{pair}: co-running pairs need two models; measure a head alone with --models")

    @property
    def drafts(self) -> set[str]:
        return {pair.partition(":")[0] for pair in self.pairs}
