"""Forward times relative to the hardware's limits: `python studies/engine_floors.py [MODEL ...]`, on a CUDA GPU.

Measures the card's copy bandwidth and bf16 matrix rate, then verify, draft step and prefill of the chosen presets as a
server replays them, on random weights, caches, tokens and contexts. The floor of a forward is the sum, over its
linear layers and its attention, of the larger of bytes / bandwidth and flops / rate; activations are not counted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pdvsim.profiler.provenance import card
from pdvsim.realrun.engine.arch import preset
from pdvsim.realrun.engine.cache import HEADROOM, PAGE, Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk, Ticket
from pdvsim.realrun.engine.model import Transformer
from pdvsim.sim.models.specs import ModelSpec

MODELS = ("tinyllama-1.1b", "llama-2-7b")
ROWS, CONTEXTS, REPEATS = (1, 8, 32, 64), (512, 1500), 25
VERIFY_TOKENS = 5
PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class ForwardTiming:
    """One forward's time against its floor."""

    model: str
    work: str
    rows: int
    context: int
    median_ms: float
    p10_ms: float
    p90_ms: float
    floor_ms: float

    @property
    def ratio(self) -> float:
        return self.median_ms / self.floor_ms


def floor_s(
    spec: ModelSpec, ceilings: Mapping[str, float], tokens: int, head_tokens: int, pairs: float, context_tokens: float
) -> float:
    """Lower bound of a forward in seconds: `tokens` through the blocks, `head_tokens` through the head.

    `pairs` counts (query, key) pairs and `context_tokens` the cached tokens read, over all rows.
    """
    bandwidth, rate = ceilings["bandwidth_bytes_per_s"], ceilings["flops_per_s"]

    def linear(params: int, through: int) -> float:
        return max(params * spec.dtype_bytes / bandwidth, 2 * params * through / rate)

    attention = max(context_tokens * spec.kv_bytes_per_token / bandwidth, pairs * spec.attention_flops_per_pair / rate)
    return linear(spec.layer_params, tokens) + linear(spec.head_params, head_tokens) + attention


class ForwardBench:
    """One preset on the card, with as many slots as its rows need and memory allows."""

    def __init__(self, name: str, ceilings: Mapping[str, float]) -> None:
        device, arch = torch.device("cuda"), preset(name)
        self.arch, self.ceilings, self.rng = arch, ceilings, np.random.default_rng(0)
        capacity = -(-int(max([*CONTEXTS, PROMPT_TOKENS]) * 1.1 + HEADROOM) // 64) * 64
        self.model = Transformer.random(arch, capacity, device, torch.bfloat16, 0)
        free, _ = torch.cuda.mem_get_info(device)
        affordable = int(free * 0.8 // (arch.spec.kv_bytes_per_token * capacity)) - 1
        self.slots = min(max(ROWS) + 8, affordable)
        self.sequences = Sequences(self.slots, capacity, device)
        self.sequences.deal(range(self.slots), -(-capacity // PAGE), self.rng)
        self.sequences.tokens.random_(0, arch.spec.vocab)
        self.engine = Engine(self.model, self.sequences, row_buckets=ROWS, chunk_buckets=(PROMPT_TOKENS,))
        self.engine.cache.randomize(0)

    def measure(self) -> Iterator[ForwardTiming]:
        lane = GraphLane(self.engine)
        lane.timing = True
        for context in CONTEXTS:
            for work, tokens in (("verify", VERIFY_TOKENS), ("draft", 1)):
                for rows in (r for r in ROWS if r <= self.slots):
                    yield self._rows(work, lane, rows, tokens, context)
        yield self._prefill(lane)

    def _rows(self, work: str, lane: GraphLane, rows: int, tokens: int, context: int) -> ForwardTiming:
        lengths = self.rng.integers(int(context * 0.9), int(context * 1.1), self.slots).astype(np.int32)
        settled = torch.from_numpy(lengths).to(self.sequences.device)
        chosen: list[np.ndarray[tuple[int, ...], np.dtype[np.intp]]] = []

        def launch() -> Ticket:
            chosen.append(self.rng.permutation(self.slots)[:rows])
            with lane.on_stream():
                self.sequences.length[: self.slots].copy_(settled)
            if work == "draft":
                return lane.draft(chosen[-1].tolist(), 1)
            return lane.verify(chosen[-1].tolist(), tokens - 1)

        times_ms = _times_ms(launch)
        known = float(np.mean([lengths[slots].sum() for slots in chosen])) + rows * (tokens - 1)
        floor = floor_s(self.arch.spec, self.ceilings, rows * tokens, rows * tokens, known * tokens, known)
        return self._result(work, rows, context, times_ms, floor)

    def _prefill(self, lane: GraphLane) -> ForwardTiming:
        def launch() -> Ticket:
            slot = int(self.rng.integers(self.slots))
            return lane.prefill([PromptChunk(slot, 0, PROMPT_TOKENS, True)])

        pairs = PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2
        floor = floor_s(self.arch.spec, self.ceilings, PROMPT_TOKENS, 1, pairs, PROMPT_TOKENS)
        return self._result("prefill", 1, PROMPT_TOKENS, _times_ms(launch), floor)

    def _result(self, work: str, rows: int, context: int, times_ms: list[float], floor: float) -> ForwardTiming:
        p10, median, p90 = (float(v) for v in np.percentile(times_ms, (10, 50, 90)))
        return ForwardTiming(self.arch.spec.name, work, rows, context, median, p10, p90, floor * 1000)


def _times_ms(launch: Callable[[], Ticket]) -> list[float]:
    tickets = [launch() for _ in range(REPEATS + 5)]
    return [1000 * ticket.gpu_s() for ticket in tickets[5:]]


def main(models: Sequence[str]) -> None:
    """Time the engine's forwards and print them over their floor."""
    gpu = card(torch.device("cuda")).model_dump()
    print(
        f"{gpu['name']}: copy {gpu['bandwidth_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"bf16 {gpu['flops_per_s'] / 1e12:.0f} TFLOP/s; torch {torch.__version__}"
    )
    print(f"{'model':16} {'work':8} {'rows':>4} {'ctx':>5} {'ms':>8} {'p10-p90':>15} {'floor':>8} {'ratio':>6}")
    for name in models or MODELS:
        torch.cuda.empty_cache()
        for r in ForwardBench(name, gpu).measure():
            print(
                f"{r.model:16} {r.work:8} {r.rows:4} {r.context:5} {r.median_ms:8.3f} "
                f"{r.p10_ms:7.3f}-{r.p90_ms:7.3f} {r.floor_ms:8.3f} {r.ratio:6.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main(sys.argv[1:])
