"""The KV cache as a number of tokens.

`reserved`: a request is admitted when all that it may ever need fits, and holds it to its end. `paged`, as vLLM does
it: blocks are taken as tokens come, so more requests fit; where no block is free, a request gives up all of its own.

Not modelled: prefix sharing, and swapping to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdvsim.sim.core import GpuSpec, ModelSpec, Request
from pdvsim.sim.records import Unwritten

BLOCK = 16  # tokens, vLLM's default; a power of two


class KvCache:
    """Tokens in use per request, out of a capacity. A request in a running launch is pinned and keeps its tokens."""

    def __init__(self, capacity_tokens: int, lookahead: int, paged: bool = False) -> None:
        self.capacity_tokens = capacity_tokens
        self.lookahead = lookahead  # drafts beyond the last output token that may be written
        self.paged = paged
        self.used_tokens = 0
        self.peak_tokens = 0
        self._block = BLOCK if paged else 1
        self.batches: list[Unwritten] = []
        self._inside: dict[Request, None] = {}  # in order of admission

    def __contains__(self, request: Request) -> bool:
        return request in self._inside

    def need(self, request: Request) -> int:
        """The most it can ever hold."""
        return self.blocks(request.prompt_tokens + request.output_tokens + self.lookahead)

    def admit(self, request: Request, tokens: int) -> bool:
        """Let a request in whose first forward reads `tokens`, if it fits."""
        tokens = self.blocks(tokens) if self.paged else self.need(request)
        if not self.take(tokens):
            return False
        self._inside[request] = None
        request.held_tokens = tokens
        request.pinned = True
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Allocate room for the first `tokens` tokens of a request, if available."""
        more = self.blocks(tokens) - request.held_tokens
        if more > 0:
            if not self.take(more):
                return False
            request.held_tokens += more
        request.pinned = True
        return True

    def grow_all(self, rows: Sequence[Request], tokens: int) -> bool:
        """Room for `tokens` more of each row, if there is."""
        if self.paged:
            for row in rows:
                row.pinned = True
                if row.context + tokens > row.held_tokens and not self.grow(row, row.context + tokens):
                    self.unpin(rows)
                    return False
        return True

    def unpin(self, requests: Iterable[Request]) -> None:
        """Unpin requests whose launch has ended."""
        if self.paged:
            for request in requests:
                request.pinned = False

    def last_admitted(self) -> Request:
        """Of those that are not pinned."""
        self._sync()
        return next(request for request in reversed(self._inside) if not request.pinned)

    def release(self, request: Request) -> None:
        """Give back all that a request holds."""
        del self._inside[request]
        self.used_tokens -= request.held_tokens
        request.held_tokens, request.pinned = 0, False

    def check_integrity(self) -> None:
        """What is used is what requests hold, in whole blocks, and fits."""
        self._sync()
        held = [request.held_tokens for request in self._inside]
        assert self.used_tokens == sum(held) <= self.peak_tokens <= self.capacity_tokens
        assert not any(tokens % self._block for tokens in held)

    def _sync(self) -> None:
        for batch in self.batches:
            batch.sync()

    def blocks(self, tokens: int) -> int:
        """So many tokens, in whole blocks."""
        return (tokens + self._block - 1) & -self._block

    def all_blocks(self, tokens: list[int], more: int) -> list[int]:
        """Each of `tokens` and `more`, in whole blocks."""
        more, block = more + self._block - 1, -self._block
        return [number + more & block for number in tokens]

    def take(self, tokens: int) -> bool:
        """So many more tokens, if they fit."""
        used = self.used_tokens + tokens
        if used > self.capacity_tokens:
            return False
        self.used_tokens = used
        if used > self.peak_tokens:
            self.peak_tokens = used
        return True


def capacity_tokens(gpu: GpuSpec, models: list[ModelSpec], utilization: float) -> int:
    """Tokens that fit next to the weights of `models`, whose caches grow together."""
    room = gpu.memory_bytes * utilization - sum(m.weight_bytes for m in models)
    return max(0, int(room // sum(m.kv_bytes_per_token for m in models)))
