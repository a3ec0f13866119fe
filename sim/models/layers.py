"""Layers of a model that are not plain attention and a plain MLP: experts, and other ways in which tokens meet.

Besides MLA these are four. A window bounds what a query reads and what a request keeps. Sparse attention bounds what a
query reads, but keeps all tokens and scans an index of them. Compressed attention keeps one entry for several tokens,
next to a window. A state of fixed size replaces the KV cache. Sizes are those of one layer unless a name says
otherwise, in values where it does not say bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import sqrt
from statistics import NormalDist
from typing import Literal

All2All = Literal[
    "allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput", "flashinfer_nvlink_two_sided"
]
StateKind = Literal["gdn", "mamba2", "kda", "lightning"]
STATE_OPERATIONS = 6  # per value of a state and token: decay, what it predicts, its correction, and reading it
PAGE_TOKENS = 16  # vLLM rounds the block of a hybrid up to a multiple of this
ALIKE = 16  # consecutive tokens of a request that share experts


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts in a model's layers, of which every token takes `per_token`."""

    count: int
    per_token: int
    intermediate: int
    shared: int = 0  # intermediate size of all experts that every token takes besides
    dense_layers: int = 0  # layers that have a plain MLP instead
    overlap: float = 0.8  # of the experts of a request's tokens: see `independent`
    weight_bytes: float | None = None  # per weight of an expert, where quantised apart from the other products
    ranks: int = 1  # GPUs that whole experts are divided among; 1: each GPU has all, or a share of every one
    copies: int = 0  # experts that these hold besides, of popular ones
    balanced: bool = False  # experts are placed so that every GPU has as many tokens, as EPLB does
    all2all: All2All = "allgather_reducescatter"  # how tokens of data-parallel ranks reach their experts, and return
    latent: int | None = None  # width that tokens are compressed to before the experts; None: the hidden size

    @property
    def slots(self) -> int:
        """Experts and copies of experts on all GPUs."""
        return self.count + self.copies

    @property
    def resident(self) -> int:
        """Experts and copies that a GPU holds."""
        return self.slots // self.ranks

    def independent(self, tokens: float) -> float:
        """Number of tokens of different requests that read as many distinct experts as `tokens` of one request.

        Up to `ALIKE` tokens it is their power of `overlap`. Published counts give an exponent of 0.78 to 0.84:
        github.com/Luce-Org/lucebox/pull/501, github.com/ml-explore/mlx-lm/pull/1485. In a longer prompt each token
        adds the mean of what these add, as it does where `realrun` draws the experts.
        """
        if tokens <= ALIKE:
            return float(tokens**self.overlap)
        return float(1.0 + (tokens - 1.0) * (ALIKE**self.overlap - 1.0) / (ALIKE - 1.0))

    def read(self, independent: float) -> float:
        """Expected number of distinct experts that a layer reads for `independent` independent tokens.

        Of experts on several GPUs, the most that one GPU reads: all wait for it. Copies of an expert share
        its tokens.
        """
        taken = 1.0 - (1.0 - self.per_token / self.slots) ** independent
        if self.ranks == 1:
            return float(self.count * taken)
        most = self.resident * taken + _largest(self.ranks) * sqrt(self.resident * taken * (1.0 - taken))
        return float(min(most, self.resident, self.per_token * independent))


@cache
def _largest(count: int) -> float:
    """The expected largest of `count` normal variates, in standard deviations (Blom's approximation)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention (MLA), which caches one compressed vector per token and layer.

    Queries are multiplied with the compressed vectors, as engines decode. Prompts, which engines expand, are counted
    the same way and cost more here than there.
    """

    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    query_rank: int | None = None  # None: queries are not compressed


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """Layers whose queries attend to the last `tokens` only. Heads are the model's where they have no sizes here."""

    layers: int
    tokens: int
    kv_heads: int | None = None
    head_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """A KV cache of so many layers: what a token adds to it in each, and what a query token computes with that."""

    layers: int
    bytes: float
    flops: int
    within: bool = False  # read of tokens within reach only


@dataclass(frozen=True, slots=True)
class Sparse:
    """Layers whose queries attend to `tokens` that an indexer selects. It scores all cached tokens by keys of its own.

    The indexer is on every GPU of a group, as in vLLM. Some models select once for several layers: `scans` of them.
    """

    layers: int
    tokens: int
    scans: int  # layers that score
    index_heads: int
    index_dim: int
    index_bytes: float  # cached per token for the index, scales included
    query_inputs: int = 0  # width of what the indexer's queries are made of: DSA's are of compressed ones

    @property
    def flops_per_pair(self) -> int:
        """Operations of one query token scored against one cached token."""
        return 2 * self.index_heads * self.index_dim


@dataclass(frozen=True, slots=True)
class Compressed:
    """Attention of DeepSeek-V4. Keys and values are one vector, of one head that all query heads share.

    Every layer attends to the last `window` tokens. Most also attend to older ones, of which a compressor makes one
    entry each `ratio` tokens (CSA; an indexer selects `entries` of them) or each `wide_ratio` (HCA; all are read). The
    others have the window alone. Compressors, indexer and cache are on every GPU of a group, as in vLLM.
    """

    layers: int
    window: int
    selecting: int  # layers of CSA
    ratio: int
    entries: int
    whole: int  # layers of HCA
    wide_ratio: int
    head_dim: int
    rope_dim: int  # of these, cached in 16 bits in any case
    index_heads: int
    index_dim: int
    query_rank: int
    output_rank: int  # of each group of heads
    output_groups: int
    streams: int  # of hidden states that layers mix (hyper-connections)

    @property
    def reach(self) -> int | None:
        """Cached tokens beyond which the selecting layers read no more; None: there are none."""
        return self.entries * self.ratio if self.selecting else None

    def entry_bytes(self, item: int) -> int:
        """Return the bytes of an entry, or of a token in the window; in 8 bits with a scale for each 64 values."""
        return self.head_dim + self.rope_dim + self.head_dim // 64 if item == 1 else self.head_dim * item

    def index_bytes(self, item: int) -> int:
        """Return the bytes of an entry of the indexer: in 8 bits with a scale of four bytes."""
        return self.index_dim * item + (4 if item == 1 else 0)

    def caches(self, item: int, flops: int) -> list[Cache]:
        """The entries of the selecting layers, their index, and the entries of HCA; `flops` are of an entry."""
        entry, scored = self.entry_bytes(item), 2 * self.index_heads * self.index_dim
        csa, hca = self.selecting, self.whole
        return [
            Cache(1, csa * entry / self.ratio, csa * flops // self.ratio, within=True),
            Cache(1, csa * self.index_bytes(item) / self.ratio, csa * scored // self.ratio),
            Cache(1, hca * entry / self.wide_ratio, hca * flops // self.wide_ratio),
        ]

    def window_bytes(self, item: int) -> int:
        """The windows of a request, in all layers."""
        return self.layers * self.window * self.entry_bytes(item)

    def kept_bytes(self, item: int) -> int:
        """The windows of a request, and what compressors keep of its last tokens.

        These are keys and gates in 32 bits, twice if groups overlap.
        """
        csa = 2 * self.ratio * 2 * 2 * (self.head_dim + self.index_dim)
        unfinished = 4 * (self.selecting * csa + self.whole * self.wide_ratio * 2 * self.head_dim)
        return self.window_bytes(item) + unfinished

    def products(self, hidden: int, heads: int) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of what all layers have: queries and the entry; output, by groups of heads."""
        grouped = self.output_groups * self.output_rank
        inner = heads * self.head_dim
        return (
            (hidden, self.query_rank + self.head_dim),
            (self.query_rank, inner),
            (inner // self.output_groups, grouped),
            (grouped, hidden),
        )

    def compressors(self, hidden: int) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """How many layers have which products besides: CSA with its indexer, HCA. Keys and gates; overlapping twice."""
        queries = (self.query_rank, self.index_heads * self.index_dim), (hidden, self.index_heads)
        csa = (hidden, 4 * self.head_dim), (hidden, 4 * self.index_dim), *queries
        return (self.selecting, csa), (self.whole, ((hidden, 2 * self.head_dim),))


@dataclass(frozen=True, slots=True)
class State:
    """Layers that keep a state per request: of each value head a matrix of key by value size, and a short convolution.

    Mamba-2's groups are key heads here, and its state size is the key size.
    """

    kind: StateKind
    layers: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution: int = 0  # tokens that it covers; 0: there is none
    item_bytes: int = 2  # per value of the matrices; the convolution's have two

    @property
    def channels(self) -> int:
        """Width of what the convolution covers: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def bytes(self) -> int:
        """Bytes that one layer keeps of a request."""
        matrices = self.value_heads * self.key_dim * self.value_dim
        return matrices * self.item_bytes + 2 * self.channels * max(0, self.convolution - 1)

    @property
    def flops(self) -> int:
        """Operations of one token in one layer."""
        return STATE_OPERATIONS * self.value_heads * self.key_dim * self.value_dim

    def products(self, hidden: int) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of its matrix products: queries, keys, values and gates; output."""
        inner = self.value_heads * self.value_dim
        output = (inner, hidden)
        if self.kind == "kda":  # gates of low rank, for the decay and for the output
            ranks = (hidden, 2 * self.value_dim), (self.value_dim, inner), (self.value_dim, inner)
            return (hidden, self.channels), *ranks, (hidden, self.value_heads), output
        gates = {"gdn": 2 * self.value_heads, "mamba2": self.value_heads}.get(self.kind, 0)
        return (hidden, self.channels + inner), *(((hidden, gates),) if gates else ()), output

    def snapshot_tokens(self, kv_bytes: float) -> int:
        """Tokens between snapshots of the state, where one layer of attention caches `kv_bytes` per token.

        As in vLLM: a block of the KV cache is as large as a state, and a prefix can be reused at the end of a block.
        """
        return PAGE_TOKENS * -int(-self.bytes // (PAGE_TOKENS * kv_bytes))
