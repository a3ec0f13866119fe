"""Where tokens and their keys and values live: a slot per request, and pages of its cache, shared by every lane.

A page holds the keys and values of `PAGE` positions; a slot's row of the page table names its pages in order. Rolling
back is lowering a length: what lies beyond is overwritten before it is read. One extra slot takes the writes of padded
rows; it has the pool's first pages, which no other slot is given.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdvsim.realrun.engine.arch import ModelArchitecture
from pdvsim.realrun.engine.batch import MAX_ROW_TOKENS, ForwardBatch

PAGE = 16  # positions
SPARE_ENTRIES = 8
SCRATCH_PAGES = 4  # as far as padded rows write
RING = 64  # positions whose hidden states are kept for a head: more than two rounds
HEADROOM = 32  # positions past a request's last token that a verify of discarded drafts may still write


class KVCache:
    """Keys and values of one model: `layers[i]` is (2, pages, kv_heads, PAGE, head_dim)."""

    def __init__(self, arch: ModelArchitecture, pages: int, device: torch.device, dtype: torch.dtype) -> None:
        spec = arch.spec
        if pages * PAGE * spec.kv_heads * spec.head_dim >= 2**31:
            raise ValueError(f"{pages} pages of {spec.name} are more than the kernels can address")
        self.pages = pages
        shape = (spec.layers, 2, pages, spec.kv_heads, PAGE, spec.head_dim)
        # zeros, not empty: a masked-out position multiplies a probability of 0, and 0 x NaN would not be 0
        self.data = torch.zeros(shape, device=device, dtype=dtype)
        self.layers: list[Tensor] = list(self.data.unbind(0))

    def randomize(self, seed: int = 0) -> None:
        """Fill the cache with normal values, for timing: reading zeros is faster than reading data."""
        generator = torch.Generator(device=self.data.device).manual_seed(seed)
        for layer in self.layers:
            for half in layer:  # a tensor of over 2^31 elements in one go is not every kernel's size
                values = torch.empty(half.shape, device=half.device, dtype=torch.float16)
                half.copy_(values.normal_(generator=generator))


class Sequences:
    """Every slot's tokens and how many of them count; draft and target engines share one.

    `length[s]` counts the tokens settled so far. The last of them has been produced but not yet fed to a model, so
    the target's cache holds positions 0 .. length - 2. Drafts are written beyond `length`; verifying moves it.

    Without a `pool` of pages to be handed out, every slot has its own from the start, in order.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device, pool: int | None = None) -> None:
        self.slots, self.capacity, self.device = slots, capacity, device
        self.scratch = slots
        held = -(-capacity // PAGE)  # pages of a full slot
        self.pool = SCRATCH_PAGES + slots * held if pool is None else pool  # pages, the scratch slot's included
        # kernels look up whole blocks of positions: some entries past a slot's last
        table = torch.zeros(slots + 1, -(-held // SPARE_ENTRIES) * SPARE_ENTRIES + SPARE_ENTRIES, dtype=torch.int32)
        if pool is None:
            table[:slots, :held] = SCRATCH_PAGES + torch.arange(slots * held).view(slots, held)
        table[slots] = torch.arange(table.shape[1]) % SCRATCH_PAGES
        self.pages = table.to(device)
        self.tokens = torch.zeros(slots + 1, capacity, dtype=torch.int32, device=device)
        # the scratch slot keeps this length forever, so that padded rows have a position to work at
        self.length = torch.full((slots + 1,), 2, dtype=torch.int32, device=device)
        self.states: Tensor | None = None  # of the target, at a slot's last RING positions, for a head that drafts
        self.chunk_states: Tensor | None = None  # of the prompts that it read last

    def deal(self, slots: range, each: int, rng: np.random.Generator, among: range | None = None) -> None:
        """Give every slot of a range `each` pages of the pool or of some, which lie about as after long service."""
        among = among or range(SCRATCH_PAGES, self.pool)
        pages = among.start + rng.permutation(len(among))[: len(slots) * each]
        dealt = torch.from_numpy(pages.astype(np.int32)).view(len(slots), each)
        self.pages[slots.start : slots.stop, :each] = dealt.to(self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # lanes' streams do not wait for this one

    def keep_states(self, width: int, chunk: int, dtype: torch.dtype) -> None:
        """Make room for what the target passes on to a head: of a slot's last positions, and of a forward's prompts."""
        self.states = torch.zeros(self.slots + 1, RING, width, dtype=dtype, device=self.device)
        self.chunk_states = torch.zeros(chunk, width, dtype=dtype, device=self.device)

    def keep(self, batch: ForwardBatch, slots: Tensor, positions: Tensor, states: Tensor) -> None:
        """Keep a forward's hidden states: of its rows, of its prompts, and the last of these as rows' are."""
        assert self.states is not None
        assert self.chunk_states is not None
        rows = batch.computed
        if rows:
            self.states[slots[:rows].long(), positions[:rows].long() % RING] = states[:rows]
        if batch.chunk:
            self.chunk_states[: batch.chunk] = states[rows:]
            ends = batch.chunk_bounds[1:].long()[:, None] - 1 - torch.arange(MAX_ROW_TOKENS, device=self.device)
            last = rows + ends.clamp(0, batch.chunk - 1).flatten()
            self.states[slots[last].long(), positions[last].long() % RING] = states[last]

    def turn(self, place: int, pages: Sequence[int]) -> None:
        """Write pages into the table, from a place of the flat table on."""
        host = torch.tensor(pages, dtype=torch.int32)
        if self.device.type == "cuda":
            host = host.pin_memory()
        self.pages.view(-1)[place : place + len(pages)].copy_(host, non_blocking=True)

    def get(self, slot: int) -> list[int]:
        """The settled tokens of a slot. Waits for the device."""
        return [int(t) for t in self.tokens[slot, : int(self.length[slot])].tolist()]
