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
from itertools import takewhile

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


class _Run:
    """Blocks of a prompt that were given up together, from `first` on; the last is evicted first."""

    __slots__ = ("first", "names")

    def __init__(self, names: list[int]) -> None:
        self.names, self.first = names, 0


class PrefixBlocks:
    """Named blocks: a count of references to each, and those without any, least recently used first.

    Whoever uses a block uses those before it. So of a prompt's cached blocks the first ones have several references,
    the next ones have one, and the last ones none. These are kept in runs, and the first of a prompt begins one.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()  # hashes
        self._more: Counter[int] = Counter()  # references after the first
        self._runs: OrderedDict[_Run, None] = OrderedDict()  # in order of use
        self._beginning: dict[int, _Run] = {}  # the same by their first block
        self._pages: dict[int, int] = {}  # of blocks, where there are real ones
        self.idle = 0  # blocks without a reference
        self.evictions = 0
        self.version = 0  # changes whenever a prefix may match more or less than before

    def __len__(self) -> int:
        return len(self._known)

    @property
    def shared(self) -> int:
        """Blocks with two references or more."""
        return len(self._more)

    def match(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks are cached."""
        known = self._known
        if not hashes or hashes[0] not in known:
            return 0
        return bisect_left(hashes, True, key=lambda name: name not in known)

    def in_use(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks somebody uses; all are cached."""
        begins, at = self._beginning, self._shared(hashes)
        while at < len(hashes) and hashes[at] not in begins:
            at += 1
        return at

    def _shared(self, hashes: Sequence[int]) -> int:
        """How many of a prompt's first blocks have two references or more."""
        more = self._more
        return bisect_left(hashes, True, key=lambda name: name not in more) if more else 0

    def hold(self, hashes: Sequence[int], used: int) -> int:
        """Add a reference to each of a prompt's cached blocks, the first `used` in use; returns how many are not."""
        self._more.update(hashes[:used])
        at = used
        while at < len(hashes):
            run = self._beginning.pop(hashes[at])
            most = min(len(run.names) - run.first, len(hashes) - at)
            shift = run.first - at
            stop = bisect_left(range(at, at + most), True, key=lambda i: run.names[i + shift] != hashes[i]) + at
            run.first, at = stop + shift, stop
            if run.first == len(run.names):
                del self._runs[run]
            else:
                self._beginning[run.names[run.first]] = run
        self.idle -= len(hashes) - used
        return len(hashes) - used

    def name(self, hashes: Sequence[int]) -> None:
        """Name a prompt's next blocks, with a reference each."""
        self._known.update(hashes)
        self.version += 1

    def number(self, hashes: Sequence[int], pages: Sequence[int]) -> None:
        """Named blocks are at these pages."""
        self._pages.update(zip(hashes, pages, strict=True))

    def pages(self, hashes: Iterable[int]) -> list[int]:
        """The pages of a prompt's blocks, up to the first that has none yet."""
        return [self._pages[name] for name in takewhile(self._pages.__contains__, hashes)]

    def release(self, hashes: Sequence[int]) -> int:
        """Take a reference from each of a prompt's blocks; returns how many have none left and may be evicted."""
        more, shared = self._more, self._shared(hashes)
        twice = bisect_left(range(shared), True, key=lambda at: more[hashes[at]] == 1)  # the first that two use
        dict.update(more, {name: more[name] - 1 for name in hashes[:twice]})
        for name in hashes[twice:shared]:
            more.pop(name)
        if len(hashes) > shared:
            run = _Run(list(hashes[shared:]))
            self._runs[run] = None
            self._beginning[run.names[0]] = run
            self.idle += len(run.names)
        return len(hashes) - shared

    def evict(self, count: int) -> list[int]:
        """Forget the blocks that were not used for the longest time; returns their hashes."""
        evicted: list[int] = []
        while len(evicted) < count:
            run = next(iter(self._runs))
            begin = max(run.first, len(run.names) - count + len(evicted))
            evicted += reversed(run.names[begin:])
            if begin == run.first:
                del self._runs[run], self._beginning[run.names[begin]]
            else:
                del run.names[begin:]
        self._known.difference_update(evicted)
        self.idle -= count
        self.evictions += count
        self.version += 1
        return evicted

    def reclaim(self, hashes: Iterable[int]) -> list[int]:
        """The pages of evicted blocks, for others to use."""
        return [self._pages.pop(name) for name in hashes]

    def check_integrity(self, held: Iterable[Sequence[int]]) -> None:
        """References are those of the prompts that are `held`, and blocks without any are idle."""
        counts = Counter(name for hashes in held for name in hashes)
        idle = [name for run in self._runs for name in run.names[run.first :]]
        assert self._known == {*counts, *idle}
        assert len(self._known) == len(counts) + len(idle)
        assert self.idle == len(idle)
        assert self._more == {name: count - 1 for name, count in counts.items() if count > 1}
        assert self._beginning == {run.names[run.first]: run for run in self._runs}
