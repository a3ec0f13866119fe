"""Which architecture is best where: a grid of loads x acceptance rates, or loads x pairs of models by size.

In each cell every architecture has its own best settings for that cell (`tune`), and all run the same seeds. A winner
counts as sure only if its paired intervals against all others lie above what does not count; by default at a confidence
that leaves the whole map at 95%, so that among many cells none is expected to be coloured by chance. Where others are
alike by the cell's seeds and the indifference, the simplest of them is taken, as in advice. At a request rate,
who does not keep up cannot win; nobody may. Who misses the service levels cannot win where another meets them.

With `fleets`, ways to use the same number of GPUs compete in place of architectures, and the border is found up to
which a server with its lanes on several GPUs leads over the others: by bisection between the loads of the map, on the
means, each at its best at every load that is looked at.

Over sizes the acceptance rate is the same for every pair: that a larger draft model agrees more often is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.common.outcomes import Row
from pdvsim.common.version import __version__
from pdvsim.decide.contest import Contest
from pdvsim.decide.finals import decided
from pdvsim.decide.fleet import Fleet, hourly
from pdvsim.decide.goal import NAMES, Goal
from pdvsim.decide.runs import Bench, at_acceptance, at_rate, kept_up, replications
from pdvsim.decide.space import Space, drafts_text, settings_text
from pdvsim.decide.text import contest_document, lengths_note, percent, threshold_text
from pdvsim.decide.tune import Search, tuned
from pdvsim.decide.verdict import chosen, judged
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.doubts import same_vocabulary, vet
from pdvsim.sim.hardware.models import MODELS
from pdvsim.sim.hardware.models import pair as named_pair
from pdvsim.sim.limits import check_list, check_points, check_ranges
from pdvsim.study import output
from pdvsim.view import table

if TYPE_CHECKING:
    import pandas as pd

Axis = Literal["acceptance", "size"]
Family = Literal["map", "cell"]
Place = float | str  # an acceptance rate, or a pair
Ran = tuple[dict[str, list[Row]], dict[Arch, Experiment]]  # rows and best settings, by name
NEAR = 1.1  # two loads whose ratio is no more are not told apart


@dataclass(frozen=True)
class Grid:
    """The cells of a map: loads x places, and who competes in each."""

    base: Experiment
    space: Space
    concurrency: tuple[int, ...]
    request_rate: tuple[float, ...]
    axis: Axis
    places: tuple[Place, ...]
    num_runs: int
    goal: Goal
    warmup_share: float = 0.1
    family: Family = "map"
    indifference: float = 0.0
    fleets: tuple[Fleet, ...] = ()
    usd: Mapping[str, float] = field(default_factory=dict)  # an hour, by card
    per_dollar: bool = False

    def __post_init__(self) -> None:
        if self.per_dollar and (not self.fleets or self.goal.objective not in ("throughput", "goodput")):
            raise ValueError("--per-dollar is of fleets (--gpus) by throughput or goodput")
        check_list("concurrency", self.concurrency, needed=False)
        check_list("request-rate", self.request_rate, needed=False)
        check_list("acceptances" if self.axis == "acceptance" else "pairs", self.places)
        if len(self.archs) < 2:
            raise ValueError("arch needs at least two values: a map is of who wins")
        if bool(self.concurrency) == bool(self.request_rate):
            raise ValueError("give one of --concurrency and --request-rate")
        if self.num_runs < 2:
            raise ValueError(f"num-runs must be at least 2: one seed tells nothing for sure, got {self.num_runs}")
        check_ranges(self)
        check_points(
            "loads x places x architectures x runs", len(self.loads), len(self.places), len(self.archs), self.num_runs
        )
        if self.axis == "acceptance" and not self.base.acceptance.by_rate:
            raise ValueError(
                "a map over acceptance takes no --synthetic-acceptance-rates, --acceptance-model or --acceptance-trace"
            )
        vet(self.experiments())  # an option that is refused, or a pair that is not known, is refused now

    @property
    def archs(self) -> tuple[Arch, ...]:
        """Who competes: architectures, or fleets by their names."""
        return tuple(fleet.name for fleet in self.fleets) or self.space.archs

    def starts(self, here: Experiment) -> list[Experiment]:
        """Everyone in a cell, before they are tuned."""
        return [fleet.of(here) for fleet in self.fleets] or [replace(here, arch=arch) for arch in self.archs]

    def costs(self, here: Experiment) -> dict[str, float] | None:
        """An hour of each fleet, where it counts."""
        return {fleet.name: hourly(fleet, here, self.usd) for fleet in self.fleets} if self.per_dollar else None

    @property
    def objective(self) -> str:
        """What the winner is best at, in words."""
        unit = "dollar an hour" if self.usd else "GPU"
        return NAMES[self.goal.objective] + (f" per {unit}" if self.per_dollar else "")

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

    def cells(self) -> list[tuple[float, Place]]:
        """Every load at every place."""
        return [(load, place) for place in self.places for load in self.loads]

    def experiments(self) -> list[Experiment]:
        """All runs of the map with the settings given, before any is tuned."""
        heres = (self.placed(load, place) for load, place in self.cells())
        return [run for here in heres for start in self.starts(here) for run in replications(start, self.num_runs)]

    def placed(self, load: float, place: Place) -> Experiment:
        """The experiment of a cell, its architecture and settings as given."""
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
    winner: str | None  # as advice is given: the best, or the simplest of those that are alike
    contest: Contest | None
    behind_load: tuple[str, ...]  # who did not keep up
    settings: dict[Arch, Experiment]  # of each architecture, at its best here
    seeds: int = 0  # that decided

    @property
    def sure(self) -> bool:
        """Whether the winner is told apart from everyone who kept up; alone in keeping up, it is."""
        return self.contest is not None and (self.contest.sure or not self.contest.behind)


@dataclass(frozen=True)
class Border:
    """At one place, the loads between which whole servers begin to lead over lanes on several GPUs; None: not there."""

    place: Place
    split_leads: float | None  # the highest load of the map, by the means
    whole_lead: float | None  # the lowest beyond that


@dataclass(repr=False)
class WinnerMap:
    """The cells whose runs are all done."""

    grid: Grid
    cells: list[Cell] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    borders: list[Border] = field(default_factory=list)
    interrupted: bool = False

    def __repr__(self) -> str:
        return map_table(self)

    @property
    def points(self) -> pd.DataFrame:
        """One row a run."""
        import pandas as pd

        return pd.DataFrame(self.rows)

    def cell(self, load: float, place: Place) -> Cell | None:
        return next((cell for cell in self.cells if (cell.load, cell.place) == (load, place)), None)


def draw_map(grid: Grid, bench: Bench) -> WinnerMap:
    """Tune every architecture in every cell, then run all cells. Ctrl-C keeps those that are done."""
    found = WinnerMap(grid)
    search = Search(grid.goal, grid.space, grid.warmup_share, grid.indifference)
    ran: dict[int, Ran] = {}
    try:
        ran.update(_ran(grid, search, bench))
    except KeyboardInterrupt:
        found.interrupted = True
    for at, (rows, settings) in ran.items():
        load, place = grid.cells()[at]
        for name, mine in rows.items():
            where = {"load_kind": grid.load_kind, "load": load, "axis": grid.axis, "place": place}
            where |= {"fleet" if grid.fleets else "arch": name, "settings": ", ".join(settings_text(settings[name]))}
            found.rows += [row | where | {"run": run} for run, row in enumerate(mine)]
        found.cells.append(_judged(grid, load, place, rows, settings))
    if grid.fleets and not found.interrupted:
        try:
            found.borders = [_border(found, place, search, bench) for place in grid.places]
        except KeyboardInterrupt:
            found.interrupted = True
    return found


def _ran(grid: Grid, search: Search, bench: Bench) -> Iterator[tuple[int, Ran]]:
    """Cells by number, and again when seeds were added. Ctrl-C: those that are known, then it is raised."""
    places = [grid.placed(load, place) for load, place in grid.cells()]
    if not grid.fleets:
        for at, decision in decided(search, places, bench, grid.num_runs):
            yield at, ({candidate.arch: rows for candidate, rows in decision.finals.rows.items()}, decision.settings)
        return
    best = _tuned_fleets(search, grid.fleets, places, bench)
    interrupted: KeyboardInterrupt | None = None
    try:
        bench.rows([run for here in best for mine in here.values() for run in replications(mine, grid.num_runs)])
    except KeyboardInterrupt as stop:
        interrupted = stop
    for at, here in enumerate(best):
        known = {name: bench.known(replications(mine, grid.num_runs)) for name, mine in here.items()}
        done = {name: rows for name, rows in known.items() if rows is not None}
        if len(done) == len(here):
            yield at, (done, here)
    if interrupted is not None:
        raise interrupted


def _tuned_fleets(
    search: Search, ways: Sequence[Fleet], places: Sequence[Experiment], bench: Bench
) -> list[dict[str, Experiment]]:
    """For each place every fleet at its own best settings: a map shows all of them."""
    found: list[dict[str, Experiment]] = [{} for _ in places]
    for fleet in ways:
        for here, best in zip(found, tuned(replace(search, fleets=(fleet,)), places, bench), strict=True):
            here |= best
    return found


def _border(found: WinnerMap, place: Place, search: Search, bench: Bench) -> Border:
    """By bisection between the loads of the map, on the means; each fleet at its best at every load looked at."""
    grid = found.grid
    leads = {cell.load: _split_lead(grid, cell) for cell in found.cells if cell.place == place}
    ahead = [load for load, lead in leads.items() if lead > 0]
    low = max(ahead, default=None)
    high = min((load for load, lead in leads.items() if lead <= 0 and (low is None or load > low)), default=None)
    while low is not None and high is not None and _between(grid, low, high) not in (low, high):
        load = _between(grid, low, high)
        here = grid.placed(load, place)
        [best] = _tuned_fleets(search, grid.fleets, [here], bench)
        rows = {name: bench.rows(replications(mine, grid.num_runs)) for name, mine in best.items()}
        low, high = (load, high) if _split_lead(grid, _judged(grid, load, place, rows, best)) > 0 else (low, load)
    return Border(place, low, high)


def _between(grid: Grid, low: float, high: float) -> float:
    """A load in the geometric middle: a whole number of requests, or a rate unless the two are near."""
    middle = math.sqrt(low * high)
    if grid.request_rate:
        return middle if high / low > NEAR else low
    return float(min(max(round(middle), low + 1), high - 1)) if high - low > 1 and high / low > NEAR else low


def _split_lead(grid: Grid, cell: Cell) -> float:
    """By how much the best fleet with lanes on several GPUs is above the best without, in the goal's direction."""
    if cell.contest is None:
        return 0.0
    means = {name: grid.goal.sign * value.mean for name, value in cell.contest.values.items()}
    splits = {fleet.name: fleet.splits for fleet in grid.fleets}
    best = {
        split: max((mean for name, mean in means.items() if splits[name] is split), default=-math.inf)
        for split in (True, False)
    }
    return best[True] - best[False]


def _judged(
    grid: Grid, load: float, place: Place, rows: dict[Arch, list[Row]], settings: dict[Arch, Experiment]
) -> Cell:
    behind = tuple(arch for arch, mine in rows.items() if not kept_up(mine))
    if len(behind) == len(rows):
        return Cell(load, place, None, None, behind, settings)
    here = grid.placed(load, place)
    told = settings if grid.fleets else here
    held = judged(rows, grid.goal, told, grid.indifference, grid.comparisons, grid.costs(here))
    return Cell(load, place, chosen(held, settings, here), held, behind, settings, held.seeds)


def natural_pairs() -> tuple[str, ...]:
    """Presets that speak the same tokens, as draft:target, from the smallest draft for its target to the largest.

    Of those that were measured on the H200: a map is no place for predicted forwards unless asked for.
    """
    known = list(MODELS.values())
    pairs = [
        (draft.params / target.params, f"{draft.name}:{target.name}")
        for target in known
        for draft in known
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


def map_document(found: WinnerMap) -> dict[str, Any]:
    """Everything that was asked and found."""
    cells = [
        {
            "load": cell.load,
            "place": cell.place,
            "winner": cell.winner,
            "sure": cell.sure,
            "did_not_keep_up": list(cell.behind_load),
            "settings": {arch: settings_text(mine) for arch, mine in cell.settings.items()},
            "contest": contest_document(cell.contest) if cell.contest else None,
        }
        for cell in found.cells
    ]
    return {
        "pdvsim_version": __version__,
        "interrupted": found.interrupted,
        "objective": found.grid.objective if found.grid.fleets else found.grid.goal.objective,
        "comparisons": found.grid.comparisons,
        "grid": output.settings(found.grid),
        "cells": cells,
        **({"borders": [asdict(border) for border in found.borders]} if found.grid.fleets else {}),
        "outside_measured": next(iter(table.most_outside(found.rows)), None) if found.rows else None,
    }


def map_table(found: WinnerMap) -> str:
    """Places down, loads across: the winner and its lead over the second; in brackets where it is not sure."""
    if not found.cells:
        return "no cell is done"
    grid_ = found.grid
    rows = [
        [place_text(place), *(_won(found.cell(load, place)) for load in grid_.loads)]
        for place in reversed(grid_.places)
    ]
    unit = "req/s" if grid_.request_rate else "concurrent"
    header = [
        "acceptance" if grid_.axis == "acceptance" else "pair (draft/target)",
        *(f"{x:g} {unit}" for x in grid_.loads),
    ]
    contests = [cell.contest for cell in found.cells if cell.contest]
    limits = [f"; {threshold_text(contests, grid_.indifference)}"] if contests else []
    confidence = contests[0].confidence if contests else math.nan
    whose = "the map as a whole" if grid_.family == "map" else "each cell alone, not for the map"
    return "\n".join(
        [
            table.grid(header, rows),
            f"best {grid_.objective} and its lead over the second, each at its own best settings",
            f"of {', '.join(grid_.archs)}",
            "".join(["(in brackets): not told apart from those named", *limits]),
            f"{seeds_text(found)} a cell, paired; 95% confidence for {whose}, {confidence:.2%} for each comparison",
            *map(border_text, reversed(found.borders)),
            *lengths_note(grid_.base.traffic),
            *dict.fromkeys(map(table.founded, found.rows)),
            *table.most_outside(found.rows),
        ]
    )


def border_text(border: Border) -> str:
    """Where lanes on several GPUs cease to lead."""
    low, high = border.split_leads, border.whole_lead
    at = f"{place_text(border.place)}: lanes on several GPUs "
    if low is None:
        return at + "lead nowhere"
    end = "the last of the map" if high is None else f"others from {high:g}"
    return f"{at}lead up to {low:g}, {end}"


def seeds_text(found: WinnerMap) -> str:
    """How many seeds decided the cells: from the fewest to the most."""
    counts = {cell.seeds for cell in found.cells if cell.seeds} or {found.grid.num_runs}
    return f"{min(counts)}{f' to {max(counts)}' if len(counts) > 1 else ''} seeds"


def place_text(place: Place) -> str:
    """An acceptance rate, or a pair with the ratio of its sizes."""
    return f"{place} ({size_ratio(place):.2f})" if isinstance(place, str) else f"{place:g}"


def margin_text(cell: Cell) -> str:
    """The winner's lead, as a share of the second's figure; none where it is taken as the simplest of those alike."""
    if cell.contest is None or cell.contest.second is None or cell.winner != cell.contest.best:
        return ""
    return percent(cell.contest.margin)


def alike_text(cell: Cell, names: int = 2) -> str:
    """Who is not told apart from the winner, by so many names."""
    held = cell.contest
    unsure = [name for name in (held.best, *held.unsure) if name != cell.winner] if held else []
    return f"≈ {', '.join(unsure[:names])}{', …' if len(unsure) > names else ''}"


def winner_text(cell: Cell) -> str:
    """The winner with its draft length; empty where nobody keeps up."""
    if cell.winner is None:
        return ""
    return f"{cell.winner} {drafts_text(cell.settings[cell.winner])}".rstrip()


def _won(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.winner is None:
        return "nobody keeps up"
    text = f"{winner_text(cell)} {margin_text(cell)}".rstrip()
    if cell.contest and not cell.contest.behind:
        return f"{text} alone"
    return text if cell.sure else f"({text} {alike_text(cell)})"
