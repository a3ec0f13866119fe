"""Blocks of a KV cache known by the hash of their prefix: who uses them, and which are evicted first.

A pure data structure, for the simulated KV cache and for a real page table. As in vLLM, the hash of a block covers all
tokens up to its end, blocks that nobody uses stay until room is needed, and the least recently used is evicted first.
Of blocks that are given up together the last of the prompt is evicted first. So a cached block always has the blocks
before it, and a search for the longest prefix may bisect.

Not modelled: blocks that are filled in part, and copies on the host or on disk.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from pdvsim.sim.core import Chain

BLOCK = 16  # tokens, vLLM's default; a power of two
_BLOCKS_OF_A_TEXT = 1 << 21  # more than the longest prompt and output have


def block_hashes(chain: Chain, first: int, last: int) -> list[int]:
    """Hashes of a request's blocks from `first` up to `last`, which must be full.

    A block belongs to the text that holds its last token, and a text implies those before it in the chain.
    """
    hashes: list[int] = []
    for end, text in chain:
        stop = min(end // BLOCK, last)
        if stop > first:
            hashes += range(text * _BLOCKS_OF_A_TEXT + first, text * _BLOCKS_OF_A_TEXT + stop)
            first = stop
    return hashes


@dataclass(frozen=True)
class Reuse:
    """What a server may use of cached prefixes."""

    lost_blocks: int = 0  # of every hit: a head needs the target's hidden states of the token before it starts
    answers: bool = True  # False: prompts are prefilled on a GPU that never holds an answer
    drafter: bool = False  # a drafter on the GPU has a KV cache of its own


class PrefixBlocks:
    """Named blocks: a count of references to each, and those without any, least recently used first."""

    def __init__(self) -> None:
        self._references: dict[int, int] = {}  # by hash
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._pages: dict[int, int] = {}  # block numbers, where there are real ones
        self.shared = 0  # blocks with two references or more
        self.evictions = 0
        self.version = 0  # changes whenever a prefix may match more or less than before

    def __len__(self) -> int:
        return len(self._references)

    def __contains__(self, name: int) -> bool:
        return name in self._references

    @property
    def idle(self) -> int:
        """Blocks without a reference."""
        return len(self._idle)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are cached."""
        known = self._references
        return bisect_left(hashes, True, key=lambda name: name not in known)

    def in_use(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks somebody uses; all are cached."""
        references = self._references
        return bisect_left(hashes, True, key=lambda name: not references[name])

    def hold(self, hashes: Iterable[int]) -> int:
        """Add a reference to each of these cached blocks; returns how many had none."""
        references, idle, before = self._references, self._idle, len(self._idle)
        for name in hashes:
            count = references[name]
            references[name] = count + 1
            if not count:
                del idle[name]
            elif count == 1:
                self.shared += 1
        return before - len(idle)

    def name(self, hashes: Sequence[int], pages: Sequence[int] = ()) -> None:
        """Name new blocks, with a reference each; `pages` are their numbers."""
        self._references.update(dict.fromkeys(hashes, 1))
        self._pages.update(zip(hashes, pages, strict=False))
        self.version += 1

    def pages(self, hashes: Iterable[int]) -> list[int]:
        """The numbers of cached blocks."""
        return [self._pages[name] for name in hashes]

    def release(self, hashes: Sequence[int]) -> int:
        """Take a reference from each block of one prompt; returns how many have none left and may be evicted."""
        references, idle, before = self._references, self._idle, len(self._idle)
        for name in reversed(hashes):
            count = references[name] - 1
            references[name] = count
            if not count:
                idle[name] = None
            elif count == 1:
                self.shared -= 1
        return len(idle) - before

    def evict(self, count: int) -> list[int]:
        """Forget the blocks that were not used for the longest time; returns their hashes."""
        self.version += 1
        self.evictions += count
        evicted = [self._idle.popitem(last=False)[0] for _ in range(count)]
        for name in evicted:
            del self._references[name]
        return evicted

    def reclaim(self, hashes: Iterable[int]) -> list[int]:
        """The numbers of evicted blocks, for others to use."""
        return [self._pages.pop(name) for name in hashes]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """References are those of the prompts that are `held`; blocks without any are idle; prefixes are whole."""
        counts = Counter(name for hashes in held for name in hashes)
        assert counts == Counter({name: count for name, count in self._references.items() if count})
        assert set(self._idle) == {name for name, count in self._references.items() if not count}
        assert self.shared == sum(count > 1 for count in counts.values())
