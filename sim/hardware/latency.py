"""Duration of a launch that runs alone at full clock, and its demand on the GPU.

A forward over N new tokens costs `fixed + larger(weights, N * token) + head + attention`. Attention costs the larger of
reading the KV cache and multiplying with it. A mixture of experts also reads the distinct experts that its tokens take:
those of one request share more of them than those of different requests. The coefficients come from a profile.

For a given batch shape the cost is linear in the number of cached tokens, so a shape is priced once and a launch costs
one multiplication. Where layers have a sliding window there are two lines: up to a mean context of the window, and from
there on, where these layers read no more. Prefill attention takes as many waves of programs as its queries and heads
fill (`in_waves`). A shard's forward also includes its communication with the group.

Rows whose drafter lacks more than one token, after plain decoding, are caught up first, a few at a time and priced like
prompts. A head reads the accepted tokens again in the first forward of its draft and fuses hidden states there.

Not modelled here: contention and the clock, which depend on other launches (`contention`, `power`); the spread of
repeated runs of one kernel; unequal context lengths in a batch, beyond their sum (windowed layers are overestimated
where some rows are shorter than the window and others longer); unequal draft lengths in the number of distinct experts,
beyond their mean; experts that are more popular than others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import hypot
from typing import Any, NamedTuple

from pdvsim.sim.core import Chunk, GpuSpec, ModelSpec, Request
from pdvsim.sim.hardware.cards import flops_of
from pdvsim.sim.hardware.host import LOOKUP_ROW_S, LOOKUP_TOKEN_S
from pdvsim.sim.limits import MAX_DRAFT

STRETCHES = 4  # rows that one forward of the engine catches up
MAX_CONTEXT_PARTS = 32
# The engine's attention over prompts: a program takes so many queries, fewer of heads wider than this; of heads up to
# the small size two programs fit a multiprocessor, and one alone on it takes a share of the time
PROMPT_QUERIES, WIDE_QUERIES, WIDE_HEAD, SMALL_HEAD = 128, 64, 128, 64
# TinyLlama 0.63, Llama-3.2-1B 0.64 on an H200: 64 programs against 128, which already meet in pairs. In between nothing
# was measured; half of the multiprocessors is where it is taken to begin.
UNSHARED = 0.63


@dataclass(frozen=True, slots=True)
class ForwardFit:
    """Time coefficients of one model's forward pass on one GPU."""

    fixed_s: float  # per forward, whatever its size
    weights_s: float  # streaming the layers' weights
    token_s: float  # layers' arithmetic per token
    head_weights_s: float
    head_token_s: float
    kv_s: float  # per cached token read
    pair_s: float  # per (query token, context token) pair multiplied
    sharpness: float | None = None  # p-norm that joins the memory and compute regimes; None: the larger of the two
    # (tokens, seconds) of a forward's layers as measured, read between by straight lines; in place of fixed_s,
    # weights_s and token_s
    layer_knots: tuple[tuple[int, float], ...] = ()
    # (tokens, seconds) of the product that fuses a head's inputs, once a draft and in the reading of prompts
    fused_knots: tuple[tuple[int, float], ...] = ()
    # (tokens a row, seconds per cached token read) as measured, in place of kv_s and pair_s: wider queries take more
    # tiles
    kv_knots: tuple[tuple[int, float], ...] = ()
    # (tokens a row, seconds per cached token of the stretch that one program reads): few programs do not fill the card
    span_knots: tuple[tuple[int, float], ...] = ()
    row_factors: tuple[tuple[int, float], ...] = ()  # (rows, factor) of both
    programs: int = 0  # rows are cut into stretches until about so many programs read; 0: one stretch a row
    split_s: float = 0.0  # per forward whose rows are cut, to join the parts
    # per context token that attention over prompts goes through wave by wave, and the multiprocessors that its programs
    # are spread over; 0: the larger of kv_s and pair_s
    prompt_wave_s: float = 0.0
    prompt_sms: int = 0
    width_knots: tuple[tuple[int, float], ...] = ()  # (tokens a row, seconds) per forward that has rows
    row_s: float = 0.0  # per row of a decode or verify, whatever its context
    rows_knots: tuple[tuple[int, float], ...] = ()  # (rows, seconds) per forward that has rows, whatever their context
    mixed_s: float = 0.0  # per forward that has both rows and a prompt
    prompt_token_s: float = 0.0  # per prompt token, beyond all else: an engine that prefills slower
    # up to so many tokens a forward's kernels are small enough to run beside another's, but for those of its large
    # products, which take so long
    nimble_tokens: int = 0
    large_s: float = 0.0
    expert_s: float = 0.0  # per distinct expert that a forward reads, in all layers that have experts
    # (tokens, seconds) of a shard's all-reduces in all layers, and (logits, seconds) of gathering its logits
    reduce_knots: tuple[tuple[int, float], ...] = ()
    gather_knots: tuple[tuple[int, float], ...] = ()
    draft_ratio: float = 1.0  # time of a draft of several steps over that of its forwards one by one
    row_buckets: tuple[int, ...] = ()  # batches are padded up to these sizes; none: no padding
    chunk_buckets: tuple[int, ...] = ()  # and prompt tokens up to these
    token_buckets: tuple[int, ...] = ()  # all tokens of a forward are padded up to these, in place of both

    @classmethod
    def roofline(cls, spec: ModelSpec, gpu: GpuSpec) -> ForwardFit:
        """The lower bound from peak bandwidth and arithmetic."""
        bandwidth, flops, layer_flops = gpu.bandwidth_bytes_per_s, gpu.flops_per_s, flops_of(spec, gpu)
        fused_s = spec.fused_params * spec.dtype_bytes / bandwidth
        ridge = int(spec.dtype_bytes * flops / (2 * bandwidth))  # tokens from which on arithmetic takes longer
        return cls(
            fixed_s=0.0,
            weights_s=spec.common_bytes / bandwidth,
            token_s=2 * spec.active_params / layer_flops,
            head_weights_s=spec.head_params * spec.dtype_bytes / bandwidth,
            head_token_s=2 * spec.head_params / flops,
            kv_s=spec.kv_bytes_per_token / bandwidth,
            pair_s=spec.attention_flops_per_pair / flops,
            fused_knots=((ridge, fused_s), (2 * ridge, 2 * fused_s)) if fused_s else (),
            expert_s=spec.expert_bytes / bandwidth,
        )

    def scaled(self, factor: float, sent: float | None = None) -> ForwardFit:
        """Multiply every time by `factor`, and the communication of shards by `sent`, if given."""
        if factor == 1 and sent in (None, 1):
            return self
        times: dict[str, Any] = {}
        for part in fields(self):
            value = getattr(self, part.name)
            if part.name in ("reduce_knots", "gather_knots"):
                times[part.name] = tuple((at, seconds * (factor if sent is None else sent)) for at, seconds in value)
            elif part.name.endswith("_knots"):
                times[part.name] = tuple((at, seconds * factor) for at, seconds in value)
            elif part.name.endswith("_s") and value is not None:
                times[part.name] = value * factor
        return replace(self, **times)

    def with_cache(self, share: float) -> ForwardFit:
        """The same with that share of the KV cache's bytes, and of the time in which one query per row reads it."""
        knots: dict[str, Any] = {
            name: tuple((at, seconds - (1 - share) * value[0][1]) for at, seconds in value)
            for name in ("kv_knots", "span_knots")
            if (value := getattr(self, name))
        }
        return replace(self, kv_s=self.kv_s * share, **knots)


class Shape(NamedTuple):
    """The price of a batch shape: each value is `_0 + _1 * cached tokens over all rows`."""

    solo_0: float
    solo_1: float
    bytes_0: float
    bytes_1: float
    flops_0: float
    flops_1: float


@dataclass(eq=False)
class Load:
    """A launch that shares a GPU: its demands, from its roofline, and the `rate` that sharing gives it."""

    compute: float = 0.0  # shares of the GPU's arithmetic and bandwidth that it uses alone
    bandwidth: float = 0.0
    priority: int = 0
    turn_s: float = 0.0  # time per layer, alone
    nimble: float = 0.0  # share of its kernels that are small enough to run concurrently with others
    experts_read: float = 0.0  # share of all experts
    empty: float = 0.0  # share of the GPU, over its time, that attention over prompts has too few programs to fill
    share: float = 0.0  # of the turns, kept here once worked out; 0 before
    rate: float = 0.0
    solo_s: float = 0.0
    eight_bits: bool = False  # whether a dense model multiplies in 8 bits


_NOTHING = Shape(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Latency:
    """Prices the launches of one model on one GPU."""

    def __init__(self, spec: ModelSpec, fit: ForwardFit) -> None:
        self.spec = spec
        self.fit = fit
        self._layer_bytes, self._expert_bytes = float(spec.common_bytes), spec.expert_bytes
        self._head_bytes = float(spec.head_params * spec.dtype_bytes)
        self._layer_flops = 2.0 * spec.active_params
        self._head_flops = 2.0 * spec.head_params
        self._expert_share = 1 - spec.common_params / spec.active_params if spec.experts is not None else 0.0
        self._kv_bytes = float(spec.kv_bytes_per_token)
        self._pair_flops = float(spec.attention_flops_per_pair)
        self._fused_bytes = float(spec.fused_params * spec.dtype_bytes)
        self.window = spec.sliding_window or 0
        self._growing = spec.attending_layers / spec.layers if self.window and spec.layers else 1.0
        self.widest = widest_draft(spec)
        self._shapes: dict[tuple[int, int, int, bool], Shape] = {}
        self._rests: dict[tuple[int, int, int], Shape] = {}

    def is_past_window(self, rows: int, context: float) -> bool:
        """Whether rows with so many cached tokens in all have more than the window on average."""
        return bool(self.window) and context > rows * self.window

    def growing_kv_bytes(self, rows: int, context: float) -> float:
        """KV cache that a forward reads per further cached token."""
        return self._kv_bytes * self._growing if self.is_past_window(rows, context) else self._kv_bytes

    def shape(self, rows: int, tokens: int, steps: int = 1, context: float = 0) -> Shape:
        """Price of `steps` forwards over `rows`: the first has `tokens` new tokens per row, the others one.

        A model that drafts in parallel has one forward instead, with as many tokens in all.

        `context`: the cached tokens at which it is to be used, which matter to models with windows.
        """
        key = (rows, tokens, steps, self.is_past_window(rows, context))
        shape = self._shapes.get(key)
        if shape is None:
            drafted = steps if self.spec.parallel else 1
            if self.spec.parallel:
                tokens, steps = tokens + steps - 1, 1
            # of a row: its newest token of a head, its drafts of a model that drafts in parallel
            logits = self._padded(rows) * (drafted if self.widest > 2 else tokens)
            new = self._filled(self._padded(rows) * tokens)
            read = self._distinct(rows, tokens)
            shape = self._with_layers(self._fused(self._rest(rows, tokens, steps), new), new, logits, read)
            if steps > 1:
                shape = shape._replace(
                    solo_0=shape.solo_0 * self.fit.draft_ratio, solo_1=shape.solo_1 * self.fit.draft_ratio
                )
            shape = self._shapes[key] = self._windowed(shape, rows) if key[3] else shape
        return shape

    def _windowed(self, shape: Shape, rows: int) -> Shape:
        """The line of a price past the window: windowed layers read as much as at the window, the others go on."""
        within = (1 - self._growing) * rows * self.window
        solo_0, solo_1, bytes_0, bytes_1, flops_0, flops_1 = shape
        return Shape(
            solo_0 + within * solo_1, self._growing * solo_1, bytes_0 + within * bytes_1, self._growing * bytes_1,
            flops_0 + within * flops_1, self._growing * flops_1,
        )  # fmt: skip

    def carrying(
        self, rows: int, tokens: int, steps: int, chunks: Sequence[Chunk], first_tokens: bool, packed: int = 0,
        context: float = 0,
    ) -> Shape:  # fmt: skip
        """Like `shape`, but the first forward also carries prompt chunks and yields first tokens where prompts end.

        If the rows have `packed` new tokens in all, up to `tokens` each, attention is padded and the layers are not.
        """
        new = logits = _up_to(self.fit.row_buckets, packed) if packed else self._padded(rows) * tokens
        prompt = 0
        moved = flops = 0.0
        fit, read = self.fit, []
        for chunk in chunks:
            n, start = chunk.tokens, chunk.start
            prompt += n
            read.append((start, n))
            if first_tokens and start + n >= chunk.request.to_read:
                logits += 1
            moved += self._over_window(start + n, min(start, self.window) + n) * self._kv_bytes
            flops += self._over_window(_pairs(start, n), _pairs(start, n, self.window)) * self._pair_flops
        solo = self._over_prompts(read) + fit.prompt_token_s * prompt
        new = self._filled(new + self._padded_prompts(prompt))
        if rows and chunks:
            solo += fit.mixed_s
        rest = self._fused(self._rest(rows, tokens, steps) if rows else _NOTHING, new)
        priced = self._with_layers(rest, new, logits, self._distinct(rows, packed / rows if packed else tokens, read))
        if rows and self.is_past_window(rows, context):
            priced = self._windowed(priced, rows)
        return Shape(
            priced.solo_0 + solo, priced.solo_1, priced.bytes_0 + moved, priced.bytes_1, priced.flops_0 + flops,
            priced.flops_1,
        )  # fmt: skip

    def behind(self, rows: Sequence[Request]) -> Shape:
        """Price of the forwards that catch the drafter up on rows that lack more tokens than a draft starts with."""
        owed = [
            Chunk(r, r.prompt_tokens + r.state.emitted - 1 - r.state.drafter_lag, r.state.drafter_lag)
            for r in rows
            if r.state.drafter_lag >= self.widest
        ]
        groups = [owed[i : i + STRETCHES] for i in range(0, len(owed), STRETCHES)]
        priced = [self.carrying(0, 0, 1, group, False) for group in groups]
        return Shape(*(sum(figure) for figure in zip(*priced, strict=True)))

    def scaled(self, factor: float) -> Latency:
        """A copy with every time multiplied by `factor`."""
        return Latency(self.spec, self.fit.scaled(factor))

    def demand(
        self, load: Load, peak: tuple[float, float], moved: float, flops: float, rows: int, tokens: int, steps: int,
        prompts: Sequence[tuple[int, int]] = (),
    ) -> None:  # fmt: skip
        """Set the demand of a launch of `moved` bytes and `flops` on a GPU with `peak` flops and bytes per second.

        It has `steps` forwards over `rows`, the first of `tokens` new tokens per row, and prompts of (start, tokens).
        """
        solo_s = load.solo_s
        if solo_s <= 0:
            load.turn_s = 0.0
            return
        if self.spec.parallel:
            tokens, steps = tokens + steps - 1, 1
        prompt, width = sum([count for _, count in prompts]), tokens if steps == 1 else 1
        load.compute, load.bandwidth = min(1.0, flops / (solo_s * peak[0])), min(1.0, moved / (solo_s * peak[1]))
        load.turn_s = solo_s / (steps * self.spec.layers)
        load.nimble = self.nimble(rows, width, prompt, solo_s / steps)
        load.empty = self.room(prompts, solo_s)
        load.eight_bits = self.spec.multiplies_8_bits and self.spec.experts is None
        if self.spec.experts is not None:
            load.experts_read = self._distinct(rows, width, prompts) / self.spec.experts.count

    def nimble(self, rows: int, tokens: int, prompt: int, forward_s: float) -> float:
        """Share of a forward's time in kernels that leave room for others."""
        if self._padded(rows) * tokens + prompt > self.fit.nimble_tokens:
            return 0.0
        return 1.0 - self.fit.large_s / forward_s if forward_s > self.fit.large_s else 0.0

    def room(self, chunks: Sequence[tuple[int, int]], solo_s: float) -> float:
        """Share of the GPU, over the time of a launch, that its prefill attention leaves empty."""
        sms = self.fit.prompt_sms
        if not chunks or not sms or not solo_s:
            return 0.0
        block, at_once = _prompt_programs(self.spec.head_dim, sms)
        programs = self.spec.heads * sum(-(-n // block) for _, n in chunks)
        share = min(1.0, self._over_prompts(chunks) / solo_s)
        return share - share * programs / (-(-programs // at_once) * at_once)

    def _fused(self, rest: Shape, tokens: int) -> Shape:
        """`rest` and the product that fuses a head's inputs, over `tokens`."""
        if not self.fit.fused_knots:
            return rest
        return rest._replace(
            solo_0=rest.solo_0 + interpolate(self.fit.fused_knots, tokens),
            bytes_0=rest.bytes_0 + self._fused_bytes,
            flops_0=rest.flops_0 + 2.0 * self.spec.fused_params * tokens,
        )

    def _with_layers(self, rest: Shape, tokens: int, logits: int, experts: float) -> Shape:
        """`rest` and one forward's linear layers over `tokens`, of which `logits` reach the output projection.

        In each layer it reads so many distinct experts.
        """
        fit = self.fit
        solo = rest.solo_0 + self._layers(tokens, experts)
        moved = rest.bytes_0 + self._layer_bytes + self._expert_bytes * experts
        flops = rest.flops_0 + self._layer_flops * tokens
        if fit.reduce_knots:
            solo += interpolate(fit.reduce_knots, tokens)
        if logits:
            if fit.gather_knots:
                solo += interpolate(fit.gather_knots, logits)
            solo += self._larger(fit.head_weights_s, fit.head_token_s * logits)
            moved += self._head_bytes
            flops += self._head_flops * logits
        return Shape(solo, rest.solo_1, moved, rest.bytes_1, flops, rest.flops_1)

    def _rest(self, rows: int, tokens: int, steps: int) -> Shape:
        """All but the first forward's linear layers: the rows' attention in each step, and the later steps whole."""
        key = (rows, tokens, steps)
        rest = self._rests.get(key)
        if rest is None:
            if steps == 1:
                rest = self._attention(rows, tokens, 0)
            else:  # one step more than a draft that is likely known
                before = self._rest(rows, tokens, steps - 1)
                padded = self._padded(rows)
                more = self._with_layers(before, self._filled(padded), padded, self._distinct(rows, 1))
                attention = self._attention(rows, 1, rows * (tokens + steps - 2))
                rest = Shape(*(a + b for a, b in zip(more, attention, strict=True)))
            self._rests[key] = rest
        return rest

    def _attention(self, rows: int, tokens: int, grown: int) -> Shape:
        """Attention of `tokens` queries a row over the cached tokens and `grown` more that earlier steps added."""
        fit = self.fit
        read = grown + rows * tokens
        pairs = tokens * grown + rows * tokens * (tokens + 1) / 2
        if fit.kv_knots:
            solo_1 = interpolate(fit.kv_knots, tokens)
            splits = cuts(self._padded(rows) * self.spec.kv_heads, fit.programs) if rows else 1
            if fit.span_knots and rows:
                solo_1 = self._joined(solo_1, interpolate(fit.span_knots, tokens) / (rows * splits))
            if fit.row_factors and rows:
                solo_1 *= interpolate(fit.row_factors, self._padded(rows))
            solo_0 = read * solo_1 + rows * fit.row_s
            if splits > 1:
                solo_0 += fit.split_s
            if fit.width_knots and rows:
                solo_0 += interpolate(fit.width_knots, tokens)
            if fit.rows_knots and rows:
                solo_0 += interpolate(fit.rows_knots, rows)
        else:  # the larger of the two regimes, by offset and slope apart, which keeps the price a straight line
            solo_0, solo_1 = max(pairs * fit.pair_s, read * fit.kv_s), max(tokens * fit.pair_s, fit.kv_s)
        return Shape(
            solo_0, solo_1, read * self._kv_bytes, self._kv_bytes, pairs * self._pair_flops, tokens * self._pair_flops
        )

    def _over_prompts(self, chunks: Sequence[tuple[int, int]]) -> float:
        """Attention over prompt chunks, each as (start, tokens)."""
        whole_s = self._prompts_within(chunks, 0)
        return self._over_window(whole_s, self._prompts_within(chunks, self.window)) if self.window else whole_s

    def _over_window(self, whole: float, within: float) -> float:
        """The mean over layers of what those without a window and those with one take."""
        return self._growing * whole + (1 - self._growing) * within if self.window else whole

    def _prompts_within(self, chunks: Sequence[tuple[int, int]], window: int) -> float:
        """Attention over prompt chunks if all layers had this window; 0: none."""
        fit, spec = self.fit, self.spec
        if fit.prompt_sms:
            return fit.prompt_wave_s * in_waves(chunks, spec.heads, spec.head_dim, fit.prompt_sms, window)
        return sum(
            max((min(start, window or start) + n) * fit.kv_s, _pairs(start, n, window) * fit.pair_s)
            for start, n in chunks
        )

    def _padded(self, rows: int) -> int:
        return _up_to(self.fit.row_buckets, rows) if rows else 0

    def _padded_prompts(self, tokens: int) -> int:
        """Prompt tokens that the layers compute; of padding, the share of the weights that are not experts'."""
        if not tokens:
            return 0
        padded = _up_to(self.fit.chunk_buckets, tokens)
        return round(padded - self._expert_share * (padded - tokens))

    def _filled(self, tokens: int) -> int:
        """Tokens that the layers compute, where an engine pads the whole forward."""
        return _up_to(self.fit.token_buckets, tokens) if self.fit.token_buckets else tokens

    def _distinct(self, rows: int, tokens: float, chunks: Sequence[tuple[int, int]] = ()) -> float:
        """Distinct experts that a layer reads for rows of so many new tokens, and for prompt chunks (start, tokens)."""
        if (experts := self.spec.experts) is None:
            return 0.0
        return experts.read(rows * tokens**experts.overlap + sum([count**experts.overlap for _, count in chunks]))

    def _layers(self, tokens: int, experts: float) -> float:
        """The transformer blocks' linear layers and all that does not depend on the context."""
        fit = self.fit
        if fit.layer_knots:
            seconds = interpolate(fit.layer_knots, tokens)
            return seconds + fit.expert_s * experts if experts else seconds
        return fit.fixed_s + self._larger(fit.weights_s + fit.expert_s * experts, fit.token_s * tokens)

    _joined = staticmethod(hypot)  # reading at the card's speed and at that of one program

    def _larger(self, memory_s: float, compute_s: float) -> float:
        p = self.fit.sharpness
        top = memory_s if memory_s > compute_s else compute_s
        if p is None or not top:
            return top
        return float(top * ((memory_s / top) ** p + (compute_s / top) ** p) ** (1 / p))


@lru_cache(maxsize=64)
def latency(spec: ModelSpec, fit: ForwardFit) -> Latency:
    """Prices the launches of one model on one GPU; runs share the prices."""
    return Latency(spec, fit)


class Lookup(Latency):
    """N-gram drafts, which the host looks up in a request's own tokens: they take host time and no GPU time."""

    def __init__(self, spec: ModelSpec, factor: float = 1.0) -> None:
        super().__init__(spec, ForwardFit(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
        self._factor = factor

    def shape(self, rows: int, tokens: int, steps: int = 1, context: float = 0) -> Shape:
        """One search per row through all its tokens, independent of the draft length."""
        return Shape(rows * LOOKUP_ROW_S * self._factor, LOOKUP_TOKEN_S * self._factor, 0.0, 0.0, 0.0, 0.0)

    def carrying(
        self, rows: int, tokens: int, steps: int, chunks: Sequence[Chunk], first_tokens: bool, packed: int = 0,
        context: float = 0,
    ) -> Shape:  # fmt: skip
        """Prompts need no prefill."""
        return self.shape(rows, tokens, steps) if rows else _NOTHING

    def behind(self, rows: Sequence[Request]) -> Shape:
        """Nothing to catch up: the host has all tokens."""
        return _NOTHING

    def scaled(self, factor: float) -> Lookup:
        return Lookup(self.spec, self._factor * factor)


def widest_draft(spec: ModelSpec) -> int:
    """Maximum tokens per row in the first forward of a draft; a row that lacks more is caught up before it."""
    return MAX_DRAFT + 1 if spec.rereads else 2


def large_products_s(spec: ModelSpec, small_bytes: float, bytes_per_s: float) -> float:
    """Seconds in which a forward reads those weight matrices of its layers that exceed `small_bytes`."""
    item = spec.layer_bytes or spec.dtype_bytes
    kinds = [(count, [inputs * outputs * item for inputs, outputs in layer]) for count, layer in spec.layer_kinds]
    return sum(count * sum(size for size in sizes if size > small_bytes) for count, sizes in kinds) / bytes_per_s


def cuts(programs: int, wanted: int) -> int:
    """Parts that each row's context is split into, a power of two, so that `programs` times it is near `wanted`."""
    return 1 << (max(1, min(MAX_CONTEXT_PARTS, wanted // programs)).bit_length() - 1)


def in_waves(chunks: Sequence[tuple[int, int]], heads: int, head_dim: int, sms: int, window: int = 0) -> float:
    """Context tokens that prefill attention over chunks, each (start, tokens), processes in sequence.

    A program takes a block of queries of one head through its context. As many run concurrently as fit the
    multiprocessors, the longest contexts first, and each such wave takes as long as its longest. In a window a program
    goes through no more than that and its own block; 0: there is none.
    """
    block, at_once = _prompt_programs(head_dim, sms)
    blocks = longest = 0
    for start, n in chunks:
        blocks += -(-n // block)
        if start + n > longest:
            longest = start + n
    programs, most = heads * blocks, window + block if window else longest
    longest = min(longest, most)
    if programs <= at_once:
        return UNSHARED * longest if at_once > sms and 2 * programs <= sms else longest
    block_contexts: list[int] = []
    for start, n in chunks:
        block_contexts += start + n, *range(start + (n - 1) // block * block, start, -block)
    block_contexts.sort(reverse=True)
    return sum([min(most, block_contexts[first // heads]) for first in range(0, programs, at_once)])


def _prompt_programs(head_dim: int, sms: int) -> tuple[int, int]:
    """Queries per program of prefill attention, and the number of programs that run concurrently."""
    return WIDE_QUERIES if head_dim > WIDE_HEAD else PROMPT_QUERIES, 2 * sms if head_dim <= SMALL_HEAD else sms


def _pairs(start: int, tokens: int, window: int = 0) -> float:
    """(query, context token) pairs of a chunk: causal, over what is cached before it and over itself, in a window."""
    causal = min(tokens, max(0, window - start)) if window else tokens
    return causal * start + causal * (causal + 1) / 2 + (tokens - causal) * window


def interpolate(knots: Sequence[tuple[int, float]], at: int) -> float:
    """Linear interpolation, extrapolated after the last knot; before the first, its value."""
    right = min(max(bisect_left(knots, (at, 0.0)), 1), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[right - 1], knots[right]
    return y0 + (y1 - y0) * (max(at, knots[0][0]) - x0) / (x1 - x0)


def _up_to(buckets: Sequence[int], size: int) -> int:
    """The first bucket that holds `size`; `size` itself where there is none."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else size
