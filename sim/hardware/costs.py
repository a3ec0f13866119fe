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

from pdvsim.sim.core import GpuSpec, HeadSpec, ModelSpec, Request, Work
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


class Price(NamedTuple):
    """What one launch costs alone."""

    seconds: float
    bytes: float
    flops: float
    cache_bytes: float  # of all bytes, those of the KV cache that its rows read

    @property
    def weight_bytes(self) -> float:
        """All other bytes: mostly weights."""
        return max(0.0, self.bytes - self.cache_bytes)


class AffineCost(NamedTuple):
    """What launches of one batch shape cost alone: each figure is `_0 + _1 * cached tokens over all rows`."""

    seconds_0: float
    seconds_1: float
    bytes_0: float
    bytes_1: float
    flops_0: float
    flops_1: float

    def seconds(self, context: float) -> float:
        """Seconds of a launch whose rows have `context` cached tokens in all."""
        return self.seconds_0 + self.seconds_1 * context

    def at(self, context: float, before: AffineCost | None = None) -> Price:
        """The price of a launch whose rows have `context` cached tokens in all, with forwards `before` it."""
        seconds_0, seconds_1, bytes_0, bytes_1, flops_0, flops_1 = self
        cache = bytes_1 * context
        if before is not None:
            seconds_0, bytes_0 = before.seconds_0 + seconds_0, before.bytes_0 + bytes_0
            flops_0 = before.flops_0 + flops_0
        return Price(seconds_0 + seconds_1 * context, bytes_0 + cache, flops_0 + flops_1 * context, cache)


@dataclass(eq=False)
class Load:
    """A launch that shares a GPU: its demands, from its roofline, and the `rate` that sharing gives it."""

    compute: float = 0.0  # shares of the GPU's arithmetic and bandwidth that it uses alone
    bandwidth: float = 0.0
    priority: int = 0
    layer_s: float = 0.0  # time per layer, alone
    small_kernel_share: float = 0.0  # of its time, in kernels small enough to run concurrently with others
    experts_read: float = 0.0  # share of all experts
    empty: float = 0.0  # share of the GPU, over its time, that attention over prompts has too few programs to fill
    share: float = 0.0  # of the turns, kept here once worked out; 0 before
    rate: float = 0.0
    solo_s: float = 0.0
    eight_bits: bool = False  # whether a dense model multiplies in 8 bits


NOTHING = AffineCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
Prompts = Sequence[tuple[int, int]]  # chunks of prompts, each as (cached tokens before it, new tokens)


class CostModel:
    """What launches of one model cost alone on one GPU."""

    def __init__(self, spec: ModelSpec, fit: ForwardFit) -> None:
        self.spec = spec
        self.fit = fit
        self._layer_bytes, self._expert_bytes = float(spec.common_bytes), spec.expert_bytes
        self._head_bytes = float(spec.head_params * spec.dtype_bytes)
        self._layer_flops = 2.0 * spec.active_params
        self._head_flops = 2.0 * spec.head_params
        self._kv_bytes = float(spec.kv_bytes_per_token)
        self._pair_flops = float(spec.attention_flops_per_pair)
        self._fused_bytes = float(spec.fused_params * spec.dtype_bytes)
        self.window = spec.sliding_window or 0
        self._growing = spec.attending_layers / spec.layers if self.window and spec.layers else 1.0
        self.widest = widest_draft(spec)
        self._costs: dict[tuple[int, int, int, bool], AffineCost] = {}
        self._rests: dict[tuple[int, int, int], AffineCost] = {}

    def is_past_window(self, rows: int, context: float) -> bool:
        """Whether rows with so many cached tokens in all have more than the window on average."""
        return bool(self.window) and context > rows * self.window

    def price(
        self, rows: int, tokens: int = 1, steps: int = 1, context: float = 0, prompts: Prompts = (),
        first_tokens: int = 0, packed: int = 0,
    ) -> AffineCost:  # fmt: skip
        """Cost of `steps` forwards over `rows`: the first has `tokens` new tokens per row, the others one.

        The first forward also carries `prompts`, of which `first_tokens` end in it. If the rows have `packed` new
        tokens in all, up to `tokens` each, attention is padded and the layers are not. `context`: the cached tokens
        at which the cost is to be used, which matter to models with windows.
        """
        past = bool(self.window) and context > rows * self.window
        if prompts or packed:
            return self._price_with_prefill(rows, tokens, steps, prompts, first_tokens, packed, past)
        cost = self._costs.get((rows, tokens, steps, past))
        if cost is None:
            cost = self._price_with_prefill(rows, tokens, steps, (), 0, 0, past)
            self._costs[rows, tokens, steps, past] = cost
        return cost

    def _price_with_prefill(
        self, rows: int, tokens: int, steps: int, prompts: Prompts, first_tokens: int, packed: int, past: bool
    ) -> AffineCost:
        """`price`, past the window or not, worked out."""
        fit, padded = self.fit, self._padded(rows)
        new = _up_to(fit.row_buckets, packed) if packed else padded * tokens
        logits = (padded if self.widest > 2 else new) + first_tokens  # a head's: each row's newest token
        if prompts:
            new += _up_to(fit.chunk_buckets, sum([count for _, count in prompts]))
        new = self._filled(new)
        cost = self._fused(self._rest(rows, tokens, steps) if rows else NOTHING, new)
        experts = self._distinct(rows, packed / rows if packed else tokens, prompts)
        cost = self._with_layers(cost, new, logits, experts)
        if steps > 1:
            ratio = fit.draft_ratio
            cost = cost._replace(seconds_0=cost.seconds_0 * ratio, seconds_1=cost.seconds_1 * ratio)
        if past and rows:
            cost = self._windowed(cost, rows)
        return self._with_prompts(cost, rows, prompts) if prompts else cost

    def _windowed(self, cost: AffineCost, rows: int) -> AffineCost:
        """The line of a cost past the window: windowed layers read as much as at the window, the others go on."""
        within = (1 - self._growing) * rows * self.window
        seconds_0, seconds_1, bytes_0, bytes_1, flops_0, flops_1 = cost
        return AffineCost(
            seconds_0 + within * seconds_1, self._growing * seconds_1, bytes_0 + within * bytes_1,
            self._growing * bytes_1, flops_0 + within * flops_1, self._growing * flops_1,
        )  # fmt: skip

    def _with_prompts(self, cost: AffineCost, rows: int, prompts: Prompts) -> AffineCost:
        """`cost` and the attention over prompts, with what they cost besides."""
        tokens, moved, flops = 0, 0.0, 0.0
        for start, count in prompts:
            tokens += count
            moved += self._over_window(start + count, min(start, self.window) + count) * self._kv_bytes
            flops += self._over_window(_pairs(start, count), _pairs(start, count, self.window)) * self._pair_flops
        seconds = self._over_prompts(prompts) + self.fit.prompt_token_s * tokens
        if rows:
            seconds += self.fit.mixed_s
        return cost._replace(
            seconds_0=cost.seconds_0 + seconds, bytes_0=cost.bytes_0 + moved, flops_0=cost.flops_0 + flops
        )

    def price_launch(self, work: Work) -> Price:
        """What a launch costs alone. A drafter's forwards over prompts and catch-up tokens precede its draft."""
        rows, tokens, context, chunks = work.rows, work.tokens, work.context, work.chunks
        if context < 0:
            context = work.context = sum([row.context for row in rows])
        if not chunks and not work.packed and (tokens <= self.widest or work.role == "target"):
            return self.price(len(rows), tokens, work.steps, context).at(context)
        prompts = [(chunk.start, chunk.tokens) for chunk in chunks]
        if work.role == "target":
            ends = sum([chunk.start + chunk.tokens >= chunk.request.to_read for chunk in chunks])
            return self.price(len(rows), tokens, work.steps, context, prompts, ends, work.packed).at(context)
        if not rows:
            return self.price(0, tokens, work.steps, 0, prompts).at(0)
        before = self.price(0, prompts=prompts) if prompts else NOTHING
        if tokens > self.widest:
            before = _sum([before, self.catch_up_cost(rows)])
            tokens = 1 + max([row.owed for row in rows if row.owed < self.widest], default=0)
        return self.price(len(rows), tokens, work.steps, context).at(context, before)

    def catch_up_cost(self, rows: Sequence[Request]) -> AffineCost:
        """Cost of the forwards that catch the drafter up on rows that lack more tokens than a draft starts with."""
        missing = [(r.prompt_tokens + r.emitted - 1 - r.owed, r.owed) for r in rows if r.owed >= self.widest]
        groups = [missing[i : i + STRETCHES] for i in range(0, len(missing), STRETCHES)]
        return _sum([self.price(0, prompts=group) for group in groups])

    def demand(
        self, load: Load, peak: tuple[float, float], moved: float, flops: float, rows: int, tokens: int, steps: int,
        prompts: Prompts = (),
    ) -> None:  # fmt: skip
        """Set the demand of a launch of `moved` bytes and `flops` on a GPU with `peak` flops and bytes per second.

        It has `steps` forwards over `rows`, the first of `tokens` new tokens per row, and `prompts`.
        """
        solo_s = load.solo_s
        if solo_s <= 0:
            load.layer_s = 0.0
            return
        width = tokens if steps == 1 else 1
        load.compute, load.bandwidth = min(1.0, flops / (solo_s * peak[0])), min(1.0, moved / (solo_s * peak[1]))
        load.layer_s = solo_s / (steps * self.spec.layers)
        new = self._padded(rows) * width + sum([count for _, count in prompts])
        load.small_kernel_share = self.small_kernel_share(new, solo_s / steps)
        load.empty = self.empty_share(prompts, solo_s)
        load.eight_bits = self.spec.multiplies_8_bits and self.spec.experts is None
        if self.spec.experts is not None:
            load.experts_read = self._distinct(rows, width, prompts) / self.spec.experts.count

    def small_kernel_share(self, tokens: int, forward_s: float) -> float:
        """Share of a forward's time in kernels small enough to leave room for others."""
        if tokens > self.fit.nimble_tokens or forward_s <= self.fit.large_s:
            return 0.0
        return 1.0 - self.fit.large_s / forward_s

    def empty_share(self, prompts: Prompts, solo_s: float) -> float:
        """Share of the GPU, over the time of a launch, that its prefill attention leaves empty."""
        sms = self.fit.prompt_sms
        if not prompts or not sms or not solo_s:
            return 0.0
        block, at_once = _prompt_programs(self.spec.head_dim, sms)
        programs = self.spec.heads * sum(-(-n // block) for _, n in prompts)
        share = min(1.0, self._over_prompts(prompts) / solo_s)
        return share - share * programs / (-(-programs // at_once) * at_once)

    def _fused(self, rest: AffineCost, tokens: int) -> AffineCost:
        """`rest` and the product that fuses a head's inputs, over `tokens`."""
        if not self.fit.fused_knots:
            return rest
        return rest._replace(
            seconds_0=rest.seconds_0 + interpolate(self.fit.fused_knots, tokens),
            bytes_0=rest.bytes_0 + self._fused_bytes,
            flops_0=rest.flops_0 + 2.0 * self.spec.fused_params * tokens,
        )

    def _with_layers(self, rest: AffineCost, tokens: int, logits: int, experts: float) -> AffineCost:
        """`rest` and one forward's linear layers over `tokens`, of which `logits` reach the output projection.

        In each layer it reads so many distinct experts.
        """
        fit = self.fit
        solo = rest.seconds_0 + self._layers(tokens, experts)
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
        return AffineCost(solo, rest.seconds_1, moved, rest.bytes_1, flops, rest.flops_1)

    def _rest(self, rows: int, tokens: int, steps: int) -> AffineCost:
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
                rest = _sum([more, attention])
            self._rests[key] = rest
        return rest

    def _attention(self, rows: int, tokens: int, grown: int) -> AffineCost:
        """Attention of `tokens` queries a row over the cached tokens and `grown` more that earlier steps added."""
        fit = self.fit
        read = grown + rows * tokens
        pairs = tokens * grown + rows * tokens * (tokens + 1) / 2
        if fit.kv_knots:
            seconds_1 = interpolate(fit.kv_knots, tokens)
            splits = cuts(self._padded(rows) * self.spec.kv_heads, fit.programs) if rows else 1
            if fit.span_knots and rows:
                seconds_1 = self._joined(seconds_1, interpolate(fit.span_knots, tokens) / (rows * splits))
            if fit.row_factors and rows:
                seconds_1 *= interpolate(fit.row_factors, self._padded(rows))
            seconds_0 = read * seconds_1 + rows * fit.row_s
            if splits > 1:
                seconds_0 += fit.split_s
            if fit.width_knots and rows:
                seconds_0 += interpolate(fit.width_knots, tokens)
            if fit.rows_knots and rows:
                seconds_0 += interpolate(fit.rows_knots, rows)
        else:  # the larger of the two regimes, by offset and slope apart, which keeps the price a straight line
            seconds_0, seconds_1 = max(pairs * fit.pair_s, read * fit.kv_s), max(tokens * fit.pair_s, fit.kv_s)
        return AffineCost(
            seconds_0,
            seconds_1,
            read * self._kv_bytes,
            self._kv_bytes,
            pairs * self._pair_flops,
            tokens * self._pair_flops,
        )

    def _over_prompts(self, prompts: Prompts) -> float:
        """Attention over prompt chunks, each as (start, tokens)."""
        whole_s = self._prompts_within(prompts, 0)
        return self._over_window(whole_s, self._prompts_within(prompts, self.window)) if self.window else whole_s

    def _over_window(self, whole: float, within: float) -> float:
        """The mean over layers of what those without a window and those with one take."""
        return self._growing * whole + (1 - self._growing) * within if self.window else whole

    def _prompts_within(self, prompts: Prompts, window: int) -> float:
        """Attention over prompt chunks if all layers had this window; 0: none."""
        fit, spec = self.fit, self.spec
        if fit.prompt_sms:
            return fit.prompt_wave_s * in_waves(prompts, spec.heads, spec.head_dim, fit.prompt_sms, window)
        return sum(
            max((min(start, window or start) + n) * fit.kv_s, _pairs(start, n, window) * fit.pair_s)
            for start, n in prompts
        )

    def _padded(self, rows: int) -> int:
        return _up_to(self.fit.row_buckets, rows) if rows else 0

    def _filled(self, tokens: int) -> int:
        """Tokens that the layers compute, where an engine pads the whole forward."""
        return _up_to(self.fit.token_buckets, tokens) if self.fit.token_buckets else tokens

    def _distinct(self, rows: int, tokens: float, prompts: Prompts = ()) -> float:
        """Distinct experts that a layer reads for rows of so many new tokens, and for prompt chunks (start, tokens)."""
        if (experts := self.spec.experts) is None:
            return 0.0
        return experts.read(rows * tokens**experts.overlap + sum([count**experts.overlap for _, count in prompts]))

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
def cost_model(spec: ModelSpec, fit: ForwardFit) -> CostModel:
    """The cost model of one model on one GPU; runs share the prices that it has worked out."""
    return CostModel(spec, fit)


class LookupCosts(CostModel):
    """N-gram drafts, which the host looks up in a request's own tokens: they take host time and no GPU time."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, ForwardFit(0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))

    def price(
        self, rows: int, tokens: int = 1, steps: int = 1, context: float = 0, prompts: Prompts = (),
        first_tokens: int = 0, packed: int = 0,
    ) -> AffineCost:  # fmt: skip
        """One search per row through all its tokens, independent of the draft length; prompts need no prefill."""
        return AffineCost(rows * LOOKUP_ROW_S, LOOKUP_TOKEN_S, 0.0, 0.0, 0.0, 0.0) if rows else NOTHING

    def catch_up_cost(self, rows: Sequence[Request]) -> AffineCost:
        """Nothing to catch up: the host has all tokens."""
        return NOTHING


def widest_draft(spec: ModelSpec) -> int:
    """Maximum tokens per row in the first forward of a draft; a row that lacks more is caught up before it."""
    return MAX_DRAFT + 1 if isinstance(spec, HeadSpec) else 2


def large_products_s(spec: ModelSpec, small_bytes: float, bytes_per_s: float) -> float:
    """Seconds in which a forward reads those weight matrices of its layers that exceed `small_bytes`."""
    item = spec.layer_bytes or spec.dtype_bytes
    kinds = [(count, [inputs * outputs * item for inputs, outputs in layer]) for count, layer in spec.layer_kinds]
    return sum(count * sum(size for size in sizes if size > small_bytes) for count, sizes in kinds) / bytes_per_s


def cuts(programs: int, wanted: int) -> int:
    """Parts that each row's context is split into, a power of two, so that `programs` times it is near `wanted`."""
    return 1 << (max(1, min(MAX_CONTEXT_PARTS, wanted // programs)).bit_length() - 1)


def in_waves(prompts: Prompts, heads: int, head_dim: int, sms: int, window: int = 0) -> float:
    """Context tokens that prefill attention over prompts processes in sequence.

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


def _sum(costs: Sequence[AffineCost]) -> AffineCost:
    return AffineCost(*(sum(figure) for figure in zip(*costs, strict=True)))
