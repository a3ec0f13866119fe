"""Measured groups of launches, and the sharing model over those of two, in arrays for all of them.

`Pairs` computes what `Sharing` does for one pair: a fit evaluates it thousands of times. A test compares the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pdvsim.calibration.fit.points import Floats
from pdvsim.sim.prices.costs import Load
from pdvsim.sim.prices.power import Draw
from pdvsim.sim.prices.profile import ContentionFit

LEAST_RATE = 1e-3
FIGURES = (
    "compute", "bandwidth", "layer_s", "empty", "small_kernel_share", "priority", "experts_read", "eight_bits",
    "measured",
)  # fmt: skip
Prompt = tuple[str, int]  # a model and a number of tokens, 0 for forwards of rows
Side = dict[str, Floats]  # one launch of every pair, by figure


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
        self._sides = first, second = [_side([pair[side] for pair in pairs]) for side in (0, 1)]
        self._measured = [np.maximum(side["measured"], LEAST_RATE) for side in self._sides]
        self._ordered = np.flatnonzero(first["priority"] > second["priority"])
        self._small = [np.flatnonzero(side["small_kernel_share"]) for side in self._sides]
        self._first = np.intersect1d(self._ordered, self._small[0])
        self._experts = np.intersect1d(self._ordered, np.flatnonzero(second["experts_read"]))
        self._kept: dict[str, tuple[ContentionFit, Mapping[Prompt, float], Any]] = {}

    def log_errors(self, fit: ContentionFit, ratios: Ratios) -> Floats:
        """Logarithms of predicted over measured slowdown, of both launches of all pairs."""
        swapped, weight = self._known(self._weights, fit, ratios.wait)
        first, second = self._known(self._demands, fit, ratios.room)
        ours, theirs = np.where(swapped, second, first), np.where(swapped, first, second)
        full = 1 / np.max(weight * ours + theirs, axis=0)
        left = np.min((1 - ours) / theirs, axis=0)
        shared = weight * full < 1  # something is used up before the heavier one has its full speed
        heavy, light = np.where(shared, weight * full, 1.0), np.where(shared, full, np.clip(left, 0.0, 1.0))
        rates = np.where(swapped, light, heavy), np.where(swapped, heavy, light)
        return each_of(
            math.log,
            np.concatenate([of / np.maximum(rate, LEAST_RATE) for of, rate in zip(self._measured, rates, strict=True)]),
        )

    def _known(
        self, compute: Callable[[ContentionFit, list[Floats]], Any], fit: ContentionFit, known: Mapping[Prompt, float]
    ) -> Any:
        """What follows from a fit and ratios by side; kept, since a search for one ratio changes one of two results."""
        kept = self._kept.get(compute.__name__)
        if kept is None or kept[0] is not fit or kept[1] is not known:
            ratios = np.array([known.get(prompt, 1.0) for prompt in self._prompts])
            kept = self._kept[compute.__name__] = fit, known, compute(fit, [ratios[at] for at in self._at])
        return kept[2]

    def _weights(self, fit: ContentionFit, wait: Sequence[Floats]) -> tuple[NDArray[np.bool_], Floats]:
        """Whether the second is the heavier, and the weight of the heavier over the other's; see `Sharing`."""
        first, second = self._sides
        layers_s = [side["layer_s"] * ratio for side, ratio in zip(self._sides, wait, strict=True)]
        one, other = (each_of(math.pow, layer_s, fit.turn_exponent) for layer_s in layers_s)
        one, other = one * (1 - first["empty"]), other * (1 - second["empty"])
        for weights, side, at in ((one, first, self._small[0]), (other, second, self._small[1])):
            weights[at] *= each_of(math.pow, fit.small_kernel_weight, side["small_kernel_share"][at] ** 2)
            weights[at] *= each_of(math.pow, fit.small_expert_weight, side["experts_read"][at])
        small = first["small_kernel_share"]
        preferred = np.where(second["eight_bits"] > 0, fit.stream_weight * fit.weight_8bit, fit.stream_weight)
        at = self._experts
        experts = each_of(math.pow, fit.expert_weight, (1 - small[at] ** 2) * second["experts_read"][at])
        preferred[at] = fit.stream_weight * experts
        at = self._first
        share = each_of(math.pow, layers_s[1][at] / first["layer_s"][at], fit.yielding) / fit.stream_weight
        preferred[at] *= each_of(math.pow, np.maximum(share, 1.0), small[at])
        one[self._ordered] *= preferred[self._ordered]
        swapped = one < other
        return swapped, np.where(swapped, other, one) / np.where(swapped, one, other)

    def _demands(self, fit: ContentionFit, room: Sequence[Floats]) -> list[Floats]:
        """The parts of arithmetic, bandwidth and room that each side uses alone."""
        return [
            np.array([side["compute"], side["bandwidth"], _hold(side, small, fit, ratio)])
            for side, small, ratio in zip(self._sides, self._small, room, strict=True)
        ]


def _side(members: Sequence[Member]) -> Side:
    return {name: np.array([float(getattr(member, name)) for member in members]) for name in FIGURES}


def _hold(side: Side, small: NDArray[np.intp], fit: ContentionFit, room: Floats) -> Floats:
    length = 1 + side["layer_s"] / fit.hold_layer_s if fit.hold_layer_s else 1.0
    held = np.minimum(1 - (1 - fit.hold) / length + fit.hold_compute * side["compute"], 1.0)
    held = held * np.where(side["eight_bits"] > 0, fit.hold_8bit, 1.0) * room
    held[small] *= each_of(math.pow, fit.small_expert_hold, side["experts_read"][small])
    return np.asarray(np.minimum(held, 1.0) * (1 - side["empty"]))


def each_of(function: Callable[..., float], *columns: Floats | float) -> Floats:
    """A function of the C library of each element: numpy's own round differently on other processors.

    A search follows the last digit to another end.
    """
    values = (column.tolist() if isinstance(column, np.ndarray) else repeat(column) for column in columns)
    return np.fromiter(map(function, *values), np.float64)
