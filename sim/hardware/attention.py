"""Terms of attention: rows that read their KV cache, and prompts.

Each is at a card's ceilings, or as measured. The cost of rows is linear in their cached tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot

from pdvsim.sim.hardware.terms import Knots, Term, interpolate
from pdvsim.sim.specs import ModelSpec

MAX_CONTEXT_PARTS = 32
# The engine's attention over prompts: queries per program, fewer for heads wider than this; of heads up to
# the small size two programs fit a multiprocessor, and one alone on it takes a share of the time
PROMPT_QUERIES, WIDE_QUERIES, WIDE_HEAD, SMALL_HEAD = 128, 64, 128, 64
# TinyLlama 0.63, Llama-3.2-1B 0.64 on an H200: 64 programs against 128, which already meet in pairs. In between nothing
# was measured; half of the multiprocessors is where it is taken to begin.
UNSHARED = 0.63

Prompts = Sequence[tuple[int, int]]  # chunks of prompts, each as (cached tokens before it, new tokens)


@dataclass(frozen=True, slots=True)
class RooflineAttention(Term):
    """Attention of rows or prompts that takes the larger of reading the KV cache and multiplying with it."""

    kv_s: float = 0.0  # per cached token read
    pair_s: float = 0.0  # per (query token, context token) pair multiplied
    past_prompts: float | None = None  # share of `pair_s` past the window; None: that of the flops

    @property
    def past_share(self) -> float | None:
        """Share of a row's time per cached token that is left past the window; None: that of the bytes."""
        return None

    def past_s(self, rows: int) -> float:
        """Return 0: at the roofline nothing is added past the window."""
        return 0.0

    def line(
        self, spec: ModelSpec, rows: int, padded: int, tokens: int, read: float, pairs: float
    ) -> tuple[float, float]:
        """Seconds of rows with `tokens` queries each: at no context, and per cached token.

        At no context they read `read` tokens in `pairs`. The larger is taken of offset and slope separately, which
        keeps it linear.
        """
        return max(pairs * self.pair_s, read * self.kv_s), max(tokens * self.pair_s, self.kv_s)

    def prefill_s(self, spec: ModelSpec, prompts: Prompts, window: int) -> float:
        """Seconds of attention over prompts if all layers had this window; 0: none."""
        return sum(
            max((min(start, window or start) + n) * self.kv_s, pairs(start, n, window) * self.pair_s)
            for start, n in prompts
        )

    def empty_share(self, spec: ModelSpec, prompts: Prompts, share: float) -> float:
        """Return 0: at the roofline nothing is known of it."""
        return 0.0

    def with_cache(self, share: float) -> RooflineAttention:
        """Return the same with that share of the KV cache's bytes."""
        return replace(self, kv_s=self.kv_s * share)


@dataclass(frozen=True, slots=True)
class MeasuredAttention(Term):
    """Attention of rows as measured by tokens per row: wider queries take more tiles."""

    kv_knots: Knots  # seconds per cached token read
    span_knots: Knots = ()  # per cached token of the stretch that one program reads: few do not fill the card
    row_factors: Knots = ()  # (rows, factor) of both
    programs: int = 0  # rows are split until about this many programs read; 0: one program per row
    split_s: float = 0.0  # per forward whose rows are cut, to join the parts
    width_knots: Knots = ()  # per forward that has rows
    row_s: float = 0.0  # per row, whatever its context
    rows_knots: Knots = ()  # (rows, seconds) per forward that has rows, whatever their context
    past_share: float | None = None  # of the time per cached token, what is left past the window; None: the bytes'
    past_knots: Knots = ()  # (rows, seconds) more per forward past the window: an indexer selects there alone

    def past_s(self, rows: int) -> float:
        """Seconds that rows past the window take besides."""
        return interpolate(self.past_knots, rows) if self.past_knots else 0.0

    def line(
        self, spec: ModelSpec, rows: int, padded: int, tokens: int, read: float, pairs: float
    ) -> tuple[float, float]:
        """Seconds of rows with `tokens` queries each: at no context, where they read `read`, and per cached token."""
        splits, slope = cuts(padded * spec.kv_heads, self.programs), interpolate(self.kv_knots, tokens)
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

    def with_cache(self, share: float) -> MeasuredAttention:
        """The same with that share of the KV cache's bytes, and of the time in which one query per row reads it."""

        def less(knots: Knots) -> Knots:
            return tuple((at, seconds - (1 - share) * knots[0][1]) for at, seconds in knots)

        return replace(self, kv_knots=less(self.kv_knots), span_knots=less(self.span_knots))


@dataclass(frozen=True, slots=True)
class WaveAttention(Term):
    """Attention over prompts that takes as many waves of programs as its queries and heads fill."""

    prompt_sms: int  # multiprocessors that programs are spread over
    prompt_wave_s: float  # per context token that a wave goes through

    @property
    def past_prompts(self) -> float | None:
        """Share of the time past the window: that of the flops."""
        return None

    def prefill_s(self, spec: ModelSpec, prompts: Prompts, window: int) -> float:
        """Seconds of attention over prompts if all layers had this window; 0: none."""
        return self.prompt_wave_s * in_waves(prompts, spec.heads, spec.head_dim, self.prompt_sms, window)

    def empty_share(self, spec: ModelSpec, prompts: Prompts, share: float) -> float:
        """Share of the GPU that its last wave leaves empty, over a launch of whose time it takes `share`."""
        block, at_once = _prompt_programs(spec.head_dim, self.prompt_sms)
        programs = spec.heads * sum(-(-n // block) for _, n in prompts)
        return share - share * programs / (-(-programs // at_once) * at_once)

    def with_cache(self, share: float) -> WaveAttention:
        """The same: it multiplies longer than it reads."""
        return self


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
