"""`pdvsim compare`: two benchmarks of one load: with and without drafts, before and after, or of two engines."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdvsim.cli.validate.base import Compared
from pdvsim.cli.validate.bench import BenchedServer, compare_benches
from pdvsim.sim.limits import Paths, Placed


@dataclass(frozen=True)
class CompareCommand(BenchedServer):
    """Compare two results of `vllm bench serve` of the same load, and with --pair or --model also their simulations."""

    results: Placed[Paths] = field(kw_only=True)
    """Two results: the second is compared with the first. One without drafts is the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.results) != 2:
            raise ValueError(f"compare takes two results of `vllm bench serve`, got {len(self.results)}")
        asked = self.arch, self.num_speculative_tokens, self.acceptance, self.server, self.hardware
        if self.pair is None and BenchedServer(None, *asked) != BenchedServer():
            raise ValueError("to simulate these results, name their models: give --model or --pair draft:target")

    def answer(self) -> Compared:
        return compare_benches(self.results, self)
