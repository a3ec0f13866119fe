"""Models and GPUs: their shapes, and the sizes that follow from them.

Units are in the names: `_bytes` bytes, `tokens` tokens. Rates are per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pdvsim.sim.limits import Range
from pdvsim.sim.models.layers import Cache, Compressed, Experts, Latent, SlidingWindow, Sparse, State

HeadKind = Literal["eagle3", "mtp", "p-eagle", "dflash", "dspark"]
FUSED_STATES = {"eagle3": 3, "p-eagle": 3, "dflash": 5, "dspark": 5}  # hidden states of a target that a head fuses
OWN_PROJECTION = ("eagle3", "p-eagle")  # heads with an output projection of their own, made from state and embedding
COMPRESSED_BLOCK = 256  # tokens of a block of compressed attention in vLLM


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The shape of a decoder-only transformer, as its Hugging Face configuration gives it; or of a head.

    A head of a `kind` drafts from its target's hidden states: a few decoder layers, and what joins them to the states.
    EAGLE-3 (arXiv 2503.01840): a product fuses three hidden states of the target, for tokens that the target has read;
    q, k and v are made of that, or of the head's own last state, next to the embedding; its output projection has a
    draft vocabulary. P-EAGLE (arXiv 2602.01469) is the same with further plain layers, and drafts in parallel. MTP (as
    in DeepSeek-V3 and MiMo): in every forward a product joins state and embedding, and the output projection is the
    target's. DFlash (arXiv 2602.06036): plain layers draft a block in parallel, with keys and values of five fused
    hidden states of the target, and with its output projection. DSpark (arXiv 2607.05147) is the same with a small
    sequential head, of which only the engine's time per forward is modelled. Embeddings are the target's.
    """

    name: str
    family: str  # of those that have the same tokens, and draft for each other
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied_embeddings: bool = False
    dtype_bytes: int = 2
    max_position_embeddings: int | None = None  # longest context; None: not known
    shards: int = 1  # GPUs that the model is divided over; the sizes are then those of one of them
    experts: Experts | None = None  # None: a dense model
    latent: Latent | None = None  # None: keys and values are cached as they are
    layer_bytes: float | None = None  # per weight of the layers' products, where quantised; None: dtype_bytes
    kv_dtype_bytes: int | None = None  # per cached value, where quantised; None: dtype_bytes
    window: SlidingWindow | None = None  # layers that attend to the last tokens only
    sparse: Sparse | None = None  # layers that attend to selected tokens
    state: State | None = None  # layers that keep a state instead of a KV cache
    compressed: Compressed | None = None  # attention to entries that stand for several tokens each
    value_dim: int | None = None  # of attention's values; None: head_dim
    output_gate: bool = False  # queries are projected twice as wide, to gate the attention's output
    shared_keys: bool = False  # values are made of the keys' projection, in layers without a window
    gated: bool = True  # MLPs and experts have a gate, and so three matrices
    layers_without_mlp: int = 0  # layers without an MLP
    parallel: bool = False  # drafts all its tokens in one forward, of mask tokens, instead of one after another
    data_ranks: int = 1  # groups with attention and requests of their own, whose tokens share one set of experts
    kind: HeadKind | None = None  # of a head; None: a model of its own

    @property
    def is_head(self) -> bool:
        """Whether it is a head, and not a model of its own."""
        return self.kind is not None

    @property
    def rereads(self) -> bool:
        """Whether it reads accepted draft tokens again: a head with hidden states, others in place of mask tokens."""
        return self.parallel or self.is_head

    @property
    def qkv_inputs(self) -> int:
        """Width of what q, k and v are made of."""
        return (2 if self.kind in OWN_PROJECTION else 1) * self.hidden

    @property
    def joined_inputs(self) -> int:
        """Width of what a product joins to one hidden state before the layers; 0: there is none."""
        return 2 * self.hidden if self.kind == "mtp" else 0

    @property
    def fused_inputs(self) -> int:
        """The same of a product that only the first forward of a draft, and the reading of prompts, needs."""
        return FUSED_STATES[self.kind] * self.hidden if self.kind in FUSED_STATES else 0

    @property
    def drafts_long(self) -> bool:
        """Whether its further draft tokens cost no further forward, and some of its drafts are long."""
        return self.parallel or self.name == "suffix"

    @property
    def on_host(self) -> bool:
        """Whether its drafts are looked up by the host: it has no layers."""
        return not self.layers

    @property
    def attention_products(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of attention's matrix products: q, k and v; output. Those of MLA compress and expand."""
        if self.compressed is not None:
            return self.compressed.products(self.qkv_inputs, self.heads)
        return self._attention_products(self.kv_heads, self.head_dim, self.shared_keys)

    def _attention_products(self, kv_heads: int, head_dim: int, shared_keys: bool) -> tuple[tuple[int, int], ...]:
        if (latent := self.latent) is None:
            value_dim = self.value_dim or head_dim
            queries = self.heads * head_dim * (2 if self.output_gate else 1)
            cached = kv_heads * (head_dim if shared_keys else head_dim + value_dim)
            return (self.qkv_inputs, queries + cached), (self.heads * value_dim, self.hidden)
        queries, rank = self.heads * (latent.nope_dim + latent.rope_dim), latent.query_rank
        return (
            (self.qkv_inputs, (rank or queries) + latent.kv_rank + latent.rope_dim),
            *(((rank, queries),) if rank else ()),
            (latent.kv_rank, self.heads * (latent.nope_dim + latent.value_dim)),
            (self.heads * latent.value_dim, self.hidden),
        )

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the matrix products of a layer that every token takes.

        Attention; gate and up, down; what joins inputs. In a layer of experts: attention, router, shared experts.
        """
        joins = ((self.joined_inputs, self.hidden),) if self.joined_inputs else ()
        return (*self.attention_products, *self._mlp_products(self.experts is not None), *joins)

    def _mlp_products(self, routed: bool) -> tuple[tuple[int, int], ...]:
        """The products of a plain MLP, or of what every token takes where tokens are routed to experts."""
        mlp, routers = self.intermediate, ()
        if routed and (experts := self.experts) is not None:
            mlp, latent = experts.shared, experts.latent
            routers = (self.hidden, experts.count), *(((self.hidden, latent), (latent, self.hidden)) if latent else ())
        return (*routers, *(((self.hidden, (2 if self.gated else 1) * mlp), (mlp, self.hidden)) if mlp else ()))

    @property
    def layer_kinds(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """How many layers have which products: those of experts, and those with a plain MLP.

        The first layer of a head differs from the others, which have one hidden state as input. Of a model whose layers
        differ in their mixers: how many have which mixer, and which MLP.
        """
        dense = 0 if self.experts is None else self.experts.dense_layers
        plain, first = self._mlp_products(False), self.products
        if self.is_head:
            later = ((self.hidden, first[0][1]), *first[1:])
            kinds = [(1, first), (self.layers - 1, later), *self.other_mixers()]
        elif self.is_uniform:
            kinds = [(self.layers - dense, first), (dense, (*self.attention_products, *plain))]
        else:
            mlps = (self.mlp_layers - dense, self._mlp_products(self.experts is not None)), (dense, plain)
            kinds = [(self.attending_layers, self.attention_products), *self.other_mixers(), *mlps]
        return [(count, products) for count, products in kinds if count]

    def other_mixers(self) -> list[tuple[int, tuple[tuple[int, int], ...]]]:
        """Layers whose mixer is not attention of the model's own heads, and what an indexer adds."""
        mixers = []
        if (window := self.window) is not None:
            own = self._attention_products(window.kv_heads or self.kv_heads, window.head_dim or self.head_dim, False)
            mixers.append((window.layers, own))
        if (state := self.state) is not None:
            mixers.append((state.layers, state.products(self.hidden)))
        if (sparse := self.sparse) is not None:
            keys = (self.hidden, sparse.index_dim + sparse.index_heads)  # and the weights of the heads
            queries = (sparse.query_inputs or self.hidden, sparse.index_heads * sparse.index_dim)
            mixers.append((sparse.scans, (keys, queries)))
        if self.compressed is not None:
            mixers += [(count, products) for count, products in self.compressed.compressors(self.hidden) if count]
        return mixers

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have attention of the same products, and an MLP."""
        unlike = self.window is not None and (self.window.kv_heads or self.window.head_dim or self.shared_keys)
        return not (unlike or self.state_layers or self.sparse or self.compressed or self.layers_without_mlp)

    @property
    def expert_layers(self) -> int:
        """Layers that have experts."""
        return 0 if self.experts is None else self.mlp_layers - self.experts.dense_layers

    @property
    def expert_params(self) -> int:
        """Weights of one expert in every layer that has experts."""
        if (experts := self.experts) is None:
            return 0
        matrices = 3 if self.gated else 2
        return self.expert_layers * matrices * (experts.latent or self.hidden) * experts.intermediate

    @property
    def common_params(self) -> int:
        """Weights of the layers' products that every token takes: all but the routed experts."""
        return sum(count * inputs * outputs for count, layer in self.layer_kinds for inputs, outputs in layer)

    @property
    def active_params(self) -> int:
        """Weights of the layers that one token is multiplied with, on each GPU; of experts on several, on average."""
        if self.experts is None:
            return self.common_params
        taken = self.experts.per_token * self.expert_params * self.data_ranks
        return self.common_params + taken // self.experts.ranks

    @property
    def layer_params(self) -> int:
        """Weights of the linear layers inside all transformer blocks, whether a token takes them or not."""
        return self.common_params + (0 if self.experts is None else self.experts.resident * self.expert_params)

    @property
    def fused_params(self) -> int:
        """Weights of the product that a draft needs once."""
        return self.fused_inputs * self.hidden

    @property
    def head_params(self) -> int:
        """Weights of the output projection, read once per forward pass whether tied or not."""
        return self.hidden * self.vocab

    @property
    def params(self) -> int:
        """All matrix weights of its own; norms and biases, under 0.1%, are left out."""
        projections = 1 if self.tied_embeddings else 2
        if self.is_head:  # embeddings are the target's
            projections = 1 if self.kind in OWN_PROJECTION else 0
        return self.layer_params + self.fused_params + self.head_params * projections

    @property
    def is_quantised(self) -> bool:
        """Whether weights of its layers have fewer than 16 bits."""
        return self.layer_bytes is not None or (self.experts is not None and self.experts.weight_bytes is not None)

    @property
    def multiplies_8_bits(self) -> bool:
        """Whether the layers' products are of 8-bit values."""
        return self.layer_bytes == 1

    @property
    def common_bytes(self) -> float:
        """Size of the layers' weights that every forward reads."""
        return self.common_params * (self.dtype_bytes if self.layer_bytes is None else self.layer_bytes)

    @property
    def expert_bytes(self) -> float:
        """Size of one expert in every layer that has experts: what each further distinct expert adds to a forward."""
        own = None if self.experts is None else self.experts.weight_bytes
        return self.expert_params * (own or self.layer_bytes or self.dtype_bytes)

    @property
    def weight_bytes(self) -> int:
        """Resident size of the weights. Embeddings and the output projection are not quantised."""
        experts = 0 if self.experts is None else self.experts.resident * self.expert_bytes
        return round(self.common_bytes + experts) + (self.params - self.layer_params) * self.dtype_bytes

    @property
    def mlp_layers(self) -> int:
        """Layers that have an MLP, plain or of experts."""
        return self.layers - self.layers_without_mlp

    @property
    def all_reduces(self) -> int:
        """Sums over the GPUs of a group per forward: after every mixer and every MLP."""
        return self.layers + self.mlp_layers

    @property
    def state_layers(self) -> int:
        """Layers that keep a state."""
        return 0 if self.state is None else self.state.layers

    @property
    def caching_layers(self) -> int:
        """Layers that have a KV cache."""
        return self.layers - self.state_layers

    @property
    def attending_layers(self) -> int:
        """Layers whose keys and values of the whole context are kept."""
        return self.caching_layers - (0 if self.window is None else self.window.layers)

    @property
    def reach(self) -> int | None:
        """Cached tokens beyond which some layers read no more: a window, or what is selected; None: all read all."""
        if self.compressed is not None:
            return self.compressed.reach
        part = self.window or self.sparse
        return None if part is None else part.tokens

    @property
    def kv_item_bytes(self) -> int:
        """Bytes per cached value."""
        return self.kv_dtype_bytes or self.dtype_bytes

    @property
    def kv_layer_bytes(self) -> int:
        """Bytes that a token adds to the KV cache of a layer without a window."""
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * self.kv_item_bytes
        return self._cached(self.kv_heads, self.head_dim)[0]

    def _cached(self, kv_heads: int, head_dim: int) -> tuple[int, int]:
        """Bytes that a token adds to the cache of a layer with such heads, and flops per pair of it and a query."""
        both = head_dim + (self.value_dim or head_dim)  # keys and values
        return kv_heads * both * self.kv_item_bytes, 2 * self.heads * both

    @property
    def caches(self) -> list[Cache]:
        """The layers that have a KV cache, by what they read of it."""
        item, (_, flops) = self.kv_item_bytes, self._cached(self.kv_heads, self.head_dim)
        if self.latent is not None:
            flops = 2 * self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)
        if self.compressed is not None:
            return self.compressed.caches(item, flops)
        whole, caches = self.attending_layers, []
        if (sparse := self.sparse) is not None:
            whole -= sparse.layers
            caches.append(Cache(sparse.layers, self.kv_layer_bytes, flops, within=True))
            caches.append(Cache(sparse.scans, sparse.index_bytes, sparse.flops_per_pair))
        if (window := self.window) is not None:
            of_token = self._cached(window.kv_heads or self.kv_heads, window.head_dim or self.head_dim)
            caches.append(Cache(window.layers, *of_token, within=True))
        return [Cache(whole, self.kv_layer_bytes, flops), *caches]

    def cached_token(self, bounded: bool = False) -> tuple[int, int]:
        """Bytes held per token of context within all windows, and flops per pair of it and a query, over all layers.

        `bounded`: in the layers alone that read tokens within reach only.
        """
        caches = [cache for cache in self.caches if cache.within or not bounded]
        return round(sum(cache.layers * cache.bytes for cache in caches)), sum(c.layers * c.flops for c in caches)

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache held, and read by every later forward, per token of context within all windows."""
        return self.cached_token()[0]

    @property
    def attention_flops_per_pair(self) -> int:
        """Flops of one query token against one context token within all windows, over all layers."""
        return self.cached_token()[1]

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of a request, in all layers that keep one."""
        return 0 if self.state is None else self.state.layers * self.state.bytes

    @property
    def kept_bytes(self) -> int:
        """Bytes that a request keeps whatever its length, which are sent with the end of its prompt.

        One state; or, of compressed attention, the windows and what compressors have not finished. Drafts need no
        further copy of these: their tokens are kept one by one.
        """
        own = self.compressed
        return self.state_bytes if own is None else own.kept_bytes(self.kv_item_bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes that every forward reads of a request whatever its length: one state, or windows."""
        return self.state_bytes if self.compressed is None else self.compressed.window_bytes(self.kv_item_bytes)

    @property
    def row_flops(self) -> int:
        """Operations of one token whatever its context: of states, or of windows."""
        if (own := self.compressed) is not None:
            return own.layers * own.window * self._cached(1, self.head_dim)[1]
        return 0 if self.state is None else self.state.layers * self.state.flops

    @property
    def snapshot_tokens(self) -> int:
        """Tokens between snapshots of the state, at which prefixes can be reused; 0: at any block."""
        if self.compressed is not None:
            return COMPRESSED_BLOCK
        return 0 if self.state is None else self.state.snapshot_tokens(self.kv_layer_bytes)


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What a card can do at most. `measured` says whether the two rates were measured or are a data sheet's."""

    name: str
    bandwidth_bytes_per_s: Annotated[float, Range(1e9, 1e14)]  # one unit off by a thousand falls outside
    flops_per_s: Annotated[float, Range(1e12, 1e17)]
    memory_bytes: Annotated[float, Range(1e9, 4e12)]
    source: str
    measured: bool
    sms: Annotated[int, Range(1, 1024)] | None = None  # multiprocessors; None: not known
    sister: str | None = None  # card of the same chip, whose kernels were timed: what they reach is this one's

    @property
    def peak(self) -> tuple[float, float]:
        """Flops and bytes per second."""
        return self.flops_per_s, self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft model and the target model that verifies it."""

    draft: ModelSpec
    target: ModelSpec

    @property
    def name(self) -> str:
        return f"{self.draft.name}:{self.target.name}"
