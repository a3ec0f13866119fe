"""The cost terms of one model's forward on one GPU, and their figures as a profile's file holds them.

A file has the figures of all terms next to each other. Where it has knots, a term is measured; else at the roofline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, make_dataclass, replace
from typing import Annotated, Any, get_args, get_type_hints

from pdvsim.sim.hardware import attention, terms
from pdvsim.sim.hardware.cards import flops_of
from pdvsim.sim.specs import GpuSpec, ModelSpec

REQUIRED = ("fixed_s", "weights_s", "token_s", "head_weights_s", "head_token_s", "kv_s", "pair_s")  # of a file


@dataclass(frozen=True, slots=True)
class ForwardTerms:
    """What a forward of one model costs on one GPU: terms that add up. Of two kinds, the measured one comes last."""

    layers: terms.RooflineLayers | terms.MeasuredLayers
    head: terms.OutputProjection = field(default_factory=terms.OutputProjection)
    rows: attention.RooflineAttention | attention.MeasuredAttention = field(default_factory=attention.RooflineAttention)
    prompts: attention.RooflineAttention | attention.WaveAttention = field(default_factory=attention.RooflineAttention)
    overhead: terms.PromptOverhead = field(default_factory=terms.PromptOverhead)
    experts: terms.ExpertReads = field(default_factory=terms.ExpertReads)
    spread: terms.SpreadExperts = field(default_factory=terms.SpreadExperts)
    fused: terms.FusedInputs = field(default_factory=terms.FusedInputs)
    collectives: terms.Collectives = field(default_factory=terms.Collectives)
    states: terms.StateUpdates = field(default_factory=terms.StateUpdates)
    steps: terms.DraftSteps = field(default_factory=terms.DraftSteps)
    small: terms.SmallKernels = field(default_factory=terms.SmallKernels)
    graphs: terms.GraphSizes = field(default_factory=terms.GraphSizes)

    @classmethod
    def roofline(cls, spec: ModelSpec, gpu: GpuSpec) -> ForwardTerms:
        """The lower bound from peak bandwidth and arithmetic."""
        bandwidth, flops, item = gpu.bandwidth_bytes_per_s, gpu.flops_per_s, spec.dtype_bytes
        attended = attention.RooflineAttention(
            spec.kv_bytes_per_token / bandwidth, spec.attention_flops_per_pair / flops
        )
        fused_s, ridge = (
            spec.fused_params * item / bandwidth,
            int(item * flops / (2 * bandwidth)),
        )  # where both are equal
        layer_flops = flops_of(spec, gpu)
        nothing, ranks = ((1, 0.0), (2, 0.0)), spec.data_ranks > 1
        own_params = spec.common_params if ranks else spec.active_params  # of experts on ranks the reading is counted
        state_s = spec.row_bytes / bandwidth
        states = terms.StateUpdates(((0, 0.0), (1, state_s)), ((0, 0.0), (1, spec.row_flops / flops)))
        return cls(
            layers=terms.RooflineLayers(0.0, spec.common_bytes / bandwidth, 2 * own_params / layer_flops),
            head=terms.OutputProjection(spec.head_params * item / bandwidth, 2 * spec.head_params / flops),
            rows=attended,
            prompts=attended,
            experts=terms.ExpertReads(spec.expert_bytes / bandwidth),
            spread=terms.SpreadExperts(nothing, nothing) if ranks else terms.SpreadExperts(),
            states=states if state_s else terms.StateUpdates(),
            fused=terms.FusedInputs(((ridge, fused_s), (2 * ridge, 2 * fused_s)) if fused_s else ()),
        )

    @classmethod
    def read(cls, figures: Mapping[str, Any]) -> ForwardTerms:
        """The terms that the figures of a file stand for: measured where it has the first figure of such a term."""
        terms_of = {}
        for name, kinds in KINDS.items():
            kind = kinds[-1] if figures.get(fields(kinds[-1])[0].name) else kinds[0]
            given = [part.name for part in fields(kind) if part.name in figures]
            terms_of[name] = kind(**{figure: _tuples(figures[figure]) for figure in given})
        return cls(**terms_of)

    def figures(self) -> dict[str, Any]:
        """The figures as a file holds them; zeros are left out where they are optional."""
        figures: dict[str, Any] = dict.fromkeys(REQUIRED, 0.0)
        for name in KINDS:
            figures |= {part: value for part, value in getattr(self, name).figures().items() if value}
        return figures

    def scaled(self, factor: float, sent: float | None = None) -> ForwardTerms:
        """Multiply every time by `factor`, and the communication of shards by `sent`, if given."""
        if factor == 1 and sent in (None, 1):
            return self
        scaled = {name: getattr(self, name).scaled(factor) for name in KINDS}
        return replace(self, **scaled | {"collectives": self.collectives.scaled(factor if sent is None else sent)})

    def with_cache(self, share: float) -> ForwardTerms:
        """Return the same with that share of the KV cache's bytes."""
        return replace(self, rows=self.rows.with_cache(share), prompts=self.prompts.with_cache(share))

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """A file is checked by its figures, so that an error names one of them."""
        from pydantic import AfterValidator

        parts: dict[str, Any] = {name: (name, FIGURES[name]) for name in REQUIRED}
        for part in (part for term in TERMS for part in fields(term) if part.name not in REQUIRED):
            hint = FIGURES[part.name]
            parts[part.name] = part.name, hint, field(default=hint() if part.default is MISSING else part.default)
        figures = make_dataclass("Figures", parts.values())
        return handler.generate_schema(Annotated[figures, AfterValidator(lambda read: cls.read(vars(read)))])


KINDS: dict[str, Any] = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(ForwardTerms).items()}
TERMS: list[Any] = list(dict.fromkeys(kind for kinds in KINDS.values() for kind in kinds))
FIGURES: dict[str, Any] = {name: hint for term in TERMS for name, hint in get_type_hints(term).items()}


def _tuples(value: Any) -> Any:
    """A figure of a file with tuples for lists."""
    return tuple(map(_tuples, value)) if isinstance(value, (list, tuple)) else value
