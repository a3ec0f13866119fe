"""The best architecture over a grid of loads x acceptance rates, model pairs or GPUs.

In each cell every architecture is tuned (`tune`), and all run the same seeds. A winner is significant if its paired
intervals against all others lie above the threshold. The confidence is 95% for the whole map, so that no cell is
expected to be coloured by chance. Among architectures without significant difference the simplest is chosen, as
in `advise`. At a request rate, an architecture that does not keep up cannot win, and a cell may have no winner. One
that misses the service levels cannot win if another meets them.

With `fleets`, layouts of the same number of GPUs are compared instead of architectures.

Over sizes the acceptance rate is the same for every pair: that larger draft models agree more often is not modelled.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pdvsim.bench import output
from pdvsim.bench.pool import Row
from pdvsim.bench.stats import Interval, over_replications, paired_differences
from pdvsim.decide.error import lead_error
from pdvsim.decide.goal import NAMES
from pdvsim.decide.grid import Grid, Place, place_text
from pdvsim.decide.race import (
    Contest,
    chosen,
    contest_of,
    corrected,
    exceeds,
    percent,
    threshold_text,
    unsure_text,
)
from pdvsim.decide.report import NO_DRAFTS, Answer, Report, gpus_text, rests_on
from pdvsim.decide.runs import Bench, kept_up
from pdvsim.decide.space import drafts_text, settings_text
from pdvsim.decide.tune import Search, decided
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.metrics.summary import percentile_name
from pdvsim.view.comparison import comparison_table, most_outside, paired_table
from pdvsim.view.report.sheet import PageSection, Showable
from pdvsim.view.setting import acceptance_notes
from pdvsim.view.table import TextTable, span_text

if TYPE_CHECKING:
    import pandas as pd

CHOSEN = ("controller", "num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class Cell:
    """One cell of the map; no contest if none keeps up."""

    load: float
    place: Place
    winner: str | None  # the best, or the simplest of those without significant difference
    contest: Contest | None
    behind_load: tuple[str, ...]  # those that did not keep up
    settings: dict[Arch, Experiment]  # tuned settings of each architecture
    rows: list[Row]

    @property
    def sure(self) -> bool:
        """Whether the winner differs significantly from every other that kept up, or is the only one that did."""
        return self.contest is not None and (self.contest.sure or not self.contest.others)

    def words(self, names: int = 2) -> list[str]:
        """The winner, its draft length and its lead over the second; or a tie, with up to `names` others of it."""
        contest = self.contest
        if self.winner is None or contest is None:
            return ["none keeps up"]
        drafts = drafts_text(self.settings[self.winner])
        if self.sure:
            lead = percent(contest.leads[contest.others[0]].mean) if contest.others else ""
            return [word for word in (self.winner, f"{drafts} {lead}".strip()) if word]
        alike = [name for name in contest.tied if name != self.winner]
        others = [*alike[:names], *(["…"] if len(alike) > names else [])]
        return ["tie:", f"{self.winner} {drafts}".strip(), *(f"= {other}" for other in others)]


@dataclass(frozen=True)
class Differences:
    """All tuned architectures compared with one: the metrics of each, and differences paired by seed.

    A difference is significant if its interval lies above the profile's error, with 95% confidence for all together.
    """

    points: pd.DataFrame  # with a `place` in words
    against: str
    settings: Mapping[tuple[str, float], Mapping[str, Experiment]]  # of all at each place and load

    @cached_property
    def summary(self) -> list[dict[str, Any]]:
        """One entry per place, load and architecture; numbers are Intervals over the replications."""
        groups = self.points.groupby("place", sort=False)
        return [{"place": place} | entry for place, group in groups for entry in over_replications(group)]

    @cached_property
    def paired(self) -> list[dict[str, Any]]:
        """Differences from one architecture in three metrics, and whether each is significant."""
        [here, *_] = (mine for spot in self.settings.values() for mine in spot.values())
        tail = percentile_name(max(here.scoring.metric_percentiles))
        metrics = ("output_throughput", "mean_e2el_ms", f"{tail}_e2el_ms")
        rivals = sum(len(mine) - 1 for mine in self.settings.values())
        confidence = corrected(len(metrics) * rivals)
        pairs = []
        for place, group in self.points.groupby("place", sort=False):
            for metric in metrics:
                for difference in paired_differences(group, metric, self.against, confidence):
                    mine = self.settings[str(place), difference["load"]][difference["arch"]]
                    error, apart = lead_error(mine, metric), difference["relative"]
                    significant = exceeds(Interval(abs(apart.mean), apart.half_width, apart.n), error)
                    why = "" if significant else unsure_text(apart, error, abs(apart.mean) <= apart.half_width)
                    verdict = {"significant": significant, "unsure": why}
                    pairs.append({"place": place} | difference | {"error": error, "confidence": confidence} | verdict)
        return pairs

    def sections(self) -> list[PageSection]:
        """The metrics of all, then the differences."""
        [here, *_] = (mine for spot in self.settings.values() for mine in spot.values())
        of_all = comparison_table(self.summary, here.scoring.metric_percentiles, varied=("place", "settings"))
        return [("", [of_all, *([paired_table(self.paired, ("place",))] if self.paired else [])])]


@dataclass(repr=False)
class WinnerMap(Answer):
    """The cells whose runs have all finished."""

    grid: Grid
    found: dict[tuple[float, Place], Cell] = field(default_factory=dict)
    interrupted: bool = False

    @property
    def cells(self) -> list[Cell]:
        """All cells, in the order of their loads and places."""
        return [self.found[at] for at in self.grid.cells() if at in self.found]

    @property
    def rows(self) -> list[Row]:
        """All runs."""
        return [row for cell in self.cells for row in cell.rows]

    @cached_property
    def differences(self) -> Differences | None:
        """All compared with one of them; None if none is named."""
        grid, points = self.grid, self.points
        if grid.against is None or not self.cells:
            return None
        if grid.fleets:
            points["arch"] = points["fleet"]
        points["place"] = points["place"].map(place_text)
        return Differences(points, grid.against, {(place_text(c.place), c.load): c.settings for c in self.cells})

    def report(self) -> Report:
        """Rows are places, columns loads: the winner and its lead over the second, in brackets if not significant."""
        grid, against = self.grid, self.differences
        cells = [
            {
                "load": cell.load,
                "place": cell.place,
                "winner": cell.winner,
                "sure": cell.sure,
                "did_not_keep_up": list(cell.behind_load),
                "settings": {arch: settings_text(mine) for arch, mine in cell.settings.items()},
                "contest": cell.contest.document() if cell.contest else None,
            }
            for cell in self.cells
        ]
        what = f"way to use {gpus_text(grid.fleets[-1].gpus(grid.base))}" if grid.fleets else "architecture"
        return Report(
            "Winner map",
            f"The best {what} over load and {grid.axis}.",
            grid.base,
            [*(against.sections() if against else ()), ("", _lines(self) if self.cells else ["no cell has finished"])],
            self.document(
                objective=grid.goal.objective,
                comparisons=grid.comparisons,
                grid=output.settings(grid),
                cells=cells,
                outside_measured=next(iter(most_outside(self.rows)), None),
                **({"summary": against.summary, "paired_differences": against.paired} if against else {}),
            ),
            f"{len(self.cells)} of {len(grid.cells())} cells" if self.interrupted else "",
            not self.cells,
        )


def draw_map(grid: Grid, bench: Bench) -> WinnerMap:
    """Tune every architecture in every cell, then run all cells. Ctrl-C keeps finished cells."""
    answer = WinnerMap(grid)
    search = Search(grid.goal, grid.space, grid.indifference, contenders=grid.fleets)
    search.always_finalists = frozenset(fleet.name for fleet in grid.fleets)  # a map shows all of them
    places = [grid.placed(load, place) for load, place in grid.cells()]
    budget, all_compete = 0 if grid.fleets else None, grid.against is not None
    try:
        for at, settings, finals in decided(search, places, bench, grid.num_runs, budget, all_compete):
            answer.found[grid.cells()[at]] = _cell_of(grid, *grid.cells()[at], finals.rows, settings)
    except KeyboardInterrupt:
        answer.interrupted = True
    return answer


def _chosen(experiment: Experiment) -> dict[str, Any]:
    """The main tuned settings, as keywords of a run; no draft length if nothing is drafted."""
    settings = {name: getattr(experiment.server, name) for name in CHOSEN}
    return settings if experiment.speculates else settings | {"controller": "fixed", "num_speculative_tokens": 0}


def _cell_of(
    grid: Grid, load: float, place: Place, rows: Mapping[Arch, list[Row]], settings: dict[Arch, Experiment]
) -> Cell:
    """A cell with its runs, each with its place and settings."""
    where, labelled = {"load_kind": grid.load_kind, "load": load, "axis": grid.axis, "place": place}, list[Row]()
    for name in (name for name in grid.archs if name in rows):
        mine = settings[name]
        named = {"fleet" if grid.fleets else "arch": name, "settings": ", ".join(settings_text(mine))}
        labelled += [row | where | named | _chosen(mine) | {"run": run} for run, row in enumerate(rows[name])]
    overloaded = tuple(arch for arch, mine in rows.items() if not kept_up(mine))
    if len(overloaded) == len(rows):
        return Cell(load, place, None, None, overloaded, settings, labelled)
    contest = contest_of(rows, grid.goal, settings, grid.indifference, grid.comparisons)
    winner = chosen(contest, settings, grid.placed(load, place))
    return Cell(load, place, winner, contest, overloaded, settings, labelled)


def _lines(answer: WinnerMap) -> list[str | Showable]:
    grid = answer.grid
    unit = "req/s" if grid.request_rate else "concurrent"
    places = "pair (draft/target)" if grid.axis == "size" else grid.axis
    rows = [
        {places: place_text(place)} | {f"{load:g} {unit}": _won(answer.found.get((load, place))) for load in grid.loads}
        for place in reversed(grid.places)
    ]
    contests = [cell.contest for cell in answer.cells if cell.contest]
    limits = f"; {threshold_text(contests, grid.indifference)}" if contests else ""
    confidence = contests[0].confidence if contests else math.nan
    served = (mine for cell in answer.cells for mine in cell.settings.values())
    return [
        TextTable(rows),
        f"best {NAMES[grid.goal.objective]} and its lead over the second, each at its best settings",
        f"compared: {', '.join(grid.archs)}",
        f"tie: no significant lead of the first, the simplest or the best, over the others{limits}",
        f"{confidence_text(answer)}, {confidence:.2%} for each comparison",
        *_without_drafts(answer),
        *rests_on(grid.base.traffic, answer.rows),
        *(acceptance_notes(served) if grid.axis != "acceptance" else ()),
    ]


def _without_drafts(answer: WinnerMap) -> list[str]:
    """The number of cells in which drafts do not pay, of those that compare some, as text."""
    compared = [cell for cell in answer.cells if any(mine.has_drafter for mine in cell.settings.values())]
    sure = [cell for cell in compared if cell.sure and cell.winner in cell.settings]
    plain = [cell for cell in sure if not cell.settings[str(cell.winner)].speculates]
    where = f"{len(plain)} of {len(compared)} cells"
    return [f"{NO_DRAFTS} in {where}: the best setting there has no drafts"] if plain else []


def confidence_text(answer: WinnerMap) -> str:
    """Number of seeds per cell, as a range, and the confidence."""
    counts = {cell.contest.seeds for cell in answer.cells if cell.contest} or {answer.grid.num_runs}
    return f"{span_text(counts)} seeds per cell, paired; 95% confidence for the whole map"


def _won(cell: Cell | None) -> str:
    text = " ".join(cell.words()) if cell else ""
    return f"{text} alone" if cell and cell.contest and not cell.contest.others else text
