"""Reproduction of the published tables: published against simulated, cell by cell.

Not modelled: the GPU memory and utilisation columns; the luck of a single measured run (a simulated figure is the mean
over replications, a published one is one run).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol

import numpy as np

from pdvsim.published.job import Score
from pdvsim.published.model_comparison import ComparisonModel
from pdvsim.published.poisson import PoissonModel
from pdvsim.published.tables import Constant, Published, TableRow
from pdvsim.published.three_way import ThreeWayModel

TableName = Literal["three-way", "poisson-30s", "model-comparison"]


class TableModel(Protocol):
    """The programs of a table, calibrated."""

    constants: list[Constant]

    def scores(self, row: TableRow, runs: int, seed: int) -> list[Score]: ...


MODELS: dict[TableName, Callable[[Published], TableModel]] = {
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
ENOUGH = 10  # least completions for comparing a throughput


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
        metrics, least = TARGETS[self.table], ENOUGH if self.table == "poisson-30s" else 1
        return [cell for cell in self.cells if cell.metric in metrics and cell.completions >= least]

    def missed(self) -> list[TableCell]:
        """The cells that miss their target."""
        return [cell for cell in self.targeted() if abs(cell.error) > TARGETS[self.table][cell.metric]]

    def row(self, pair: str, arch: str, metric: str) -> list[TableCell]:
        """One metric of one program, over the loads."""
        return [cell for cell in self.cells if (cell.pair, cell.arch, cell.metric) == (pair, arch, metric)]

    def winners(self, metric: str) -> dict[tuple[str, int], tuple[str, str]]:
        """By pair and concurrency: the architecture with the least published and the least simulated `metric`."""
        scenarios: dict[tuple[str, int], list[TableCell]] = {}
        for cell in self.cells:
            if cell.metric == metric:
                scenarios.setdefault((cell.pair, cell.concurrency), []).append(cell)
        return {
            scenario: (min(row, key=lambda c: c.published).arch, min(row, key=lambda c: c.simulated).arch)
            for scenario, row in scenarios.items()
        }


def reproduce(
    table: TableName,
    published: Published,
    runs: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
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
        of_row = by_row.get((key.pair, key.arch, key.concurrency)) if key.table == name else None
        if of_row is None or key.metric not in of_row[0]:
            continue
        values = [score[key.metric] for score in of_row]
        values = [value for value in values if not np.isnan(value)]
        # the latencies, the total and the throughput of a single request are one figure, which is calibrated on
        same_figure = table == "three-way" and figure.requests == 1
        completions = float(np.mean([score.get("completions", figure.requests) for score in of_row]))
        cells.append(
            TableCell(
                key.pair, key.arch, key.concurrency, figure.requests, key.metric, figure.unit,
                figure.value,
                float(np.mean(values)) if values else float("nan"),
                float(np.std(values, ddof=1)) if len(values) > 1 else 0.0,
                completions,
                key in published.calibrated_on or same_figure,
            )
        )  # fmt: skip
    return Reproduction(table, tuple(model.constants), tuple(cells), runs, interrupted)
