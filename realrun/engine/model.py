"""The transformer: one forward pass over rows and prompt chunks, on the GPU's kernels or their CPU references.

The residual stream is updated in place by the matrix products that feed it. Products of a few tokens run in one
kernel together with the norm before or the activation after them; wider ones go to the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from pdvsim.realrun.engine import reference_ops
from pdvsim.realrun.engine.arch import ModelArchitecture, from_config
from pdvsim.realrun.engine.batch import BACK, ForwardBatch, Gate, Pinned, Residual
from pdvsim.realrun.engine.cache import KVCache, Sequences
from pdvsim.realrun.engine.fp8 import E4M3
from pdvsim.realrun.engine.weights import LayerWeights, Weights, load_weights, random_weights


def operations(device: torch.device) -> ModuleType:
    """The kernels for `device`: Triton's on a GPU, their torch references elsewhere."""
    if device.type != "cuda":
        return reference_ops
    from pdvsim.realrun.engine import gpu

    return gpu


@dataclass(frozen=True, slots=True)
class Hidden:
    """The residual stream after the last block, and where each of its tokens stands."""

    stream: Residual
    slots: Tensor
    positions: Tensor


def fresh(tokens: int, overlap: float, taken: float) -> float:
    """The share of new experts with which `tokens` in a row take as many as `tokens ** overlap` independent ones.

    Each independent token takes the share `taken` of all experts; one of `BACK` has new ones in any case.
    """
    if tokens == 1:
        return 1.0
    share = (1 - (1 - taken) ** ((tokens**overlap - 1) / (tokens - 1))) / taken
    return float(max(0.0, (share - 1 / BACK) / (1 - 1 / BACK)))


class Transformer:
    """A model on one device, for contexts of up to `capacity` tokens."""

    def __init__(self, arch: ModelArchitecture, weights: Weights, capacity: int) -> None:
        self.arch, self.weights, self.capacity = arch, weights, capacity
        self.device, self.dtype = weights.head.device, weights.head.dtype
        dim = arch.spec.head_dim
        if self.device.type == "cuda" and (dim < 16 or dim & (dim - 1)):
            raise ValueError(f"head_dim {dim} is not a power of two from 16 on, as the GPU kernels need")
        self.ops = operations(self.device)
        self.gate = Gate(arch.activation, arch.gate_block)
        self.embedding_scale = arch.embedding_scale(self.dtype)
        self.passes_on: tuple[int, ...] = ()  # layers after which hidden states are kept for a head
        self.overlap: float | None = None  # of experts of a request's tokens, where routing is pinned
        angles = torch.outer(torch.arange(capacity, dtype=torch.float32), arch.rope_frequencies())
        self.cos, self.sin = angles.cos().to(self.device), angles.sin().to(self.device)

    @classmethod
    def random(
        cls, arch: ModelArchitecture, capacity: int, device: torch.device, dtype: torch.dtype, seed: int = 0
    ) -> Transformer:
        """A model of this shape with random weights; the routing to its experts is pinned."""
        model = cls(arch, random_weights(arch, device, dtype, seed), capacity)
        model.overlap = arch.spec.experts.overlap if arch.spec.experts else None
        return model

    @classmethod
    def load(
        cls, folder: Path | str, capacity: int, device: torch.device, dtype: torch.dtype,
        arch: ModelArchitecture | None = None,
    ) -> Transformer:  # fmt: skip
        """The model of a local Hugging Face checkpoint folder, as its configuration or `arch` says."""
        arch = arch or from_config(folder)
        return cls(arch, load_weights(arch, folder, device, dtype), capacity)

    def new_cache(self, pages: int) -> KVCache:
        """An empty KV cache for this model, of 8 bits where its values are quantised."""
        return KVCache(self.arch, pages, self.device, E4M3 if self.arch.spec.kv_dtype_bytes == 1 else self.dtype)

    def forward(self, batch: ForwardBatch, cache: KVCache, sequences: Sequences) -> Hidden:
        """Feed the batch's tokens, writing their keys and values into `cache`."""
        ops, eps = self.ops, self.arch.norm_eps
        stream, slots, positions = ops.embed(
            batch, sequences.tokens, sequences.length, self.weights.embedding, self.embedding_scale
        )
        placed = positions[: batch.row_tokens]
        planned = ops.plan(batch, positions, self.arch.spec.kv_heads) if batch.rows else None
        if batch.kept is not None:
            stream, slots, positions = self._packed(batch, stream, slots, positions)
        passed: list[Tensor] = []
        for at, (w, kv) in enumerate(zip(self.weights.layers, cache.layers, strict=True)):
            qkv = ops.normed(stream, w.qkv, eps, bias=w.qkv_bias)
            if w.qk_norm is not None:
                ops.head_norm(qkv, w.qk_norm, self.arch.spec.heads, self.arch.spec.kv_heads, eps)
            attended = self.attended(qkv, kv, batch, planned, placed, slots, positions)
            stream = ops.added(attended, w.output, stream)
            if w.router is None:
                stream = self.mlp(stream, w)
            else:
                assert self.arch.spec.experts is not None
                taken, pinned = self.arch.spec.experts.per_token, self._pinned(at, batch)
                stream = ops.mixture(stream, w, taken, self.gate, eps, pinned, slots, positions, batch.scratch)
            passed += [stream.x.clone()] * self.passes_on.count(at)
        if passed:
            sequences.keep(batch, slots, positions, torch.cat(passed, dim=1))
        return Hidden(stream, slots, positions)

    def attended(
        self, qkv: Tensor, kv: Tensor, batch: ForwardBatch, planned: Any, placed: Tensor, slots: Tensor,
        positions: Tensor,
    ) -> Tensor:  # fmt: skip
        """Attention of rows, whose tokens are `placed`, and of prompts; their keys and values go into the cache."""
        ops, rows, parts = self.ops, batch.computed, []
        if batch.rows:
            queries = qkv[:rows] if batch.places is None else qkv.index_select(0, batch.places)
            over_rows = ops.decode_attention(queries, kv, batch, planned, placed, self.cos, self.sin)
            parts.append(over_rows if batch.kept is None else over_rows.index_select(0, batch.kept))
        if batch.chunk:
            ops.rope_write(qkv[rows:], kv, batch.pages, slots[rows:], positions[rows:], self.cos, self.sin)
            parts.append(ops.prefill_attention(qkv[rows:], kv, batch, slots[rows:], positions[rows:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def mlp(self, stream: Residual, w: LayerWeights) -> Residual:
        """The stream after a layer's MLP."""
        inside = self.ops.normed(stream, w.gate_up, self.arch.norm_eps, gate=self.gate)
        after: Residual = self.ops.added(inside, w.down, stream)
        return after

    def _packed(
        self, batch: ForwardBatch, stream: Residual, slots: Tensor, positions: Tensor
    ) -> tuple[Residual, Tensor, Tensor]:
        """The tokens that a batch keeps of its rows, and those of prompts."""
        assert batch.kept is not None
        prompts = torch.arange(batch.row_tokens, batch.tokens, dtype=batch.kept.dtype, device=self.device)
        kept = torch.cat((batch.kept, prompts)) if batch.chunk else batch.kept
        squares = None if stream.squares is None else stream.squares[:, kept]
        return Residual(stream.x[kept], squares), slots[kept], positions[kept]

    def _pinned(self, layer: int, batch: ForwardBatch) -> Pinned | None:
        """How routing is pinned in a layer, so that n tokens of a row take n ** overlap times one token's experts."""
        experts = self.arch.spec.experts
        if self.overlap is None or experts is None:
            return None
        taken = experts.per_token / experts.count
        rows, chunk = (fresh(max(width, 1), self.overlap, taken) for width in (batch.tokens_per_row, BACK))
        return Pinned(layer, batch.computed, rows, chunk)

    def logits(self, stream: Residual) -> Tensor:
        """Next-token logits of some tokens of the residual stream, in the model's dtype."""
        logits: Tensor = self.ops.normed(stream, self.weights.head, self.arch.norm_eps)
        return logits
