"""Duration of a launch that runs alone at full clock, and its demand on the GPU.

A forward costs the sum of its parts (`forward`): the layers' products, experts, output projection, attention over
rows and over prompts, and the communication of a shard. A mixture of experts reads the distinct experts that its tokens
take: those of one request share more of them than those of different requests. The figures come from a profile.

For a given batch shape the cost is linear in the number of cached tokens, so a shape is priced once and a launch costs
one multiplication. Where layers have a sliding window, or attend to selected tokens, there are two lines: up to a mean
context of the window, and from there on, where these layers read no more. Layers that keep a state read it once
per forward and row, and write it once per token: speculation needs the state after each draft token.

Rows whose drafter lacks more than one token, after plain decoding, are caught up first, a few at a time and priced like
prompts. A head reads the accepted tokens again in the first forward of its draft and fuses hidden states there.

Data-parallel ranks have their own requests, attention and dense layers, and share their experts: a forward takes as
long as the rank with the most to do outside the experts, and then the experts for the tokens of all with the exchange
of these. What one rank costs (`price`) assumes that the others have as much to do: planners ask for that. `together`
takes the ranks as they are.

Not modelled here: contention and the clock, which depend on other launches (`contention`, `power`); the spread of
repeated runs of one kernel; unequal context lengths in a batch, beyond their sum (windowed layers are overestimated
where some rows are shorter than the window and others longer); unequal draft lengths in the number of distinct experts,
beyond their mean; experts that are more popular than others; the exchange of one half of a batch during the products of
another; and the forwards that a rank without requests makes in order to step along: they are shorter than the others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import add
from typing import Any, NamedTuple

from pdvsim.sim.core import Request
from pdvsim.sim.limits import MAX_DRAFT
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.forward import ForwardTerms, Prompts, interpolate, pairs, ratio_at
from pdvsim.sim.prices.host import LOOKUP_ROW_S, LOOKUP_TOKEN_S, SUFFIX_ROW_S

STRETCHES = 4  # rows that one forward of the engine catches up
KEPT_PRICES = 1 << 15  # where prompts are not padded, nearly every one has a price of its own


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

    def at(self, context: float) -> Price:
        """The price of a launch whose rows have `context` cached tokens in all."""
        seconds_0, seconds_1, bytes_0, bytes_1, flops_0, flops_1 = self
        cache = bytes_1 * context
        figures = (seconds_0 + seconds_1 * context, bytes_0 + cache, flops_0 + flops_1 * context, cache)
        return tuple.__new__(Price, figures)  # every launch has one: a third of the time of Price(...)


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
    eight_bits: bool = False  # whether its model multiplies in 8 bits
    wait_ratio: float = 1.0  # on `layer_s`: how long its kernels keep others waiting
    room_ratio: float = 1.0  # on the part of the GPU that it occupies


NOTHING = AffineCost(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class PromptCost(NamedTuple):
    """What the prompts of a forward cost besides its layers."""

    tokens: int
    padded: int  # tokens that the layers compute
    attention_s: float
    states_s: float
    bytes: float
    flops: float


NO_PROMPTS = PromptCost(0, 0, 0.0, 0.0, 0.0, 0.0)


class Routed(NamedTuple):
    """Tokens of one rank that a forward sends to shared experts, and how many independent ones they count as."""

    tokens: int
    independent: float


class CostModel:
    """What launches of one model cost alone on one GPU."""

    def __init__(self, spec: ModelSpec, terms: ForwardTerms, shares: bool = True) -> None:
        self.spec, self.terms, self.experts = spec, terms, spec.experts
        self._layer_bytes, self._expert_bytes = float(spec.common_bytes), spec.expert_bytes
        self._head_bytes = float(spec.head_params * spec.dtype_bytes)
        self._layer_flops, self._head_flops = 2.0 * spec.active_params, 2.0 * spec.head_params
        self._expert_share = 1 - spec.common_params / spec.active_params if spec.experts is not None else 0.0
        self._kv_bytes = float(spec.kv_bytes_per_token)
        self._pair_flops = float(spec.attention_flops_per_pair)
        self._fused_bytes, self._fused_flops = float(spec.fused_params * spec.dtype_bytes), 2.0 * spec.fused_params
        self.window = spec.reach or 0
        # of what a cached token adds, the shares that tokens beyond the window add: bytes, flops, seconds of rows and
        # of prompts
        self._past_bytes = self._past_flops = 1.0
        if self.window and spec.layers:
            tokens = zip(spec.cached_token(), spec.cached_token(bounded=True), strict=True)
            self._past_bytes, self._past_flops = ((every - bounded) / every for every, bounded in tokens)
        self._past_rows = self._past_bytes if terms.past_share is None else terms.past_share
        self._past_prompts = self._past_flops if terms.past_prompts is None else terms.past_prompts
        self._state_bytes, self._state_flops = float(spec.row_bytes), float(spec.row_flops)
        self._rewrites = spec.state is not None  # else it is read only: the windows of compressed attention
        self.widest = widest_draft(spec)
        kept = lru_cache(KEPT_PRICES)
        self._layers_cost, self._rest_cost = kept(self._without_attention_over), kept(self._rest)
        self._prompt_cost, self._shared_cost = kept(self._attended), kept(self._all_ranks)
        self.own = self  # what a rank computes alone: everything, unless ranks share experts
        if shares and spec.data_ranks > 1 and spec.experts is not None:
            self._routed_flops = 2.0 * spec.experts.per_token * spec.expert_params / spec.experts.ranks
            none_taken = replace(spec, experts=replace(spec.experts, per_token=0))
            self.own = CostModel(none_taken, replace(terms, expert_s=0.0, least_s=0.0), shares=False)

    def routed(
        self, rows: int, tokens: int = 1, steps: int = 1, prompts: Prompts = (), packed: int = 0
    ) -> list[Routed]:
        """Return the tokens of each forward of a launch to shared experts; empty: there are none.

        The first forward of a launch has more tokens per row, and prompts.
        """
        if self.own is self or self.experts is None:
            return []
        independent = self.experts.independent
        each = packed / rows if packed else float(tokens)
        first = Routed(
            (packed or rows * tokens) + sum([count for _, count in prompts]),
            rows * independent(each) + sum([independent(count) for _, count in prompts]),
        )
        return [first, *[Routed(rows, rows)] * (steps - 1)]

    def shared(self, ranks: Sequence[Sequence[Routed]]) -> Price:
        """The shared experts' part of a launch, from what each rank sends in each of its forwards."""
        seconds = moved = flops = 0.0
        for at in range(max(map(len, ranks), default=0)):
            sent = [rank[at] for rank in ranks if at < len(rank)]
            tokens, independent = sum([one.tokens for one in sent]), sum([one.independent for one in sent])
            read = 0.0 if self.experts is None else self.experts.read(independent)
            seconds += self.terms.spread_s(tokens, max([one.tokens for one in sent]))
            seconds += self.terms.expert_s * read
            moved += self._expert_bytes * read
            flops += self._routed_flops * tokens
        return Price(seconds, moved, flops, 0.0)

    def is_past_window(self, rows: int, context: float) -> bool:
        """Return whether rows with `context` cached tokens in all have more than the window on average."""
        return bool(self.window) and context > rows * self.window

    def price(
        self, rows: int, tokens: int = 1, steps: int = 1, context: float = 0, prompts: Prompts = (),
        first_tokens: int = 0, packed: int = 0,
    ) -> AffineCost:  # fmt: skip
        """Cost of `steps` forwards over `rows`: the first has `tokens` new tokens per row, the others one.

        A model that drafts in parallel has one forward instead, with as many tokens in all.
        The first forward also carries `prompts`, of which `first_tokens` end in it. If the rows have `packed` new
        tokens in all, up to `tokens` each, attention is padded and the layers are not. `context`: the cached tokens
        at which the cost is to be used, which matter to models with windows.
        """
        if self.own is not self:
            return self._on_ranks(rows, tokens, steps, context, prompts, first_tokens, packed)
        past, attended = self.window > 0 and context > rows * self.window, NO_PROMPTS
        taken: Prompts = ()  # what experts take depends on each prompt's tokens
        if prompts:
            attended = self._prompt_cost(tuple(prompts))
            taken = () if self.experts is None else tuple(prompts)
        cost = self._layers_cost(taken, rows, tokens, steps, packed, past, attended.padded, first_tokens)
        return self._with_prompts(cost, rows, attended) if prompts else cost

    def _without_attention_over(
        self, prompts: Prompts, rows: int, tokens: int, steps: int, packed: int, past: bool, padded_prompts: int,
        first_tokens: int,
    ) -> AffineCost:  # fmt: skip
        """`price` but for the attention over prompts, past the window or not, worked out."""
        terms, drafted = self.terms, 1
        if self.spec.parallel:
            tokens, steps, drafted = tokens + steps - 1, 1, steps
        padded = terms.padded_rows(rows)
        new = terms.padded_packed(rows, packed) if packed else padded * tokens
        # of a row: its newest token of a head, its drafts of a model that drafts in parallel
        logits = (padded * drafted if self.widest > 2 else new) + first_tokens
        new = terms.padded_tokens(new + padded_prompts)
        cost = self._rest_cost(rows, tokens, steps) if rows else NOTHING
        if self._fused_bytes:
            cost = cost._replace(
                seconds_0=cost.seconds_0 + interpolate(terms.fused_knots, new),
                bytes_0=cost.bytes_0 + self._fused_bytes,
                flops_0=cost.flops_0 + self._fused_flops * new,
            )
        experts = self._distinct(rows, packed / rows if packed else tokens, prompts) if self.spec.experts else 0.0
        cost = self._forward(cost, new, logits, experts)
        if steps > 1:
            cost = cost._replace(
                seconds_0=cost.seconds_0 * terms.draft_ratio, seconds_1=cost.seconds_1 * terms.draft_ratio
            )
        return self._windowed(cost, rows, steps) if past and rows else cost

    def _on_ranks(
        self, rows: int, tokens: int, steps: int, context: float, prompts: Prompts, first_tokens: int, packed: int
    ) -> AffineCost:
        """`price` of a rank where all ranks do the same."""
        own = self.own.price(rows, tokens, steps, context, prompts, first_tokens, packed)
        shared = self._shared_cost(rows, tokens, steps, tuple(prompts), packed)
        return own._replace(
            seconds_0=max(own.seconds_0 + shared.seconds, self.terms.least_s if prompts else 0.0),
            bytes_0=own.bytes_0 + shared.bytes,
            flops_0=own.flops_0 + shared.flops,
        )

    def _all_ranks(self, rows: int, tokens: int, steps: int, prompts: Prompts, packed: int) -> Price:
        return self.shared([self.routed(rows, tokens, steps, prompts, packed)] * self.spec.data_ranks)

    def _windowed(self, cost: AffineCost, rows: int, steps: int) -> AffineCost:
        """The line of a cost past the window: windowed layers read as much as at the window, the others go on."""
        shares, window = (self._past_rows, self._past_bytes, self._past_flops), self.window
        lines = zip(shares, cost[::2], cost[1::2], strict=True)
        seconds_0, *others = (
            part for past, at_0, slope in lines for part in (at_0 + (1 - past) * rows * window * slope, past * slope)
        )
        return AffineCost(seconds_0 + steps * interpolate(self.terms.past_knots, rows), *others)

    def _attended(self, prompts: Prompts) -> PromptCost:
        """Return the cost of prompts beyond their layers."""
        window, tokens, moved, flops = self.window, 0, 0.0, 0.0
        for start, count in prompts:
            read: float = start + count
            multiplied = pairs(start, count)
            if window:
                read = _mean(self._past_bytes, read, min(start, window) + count)
                multiplied = _mean(self._past_flops, multiplied, pairs(start, count, window))
            tokens, moved, flops = tokens + count, moved + read * self._kv_bytes, flops + multiplied * self._pair_flops
        states_s = 0.0
        if self._state_bytes:
            states_s = interpolate(self.terms.scan_knots, tokens)
            moved, flops = moved + 2 * len(prompts) * self._state_bytes, flops + tokens * self._state_flops
        padded, heads = self.terms.padded_prompt(tokens), (self.spec.heads, self.spec.head_dim)
        if self._expert_share:  # of padding, experts compute nothing
            padded = round(padded - self._expert_share * (padded - tokens))
        attention_s = self.terms.prefill_s(*heads, prompts)
        if window:
            within_s = self.terms.prefill_s(*heads, prompts, window)
            attention_s = _mean(self._past_prompts, attention_s, within_s)
        return PromptCost(tokens, padded, attention_s, states_s, moved, flops)

    def _with_prompts(self, cost: AffineCost, rows: int, attended: PromptCost) -> AffineCost:
        """`cost` and the attention over prompts, with what they cost besides."""
        tokens, _, attention_s, states_s, moved, flops = attended
        terms, (seconds_0, seconds_1, bytes_0, bytes_1, flops_0, flops_1) = self.terms, cost
        seconds_0 += attention_s + (terms.prompt_token_s * tokens + (terms.mixed_s if rows else 0.0)) + states_s
        if seconds_0 < terms.least_s:
            seconds_0 = terms.least_s
        return AffineCost._make((seconds_0, seconds_1, bytes_0 + moved, bytes_1, flops_0 + flops, flops_1))

    def catch_up_cost(self, rows: Sequence[Request]) -> AffineCost:
        """Cost of the forwards that catch the drafter up on rows that lack more tokens than a draft starts with."""
        lags = [(row.prompt_tokens + row.state.emitted - 1, row.state.drafter_lag) for row in rows]
        missing = [(settled - lag, lag) for settled, lag in lags if lag >= self.widest]
        groups = [missing[i : i + STRETCHES] for i in range(0, len(missing), STRETCHES)]
        return total([self.price(0, prompts=group) for group in groups])

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
        if self.spec.parallel:
            tokens, steps = tokens + steps - 1, 1
        load.compute, load.bandwidth = min(1.0, flops / (solo_s * peak[0])), min(1.0, moved / (solo_s * peak[1]))
        load.layer_s = solo_s / (steps * self.spec.layers)
        padded, terms, step_s = self.terms.padded_rows(rows), self.terms, solo_s / steps
        attended = NO_PROMPTS
        if prompts:
            attended = self._prompt_cost(tuple(prompts))
        share = terms.small_share(padded * tokens + attended.tokens, step_s)
        if steps > 1:  # the first forward of a draft may have several tokens per row, and so larger kernels
            later = share if tokens == 1 and not prompts else terms.small_share(padded, step_s)
            share = (share + (steps - 1) * later) / steps
        load.small_kernel_share = share
        if prompts:
            share = min(1.0, attended.attention_s / solo_s)
            load.empty = terms.empty_share(self.spec.heads, self.spec.head_dim, prompts, share)
            if terms.wait_ratios and not rows:
                prompt_tokens = terms.padded_prompt(attended.tokens)
                load.wait_ratio = ratio_at(terms.wait_ratios, prompt_tokens)
                load.room_ratio = ratio_at(terms.room_ratios, prompt_tokens)
        load.eight_bits = self.spec.multiplies_8_bits
        if self.spec.experts is not None:
            experts = self._distinct(rows, tokens if steps == 1 else 1, prompts)
            load.experts_read = experts / self.spec.experts.count
            load.small_kernel_share *= 1.0 - load.experts_read  # a kernel over experts has blocks for each that is read

    def _forward(self, before: AffineCost, tokens: int, logits: int, experts: float) -> AffineCost:
        """`before` and a forward's linear layers: over `tokens`, with `logits` and `experts` read per layer."""
        terms = self.terms
        seconds, seconds_1, moved, bytes_1, flops, flops_1 = before
        seconds += terms.layers_s(tokens, experts)
        if sent := terms.reduce_knots:
            seconds += interpolate(sent, tokens)
        moved = moved + self._layer_bytes + self._expert_bytes * experts
        flops += self._layer_flops * tokens
        if logits:
            if sent:
                seconds += interpolate(terms.gather_knots, logits)
            seconds += terms.logits_s(logits)
            moved += self._head_bytes
            flops += self._head_flops * logits
        return AffineCost(seconds, seconds_1, moved, bytes_1, flops, flops_1)

    def _rest(self, rows: int, tokens: int, steps: int) -> AffineCost:
        """All but the first forward's linear layers: the rows' attention in each step, and the later steps whole."""
        if steps == 1:
            return self._attention(rows, tokens, 0)
        before, padded = self._rest_cost(rows, tokens, steps - 1), self.terms.padded_rows(rows)
        more = self._forward(before, self.terms.padded_tokens(padded), padded, self._distinct(rows, 1))
        return total([more, self._attention(rows, 1, rows * (tokens + steps - 2))])

    def _attention(self, rows: int, tokens: int, grown: int) -> AffineCost:
        """Attention of `tokens` queries per row over the cached tokens and `grown` more that earlier steps added."""
        read, multiplied = grown + rows * tokens, tokens * grown + rows * tokens * (tokens + 1) / 2
        padded = self.terms.padded_rows(rows)
        fixed_s, token_s = self.terms.rows_line(self.spec.kv_heads, rows, padded, tokens, read, multiplied)
        moved, flops = read * self._kv_bytes, multiplied * self._pair_flops
        if self._state_bytes:
            copies = rows * (1 + tokens) if self._rewrites else rows
            fixed_s += interpolate(self.terms.state_knots, copies)
            moved, flops = moved + copies * self._state_bytes, flops + rows * tokens * self._state_flops
        return AffineCost(fixed_s, token_s, moved, self._kv_bytes, flops, tokens * self._pair_flops)

    def _distinct(self, rows: int, tokens: float, prompts: Prompts = ()) -> float:
        """Distinct experts that a layer reads for rows of `tokens` new tokens each, and for prompts."""
        if (experts := self.spec.experts) is None:
            return 0.0
        return experts.read(
            rows * experts.independent(tokens) + sum([experts.independent(count) for _, count in prompts])
        )


@lru_cache(maxsize=64)
def cost_model(spec: ModelSpec, terms: ForwardTerms) -> CostModel:
    """The cost model of one model on one GPU; runs share the prices that it has worked out."""
    return CostModel(spec, terms)


class LookupCosts(CostModel):
    """Drafts that the host looks up in tokens: they take host time and no GPU time."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec, ForwardTerms())
        self._row_s, self._token_s = (SUFFIX_ROW_S, 0.0) if spec.name == "suffix" else (LOOKUP_ROW_S, LOOKUP_TOKEN_S)

    def price(self, rows: int, *sizes: Any, **more: Any) -> AffineCost:
        """Cost of one search per row, independent of the draft length; prompts need no prefill."""
        return AffineCost(rows * self._row_s, self._token_s, 0.0, 0.0, 0.0, 0.0) if rows else NOTHING

    def catch_up_cost(self, rows: Sequence[Request]) -> AffineCost:
        """Nothing to catch up: the host has all tokens."""
        return NOTHING


def widest_draft(spec: ModelSpec) -> int:
    """Maximum tokens per row in the first forward of a draft; a row that lacks more is caught up before it."""
    return MAX_DRAFT + 1 if spec.rereads else 2


def _mean(share: float, whole: float, within: float) -> float:
    """Return the time of layers of which a share attends to all tokens, the others to tokens within reach."""
    return share * whole + (1 - share) * within


def total(costs: Sequence[AffineCost]) -> AffineCost:
    """The cost of several launches, or parts of one."""
    if not costs:
        return NOTHING
    sums = costs[0]
    for cost in costs[1:]:
        sums = AffineCost._make(map(add, sums, cost))
    return sums


def together(own: Sequence[Price], shared: Price, least_s: float = 0.0) -> list[Price]:
    """Prices of the launches of all ranks: the longest, with the experts' part, and at least `least_s`."""
    seconds = max(max([price.seconds for price in own]) + shared.seconds, least_s)
    return [Price(seconds, price.bytes + shared.bytes, price.flops + shared.flops, price.cache_bytes) for price in own]
