"""The KV cache as a number of tokens.

`reserved`: a request is admitted when all that it may ever need fits, and holds it to its end. `paged`, as vLLM does
it: blocks are taken as tokens come, so more requests fit; where no block is free, a request gives up all of its own.
With `reuse`, full blocks of requests that have a chain stay cached and are shared (`prefix`). Unused cached blocks
count as free. A block is cached when the forward that fills it is scheduled, and an answer's when its request leaves.

Layers with a sliding window keep no more than that of each request, so a long request counts for fewer tokens
(`held_tokens`). Where requests share prefixes, every token counts in full. Layers that keep a state hold room of fixed
size per request: a state, and one per draft token, as vLLM's do (`states_tokens`). With prefix caching a prefix is
reused at snapshots of the state only, and a request holds one more.

With `tiers`, blocks that leave the GPU are kept in host memory or on an SSD.

Not modelled: the room of snapshots that no request uses, and second copies of blocks that two requests have computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import ceil

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.core import Request
from pdvsim.sim.machine.prefix import BLOCK, PrefixBlocks, Reuse, block_hashes
from pdvsim.sim.machine.tiers import KvTiers
from pdvsim.sim.models.specs import ModelSpec

Windows = tuple[tuple[int, float], ...]  # tokens, and the share of a token's bytes that is in layers of this window


class KvCache:
    """Tokens in use per request, out of a capacity. A request in a running launch is pinned and keeps its tokens."""

    def __init__(
        self, capacity_tokens: int, lookahead: int, paged: bool = False, reuse: Reuse | None = None,
        windows: Windows = (), state_tokens: int = 0, tiers: KvTiers | None = None,
    ) -> None:  # fmt: skip
        assert reuse is None or paged
        assert state_tokens % BLOCK == 0
        self.reuse = reuse
        self.tiers = tiers
        self.windows = windows  # none where requests have chains
        self.state_tokens = state_tokens  # that the states of a request take the room of
        self.prefixes = PrefixBlocks()
        self.cached_tokens = 0  # in unused blocks
        self.peak_shared_tokens = 0  # in blocks that several requests use
        self._unread: set[int] = set()  # cached blocks that the drafter has not read
        self._matched_for: tuple[Request | None, int] = None, -1  # a request, and the version of the prefixes
        self._matched_blocks = 0  # cached, at the start of what that request has to read
        self.capacity_tokens = capacity_tokens
        self.lookahead = lookahead  # drafts beyond the last output token that may be written
        self.paged = paged
        self.used_tokens = 0
        self.peak_tokens = 0
        self._block = BLOCK if paged else 1
        self.room = self._block, windows, state_tokens  # what the blocks of a number of tokens depend on
        self._inside: dict[Request, int] = {}  # in order of admission, with the number of their named blocks

    def __contains__(self, request: Request) -> bool:
        return request in self._inside

    def need(self, request: Request) -> int:
        """The most it can ever hold."""
        return self.blocks(request.prompt_tokens + request.output_tokens + self.lookahead)

    def cached(self, request: Request) -> int:
        """Tokens at the start of what a request has to read that no forward has to compute.

        As in vLLM, the last token is always computed, and with it its block.
        """
        if self.reuse is None or not request.chain:
            return 0
        self.evict()
        if self._matched_for != (request, self.prefixes.version):
            self._matched_blocks = self.prefixes.match(request.chain, 0, request.to_read // BLOCK)
            self._matched_for = request, self.prefixes.version
        if not self._matched_blocks:
            return 0
        return self.reuse.usable_tokens(min(self._matched_blocks, (request.to_read - 1) // BLOCK))

    def admit(self, request: Request, tokens: int) -> bool:
        """Let a request in that has its first `tokens` tokens after its first forward, if they fit."""
        if self.reuse is not None and request.chain:
            return self._admit_sharing(request, tokens, self.reuse)
        tokens = self.blocks(tokens) if self.paged else self.need(request)
        if not self.take(tokens):
            return False
        self._inside[request] = 0
        request.state.held_tokens = tokens
        request.state.pinned = True
        return True

    def _admit_sharing(self, request: Request, tokens: int, reuse: Reuse) -> bool:
        cached, held_tokens, chain = self.cached(request), self.blocks(tokens), request.chain
        matched = min(self._matched_blocks, (held_tokens - self.state_tokens) // BLOCK)
        used = self.prefixes.in_use(chain, matched) if matched else 0
        more = held_tokens - BLOCK * used
        if self.used_tokens + more > self.capacity_tokens:
            return False
        if matched:
            self.cached_tokens -= BLOCK * self.prefixes.hold(chain, 0, matched)
        self.take(more)
        named = max(matched, tokens // BLOCK)
        if named > matched:
            self.prefixes.name(chain, matched, named)
        self._inside[request] = named
        if used:
            self.peak_shared_tokens = max(self.peak_shared_tokens, BLOCK * self.prefixes.shared)
        request.state.held_tokens, request.state.pinned, request.state.prefilled = held_tokens, True, cached
        if request.taken.num_cached_tokens < 0:
            request.taken.num_cached_tokens = cached
        else:
            request.taken.recomputed_tokens = max(0, request.taken.recomputed_tokens - cached)
        if reuse.drafter and self._unread:
            names = block_hashes(chain, 0, cached // BLOCK)
            unread = (at for at, name in enumerate(names) if name in self._unread)
            request.state.drafter_cache_gap = cached - BLOCK * next(unread, cached // BLOCK)
        return True

    def name(self, request: Request, tokens: int) -> None:
        """The first `tokens` tokens of a request are computed, or are going to be: cache their full blocks."""
        if self.reuse is None or not request.chain:
            return
        self.evict()
        chain, first, last = request.chain, self._inside[request], tokens // BLOCK
        if last <= first:
            return
        if there := self.prefixes.match(chain, first, last):  # computed by another meanwhile: its own are free again
            idle = self.prefixes.hold(chain, first, first + there)
            self.used_tokens -= BLOCK * (there - idle)
            self.cached_tokens -= BLOCK * idle
        if first + there < last:
            self.prefixes.name(chain, first + there, last)
        self._inside[request] = last

    def grow(self, request: Request, tokens: int) -> bool:
        """Allocate room for the first `tokens` tokens of a request, if available."""
        more = self.blocks(tokens) - request.state.held_tokens
        if more > 0:
            if not self.take(more):
                return False
            request.state.held_tokens += more
        request.state.pinned = True
        return True

    def grow_all(self, rows: Sequence[Request], tokens: int) -> bool:
        """Room for `tokens` more of each row, if there is."""
        if self.paged:
            for row in rows:
                row.state.pinned = True
                last = row.state.context + tokens
                if last + self.state_tokens > row.state.held_tokens and not self.grow(row, last):
                    self.unpin(rows)
                    return False
        return True

    def unpin(self, requests: Iterable[Request]) -> None:
        """Unpin requests whose launch has ended."""
        if self.paged:
            for request in requests:
                request.state.pinned = False

    def last_admitted(self) -> Request:
        """Return the unpinned request that was admitted last."""
        return next(request for request in reversed(self._inside) if not request.state.pinned)

    def release(self, request: Request) -> None:
        """Give back all that a request holds. Its full blocks stay cached until room is needed."""
        if self.reuse is not None:
            self.evict()
            if request.chain:
                self._keep(request, self.reuse)
        del self._inside[request]
        self.used_tokens -= request.state.held_tokens
        request.state.held_tokens, request.state.pinned = 0, False

    def _keep(self, request: Request, reuse: Reuse) -> None:
        tokens, chain = request.state.context or request.state.prefilled, request.chain
        if reuse.answers:
            self.name(request, tokens)
        named = self._inside[request]
        if reuse.drafter:
            read = min(named, max(0, tokens - request.state.drafter_lag) // BLOCK)
            if self._unread:
                self._unread.difference_update(block_hashes(chain, 0, read))
            if read < named:
                self._unread.update(block_hashes(chain, read, named))
        if self.tiers is not None:
            self.tiers.store(chain, named)
        idle = self.prefixes.release(chain, named)
        self.used_tokens += BLOCK * (named - idle)
        self.cached_tokens += BLOCK * idle

    def check_integrity(self) -> None:
        """Assert that used tokens are what requests hold, in whole blocks and shared ones once, and that all fit."""
        self.evict()
        held = [request.state.held_tokens for request in self._inside]
        named = sum(self._inside.values())
        repeated_tokens = BLOCK * (named - len(self.prefixes) + self.prefixes.idle)
        assert self.used_tokens == sum(held) - repeated_tokens <= self.peak_tokens <= self.capacity_tokens
        assert self.used_tokens + self.cached_tokens <= self.capacity_tokens
        assert self.cached_tokens == BLOCK * self.prefixes.idle
        assert not any(tokens % self._block for tokens in held)
        assert all(BLOCK * named <= request.state.held_tokens for request, named in self._inside.items())
        self.prefixes.check_integrity((request.chain, named) for request, named in self._inside.items())

    def blocks(self, tokens: int) -> int:
        """Return the cache that `tokens` of one request take, in whole blocks, plus its states."""
        if self.windows:
            tokens = ceil(held_tokens(tokens, self.windows))
        return ((tokens + self._block - 1) & -self._block) + self.state_tokens

    def all_blocks(self, tokens: NDArray[np.int64], more: int) -> NDArray[np.int64]:
        """Return the same of each of `tokens`, and `more`."""
        if self.windows:
            tokens = tokens + more
            held = tokens - sum([share * np.maximum(tokens - window, 0) for window, share in self.windows])
            tokens, more = np.ceil(held).astype(np.int64), 0
        blocks = (tokens + (more + self._block - 1)) & -self._block
        return blocks + self.state_tokens if self.state_tokens else blocks

    def take(self, tokens: int) -> bool:
        """Reserve `tokens` more; False if they do not fit."""
        used = self.used_tokens + tokens
        if used > self.capacity_tokens:
            return False
        self.used_tokens = used
        if used > self.peak_tokens:
            self.peak_tokens = used
        return True

    def evict(self) -> None:
        """Forget the cached blocks that others have been given; it changes nothing to do so before the next look."""
        over = self.used_tokens + self.cached_tokens - self.capacity_tokens
        if over > 0:
            self.forget(-(-over // BLOCK))

    def forget(self, blocks: int) -> list[int]:
        """Evict this number of cached blocks; return their hashes."""
        evicted = self.prefixes.evict(blocks)
        self.cached_tokens -= BLOCK * blocks
        if self._unread:
            self._unread.difference_update(evicted)
        return evicted


def windows_of(models: Sequence[ModelSpec]) -> Windows:
    """The windows of models whose caches grow together."""
    all_bytes = sum(m.kv_bytes_per_token for m in models)
    return tuple((m.window.tokens, m.cached_token(bounded=True)[0] / all_bytes) for m in models if m.window)


def states_tokens(models: Sequence[ModelSpec], states: int) -> int:
    """Return the tokens with the same memory as `states` states of one request, in whole blocks.

    The models' caches grow together. It includes the windows and unfinished entries of compressed attention.
    """
    size = sum((states - 1) * m.state_bytes + m.kept_bytes for m in models)
    all_bytes = sum(m.kv_bytes_per_token for m in models)
    return BLOCK * ceil(size / (BLOCK * all_bytes)) if size else 0


def held_tokens(tokens: float, windows: Windows) -> float:
    """Return the full-size tokens with the same memory as a request's `tokens`, less what windows dropped."""
    return tokens - sum([share * (tokens - window) for window, share in windows if tokens > window])


def capacity_tokens(memory_bytes: float, models: Sequence[ModelSpec]) -> int:
    """Tokens that fit next to the weights of `models`, whose caches grow together; all are within their windows."""
    room = memory_bytes - sum(m.weight_bytes for m in models)
    return max(0, int(room // sum(m.kv_bytes_per_token for m in models)))
