"""Reproduction of the published tables: published against simulated, cell by cell.

Not modelled: the GPU memory and utilisation columns; the luck of a single measured run (a simulated figure is the mean
over replications, a published one is one run).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from pdvsim.bench.join import grouped
from pdvsim.published.poisson import PoissonModel
from pdvsim.published.program import Score
from pdvsim.published.tables import POISSON_PAIRS, SOURCE, CalibratedModel, Constant, Published
from pdvsim.published.three_way import ComparisonModel, ThreeWayModel
from pdvsim.view.table import cell, grid, rows_table

TableName = Literal["three-way", "poisson-30s", "model-comparison"]


MODELS: dict[TableName, type[CalibratedModel]] = {
    "three-way": ThreeWayModel,
    "poisson-30s": PoissonModel,
    "model-comparison": ComparisonModel,
}
LATENCY_TARGETS = {"request_latency_p95": 0.15, "request_latency_mean": 0.15}
TARGETS = {  # metric: largest error aimed at
    "three-way": LATENCY_TARGETS,
    "poisson-30s": {"throughput_completed_only": 0.12},
    "model-comparison": LATENCY_TARGETS,
}
SHOWN = {
    "three-way": ("request_latency_p95", "request_latency_mean", "total_time"),
    "poisson-30s": ("throughput_completed_only",),
    "model-comparison": ("request_latency_p95", "request_latency_mean", "throughput"),
}
LEAST_COMPLETIONS = 10  # for comparing a throughput


@dataclass(frozen=True)
class TableCell:
    """One figure, published and simulated."""

    pair: str
    arch: str
    concurrency: int
    requests: int
    metric: str
    unit: str
    published: float
    simulated: float
    spread: float  # standard deviation over replications; a published figure is one of them
    completions: float  # requests that the simulated figure rests on, mean over replications
    used_for_calibration: bool

    @property
    def error(self) -> float:
        """Simulated over published, less one."""
        return self.simulated / self.published - 1

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"error": self.error}


@dataclass(frozen=True)
class Reproduction:
    """A reproduced table."""

    table: TableName
    constants: tuple[Constant, ...]
    cells: tuple[TableCell, ...]
    replications: int
    interrupted: bool = False  # Ctrl-C: the cells are those of the rows that were finished

    def targeted(self) -> list[TableCell]:
        """The cells that have a target."""
        metrics, least = TARGETS[self.table], LEAST_COMPLETIONS if self.table == "poisson-30s" else 1
        return [cell for cell in self.cells if cell.metric in metrics and cell.completions >= least]

    def missed(self) -> list[TableCell]:
        """The cells that miss their target."""
        return [cell for cell in self.targeted() if abs(cell.error) > TARGETS[self.table][cell.metric]]

    def row(self, pair: str, arch: str, metric: str) -> list[TableCell]:
        """One metric of one program, over the loads."""
        return [cell for cell in self.cells if (cell.pair, cell.arch, cell.metric) == (pair, arch, metric)]

    def winners(self, metric: str) -> dict[tuple[str, int], tuple[str, str]]:
        """The architecture with the least published and with the least simulated `metric`, by pair and concurrency."""
        scenarios = grouped((c for c in self.cells if c.metric == metric), lambda c: (c.pair, c.concurrency))
        return {
            scenario: (min(row, key=lambda c: c.published).arch, min(row, key=lambda c: c.simulated).arch)
            for scenario, row in scenarios.items()
        }

    def document(self) -> dict[str, Any]:
        """All of it, as one document."""
        return {
            "table": self.table,
            "source": SOURCE,
            "interrupted": self.interrupted,
            "replications": self.replications,
            "constants": [asdict(constant) for constant in self.constants],
            "cells": [cell.document() for cell in self.cells],
            "missed": [cell.document() for cell in self.missed()],
        }


def reproduce(
    table: TableName, published: Published, runs: int, seed: int = 0, progress: Callable[[int], None] | None = None
) -> Reproduction:
    """Simulate every row of a table, `runs` times; `progress` is called with the rows done. Ctrl-C keeps those."""
    name = table.replace("-", "_")
    model = MODELS[table](published)
    by_row: dict[tuple[str, str, int], list[Score]] = {}
    interrupted = False
    try:
        for row in published.rows(name):
            by_row[row[:3]] = model.scores(row, runs, seed)
            if progress:
                progress(len(by_row))
    except KeyboardInterrupt:
        interrupted = True
    cells = []
    for key, figure in published.figures.items():
        of_row = by_row.get((key.pair, key.arch, key.concurrency), []) if key.table == name else []
        values = [score[key.metric] for score in of_row if key.metric in score]
        if not values:
            continue
        known = [value for value in values if not np.isnan(value)]
        # the latencies, the total and the throughput of a single request are one figure, which is calibrated on
        same_figure = table == "three-way" and figure.requests == 1
        cells.append(
            TableCell(
                key.pair, key.arch, key.concurrency, figure.requests, key.metric, figure.unit, figure.value,
                simulated=float(np.mean(known)) if known else float("nan"),
                spread=float(np.std(known, ddof=1)) if len(known) > 1 else 0.0,
                completions=float(np.mean([score.get("completions", figure.requests) for score in of_row])),
                used_for_calibration=key in published.calibrated_on or same_figure,
            )
        )  # fmt: skip
    return Reproduction(table, tuple(model.constants), tuple(cells), runs, interrupted)


def reproduction_text(reproduction: Reproduction, every: bool = False) -> str:
    """Constants, and cells with their errors; `every` shows all metrics."""
    shown = [c for c in reproduction.cells if every or c.metric in SHOWN[reproduction.table]]
    blocks = [
        f"{reproduction.table}: {SOURCE}, and a simulation of the programs",
        _constants(reproduction.constants),
        rows_table([_cell_row(c, reproduction) for c in shown]),
    ]
    if not reproduction.interrupted:
        blocks.append("\n".join(_verdict(reproduction)))
    return "\n\n".join(blocks)


def _constants(constants: tuple[Constant, ...]) -> str:
    rows = []
    for constant in constants:
        value = constant.value if isinstance(constant.value, str) else f"{constant.value * 1e3:.3f} ms"
        cells = dict.fromkeys(f"{key.arch} C={key.concurrency} {key.metric}" for key in constant.cells)
        rows.append([constant.name, value, constant.meaning, ", ".join(cells)])
    return grid(["constant", "value", "meaning", "calibrated on"], rows)


def _cell_row(figure: TableCell, reproduction: Reproduction) -> dict[str, str]:
    several = len({c.pair for c in reproduction.cells}) > 1
    mark = "calibrated" if figure.used_for_calibration else ""
    if figure in reproduction.missed():
        mark = "missed"
    digits = 3 if figure.unit == "req/s" else 2
    return {
        **({"pair": figure.pair} if several else {}),
        "C": str(figure.concurrency),
        "arch": figure.arch,
        "metric": figure.metric,
        "published": cell(figure.published, digits),
        "simulated": cell(figure.simulated, digits),
        "error %": cell(figure.error, 1, 100, "+"),
        "spread %": cell(figure.spread / figure.published, 1, 100),
        "completions": cell(figure.completions, 1),
        "": mark,
    }


def _verdict(reproduction: Reproduction) -> list[str]:
    """The targets and the results."""
    targets = TARGETS[reproduction.table]
    predicted = [c for c in reproduction.targeted() if not c.used_for_calibration]
    worst = max(predicted, key=lambda c: abs(c.error))
    many = f" on {LEAST_COMPLETIONS} completions or more" if reproduction.table == "poisson-30s" else ""
    lines = [
        f"{' and '.join(targets)}{many}: {len(predicted)} cells not used for calibration, "
        f"{len(predicted) - len(reproduction.missed())} within {next(iter(targets.values())):.0%}; "
        f"worst {worst.error:+.1%} ({worst.pair}, {worst.arch}, C={worst.concurrency})",
        f"simulated: mean over {reproduction.replications} replications; "
        "spread: their standard deviation (each published value is a single run)",
    ]
    for metric in targets if reproduction.table != "poisson-30s" else ():
        scenarios = reproduction.winners(metric)
        alike = sum(theirs == ours for theirs, ours in scenarios.values())
        lines.append(f"lowest {metric}: the published architecture in {alike} of {len(scenarios)} scenarios")
    for label in POISSON_PAIRS if reproduction.table == "poisson-30s" else ():
        row = reproduction.row(label, "pd", "throughput_completed_only")
        theirs, ours = max(row, key=lambda c: c.published), max(row, key=lambda c: c.simulated)
        most = max(c.completions for c in row if c.concurrency >= 64)
        lines.append(
            f"{label}: pd peaks at C={ours.concurrency} (published: {theirs.concurrency}); "
            f"at C >= 64 it completes at most {most:.1f} requests"
        )
    return lines
