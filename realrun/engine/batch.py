"""What one forward pass works on: rows of a few tokens each, then stretches of prompt."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdvsim.realrun.engine.arch import Activation
from pdvsim.sim.models.layers import ALIKE

MAX_ROW_TOKENS = 16  # new tokens per row the decode attention kernel packs
BACK = ALIKE  # positions that pinned routing looks back; a token at a multiple of it takes new experts


@dataclass(frozen=True, slots=True)
class Gate:
    """A gated activation over gates and values that alternate in blocks."""

    activation: Activation
    block: int


@dataclass(frozen=True, slots=True)
class Pinned:
    """Routing that is drawn instead of computed, so that tokens read as many distinct experts as the simulator says.

    Each of a token's experts is a new one with a probability, that of rows or of prompts, and else its predecessor's.
    """

    layer: int
    row_tokens: int
    fresh_rows: float
    fresh_chunk: float


@dataclass(frozen=True, slots=True)
class Residual:
    """The residual stream (tokens, hidden); `squares` (parts, tokens), where known, sum to each token's square."""

    x: Tensor
    squares: Tensor | None


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """`rows` x `tokens_per_row` tokens, then up to `chunk` prompt tokens; the index tensors live on the device.

    Row `r` starts at position `length[row_slots[r]] + first`: -1 feeds the newest settled token first, -2 also the one
    before it. Stretch `c` is tokens `chunk_bounds[c] : chunk_bounds[c + 1]` of the chunk part, placed in slot
    `chunk_slots[c]` from position `chunk_starts[c]`. Chunk tokens past the last bound are padding. `pages` is the page
    table. Where rows have unequal numbers of tokens, the layers compute only `kept` of the rows' tokens, and `places`
    says where among these each token of the rows is; attention is over all of them.
    """

    rows: int
    tokens_per_row: int
    chunk: int
    row_slots: Tensor
    chunk_slots: Tensor
    chunk_starts: Tensor
    chunk_bounds: Tensor
    pages: Tensor
    scratch: int
    first: int = -1
    kept: Tensor | None = None
    places: Tensor | None = None

    @property
    def row_tokens(self) -> int:
        return self.rows * self.tokens_per_row

    @property
    def computed(self) -> int:
        """Tokens of rows that the layers compute."""
        return self.row_tokens if self.kept is None else len(self.kept)

    @property
    def tokens(self) -> int:
        return self.row_tokens + self.chunk
