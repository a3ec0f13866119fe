"""The KV cache as a number of tokens.

`reserved`: a request is admitted when all that it may ever need fits, and holds it to its end. `paged`, as vLLM does
it: blocks are taken as tokens come, so more requests fit; where no block is free, a request gives up all of its own.

Not modelled: prefix sharing, and swapping to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pdvsim.sim.core import GpuSpec, ModelSpec, Request

BLOCK = 16  # tokens, vLLM's default


class KvCache:
    """Tokens held out of a capacity, by request. Whoever has a work under way is pinned, and keeps what it holds."""

    def __init__(self, capacity_tokens: int, lookahead: int, paged: bool = False) -> None:
        self.capacity_tokens = capacity_tokens
        self.lookahead = lookahead  # drafts beyond the last output token that may be written
        self.paged = paged
        self.used_tokens = 0
        self.peak_tokens = 0
        self._block = BLOCK if paged else 1
        self._held: dict[Request, int] = {}  # in order of admission
        self._pinned: set[Request] = set()

    def __contains__(self, request: Request) -> bool:
        return request in self._held

    def need(self, request: Request) -> int:
        """The most it can ever hold."""
        return self._blocks(request.prompt_tokens + request.output_tokens + self.lookahead)

    def admit(self, request: Request, tokens: int) -> bool:
        """Let a request in whose first forward reads `tokens`, if it fits."""
        tokens = self._blocks(tokens) if self.paged else self.need(request)
        if not self._take(tokens):
            return False
        self._held[request] = tokens
        self._pinned.add(request)
        return True

    def grow(self, request: Request, tokens: int) -> bool:
        """Room for the first `tokens` tokens of a request, if there is."""
        more = self._blocks(tokens) - self._held[request]
        if more > 0:
            if not self._take(more):
                return False
            self._held[request] += more
        self._pinned.add(request)
        return True

    def grow_all(self, rows: Sequence[Request], tokens: int) -> bool:
        """Room for `tokens` more of each row, if there is."""
        if not self.paged:
            return True
        held = self._held
        for row in rows:
            if row.context + tokens > held[row] and not self.grow(row, row.context + tokens):
                return False
        self._pinned.update(rows)
        return True

    def unpin(self, requests: Iterable[Request]) -> None:
        """Their works are over."""
        if self.paged:
            self._pinned.difference_update(requests)

    def last_admitted(self) -> Request:
        """Of those that are not pinned."""
        return next(request for request in reversed(self._held) if request not in self._pinned)

    def release(self, request: Request) -> None:
        self.used_tokens -= self._held.pop(request)
        self._pinned.discard(request)

    def check_integrity(self) -> None:
        """What is used is what requests hold, in whole blocks, and fits."""
        assert self.used_tokens == sum(self._held.values()) <= self.peak_tokens <= self.capacity_tokens
        assert not any(held % self._block for held in self._held.values())
        assert self._pinned <= self._held.keys()

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._block) * self._block

    def _take(self, tokens: int) -> bool:
        used = self.used_tokens + tokens
        if used > self.capacity_tokens:
            return False
        self.used_tokens = used
        if used > self.peak_tokens:
            self.peak_tokens = used
        return True


def capacity_tokens(gpu: GpuSpec, models: list[ModelSpec], utilization: float) -> int:
    """Tokens that fit beside the weights of `models`, whose caches grow together."""
    room = gpu.memory_bytes * utilization - sum(m.weight_bytes for m in models)
    return max(0, int(room // sum(m.kv_bytes_per_token for m in models)))
