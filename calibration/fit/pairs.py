"""Measured groups of launches, and the sharing model over those of two, in arrays for all of them.

`Pairs` computes what `Sharing` does for one pair: a fit evaluates it thousands of times. A test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from pdvsim.calibration.fit.points import Floats
from pdvsim.sim.hardware.costs import Load
from pdvsim.sim.hardware.power import Draw
from pdvsim.sim.hardware.profile import ContentionFit

LEAST_RATE = 1e-3
FIGURES = (
    "compute", "bandwidth", "layer_s", "empty", "small_kernel_share", "priority", "experts_read", "eight_bits",
    "measured",
)  # fmt: skip
Prompt = tuple[str, int]  # a model and a number of tokens, 0 for forwards of rows
Side = Any  # one launch of every pair: a structured array with a field per figure


@dataclass(eq=False, kw_only=True)
class Member(Load):
    """One launch of a group as the sharing model sees it, and its measured rate."""

    kind: str
    model: str
    prompt: int = 0  # tokens, padded, of one that only prefills
    measured: float  # the work it did while all were busy, over what it would have done alone on a card as throttled
    draw: Draw | None = None  # where the card's power is known

    @property
    def sized(self) -> Prompt:
        return self.model, self.prompt


@dataclass(frozen=True)
class Group:
    """Launches measured while co-running."""

    models: str  # draft:target
    shapes: str  # what ran, whatever the models and priorities
    members: list[Member]

    @cached_property
    def mixture(self) -> bool:
        return any(member.experts_read for member in self.members)

    @cached_property
    def eight_bits(self) -> bool:
        return any(member.eight_bits for member in self.members)

    @cached_property
    def sort(self) -> str:
        """The kind of group that its errors are counted under."""
        return "mixtures" if self.mixture else "8-bit" if self.eight_bits else "dense"

    @cached_property
    def ordered(self) -> bool:
        return len({member.priority for member in self.members}) > 1

    @cached_property
    def measured(self) -> list[float]:
        """Measured slowdown of every member."""
        return [1 / max(member.measured, LEAST_RATE) for member in self.members]


@dataclass(frozen=True)
class Ratios:
    """How long prompts keep others waiting and how much of the GPU they occupy, over what their time predicts."""

    wait: dict[Prompt, float] = field(default_factory=dict)
    room: dict[Prompt, float] = field(default_factory=dict)


class Pairs:
    """Groups of two launches, that of higher priority first."""

    def __init__(self, groups: Sequence[Group]) -> None:
        pairs = [sorted(group.members, key=lambda member: -member.priority) for group in groups]
        prompts = [[pair[side].sized for pair in pairs] for side in (0, 1)]
        self._prompts = sorted({*prompts[0], *prompts[1]})
        at = {prompt: number for number, prompt in enumerate(self._prompts)}
        self._at = [np.array([at[prompt] for prompt in side], np.intp) for side in prompts]
        self._sides = [_side([pair[side] for pair in pairs]) for side in (0, 1)]

    def log_errors(self, fit: ContentionFit, ratios: Ratios) -> Floats:
        """Logarithms of predicted over measured slowdown, of both launches of all pairs."""
        wait, room = (
            [values[at] for at in self._at]
            for values in (
                np.array([known.get(prompt, 1.0) for prompt in self._prompts]) for known in (ratios.wait, ratios.room)
            )
        )
        rates = _rates(self._sides[0], self._sides[1], fit, wait, room)
        return np.concatenate([
            each_of(math.log, np.maximum(side["measured"], LEAST_RATE) / np.maximum(rate, LEAST_RATE))
            for side, rate in zip(self._sides, rates, strict=True)
        ])  # fmt: skip


def _side(members: Sequence[Member]) -> Side:
    rows = [tuple(float(getattr(member, name)) for name in FIGURES) for member in members]
    return np.array(rows, dtype=[(name, np.float64) for name in FIGURES])


def _rates(
    first: Side, second: Side, fit: ContentionFit, wait: Sequence[Floats], room: Sequence[Floats]
) -> tuple[Floats, Floats]:
    """The progress rates of both; see `Sharing`."""
    layers_s = [side["layer_s"] * ratio for side, ratio in zip((first, second), wait, strict=True)]
    one, other = (
        _power(layer_s, fit.turn_exponent)
        * (1 - side["empty"])
        * _power(fit.small_kernel_weight, side["small_kernel_share"] * side["small_kernel_share"])
        * _power(fit.small_expert_weight, _small_experts(side))
        for side, layer_s in zip((first, second), layers_s, strict=True)
    )
    preferred = fit.stream_weight * _preference(first, second, fit) * _first(first, layers_s[1], fit)
    one = np.where(first["priority"] > second["priority"], one * preferred, one)
    swapped = one < other

    def by_share(ours: Floats, theirs: Floats) -> tuple[Floats, Floats]:
        return np.where(swapped, theirs, ours), np.where(swapped, ours, theirs)

    heavy, light = by_share(one, other)
    weight = heavy / light
    demands = [
        by_share(first["compute"], second["compute"]),
        by_share(first["bandwidth"], second["bandwidth"]),
        by_share(_hold(first, fit, room[0]), _hold(second, fit, room[1])),
    ]
    full = 1 / np.max([weight * ours + theirs for ours, theirs in demands], axis=0)
    left = np.min([(1 - ours) / theirs for ours, theirs in demands], axis=0)
    shared = weight * full < 1  # something is used up before the heavier one has its full speed
    return by_share(np.where(shared, weight * full, 1.0), np.where(shared, full, np.clip(left, 0.0, 1.0)))


def _preference(side: Side, below: Side, fit: ContentionFit) -> Floats:
    large = 1 - side["small_kernel_share"] * side["small_kernel_share"]
    next_to_8_bits = np.where(below["eight_bits"] > 0, fit.weight_8bit, 1.0)
    experts = below["experts_read"]
    return np.asarray(np.where(experts > 0, _power(fit.expert_weight, large * experts), next_to_8_bits))


def _first(side: Side, other_s: Floats, fit: ContentionFit) -> Floats:
    share = _power(other_s / side["layer_s"], fit.yielding) / fit.stream_weight
    return _power(np.maximum(share, 1.0), side["small_kernel_share"])


def _hold(side: Side, fit: ContentionFit, room: Floats) -> Floats:
    free = 1 - fit.hold
    if fit.hold_layer_s:
        free = free / (1 + side["layer_s"] / fit.hold_layer_s)
    held = np.minimum(1 - free + fit.hold_compute * side["compute"], 1.0)
    held = held * np.where(side["eight_bits"] > 0, fit.hold_8bit, 1.0) * room
    held = held * _power(fit.small_expert_hold, _small_experts(side))
    return np.asarray(np.minimum(held, 1.0) * (1 - side["empty"]))


def _small_experts(side: Side) -> Floats:
    """Share of all experts, read by launches whose other kernels are small."""
    return np.asarray(np.where(side["small_kernel_share"] > 0, side["experts_read"], 0.0))


def _power(base: Floats | float, exponent: Floats | float) -> Floats:
    return each_of(math.pow, *np.broadcast_arrays(base, exponent))


def each_of(function: Callable[..., float], *columns: Floats) -> Floats:
    """A function of the C library of each element: numpy's own round differently on other processors.

    A search follows the last digit to another end.
    """
    return np.array(list(map(function, *(column.tolist() for column in columns))))
