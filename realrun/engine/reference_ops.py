"""Every kernel in plain torch: what runs on the CPU, and the oracle the Triton kernels are tested against.

Signatures are those of `kernels`, `linear` and `attention`.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
from torch import Tensor

from pdvsim.realrun.engine.batch import BACK, ForwardBatch, Gate, Pinned, Residual
from pdvsim.realrun.engine.cache import PAGE
from pdvsim.realrun.engine.fp8 import Fp8, Matrix, plain, quantised
from pdvsim.realrun.engine.weights import LayerWeights


def turn_pages(pages: Tensor, places: Tensor, numbers: Tensor) -> None:
    """Write the pages that slots were given since the last launch into the page table."""
    pages.view(-1)[places.long()] = numbers


def embed(
    batch: ForwardBatch, tokens: Tensor, length: Tensor, table: Tensor, scale: float
) -> tuple[Residual, Tensor, Tensor]:
    """Each token's slot, its position, and its scaled embedding."""
    device = tokens.device
    row = torch.arange(batch.row_tokens, device=device)
    slots = batch.row_slots.long()[row // max(batch.tokens_per_row, 1)]
    positions = length.long()[slots] + batch.first + row % max(batch.tokens_per_row, 1)
    if batch.chunk:
        i = torch.arange(batch.chunk, device=device)
        bounds = batch.chunk_bounds.long()
        stretch = torch.searchsorted(bounds[1:], i, right=True)
        real = stretch < len(batch.chunk_slots)
        stretch = stretch.clamp(max=len(batch.chunk_slots) - 1)
        chunk_slots = torch.where(real, batch.chunk_slots.long()[stretch], batch.scratch)
        chunk_positions = torch.where(real, batch.chunk_starts.long()[stretch] + i - bounds[stretch], 0)
        slots, positions = torch.cat((slots, chunk_slots)), torch.cat((positions, chunk_positions))
    known = positions.clamp(min=0)  # a head's row may begin ahead of its prompt
    x = (table[tokens[slots, known].long()].float() * scale).to(table.dtype)
    return Residual(x, x.float().pow(2).sum(-1)[None]), slots.int(), positions.int()


def unit_norm(x: Tensor, eps: float) -> Tensor:
    """x over its root mean square; computed in float32."""
    return F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)


def head_norm(qkv: Tensor, weight: Tensor, heads: int, kv_heads: int, eps: float) -> None:
    """Norm every head of q and of k in place, each with its own weight; v stays."""
    dim = weight.shape[1]
    for kind, (first, last) in enumerate(((0, heads), (heads, heads + kv_heads))):
        part = qkv[:, first * dim : last * dim]
        part.copy_((unit_norm(part.unflatten(-1, (-1, dim)), eps) * weight[kind]).flatten(1).to(qkv.dtype))


def gated(gate_up: Tensor, gate: Gate) -> Tensor:
    """activation(gate) times up, which alternate in blocks along the last dimension."""
    gates, ups = gate_up.float().unflatten(-1, (-1, 2, gate.block)).unbind(-2)
    active = F.silu(gates) if gate.activation == "silu" else F.gelu(gates, approximate="tanh")
    out: Tensor = (active * ups).flatten(1).to(gate_up.dtype)
    return out


def normed(
    stream: Residual,
    weight: Matrix,
    eps: float,
    *,
    bias: Tensor | None = None,
    gate: Gate | None = None,
) -> Tensor:
    """norm(stream) @ weight.T, then bias, then gated activation. The norm's own weight is folded into `weight`."""
    y = F.linear(_as_seen(unit_norm(stream.x, eps), weight), plain(weight, stream.x.dtype), bias)
    return y if gate is None else gated(y, gate)


def added(y: Tensor, weight: Matrix, stream: Residual) -> Residual:
    """Add y @ weight.T to the stream in place; returns it with what is now known of its squares."""
    return Residual(stream.x.addmm_(_as_seen(y, weight), plain(weight, y.dtype).t()), None)


def _as_seen(x: Tensor, weight: Matrix) -> Tensor:
    """Return the input of a product with a matrix: for a quantised one, quantised by token."""
    return plain(quantised(x), x.dtype) if isinstance(weight, Fp8) else x


def route(
    logits: Tensor, taken: int, pinned: Pinned | None, slots: Tensor, positions: Tensor, scratch: int
) -> tuple[Tensor, Tensor]:
    """Each token's `taken` experts, by logit or pinned, and the softmax of their logits: both (tokens, taken).

    Padding, in the slot `scratch`, takes none: the number after the last expert's.
    """
    wide = logits.float()
    ids = wide.topk(taken, dim=-1).indices if pinned is None else _drawn(logits, taken, pinned, slots, positions)
    padding = (slots == scratch)[:, None]
    return torch.where(padding, logits.shape[1], ids).int(), wide.gather(1, ids).softmax(-1)


def _drawn(logits: Tensor, taken: int, pinned: Pinned, slots: Tensor, positions: Tensor) -> Tensor:
    """Experts by the hash of a token's slot and position: the j-th is one of the j-th share of all experts."""
    tokens, block = len(logits), logits.shape[1] // taken
    j = torch.arange(taken, device=logits.device)[None, :, None]
    places = positions.long()[:, None, None] - torch.arange(BACK, device=logits.device)
    row = torch.arange(tokens, device=logits.device)[:, None, None] < pinned.row_tokens
    fresh = torch.where(row, pinned.fresh_rows, pinned.fresh_chunk)
    stream = _mixed(slots.long()[:, None, None] * 1024 + pinned.layer) * 64 + j
    drawn = (_mixed(stream + 2 * places * 0x9E3779B1) >> 8) / 16777216.0
    since = torch.where((drawn < fresh) | (places % BACK == 0), places, -1).amax(-1)
    return j[..., 0] * block + _mixed(stream[..., 0] + (2 * since + 1) * 0x9E3779B1) % block


def _mixed(x: Tensor) -> Tensor:
    """A 32-bit integer hash."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x846CA68B) & 0xFFFFFFFF
    return x ^ (x >> 16)


def group(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Pairs (token * taken + place) in the order of their experts, and where each expert's begin: experts + 1."""
    flat = ids.flatten()
    counts = torch.bincount(flat.long(), minlength=experts)[:experts]
    return flat.sort(stable=True).indices.int(), F.pad(counts.cumsum(0), (1, 0)).int()


def mixture(
    stream: Residual, w: LayerWeights, taken: int, gate: Gate, eps: float, pinned: Pinned | None, slots: Tensor,
    positions: Tensor, scratch: int,
) -> Residual:  # fmt: skip
    """Route each normed token to `taken` experts, and add their weighted outputs to the stream in place."""
    assert w.router is not None
    x = unit_norm(stream.x, eps)
    ids, shares = route(F.linear(x, w.router), taken, pinned, slots, positions, scratch)
    gate_up, down = plain(w.gate_up, x.dtype), plain(w.down, x.dtype)
    for expert in ids[ids < len(gate_up)].unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        hidden = gated(F.linear(_as_seen(x[token], w.gate_up), gate_up[expert]), gate)
        y = F.linear(_as_seen(hidden, w.down), down[expert])
        stream.x.index_add_(0, token, (y.float() * shares[token, place, None]).to(x.dtype))
    return Residual(stream.x, None)


def rotate(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x (tokens, heads, head_dim) with each pair (d, d + head_dim / 2) turned by its position's angle."""
    c, s = cos[positions.long()][:, None], sin[positions.long()][:, None]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * c - high * s, high * c + low * s), dim=-1).to(x.dtype)


def _bits(x: Tensor) -> Tensor:
    """Return the same memory; of 8-bit floats, which torch does not index on the CPU, as integers."""
    return x.view(torch.uint8) if x.element_size() == 1 else x


def rope_write(
    qkv: Tensor, kv: Tensor, pages: Tensor, slots: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> None:
    """Rotate q in place; rotate k and write k and v into the cache at each token's slot and position."""
    _, _, kv_heads, _, dim = kv.shape
    slots, positions = slots.long(), positions.long()
    turned, v = qkv.unflatten(-1, (-1, dim)).split((qkv.shape[1] // dim - kv_heads, kv_heads), dim=1)
    turned = rotate(turned, positions, cos, sin)
    q, k = turned[:, :-kv_heads], turned[:, -kv_heads:]
    qkv[:, : q.shape[1] * dim] = q.flatten(1)
    page, inside = pages[slots, positions // PAGE].long(), positions % PAGE
    _bits(kv)[:, page, :, inside] = _bits(torch.stack((k, v), dim=1).to(kv.dtype))


def attend(q: Tensor, kv: Tensor, pages: Tensor, slots: Tensor, positions: Tensor) -> Tensor:
    """Attention of rotated q (tokens, q_width) at each slot's `positions` (slots, tokens of each), up to each."""
    _, _, kv_heads, _, dim = kv.shape
    dtype, q = q.dtype, q.view(*positions.shape, kv_heads, -1, dim).transpose(1, 2).float()
    held = _bits(kv)[:, pages[slots.long(), : int(positions.max()) // PAGE + 1].long()].view(kv.dtype).float()
    k, v = held.transpose(2, 3).flatten(3, 4).unbind(0)
    seen = torch.arange(k.shape[2], device=q.device) <= positions.repeat_interleave(q.shape[3], 1)[:, None, :, None]
    attended = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=seen)
    return attended.view(q.shape).transpose(1, 2).reshape(positions.numel(), -1).to(dtype)


def plan(batch: ForwardBatch, positions: Tensor, kv_heads: int) -> Tensor:
    """Nothing: here each row is read in one go."""
    return positions


def decode_attention(
    qkv: Tensor, kv: Tensor, batch: ForwardBatch, planned: Tensor, positions: Tensor, cos: Tensor, sin: Tensor
) -> Tensor:
    """Rope, cache write and attention of the row part: `qkv` and `positions` are its tokens only.

    What stands ahead of a prompt (a negative position) is neither written nor seen; its outputs are never read.
    """
    slots = batch.row_slots.repeat_interleave(batch.tokens_per_row).where(positions >= 0, batch.scratch)
    positions = positions.clamp(min=0)
    rope_write(qkv, kv, batch.pages, slots, positions, cos, sin)
    q = qkv[:, : qkv.shape[1] - 2 * kv.shape[2] * kv.shape[4]].contiguous()
    return attend(q, kv, batch.pages, batch.row_slots, positions.view(batch.rows, -1))


def prefill_attention(qkv: Tensor, kv: Tensor, batch: ForwardBatch, slots: Tensor, positions: Tensor) -> Tensor:
    """Attention of the chunk part, already rotated and written, over its stretches' whole contexts; padding's is 0."""
    q = qkv[:, : qkv.shape[1] - 2 * kv.shape[2] * kv.shape[4]].contiguous()
    out = torch.zeros_like(q)
    for begin, end in itertools.pairwise(batch.chunk_bounds.tolist()):
        if begin < end:
            here = slice(begin, end)
            out[here] = attend(q[here], kv, batch.pages, slots[begin : begin + 1], positions[None, here])
    return out


def argmax(logits: Tensor) -> Tensor:
    """The index of each row's largest logit, the lowest one where several tie."""
    top = logits.amax(-1, keepdim=True)
    index = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == top, index, logits.shape[-1]).amin(-1).int()


def append(ids: Tensor, tokens: Tensor, slots: Tensor, positions: Tensor) -> None:
    """Write each id into its slot, one position further."""
    tokens[slots.long(), positions.long() + 1] = ids


def settle(
    agreed: Tensor, chosen: Tensor, batch: ForwardBatch, limits: Tensor, pins: Tensor, tokens: Tensor, length: Tensor
) -> Tensor:
    """Accept a prefix of each row's drafts, append the token that follows, and move the row's length.

    `agreed[r]` drafts passed the model's test; `limits[r]` were offered; `pins[r]`, where not negative, decides in the
    test's place. `chosen[r, a]` follows `a` accepted drafts. Returns (rows, 1 + tokens_per_row): the accepted count,
    then the new tokens, the rest -1.
    """
    width = batch.tokens_per_row
    slots = batch.row_slots.long()
    start = length[slots].long()
    accepted = torch.where(pins >= 0, pins, agreed).minimum(limits).clamp(0, width - 1).long()
    follow = chosen.gather(1, accepted[:, None])[:, 0]
    column = torch.arange(width, device=tokens.device)
    drafts = tokens[slots[:, None], start[:, None] + column]
    new = torch.where(column < accepted[:, None], drafts, follow[:, None])
    new = torch.where(column <= accepted[:, None], new, -1)
    tokens[slots, start + accepted] = follow
    length[slots] = torch.where(slots == batch.scratch, start, start + accepted + 1).int()
    return torch.cat((accepted[:, None].int(), new), dim=1)
