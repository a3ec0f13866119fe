"""Blocks of a KV cache known by the hash of their prefix: their users, and which are evicted first.

A pure data structure, for the simulated KV cache and for a real page table. As in vLLM, the hash of a block covers all
tokens up to its end, unused blocks stay until room is needed, and the least recently used is evicted first.
Of blocks that are given up together the last of the prompt is evicted first. So a cached block always has the blocks
before it. Of each text the first blocks are cached, so that a few numbers describe it however long it is.

Not modelled: blocks that are filled in part.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain as chained
from itertools import count, takewhile

from pdvsim.sim.core import Chain

BLOCK = 16  # tokens, vLLM's default; a power of two
_BLOCKS_OF_A_TEXT = 1 << 21  # more than the longest prompt and output have


def _parts(chain: Chain, first: int, last: int) -> list[tuple[int, int, int, int]]:
    """A request's blocks from `first` up to `last` by text: the text, its first block, and those of the part.

    A block belongs to the text that holds its last token, and a text implies those before it in the chain.
    """
    parts, start = [], 0
    for end, text in chain:
        stop = end // BLOCK
        if stop >= last:
            stop = last
        if stop > first and stop > start:
            parts.append((text, start, start if start > first else first, stop))
        if stop == last:
            break
        start = stop
    return parts


def block_hashes(chain: Chain, first: int, last: int) -> list[int]:
    """Hashes of a request's blocks from `first` up to `last`, which must be full."""
    parts = _parts(chain, first, last)
    return [text * _BLOCKS_OF_A_TEXT + at for text, _, begin, stop in parts for at in range(begin, stop)]


@dataclass(frozen=True)
class Reuse:
    """What a server may use of cached prefixes."""

    snapshot_blocks: int = 1  # a prefix is reused in multiples of this number: more where layers keep a state
    lost_blocks: int = (
        0  # such multiples of every hit: a head needs the target's hidden states of the token before it starts
    )
    answers: bool = True  # False: prompts are prefilled on a GPU that never holds an answer
    drafter: bool = False  # a drafter on the GPU has a KV cache of its own

    def usable_tokens(self, blocks: int) -> int:
        """Return the tokens that `blocks` cached blocks at the start of a prompt save."""
        unit = self.snapshot_blocks
        return BLOCK * unit * max(0, blocks // unit - self.lost_blocks)


class _Text:
    """Cached blocks of a text, from `start` up to `known`, and up to where each of its users uses them, in order."""

    __slots__ = ("begins", "known", "number", "start", "stops")

    def __init__(self, number: int, start: int) -> None:
        self.number, self.start, self.known = number, start, start
        self.stops: list[int] = []
        self.begins: dict[int, int] = {}  # runs without users, by the block of this text that they begin with

    @property
    def used(self) -> int:
        """The end of the blocks in use."""
        return self.stops[-1] if self.stops else self.start

    @property
    def shared(self) -> int:
        """The end of the blocks that two or more use."""
        return self.stops[-2] if len(self.stops) > 1 else self.start


class PrefixBlocks:
    """Cached blocks with their users, and those without any in runs, least recently used first.

    A request that uses a block uses those before it. So the blocks that it leaves without users are its last ones. They
    are a run, which is used again from its beginning on and evicted from its end.
    """

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}  # by the hash of their first block
        self._runs: OrderedDict[int, deque[tuple[_Text, int, int]]] = OrderedDict()  # parts of texts, in order of use
        self._run_numbers = count()
        self._pages: dict[int, int] = {}  # of blocks, where there are real ones
        self._cached_blocks = 0
        self.shared = 0  # blocks with two users or more
        self.idle = 0  # blocks without a user
        self.evictions = 0
        self.version = 0  # changes whenever a prefix may match more or less than before

    def __len__(self) -> int:
        return self._cached_blocks

    def match(self, chain: Chain, first: int, last: int) -> int:
        """Return how many of a request's blocks from `first` up to `last` are cached."""
        for number, start, begin, stop in _parts(chain, first, last):
            text = self._texts.get(number * _BLOCKS_OF_A_TEXT + start)
            if text is None or text.known < stop:
                return (begin if text is None else text.known) - first
        return last - first

    def in_use(self, chain: Chain, last: int) -> int:
        """Return how many of a request's first `last` cached blocks are in use."""
        for number, start, _, stop in _parts(chain, 0, last):
            used = self._texts[number * _BLOCKS_OF_A_TEXT + start].used
            if used < stop:
                return used
        return last

    def hold(self, chain: Chain, first: int, last: int) -> int:
        """Add a user to cached blocks, one that has those before `first`; returns how many had none."""
        idle = 0
        for number, start, begin, stop in _parts(chain, first, last):
            text = self._texts[number * _BLOCKS_OF_A_TEXT + start]
            at = text.used
            if at < stop:
                idle += stop - at
            while at < stop:
                at = self._use_again(text, at, stop)
            self._use(text, begin, stop)
        self.idle -= idle
        return idle

    def _use_again(self, text: _Text, at: int, most: int) -> int:
        """Take blocks of a text from the beginning of a run, up to `most`; returns where they end."""
        number = text.begins.pop(at)
        run = self._runs[number]
        _, _, stop = run.popleft()
        if stop > most:
            run.appendleft((text, most, stop))
        if run:
            text, begin, _ = run[0]
            text.begins[begin] = number
        else:
            del self._runs[number]
        return min(stop, most)

    def _use(self, text: _Text, begin: int, stop: int) -> None:
        """A user of a text up to `begin` uses it up to `stop`."""
        before = text.shared
        if begin > text.start:
            del text.stops[bisect_left(text.stops, begin)]
        insort(text.stops, stop)
        self.shared += text.shared - before

    def name(self, chain: Chain, first: int, last: int) -> None:
        """Cache a request's next blocks, with one user, which has those before `first`."""
        for number, start, begin, stop in _parts(chain, first, last):
            key = number * _BLOCKS_OF_A_TEXT + start
            text = self._texts.get(key)
            if text is None:
                text = self._texts[key] = _Text(number, start)
            text.known = stop
            self._use(text, begin, stop)
        self._cached_blocks += last - first
        self.version += 1

    def number(self, hashes: Sequence[int], pages: Sequence[int]) -> None:
        """Named blocks are at these pages."""
        self._pages.update(zip(hashes, pages, strict=True))

    def pages(self, hashes: Iterable[int]) -> list[int]:
        """The pages of a prompt's blocks, up to the first that has none yet."""
        return [self._pages[name] for name in takewhile(self._pages.__contains__, hashes)]

    def release(self, chain: Chain, last: int) -> int:
        """Take a user from a request's blocks; returns how many have none left and may be evicted."""
        run: deque[tuple[_Text, int, int]] = deque()
        idle = 0
        for number, start, _, stop in _parts(chain, 0, last):
            text = self._texts[number * _BLOCKS_OF_A_TEXT + start]
            before = text.shared
            del text.stops[bisect_left(text.stops, stop)]
            self.shared += text.shared - before
            if (used := text.used) < stop:
                run.append((text, used, stop))
                idle += stop - used
        if run:
            text, begin, _ = run[0]
            text.begins[begin] = next(self._run_numbers)
            self._runs[text.begins[begin]] = run
            self.idle += idle
        return idle

    def evict(self, count: int) -> list[int]:
        """Forget the blocks that were not used for the longest time; returns their hashes."""
        evicted: list[int] = []
        while len(evicted) < count:
            number, run = next(iter(self._runs.items()))
            text, begin, stop = run.pop()
            text.known = max(begin, stop - count + len(evicted))
            base = text.number * _BLOCKS_OF_A_TEXT
            evicted += range(base + stop - 1, base + text.known - 1, -1)
            if text.known > begin:
                run.append((text, begin, text.known))
            elif not run:
                del self._runs[number], text.begins[begin]
            if text.known == text.start:
                del self._texts[base + text.start]
        self._cached_blocks -= count
        self.idle -= count
        self.evictions += count
        self.version += 1
        return evicted

    def reclaim(self, hashes: Iterable[int]) -> list[int]:
        """The pages of evicted blocks, for others to use."""
        return [self._pages.pop(name) for name in hashes]

    def sent(self, chain: Chain, prompt_tokens: int, tokens: int) -> int:
        """Keep the first `tokens` tokens of a request for ever; returns those of its prompt that were cached."""
        blocks = tokens // BLOCK
        there = self.match(chain, 0, blocks)
        self.hold(chain, 0, there)
        self.name(chain, there, blocks)
        return BLOCK * min(there, (prompt_tokens - 1) // BLOCK)

    def check_integrity(self, held: Iterable[tuple[Chain, int]]) -> None:
        """Users are the requests that are `held`, with the number of their blocks; blocks without any are idle."""
        counts = Counter(name for texts, last in held for name in block_hashes(texts, 0, last))
        cached = ((text, text.start, text.known) for text in self._texts.values())
        known, idle = (
            [text.number * _BLOCKS_OF_A_TEXT + at for text, begin, stop in parts for at in range(begin, stop)]
            for parts in (cached, chained.from_iterable(self._runs.values()))
        )
        assert sorted(known) == sorted([*counts, *idle])
        assert (len(self), self.idle) == (len(known), len(idle))
        assert self.shared == sum(users > 1 for users in counts.values())
        begins = {number: (text, at) for text in self._texts.values() for at, number in text.begins.items()}
        assert begins == {number: run[0][:2] for number, run in self._runs.items()}
