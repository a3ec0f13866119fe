"""Terms of a forward's time: each a small class with its own figures, which a profile holds, and its own law.

`forward` puts the terms of one model together, `attention` has those of attention, `costs` adds them up.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from pdvsim.sim.specs import ModelSpec

Knots = tuple[tuple[int, float], ...]  # (size, value) as measured, read between by straight lines


def interpolate(knots: Sequence[tuple[int, float]], at: int) -> float:
    """Linear interpolation, extrapolated after the last knot; before the first, its value."""
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


@dataclass(frozen=True, slots=True)
class Term:
    """A part of a forward's cost. Figures whose names end in `_s` or `_knots` are seconds."""

    def figures(self) -> dict[str, Any]:
        return {part.name: getattr(self, part.name) for part in fields(self)}

    def scaled(self, factor: float) -> Self:
        """Return the same term with every time multiplied by `factor`."""
        times: dict[str, Any] = {}
        for name, value in self.figures().items():
            if name.endswith("_knots"):
                times[name] = tuple((at, seconds * factor) for at, seconds in value)
            elif name.endswith("_s"):
                times[name] = value * factor
        return replace(self, **times)


@dataclass(frozen=True, slots=True)
class RooflineLayers(Term):
    """The layers' products: a fixed time, and the larger of reading weights and experts, and multiplying."""

    fixed_s: float = 0.0
    weights_s: float = 0.0
    token_s: float = 0.0  # arithmetic per token
    sharpness: float | None = None  # p-norm that joins the two; None: the larger

    def seconds(self, tokens: int, experts_s: float) -> float:
        return self.fixed_s + larger(self.weights_s + experts_s, self.token_s * tokens, self.sharpness)


@dataclass(frozen=True, slots=True)
class MeasuredLayers(Term):
    """The layers' products, and all that does not depend on the context, as measured by tokens."""

    layer_knots: Knots

    def seconds(self, tokens: int, experts_s: float) -> float:
        return interpolate(self.layer_knots, tokens) + experts_s


@dataclass(frozen=True, slots=True)
class ExpertReads(Term):
    """The distinct experts that a forward reads."""

    expert_s: float = 0.0  # per expert, in all layers that have experts

    def seconds(self, experts: float) -> float:
        """Seconds to read `experts` distinct experts in each layer."""
        return self.expert_s * experts


@dataclass(frozen=True, slots=True)
class SpreadExperts(Term):
    """Experts that take the tokens of several data-parallel ranks, and the exchange of these before and after."""

    spread_knots: Knots = ()  # by tokens of all ranks: the experts' kernels, but for reading distinct experts
    exchange_knots: Knots = ()  # by tokens of the rank with the most: sending them to experts, and results back

    def seconds(self, tokens: int, most: int) -> float:
        """Seconds for the tokens of all ranks, of which one rank has `most`."""
        return interpolate(self.spread_knots, tokens) + interpolate(self.exchange_knots, most)


@dataclass(frozen=True, slots=True)
class FusedInputs(Term):
    """The product that fuses a head's inputs, once per draft and in the prefill of prompts."""

    fused_knots: Knots = ()  # by tokens; none: not a head

    def seconds(self, tokens: int) -> float:
        return interpolate(self.fused_knots, tokens) if self.fused_knots else 0.0


@dataclass(frozen=True, slots=True)
class OutputProjection(Term):
    """The product that gives the logits."""

    head_weights_s: float = 0.0
    head_token_s: float = 0.0
    sharpness: float | None = None

    def seconds(self, logits: int) -> float:
        return larger(self.head_weights_s, self.head_token_s * logits, self.sharpness)


@dataclass(frozen=True, slots=True)
class Collectives(Term):
    """What a shard exchanges with the others of its group; without knots nothing."""

    reduce_knots: Knots = ()  # by tokens: the all-reduces of all layers
    gather_knots: Knots = ()  # by logits: gathering them

    def reduce_s(self, tokens: int) -> float:
        return interpolate(self.reduce_knots, tokens) if self.reduce_knots else 0.0

    def gather_s(self, logits: int) -> float:
        return interpolate(self.gather_knots, logits) if self.gather_knots else 0.0


@dataclass(frozen=True, slots=True)
class PromptOverhead(Term):
    """What prompts cost besides their layers and attention."""

    mixed_s: float = 0.0  # per forward that has both rows and a prompt
    prompt_token_s: float = 0.0  # per prompt token: an engine that prefills slower
    least_s: float = 0.0  # of a forward with prompts, whose kernels the host launches one by one

    def seconds(self, tokens: int, mixed: bool) -> float:
        """Seconds for `tokens` of prompts, in a forward that also has rows (`mixed`) or not."""
        return self.prompt_token_s * tokens + (self.mixed_s if mixed else 0.0)


@dataclass(frozen=True, slots=True)
class StateUpdates(Term):
    """Layers that keep a state per request; without knots there are none."""

    state_knots: Knots = ()  # by states that rows read or write
    scan_knots: Knots = ()  # by tokens of prompts

    def rows_s(self, copies: int) -> float:
        return interpolate(self.state_knots, copies) if self.state_knots else 0.0

    def prompts_s(self, tokens: int) -> float:
        return interpolate(self.scan_knots, tokens) if self.scan_knots else 0.0


@dataclass(frozen=True, slots=True)
class DraftSteps(Term):
    """Several forwards in one launch."""

    draft_ratio: float = 1.0  # time of a draft of several steps over that of its forwards one by one


@dataclass(frozen=True, slots=True)
class SmallKernels(Term):
    """Which forwards have kernels small enough to run concurrently with another's."""

    small_kernel_tokens: int = 0  # most tokens of such a forward
    large_s: float = 0.0  # its time in large products, whose kernels are not
    # By prompt tokens: how long its kernels keep others waiting and how much of the GPU they occupy, over what its time
    # per layer predicts. The library has other kernels for other sizes, and their last blocks leave parts of it free.
    wait_ratios: Knots = ()
    room_ratios: Knots = ()

    @classmethod
    def of(cls, spec: ModelSpec, tokens: int, small_bytes: float, bytes_per_s: float) -> SmallKernels:
        """Return the small kernels of a model: its products of up to `tokens` and `small_bytes`."""
        item = spec.layer_bytes or spec.dtype_bytes
        kinds = [(count, [inputs * outputs * item for inputs, outputs in layer]) for count, layer in spec.layer_kinds]
        large = sum(count * sum(size for size in sizes if size > small_bytes) for count, sizes in kinds)
        return cls(tokens, large / bytes_per_s)

    def share(self, tokens: int, forward_s: float) -> float:
        """Share of the time of a forward over `tokens` in small kernels."""
        return 0.0 if tokens > self.small_kernel_tokens or forward_s <= self.large_s else 1.0 - self.large_s / forward_s


@dataclass(frozen=True, slots=True)
class GraphSizes(Term):
    """Sizes that an engine pads a forward to: those of its CUDA graphs; none: no padding. Returns what is computed."""

    row_buckets: tuple[int, ...] = ()
    chunk_buckets: tuple[int, ...] = ()  # of prompt tokens
    token_buckets: tuple[int, ...] = ()  # of all tokens of a forward, in place of both

    def rows(self, rows: int) -> int:
        return _up_to(self.row_buckets, rows) if rows else 0

    def packed(self, rows: int, tokens: int) -> int:
        """Tokens of rows of unequal length: padded like rows, and beyond the largest to multiples of theirs."""
        if not self.row_buckets or tokens <= self.row_buckets[-1]:
            return self.rows(tokens)
        padded = self.rows(rows)
        return -(-tokens // padded) * padded

    def prompt(self, tokens: int) -> int:
        return _up_to(self.chunk_buckets, tokens) if tokens else 0

    def tokens(self, tokens: int) -> int:
        return _up_to(self.token_buckets, tokens) if self.token_buckets else tokens


def _up_to(buckets: Sequence[int], size: int) -> int:
    """The first bucket that holds `size`; `size` itself where there is none."""
    at = bisect_left(buckets, size)
    return buckets[at] if at < len(buckets) else size
