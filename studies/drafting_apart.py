"""Published systems that draft on GPUs of their own, simulated: `python studies/drafting_apart.py`.

Models, GPUs, batch, draft length, fan and acceptance are as published, where they are stated. Targets are sharded over
two or four GPUs. Where plain decoding at batch 1 was published, all times of the target are scaled to it. A setting
that is not stated is simulated over a range, which is printed.

Not modelled: the systems' own host time and kernels; PEARL's verification of the first draft before the others are
made; fans that differ by position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.prices.links import LinkName
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.view.table import grid

APART = ("prefill=1", "decode=0", "verify=1")
ROOM = 10**6  # tokens of KV cache: none of these runs is short of it
TURNS = 3  # requests of a run for each concurrent one


@dataclass(frozen=True)
class OverlapCell:
    """One published speed-up and its simulated range."""

    what: str
    published: str
    least: float
    most: float


@dataclass(frozen=True)
class OverlapSource:
    """One publication: its setting, what was assumed, its figures, and what explains differences."""

    title: str
    setting: str
    assumed: str
    cells: tuple[OverlapCell, ...]
    why: str


@dataclass(frozen=True)
class ShardedPair:
    """A pair on cards, its target sharded over some and its drafter on one."""

    pair: str
    card: str
    shards: int
    output_len: int
    input_len: int
    link: LinkName = "nvlink4"
    faster: float = 1.0  # speed of their target relative to ours

    def profile(self, experiment: Experiment) -> Profile:
        """The profile of the GPU, with the target's times divided by `faster`."""
        known, target = covering_profile(experiment), experiment.pair.target
        return replace(known, models={**known.models, target.name: known.fit(target).scaled(1 / self.faster)})

    def tokens_per_s(self, arch: Arch, batch: int, rate: float, k: int, apart: bool = False, **server: Any) -> float:
        """Output tokens per second in a closed loop of `batch`."""
        traffic = Traffic(
            "random", num_prompts=TURNS * batch, max_concurrency=batch, input_len=self.input_len,
            output_len=self.output_len,
        )  # fmt: skip
        experiment = Experiment(
            arch, traffic, Acceptance(rate), Server(self.pair, k, **server),
            Hardware(
                self.card, band=False, kv_capacity_tokens=ROOM, place=APART if apart else (), link=self.link,
                tensor_parallel_size=self.shards, draft_tensor_parallel_size=1,
            ),
        )  # fmt: skip
        suits = applicable(experiment)
        return float(summarise(simulate(suits, profile=self.profile(suits)))["output_throughput"])

    def plain(self, batch: int) -> float:
        """Tokens per second without drafts."""
        return self.tokens_per_s("autoregressive", batch, 0.5, 0)


def shipped(name: str) -> str:
    """The configuration of a model that is no preset."""
    return str(Path(__file__).parent / "data" / f"{name}.json")


def nano_pearl(lengths: Iterable[int] = (6, 10, 14), batches: Iterable[int] = (1, 8, 16, 32)) -> OverlapSource:
    """A drafter with chains on one H200, the target on two."""
    published = {  # by batch: speed-up, tokens per chain, tokens per second of plain decoding
        1: (5.08, 12.75, 44.29),
        8: (4.49, 12.74, 341.70),
        16: (3.82, 13.48, 655.49),
        32: (2.61, 13.00, 1206.26),
    }
    ours = ShardedPair("llama-3.2-1b:llama-3.1-70b", "h200", 2, 200, 150)
    bench = replace(ours, faster=published[1][2] / ours.plain(1))
    cells, worst = [], 0.0
    for batch in batches:
        speed_up, chain, plain = published[batch]
        rate = 1 - 1 / chain
        speeds = [
            bench.tokens_per_s("pdv-ahead", batch, rate, k, True, ahead_fan=0, ahead_miss=miss)
            for k in lengths
            for miss in ("draft", "plain")
        ]
        gain = max(speeds) / bench.plain(batch)
        worst = max(worst, abs(bench.plain(batch) / plain - 1))
        cells.append(OverlapCell(f"batch {batch}, over plain decoding", f"{speed_up:.2f}x", gain, gain))
    return OverlapSource(
        "nano-PEARL (github.com/smart-lty/nano-PEARL, docs/bench_summary.md)",
        "Llama-3.2-1B on one H200, Llama-3.1-70B on two, HumanEval, 200 tokens",
        f"the target {bench.faster:.2f} times as fast as ours on two GPUs, as in their plain decoding at batch 1; "
        f"acceptance 1 - 1/(their tokens per chain); the best of k = {', '.join(map(str, lengths))}, as their engine "
        "chooses it",
        tuple(cells),
        f"Plain decoding of larger batches is within {worst:.0%} of theirs, so the rounds make the difference. PEARL "
        "verifies the first draft token of mispredicted rows while it drafts the others; here these rows miss a round. "
        "That is the likely reason (not tested).",
    )


def saguaro(rates: Iterable[float] = (0.7, 0.8, 0.9)) -> OverlapSource:
    """A drafter with fans on one H100, the target on four."""
    bench = ShardedPair("llama-3.2-1b:llama-3.1-70b", "h100-sxm", 4, 512, 150)
    over, plain = [], []
    for rate in rates:
        ahead = max(
            bench.tokens_per_s("pdv-ahead", 1, rate, 7, True, ahead_fan=3, ahead_miss=miss)
            for miss in ("draft", "plain")
        )
        over.append(ahead / bench.tokens_per_s("colocated", 1, rate, 6))
        plain.append(ahead / bench.plain(1))
    rate_range = f"acceptance {min(rates)} to {max(rates)}"
    return OverlapSource(
        "SSD, Saguaro (arXiv 2603.03251; settings of github.com/tanishqkumar/ssd, README)",
        "Llama-3.2-1B on one H100, Llama-3.1-70B on four, batch 1, k = 7 and fan 3 against k = 6, 512 tokens",
        f"{rate_range}, as it is not stated; exponent r = 1",
        (
            OverlapCell(f"over sequential drafting, {rate_range}", "up to 2x", min(over), max(over)),
            OverlapCell(f"over plain decoding, {rate_range}", "up to 5x", min(plain), max(plain)),
        ),
        "Their fan is larger for likelier outcomes, so that the same number of rows covers more of them. That is the "
        "likely reason (not tested).",
    )


def minedraft(rates: Iterable[float] = (0.5, 0.7, 0.9), lengths: Iterable[int] = (1, 3, 5)) -> OverlapSource:
    """Two alternating batches, the drafter on a fifth L40S."""
    bench = ShardedPair(f"{shipped('qwen3-0.6b')}:{shipped('qwen3-32b')}", "l40s", 4, 256, 256, "pcie4")
    halves = {"verify_gather": "never", "max_num_seqs": 32, "max_draft_batch": 16, "max_verify_batch": 16}
    gains: dict[int, list[float]] = {16: [], 32: []}
    for rate in rates:
        for k in lengths:
            ours = bench.tokens_per_s("pdv", 32, rate, k, True, **halves)
            for batch, ratios in gains.items():
                ratios.append(ours / bench.tokens_per_s("colocated", batch, rate, k))
    setting = f"k = {min(lengths)} to {max(lengths)}, acceptance {min(rates)} to {max(rates)}"
    return OverlapSource(
        "MineDraft (arXiv 2603.18016; settings of github.com/electron-shaders/MineDraft, scripts and engine)",
        "Qwen3-0.6B on one card, Qwen3-32B on four, 256 tokens in and out, vLLM without CUDA graphs: two batches of 16 "
        "that take turns, 32 concurrent requests, against one of 16",
        "L40S for their L40, over PCIe 4; acceptance, which is not stated",
        (
            OverlapCell(
                f"over sequential drafting at concurrency 16, {setting}", "up to 1.75x", min(gains[16]), max(gains[16])
            ),
            OverlapCell("over sequential drafting at concurrency 32, the same", "", min(gains[32]), max(gains[32])),
        ),
        "Without CUDA graphs a step of a 0.6B drafter is limited by the host, so there is probably more drafting time "
        "to hide than here (not tested). One batch of 32 reads the target's weights once, two batches read them twice.",
    )


SOURCES: tuple[Callable[[], OverlapSource], ...] = (nano_pearl, saguaro, minedraft)


def overlap_text(sources: Iterable[OverlapSource]) -> str:
    """The report as tables."""
    blocks = []
    for source in sources:
        rows = [
            [cell.what, cell.published, f"{cell.least:.2f}x" + f" to {cell.most:.2f}x" * (cell.most != cell.least)]
            for cell in source.cells
        ]
        head = f"{source.title}\n{source.setting}\nAssumed: {source.assumed}."
        blocks.append(f"{head}\n{grid(['speed-up', 'published', 'simulated'], rows)}\n{source.why}")
    return "\n\n".join(blocks)


if __name__ == "__main__":
    print(overlap_text(source() for source in SOURCES))
