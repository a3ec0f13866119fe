"""The layers of a model without attention, at every number of tokens that a forward of the engine can have.

The library chooses another kernel every few tokens, so the products' time by tokens is no smooth line: a forward of 548
tokens of Llama-3.1-8B takes longer than one of 576. Whole forwards are measured at few of these sizes. Here two layers
run without attention, which is so fast that all sizes can be measured; the fit takes their course from one whole
forward to the next from it. Up to `SMALL_TOKENS` the engine's own kernels run, whose course is smooth.

Mixtures of experts are left out, whose time depends on the experts that are read, and heads, which have one layer.
"""

from __future__ import annotations

import random
from dataclasses import replace
from time import monotonic, perf_counter, sleep

import torch

from pdvsim.profiler.samples import Part
from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.batch import Residual
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, ROW_BUCKETS, SMALL_TOKENS
from pdvsim.realrun.engine.model import Transformer

MOST_WIDTH = 9  # new tokens per row
LAYERS = 2  # more than the card's cache holds
BURST_S, REST_S = 0.008, 0.008  # replayed for so long, then the card rests: it is measured at full clock
FEWEST, MOST, REPEATS = 3, 12, 3  # replays of a burst, bursts


def sizes() -> list[int]:
    """Tokens of all forwards: rows times new tokens per row, and prompts."""
    rows = {count * width for count in ROW_BUCKETS for width in range(1, MOST_WIDTH + 1)}
    tokens = {row + chunk for row in (0, *rows) for chunk in (0, *CHUNK_BUCKETS)}
    return sorted(size for size in tokens if SMALL_TOKENS < size <= CHUNK_BUCKETS[-1])


class Stack:
    """A few layers of a model, ready to run over any number of tokens."""

    def __init__(self, arch: ModelArchitecture, device: torch.device, seed: int) -> None:
        spec = arch.spec
        self.layers = spec.layers
        few = replace(arch, spec=replace(spec, layers=min(LAYERS, spec.layers), vocab=min(spec.vocab, 1024)))
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = Transformer.random(few, 64, device, dtype, seed)
        self._width = arch.q_width
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def seconds(self, tokens: int) -> list[float]:
        """Return the time of all layers, several times."""
        model, (x, attended) = self.model, self.inputs(tokens)
        share = self.layers / len(model.weights.layers)
        if model.device.type != "cuda":
            begin = perf_counter()
            self.run(x, attended)
            return [share * (perf_counter() - begin)]
        assert self._stream is not None
        torch.cuda.synchronize(model.device)
        with torch.cuda.stream(self._stream):
            self.run(x, attended)
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()  # torch.cuda.graph would collect garbage every time
            graph.capture_begin()
            self.run(x, attended)
            graph.capture_end()
            count = min(MOST, max(FEWEST, int(BURST_S / _replayed_s(graph, 2))))
            times_s = []
            for _ in range(REPEATS):
                sleep(REST_S)
                times_s.append(share * _replayed_s(graph, count))
        return times_s

    def inputs(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states, and what attention adds to them."""
        model = self.model
        sizes = (model.arch.spec.hidden, self._width)
        hidden, attended = (torch.randn(tokens, size, device=model.device, dtype=model.dtype) for size in sizes)
        return hidden, attended

    def run(self, x: torch.Tensor, attended: torch.Tensor) -> None:
        """The layers once."""
        ops, stream = self.model.ops, Residual(x, None)
        for w in self.model.weights.layers:
            ops.normed(stream, w.qkv, self.model.arch.norm_eps, bias=w.qkv_bias)
            stream = self.model.mlp(ops.added(attended, w.output, stream), w)


def _replayed_s(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of a replay, the mean of `count` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    begin.record()
    for _ in range(count):
        graph.replay()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000 / count


def measure_layers(part: Part, arch: ModelArchitecture, device: torch.device, seed: int, budget_s: float) -> bool:
    """Measure the sizes that a part lacks, as far as the time goes; returns whether there were any."""
    known = part.done("layers", "chunk_tokens")
    todo = [tokens for tokens in sizes() if (tokens,) not in known]
    if arch.spec.experts is not None or arch.spec.is_head or not todo:
        return False
    random.Random(seed).shuffle(todo)
    begin, stack = monotonic(), Stack(arch, device, seed)
    for tokens in todo:
        if monotonic() - begin > budget_s:
            break
        for repeat, seconds in enumerate(stack.seconds(tokens)):
            part.add(
                section="layers", model=arch.spec.name, kind="prefill", chunk_tokens=tokens, bucket_chunk=tokens,
                chunks=1, repeat=repeat, seconds=seconds,
            )  # fmt: skip
    return True
