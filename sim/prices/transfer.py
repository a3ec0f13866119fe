"""Predicted forward times of an unmeasured GPU or model: peak rates, model sizes and fitted efficiencies.

Every matrix product, attention and the output projection are priced by their bytes and flops at a share of the GPU's
peak rates, plus a fixed time per kernel. The shares and times are fitted to the H200's samples
(`studies/efficiency.py`) and shipped in `data/transfer.json`. The result is terms like measured ones.

These samples are of dense models of 16 bits. Experts are priced as products of their size in grouped kernels, quantised
weights by their bytes, 8-bit products by twice the arithmetic where the card has such units. One figure of each
(`expert_compute`, `eight_bit`) is fitted to the measured mixtures and 8-bit models, which have an error bar of their
own. Weights of fewer bits were not measured, nor were layers that keep a state and sparse attention: both go by their
bytes and arithmetic, which is an assumption.

Not modelled: clocks and power, caches, kernels other than this engine's and its library's, a time per kernel other than
the H200's, which kernel the library picks for odd sizes, and attention tiles too large for the registers
(gemma-2b with 9 queries per row).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.sim.models.specs import GpuSpec, ModelSpec
from pdvsim.sim.prices.cards import flops_of
from pdvsim.sim.prices.forward import (
    PROMPT_QUERIES,
    SMALL_HEAD,
    WIDE_HEAD,
    WIDE_QUERIES,
    ForwardTerms,
    Knots,
    large_products_s,
)  # fmt: skip
from pdvsim.sim.prices.links import LinkSpec, all_reduce_s, between_nodes, gather_s, nodes_of

Floats = NDArray[np.float64]

COMPUTE_TOKENS = (32, 64, 128, 256, 512, 1024, 2048)  # tokens at which the share of the arithmetic is learned
TOKENS: tuple[int, ...] = (
    1, 2, 4, 8, 16, 24, 32, 33, 40, 48, 64, 96, 128, 129, 192, 256, 257, 320, 384, 385, 512, 513, 640, 768, 769, 896,
    1024, 1025, 1280, 1536, 1792, 2048, 2560, 3072, 4096,
)  # fmt: skip
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33)
LIBRARY_TILE, NARROW_TILE, NARROW_STEP, NARROW_SPLITS = 128, 64, 64, 8  # outputs a tile, inputs a step, splits at most
LEAST_QUERIES = 16  # attention pads a row's queries up to this, then to powers of two
LATENT_QUERIES = 64  # queries that a program of MLA takes at most
# Of a layer of experts, besides the router's product: choose and sort, two grouped products, sum, as in vLLM's
# fused_moe. Their fixed times are taken to be the narrow kernel's.
EXPERT_KERNELS = 4
BAR = 0.25  # share by which an all-reduce may be slower or faster: other published times are within it
NO_EXCHANGE = ((1, 0.0), (2, 0.0))  # of tokens between ranks, before a link is known
# The GPU with the most tokens of experts on R GPUs has R ** 0.23 times the mean: 1.4 times of 4, 1.6 times of 8. That
# is how much longer the kernels of TensorRT-LLM and vLLM take for 16,384 tokens with a power law of exponent 1.01 than
# with balanced routing (aiconfigurator-core 0.12.0, DeepSeek-V3 and Qwen3-235B-A22B on H200)
IMBALANCE = 0.23
# Layers that keep a state: kernels of rows (convolution, update) and of prompts (convolution, scan). A scan reaches
# this share of the arithmetic: on an H200, vLLM's gated delta kernel takes 399 us for 8,192 tokens of 32 heads
# (AIConfigurator's tables, Apache-2.0). The convolution reads and writes its channels.
STREAM_KERNELS = 4  # of a layer, that mix streams of hidden states
STATE_KERNELS = 2
STATE_ENDS = 1, 2048  # of the straight lines of layers that keep a state
SCAN_SHARE = 0.09


@dataclass(frozen=True)
class Coefficients:
    """What is learned: `_s` are seconds a kernel, the others shares of the card's ceilings or plain numbers."""

    narrow_s: float  # the engine's own kernel for few tokens and small matrices
    narrow_bandwidth: float
    narrow_padding: float  # more time a doubling of the tokens that it pads to
    narrow_balance: float  # power of how evenly its programs fill the multiprocessors
    library_s: float
    library_bandwidth: float
    library_balance: float
    sharpness: float  # p-norm that joins reading the weights and multiplying
    traffic: float  # of the tokens' own reads and writes
    compute: tuple[float, ...]  # at COMPUTE_TOKENS
    kv_bandwidth: float
    kv_compute: float
    attention_s: float
    tile_s: float  # per 1024 query elements of attention's tile
    row_s: float
    head_s: float
    head_bandwidth: float
    head_compute: float
    prompt_compute: float
    prompt_wide: float  # times as long, of heads wider than WIDE_HEAD, whose tiles are small
    mixed_s: float
    draft_ratio: float


@dataclass(frozen=True)
class EngineLimits:
    """Limits and graph sizes of the engine that was measured."""

    small_tokens: int
    small_bytes: int
    row_buckets: tuple[int, ...]
    chunk_buckets: tuple[int, ...]


@dataclass(frozen=True)
class Transfer:
    """The learned figures, the card they come from, and their errors.

    An unmeasured card is assumed to reach the same shares of its data sheet as the measured one did. `model_bar`,
    `other_bar` and `card_bar` hold 95% of |log(predicted / measured)|: on a dense model left out, on a mixture or
    8-bit model left out, and on cards never learned from.
    """

    coefficients: Coefficients
    engine: EngineLimits
    sms: int
    bandwidth_share: float
    flops_share: float
    expert_compute: float  # share of a dense product's arithmetic rate that experts' products reach
    eight_bit: float  # times as long as its bytes and flops suggest, of an 8-bit product in the library
    model_bar: float
    other_bar: float
    card_bar: float
    source: str

    def ceilings(self, gpu: GpuSpec) -> GpuSpec:
        """The card with rates that can be reached, not its data sheet's."""
        if gpu.measured:
            return gpu
        return replace(
            gpu,
            bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s * self.bandwidth_share,
            flops_per_s=gpu.flops_per_s * self.flops_share,
            source=f"{gpu.source}; {self.bandwidth_share:.0%} of the bandwidth and {self.flops_share:.0%} of the "
            "arithmetic assumed reachable, as on the H200",
        )

    def fit(self, spec: ModelSpec, gpu: GpuSpec) -> ForwardTerms:
        """The model's forward times on the card."""
        return Prices(spec, self.ceilings(gpu), gpu.sms or self.sms, self).terms()

    def bar(self, card_known: bool) -> float:
        """Share by which 95% of forward times are slower or faster at most: of a new model, or also a new card.

        Errors of unlike origin add squared.
        """
        return math.expm1(math.hypot(self.model_bar, 0.0 if card_known else self.card_bar))

    def widened(self, bar: float, spec: ModelSpec) -> float:
        """The bar of a model, where a dense one of 16 bits has `bar`; that of mixtures where its kind is assumed."""
        if spec.experts is None and not spec.is_quantised and not (spec.state or spec.sparse or spec.compressed):
            return bar
        return math.expm1(math.sqrt(math.log1p(bar) ** 2 + self.other_bar**2 - self.model_bar**2))


class Prices:
    """The formula: seconds of the parts of a forward."""

    def __init__(self, spec: ModelSpec, ceilings: GpuSpec, sms: int, transfer: Transfer) -> None:
        self.s, self.sms = spec, sms
        self.c, self.engine = transfer.coefficients, transfer.engine
        self.bandwidth, self.flops = ceilings.bandwidth_bytes_per_s, ceilings.flops_per_s
        self.layer_flops, self.item = flops_of(spec, ceilings), spec.layer_bytes or spec.dtype_bytes
        self.expert_flops = self.layer_flops * transfer.expert_compute
        self.slower = transfer.eight_bit if self.item == 1 else 1.0

    def layers(self, tokens: Floats) -> Floats:
        """All layers over `tokens`, without attention over what is cached and the reading of experts.

        Without experts at all where they take the tokens of several ranks.
        """
        total = np.zeros(np.shape(tokens))
        for count, products in self.s.layer_kinds:
            total += count * sum(self.product(inputs, outputs, tokens) for inputs, outputs in products)
        if self.s.compressed is not None:
            total += self.streams(tokens, self.s.compressed.streams)
        return total if self.s.data_ranks > 1 else total + self.experts(tokens)

    def streams(self, tokens: Floats, count: int) -> Floats:
        """Mixing `count` streams of hidden states before and after attention and MLP of all layers, by their bytes."""
        moved = 2 * (3 * count + 2) * self.s.hidden * self.s.dtype_bytes
        return np.asarray(self.s.layers * (STREAM_KERNELS * self.c.attention_s + tokens * moved / self.bandwidth))

    def expert(self) -> float:
        """Reading one expert in every layer that has experts."""
        return self.s.expert_bytes / (self.bandwidth * self.c.narrow_bandwidth)

    def experts(self, tokens: Floats) -> Floats:
        """Return the time of layers with experts beyond their other products and the reads of experts.

        That is their kernels' fixed time, the tokens' reads and writes, and the arithmetic as far as it takes longer
        than reading the experts of as many independent tokens. Of experts on several GPUs, the one with the most to do.
        """
        s, c, experts = self.s, self.c, self.s.experts
        if experts is None:
            return np.zeros(np.shape(tokens))
        distinct = np.array([experts.read(count) for count in tokens.tolist()])
        imbalance = 1.0 if experts.balanced else experts.ranks**IMBALANCE
        taken = tokens * experts.per_token / experts.ranks * imbalance
        reading = self.expert() * distinct
        multiplying = 2 * s.expert_params * taken / (self.expert_flops * self._share(taken / distinct))
        moved = s.dtype_bytes * s.expert_layers * taken * (2 * s.hidden + 3 * experts.intermediate)
        fixed = s.expert_layers * EXPERT_KERNELS * c.narrow_s
        return np.asarray(
            fixed + _joined(reading, multiplying, c.sharpness) - reading + c.traffic * moved / self.bandwidth
        )

    def product(self, inputs: int, outputs: int, tokens: Floats) -> Floats:
        """Seconds of one matrix product, in the kernel that the engine takes for it."""
        narrow = (tokens <= self.engine.small_tokens) & (self._bytes(inputs, outputs) <= self.engine.small_bytes)
        return np.where(narrow, self.narrow(inputs, outputs, tokens), self.library(inputs, outputs, tokens))

    def narrow(self, inputs: int, outputs: int, tokens: Floats) -> Floats:
        """Seconds of one product in the engine's kernel, whose programs split the inputs until they fill the card."""
        c, tiles, steps = self.c, np.ceil(outputs / NARROW_TILE), np.ceil(inputs / NARROW_STEP)
        wanted = np.clip(np.round(self.sms / tiles), 1, np.minimum(NARROW_SPLITS, steps))
        programs = tiles * np.ceil(steps / np.ceil(steps / wanted))
        padded = np.maximum(1.0, _doubled(tokens) / 16)
        reading = self._bytes(inputs, outputs) / (self.bandwidth * c.narrow_bandwidth)
        return np.asarray(
            c.narrow_s + reading * (1 + c.narrow_padding * (padded - 1)) / self._even(programs) ** c.narrow_balance
        )

    def library(self, inputs: int, outputs: int, tokens: Floats) -> Floats:
        """Seconds of one product in the vendor's library, with the norms and activations around it."""
        c = self.c
        tiles = np.ceil(tokens / LIBRARY_TILE) * np.ceil(outputs / LIBRARY_TILE)
        reading = self._bytes(inputs, outputs) / (self.bandwidth * c.library_bandwidth)
        rate = self.layer_flops * self._share(tokens) * self._even(tiles) ** c.library_balance
        multiplying = 2 * inputs * outputs * tokens / rate
        moved = self.s.dtype_bytes * tokens * (inputs + outputs)
        once = c.library_s + _joined(reading, multiplying, c.sharpness) + c.traffic * moved / self.bandwidth
        return np.asarray(self.slower * once)

    def kv(self, width: Floats) -> Floats:
        """Seconds per cached token that a row's `width` queries read."""
        s, c = self.s, self.c
        padded = self._queries(width) / (s.heads / s.kv_heads)  # tokens of each head
        reading = s.kv_bytes_per_token / (self.bandwidth * c.kv_bandwidth)
        multiplying = padded * s.attention_flops_per_pair / (self.flops * c.kv_compute)
        return _joined(reading, multiplying, 3.0)

    def width(self, width: Floats) -> Floats:
        """Seconds per forward that has rows."""
        queries = self._queries(width)
        if self.s.latent is not None or self.s.compressed is not None:
            queries = np.minimum(LATENT_QUERIES, queries)
        tile = queries * self.s.head_dim / 1024
        return np.asarray(self.s.caching_layers * (self.c.attention_s + self.c.tile_s * tile))

    def row(self) -> float:
        return self.s.caching_layers * self.c.row_s

    def states(self, copies: Floats) -> Floats:
        """Rows that read and write `copies` states in all, or read as many windows of compressed attention."""
        fixed = STATE_KERNELS * self.s.state_layers * self.c.attention_s
        return np.asarray(fixed + copies * self.s.row_bytes / (self.bandwidth * self.c.kv_bandwidth))

    def scan(self, tokens: Floats) -> Floats:
        """Prompts of `tokens` tokens that are read into states, or attend to those windows."""
        state = self.s.state
        if state is None:
            return np.asarray(tokens * self.s.row_flops / (self.flops * self.c.prompt_compute))
        moved = 2 * self.s.dtype_bytes * state.channels * (state.convolution > 0)
        token_s = moved / (self.bandwidth * self.c.kv_bandwidth) + state.flops / (self.flops * SCAN_SHARE)
        return np.asarray(state.layers * (STATE_KERNELS * self.c.attention_s + tokens * token_s))

    def head(self) -> tuple[float, float]:
        """The output projection: reading it, and multiplying one token."""
        c, params = self.c, self.s.head_params
        reading = c.head_s + params * self.s.dtype_bytes / (self.bandwidth * c.head_bandwidth)
        return reading, 2 * params / (self.flops * c.head_compute)

    def prompt_wave(self) -> float:
        """Seconds per context token of a wave of attention over prompts: the programs on one multiprocessor."""
        s, c, wide = self.s, self.c, self.s.head_dim > WIDE_HEAD
        queries = (WIDE_QUERIES if wide else PROMPT_QUERIES) * (2 if s.head_dim <= SMALL_HEAD else 1)
        head_flops = 4 * s.heads * s.head_dim  # of a pair, in a layer of the model's own heads
        layers = s.attention_flops_per_pair / head_flops
        if s.latent is not None:  # expanded, but for the indexer
            layers = s.caching_layers + (s.sparse.scans * s.sparse.flops_per_pair / head_flops if s.sparse else 0)
        multiplying = 4 * layers * queries * s.head_dim * self.sms / (self.flops * c.prompt_compute)
        return multiplying * (c.prompt_wide if wide else 1.0)

    def terms(self) -> ForwardTerms:
        """The formula read at knots; more tokens are never faster."""
        spec, c, engine, (reading, multiplying) = self.s, self.c, self.engine, self.head()
        widths, tokens, states = np.array(WIDTHS, float), np.array(TOKENS, float), np.array(STATE_ENDS, float)
        ranks, keeps, fuses = spec.data_ranks > 1, bool(spec.row_bytes), bool(spec.fused_inputs)

        def rising(seconds: Floats) -> Knots:
            return knots_at(TOKENS, np.maximum.accumulate(seconds))

        return ForwardTerms(
            layer_knots=rising(self.layers(tokens)),
            expert_s=self.expert(),
            head_weights_s=reading,
            head_token_s=multiplying,
            kv_knots=knots_at(WIDTHS, np.maximum.accumulate(self.kv(widths))),
            width_knots=knots_at(WIDTHS, self.width(widths)),
            row_s=self.row(),
            prompt_sms=self.sms,
            prompt_wave_s=self.prompt_wave(),
            mixed_s=spec.caching_layers * c.mixed_s,
            spread_knots=rising(self.experts(tokens)) if ranks else (),
            exchange_knots=NO_EXCHANGE if ranks else (),
            fused_knots=rising(self.product(spec.fused_inputs, spec.hidden, tokens)) if fuses else (),
            state_knots=knots_at(STATE_ENDS, self.states(states)) if keeps else (),
            scan_knots=knots_at(STATE_ENDS, self.scan(states)) if keeps else (),
            draft_ratio=c.draft_ratio,
            small_kernel_tokens=engine.small_tokens,
            large_s=large_products_s(spec, engine.small_bytes, self.bandwidth),
            row_buckets=engine.row_buckets,
            chunk_buckets=engine.chunk_buckets,
        )

    def _share(self, tokens: Floats) -> Floats:
        """Share of the arithmetic that a product of `tokens` tokens reaches."""
        return np.exp(np.interp(np.log(tokens), np.log(COMPUTE_TOKENS), np.log(self.c.compute)))

    def _bytes(self, inputs: int, outputs: int) -> float:
        return inputs * outputs * self.item

    def _queries(self, width: Floats) -> Floats:
        return np.maximum(LEAST_QUERIES, _doubled(width * self.s.heads / self.s.kv_heads))

    def _even(self, tiles: Floats) -> Floats:
        """Return how evenly equal tiles fill the multiprocessors, up to 1."""
        return np.asarray(tiles / (np.ceil(tiles / self.sms) * self.sms))


def with_collectives(terms: ForwardTerms, spec: ModelSpec, link: LinkSpec, card: str) -> ForwardTerms:
    """A shard's forward with what it exchanges with the others of its group, and its rank with other ranks.

    The link is that of a node of such cards. A group has an all-reduce after every mixer and MLP; gathering the logits
    sends half as much as one of the same size. Data-parallel ranks gather the tokens of all before the experts of a
    layer, and reduce and scatter the results: each is half an all-reduce too, which is assumed. Ranks on several nodes
    do so within each node, and before that with their likes on the other nodes (`links.between_nodes`).

    Not modelled: all-reduces that overlap with products or are fused with norms, and GPUs that wait for the slowest.
    """
    token_bytes, ranks = spec.hidden * spec.dtype_bytes, spec.data_ranks
    if spec.shards > 1:
        reduced = _reduced(link, spec.shards, token_bytes, spec.all_reduces)
        gathered = _reduced(link, spec.shards, spec.vocab * spec.shards * spec.dtype_bytes / 2, 1)
        terms = replace(terms, reduce_knots=reduced, gather_knots=gathered)
    if ranks > 1:
        nodes = nodes_of(card, ranks * spec.shards)
        exchanged = _reduced(link, ranks // nodes, ranks * token_bytes, spec.expert_layers)
        if nodes > 1:
            port_bytes, port = ranks * token_bytes / (ranks // nodes), between_nodes(card)
            exchanged = tuple(
                (n, inside_s + spec.expert_layers * 2 * gather_s(port, nodes, n * port_bytes))
                for n, inside_s in exchanged
            )
        terms = replace(terms, exchange_knots=exchanged)
    return terms


@cache
def _reduced(link: LinkSpec, gpus: int, token_bytes: float, times: int) -> Knots:
    return tuple((n, times * all_reduce_s(link, gpus, n * token_bytes)) for n in TOKENS)


def knots_at(at: Sequence[int], seconds: Floats) -> Knots:
    """Times at sizes, as knots."""
    return tuple(zip(at, seconds.tolist(), strict=True))


def _doubled(x: Floats) -> Floats:
    """Up to the next power of two."""
    return np.asarray(np.exp2(np.ceil(np.log2(np.maximum(x, 1.0)) - 1e-9)))


def _joined(a: Floats | float, b: Floats, p: float) -> Floats:
    return np.asarray((a**p + b**p) ** (1 / p))


@cache
def shipped() -> Transfer:
    """The figures that come with pdvsim."""
    text = (files("pdvsim.sim.prices") / "data" / "transfer.json").read_text(encoding="utf-8")
    return from_document(json.loads(text))


def from_document(data: dict[str, Any]) -> Transfer:
    """Return the fit whose fields are in a document, as `asdict` gives them."""
    learned = {**data["coefficients"], "compute": tuple(data["coefficients"]["compute"])}
    limits: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in data["engine"].items()}
    rest = {f.name: data[f.name] for f in fields(Transfer) if f.name not in ("coefficients", "engine")}
    return Transfer(coefficients=Coefficients(**learned), engine=EngineLimits(**limits), **rest)
