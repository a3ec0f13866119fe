"""The cells of a map: loads x acceptance rates, model pairs or GPUs, and the contenders in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from pdvsim.decide.fleet import Contender
from pdvsim.decide.goal import Goal
from pdvsim.decide.race import check_seeds
from pdvsim.decide.runs import at_acceptance, at_rate, replications
from pdvsim.decide.space import Space
from pdvsim.sim.config import Acceptance, Arch, Experiment
from pdvsim.sim.limits import (
    NumRuns,
    PartialShare,
    RequestRate,
    Requests,
    Share,
    check_list,
    check_points,
    check_ranges,
)
from pdvsim.sim.models.presets import pair as named_pair
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.relevance import vet

Axis = Literal["acceptance", "size", "card"]
Place = Share | str  # an acceptance rate, a pair, or a card
PLACE_OPTIONS = {"acceptance": "acceptances", "size": "pairs", "card": "try-cards"}


@dataclass(frozen=True)
class Grid:
    """The cells of a map: loads x places, and the contenders in each."""

    base: Experiment
    space: Space
    concurrency: tuple[Requests, ...]
    request_rate: tuple[RequestRate, ...]
    axis: Axis
    places: tuple[Place, ...]
    num_runs: NumRuns
    goal: Goal
    indifference: PartialShare = 0.0
    fleets: tuple[Contender, ...] = ()
    against: str | None = None  # architecture that all are also compared with
    pair_acceptance: Mapping[str, Acceptance] = field(default_factory=dict)  # of pairs with their own acceptance

    def __post_init__(self) -> None:
        check_list("concurrency", self.concurrency, needed=False)
        check_list("request-rate", self.request_rate, needed=False)
        check_list(PLACE_OPTIONS[self.axis], self.places)
        if len(self.archs) < 2 and self.against is None:
            raise ValueError("arch needs at least two values to compare")
        if self.against is not None and self.against not in self.archs:
            raise ValueError(f"--against {self.against} is not one of those compared: {', '.join(self.archs)}")
        if bool(self.concurrency) == bool(self.request_rate):
            raise ValueError("give one of --concurrency and --request-rate")
        check_seeds(self.num_runs)
        check_ranges(self)
        check_points(
            "loads x rows x architectures x runs", len(self.loads), len(self.places), len(self.archs), self.num_runs
        )
        if self.axis == "acceptance" and not self.base.acceptance.by_rate:
            raise ValueError(
                "--y acceptance cannot be combined with --synthetic-acceptance-rates, --acceptance-model, "
                "--acceptance-trace or --acceptance-from"
            )
        vet(self.experiments())  # reports invalid options and unknown pairs before any run

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The contenders: architectures, or fleets by name."""
        return tuple(fleet.name for fleet in self.fleets) or self.space.archs

    def starts(self, here: Experiment) -> list[Experiment]:
        """All contenders in a cell, before tuning."""
        return [fleet.of(here) for fleet in self.fleets] or [replace(here, arch=arch) for arch in self.archs]

    @property
    def loads(self) -> tuple[float, ...]:
        return self.request_rate or tuple(map(float, self.concurrency))

    @property
    def load_kind(self) -> Literal["request_rate", "concurrency"]:
        return "request_rate" if self.request_rate else "concurrency"

    @property
    def comparisons(self) -> int:
        """Number of comparisons that share the 5% chance of error."""
        return len(self.loads) * len(self.places) * (len(self.archs) - 1)

    def cells(self) -> list[tuple[float, Place]]:
        """Every load at every place."""
        return [(load, place) for place in self.places for load in self.loads]

    def experiments(self) -> list[Experiment]:
        """All runs of the map with the given settings, before tuning."""
        heres = (self.placed(load, place) for load, place in self.cells())
        return [run for here in heres for start in self.starts(here) for run in replications(start, self.num_runs)]

    def placed(self, load: float, place: Place) -> Experiment:
        """The experiment of a cell, before tuning."""
        if self.request_rate:
            loaded = at_rate(self.base, load)
        else:
            loaded = replace(self.base, traffic=replace(self.base.traffic, max_concurrency=int(load)))
        if not isinstance(place, str):
            placed = at_acceptance(loaded, place)
        elif self.axis == "card":
            placed = replace(loaded, hardware=replace(loaded.hardware, gpu=place))
        else:
            named_pair(place)
            placed = replace(loaded, server=replace(loaded.server, pair=place))
            if place in self.pair_acceptance:
                placed = replace(placed, acceptance=self.pair_acceptance[place])
        return self.goal.prepared(placed)


def size_ratio(pair: str) -> float:
    """Parameters of the draft model over those of its target."""
    models = named_pair(pair)
    return models.draft.params / models.target.params


def place_text(place: Place) -> str:
    """An acceptance rate, a card, or a pair with the ratio of its sizes."""
    if not isinstance(place, str):
        return f"{place:g}"
    return place if place in GPUS else f"{place} ({size_ratio(place):.2f})"
