"""Offload tiers of a GPU's KV cache: host memory over PCIe, then an SSD.

As in vLLM's offloading connector and LMCache, every full block of a request that shares prefixes is written to each
tier when the request leaves the GPU, and each tier forgets the least recently used first. A prompt whose next blocks
are in a tier fetches them before its prefill, if that is faster than to compute them: the fetch, with its wait for the
link, is compared with what the prefill would take longer. The drafter's KV cache is stored and fetched with the
target's. A tensor-parallel group divides the capacity; each of its GPUs fetches its own part.

Not modelled: writing, which uses the other direction of the link, a fetch layer by layer during the prefill, and
copies that replicas share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pdvsim.sim.core import Chain, Request
from pdvsim.sim.machine.prefix import BLOCK, PrefixBlocks, Reuse
from pdvsim.sim.prices.links import LinkSpec

PrefillSeconds = Callable[[int, int, int], float]  # what `tokens` after `start` add to the prefill of a prompt's `rest`
SHOWN_TOKENS = 1000  # of the fetch and the prefill that are reported


class KvTier:
    """Blocks in one kind of memory, and the link that they are fetched over, one request after the other."""

    def __init__(self, name: str, link: LinkSpec, capacity_tokens: int, token_bytes: float) -> None:
        self.name = name
        self.link = link
        self.capacity_blocks = capacity_tokens // BLOCK
        self.token_bytes = token_bytes
        self.blocks = PrefixBlocks()
        self.free_s = 0.0  # when the link is
        self.hit_tokens = 0
        self.slower_tokens = 0  # that were there, but faster to compute

    def matched_tokens(self, request: Request) -> int:
        """Tokens at the start of what a request has to read that are here."""
        return BLOCK * self.blocks.match(request.chain, 0, request.to_read // BLOCK)

    def store(self, chain: Chain, blocks: int) -> None:
        """Store the full blocks that a request leaves, as the most recently used."""
        there = self.blocks.match(chain, 0, blocks)
        self.blocks.hold(chain, 0, there)
        if there < blocks:
            self.blocks.name(chain, there, blocks)
        self.blocks.release(chain, blocks)
        if (over := len(self.blocks) - self.capacity_blocks) > 0:
            self.blocks.evict(over)

    def arrives_s(self, now_s: float, tokens: int) -> float:
        """Return the end of a fetch that begins now."""
        return max(now_s, self.free_s) + self.alone_s(tokens)

    def alone_s(self, tokens: int) -> float:
        """A fetch that meets no other."""
        return self.link.latency_s + self.token_bytes * tokens / self.link.bytes_per_s

    def fetch(self, now_s: float, tokens: int) -> float:
        """Fetch `tokens`; return the time at which they are on the GPU."""
        arrives_s = self.arrives_s(now_s, tokens)
        self.free_s = arrives_s - self.link.latency_s
        self.hit_tokens += tokens
        return arrives_s


class Fetch(NamedTuple):
    """What a request gets from each tier, and what it leaves there because computing it is faster."""

    tokens: tuple[int, ...]
    slower: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.tokens)


class KvTiers:
    """The offload tiers of one KV cache, the fastest first."""

    def __init__(self, tiers: Sequence[KvTier], prefill_s: PrefillSeconds, reuse: Reuse | None = None) -> None:
        self.tiers = tiers
        self.prefill_s = prefill_s
        self.reuse = Reuse() if reuse is None else reuse  # what of a hit can be used, as on the GPU
        self.gpu_hit_tokens = 0

    def plan(self, request: Request, cached: int, now_s: float) -> Fetch:
        """The fetch for a request of which the GPU has `cached` tokens. Its last token is always computed."""
        tokens, slower = [0] * len(self.tiers), [0] * len(self.tiers)
        if request.chain:
            most = BLOCK * ((request.to_read - 1) // BLOCK)
            for at, tier in enumerate(self.tiers):
                more = self.reuse.usable_tokens(min(tier.matched_tokens(request), most) // BLOCK) - cached
                if more <= 0:
                    continue
                saved_s = self.prefill_s(cached, more, request.to_read - cached - more)
                if tier.arrives_s(now_s, more) - now_s > saved_s:
                    slower[at] = more
                    break
                tokens[at] = more
                cached += more
        return Fetch(tuple(tokens), tuple(slower))

    def begin(self, fetch: Fetch, cached: int, now_s: float) -> float:
        """Fetch what was planned; when all of it is there."""
        self.gpu_hit_tokens += cached
        arrivals_s = [now_s]
        for tier, tokens, slower in zip(self.tiers, fetch.tokens, fetch.slower, strict=True):
            tier.slower_tokens += slower
            if tokens:
                arrivals_s.append(tier.fetch(now_s, tokens))
        return max(arrivals_s)

    def store(self, chain: Chain, blocks: int) -> None:
        """Store the full blocks that a request leaves."""
        for tier in self.tiers:
            tier.store(chain, blocks)

    def facts(self) -> dict[str, float]:
        """Hits by tier, and what a fetch takes against a prefill."""
        facts: dict[str, float] = {"kv_gpu_hit_tokens": self.gpu_hit_tokens}
        for tier in self.tiers:
            facts |= {
                f"kv_{tier.name}_hit_tokens": tier.hit_tokens,
                f"kv_{tier.name}_slower_tokens": tier.slower_tokens,
                f"kv_{tier.name}_fetch_ms": 1000 * tier.alone_s(SHOWN_TOKENS),
            }
        return facts | {"kv_prefill_ms": 1000 * self.prefill_s(0, SHOWN_TOKENS, 1)}
