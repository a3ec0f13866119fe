"""The cost terms of one model's forward on one GPU, and their figures as a profile's file holds them.

A file has the figures of all terms side by side. Where it has knots, these terms are measured; else at the roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from typing import Any, get_type_hints

from pdvsim.sim.core import GpuSpec, ModelSpec
from pdvsim.sim.hardware.attention import MeasuredAttention, RooflineAttention, WaveAttention
from pdvsim.sim.hardware.cards import flops_of
from pdvsim.sim.hardware.terms import (
    Collectives,
    DraftSteps,
    ExpertReads,
    FusedInputs,
    GraphSizes,
    MeasuredLayers,
    OutputProjection,
    PromptOverhead,
    RooflineLayers,
    SmallKernels,
)

KINDS: dict[str, tuple[type[Any], ...]] = {  # of terms; where there are two, the measured one comes last
    "layers": (RooflineLayers, MeasuredLayers),
    "head": (OutputProjection,),
    "rows": (RooflineAttention, MeasuredAttention),
    "prompts": (RooflineAttention, WaveAttention),
    "overhead": (PromptOverhead,),
    "experts": (ExpertReads,),
    "fused": (FusedInputs,),
    "collectives": (Collectives,),
    "steps": (DraftSteps,),
    "small": (SmallKernels,),
    "graphs": (GraphSizes,),
}
TERMS = dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds)
REQUIRED = ("fixed_s", "weights_s", "token_s", "head_weights_s", "head_token_s", "kv_s", "pair_s")  # of a file
FIGURES: dict[str, Any] = {name: hint for term in TERMS for name, hint in get_type_hints(term).items()}


@dataclass(frozen=True, slots=True)
class ForwardTerms:
    """What a forward of one model costs on one GPU: terms that add up."""

    layers: RooflineLayers | MeasuredLayers
    head: OutputProjection = field(default_factory=OutputProjection)
    rows: RooflineAttention | MeasuredAttention = field(default_factory=RooflineAttention)
    prompts: RooflineAttention | WaveAttention = field(default_factory=RooflineAttention)
    overhead: PromptOverhead = field(default_factory=PromptOverhead)
    experts: ExpertReads = field(default_factory=ExpertReads)
    fused: FusedInputs = field(default_factory=FusedInputs)
    collectives: Collectives = field(default_factory=Collectives)
    steps: DraftSteps = field(default_factory=DraftSteps)
    small: SmallKernels = field(default_factory=SmallKernels)
    graphs: GraphSizes = field(default_factory=GraphSizes)

    @classmethod
    def roofline(cls, spec: ModelSpec, gpu: GpuSpec) -> ForwardTerms:
        """The lower bound from peak bandwidth and arithmetic."""
        bandwidth, flops = gpu.bandwidth_bytes_per_s, gpu.flops_per_s
        fused_s = spec.fused_params * spec.dtype_bytes / bandwidth
        ridge = int(spec.dtype_bytes * flops / (2 * bandwidth))  # tokens from which on arithmetic takes longer
        attention = RooflineAttention(spec.kv_bytes_per_token / bandwidth, spec.attention_flops_per_pair / flops)
        return cls(
            layers=RooflineLayers(0.0, spec.common_bytes / bandwidth, 2 * spec.active_params / flops_of(spec, gpu)),
            head=OutputProjection(spec.head_params * spec.dtype_bytes / bandwidth, 2 * spec.head_params / flops),
            rows=attention,
            prompts=attention,
            experts=ExpertReads(spec.expert_bytes / bandwidth),
            fused=FusedInputs(((ridge, fused_s), (2 * ridge, 2 * fused_s)) if fused_s else ()),
        )

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> ForwardTerms:
        """The terms that the figures of a file stand for: measured where it has the first figure of such a term."""
        terms = {}
        for name, kinds in KINDS.items():
            kind = kinds[-1] if figures.get(fields(kinds[-1])[0].name) else kinds[0]
            given = [part.name for part in fields(kind) if part.name in figures]
            terms[name] = kind(**{figure: _tuples(figures[figure]) for figure in given})
        return cls(**terms)

    def terms(self) -> dict[str, Any]:
        """Its terms by name."""
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def figures(self) -> dict[str, Any]:
        """The figures as a file holds them; those that are nothing are left out where they need not be there."""
        merged: dict[str, Any] = dict.fromkeys(REQUIRED, 0.0)
        for term in self.terms().values():
            merged |= {name: value for name, value in term.figures().items() if value or name in REQUIRED}
        return merged

    def scaled(self, factor: float, sent: float | None = None) -> ForwardTerms:
        """Multiply every time by `factor`, and the communication of shards by `sent`, if given."""
        if factor == 1 and sent in (None, 1):
            return self
        factors = {"collectives": factor if sent is None else sent}
        return replace(self, **{name: term.scaled(factors.get(name, factor)) for name, term in self.terms().items()})

    def with_cache(self, share: float) -> ForwardTerms:
        """The same with that share of the KV cache's bytes."""
        return replace(self, rows=self.rows.with_cache(share), prompts=self.prompts.with_cache(share))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A file is checked by its figures, so that an error names one of them."""
        from pydantic_core.core_schema import no_info_after_validator_function

        parts: list[Any] = [(name, FIGURES[name]) for name in REQUIRED]
        for part in (part for term in TERMS for part in fields(term) if part.name not in REQUIRED):
            hint = FIGURES[part.name]
            parts.append((part.name, hint, field(default=hint() if part.default is MISSING else part.default)))
        figures = make_dataclass("Figures", {part[0]: part for part in parts}.values())
        return no_info_after_validator_function(lambda read: cls.read(vars(read)), handler(figures))


def _tuples(value: Any) -> Any:
    """A figure of a file with tuples for lists."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
