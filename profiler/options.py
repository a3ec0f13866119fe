"""What is to be measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pdvsim.sim.limits import Internal, MeasuringSeconds, Range, Seed, check_ranges
from pdvsim.sim.models.presets import drafter_kind


@dataclass(frozen=True)
class Options:
    """What to measure, where to, and for how long."""

    models: tuple[str, ...] = ()
    """Presets to measure alone, e.g. tinyllama-1.1b,llama-2-7b, or shards of them, e.g. llama-3.1-70b/tp4."""
    pairs: tuple[str, ...] = ()
    """Pairs draft:target to measure co-running, with host costs."""
    output: str = "results/profile"
    """Folder for samples.parquet and header.json; if it has some, points that they lack are added."""
    budget_s: MeasuringSeconds = 100.0
    """Maximum seconds per model; skipped points are listed in the header."""
    pair_budget_s: MeasuringSeconds = 60.0
    """Maximum seconds per pair."""
    quick: bool = False
    """Measure only the most important points, with few repeats."""
    seed: Seed = 0
    """Seed of weights, caches and the order of points."""
    jobs: Annotated[int, Range(0, 1024)] = 8
    """Processes that compile kernels in advance; 0: none."""
    device: Internal[str] = "cuda"
    command: Internal[str] = ""

    def __post_init__(self) -> None:
        check_ranges(self)
        for pair in self.pairs:
            if drafter_kind(pair) != "model":
                raise ValueError(f"{pair}: co-running pairs need two models; measure a head alone with --models")

    @property
    def drafts(self) -> set[str]:
        return {pair.partition(":")[0] for pair in self.pairs}
