# mypy: disable-error-code="no-untyped-call"
# (torch leaves its events untyped.)
"""How near the hardware the engine runs: `python -m pdvsim.realrun.bench`, on any CUDA card.

Measures the card's copy bandwidth and bf16 matrix rate, then verify, draft step and prefill of the chosen presets as a
server replays them, on random weights, caches, tokens and contexts. The floor of a forward is the sum, over its
linear layers and its attention, of the larger of bytes / bandwidth and flops / rate; activations are not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from pdvsim.common.files import write_whole
from pdvsim.realrun.engine.arch import PRESETS, preset
from pdvsim.realrun.engine.cache import HEADROOM, PAGE, Sequences
from pdvsim.realrun.engine.engine import Engine
from pdvsim.realrun.engine.graphs import GraphLane, PromptChunk, Ticket
from pdvsim.realrun.engine.model import Transformer
from pdvsim.sim.core import ModelSpec

VERIFY_TOKENS = 5
PROMPT_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the card can do, measured."""

    device: str
    bandwidth_bytes_per_s: float
    flops_per_s: float


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


def gpu_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median device time of one call of `run`."""
    spans = []
    for _ in range(repeats + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        run()
        end.record()
        spans.append((start, end))
    torch.cuda.synchronize()
    return float(np.median([a.elapsed_time(b) for a, b in spans[3:]])) / 1000


def measure_ceilings(device: torch.device) -> Ceilings:
    """Copy bandwidth (bytes read and written) and bf16 matrix rate, on random data."""
    source = torch.randn(2**30, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    copy_s = gpu_seconds(lambda: target.copy_(source), 10)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))
    product_s = gpu_seconds(lambda: torch.mm(a, b), 10)
    name = torch.cuda.get_device_name(device)
    return Ceilings(name, 2 * source.numel() * 2 / copy_s, 2 * 8192**3 / product_s)


def floor_s(
    spec: ModelSpec, ceilings: Ceilings, tokens: int, head_tokens: int, pairs: float, context_tokens: float
) -> float:
    """Seconds no forward can beat: `tokens` through the blocks, `head_tokens` through the head.

    `pairs` counts (query, key) pairs and `context_tokens` the cached tokens read, over all rows.
    """
    bandwidth, rate = ceilings.bandwidth_bytes_per_s, ceilings.flops_per_s

    def linear(params: int, through: int) -> float:
        return max(params * spec.dtype_bytes / bandwidth, 2 * params * through / rate)

    attention = max(context_tokens * spec.kv_bytes_per_token / bandwidth, pairs * spec.attention_flops_per_pair / rate)
    return linear(spec.layer_params, tokens) + linear(spec.head_params, head_tokens) + attention


class ForwardBench:
    """One preset on the card, with as many slots as its rows need and memory allows."""

    def __init__(self, name: str, ceilings: Ceilings, rows: Sequence[int], contexts: Sequence[int], seed: int) -> None:
        device, arch = torch.device("cuda"), preset(name)
        self.arch, self.ceilings, self.rng = arch, ceilings, np.random.default_rng(seed)
        capacity = -(-int(max([*contexts, PROMPT_TOKENS]) * 1.1 + HEADROOM) // 64) * 64
        self.model = Transformer.random(arch, capacity, device, torch.bfloat16, seed)
        free, _ = torch.cuda.mem_get_info(device)
        affordable = int(free * 0.8 // (arch.spec.kv_bytes_per_token * capacity)) - 1
        self.slots = min(max(rows) + 8, affordable)
        self.sequences = Sequences(self.slots, capacity, device)
        self.sequences.deal(range(self.slots), -(-capacity // PAGE), self.rng)
        self.sequences.tokens.random_(0, arch.spec.vocab)
        self.engine = Engine(self.model, self.sequences, row_buckets=tuple(rows), chunk_buckets=(PROMPT_TOKENS,))
        self.engine.cache.randomize(seed)

    def measure(self, rows: Sequence[int], contexts: Sequence[int], repeats: int) -> Iterator[ForwardTiming]:
        lane = GraphLane(self.engine)
        lane.timing = True
        for context in contexts:
            for count in (r for r in rows if r <= self.slots):
                yield self._rows("verify", lane, count, VERIFY_TOKENS, context, repeats)
            for count in (r for r in rows if r <= self.slots):
                yield self._rows("draft", lane, count, 1, context, repeats)
        yield self._prefill(lane, max(5, repeats // 3))

    def _rows(self, work: str, lane: GraphLane, rows: int, tokens: int, context: int, repeats: int) -> ForwardTiming:
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

        times_ms = _times_ms(launch, repeats)
        known = float(np.mean([lengths[slots].sum() for slots in chosen])) + rows * (tokens - 1)
        floor = floor_s(self.arch.spec, self.ceilings, rows * tokens, rows * tokens, known * tokens, known)
        return self._result(work, rows, context, times_ms, floor)

    def _prefill(self, lane: GraphLane, repeats: int) -> ForwardTiming:
        def launch() -> Ticket:
            slot = int(self.rng.integers(self.slots))
            return lane.prefill([PromptChunk(slot, 0, PROMPT_TOKENS, True)])

        pairs = PROMPT_TOKENS * (PROMPT_TOKENS + 1) / 2
        floor = floor_s(self.arch.spec, self.ceilings, PROMPT_TOKENS, 1, pairs, PROMPT_TOKENS)
        return self._result("prefill", 1, PROMPT_TOKENS, _times_ms(launch, repeats), floor)

    def _result(self, work: str, rows: int, context: int, times_ms: list[float], floor: float) -> ForwardTiming:
        p10, median, p90 = (float(v) for v in np.percentile(times_ms, (10, 50, 90)))
        return ForwardTiming(self.arch.spec.name, work, rows, context, median, p10, p90, floor * 1000)


def _times_ms(launch: Callable[[], Ticket], repeats: int) -> list[float]:
    tickets = [launch() for _ in range(repeats + 5)]
    return [1000 * ticket.gpu_s() for ticket in tickets[5:]]


def main(argv: Sequence[str] | None = None) -> int:
    """Time the engine's forwards and print them over their floor; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pdvsim.realrun.bench", description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="*", default=["tinyllama-1.1b", "llama-2-7b"], help=", ".join(PRESETS))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1500])
    parser.add_argument("--repeats", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="PATH", help="write the results there as JSON ('-' for standard output)")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("no CUDA device: this benchmark measures one", file=sys.stderr)
        return 1
    ceilings = measure_ceilings(torch.device("cuda"))
    print(
        f"{ceilings.device}: copy {ceilings.bandwidth_bytes_per_s / 1e12:.2f} TB/s, "
        f"bf16 {ceilings.flops_per_s / 1e12:.0f} TFLOP/s; torch {torch.__version__}"
    )
    print(f"{'model':16} {'work':8} {'rows':>4} {'ctx':>5} {'ms':>8} {'p10-p90':>15} {'floor':>8} {'ratio':>6}")
    results = []
    for name in options.models:
        torch.cuda.empty_cache()
        bench = ForwardBench(name, ceilings, options.rows, options.contexts, options.seed)
        for r in bench.measure(options.rows, options.contexts, options.repeats):
            results.append(r)
            print(
                f"{r.model:16} {r.work:8} {r.rows:4} {r.context:5} {r.median_ms:8.3f} "
                f"{r.p10_ms:7.3f}-{r.p90_ms:7.3f} {r.floor_ms:8.3f} {r.ratio:6.2f}",
                flush=True,
            )
        del bench
    if options.json:
        text = json.dumps(
            {"ceilings": asdict(ceilings), "results": [{**asdict(r), "ratio": r.ratio} for r in results]}, indent=1
        )
        if options.json == "-":
            print(text)
        else:
            write_whole(Path(options.json), f"{text}\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
