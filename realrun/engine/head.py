"""A head that drafts from its target's hidden states: EAGLE-3's layer, or one of multi-token prediction.

What it keeps of position t is made of token t + 1 and of the target's hidden state at t (`Sequences.states`), fused of
three layers for EAGLE-3; after the last of these it continues from its own. Embeddings are the target's, and so is the
output of MTP.

Not done: the table from draft tokens to the target's, which costs a look-up; trees of drafts.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdvsim.realrun.engine.arch import ModelArchitecture, headed
from pdvsim.realrun.engine.batch import ForwardBatch, Residual
from pdvsim.realrun.engine.cache import RING, KVCache, Sequences
from pdvsim.realrun.engine.fp8 import plain
from pdvsim.realrun.engine.model import Hidden, Transformer
from pdvsim.realrun.engine.weights import Weights, random_weights
from pdvsim.sim.models.specs import ModelSpec


def layers_read(spec: ModelSpec, layers: int) -> tuple[int, ...]:
    """The target's layers, of `layers`, whose hidden states a head reads: EAGLE-3's three, or the last."""
    if spec.kind == "mtp":
        return (layers - 1,)
    return tuple(sorted((min(2, layers - 1), layers // 2, max(layers - 3, 0))))


class Head(Transformer):
    """A head on one device."""

    @classmethod
    def on(cls, target: Transformer, spec: ModelSpec, seed: int = 0) -> Head:
        """A head with random weights that shares the target's embedding, and has it pass on what it reads."""
        arch = headed(target.arch, spec)
        own = random_weights(arch, target.device, target.dtype, seed)
        head = cls(arch, shared(own, target.weights, spec), target.capacity)
        head.read_from(target)
        return head

    def read_from(self, target: Transformer) -> None:
        """Have a target pass on the hidden states that this head reads."""
        assert self.arch.spec.is_head
        target.passes_on = layers_read(self.arch.spec, target.arch.spec.layers)

    def forward(
        self, batch: ForwardBatch, cache: KVCache, sequences: Sequences, states: Tensor | None = None
    ) -> Hidden:
        """Forward of the batch's tokens with the target's preceding hidden states, or of rows with `states`."""
        ops, w, eps = self.ops, self.weights, self.arch.norm_eps
        spec, layer, kv, rows = self.arch.spec, w.layers[0], cache.layers[0], batch.row_tokens
        ahead = replace(batch, chunk_starts=batch.chunk_starts + 1) if batch.chunk else batch
        embedded, slots, positions = ops.embed(
            ahead, sequences.tokens, sequences.length, w.embedding, self.embedding_scale
        )
        places = positions - 1  # negative where a row begins ahead of its prompt
        places[rows:].clamp_(min=0)  # padding stands at 0
        # here, not where it is needed: attention reads the plan before the kernel just ahead of it has ended
        planned = ops.plan(batch, places, spec.kv_heads) if rows else None
        state = self._passed_on(batch, sequences, slots, places) if states is None else states
        both = torch.cat((ops.unit_norm(embedded.x, eps), ops.unit_norm(state.contiguous(), eps)), dim=1)
        if w.joined is None:
            stream, qkv = Residual(state.clone(), None), F.linear(both, plain(layer.qkv, both.dtype))
        else:
            stream = Residual(F.linear(both, w.joined), None)
            qkv = ops.normed(stream, layer.qkv, eps, bias=layer.qkv_bias)
            if layer.qk_norm is not None:
                ops.head_norm(qkv, layer.qk_norm, spec.heads, spec.kv_heads, eps)
        attended = self.attended(qkv, kv, batch, planned, places[:rows], slots, places)
        return Hidden(self.mlp(ops.added(attended, layer.output, stream), layer), slots, positions)

    def _passed_on(self, batch: ForwardBatch, sequences: Sequences, slots: Tensor, places: Tensor) -> Tensor:
        """The target's hidden states at these places, fused where there are three."""
        assert sequences.states is not None
        assert sequences.chunk_states is not None
        rows = batch.row_tokens
        states = sequences.chunk_states[: batch.chunk]
        if rows:
            states = torch.cat((sequences.states[slots[:rows].long(), places[:rows].long() % RING], states))
        return states if self.weights.fused is None else F.linear(states, self.weights.fused)


def shared(own: Weights, target: Weights, spec: ModelSpec) -> Weights:
    """A head's weights with the target's embedding, and for MTP its output."""
    return replace(own, embedding=target.embedding, head=target.head if spec.kind == "mtp" else own.head)


def states_width(arch: ModelArchitecture) -> int:
    """Numbers of a position that a head reads of its target."""
    return arch.spec.fused_inputs or arch.spec.hidden
