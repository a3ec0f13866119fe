"""Measured pairs of servers without and with speculation against simulations of both: the evidence for ratios."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from pdvsim.bench.pool import Backend, Item, Row, finished
from pdvsim.bench.stats import interval
from pdvsim.calibration.validate.speculation import (
    LengthChoice,
    MeasuredPair,
    PredictedPair,
    best_lengths,
    error_cells,
    predicted,
    read_pairs,
)
from pdvsim.common.progress import Progress
from pdvsim.sim.config import Experiment
from pdvsim.view.table import grid, percent_cell

CONCURRENCIES = (1, 8, 32, 128)  # up to which a group of rows reaches


def compared_pairs(
    engine: str, held_out: bool, most: int | None, jobs: int | None, quiet: bool
) -> tuple[dict[str, Any], str]:
    """The document and the text of measured pairs, of one engine or all, and what is predicted for them."""
    pairs = [pair for pair in read_pairs() if pair.held_out == held_out and engine in ("all", pair.drafted.engine)]
    if most is not None:
        pairs = pairs[:: max(1, len(pairs) // most)][:most]
    rows, failed = finished_rows(_task, pairs, "pairs", jobs, quiet)
    failures = {pairs[at].setting: reason for at, reason in failed.items()}
    predictions = [PredictedPair(pairs[at], row["sides"]) for at, row in sorted(rows.items())]
    choices = best_lengths(predictions)
    document = {
        "held_out": held_out,
        "pairs": [_row(one) for one in predictions],
        "groups": {
            name: {key: error_cells(group) for key, group in _grouped(predictions, key_of).items()}
            for name, key_of in GROUPS.items()
        },
        "lengths": [choice.__dict__ for choice in choices],
        "failures": failures,
    }
    return document, _text(predictions, choices, failures, held_out)


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


def finished_rows(
    task: Callable[[int, Any], dict[str, Any]], points: Sequence[Any], what: str, jobs: int | None, quiet: bool
) -> tuple[dict[int, dict[str, Any]], dict[int, str]]:
    """The rows of points that were simulated, by number, and why others were not."""
    items: list[Item] = list(enumerate(points))
    rows, failures = {}, {}
    with Progress(len(points), what, quiet) as progress:
        for number, outcome in enumerate(finished(task, items, Backend(jobs)), 1):
            if outcome.row is None:
                failures[outcome.index] = outcome.reason
            else:
                rows[outcome.index] = outcome.row
            progress.update(number)
    return rows, failures


def _task(index: int, pair: MeasuredPair) -> dict[str, Any]:
    return {"sides": predicted(pair).predicted}


def _row(one: PredictedPair) -> dict[str, Any]:
    """A pair as the document has it."""
    side = one.pair.drafted
    return {
        "engine": side.engine, "version": side.version, "card": side.card, "pair": side.pair,
        "method": one.pair.method_class, "k": side.k, "concurrency": side.concurrency, "measured": one.pair.speedup,
        "predicted": one.speedup, "source": one.pair.source,
    }  # fmt: skip


def _concurrency(one: PredictedPair) -> str:
    groups = (f"up to {most}" for most in CONCURRENCIES if one.pair.drafted.concurrency <= most)
    return next(groups, f"above {CONCURRENCIES[-1]}")


GROUPS: dict[str, Callable[[PredictedPair], str]] = {
    "engine and method": lambda one: f"{one.pair.drafted.engine} {one.pair.method_class}",
    "draft length": lambda one: f"k={one.pair.drafted.k}",
    "concurrency": _concurrency,
    "all": lambda one: "all",
}


def _grouped(
    predictions: Sequence[PredictedPair], key_of: Callable[[PredictedPair], str]
) -> dict[str, list[PredictedPair]]:
    groups: dict[str, list[PredictedPair]] = {}
    for one in predictions:
        groups.setdefault(key_of(one), []).append(one)
    return dict(sorted(groups.items()))


def _text(
    predictions: Sequence[PredictedPair], choices: Sequence[LengthChoice], failures: dict[str, str], held_out: bool
) -> str:
    which = "held-out" if held_out else "visible"
    tables = [f"Speed-up by speculation, predicted against measured: {len(predictions)} {which} pairs of servers"]
    head = ("", "pairs", "median", "95%", "signed", "sign right", "plain", "drafted")
    for name, key_of in GROUPS.items():
        lines = []
        for key, group in _grouped(predictions, key_of).items():
            cells = error_cells(group)
            figures = [cells[f"tpot_ms_{side}"] or cells[f"throughput_{side}"] for side in ("plain", "drafted")]
            lines.append([
                key, str(cells["pairs"]), percent_cell(cells["ratio_median"]), percent_cell(cells["ratio_95"]),
                f"{cells['ratio_signed']:+.1%}", f"{cells['signs']} of {cells['pairs']}",
                *("" if figure is None else percent_cell(figure) for figure in figures),
            ])  # fmt: skip
        tables.append(grid((name, *head[1:]), lines))
    if choices:
        right = sum(choice.measured == choice.predicted for choice in choices)
        lost = f"the predicted one loses {max(choice.loss for choice in choices):.1%} at most"
        tables.append(f"Best draft length (0 among them): right in {right} of {len(choices)} settings; {lost}")
    tables += [f"not simulated: {setting}: {why}" for setting, why in failures.items()]
    tables.append(
        "Errors of the ratio; of TPOT, else throughput, without and with speculation (medians of absolute values)"
    )
    return "\n\n".join(tables)
