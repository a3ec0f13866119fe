"""One comparison of architectures, over model pairs and cards: a sweep for each pair and card, one row a point.

Every pair meets the same requests and coins and, unless told otherwise, the same acceptance rate, so that what differs
is the models' sizes and shapes. How often a family's small model is right about its large one is not modelled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from pdvsim.sim.assembly import covering_profile, kv_capacity
from pdvsim.sim.config import Arch, Experiment, Server
from pdvsim.sim.hardware.models import GPUS, pair_name
from pdvsim.sim.hardware.models import gpu as named_gpu
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.hardware.names import card_name
from pdvsim.sim.limits import check_list, check_points, check_ranges
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.sim.relevance import suited
from pdvsim.study.stats import CONFIDENCE, over_replications, paired_differences
from pdvsim.study.sweep import Point, Sweep

if TYPE_CHECKING:
    import pandas as pd

Spot = tuple[str, str, float]  # pair, card, load
Seat = tuple[str, str, float, Arch]  # and architecture

CHOSEN = ("controller", "num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens")  # columns
COST = "usd_per_million_output_tokens"


@dataclass(frozen=True)
class Comparison:
    """Pairs x cards x loads x architectures x replications around one experiment."""

    pairs: tuple[str, ...]
    gpus: tuple[str, ...] = ("h200",)
    archs: tuple[Arch, ...] = USUAL_ARCHS
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    num_runs: int = 1
    base: Experiment = field(default_factory=Experiment)
    pair_acceptance: tuple[float, ...] = ()  # of each pair, in their order; empty: the base's for all
    gpu_hour_usd: Mapping[str, float] = field(default_factory=dict)  # price of a card for an hour
    servers: Mapping[Seat, Server] = field(default_factory=dict)  # settings of their own; the base's for all others
    seeds: Mapping[Spot, int] = field(default_factory=dict)  # replications where they are more than `num_runs`

    def __post_init__(self) -> None:
        object.__setattr__(self, "pairs", tuple(map(pair_name, self.pairs)))
        object.__setattr__(self, "gpus", tuple(card_name(card, GPUS) for card in self.gpus))
        if self.pair_acceptance and not self.base.acceptance.by_rate:
            raise ValueError(
                "--pair-acceptance goes without --synthetic-acceptance-rates, --acceptance-model and --acceptance-trace"
            )
        check_list("pairs", self.pairs)
        check_list("gpus", self.gpus)
        if self.pair_acceptance and len(self.pair_acceptance) != len(self.pairs):
            raise ValueError(f"pair-acceptance needs one rate for each of the {len(self.pairs)} pairs")
        if len(self.gpus) > 1 and self.base.hardware.profile not in (None, "roofline"):
            raise ValueError(f"--profile {self.base.hardware.profile} is of one card: give one card with --gpus")
        check_ranges(self)
        check_points("pairs x cards", len(self.pairs), len(self.gpus))
        for place in self.places():
            self._check_room(*place)

    def places(self) -> list[tuple[str, str]]:
        """Every pair on every card."""
        return [(pair, gpu) for pair in self.pairs for gpu in self.gpus]

    def points(self, pair: str, gpu: str) -> list[Point]:
        """The runs of one pair on one card."""
        most = max([self.num_runs, *self.seeds.values()])
        points = Sweep(self.archs, self.concurrency, self.request_rate, most, self._base(pair, gpu)).points()
        return [
            replace(point, experiment=suited(replace(point.experiment, server=server)))
            if (server := self.servers.get((pair, gpu, point.load, point.experiment.arch)))
            else point
            for point in points
            if point.run < self.seeds.get((pair, gpu, point.load), self.num_runs)
        ]

    def _base(self, pair: str, gpu: str) -> Experiment:
        named_pair(pair), named_gpu(gpu)  # refused here, with the names that are known
        base = self.base
        acceptance = base.acceptance
        if self.pair_acceptance:
            acceptance = replace(acceptance, acceptance_rate=self.pair_acceptance[self.pairs.index(pair)])
        return replace(
            base,
            acceptance=acceptance,
            server=replace(base.server, pair=pair),
            hardware=replace(base.hardware, gpu=gpu),
        )

    def _check_room(self, pair: str, gpu: str) -> None:
        """Refuse a pair that leaves a card no room for a KV cache, before anything runs."""
        profile = covering_profile(self._base(pair, gpu))
        for experiment in {point.experiment.arch: point.experiment for point in self.points(pair, gpu)}.values():
            if not kv_capacity(experiment, profile):
                raise ValueError(f"{pair} does not fit on {gpu}: its weights leave no room for a KV cache")


def run_comparison(
    comparison: Comparison,
    run: Callable[[Sequence[Point]], pd.DataFrame],
    settings: Mapping[Seat, str] | None = None,
) -> pd.DataFrame:
    """One row for each point that `run` has a row of, with its pair, card and cost.

    `settings` are what each architecture runs with, in words: a column of the frame. The main ones have their own.
    """
    import pandas as pd

    done: list[pd.DataFrame] = []
    for pair, gpu in comparison.places():
        points = comparison.points(pair, gpu)
        servers = {(point.load, point.experiment.arch): _chosen(point.experiment) for point in points}
        done.append(_placed(run(points), pair, gpu, comparison.gpu_hour_usd, settings or {}, servers))
    return pd.concat(done, ignore_index=True)


def _chosen(experiment: Experiment) -> dict[str, Any]:
    """The settings that an architecture may choose, as keywords of a run; no draft length where none is drafted."""
    chosen = {name: getattr(experiment.server, name) for name in CHOSEN}
    return chosen if experiment.speculates else chosen | {"controller": "fixed", "num_speculative_tokens": 0}


def _placed(
    frame: pd.DataFrame,
    pair: str,
    gpu: str,
    prices: Mapping[str, float],
    settings: Mapping[Seat, str],
    servers: Mapping[tuple[float, Arch], Mapping[str, Any]],
) -> pd.DataFrame:
    if len(frame):
        frame["pair"], frame["gpu"] = pair, gpu
        seats = list(zip(frame["load"], frame["arch"], strict=True))
        frame["settings"] = [settings.get((pair, gpu, load, arch), "") for load, arch in seats]
        for name in CHOSEN:
            frame[name] = [servers[seat][name] for seat in seats]
        if prices:
            hour = prices[gpu] * frame["gpus"] / 3600 * 1e6
            frame[COST] = hour / frame["output_throughput"]
            if "output_throughput_low" in frame:  # the slower, the dearer
                frame[f"{COST}_low"] = hour / frame["output_throughput_high"]
                frame[f"{COST}_high"] = hour / frame["output_throughput_low"]
    return frame


def summary(points: pd.DataFrame) -> list[dict[str, Any]]:
    """One entry per pair, card, load and architecture; numbers are Intervals over the replications."""
    return [
        {"pair": pair, "gpu": gpu, **{key: value for key, value in entry.items() if key not in ("pair", "gpu")}}
        for (pair, gpu), group in points.groupby(["pair", "gpu"], sort=False)
        for entry in over_replications(group)
    ]


def differences(
    points: pd.DataFrame, metrics: Sequence[str], against: str, confidence: float = CONFIDENCE
) -> list[dict[str, Any]]:
    """Paired differences between the architectures, for each pair on each card."""
    return [
        {"pair": pair, "gpu": gpu, **entry}
        for (pair, gpu), group in points.groupby(["pair", "gpu"], sort=False)
        for metric in metrics
        for entry in paired_differences(group, metric, against, confidence)
    ]
