"""Which architecture is best where: a grid of loads x acceptance rates, or loads x pairs of models by size.

In each cell all architectures run the same seeds. A winner counts as sure only if its paired intervals against all
others exclude no difference; by default at a confidence that leaves the whole map at 95%, so that among many cells none
is expected to be coloured by chance. At a request rate, who does not keep up cannot win; nobody may.

Over sizes the acceptance rate is the same for every pair: that a larger draft model agrees more often is not modelled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from pdvsim.decide.contest import Contest, contest
from pdvsim.decide.goal import Goal
from pdvsim.decide.runs import Bench, at_acceptance, at_rate, kept_up, replications
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.doubts import same_vocabulary
from pdvsim.sim.hardware.models import MODELS
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.limits import check_points, check_ranges
from pdvsim.sim.relevance import vet
from pdvsim.study.backends import Row

if TYPE_CHECKING:
    import pandas as pd

Axis = Literal["acceptance", "size"]
Family = Literal["map", "cell"]
Place = float | str  # an acceptance rate, or a pair


@dataclass(frozen=True)
class Grid:
    """The cells of a map: loads x places, and who competes in each."""

    base: Experiment
    archs: tuple[Arch, ...]
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...]
    axis: Axis
    places: tuple[Place, ...]
    num_runs: int
    goal: Goal
    warmup_share: float = 0.1
    family: Family = "map"
    indifference: float = 0.0

    def __post_init__(self) -> None:
        lists = (("arch", self.archs), ("concurrency", self.concurrency), ("request-rate", self.request_rate))
        for name, values in (*lists, ("acceptances" if self.axis == "acceptance" else "pairs", self.places)):
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names a value twice: {', '.join(map(str, values))}")
        if len(self.archs) < 2:
            raise ValueError("arch needs at least two values: a map is of who wins")
        if bool(self.concurrency) == bool(self.request_rate):
            raise ValueError("give one of --concurrency and --request-rate")
        if not self.places:
            raise ValueError(f"{'acceptances' if self.axis == 'acceptance' else 'pairs'} needs at least one value")
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed tells nothing for sure, got {self.num_runs}")
        check_ranges(self)
        check_points(
            "loads x places x architectures x runs", len(self.loads), len(self.places), len(self.archs), self.num_runs
        )
        acceptance = self.base.acceptance
        if self.axis == "acceptance" and (acceptance.synthetic_acceptance_rates or acceptance.acceptance_trace):
            raise ValueError("a map over acceptance takes no --synthetic-acceptance-rates and no --acceptance-trace")
        vet(self.experiments())  # an option that is refused, or a pair that is not known, is refused now

    @property
    def loads(self) -> tuple[float, ...]:
        return self.request_rate or tuple(map(float, self.concurrency))

    @property
    def load_kind(self) -> Literal["request_rate", "concurrency"]:
        return "request_rate" if self.request_rate else "concurrency"

    @property
    def comparisons(self) -> int:
        """Over how many the 5% chance of error is spread."""
        cells = len(self.loads) * len(self.places) if self.family == "map" else 1
        return cells * (len(self.archs) - 1)

    def contenders(self, load: float, place: Place) -> dict[Arch, list[Experiment]]:
        """The runs of one cell."""
        here = self._placed(load, place)
        return {arch: replications(replace(here, arch=arch), self.num_runs) for arch in self.archs}

    def experiments(self) -> list[Experiment]:
        """All runs of the map, cell by cell."""
        cells = (self.contenders(load, place) for place in self.places for load in self.loads)
        return [run for cell in cells for runs in cell.values() for run in runs]

    def _placed(self, load: float, place: Place) -> Experiment:
        if self.request_rate:
            loaded = at_rate(self.base, load)
        else:
            loaded = replace(self.base, traffic=replace(self.base.traffic, max_concurrency=int(load)))
        if isinstance(place, str):
            named_pair(place)
            placed = replace(loaded, server=replace(loaded.server, pair=place))
        else:
            placed = at_acceptance(loaded, place)
        return self.goal.prepared(placed, self.warmup_share)


@dataclass(frozen=True)
class Cell:
    """One place of the map; no contest where nobody keeps up."""

    load: float
    place: Place
    contest: Contest | None
    behind_load: tuple[str, ...]  # who did not keep up

    @property
    def winner(self) -> str | None:
        return self.contest.best if self.contest else None

    @property
    def sure(self) -> bool:
        """Whether the winner is told apart from everyone who kept up; alone in keeping up, it is."""
        return self.contest is not None and (self.contest.sure or not self.contest.behind)


@dataclass(repr=False)
class WinnerMap:
    """The cells whose runs are all done."""

    grid: Grid
    cells: list[Cell] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    interrupted: bool = False

    def __repr__(self) -> str:
        from pdvsim.decide.tables import map_table

        return map_table(self)

    @property
    def points(self) -> pd.DataFrame:
        """One row a run."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def cell(self, load: float, place: Place) -> Cell | None:
        return next((cell for cell in self.cells if (cell.load, cell.place) == (load, place)), None)


def draw_map(grid: Grid, bench: Bench) -> WinnerMap:
    """Run all cells. Ctrl-C keeps those that are done."""
    found = WinnerMap(grid)
    try:
        bench.rows(grid.experiments())
    except KeyboardInterrupt:
        found.interrupted = True
    for place in grid.places:
        for load in grid.loads:
            cell = grid.contenders(load, place)
            rows = {arch: bench.known(runs) for arch, runs in cell.items()}
            done = {arch: known for arch, known in rows.items() if known is not None}
            for arch, known in done.items():
                where = {"load_kind": grid.load_kind, "load": load, "axis": grid.axis, "place": place}
                found.rows += [row | where | {"arch": arch, "run": run} for run, row in enumerate(known)]
            if len(done) == len(cell):
                found.cells.append(_judged(grid, load, place, done))
    return found


def _judged(grid: Grid, load: float, place: Place, rows: dict[Arch, list[Row]]) -> Cell:
    up = {arch: mine for arch, mine in rows.items() if kept_up(mine)}
    behind = tuple(arch for arch in rows if arch not in up)
    if not up:
        return Cell(load, place, None, behind)
    figures = {str(arch): [grid.goal.value(row) for row in mine] for arch, mine in up.items()}
    return Cell(load, place, contest(figures, grid.goal.sign, grid.comparisons, grid.indifference), behind)


def natural_pairs() -> tuple[str, ...]:
    """Presets that speak the same tokens, as draft:target, from the smallest draft for its target to the largest."""
    pairs = [
        (draft.params / target.params, f"{draft.name}:{target.name}")
        for target in MODELS.values()
        for draft in MODELS.values()
        if draft.params < target.params and draft.family == target.family and same_vocabulary(draft, target)
    ]
    return tuple(name for _, name in sorted(pairs))


def size_ratio(pair: str) -> float:
    """Parameters of the draft model over those of its target."""
    models = named_pair(pair)
    return models.draft.params / models.target.params


def by_size(pairs: Sequence[str]) -> tuple[str, ...]:
    """Pairs in the order of their ratio."""
    return tuple(sorted(pairs, key=size_ratio))
