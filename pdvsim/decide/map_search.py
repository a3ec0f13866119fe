"""The runs of a winner map: tune and replicate in every cell, then find the loads where split lanes stop leading."""

from __future__ import annotations

import math
from typing import Any

from pdvsim.common.outcomes import Row
from pdvsim.decide.finals import chosen, decided, judged
from pdvsim.decide.runs import Bench, kept_up, replications
from pdvsim.decide.space import settings_text
from pdvsim.decide.tune import Search, tuned
from pdvsim.decide.winners import Border, Cell, Grid, Place, WinnerMap
from pdvsim.sim.config import Arch, Experiment

Ran = tuple[dict[str, list[Row]], dict[Arch, Experiment]]  # rows and best settings, by name
CHOSEN = ("controller", "num_speculative_tokens", "max_num_seqs", "max_num_batched_tokens")  # columns
NEAR = 1.1  # loads within this ratio count as the same


def draw_map(grid: Grid, bench: Bench) -> WinnerMap:
    """Tune every architecture in every cell, then run all cells. Ctrl-C keeps finished cells."""
    found = WinnerMap(grid)
    search = Search(grid.goal, grid.space, grid.warmup_share, grid.indifference, ways=grid.fleets)
    search.staying = frozenset(fleet.name for fleet in grid.fleets)  # a map shows all of them
    places = [grid.placed(load, place) for load, place in grid.cells()]
    ran: dict[int, Ran] = {}
    try:
        equally = grid.against is not None  # all are also compared with one architecture
        budget = 0 if grid.fleets else None
        for at, settings, finals in decided(search, places, bench, grid.num_runs, budget, equally):
            ran[at] = {name: finals.rows[mine] for name, mine in finals.names.items()}, settings
        bench.rows([run for cell in ran.values() for runs in _rest(grid, cell).values() for run in runs])
    except KeyboardInterrupt:
        found.interrupted = True
    for at, (rows, settings) in ran.items():
        load, place = grid.cells()[at]
        rest = {name: bench.known(runs) or [] for name, runs in _rest(grid, (rows, settings)).items()}
        for name in (name for name in grid.archs if name in rows or name in rest):
            where = {"load_kind": grid.load_kind, "load": load, "axis": grid.axis, "place": place}
            where |= {"fleet" if grid.fleets else "arch": name, "settings": ", ".join(settings_text(settings[name]))}
            where |= _chosen(settings[name])
            found.rows += [row | where | {"run": run} for run, row in enumerate(rows.get(name) or rest[name])]
        found.cells.append(_judged(grid, load, place, rows, settings))
    if grid.fleets and not found.interrupted:
        try:
            found.borders = [_border(found, place, search, bench) for place in grid.places]
        except KeyboardInterrupt:
            found.interrupted = True
    return found


def _chosen(experiment: Experiment) -> dict[str, Any]:
    """The main tuned settings, as keywords of a run; no draft length if nothing is drafted."""
    chosen = {name: getattr(experiment.server, name) for name in CHOSEN}
    return chosen if experiment.speculates else chosen | {"controller": "fixed", "num_speculative_tokens": 0}


def _rest(grid: Grid, cell: Ran) -> dict[str, list[Experiment]]:
    """Runs of the architectures tuned but not replicated in a cell, if all are compared with one."""
    rows, settings = cell
    seeds = len(next(iter(rows.values())))
    rest = {name: mine for name, mine in settings.items() if grid.against is not None and name not in rows}
    return {name: replications(mine, seeds) for name, mine in rest.items()}


def _border(found: WinnerMap, place: Place, search: Search, bench: Bench) -> Border:
    """Bisect between the loads of the map, on the means; each fleet is tuned at every load tested."""
    grid = found.grid
    leads = {cell.load: _split_lead(grid, cell) for cell in found.cells if cell.place == place}
    ahead = [load for load, lead in leads.items() if lead > 0]
    low = max(ahead, default=None)
    high = min((load for load, lead in leads.items() if lead <= 0 and (low is None or load > low)), default=None)
    while low is not None and high is not None and _between(grid, low, high) not in (low, high):
        load = _between(grid, low, high)
        here = grid.placed(load, place)
        [best] = tuned(search, [here], bench)
        rows = {name: bench.rows(replications(mine, grid.num_runs)) for name, mine in best.items()}
        low, high = (load, high) if _split_lead(grid, _judged(grid, load, place, rows, best)) > 0 else (low, load)
    return Border(place, low, high)


def _between(grid: Grid, low: float, high: float) -> float:
    """The geometric mean of two loads: a whole number of requests, or a rate unless they are close."""
    middle = math.sqrt(low * high)
    if grid.request_rate:
        return middle if high / low > NEAR else low
    return float(min(max(round(middle), low + 1), high - 1)) if high - low > 1 and high / low > NEAR else low


def _split_lead(grid: Grid, cell: Cell) -> float:
    """Lead of the best fleet with lanes on several GPUs over the best without, in the goal's direction."""
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
