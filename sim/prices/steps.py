"""What a serving engine adds to its kernels, and how far its predictions were off. `sim/engines` has the figures."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


class GraphSizes(NamedTuple):
    """Sizes that an engine pads a forward to: those of its CUDA graphs; none: no padding."""

    row_buckets: tuple[int, ...] = ()
    chunk_buckets: tuple[int, ...] = ()  # of prompt tokens
    token_buckets: tuple[int, ...] = ()  # of all tokens of a forward, in place of both


@dataclass(frozen=True)
class EngineStep:
    """What an engine adds to its kernels: one set for all models and cards."""

    step_s: float = 0.0  # between the end of a forward and the next: scheduling, sampling, what is not in a graph
    row_s: float = 0.0  # the same per request of a step
    layer_s: float = 0.0  # per layer and forward: small kernels and gaps between kernels
    state_s: float = 0.0  # more per layer that keeps a state: small kernels that newer versions fuse
    sparse_s: float = 0.0  # the same of sparse attention
    kernels: float = 1.0  # times as long as in the tables, of layers over few tokens and of decode attention, ...
    prompts: float = 1.0  # ... and of those over many
    experts: float = 1.0  # ... and of experts, besides
    expert_prompts: float = 1.0
    mxfp4_experts: float | None = None  # the same of MXFP4, which other kernels multiply; None: as of the others
    mxfp4_prompts: float | None = None
    reduces: float = 1.0  # ... and of all-reduces, which engines fuse with norms
    quantised_s: float = 0.0  # more per product of 8 or 4 bits; below 0 where tables quantise what engines fuse
    # Whose times products of 8 bits with a scale per block have: vLLM's own were timed waiting for the host.
    block_products: str = "fp8_block"
    # Least time per layer of a forward with prompts, which is not in a CUDA graph: the host launches its kernels one by
    # one. Of models with a latent KV cache or states, whose layers have some forty; others' are longer than that.
    eager_layer_s: float = 0.0
    launched_s: float = 0.0  # least time per layer of every forward, where none is in a CUDA graph
    request_s: float = 0.0  # from a request's arrival until the scheduler has it, and to stream its first token
    prompt_token_s: float = 0.0  # per prompt token, to receive and tokenise it: one request after the other
    handover_s: float = 0.0  # with prefill apart, per request: router, connector, and waits for a step of either engine
    round_s: float = 0.0  # more per forward that verifies drafts: rejection sampling, metadata, waiting for counts
    uneven_s: float = 0.0  # more per layer of such a forward where its rows' lengths leave the full CUDA graphs
    latent_s: float = 0.0  # more per layer of such a forward whose attention keeps a latent KV cache
    draft_s: float = 0.0  # more per forward of a drafter: what is not in a graph
    # Least time per layer of a drafter's forward whose kernels the host launches one by one; more where it is sharded,
    # since each layer then has two all-reduces.
    draft_layer_s: float = 0.0
    draft_shard_s: float = 0.0
    round_row_s: float = 0.0  # more per request of a step with a drafter, to sample and deliver several tokens
    sync_s: float = 0.0  # more between steps where the next one is scheduled only after the last one's tokens are read
    sync_row_s: float = 0.0  # the same per request

    def serving(self, drafts: bool, asynchronous: bool) -> EngineStep:
        """The same with what the host adds between steps with a drafter, or without asynchronous scheduling."""
        step_s, row_s = (0.0, 0.0) if asynchronous else (self.sync_s, self.sync_row_s)
        row_s += self.round_row_s if drafts else 0.0
        return replace(self, step_s=self.step_s + step_s, row_s=self.row_s + row_s)

    def expert_factors(self, kind: str) -> tuple[float, float]:
        """Times as long as in the tables that experts of a type take, over few tokens and over many."""
        own = (self.mxfp4_experts, self.mxfp4_prompts) if "mxfp4" in kind else (None, None)
        return (self.experts if own[0] is None else own[0], self.expert_prompts if own[1] is None else own[1])


@dataclass(frozen=True)
class EngineError:
    """Errors of an engine's predictions against measured servers, as shares."""

    tpot: float  # 95% of the rows lie within
    ttft: float
    ratio: float  # of the ratio of two rows of one card, engine and model, in TPOT: 95% lie within
    rows: int
    here: bool = True  # on this card; False: on the engine's other cards
