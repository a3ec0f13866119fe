"""The nouns: models, GPUs, requests and GPU launches. No logic beyond derived sizes.

Units are in the names: `_s` seconds, `_bytes` bytes, `tokens` tokens. Rates and roofline figures are per second.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from math import sqrt
from statistics import NormalDist
from typing import Literal, NamedTuple

from pdvsim.sim.layers import SlidingWindow, Sparse, State

Role = Literal["draft", "target"]
Kind = Literal["prefill", "draft", "verify", "decode", "ahead"]
ModelFamily = Literal[
    "llama", "mistral", "qwen2", "qwen3", "phi3", "gemma", "gemma2", "gemma3", "cohere", "gpt_oss", "deepseek", "glm4",
    "llama4", "minimax", "nemotron", "kimi", "mimo", "gemma4", "lightning",
]  # fmt: skip
HeadKind = Literal["eagle3", "mtp", "p-eagle", "dflash"]
ServingEngine = Literal["pdvsim", "vllm", "sglang", "trtllm"]
All2All = Literal["allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput"]
DrafterKind = Literal["model", "pard", "eagle3", "p-eagle", "dflash", "mtp", "ngram", "suffix", "none"]
LOOKED_UP: tuple[DrafterKind, ...] = ("ngram", "suffix")  # by the host, in tokens: no model drafts

# what a prompt consists of, as (end in tokens, number of the text): the last text goes on through the answer. A number
# stands for a text and for all that comes before it; requests with the same number share their tokens up to its end
Chain = tuple[tuple[int, int], ...]
DFLASH_STATES = 5  # hidden states of a target that a DFlash head fuses
ENDLESS = 1 << 40  # end of a chain's last text

KINDS: tuple[Kind, ...] = ("prefill", "draft", "verify", "decode", "ahead")


@dataclass(frozen=True, slots=True)
class Experts:
    """The experts in a model's layers, of which every token takes `per_token`."""

    count: int
    per_token: int
    intermediate: int
    shared: int = 0  # intermediate size of all experts that every token takes besides
    dense_layers: int = 0  # layers that have a plain MLP instead
    # `n` tokens of one request read as many distinct experts as `n ** overlap` tokens of different requests. Published
    # counts give 0.78 to 0.84: github.com/Luce-Org/lucebox/pull/501, github.com/ml-explore/mlx-lm/pull/1485
    overlap: float = 0.8
    weight_bytes: float | None = None  # per weight of an expert, where quantised apart from the other products
    ranks: int = 1  # GPUs that whole experts are divided among; 1: each GPU has all, or a share of every one
    all2all: All2All = "allgather_reducescatter"  # how tokens of data-parallel ranks reach their experts, and return
    latent: int | None = None  # width that tokens are compressed to before the experts; None: the hidden size

    @property
    def resident(self) -> int:
        """Experts that a GPU holds."""
        return self.count // self.ranks

    def read(self, independent: float) -> float:
        """Expected number of distinct experts that a layer reads for so many independent tokens.

        Of experts on several GPUs, those that the GPU with the most reads: all wait for it.
        """
        taken = 1.0 - (1.0 - self.per_token / self.count) ** independent
        if self.ranks == 1:
            return float(self.count * taken)
        most = self.resident * taken + _largest(self.ranks) * sqrt(self.resident * taken * (1.0 - taken))
        return float(min(most, self.resident, self.per_token * independent))


@cache
def _largest(count: int) -> float:
    """The expected largest of so many normal variates, in standard deviations (Blom's approximation)."""
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
class ModelSpec:
    """The shape of a decoder-only transformer, as its Hugging Face configuration gives it."""

    name: str
    family: ModelFamily
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
    value_dim: int | None = None  # of attention's values; None: head_dim
    output_gate: bool = False  # queries are projected twice as wide, to gate the attention's output
    shared_keys: bool = False  # values are made of the keys' projection, in layers without a window
    gated: bool = True  # MLPs and experts have a gate, and so three matrices
    bare_layers: int = 0  # layers without an MLP
    parallel: bool = False  # drafts all its tokens in one forward, of mask tokens, instead of one after another
    data_ranks: int = 1  # groups with attention and requests of their own, whose tokens share one set of experts

    @property
    def rereads(self) -> bool:
        """Whether it reads accepted draft tokens again: at their positions its cache has mask tokens."""
        return self.parallel

    @property
    def qkv_inputs(self) -> int:
        """Width of what q, k and v are made of."""
        return self.hidden

    @property
    def joined_inputs(self) -> int:
        """Width of what a product joins to one hidden state before the layers; 0: there is none."""
        return 0

    @property
    def fused_inputs(self) -> int:
        """The same of a product that only the first forward of a draft, and the reading of prompts, needs."""
        return 0

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
        return self._products(None if self.experts is None else self.experts.shared)

    def _products(self, shared: int | None) -> tuple[tuple[int, int], ...]:
        """The products of a layer with a plain MLP (None), or with so much of shared experts."""
        layer = (*self.attention_products, *self._mlp_products(shared))
        return (*layer, (self.joined_inputs, self.hidden)) if self.joined_inputs else layer

    def _mlp_products(self, shared: int | None) -> tuple[tuple[int, int], ...]:
        mlp, router = (self.intermediate, ()) if shared is None else (shared, ((self.hidden, self.routes),))
        if self.experts is not None and shared is not None and (latent := self.experts.latent):
            router = (*router, (self.hidden, latent), (latent, self.hidden))
        return (*router, *(((self.hidden, (2 if self.gated else 1) * mlp), (mlp, self.hidden)) if mlp else ()))

    @property
    def layer_kinds(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """How many layers have which products: those of experts, and those with a plain MLP.

        Of a model whose layers differ in more than that: how many have which mixer, and which MLP.
        """
        dense = 0 if self.experts is None else self.experts.dense_layers
        if not self.is_uniform:
            mixers = [(self.attending_layers, self.attention_products), *self.other_mixers()]
            shared = None if self.experts is None else self.experts.shared
            mlps = (self.mlp_layers - dense, self._mlp_products(shared)), (dense, self._mlp_products(None))
            return tuple((count, products) for count, products in (*mixers, *mlps) if count)
        if not dense:
            return ((self.layers, self.products),)
        return (self.expert_layers, self.products), (dense, self._products(None))

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
        return mixers

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have attention of the same products, and an MLP."""
        unlike = self.window is not None and (self.window.kv_heads or self.window.head_dim or self.shared_keys)
        return not (unlike or self.state_layers or self.sparse or self.bare_layers)

    @property
    def routes(self) -> int:
        """Experts that a router chooses from; 0: a dense model."""
        return 0 if self.experts is None else self.experts.count

    @property
    def resident_experts(self) -> int:
        """Experts of a layer that a GPU holds; 0: a dense model."""
        return 0 if self.experts is None else self.experts.resident

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
        return self.common_params + self.resident_experts * self.expert_params

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
        """All matrix weights; norms and biases, under 0.1%, are left out."""
        return self.layer_params + self.head_params * (1 if self.tied_embeddings else 2)

    @property
    def is_quantised(self) -> bool:
        """Whether weights of its layers have fewer than 16 bits."""
        return self.layer_bytes is not None or (self.experts is not None and self.experts.weight_bytes is not None)

    @property
    def multiplies_8_bits(self) -> bool:
        """Whether the layers' products are of 8-bit values."""
        return self.layer_bytes == 1

    @property
    def has_few_bits(self) -> bool:
        """Whether weights of its layers have fewer than 8 bits."""
        parts = (self.layer_bytes, None if self.experts is None else self.experts.weight_bytes)
        return any(item is not None and item < 1 for item in parts)

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
        layers = self.common_bytes + self.resident_experts * self.expert_bytes
        return round(layers) + (self.params - self.layer_params) * self.dtype_bytes

    @property
    def mlp_layers(self) -> int:
        """Layers that have an MLP, plain or of experts."""
        return self.layers - self.bare_layers

    @property
    def all_reduces(self) -> int:
        """Sums over the GPUs of a group per forward: after every mixer and every MLP."""
        return self.layers + self.mlp_layers

    @property
    def windowed_layers(self) -> int:
        """Layers that attend to a window."""
        return 0 if self.window is None else self.window.layers

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
        return self.caching_layers - self.windowed_layers

    @property
    def reach(self) -> int | None:
        """Cached tokens beyond which some layers read no more: a window, or what is selected; None: all read all."""
        part = self.window or self.sparse
        return None if part is None else part.tokens

    @property
    def kv_layer_bytes(self) -> int:
        """What a token adds to the KV cache of a layer without a window."""
        item = self.kv_dtype_bytes or self.dtype_bytes
        if self.latent is not None:
            return (self.latent.kv_rank + self.latent.rope_dim) * item
        return self.kv_heads * (self.head_dim + (self.value_dim or self.head_dim)) * item

    @property
    def window_bytes_per_token(self) -> int:
        """What a token adds to the KV cache of the layers with a window, while it is within."""
        if (window := self.window) is None:
            return 0
        item, head_dim = self.kv_dtype_bytes or self.dtype_bytes, window.head_dim or self.head_dim
        return window.layers * (window.kv_heads or self.kv_heads) * (head_dim + (self.value_dim or head_dim)) * item

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache held, and read by every later forward, per token of context within all windows."""
        index = 0 if self.sparse is None else round(self.sparse.scans * self.sparse.index_bytes)
        return self.attending_layers * self.kv_layer_bytes + self.window_bytes_per_token + index

    @property
    def bounded_bytes_per_token(self) -> int:
        """Of these, what is read of tokens within reach only."""
        selected = 0 if self.sparse is None else self.sparse.layers * self.kv_layer_bytes
        return self.window_bytes_per_token + selected

    @property
    def state_bytes(self) -> int:
        """One state of a request, in all layers that keep one."""
        return 0 if self.state is None else self.state.layers * self.state.bytes

    @property
    def state_flops(self) -> int:
        """Of one token, in these layers."""
        return 0 if self.state is None else self.state.layers * self.state.flops

    @property
    def snapshot_tokens(self) -> int:
        """Tokens between snapshots of the state, at which prefixes can be reused; 0: it has none."""
        return 0 if self.state is None else self.state.snapshot_tokens(self.kv_layer_bytes)

    @property
    def attention_flops_per_pair(self) -> int:
        """Flops of one query token against one context token within all windows, over all layers."""
        index = 0 if self.sparse is None else self.sparse.scans * self.sparse.flops_per_pair
        return self.attending_layers * self._layer_flops_per_pair + self._window_flops_per_pair + index

    @property
    def bounded_flops_per_pair(self) -> int:
        """Of these, those of tokens within reach only."""
        selected = 0 if self.sparse is None else self.sparse.layers * self._layer_flops_per_pair
        return self._window_flops_per_pair + selected

    @property
    def _layer_flops_per_pair(self) -> int:
        if self.latent is not None:
            return 2 * self.heads * (2 * self.latent.kv_rank + self.latent.rope_dim)
        return 2 * self.heads * (self.head_dim + (self.value_dim or self.head_dim))

    @property
    def _window_flops_per_pair(self) -> int:
        if (window := self.window) is None:
            return 0
        head_dim = window.head_dim or self.head_dim
        return 2 * window.layers * self.heads * (head_dim + (self.value_dim or head_dim))


@dataclass(frozen=True, slots=True)
class HeadSpec(ModelSpec):
    """A head that drafts from its target's hidden states: a few decoder layers, and what joins them to the states.

    EAGLE-3 (arXiv 2503.01840): a product fuses three hidden states of the target, for tokens that the target has read;
    q, k and v are made of that, or of the head's own last state, beside the embedding; its output projection has a
    draft vocabulary. P-EAGLE (arXiv 2602.01469) is the same with further plain layers, and drafts in parallel. MTP (as
    in DeepSeek-V3 and MiMo): in every forward a product joins state and embedding, and the output projection is the
    target's. DFlash (arXiv 2602.06036): plain layers draft a block in parallel, with keys and values of five fused
    hidden states of the target, and with its output projection. Embeddings are the target's.
    """

    kind: HeadKind = "eagle3"

    @property
    def rereads(self) -> bool:
        """It reads accepted draft tokens again, with the target's hidden states."""
        return True

    @property
    def layer_kinds(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """The first layer, and the others, which have one hidden state as input."""
        first = self.products
        later = ((self.hidden, first[0][1]), *first[1:])
        own = ((1, first), (self.layers - 1, later)) if self.layers > 1 else ((1, first),)
        return (*own, *self.other_mixers())

    @property
    def qkv_inputs(self) -> int:
        return 2 * self.hidden if self.kind in ("eagle3", "p-eagle") else self.hidden

    @property
    def joined_inputs(self) -> int:
        return 2 * self.hidden if self.kind == "mtp" else 0

    @property
    def fused_inputs(self) -> int:
        return {"mtp": 0, "dflash": DFLASH_STATES * self.hidden}.get(self.kind, 3 * self.hidden)

    @property
    def params(self) -> int:
        """All matrix weights of its own."""
        own_head = self.head_params if self.kind in ("eagle3", "p-eagle") else 0
        return self.layer_params + self.fused_params + own_head


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What a card can do at most. `measured` says whether the two rates were measured or are a data sheet's."""

    name: str
    bandwidth_bytes_per_s: float
    flops_per_s: float
    memory_bytes: float
    source: str
    measured: bool
    sms: int | None = None  # multiprocessors; None: not known

    @property
    def peak(self) -> tuple[float, float]:
        """Arithmetic and bandwidth per second."""
        return self.flops_per_s, self.bandwidth_bytes_per_s


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft model and the target model that verifies it."""

    draft: ModelSpec
    target: ModelSpec

    @property
    def name(self) -> str:
        return f"{self.draft.name}:{self.target.name}"


@dataclass(slots=True, eq=False)
class RequestState:
    """Where a request stands. Only its policy and its batch write it."""

    prefilled: int = 0  # of the tokens to read, those already in the KV cache
    context: int = 0  # all tokens in the KV cache: the last one delivered enters it with the next forward
    emitted: int = 0  # output tokens delivered
    k: int = 0  # drafts waiting for verification
    left_out: int = 0  # drafts beyond these, which the verify leaves out
    missed: bool = False  # the host looked for drafts, and found none
    # tokens the drafter has yet to read: the last draft after full acceptance, or plain decoding's; a head reads
    # accepted drafts again, with the target's hidden states
    drafter_lag: int = 0
    drafter_cache_gap: int = 0  # of its cached tokens, the last that the drafter's cache does not have
    held_tokens: int = 0  # of the KV cache
    pinned: bool = False  # a launch of it is under way: it keeps what it holds
    prefill_worker: int = 0  # of the workers that read prompts, the one that reads its
    drafter: int = -1  # of several GPUs that draft, the one that drafts for it
    ready_s: float = -1.0  # when its current wait or stage began
    last_delivery_s: float = -1.0  # when its tokens of the last round were delivered

    def unforeseen(self) -> None:
        """Nothing is foreseen of it: to a forecast, a call to end (`machine.forecast`)."""


@dataclass(slots=True, eq=False)
class RequestUsage:
    """What a request took: with what was asked, the columns of `records.REQUEST_DTYPES`."""

    replica: int = 0
    rounds: int = 0  # forwards of the target after the prompt
    drafts: int = 0  # of these, those that had draft tokens to verify
    drafted: int = 0  # draft tokens verified
    accepted: int = 0
    refused: int = 0  # at most one per round: what follows the first refused token is not judged
    undrafted_rounds: int = 0  # rounds without drafts, in a verify with rows that had some
    ahead_tokens: int = 0  # that were drafted ahead of verdicts, in all branches, with the guesses they begin with
    ahead_used: int = 0  # of these, those that were verified; the others were dropped
    preemptions: int = 0
    resumptions: int = 0  # readings to the end after a preemption; each gives the next token, as a prompt's does
    recomputed_tokens: int = 0  # that left the KV cache with a preemption
    num_cached_tokens: int = -1  # of the prompt, found cached at its first admission; -1: not looked for
    admitted_s: float = -1.0  # its first launch
    first_token_s: float = -1.0
    finish_s: float = -1.0
    # where its time went
    prefill_s: float = 0.0  # the target reading the prompt, and after a preemption all tokens so far
    draft_s: float = 0.0
    wait_s: float = 0.0  # drafted, in the queue for verification
    verify_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request:
    """One request: what was asked and its acceptance stream; where it stands; and what it took.

    `accept_runs[p]` is the number of consecutive drafts the target would accept from output position `p` on, so a round
    of `k` drafts at `p` accepts `min(accept_runs[p], k)`. It is drawn before the run: every architecture meets the same
    coins.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    accept_runs: bytes
    chain: Chain = ()  # by which its blocks are known; empty: it shares nothing
    think_s: float = 0.0  # after the answer to the turn before
    session: int = -1  # conversation that it is a turn of; -1: none
    turn: int = 0  # of that conversation, from 0
    state: RequestState = field(default_factory=RequestState)
    taken: RequestUsage = field(default_factory=RequestUsage)

    @property
    def to_read(self) -> int:
        """Tokens to read before it decodes: the prompt, and after a preemption what has been delivered as well."""
        return self.prompt_tokens + self.state.emitted

    def evict(self) -> None:
        """Its tokens leave the KV cache; those delivered stay delivered."""
        state = self.state
        self.taken.preemptions += 1
        self.taken.recomputed_tokens += state.context or state.prefilled
        state.prefilled = state.context = state.drafter_lag = state.k = state.left_out = state.drafter_cache_gap = 0

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.prompt_tokens}->{self.state.emitted}/{self.output_tokens})"


class Placement(NamedTuple):
    """The GPUs of each part: the target where it reads prompts, the drafter with all its works, the target else."""

    prefill: tuple[int, ...] = (0,)
    draft: tuple[int, ...] = (0,)
    verify: int = 0

    @property
    def gpus(self) -> int:
        """How many a server has."""
        return max(self.used) + 1

    @property
    def used(self) -> set[int]:
        """Those that have a part on them."""
        return {*self.prefill, *self.draft, self.verify}

    @property
    def apart(self) -> bool:
        """Whether drafts come from another GPU than the target's."""
        return self.draft != (self.verify,)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stretch of what one request has to read: `tokens` new ones behind `start` already cached."""

    request: Request
    start: int
    tokens: int
    as_row: bool = False  # the last token of a prompt that was prefilled elsewhere, computed as a row that decodes
