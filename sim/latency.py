"""How long a work takes alone, and what it asks of the GPU: structured by the roofline, coefficients from a profile.

A forward over N new tokens costs `fixed + larger(weights, N * token) + head + attention`; attention costs the larger of
reading the KV cache and multiplying with it. For a given batch shape all of this is a straight line in the number of
cached tokens, so a shape is priced once and a launch costs one multiplication.

Not modelled: the spread of repeated runs of one kernel, clock throttling, and unequal context lengths inside a batch
beyond their sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pdvsim.sim.core import Chunk, GpuSpec, ModelSpec


@dataclass(frozen=True, slots=True)
class ForwardFit:
    """Seconds that one model's forward pass is made of, on one GPU."""

    fixed_s: float  # per forward, whatever its size
    weights_s: float  # streaming the layers' weights
    token_s: float  # layers' arithmetic per token
    head_weights_s: float
    head_token_s: float
    kv_s: float  # per cached token read
    pair_s: float  # per (query token, context token) pair multiplied
    sharpness: float = float("inf")  # p-norm that joins the memory and compute regimes; inf: the larger of the two
    row_buckets: tuple[int, ...] = ()  # batches are padded up to these sizes; none: no padding

    @classmethod
    def roofline(cls, spec: ModelSpec, gpu: GpuSpec) -> ForwardFit:
        """What the hardware's ceilings allow at best."""
        bandwidth, flops = gpu.bandwidth_bytes_per_s, gpu.flops_per_s
        return cls(
            fixed_s=0.0,
            weights_s=spec.layer_params * spec.dtype_bytes / bandwidth,
            token_s=2 * spec.layer_params / flops,
            head_weights_s=spec.head_params * spec.dtype_bytes / bandwidth,
            head_token_s=2 * spec.head_params / flops,
            kv_s=spec.kv_bytes_per_token / bandwidth,
            pair_s=spec.attention_flops_per_pair / flops,
        )


class Shape(NamedTuple):
    """The price of a batch shape: each figure is `_0 + _1 * cached tokens over all rows`."""

    solo_0: float
    solo_1: float
    bytes_0: float
    bytes_1: float
    flops_0: float
    flops_1: float


class Latency:
    """Prices one model's works on one GPU."""

    def __init__(self, spec: ModelSpec, fit: ForwardFit) -> None:
        self.spec = spec
        self.fit = fit
        self._shapes: dict[tuple[int, int, int], Shape] = {}

    def shape(self, rows: int, tokens: int, steps: int = 1) -> Shape:
        """Price of `steps` forwards over `rows`: the first of `tokens` new tokens a row, the others of one."""
        key = (rows, tokens, steps)
        found = self._shapes.get(key)
        if found is None:
            found = self._shapes[key] = self._price(rows, tokens, steps, (), 0)
        return found

    def carrying(self, rows: int, tokens: int, steps: int, chunks: Sequence[Chunk], first_tokens: bool) -> Shape:
        """The same where the first forward also carries prompt chunks, and gives first tokens where they end."""
        ends = sum(c.start + c.tokens >= c.request.prompt_tokens for c in chunks) if first_tokens else 0
        return self._price(rows, tokens, steps, chunks, ends)

    def _price(self, rows: int, tokens: int, steps: int, chunks: Sequence[Chunk], ends: int) -> Shape:
        padded = self._padded(rows)
        prompt = sum(c.tokens for c in chunks)
        forwards = [self._forward(padded * tokens + prompt, padded * tokens + ends)]
        forwards += [self._forward(padded, padded)] * (steps - 1 if rows else 0)
        groups = [self._rows(rows, tokens, 0)]
        groups += [self._rows(rows, 1, rows * (tokens + step)) for step in range(steps - 1)]
        groups += [self._chunk(c) for c in chunks]
        total = [0.0] * 6
        for part in (*forwards, *groups):
            total = [a + b for a, b in zip(total, part, strict=True)]
        return Shape(*total)

    def _padded(self, rows: int) -> int:
        buckets = self.fit.row_buckets
        if not buckets or not rows:
            return rows
        at = bisect_left(buckets, rows)
        return buckets[at] if at < len(buckets) else rows

    def _larger(self, memory_s: float, compute_s: float) -> float:
        p = self.fit.sharpness
        if p == float("inf"):
            return max(memory_s, compute_s)
        top = max(memory_s, compute_s)
        return top * float((memory_s / top) ** p + (compute_s / top) ** p) ** (1 / p) if top else 0.0

    def _forward(self, tokens: int, logits: int) -> Shape:
        """The linear layers over `tokens`, of which `logits` reach the output projection."""
        fit, spec = self.fit, self.spec
        solo = fit.fixed_s + self._larger(fit.weights_s, fit.token_s * tokens)
        moved = spec.layer_params * spec.dtype_bytes
        flops = 2.0 * spec.layer_params * tokens
        if logits:
            solo += self._larger(fit.head_weights_s, fit.head_token_s * logits)
            moved += spec.head_params * spec.dtype_bytes
            flops += 2.0 * spec.head_params * logits
        return Shape(solo, 0.0, moved, 0.0, flops, 0.0)

    def _rows(self, rows: int, tokens: int, extra: int) -> Shape:
        """Attention of `tokens` queries a row over the cached tokens, of which `extra` are not in the line's argument."""
        read = extra + rows * tokens
        pairs = tokens * extra + rows * tokens * (tokens + 1) / 2
        return self._attention(read, 1.0, pairs, float(tokens))

    def _chunk(self, chunk: Chunk) -> Shape:
        """Causal attention of one prompt stretch over what is cached before it and over itself."""
        n = chunk.tokens
        return self._attention(chunk.start + n, 0.0, n * chunk.start + n * (n + 1) / 2, 0.0)

    def _attention(self, read_0: float, read_1: float, pairs_0: float, pairs_1: float) -> Shape:
        fit, spec = self.fit, self.spec
        kv, pair = spec.kv_bytes_per_token, spec.attention_flops_per_pair
        # memory- or compute-bound by the slope where there is one: keeps the price a straight line
        compute = pairs_1 * fit.pair_s > read_1 * fit.kv_s if read_1 else pairs_0 * fit.pair_s > read_0 * fit.kv_s
        solo_0, solo_1 = (
            (pairs_0 * fit.pair_s, pairs_1 * fit.pair_s) if compute else (read_0 * fit.kv_s, read_1 * fit.kv_s)
        )
        return Shape(solo_0, solo_1, read_0 * kv, read_1 * kv, pairs_0 * pair, pairs_1 * pair)
