"""Forward times of an engine on a card, composed from its kernels: the second maker of cost models.

A forward is the sum of its layers' kernels at their real shapes (a shard's under tensor parallelism): matrix products,
decode and prefill attention, experts, all-reduces and exchanges of tokens by message. Norms, activations and rotary
embeddings go by their bytes. What the engine adds is a handful of constants per engine (`EngineStep`), fitted to
measured servers of all models and cards together (`studies/engine_steps.py`). The result is terms, like measured ones.

The parts are `parts`'. Contention between lanes is the H200's: an assumption.

Not modelled: fused all-reduces and norms, kernels that overlap, versions other than those of the tables.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import ClassVar

import numpy as np

from pdvsim.sim.core import ServingEngine
from pdvsim.sim.models.specs import ModelSpec, Pair
from pdvsim.sim.prices.forward import ForwardTerms
from pdvsim.sim.prices.kernels import KernelTables
from pdvsim.sim.prices.links import LINKS, NODE, LinkSpec, nvlink_of
from pdvsim.sim.prices.parts import TOKENS, TYPICAL_ROWS, ModelKernels, expert_kind, product_kind
from pdvsim.sim.prices.profile import Profile
from pdvsim.sim.prices.steps import EngineError, EngineStep, GraphSizes
from pdvsim.sim.prices.transfer import WIDTHS, knots_at, with_collectives

# 95% of the errors of TPOT of 114 servers with Qwen3.5 and GLM-5, before anything was fitted to such layers
UNMEASURED_BAR = 0.25


@dataclass(frozen=True)
class ComposedProfile(Profile):
    """A profile that has every model its tables have kernels for."""

    tables: KernelTables | None = None
    step: EngineStep = field(default_factory=EngineStep)
    error: EngineError | None = None
    graphs: GraphSizes = field(default_factory=GraphSizes)  # that the engine pads forwards to
    served: str = ""  # the engine's version; empty: the newest that is known
    sent_bar: ClassVar[float | None] = None  # servers were measured with their all-reduces

    @property
    def engine(self) -> ServingEngine:
        assert self.tables is not None
        return self.tables.engine  # type: ignore[return-value]

    @property
    def handover_s(self) -> float:
        return self.step.handover_s

    def covering(self, pair: Pair, link: LinkSpec | None = None) -> Profile:
        """Return the same with both models of a pair."""
        specs = {spec.name: spec for spec in (pair.draft, pair.target) if not spec.on_host}
        assert self.tables is not None
        drafter = pair.draft.name if pair.draft.name != pair.target.name else ""
        fits = {
            name: replace(compose(self.tables, self.step, spec, name == drafter), **self.graphs._asdict())
            for name, spec in specs.items()
        }
        usual = (LINKS["nvlink4"], LINKS[nvlink_of(self.gpu.name)[0]])  # what the tables were timed on
        if link is not None and link not in usual:
            fits = {name: with_collectives(fits[name], spec, link, self.gpu.name) for name, spec in specs.items()}
        bars = {} if self.error is None else dict.fromkeys(specs, self.error.tpot)
        for name in (name for name in bars if specs[name].compressed is not None):  # unlike origins: added squared
            bars[name] = math.expm1(math.hypot(math.log1p(bars[name]), math.log1p(UNMEASURED_BAR)))
        return replace(self, models=self.models | fits, uncertainty=self.uncertainty | bars)


@lru_cache(maxsize=64)
def compose(tables: KernelTables, step: EngineStep, spec: ModelSpec, drafts: bool = False) -> ForwardTerms:
    """The model's forward times in this engine on this card, as a target or as a drafter.

    What drafting costs besides kernels is part of them, so that simulations, formulas and controllers all have it.
    """
    parts = ModelKernels(tables, spec, step.block_products)
    tokens = np.array(TOKENS, float)
    # small forwards and large ones differ in what the tables leave out; between, the factor changes with the logarithm
    share = np.clip(np.log(tokens / 256) / np.log(8), 0, 1)
    factor = step.kernels ** (1 - share) * step.prompts**share
    few, many = step.expert_factors(expert_kind(spec))
    expert_s = parts.expert_s() * min(1.0, few)
    quantised_s = step.quantised_s if product_kind(spec) in ("fp8", "nvfp4") else 0.0
    # experts on more GPUs than a node has are busy with the tokens of a forward as those of a node are with fewer
    spread_over = 1 if spec.experts is None else spec.experts.ranks
    busy = share if spread_over <= NODE else np.clip(np.log(tokens * NODE / spread_over / 256) / np.log(8), 0, 1)
    experts = parts.experts(tokens) * few ** (1 - busy) * many**busy
    spread = step.kernels ** (1 - busy) * step.prompts**busy
    alone = float(spec.data_ranks == 1)  # else experts take the tokens of other ranks too, and are priced apart
    layers = parts.products(tokens, quantised_s, share) + alone * experts + parts.small(tokens) + parts.streams(tokens)
    read = np.array([parts.read(count) for count in TOKENS])
    gaps_s = spec.layers * step.layer_s + spec.state_layers * step.state_s
    gaps_s += 0.0 if spec.sparse is None else spec.sparse.layers * step.sparse_s
    layer = np.maximum.accumulate(factor * (layers - alone * expert_s * read) + gaps_s)
    launched_s = max(step.launched_s, drafts * (step.draft_layer_s + (step.draft_shard_s if spec.shards > 1 else 0.0)))
    layer = np.maximum(layer, spec.layers * launched_s) + drafts * step.draft_s
    rows, fixed, slopes, past_share, past = parts.decode()
    slope = float(np.interp(TYPICAL_ROWS, rows, slopes))
    wide, narrow = parts.widths()
    more_s = step.uneven_s + (step.latent_s if spec.latent is not None else 0.0)
    narrow += (step.round_s + more_s * spec.layers) * (np.array(WIDTHS) > 1) * (not drafts)
    prompt_s, pair_s, past_prompts = parts.prefill()
    reading, multiplying = parts.head()
    many_kernels = spec.latent is not None or spec.state is not None
    launched_s = step.eager_layer_s * spec.layers if many_kernels else 0.0
    shared, ranks = spec.shards > 1, spec.data_ranks > 1
    state_knots, scan_knots = parts.states(step.kernels, step.prompts)
    row_sizes = rows.astype(int).tolist()
    return ForwardTerms(
        layer_knots=knots_at(TOKENS, layer),
        expert_s=step.kernels * expert_s,
        head_weights_s=step.kernels * reading,
        head_token_s=step.kernels * multiplying,
        pair_s=step.prompts * pair_s,
        kv_knots=knots_at(WIDTHS, step.kernels * slope * wide),
        row_factors=knots_at(row_sizes, slopes / slope),
        rows_knots=knots_at(row_sizes, step.kernels * fixed),
        width_knots=knots_at(WIDTHS, narrow),
        past_share=past_share,
        past_knots=() if past is None else knots_at(row_sizes, step.kernels * past),
        past_prompts=past_prompts,
        mixed_s=step.prompts * prompt_s,
        least_s=launched_s,
        spread_knots=knots_at(TOKENS, np.maximum.accumulate(spread * np.maximum(0.0, experts - expert_s * read)))
        if ranks
        else (),
        exchange_knots=knots_at(TOKENS, parts.exchange(tokens)) if ranks else (),
        fused_knots=knots_at(TOKENS, step.kernels * parts.fused(tokens)) if spec.fused_inputs else (),
        state_knots=state_knots,
        scan_knots=scan_knots,
        reduce_knots=knots_at(TOKENS, step.reduces * parts.reduces(tokens)) if shared else (),
        gather_knots=knots_at(TOKENS, parts.gather(tokens)) if shared else (),
    )
