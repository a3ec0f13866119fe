"""How long a forward of the published programs takes, and the one stream it runs on.

Not modelled: attention, and the spread of repeated forwards.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import simpy

from pdvsim.published.job import K
from pdvsim.sim.core import Pair


class Forwards(Protocol):
    """The forwards of one round and of a prefill, in order, in seconds."""

    def draft(self, rows: int, length: int) -> list[float]: ...
    def verify(self, rows: int, length: int) -> list[float]: ...


@dataclass(frozen=True, slots=True)
class WholeSequence:
    """No KV cache: every forward computes all `rows` x `length` tokens again, padded to the longest row.

    Its launches and its arithmetic are added: a fixed cost a layer, the host's.
    """

    pair: Pair
    layer_s: float  # host time to launch one layer
    flops_per_s: float

    def draft(self, rows: int, length: int) -> list[float]:
        """One forward per draft token, each over one more token."""
        draft = self.pair.draft
        flops = 2 * (draft.layer_params + draft.head_params) * rows / self.flops_per_s
        return [draft.layers * self.layer_s + flops * (length + i) for i in range(K)]

    def verify(self, rows: int, length: int) -> list[float]:
        """One forward over the sequence and its drafts."""
        target = self.pair.target
        flops = 2 * (target.layer_params + target.head_params) * rows / self.flops_per_s
        return [target.layers * self.layer_s + flops * (length + K)]


@dataclass(frozen=True, slots=True)
class Cached:
    """With a KV cache and short sequences every forward at batch 1 takes the same time: it reads the weights."""

    draft_s: float
    target_s: float

    def draft(self, rows: int, length: int) -> list[float]:
        assert rows == 1, "nothing was batched"
        return [self.draft_s] * K

    def verify(self, rows: int, length: int) -> list[float]:
        """Two forwards: the drafts are checked, then the correction enters the cache."""
        assert rows == 1, "nothing was batched"
        return [self.target_s] * 2

    def prefill(self) -> list[float]:
        """Both models prefill the prompt."""
        return [self.draft_s, self.target_s]


class Stream:
    """One GPU stream: forwards run one at a time, in the order of their submission."""

    def __init__(self, env: simpy.Environment) -> None:
        self.env = env
        self.free_s = env.now

    def run(self, seconds: float) -> simpy.Event:
        """An event for the end of a forward submitted now."""
        self.free_s = max(self.env.now, self.free_s) + seconds
        return self.env.timeout(self.free_s - self.env.now)
