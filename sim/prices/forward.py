"""What the parts of one model's forward cost on one GPU: the figures, as a profile's file holds them, and their laws.

A part with knots is as measured; without them it is at the card's ceilings. `costs` adds the parts up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import Annotated, Any, Self, get_type_hints

from pdvsim.sim.limits import MAX_TOKENS, Range, Share, Tokens
from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.prices.cards import flops_of

Knots = tuple[tuple[int, float], ...]  # (size, value) as measured, read between by straight lines
RatioKnots = tuple[tuple[int, Annotated[float, Range(0.1, 10)]], ...]  # the same, of ratios
# Of one forward, or of a part of it: more is milliseconds, or would stop the clock
TIME = Range(0, 60)
ForwardSeconds = Annotated[float, TIME]
Prompts = Sequence[tuple[int, int]]  # chunks of prompts, each as (cached tokens before it, new tokens)

REQUIRED = ("fixed_s", "weights_s", "token_s", "head_weights_s", "head_token_s", "kv_s", "pair_s")  # of a file
MAX_CONTEXT_PARTS = 32
# The engine's attention over prompts: queries per program, fewer for heads wider than this; of heads up to
# the small size two programs fit a multiprocessor, and one alone on it takes a share of the time
PROMPT_QUERIES, WIDE_QUERIES, WIDE_HEAD, SMALL_HEAD = 128, 64, 128, 64
# TinyLlama 0.63, Llama-3.2-1B 0.64 on an H200: 64 programs against 128, which already meet in pairs. In between nothing
# was measured; half of the multiprocessors is where it is taken to begin.
UNSHARED = 0.63


@dataclass(frozen=True, slots=True)
class ForwardTerms:
    """The parts of a forward, which add up. Figures whose names end in `_s` or `_knots` are seconds."""

    # The layers' products: a fixed time, and the larger of reading weights and experts, and multiplying
    fixed_s: ForwardSeconds = 0.0
    weights_s: ForwardSeconds = 0.0
    token_s: ForwardSeconds = 0.0  # arithmetic per token
    sharpness: Annotated[float, Range(1, 100)] | None = (
        None  # p-norm that joins the two, of the output projection too; None: the larger
    )
    layer_knots: Knots = ()  # as measured by tokens, with all that does not depend on the context
    expert_s: ForwardSeconds = 0.0  # to read a distinct expert, in all layers that have experts
    # The output projection
    head_weights_s: ForwardSeconds = 0.0
    head_token_s: ForwardSeconds = 0.0
    # Attention: the larger of reading the KV cache and multiplying with it
    kv_s: ForwardSeconds = 0.0  # per cached token read
    pair_s: ForwardSeconds = 0.0  # per (query token, context token) pair multiplied
    # Attention of rows as measured by tokens per row: wider queries take more tiles
    kv_knots: Knots = ()  # seconds per cached token read
    span_knots: Knots = ()  # per cached token of the stretch that one program reads: few do not fill the card
    row_factors: Knots = ()  # (rows, factor) of both
    programs: Annotated[int, Range(0, 1_000_000)] = (
        0  # rows are split until about this many programs read; 0: one program per row
    )
    split_s: ForwardSeconds = 0.0  # per forward whose rows are cut, to join the parts
    width_knots: Knots = ()  # per forward that has rows
    row_s: ForwardSeconds = 0.0  # per row, whatever its context
    rows_knots: Knots = ()  # (rows, seconds) per forward that has rows, whatever their context
    past_share: Share | None = None  # of the time per cached token, what is left past the window; None: the bytes'
    past_knots: Knots = ()  # (rows, seconds) more per forward past the window: an indexer selects there alone
    # Attention over prompts as measured: as many waves of programs as its queries and heads fill
    prompt_sms: Annotated[int, Range(0, 1024)] = 0  # multiprocessors that programs are spread over
    prompt_wave_s: ForwardSeconds = 0.0  # per context token that a wave goes through
    past_prompts: Share | None = None  # share of `pair_s` past the window; None: that of the flops
    # What prompts cost besides their layers and attention
    mixed_s: ForwardSeconds = 0.0  # per forward that has both rows and a prompt
    prompt_token_s: ForwardSeconds = 0.0  # per prompt token: an engine that prefills slower
    least_s: ForwardSeconds = 0.0  # of a forward with prompts, whose kernels the host launches one by one
    # Experts that take the tokens of several data-parallel ranks
    spread_knots: Knots = ()  # by tokens of all ranks: the experts' kernels, but for reading distinct experts
    exchange_knots: Knots = ()  # by tokens of the rank with the most: sending them to experts, and results back
    # The product that fuses a head's inputs, once per draft and in the prefill of prompts, by tokens
    fused_knots: Knots = ()
    # What a shard exchanges with the others of its group
    reduce_knots: Knots = ()  # by tokens: the all-reduces of all layers
    gather_knots: Knots = ()  # by logits: gathering them
    # Layers that keep a state per request
    state_knots: Knots = ()  # by states that rows read or write
    scan_knots: Knots = ()  # by tokens of prompts
    draft_ratio: Annotated[float, Range(0.01, 10)] = (
        1.0  # time of a draft of several steps in one launch over that of its forwards one by one
    )
    # Which forwards have kernels small enough to run concurrently with another's
    small_kernel_tokens: Annotated[int, Range(0, MAX_TOKENS)] = 0  # most tokens of such a forward
    large_s: ForwardSeconds = 0.0  # its time in large products, whose kernels are not
    # By prompt tokens: how long its kernels keep others waiting and how much of the GPU they occupy, over what its time
    # per layer predicts. The library has other kernels for other sizes, and their last blocks leave parts of it free.
    wait_ratios: RatioKnots = ()
    room_ratios: RatioKnots = ()
    # Sizes that an engine pads a forward to: those of its CUDA graphs; none: no padding
    row_buckets: tuple[Annotated[int, Range(1, 65_536)], ...] = ()
    chunk_buckets: tuple[Tokens, ...] = ()  # of prompt tokens
    token_buckets: tuple[Tokens, ...] = ()  # of all tokens of a forward, in place of both

    @classmethod
    def roofline(cls, spec: ModelSpec, gpu: GpuSpec) -> ForwardTerms:
        """The lower bound from peak bandwidth and arithmetic."""
        bandwidth, flops, item = gpu.bandwidth_bytes_per_s, gpu.flops_per_s, spec.dtype_bytes
        fused_s, ridge = spec.fused_params * item / bandwidth, int(item * flops / (2 * bandwidth))  # both are equal
        nothing, ranks = ((1, 0.0), (2, 0.0)) if spec.data_ranks > 1 else (), spec.data_ranks > 1
        own_params = spec.common_params if ranks else spec.active_params  # of experts on ranks the reading is counted
        state_s = spec.row_bytes / bandwidth
        return cls(
            weights_s=spec.common_bytes / bandwidth,
            token_s=2 * own_params / flops_of(spec, gpu),
            expert_s=spec.expert_bytes / bandwidth,
            head_weights_s=spec.head_params * item / bandwidth,
            head_token_s=2 * spec.head_params / flops,
            kv_s=spec.kv_bytes_per_token / bandwidth,
            pair_s=spec.attention_flops_per_pair / flops,
            spread_knots=nothing,
            exchange_knots=nothing,
            fused_knots=((ridge, fused_s), (2 * ridge, 2 * fused_s)) if fused_s else (),
            state_knots=((0, 0.0), (1, state_s)) if state_s else (),
            scan_knots=((0, 0.0), (1, spec.row_flops / flops)) if state_s else (),
        )

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> ForwardTerms:
        """The terms that the figures of a file stand for."""
        return cls(**{name: _tuples(value) for name, value in figures.items()})

    def figures(self) -> dict[str, Any]:
        """The figures as a file holds them; those that say nothing are left out where they are optional."""
        usual, own = ForwardTerms(), {name: getattr(self, name) for name in FIGURES}
        return {name: value for name, value in own.items() if name in REQUIRED or value != getattr(usual, name)}

    def scaled(self, factor: float, sent: float | None = None) -> Self:
        """Multiply every time by `factor`, and the communication of shards by `sent`, if given."""
        if factor == 1 and sent in (None, 1):
            return self
        times: dict[str, Any] = {}
        for name in FIGURES:
            value, by = getattr(self, name), factor
            if sent is not None and name in ("reduce_knots", "gather_knots"):
                by = sent
            if name.endswith("_knots"):
                times[name] = tuple((at, seconds * by) for at, seconds in value)
            elif name.endswith("_s"):
                times[name] = value * by
        return replace(self, **times)

    def with_cache(self, share: float) -> Self:
        """The same with that share of the KV cache's bytes, and of the time in which one query per row reads it."""

        def less(knots: Knots) -> Knots:
            return tuple((at, seconds - (1 - share) * knots[0][1]) for at, seconds in knots)

        return replace(self, kv_s=self.kv_s * share, kv_knots=less(self.kv_knots), span_knots=less(self.span_knots))

    # seconds ---------------------------------------------------------------------------------------------------------

    def layers_s(self, tokens: int, experts: float = 0.0) -> float:
        """Seconds of the layers' products, which read `experts` distinct experts in each layer."""
        experts_s = self.expert_s * experts if experts else 0.0
        if self.layer_knots:
            return interpolate(self.layer_knots, tokens) + experts_s
        return self.fixed_s + larger(self.weights_s + experts_s, self.token_s * tokens, self.sharpness)

    def logits_s(self, logits: int) -> float:
        """Seconds of the output projection."""
        return larger(self.head_weights_s, self.head_token_s * logits, self.sharpness)

    def spread_s(self, tokens: int, most: int) -> float:
        """Seconds of shared experts for the tokens of all ranks, of which one rank has `most`."""
        return interpolate(self.spread_knots, tokens) + interpolate(self.exchange_knots, most)

    def rows_line(
        self, kv_heads: int, rows: int, padded: int, tokens: int, read: float, pairs: float
    ) -> tuple[float, float]:
        """Attention of rows with `tokens` queries each: seconds at no context, and per cached token.

        At no context they read `read` tokens in `pairs`. At the ceilings, the larger is taken of offset and slope
        separately, which keeps it linear.
        """
        if not self.kv_knots:
            return max(pairs * self.pair_s, read * self.kv_s), max(tokens * self.pair_s, self.kv_s)
        splits, slope = cuts(padded * kv_heads, self.programs), interpolate(self.kv_knots, tokens)
        if self.span_knots:
            slope = self._joined(slope, interpolate(self.span_knots, tokens) / (rows * splits))
        if self.row_factors:
            slope *= interpolate(self.row_factors, padded)
        fixed = read * slope + rows * self.row_s
        if splits > 1:
            fixed += self.split_s
        if self.width_knots:
            fixed += interpolate(self.width_knots, tokens)
        if self.rows_knots:
            fixed += interpolate(self.rows_knots, rows)
        return fixed, slope

    def _joined(self, wide_s: float, long_s: float) -> float:
        """Reading at the card's speed and at that of one program."""
        return hypot(wide_s, long_s)

    def prefill_s(self, heads: int, head_dim: int, prompts: Prompts, window: int = 0) -> float:
        """Seconds of attention over prompts if all layers had this window; 0: none."""
        if self.prompt_sms:
            return self.prompt_wave_s * in_waves(prompts, heads, head_dim, self.prompt_sms, window)
        return sum(
            max((min(start, window or start) + n) * self.kv_s, pairs(start, n, window) * self.pair_s)
            for start, n in prompts
        )

    def empty_share(self, heads: int, head_dim: int, prompts: Prompts, share: float) -> float:
        """Share of the GPU that attention's last wave leaves empty, over a launch of whose time it takes `share`."""
        if not self.prompt_sms:
            return 0.0
        block, at_once = _prompt_programs(head_dim, self.prompt_sms)
        programs = heads * sum(-(-n // block) for _, n in prompts)
        return share - share * programs / (-(-programs // at_once) * at_once)

    def small_share(self, tokens: int, forward_s: float) -> float:
        """Share of the time of a forward over `tokens` in small kernels."""
        return 0.0 if tokens > self.small_kernel_tokens or forward_s <= self.large_s else 1.0 - self.large_s / forward_s

    # sizes that are computed -----------------------------------------------------------------------------------------

    def padded_rows(self, rows: int) -> int:
        """Rows that are computed."""
        return _up_to(self.row_buckets, rows) if rows else 0

    def padded_packed(self, rows: int, tokens: int) -> int:
        """Tokens of rows of unequal length: padded like rows, and beyond the largest to multiples of theirs."""
        if not self.row_buckets or tokens <= self.row_buckets[-1]:
            return self.padded_rows(tokens)
        padded = self.padded_rows(rows)
        return -(-tokens // padded) * padded

    def padded_prompt(self, tokens: int) -> int:
        """Prompt tokens that are computed."""
        return _up_to(self.chunk_buckets, tokens) if tokens else 0

    def padded_tokens(self, tokens: int) -> int:
        """Tokens of a whole forward that are computed."""
        return _up_to(self.token_buckets, tokens)


FIGURES: dict[str, Any] = get_type_hints(ForwardTerms)


def large_products_s(spec: ModelSpec, small_bytes: float, bytes_per_s: float) -> float:
    """Seconds to read a model's products that are larger than `small_bytes`."""
    item = spec.layer_bytes or spec.dtype_bytes
    kinds = [(count, [inputs * outputs * item for inputs, outputs in layer]) for count, layer in spec.layer_kinds]
    return sum(count * sum(size for size in sizes if size > small_bytes) for count, sizes in kinds) / bytes_per_s


def interpolate(knots: Knots, at: int) -> float:
    """Linear interpolation, extrapolated after the last knot; before the first, its value; 0 without any."""
    if not knots:
        return 0.0
    right = bisect_left(knots, (at, 0.0), 1, len(knots) - 1)
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    return y0 + (y1 - y0) * (max(at, knots[0][0]) - x0) / (x1 - x0)


def ratio_at(ratios: Knots, tokens: int) -> float:
    """The ratio for a number of tokens; outside the measured ones, that of the nearest; 1 without any."""
    if len(ratios) < 2:
        return ratios[0][1] if ratios else 1.0
    return interpolate(ratios, min(tokens, ratios[-1][0]))


def larger(memory_s: float, compute_s: float, sharpness: float | None) -> float:
    """The larger of two times; with a sharpness, their p-norm of that p."""
    top = memory_s if memory_s > compute_s else compute_s
    if sharpness is None or not top:
        return top
    return float(top * ((memory_s / top) ** sharpness + (compute_s / top) ** sharpness) ** (1 / sharpness))


def cuts(programs: int, wanted: int) -> int:
    """Parts that each row's context is split into, a power of two, so that `programs` times it is near `wanted`."""
    return 1 << (max(1, min(MAX_CONTEXT_PARTS, wanted // programs)).bit_length() - 1)


def in_waves(prompts: Prompts, heads: int, head_dim: int, sms: int, window: int = 0) -> float:
    """Context tokens that prefill attention processes in sequence.

    A program takes a block of queries of one head through its context. As many run concurrently as fit the
    multiprocessors, the longest contexts first, and each such wave takes as long as its longest. In a window a program
    goes through no more than that and its own block; 0: there is none.
    """
    block, at_once = _prompt_programs(head_dim, sms)
    blocks = longest = 0
    for start, n in prompts:
        blocks += -(-n // block)
        if start + n > longest:
            longest = start + n
    programs, most = heads * blocks, window + block if window else longest
    longest = min(longest, most)
    if programs <= at_once:
        return UNSHARED * longest if at_once > sms and 2 * programs <= sms else longest
    block_contexts: list[int] = []
    for start, n in prompts:
        block_contexts += start + n, *range(start + (n - 1) // block * block, start, -block)
    block_contexts.sort(reverse=True)
    return sum([min(most, block_contexts[first // heads]) for first in range(0, programs, at_once)])


def _prompt_programs(head_dim: int, sms: int) -> tuple[int, int]:
    """Queries per program of prefill attention, and the number of programs that run concurrently."""
    return WIDE_QUERIES if head_dim > WIDE_HEAD else PROMPT_QUERIES, 2 * sms if head_dim <= SMALL_HEAD else sms


def pairs(start: int, tokens: int, window: int = 0) -> float:
    """(query, context token) pairs of a chunk: causal, over what is cached before it and over itself, in a window."""
    causal = min(tokens, max(0, window - start)) if window else tokens
    return causal * start + causal * (causal + 1) / 2 + (tokens - causal) * window


def _up_to(buckets: Sequence[int], size: int) -> int:
    """The first bucket that holds `size`; `size` itself where there is none."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else size


def _tuples(value: Any) -> Any:
    """A figure of a file with tuples for lists."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
