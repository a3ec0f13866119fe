"""Measured pairs of servers without and with speculation against simulations of both: the evidence for ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pdvsim.bench.pool import Row
from pdvsim.bench.stats import interval
from pdvsim.calibration.join import grouped, simulations, some_of
from pdvsim.calibration.validate.speculation import (
    SIDES,
    LengthChoice,
    MeasuredPair,
    PredictedPair,
    best_lengths,
    cost,
    error_cells,
    figures_of,
    joined,
    read_pairs,
)
from pdvsim.sim.config import Experiment
from pdvsim.view.table import grid, percent_cell

CONCURRENCIES = (1, 8, 32, 128)  # up to which a group of rows reaches


def compared_pairs(
    engine: str, held_out: bool, most: int | None, jobs: int | None, quiet: bool
) -> tuple[dict[str, Any], str, str]:
    """Measured pairs, of one engine or all, and what is predicted for them."""
    pairs = [pair for pair in read_pairs() if pair.held_out == held_out and engine in ("all", pair.drafted.engine)]
    pairs = list(some_of(pairs, most))
    done = simulations(_task, pairs, "pairs", jobs, quiet, cost)
    failures = {pairs[at].setting: reason for at, reason in done.failures.items()}
    predictions = [joined(pairs[at], row["sides"]) for at, row in sorted(done.rows.items())]
    choices = best_lengths(predictions)
    groups = {
        name: {key: error_cells(group) for key, group in sorted(grouped(predictions, label).items())}
        for name, label in GROUPS.items()
    }
    document = {
        "held_out": held_out,
        "pairs": [_row(one) for one in predictions],
        "groups": groups,
        "lengths": [choice.__dict__ for choice in choices],
        "failures": failures,
    }
    which = f"{len(predictions)} {'held-out' if held_out else 'visible'}"
    return document, _text(groups, choices, failures, which), done.unfinished


def nearest_pair(candidate: Experiment | None, rows: Sequence[Row]) -> list[str]:
    """The measured pair of servers that is most like a candidate that drafts, as a line; none if there is none."""
    if candidate is None or candidate.hardware.predicted_engine == "pdvsim":  # measured by real runs of its own
        return []
    hardware, method, k = candidate.hardware, candidate.server.drafted_by, max(1, candidate.longest_draft)
    clients = max(1.0, interval(float(row["request_throughput"]) * row["mean_e2el_ms"] / 1e3 for row in rows).mean)
    pairs = [pair for pair in read_pairs() if (pair.drafted.engine, pair.method) == (hardware.predicted_engine, method)]

    def distance(pair: MeasuredPair) -> tuple[bool, bool, float]:
        side = pair.drafted
        off = abs(math.log(side.k / k)) + abs(math.log(side.concurrency / clients))
        return side.pair.partition(":")[2] != candidate.pair.target.name, side.card != hardware.gpu, off

    for pair in sorted(pairs, key=distance)[:1]:
        side = pair.drafted
        where = f"{side.engine} {side.version} on {side.card}, {side.pair}, k={side.k}, concurrency {side.concurrency}"
        return [f"measured nearest to this: {where}: {pair.speedup:.2f} times as fast with drafts ({pair.source})"]
    return [f"no pair of {hardware.predicted_engine} servers with and without {method} drafts was measured"]


def _task(index: int, pair: MeasuredPair) -> dict[str, Any]:
    return {"sides": (figures_of(pair.plain), figures_of(pair.drafted))}


def _row(one: PredictedPair) -> dict[str, Any]:
    """A pair as the document has it."""
    side = one.of.drafted
    return {
        "engine": side.engine, "version": side.version, "card": side.card, "pair": side.pair,
        "method": one.of.method_class, "k": side.k, "concurrency": side.concurrency,
        "measured": one.measured["speedup"], "predicted": one.predicted["speedup"], "source": one.of.source,
    }  # fmt: skip


def _concurrency(one: PredictedPair) -> str:
    groups = (f"up to {most}" for most in CONCURRENCIES if one.of.drafted.concurrency <= most)
    return next(groups, f"above {CONCURRENCIES[-1]}")


GROUPS: dict[str, Callable[[PredictedPair], str]] = {
    "engine and method": lambda one: f"{one.of.drafted.engine} {one.of.method_class}",
    "draft length": lambda one: f"k={one.of.drafted.k}",
    "concurrency": _concurrency,
    "all": lambda one: "all",
}


def _text(
    groups: Mapping[str, Mapping[str, Mapping[str, Any]]],
    choices: Sequence[LengthChoice],
    failures: Mapping[str, str],
    pairs: str,
) -> str:
    tables = [f"Speed-up by speculation, predicted against measured: {pairs} pairs of servers"]
    head = ("pairs", "median", "95%", "signed", "sign right", *SIDES)
    for name, parts in groups.items():
        lines = []
        for key, cells in parts.items():
            figures = [cells[f"tpot_ms_{side}"] or cells[f"throughput_{side}"] for side in SIDES]
            lines.append([
                key, str(cells["pairs"]), percent_cell(cells["ratio_median"]), percent_cell(cells["ratio_95"]),
                percent_cell(cells["ratio_signed"], "+"), f"{cells['signs']} of {cells['pairs']}",
                *("" if figure is None else percent_cell(figure) for figure in figures),
            ])  # fmt: skip
        tables.append(grid((name, *head), lines))
    if choices:
        right = sum(choice.measured == choice.predicted for choice in choices)
        lost = f"the predicted one loses {max(choice.loss for choice in choices):.1%} at most"
        tables.append(f"Best draft length (0 among them): right in {right} of {len(choices)} settings; {lost}")
    tables += [f"not simulated: {setting}: {why}" for setting, why in failures.items()]
    tables.append(
        "Errors of the ratio; of TPOT, else throughput, without and with speculation (medians of absolute values)"
    )
    return "\n\n".join(tables)
