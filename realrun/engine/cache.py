"""Where tokens and their keys and values live: one slot per request, shared by every lane of the device.

A slot's keys lie together per head, position after position, so that a decode kernel streams them. Rolling back is
lowering a length: what lies beyond is overwritten before it is read. One extra slot takes the writes of padded rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pdvsim.realrun.engine.arch import ModelArchitecture

HEADROOM = 32  # positions past a request's last token that a verify of discarded drafts may still write


class KVCache:
    """Keys and values of one model: `layers[i]` is (2, slots + 1, kv_heads, capacity, head_dim)."""

    def __init__(
        self, arch: ModelArchitecture, slots: int, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        spec = arch.spec
        self.slots, self.capacity = slots, capacity
        shape = (spec.layers, 2, slots + 1, spec.kv_heads, capacity, spec.head_dim)
        # zeros, not empty: a masked-out position multiplies a probability of 0, and 0 x NaN would not be 0
        self.data = torch.zeros(shape, device=device, dtype=dtype)
        self.layers: list[Tensor] = list(self.data.unbind(0))

    def randomize(self, seed: int = 0) -> None:
        """Fill the cache with normal values, for timing: reading zeros is faster than reading data."""
        generator = torch.Generator(device=self.data.device).manual_seed(seed)
        for layer in self.layers:
            layer.normal_(generator=generator)


class Sequences:
    """Every slot's tokens and how many of them count; draft and target engines share one.

    `length[s]` counts the tokens settled so far. The last of them has been produced but not yet fed to a model, so
    the target's cache holds positions 0 .. length - 2. Drafts are written beyond `length`; verifying moves it.
    """

    def __init__(self, slots: int, capacity: int, device: torch.device) -> None:
        self.slots, self.capacity, self.device = slots, capacity, device
        self.scratch = slots
        self.tokens = torch.zeros(slots + 1, capacity, dtype=torch.int32, device=device)
        # the scratch slot keeps this length forever, so that padded rows have a position to work at
        self.length = torch.full((slots + 1,), 2, dtype=torch.int32, device=device)
        self.proposals: Tensor | None = None
        self._streams = 0

    def keep_proposals(self, drafts: int, vocab: int, dtype: torch.dtype) -> None:
        """Make room for the drafter's logits behind each draft, which judging sampled drafts needs."""
        self.proposals = torch.zeros(self.slots + 1, drafts, vocab, dtype=dtype, device=self.device)

    @property
    def usable(self) -> int:
        """Tokens a request may have in all, prompt and output."""
        return self.capacity - HEADROOM

    def fresh_seed(self, seed: int) -> int:
        """A seed of its own for each lane: a drafter and its judge must not share coins."""
        self._streams += 1
        return int(np.random.SeedSequence([seed, self._streams]).generate_state(1, np.uint32)[0])

    def put(self, slot: int, tokens: Sequence[int], settled: bool = False) -> None:
        """Write a request's tokens from position 0; with `settled` its length too, for a request resumed elsewhere."""
        if not 0 <= slot < self.slots:
            raise ValueError(f"slot {slot} is not one of {self.slots}")
        if not 0 < len(tokens) <= self.usable:
            raise ValueError(f"{len(tokens)} tokens do not fit a slot of {self.usable}")
        host = torch.tensor(tokens, dtype=torch.int32)
        if self.device.type == "cuda":
            host = host.pin_memory()
        self.tokens[slot, : len(tokens)].copy_(host, non_blocking=True)
        if settled:
            self.length[slot : slot + 1].fill_(len(tokens))

    def get(self, slot: int) -> list[int]:
        """The settled tokens of a slot. Waits for the device."""
        return [int(t) for t in self.tokens[slot, : int(self.length[slot])].tolist()]
