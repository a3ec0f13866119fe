"""One model on one device: what a forward pass, a verify and a k-step draft compute.

Everything a launch needs besides a few integers per row is already on the device (`Sequences`), so a draft can feed a
verify without its tokens visiting the host.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pdvsim.realrun.engine.batch import ForwardBatch, Residual
from pdvsim.realrun.engine.buckets import CHUNK_BUCKETS, ROW_BUCKETS, most_prompts
from pdvsim.realrun.engine.cache import Sequences
from pdvsim.realrun.engine.head import Head
from pdvsim.realrun.engine.model import Transformer


@dataclass(frozen=True, slots=True)
class ForwardShape:
    """One forward: rows x tokens_per_row, then a chunk part; `emit` where the chunk's ends may yield first tokens.

    `packed`: of the rows' tokens, those that the layers compute, where not all rows have as many; 0: all.
    """

    rows: int
    tokens_per_row: int
    chunk: int = 0
    emit: bool = False
    packed: int = 0


@dataclass(frozen=True, slots=True)
class DraftShape:
    """`steps` one-token forwards in a chain; the first feeds each row's last `width` tokens.

    A model that drafts in parallel has one forward: of these tokens, and of `steps` - 1 mask tokens.
    """

    rows: int
    steps: int
    width: int = 1


LaunchShape = ForwardShape | DraftShape


@dataclass(frozen=True, slots=True)
class Inputs:
    """The integers of a launch, on the device, padded to the shape's rows."""

    row_slots: Tensor
    limits: Tensor
    pins: Tensor
    chunk_slots: Tensor
    chunk_starts: Tensor
    chunk_bounds: Tensor
    chunk_final: Tensor
    page_places: Tensor  # where in the page table, flat
    page_numbers: Tensor  # and what to write there
    drafts: Tensor  # that the host offers, row by row
    kept: Tensor  # of the tokens of rows of unequal length, those that the layers compute
    places: Tensor  # of each token of the rows among these


class Engine:
    """A model with its KV cache, over sequences that may be shared with another engine on the same device."""

    def __init__(
        self,
        model: Transformer,
        sequences: Sequences,
        *,
        row_buckets: tuple[int, ...] = ROW_BUCKETS,
        chunk_buckets: tuple[int, ...] = CHUNK_BUCKETS,
        offered: int = 0,
        packs: int = 0,
    ) -> None:
        self.offered = offered  # drafts per row that the host writes before a verify; 0: a drafter has written them
        self.packs = packs  # most tokens of a row in verifies of rows of unequal length; 0: there are none
        if sequences.capacity > model.capacity:
            raise ValueError(f"sequences of {sequences.capacity} tokens exceed the capacity {model.capacity}")
        self.model, self.sequences = model, sequences
        self.cache = model.new_cache(sequences.pool)
        self.row_buckets, self.chunk_buckets = row_buckets, chunk_buckets

    @property
    def device(self) -> torch.device:
        return self.model.device

    def run(self, shape: LaunchShape, inputs: Inputs) -> Tensor:
        """Do a shape's work; returns the integers the host wants, flattened. Capturable: nothing here waits."""
        self.model.ops.turn_pages(self.sequences.pages, inputs.page_places, inputs.page_numbers)
        if isinstance(shape, DraftShape):
            return self._draft(shape, inputs)
        return self._forward(shape, inputs)

    def _batch(self, inputs: Inputs, rows: int, tokens_per_row: int, chunk: int, first: int) -> ForwardBatch:
        prompts = most_prompts(chunk)
        return ForwardBatch(
            rows=rows,
            tokens_per_row=tokens_per_row,
            chunk=chunk,
            row_slots=inputs.row_slots[:rows],
            chunk_slots=inputs.chunk_slots[:prompts],
            chunk_starts=inputs.chunk_starts[:prompts],
            chunk_bounds=inputs.chunk_bounds[: prompts + 1],
            pages=self.sequences.pages,
            scratch=self.sequences.scratch,
            first=first,
        )

    def _draft(self, shape: DraftShape, inputs: Inputs) -> Tensor:
        if self.model.arch.spec.parallel:
            return self._draft_in_parallel(shape, inputs)
        drafts = []
        newest: Residual | None = None
        for step in range(shape.steps):
            width, first = (shape.width, -shape.width) if step == 0 else (1, step - 1)
            batch = self._batch(inputs, shape.rows, width, 0, first)
            if isinstance(self.model, Head) and newest is not None:
                hidden = self.model.forward(batch, self.cache, self.sequences, newest.x)
            else:
                hidden = self.model.forward(batch, self.cache, self.sequences)
            newest = Residual(hidden.stream.x[width - 1 :: width], None) if width > 1 else hidden.stream
            ids = self.model.ops.argmax(self.model.logits(newest))
            last = slice(width - 1, None, width)
            self.model.ops.append(
                ids, self.sequences.tokens, hidden.slots[last].contiguous(), hidden.positions[last].contiguous()
            )
            drafts.append(ids)
        return torch.stack(drafts, dim=1).flatten()

    def _draft_in_parallel(self, shape: DraftShape, inputs: Inputs) -> Tensor:
        """Mask tokens after each row's last one; every position from that on gives the draft token that follows it."""
        rows, steps, sequences = shape.rows, shape.steps, self.sequences
        width = shape.width + steps - 1
        slots = inputs.row_slots[:rows].long()[:, None]
        places = sequences.length[slots].long() + torch.arange(steps, device=self.device)
        masks = sequences.tokens.new_full((rows, steps - 1), self.model.arch.spec.vocab - 1)  # a graph copies no scalar
        sequences.tokens[slots, places[:, :-1]] = masks
        hidden = self.model.forward(self._batch(inputs, rows, width, 0, -shape.width), self.cache, sequences)
        drafting = hidden.stream.x.view(rows, width, -1)[:, shape.width - 1 :].reshape(rows * steps, -1)
        ids: Tensor = self.model.ops.argmax(self.model.logits(Residual(drafting, None)))
        sequences.tokens[slots, places] = ids.view(rows, steps).to(sequences.tokens.dtype)
        return ids

    def _forward(self, shape: ForwardShape, inputs: Inputs) -> Tensor:
        sequences, rows = self.sequences, shape.rows
        if self.offered and shape.tokens_per_row > 1:
            self._offer(inputs, rows, shape.tokens_per_row - 1)
        batch = self._batch(inputs, rows, shape.tokens_per_row, shape.chunk, -1)
        if shape.packed:
            positions, places = inputs.kept[: shape.packed].long(), inputs.places[: batch.row_tokens].long()
            batch = replace(batch, kept=positions, places=places)
        hidden = self.model.forward(batch, self.cache, sequences)
        stream = hidden.stream
        if shape.emit:
            ends = (batch.chunk_bounds[1:] - 1).clamp(min=0) + batch.computed
            stream = Residual(torch.cat((stream.x[: batch.computed], stream.x[ends])), None)
        elif shape.chunk:
            stream = Residual(stream.x[: batch.computed], None)
        if not len(stream.x):
            return inputs.row_slots[:1]
        logits = self.model.logits(stream)
        results = []
        if rows:
            limits, pins = inputs.limits[:rows], inputs.pins[:rows]
            chosen = self.model.ops.argmax(logits[: batch.computed])
            chosen = (chosen if batch.places is None else chosen[batch.places]).view(rows, shape.tokens_per_row)
            agreed = _leading(chosen[:, :-1] == _drafts_of(batch, sequences))
            settled = self.model.ops.settle(agreed, chosen, batch, limits, pins, sequences.tokens, sequences.length)
            results.append(settled.flatten())
        if shape.emit:
            final = inputs.chunk_final[: len(batch.chunk_slots)] > 0
            first = self.model.ops.argmax(logits[batch.computed :])
            results.append(self._emit(batch, final, hidden.positions[ends], first))
        return torch.cat(results)

    def _offer(self, inputs: Inputs, rows: int, drafts: int) -> None:
        """Write what the host drafted after each row's settled tokens."""
        slots = inputs.row_slots[:rows].long()[:, None]
        places = self.sequences.length[slots].long() + torch.arange(drafts, device=self.device)
        self.sequences.tokens[slots, places] = inputs.drafts.view(-1, self.offered)[:rows, :drafts]

    def _emit(self, batch: ForwardBatch, final: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
        """Append the first output token of each prompt that ends here; returns them, -1 for the others."""
        slots = torch.where(final, batch.chunk_slots, self.sequences.scratch)
        positions = torch.where(final, positions, 0)
        self.model.ops.append(ids, self.sequences.tokens, slots, positions)
        # unfinished prompts rewrite the scratch slot's own length
        self.sequences.length[slots.long()] = positions + 2
        return torch.where(final, ids, -1)


def _drafts_of(batch: ForwardBatch, sequences: Sequences) -> Tensor:
    """The drafts that a verify's rows carry: (rows, tokens_per_row - 1)."""
    slots = batch.row_slots.long()[:, None]
    column = torch.arange(batch.tokens_per_row - 1, device=sequences.device)
    return sequences.tokens[slots, sequences.length[slots] + column]


def _leading(passed: Tensor) -> Tensor:
    """Return how many of each row's first columns are true before the first false one."""
    return passed.int().cumprod(1).sum(1, dtype=torch.int32)


def output_size(shape: LaunchShape) -> int:
    """Return how many integers `Engine.run` returns for a shape."""
    if isinstance(shape, DraftShape):
        return shape.rows * shape.steps
    size = shape.rows * (shape.tokens_per_row + 1) + (most_prompts(shape.chunk) if shape.emit else 0)
    return size or 1
