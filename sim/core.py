"""The nouns: models, GPUs, requests and GPU launches. No logic beyond derived sizes.

Units are in the names: `_s` seconds, `_bytes` bytes, `tokens` tokens. Rates and roofline figures are per second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Role = Literal["draft", "target"]
Kind = Literal["prefill", "draft", "verify", "decode", "ahead"]
ModelFamily = Literal["llama", "mistral", "qwen2", "qwen3", "phi3", "gemma"]
HeadKind = Literal["eagle3", "mtp"]
DrafterKind = Literal["model", "eagle3", "mtp", "ngram", "none"]

# what a prompt consists of, as (end in tokens, number of the text): the last text goes on through the answer. A number
# stands for a text and for all that comes before it; requests with the same number share their tokens up to its end
Chain = tuple[tuple[int, int], ...]
ENDLESS = 1 << 40  # end of a chain's last text

KINDS: tuple[Kind, ...] = ("prefill", "draft", "verify", "decode", "ahead")


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
    sliding_window: int | None = None  # tokens that attention reaches back, where that is less
    shards: int = 1  # GPUs that the model is divided over; the sizes are then those of one of them

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
    def on_host(self) -> bool:
        """Whether its drafts are looked up by the host: it has no layers."""
        return not self.layers

    @property
    def products(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's matrix products: q, k and v; output; gate and up; down; what joins inputs."""
        attended = self.heads * self.head_dim
        layer = (
            (self.qkv_inputs, attended + 2 * self.kv_heads * self.head_dim),
            (attended, self.hidden),
            (self.hidden, 2 * self.intermediate),
            (self.intermediate, self.hidden),
        )
        return (*layer, (self.joined_inputs, self.hidden)) if self.joined_inputs else layer

    @property
    def layer_params(self) -> int:
        """Weights of the linear layers inside all transformer blocks."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.products)

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
    def weight_bytes(self) -> int:
        """Resident size of the weights."""
        return self.params * self.dtype_bytes

    @property
    def kv_bytes_per_token(self) -> int:
        """KV cache held, and read by every later forward, per token of context."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype_bytes

    @property
    def attention_flops_per_pair(self) -> int:
        """Flops of one query token against one context token, over all layers."""
        return 4 * self.layers * self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class HeadSpec(ModelSpec):
    """A head that drafts from its target's hidden states: one decoder layer, and what joins it to them.

    EAGLE-3 (arXiv 2503.01840): a product fuses three hidden states of the target, for tokens that the target has read;
    q, k and v are made of that, or of the head's own last state, beside the embedding; its output projection has a
    draft vocabulary. MTP (as in DeepSeek-V3 and MiMo): in every forward a product joins state and embedding, and the
    output projection is the target's. Embeddings are the target's.
    """

    kind: HeadKind = "eagle3"

    @property
    def qkv_inputs(self) -> int:
        return 2 * self.hidden if self.kind == "eagle3" else self.hidden

    @property
    def joined_inputs(self) -> int:
        return 2 * self.hidden if self.kind == "mtp" else 0

    @property
    def fused_inputs(self) -> int:
        return 3 * self.hidden if self.kind == "eagle3" else 0

    @property
    def params(self) -> int:
        """All matrix weights of its own."""
        own_head = self.head_params if self.kind == "eagle3" else 0
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


@dataclass(frozen=True, slots=True)
class Pair:
    """A draft model and the target model that verifies it."""

    draft: ModelSpec
    target: ModelSpec

    @property
    def name(self) -> str:
        return f"{self.draft.name}:{self.target.name}"


@dataclass(slots=True, eq=False, kw_only=True)
class RequestAccount:
    """The recorded values of a request: columns of `records.REQUEST_DTYPES`."""

    replica: int = 0
    rounds: int = 0  # forwards of the target after the prompt
    drafts: int = 0  # of these, those that had draft tokens to verify
    drafted: int = 0  # draft tokens verified
    accepted: int = 0
    refused: int = 0  # at most one per round: what follows the first refused token is not judged
    bare: int = 0  # rounds that had no drafts, in a verify beside others that had some
    ahead_tokens: int = 0  # that were drafted ahead of verdicts, in all branches, with the guesses they begin with
    ahead_used: int = 0  # of these, those that were verified; the others were dropped
    preemptions: int = 0
    resumptions: int = 0  # readings to the end after a preemption; each gives the next token, as a prompt's does
    recomputed_tokens: int = 0  # that left the KV cache with a preemption
    num_cached_tokens: int = -1  # of the prompt, found cached at its first admission; -1: not looked for
    session: int = -1  # conversation that it is a turn of; -1: none
    turn: int = 0  # of that conversation, from 0
    admitted_s: float = -1.0
    first_token_s: float = -1.0
    finish_s: float = -1.0
    # where its time went
    prefill_s: float = 0.0
    draft_s: float = 0.0
    wait_s: float = 0.0
    verify_s: float = 0.0


@dataclass(slots=True, eq=False)
class Request(RequestAccount):
    """One request: what was asked, its acceptance stream, and where it stands.

    `runs[p]` is the number of consecutive drafts the target would accept from output position `p` on, so a round of
    `k` drafts at `p` accepts `min(runs[p], k)`. It is drawn before the run: every architecture meets the same coins.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    runs: bytes
    chain: Chain = ()  # by which its blocks are known; empty: it shares nothing
    think_s: float = 0.0  # after the answer to the turn before
    prefilled: int = 0  # of the tokens to read, those already in the KV cache
    context: int = 0  # all tokens in the KV cache: the last one delivered enters it with the next forward
    emitted: int = 0  # output tokens delivered
    k: int = 0  # drafts waiting for verification
    missed: bool = False  # the host looked for drafts, and found none
    # tokens the drafter has yet to read: the last draft after full acceptance, or plain decoding's; a head reads
    # accepted drafts again, with the target's hidden states
    owed: int = 0
    held_tokens: int = 0  # of the KV cache
    lacks: int = 0  # of its cached tokens, the last that the drafter's cache does not have
    pinned: bool = False  # a work of it is under way: it keeps what it holds
    reader: int = 0  # of the workers that read prompts, the one that reads its
    drafter: int = -1  # of several GPUs that draft, the one that drafts for it
    ready_s: float = -1.0  # when its current wait or stage began
    turn_s: float = -1.0  # when its tokens of the last round were delivered

    @property
    def to_read(self) -> int:
        """Tokens to read before it decodes: the prompt, and after a preemption what has been delivered as well."""
        return self.prompt_tokens + self.emitted

    def evict(self) -> None:
        """Its tokens leave the KV cache; those delivered stay delivered."""
        self.preemptions += 1
        self.recomputed_tokens += self.context or self.prefilled
        self.prefilled = self.context = self.owed = self.k = self.lacks = 0

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.prompt_tokens}->{self.emitted}/{self.output_tokens})"


class Seats(NamedTuple):
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


@dataclass(slots=True)
class Work:
    """One GPU launch: `steps` forwards of one model over `rows`, the first with `tokens` new tokens per row.

    `chunks` are prompt chunks in the (first) forward. A draft of length k is k steps of one token; the first step has
    more tokens if some row must catch up. A verify is one step of k+1.
    """

    kind: Kind
    role: Role
    lane: str
    rows: list[Request]
    tokens: int = 1
    steps: int = 1
    chunks: tuple[Chunk, ...] = ()
    priority: int = 0  # higher goes first
    queue_depth: int = 0  # requests left waiting in the lane when this was launched
    watched: bool = True  # the host reads its completion back; a draft that the same lane verifies needs none
    context: int = -1  # cached tokens of all rows; -1: not counted yet
    worker: int = 0  # of several that work side by side in its lane
    packed: int = 0  # new tokens of all rows where their numbers differ, up to `tokens` each; 0: all have `tokens`
    early: bool = False  # a draft that is launched before the verdict that it follows is known
