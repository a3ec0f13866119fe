"""Capacities and winner maps as text and as documents."""

from __future__ import annotations

import math
from typing import Any

from pdvsim import __version__
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.contest import Contest
from pdvsim.decide.goal import NAMES
from pdvsim.decide.winners import Cell, Place, WinnerMap, size_ratio
from pdvsim.study import output
from pdvsim.study.stats import Interval
from pdvsim.view.table import cell, founded, grid, most_outside


def capacity_document(found: Capacities) -> dict[str, Any]:
    """Everything that was asked and found."""
    contests = {str(gpus): contest_document(held) for gpus, held in found.contests().items()}
    return {
        "pdvsim_version": __version__,
        "interrupted": found.interrupted,
        "runs": found.runs,
        "plan": output.settings(found.plan),
        "gpu_hour_usd": found.gpu_hour_usd,
        "summary": found.summary(),
        "most_by_gpus": contests,
        "searches": found.rows,
    }


def contest_document(held: Contest) -> dict[str, Any]:
    """Who is best, by how much over whom, and how sure."""
    return {
        "best": held.best,
        "sure": held.sure,
        "not_told_apart": list(held.unsure),
        "confidence_of_each": held.confidence,
        "values": held.values,
        "leads": {name: {"difference": held.differences[name], "relative": held.leads[name]} for name in held.behind},
    }


def capacity_table(found: Capacities) -> str:
    """One row per number of GPUs and architecture, what holds most, and how the figures came about."""
    if not found.rows:
        return "no search is done"
    priced = found.gpu_hour_usd is not None
    header = ["GPUs", "arch", "req/s held", "per GPU", "out tok/s", *(["$/M out tok"] if priced else []), "limited by"]
    rows = []
    for entry in found.summary():
        rate, gpus = entry["rate"], entry["gpus"]
        row = [str(gpus), entry["arch"], positive(rate), positive(rate, scale=1 / gpus)]
        row.append(positive(entry["output_tokens_per_s"], 0))
        row += [positive(entry["usd_per_million_output_tokens"], 3)] if priced else []
        if not entry["held_in"]:
            row[2:] = ["none", *(["-"] * (len(row) - 3))]
        rows.append([*row, _limited(entry)])
    return "\n".join(
        [grid(header, rows), *(_most(gpus, held) for gpus, held in found.contests().items()), *_notes(found)]
    )


def _limited(entry: dict[str, Any]) -> str:
    missed = entry["replications"] - entry["held_in"]
    if not entry["held_in"]:
        return f"{entry['limited_by']}, even at a trickle"
    return f"{entry['limited_by']}" + (f" (no rate held in {missed} of {entry['replications']})" if missed else "")


def _most(gpus: int, held: Contest) -> str:
    """One sentence on who holds most."""
    where = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    second = held.second
    assert second is not None
    lead = f"{lead_text(held, second)} ({held.differences[second].mean:+.2f} req/s) over {second}"
    if held.values[held.best].mean == 0:
        return f"{where}: none of them holds the service levels"
    if held.sure:
        return f"{where}: {held.best} holds most, {lead}"
    if math.isnan(held.leads[second].half_width):
        return f"{where}: {held.best} held most, {lead}, in the one replication made; one seed tells no more"
    return f"{where}: {held.best} is not told apart from {', '.join(held.unsure)}; {lead}"


def _notes(found: Capacities) -> list[str]:
    plan, first = found.plan, found.rows[0]
    levels = " and ".join(f"{name} <= {level:g} ms" for name, level in plan.goal.levels_ms.items())
    notes = [
        f"held: {plan.goal.attainment:.0%} of the requests have {levels}, and the queue does not grow",
        f"runs of {plan.base.traffic.num_prompts} requests a server, the first {plan.warmup_share:.0%} left out; "
        f"searched to {plan.tolerance:.0%} from below, smaller leads do not count; {found.runs} runs",
    ]
    if plan.num_runs > 1:
        contests = found.contests()
        family = (
            f"; differences are paired by seed, each at {next(iter(contests.values())).confidence:.1%}"
            if contests
            else ""
        )
        notes.append(f"±: 95% confidence over {plan.num_runs} replications{family}")
    if any(vague(entry["rate"]) for entry in found.summary()):
        notes.append(
            "(0 to ...): the 95% interval, wider than the mean: these replications tell little; try more --num-runs"
        )
    if any("queue" in row["limited_by"] for row in found.rows):
        notes.append(
            "queue: it grew; in a run that is short against its requests that may be its start: try more --num-prompts"
        )
    return [*notes, founded(first), *most_outside(found.rows)]


def map_document(found: WinnerMap) -> dict[str, Any]:
    """Everything that was asked and found."""
    cells = [
        {
            "load": cell.load,
            "place": cell.place,
            "winner": cell.winner,
            "sure": cell.sure,
            "did_not_keep_up": list(cell.behind_load),
            "contest": contest_document(cell.contest) if cell.contest else None,
        }
        for cell in found.cells
    ]
    return {
        "pdvsim_version": __version__,
        "interrupted": found.interrupted,
        "objective": found.grid.goal.objective,
        "comparisons": found.grid.comparisons,
        "grid": output.settings(found.grid),
        "cells": cells,
        "outside_measured": next(iter(most_outside(found.rows)), None) if found.rows else None,
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
    first = found.rows[0]
    confidence = next((cell.contest.confidence for cell in found.cells if cell.contest), math.nan)
    whose = "the map as a whole" if grid_.family == "map" else "each cell alone, not for the map"
    return "\n".join(
        [
            grid(header, rows),
            f"best {NAMES[grid_.goal.objective]} and its lead over the second",
            f"(in brackets): not told apart from those named, or not by {grid_.indifference:.0%}",
            f"{grid_.num_runs} seeds a cell, paired; 95% confidence for {whose}, {confidence:.2%} for each comparison",
            founded(first),
            *most_outside(found.rows),
        ]
    )


def place_text(place: Place) -> str:
    """An acceptance rate, or a pair with the ratio of its sizes."""
    return f"{place} ({size_ratio(place):.2f})" if isinstance(place, str) else f"{place:g}"


def margin_text(cell: Cell) -> str:
    """The winner's lead, as a share of the second's figure."""
    if cell.contest is None or cell.contest.second is None:
        return ""
    return percent(cell.contest.margin)


def positive(value: Interval, decimals: int = 2, scale: float = 1.0) -> str:
    """A cell of what cannot be negative: an interval that would reach below 0 is given by its ends, from 0."""
    if not vague(value):
        return cell(value, decimals, scale)
    return f"{cell(value.mean, decimals, scale)} (0 to {cell(value.mean + value.half_width, decimals, scale)})"


def vague(value: Interval) -> bool:
    """Whether the interval reaches below 0."""
    return value.half_width > value.mean


def lead_text(held: Contest, other: str) -> str:
    """The best's lead over another as a share of it, with its interval."""
    lead = held.leads[other]
    return percent(lead.mean) if lead.mean >= 10 else f"{cell(lead, 1, 100, '+')} %"


def percent(share: float) -> str:
    """A lead in percent; one over next to nothing is only called large."""
    return f"{share:+.1%}" if share < 10 else "+>999%"


def alike_text(cell: Cell) -> str:
    """Who is not told apart from the winner."""
    unsure = cell.contest.unsure if cell.contest else ()
    return f"≈ {', '.join(unsure[:2])}{', …' if len(unsure) > 2 else ''}"


def _won(cell: Cell | None) -> str:
    if cell is None:
        return ""
    if cell.winner is None:
        return "nobody keeps up"
    text = f"{cell.winner} {margin_text(cell) or 'alone'}"
    return text if cell.sure else f"({text} {alike_text(cell)})"
