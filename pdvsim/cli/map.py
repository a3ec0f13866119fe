"""`pdvsim map`: the best architecture over load and acceptance, model size or GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pdvsim.bench.inputs import forewarn
from pdvsim.cli.page import AnswerCommand
from pdvsim.decide.figures import map_pictures
from pdvsim.decide.fleet import fleets
from pdvsim.decide.grid import Axis, Grid, Place, size_ratio
from pdvsim.decide.options import DecisionOptions, forewarn_few, own_rate
from pdvsim.decide.runs import Bench, without_band
from pdvsim.decide.tune import most_runs
from pdvsim.decide.winners import WinnerMap, draw_map
from pdvsim.sim.config import Acceptance, Arch, Experiment
from pdvsim.sim.limits import Gpus, RequestRate, Requests, Share, of
from pdvsim.sim.models.names import card_name
from pdvsim.sim.models.presets import pair_name
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.sim.prices.cards import GPUS
from pdvsim.sim.prices.options import SERVED
from pdvsim.sim.relevance import applicable
from pdvsim.sim.workload.usual import usual_acceptance

LOADS = (1, 4, 16, 64)
ACCEPTANCES = (0.1, 0.3, 0.5, 0.7, 0.9)
TRACE_LOADS = (0.5, 1, 2, 4)  # times the trace's rate
SEARCHED = 4  # tuning usually takes the most runs that it could take over this


@dataclass(frozen=True)
class MapCommand(AnswerCommand, DecisionOptions):
    """Map the best architecture over load and acceptance, model size or GPU."""

    unit, dated = "runs", True
    written = ("map.parquet", "map.json", "map.png")

    y: Axis = "acceptance"
    """Second axis: acceptance, size (model pairs) or card."""
    concurrency: tuple[Requests, ...] = ()
    """Loads as concurrent requests (closed loop); default without --request-rate: 1,4,16,64."""
    request_rate: tuple[RequestRate, ...] = ()
    """Loads in requests per second; default for a trace: around its rate."""
    acceptances: Annotated[tuple[Share, ...], of(y="acceptance")] = ()
    """Acceptance rates; default: 0.1,0.3,0.5,0.7,0.9."""
    pairs: Annotated[tuple[str, ...], of(y="size")] = ()
    """Pairs, as draft:target; the map orders them by the ratio of their sizes."""
    pair_acceptance: Annotated[tuple[Share, ...], of("pairs", without=["acceptance_from"])] = ()
    """Acceptance rate of each of --pairs."""
    try_cards: Annotated[tuple[str, ...], of(y="card")] = ()
    """GPUs, e.g. h200,a100-80gb."""
    gpus: Gpus = 1
    """Number of GPUs. Replicas, tensor parallelism and split lanes are compared, each tuned."""
    against: Arch | None = None
    """Also compare each architecture with this one: metrics and paired differences."""
    output: str | None = None
    """Folder for table, JSON and plots; default: results/map-DATE-TIME."""

    @property
    def named(self) -> tuple[Arch, ...]:
        return self.arch or (() if self.against in (None, *SERVED) else USUAL_ARCHS)

    @property
    def archs(self) -> tuple[Arch, ...]:
        """The architectures that are named, else the default for the number of GPUs."""
        return self.fleet_archs if self.gpus > 1 else super().archs

    def rates(self) -> tuple[float, ...]:
        """Request rates; default for a replayed trace: around its own rate, to three digits."""
        if self.request_rate or not self.replays(bool(self.concurrency)):
            return self.request_rate
        own = own_rate(self.compared_traffic(replays=True))
        return tuple(float(f"{own * times:.3g}") for times in TRACE_LOADS)

    def question(self) -> Grid:
        rates = self.rates()
        loads = self.concurrency or (() if rates else LOADS)
        places: tuple[Place, ...] = self.acceptances or ACCEPTANCES
        if self.y == "size":
            names = sorted(map(pair_name, self.pairs), key=size_ratio)
            places = tuple(names)
        if self.pair_acceptance and len(self.pair_acceptance) != len(self.pairs):
            raise ValueError(f"--pair-acceptance needs one rate for each of --pairs ({len(self.pairs)})")
        if self.pair_acceptance and not self.acceptance.by_rate:
            raise ValueError("--pair-acceptance cannot be combined with another form of acceptance")
        if self.y == "card":
            places = tuple(card_name(card, GPUS) for card in self.try_cards)
        pairs = tuple(map(str, places if self.y == "size" else ()))
        traffic = self.compared_traffic(*pairs, replays=self.replays(bool(self.concurrency)))
        arch = self.archs[0] if self.archs else Experiment.arch
        # each cell of --y acceptance sets its own
        base = self.experiment(arch, traffic, assumed=self.y == "acceptance")
        accepted = {pair: usual_acceptance(pair, traffic) for pair in pairs if self.acceptance_open}
        for pair, rate in zip(map(pair_name, self.pairs), self.pair_acceptance, strict=False):
            accepted[pair] = Acceptance(rate)
        return Grid(
            base,
            self.space(self.archs),
            loads,
            rates,
            self.y,
            places,
            self.num_runs,
            self.goal(at_rate=not loads),
            self.indifference,
            fleets(base, self.archs, self.gpus) if self.gpus > 1 else (),
            self.against,
            accepted,
        )

    def expected_runs(self, grid: Grid) -> int:
        """Estimated simulations; warns before runs that are long or too few."""
        experiments = grid.experiments()
        forewarn_few(grid.num_runs, len(grid.archs))
        forewarn([applicable(without_band(run)) for run in experiments], self.jobs)
        return len(experiments) + most_runs(grid.space, len(grid.cells()), len(grid.archs)) // SEARCHED

    def answer(self, grid: Grid | None = None, progress: Callable[[int], None] | None = None) -> WinnerMap:
        bench = Bench(self.jobs, progress, band=self.against is not None, prompts=self.num_prompts)
        winners = draw_map(grid or self.question(), bench)
        winners.drawn_by = map_pictures
        return winners
