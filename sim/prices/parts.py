"""The parts of a forward of one model, from an engine's kernels at their real shapes (a shard's under parallelism).

Attention was timed with one query per row; the cost of verifying several is pdvsim's own ratio of wide to narrow
attention, measured on the H200: an assumption.

Multi-head latent attention, which vLLM's tables time with its products, is priced there by pdvsim's own formula. So are
states of kinds that were not timed (Mamba-2, lightning). Sparse attention was timed with its products; what is left
of it without them is the attention's.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pdvsim.sim.models.configs import MXFP4_BYTES, NVFP4_BYTES
from pdvsim.sim.models.layers import Compressed, SlidingWindow, Sparse
from pdvsim.sim.models.specs import ModelSpec
from pdvsim.sim.prices.forward import Knots, pairs
from pdvsim.sim.prices.kernels import KernelTables, TimedAttention
from pdvsim.sim.prices.links import nodes_of
from pdvsim.sim.prices.shapes import BANDWIDTH_SHARE, FLOPS_SHARE, Floats
from pdvsim.sim.prices.transfer import WIDTHS, Prices, knots_at, shipped

TOKENS: tuple[int, ...] = (
    *range(1, 18), 24, 32, 33, 48, 49, 64, 65, 80, 81, 96, 97, 112, 128, 129, 160, 161, 192, 193, 224, 256, 257, 384,
    512, 513, 768, 769, 1024, 1025, 1280, 1536, 1792, 2048, 2560, 3072, 4096, 6144, 8192, 12288, 16384, 32768,
)  # fmt: skip
TYPICAL_ROWS = 64  # whose time per cached token is the unit of the others'
ACTIVATIONS_BYTES = 2  # per value between kernels
LEAST_SHARE = 0.4  # of a product's time in the tables
# Per value of a state, as timed: TensorRT-LLM's are faster than the memory allows for 32 bits
TIMED_STATE_BYTES = {"vllm": 4, "sglang": 4, "trtllm": 2}
LEAST_PROMPT = 512  # tokens of prompts that lines of compressed attention go through
LONGEST = 65_536  # cached tokens up to which they are
LEAST_S = 1e-15  # per cached token, where nothing is read
Products = tuple[tuple[int, int], ...]
READ_SHARE = 0.9  # of the least time per expert that a table has: the part that distinct experts explain


class DecodeLines(NamedTuple):
    """Attention of rows as lines in their cached tokens, by the number of rows."""

    rows: Floats
    fixed: Floats  # seconds at no context
    slopes: Floats  # seconds per cached token of all rows
    past_share: float | None = None  # of the slopes, beyond reach
    past: Floats | None = None  # seconds more there


class ModelKernels:
    """Seconds of the parts of a forward of one model, from the tables."""

    def __init__(self, tables: KernelTables, spec: ModelSpec, block_products: str = "fp8_block") -> None:
        self.tables, self.spec = tables, spec
        self.kind = block_products if product_kind(spec) == "fp8_block" else product_kind(spec)
        self.cache = "fp8" if spec.kv_dtype_bytes == 1 else "bfloat16"
        transfer, card = shipped(), tables.gpu  # pdvsim's own formula, for what the tables lack
        self.formula = Prices(spec, transfer.ceilings(card), card.sms or transfer.sms, transfer)

    def products(self, tokens: Floats, more_s: float = 0.0, prompts: Floats | float = 1.0) -> Floats:
        """The layers' matrix products that every token takes, each with `more_s` besides its kernel.

        Of MLA, only `prompts` expand the compressed vectors: where decode was timed, this is part of its attention.
        """
        kind, total = self.kind, np.zeros(tokens.shape)
        absorbed = self.spec.latent is not None and self.spec.is_uniform and bool(self.tables.kinds("latent-decode"))
        for count, products in self.spec.layer_kinds:
            for inputs, outputs in products:
                router = self.spec.experts is not None and outputs == self.spec.experts.count
                alone = self.tables.product("bfloat16" if router else kind, tokens, outputs, inputs)
                expands = absorbed and inputs == self.spec.latent.kv_rank  # type: ignore[union-attr]
                total += count * np.maximum(alone + more_s, LEAST_SHARE * alone) * (prompts if expands else 1.0)
        return total

    def experts(self, tokens: Floats) -> Floats:
        """The layers' experts, of independent tokens."""
        s, experts = self.spec, self.spec.experts
        if experts is None:
            return np.zeros(tokens.shape)
        shape = experts.latent or s.hidden, experts.intermediate, experts.per_token, experts.slots
        sent = self.tables.engine == "trtllm" or experts.all2all != "allgather_reducescatter"
        how = experts.ranks, s.gated, sent and s.data_ranks > 1, experts.balanced
        return s.expert_layers * self.tables.experts(expert_kind(s), tokens, *shape, *how)

    def expert_s(self) -> float:
        """Reading one further expert in all layers that have experts."""
        if self.spec.experts is None:
            return 0.0
        tokens = np.array(TOKENS[:40], float)
        read = np.array([self.read(count) for count in TOKENS[:40]])
        return float(READ_SHARE * np.min(self.experts(tokens) / read))

    def read(self, tokens: float) -> float:
        return 0.0 if self.spec.experts is None else self.spec.experts.read(tokens)

    def small(self, tokens: Floats) -> Floats:
        """Norms, activations and rotary embeddings, by their bytes."""
        s = self.spec
        inner = s.intermediate if s.experts is None else s.experts.shared
        attended = (s.heads + 2 * s.kv_heads) * s.head_dim
        values = 8 * s.hidden + 3 * inner + 2 * attended
        rate = self.tables.gpu.bandwidth_bytes_per_s * BANDWIDTH_SHARE
        return s.layers * tokens * values * ACTIVATIONS_BYTES / rate

    def fused(self, tokens: Floats) -> Floats:
        """The product that fuses a head's inputs."""
        return self.tables.product("bfloat16", tokens, self.spec.hidden, self.spec.fused_inputs)

    def head(self) -> tuple[float, float]:
        """The output projection: reading it, and multiplying one token."""
        few, many = self.tables.product("bfloat16", np.array([8.0, 1024.0]), self.spec.vocab, self.spec.hidden)
        return float(few), float(many) / 1024

    def streams(self, tokens: Floats) -> Floats:
        """Seconds to mix the streams of hidden states."""
        s = self.spec
        if s.compressed is None:
            return np.zeros(tokens.shape)
        timed = self.tables.streams(s.hidden, tokens)
        return self.formula.streams(tokens, s.compressed.streams) if timed is None else s.layers * timed

    def decode(self) -> DecodeLines:
        """Attention of rows over all layers; by pdvsim's own formula where its kind was not timed."""
        s, timed = self.spec, None
        if s.compressed is not None:
            timed = self._compressed_decode(s.compressed)
        elif s.sparse is not None:
            timed = self._sparse_decode(s.sparse)
        elif s.latent is None:
            timed = self._plain_decode()
        elif (latent := self.tables.latent_attention("decode", s.heads, self.cache)) is not None:
            rows, fixed, slopes = latent.lines()
            fixed = fixed + self.tables.absorbed(s.heads, rows)
            timed = DecodeLines(rows, s.caching_layers * fixed, s.caching_layers * slopes)
        if timed is not None:
            return timed
        rows, one = np.array([1.0, 2048.0]), np.ones(1)
        token_s = max(LEAST_S, float(self.formula.kv(one)[0]))
        return DecodeLines(rows, self.formula.width(one) + self.formula.row() * rows, np.full(2, token_s))

    def _plain(self, phase: str) -> TimedAttention:
        """Attention of the model's own heads."""
        return self.tables.attention(phase, *self._heads(None), self.cache)

    def _plain_decode(self) -> DecodeLines:
        s = self.spec
        rows, fixed, slopes = self._plain("decode").lines()
        fixed, slopes = s.attending_layers * fixed, s.attending_layers * slopes
        if (window := s.window) is None:
            return DecodeLines(rows, fixed, slopes)
        shape = *self._heads(window), self.cache
        at, least, more = self.tables.attention("decode", *shape).lines()
        # with that window, if it was timed: so it ends at its time
        own = self.tables.attention("decode", *shape, window.tokens).lines()
        ended = np.interp(at, own[0], own[1] + window.tokens * own[0] * own[2])
        least = np.maximum(0.0, ended - window.tokens * at * more)
        within = slopes + window.layers * np.interp(rows, at, more)
        return DecodeLines(
            rows, fixed + window.layers * np.interp(rows, at, least), within, _share(rows, slopes, within)
        )

    def _heads(self, window: SlidingWindow | None) -> tuple[int, int, int]:
        """Heads, KV heads and their size, in layers with a window or without.

        A head reads as much as one whose values have the size of its keys: the mean of both.
        """
        s, own = self.spec, window or SlidingWindow(0, 0)
        head_dim = own.head_dim or s.head_dim
        return s.heads, own.kv_heads or s.kv_heads, (head_dim + (s.value_dim or head_dim)) // 2

    def _sparse_decode(self, sparse: Sparse) -> DecodeLines | None:
        s = self.spec
        timed = self.tables.sparse_attention("decode", self._sparse_kind, s.hidden, s.heads, self.cache)
        if timed is None:
            return None
        context = timed.axes[1]  # two lines: up to what is selected, and beyond
        at, _, past = timed.within(context >= sparse.tokens, 1.0).lines((sparse.tokens, 1 << 20))
        rows, fixed, within = timed.within(context <= sparse.tokens, timed.scale).lines((64, sparse.tokens))
        past = np.interp(rows, at, past)
        past = np.minimum(past, within)
        fixed = np.maximum(0.0, fixed - self._timed_products(timed, rows))
        dense = s.attending_layers - sparse.layers
        fixed, slopes = sparse.layers * fixed, sparse.layers * (within - past) + sparse.scans * past
        beyond = sparse.scans * past
        if dense:
            at, least, more = self._plain("decode").lines()
            grown = dense * np.interp(rows, at, more)
            fixed, slopes, beyond = fixed + dense * np.interp(rows, at, least), slopes + grown, beyond + grown
        return DecodeLines(rows, fixed, slopes, _share(rows, beyond, slopes))

    def _compressed_decode(self, own: Compressed) -> DecodeLines | None:
        """Layers with a window alone take as long as those of HCA, and no longer for more context."""
        s = self.spec
        csa, hca = (
            self.tables.sparse_attention("decode", kind, s.hidden, s.heads, self.cache) for kind in ("csa", "hca")
        )
        if csa is None or hca is None:
            return None
        reach = own.entries * own.ratio
        rows, fixed, within = csa._replace(scale=1.0).lines((64, reach))
        at, base, past = csa._replace(scale=1.0).lines((reach + 1, LONGEST))
        base, past = np.interp(rows, at, base), np.minimum(within, np.interp(rows, at, past))
        more = np.maximum(0.0, base - fixed - (within - past) * reach * rows)  # what selecting adds beyond reach
        hca_rows, hca_fixed, hca_slopes = hca._replace(scale=1.0).lines((64, LONGEST))
        selecting, whole = (self._module_products(layer, rows) for _, layer in own.compressors(s.hidden))
        fixed = own.selecting * np.maximum(0.0, fixed - selecting)
        fixed += (own.layers - own.selecting) * np.maximum(0.0, np.interp(rows, hca_rows, hca_fixed) - whole)
        beyond = own.selecting * past + own.whole * np.interp(rows, hca_rows, hca_slopes)
        slopes = np.maximum(LEAST_S, own.selecting * (within - past) + beyond)
        return DecodeLines(rows, fixed, slopes, _share(rows, beyond, slopes), own.selecting * more)

    def _module_products(self, compressors: Products, tokens: Floats) -> Floats:
        """The products that were timed with a layer of compressed attention: of the types that it is served with."""
        return self._layer_products(self.kind, (*self.spec.attention_products, *compressors), tokens)

    def _compressed_prefill(self, own: Compressed) -> tuple[float, float, float | None, float]:
        """Seconds per launch, per pair, the share of these beyond reach, and seconds per token."""
        s, reach = self.spec, own.entries * own.ratio
        counts, sums = (own.selecting, own.layers - own.selecting), np.zeros(4)
        for kind, count, (_, layer) in zip(("csa", "hca"), counts, own.compressors(s.hidden), strict=True):
            timed = self.tables.sparse_attention("prefill", kind, s.hidden, s.heads, self.cache)
            if timed is None:
                return *self._formula_prefill(), float(self.formula.scan(np.ones(1))[0])
            length, times = timed.given
            fixed, long = float(times.min()), length >= LEAST_PROMPT
            rest = np.maximum(0.0, times - np.maximum(fixed, self._module_products(layer, length)))[long]
            pair_counts = np.array([[pairs(0, int(n), reach), pairs(0, int(n))] for n in length[long]])
            columns = np.column_stack([length[long], pair_counts if kind == "csa" else pair_counts[:, 1:]])
            solution = _at_least_0(columns / times[long, None], rest / times[long])
            sums += count * np.array([fixed, solution[0], solution[1] if kind == "csa" else 0.0, solution[-1]])
        fixed, token_s, near_s, scored_s = sums.tolist()
        # timed prompts are too short to show what is read of all tokens: no faster than the arithmetic, in 8 bits
        whole = s.attention_flops_per_pair - s.cached_token(bounded=True)[1]
        least = whole / (2 * FLOPS_SHARE * self.tables.gpu.flops_per_s)
        near_s, scored_s = (near_s, max(scored_s, least)) if s.kv_bytes_per_token else (0.0, 0.0)
        pair_s = max(LEAST_S, near_s + scored_s)
        return fixed, pair_s, (scored_s / pair_s if own.selecting else None), token_s

    def prefill(self) -> tuple[float, float, float | None]:
        """Attention over prompts: seconds per launch and per pair of tokens, of all layers.

        And the share of the latter that is left beyond the window.
        """
        s = self.spec
        if s.compressed is not None:
            return self._compressed_prefill(s.compressed)[:3]
        if s.sparse is not None:
            return self._sparse_prefill(s.sparse)
        if s.latent is not None:
            if (latent := self.tables.latent_attention("prefill", s.heads, self.cache)) is None:
                return self._formula_prefill()
            fixed, pair_s = latent.per_pair()
            return s.caching_layers * fixed, s.caching_layers * pair_s, None
        fixed, pair_s = self._plain("prefill").per_pair()
        fixed, pair_s = s.caching_layers * fixed, s.attending_layers * pair_s
        if (window := s.window) is None:
            return fixed, pair_s, None
        more_s = self.tables.attention("prefill", *self._heads(window), self.cache).per_pair()[1]
        within = pair_s + window.layers * more_s
        return fixed, within, pair_s / within

    def _formula_prefill(self) -> tuple[float, float, None]:
        flops = self.formula.flops * self.formula.c.prompt_compute
        return 0.0, self.spec.attention_flops_per_pair / flops, None

    def _sparse_prefill(self, sparse: Sparse) -> tuple[float, float, float | None]:
        """A time per pair within reach and one per pair scored, which fit the timed prompts best."""
        s = self.spec
        timed = self.tables.sparse_attention("prefill", self._sparse_kind, s.hidden, s.heads, self.cache)
        if timed is None:
            return self._formula_prefill()
        length, times = timed.given
        fixed, long = float(times.min()), length >= sparse.tokens
        rest = np.maximum(0.0, times - np.maximum(fixed, self._timed_products(timed, length)))[long]
        scored = np.array([pairs(0, int(n)) for n in length[long]])
        near = np.array([pairs(0, int(n), sparse.tokens) for n in length[long]])
        weight = 1 / times[long]
        (near_s, scored_s), *_ = np.linalg.lstsq(
            np.stack([weight * near, weight * scored], axis=1), weight * rest, rcond=None
        )
        if near_s < 0:  # one of them explains all
            near_s, scored_s = 0.0, float(np.median(rest / scored))
        elif scored_s < 0:
            near_s, scored_s = float(np.median(rest / near)), 0
        dense = s.attending_layers - sparse.layers
        beyond = sparse.scans * scored_s
        if dense:
            beyond += dense * self._plain("prefill").per_pair()[1]
        pair_s = sparse.layers * near_s + beyond
        return sparse.layers * fixed, float(pair_s), float(beyond / pair_s)

    @property
    def _sparse_kind(self) -> str:
        return "dsa" if self.spec.latent is not None else "msa"

    def _timed_products(self, timed: TimedAttention, tokens: Floats) -> Floats:
        """Return the products that were timed with a layer of sparse attention, in the type that they had there."""
        products = (*self.spec.attention_products, *self.spec.other_mixers()[-1][1])
        return self._layer_products(str(self.tables.arrays[f"{timed.name}/products"]), products, tokens)

    def _layer_products(self, kind: str, products: Products, tokens: Floats) -> Floats:
        total = np.zeros(tokens.shape)
        for inputs, outputs in products:
            total += self.tables.product(kind, tokens, outputs, inputs)
        return total

    def states(self, kernels: float, prompts: float) -> tuple[Knots, Knots]:
        """Layers that keep a state, by states and by prompt tokens; with the engine's factors of both."""
        if self.spec.compressed is not None:  # the windows of rows were timed with their other attention
            token_s = prompts * self._compressed_prefill(self.spec.compressed)[3]
            return (), ((1, token_s), (2, 2 * token_s))
        if (state := self.spec.state) is None or not state.layers:
            return (), ()
        copies, tokens = np.array([2.0, 4096.0]), np.array([1.0, 32768.0])
        rows_s, scan_s = self.formula.states(copies), self.formula.scan(tokens)
        if (timed := self.tables.states("decode", state.kind, state.key_heads, state.value_heads)) is not None:
            copies, rows_s = 2 * timed[0], state.layers * timed[1]  # a row reads a state and writes one
            least = rows_s.min()
            rows_s = least + (rows_s - least) * state.item_bytes / TIMED_STATE_BYTES[self.tables.engine]
        if (timed := self.tables.states("prefill", state.kind, state.key_heads, state.value_heads)) is not None:
            tokens, scan_s = timed[0], state.layers * timed[1]
        return (
            knots_at(copies.astype(int).tolist(), kernels * rows_s),
            knots_at(tokens.astype(int).tolist(), prompts * scan_s),
        )

    def widths(self) -> tuple[Floats, Floats]:
        """How many times as long several queries per row read the cache as one, and what they add to a forward."""
        at = np.array(WIDTHS, float)
        kv, width = np.maximum(LEAST_S, np.maximum.accumulate(self.formula.kv(at))), self.formula.width(at)
        return kv / kv[0], np.maximum(0.0, width - width[0])

    def reduces(self, tokens: Floats) -> Floats:
        """Seconds of the all-reduces of all layers; in MiniMax models also of norms, two 32-bit values per token."""
        s = self.spec
        layers_s = s.all_reduces * self.tables.reduce_s(s.shards, tokens * s.hidden)
        return layers_s + s.layers * self.tables.reduce_s(s.shards, 4 * tokens) if s.family == "minimax" else layers_s

    def exchange(self, tokens: Floats) -> Floats:
        """Sending the tokens of data-parallel ranks to the experts of all layers, and the results back."""
        s, experts = self.spec, self.spec.experts
        assert experts is not None
        nodes = nodes_of(self.tables.gpu.name, s.data_ranks * s.shards)
        kind = self.tables.experts_kind(expert_kind(s))
        sent = tokens, s.hidden, nodes, kind, experts.per_token
        return s.expert_layers * self.tables.exchange_s(experts.all2all, s.data_ranks, *sent)

    def gather(self, tokens: Floats) -> Floats:
        """Gathering logits, which sends half as much as an all-reduce of the same size."""
        return self.tables.reduce_s(self.spec.shards, tokens * self.spec.vocab * self.spec.shards / 2)


def _share(rows: Floats, part: Floats, whole: Floats) -> float:
    """Share that `part` has of `whole`, for a typical number of rows."""
    return float(np.interp(TYPICAL_ROWS, rows, part) / np.interp(TYPICAL_ROWS, rows, whole))


def _at_least_0(columns: Floats, wanted: Floats) -> Floats:
    """Factors of the columns, none below 0, whose sum is nearest to what is wanted."""
    used = list(range(columns.shape[1]))
    while True:
        solution, *_ = np.linalg.lstsq(columns[:, used], wanted, rcond=None)
        if not used or solution.min() >= 0:
            break
        del used[int(np.argmin(solution))]
    factors = np.zeros(columns.shape[1])
    factors[used] = solution
    return factors


def product_kind(spec: ModelSpec) -> str:
    """The type of a model's products, as the tables call it."""
    if spec.layer_bytes is None:
        return "bfloat16"
    if spec.layer_bytes < 1:
        return "nvfp4"
    return "fp8" if spec.experts is None else "fp8_block"  # as mixtures are published


def expert_kind(spec: ModelSpec) -> str:
    """The type of a model's experts, as the tables call it."""
    own = None if spec.experts is None else spec.experts.weight_bytes
    if own is not None and own < 1:
        mxfp4 = "w4a16_mxfp4" if spec.family == "gpt_oss" else "mxfp4_marlin"
        return {NVFP4_BYTES: "nvfp4", MXFP4_BYTES: mxfp4}.get(own, "int4_wo")
    return product_kind(spec)
