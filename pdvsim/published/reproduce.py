"""Reproduction of the published tables: published against simulated, cell by cell.

Not modelled: the GPU memory and utilisation columns; the luck of a single measured run (a simulated figure is the mean
over replications, a published one is one run).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pdvsim.bench.join import grouped
from pdvsim.published import TableName
from pdvsim.published.models import CalibratedModel, ComparisonModel, PoissonModel, ThreeWayModel
from pdvsim.published.program import Score
from pdvsim.published.tables import POISSON_PAIRS, SOURCE, Constant, Published
from pdvsim.view.table import TextTable, cell, grid


@dataclass(frozen=True)
class Aim:
    """What is simulated for a table, what is shown of it, and the largest errors aimed at by metric."""

    model: type[CalibratedModel]
    shown: tuple[str, ...]
    targets: dict[str, float]
    least_completions: int = 1  # for comparing a figure


LATENCY_TARGETS = {"request_latency_p95": 0.15, "request_latency_mean": 0.15}
THROUGHPUT = "throughput_completed_only"
AIMS: dict[TableName, Aim] = {
    "three-way": Aim(ThreeWayModel, (*LATENCY_TARGETS, "total_time"), LATENCY_TARGETS),
    "poisson-30s": Aim(PoissonModel, (THROUGHPUT,), {THROUGHPUT: 0.12}, 10),
    "model-comparison": Aim(ComparisonModel, (*LATENCY_TARGETS, "throughput"), LATENCY_TARGETS),
}


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
        aim = AIMS[self.table]
        return [c for c in self.cells if c.metric in aim.targets and c.completions >= aim.least_completions]

    def missed(self) -> list[TableCell]:
        """The cells that miss their target."""
        return [cell for cell in self.targeted() if abs(cell.error) > AIMS[self.table].targets[cell.metric]]

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
        cells = {name: [asdict(c) | {"error": c.error} for c in part]
                 for name, part in (("cells", self.cells), ("missed", self.missed()))}  # fmt: skip
        return {
            "table": self.table, "source": SOURCE, "interrupted": self.interrupted, "replications": self.replications,
            "constants": list(map(asdict, self.constants)), **cells,
        }  # fmt: skip


def reproduce(
    table: TableName, published: Published, runs: int, seed: int = 0, progress: Callable[[int], None] | None = None
) -> Reproduction:
    """Simulate every row of a table, `runs` times; `progress` is called with the rows done. Ctrl-C keeps those."""
    name = table.replace("-", "_")
    model = AIMS[table].model(published)
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
                completions=float(np.mean([score["completions"] for score in of_row])),
                used_for_calibration=key in published.calibrated_on or same_figure,
            )
        )  # fmt: skip
    return Reproduction(table, tuple(model.constants), tuple(cells), runs, interrupted)


def reproduction_text(reproduction: Reproduction, every: bool = False) -> str:
    """Constants, and cells with their errors; `every` shows all metrics."""
    shown, missed = AIMS[reproduction.table].shown, reproduction.missed()
    several = len({c.pair for c in reproduction.cells}) > 1
    constants = [
        [
            constant.name,
            constant.value if isinstance(constant.value, str) else f"{constant.value * 1e3:.3f} ms",
            constant.meaning,
            ", ".join(dict.fromkeys(f"{key.arch} C={key.concurrency} {key.metric}" for key in constant.cells)),
        ]
        for constant in reproduction.constants
    ]
    rows = [
        {
            **({"pair": c.pair} if several else {}),
            "C": str(c.concurrency),
            "arch": c.arch,
            "metric": c.metric,
            "published": cell(c.published, digits := 3 if c.unit == "req/s" else 2),
            "simulated": cell(c.simulated, digits),
            "error %": cell(c.error, 1, 100, "+"),
            "spread %": cell(c.spread / c.published, 1, 100),
            "completions": cell(c.completions, 1),
            "": "missed" if c in missed else "calibrated" if c.used_for_calibration else "",
        }
        for c in reproduction.cells
        if every or c.metric in shown
    ]
    blocks = [
        f"{reproduction.table}: {SOURCE}, and a simulation of the programs",
        grid(["constant", "value", "meaning", "calibrated on"], constants),
        str(TextTable(rows)),
    ]
    return "\n\n".join(blocks if reproduction.interrupted else [*blocks, "\n".join(_verdict(reproduction))])


def _verdict(reproduction: Reproduction) -> list[str]:
    """The targets and the results."""
    aim = AIMS[reproduction.table]
    targets, poisson = aim.targets, aim.model is PoissonModel
    predicted = [c for c in reproduction.targeted() if not c.used_for_calibration]
    worst = max(predicted, key=lambda c: abs(c.error))
    many = f" on {aim.least_completions} completions or more" if poisson else ""
    lines = [
        f"{' and '.join(targets)}{many}: {len(predicted)} cells not used for calibration, "
        f"{len(predicted) - len(reproduction.missed())} within {next(iter(targets.values())):.0%}; "
        f"worst {worst.error:+.1%} ({worst.pair}, {worst.arch}, C={worst.concurrency})",
        f"simulated: mean over {reproduction.replications} replications; "
        "spread: their standard deviation (each published value is a single run)",
    ]
    for metric in () if poisson else targets:
        scenarios = reproduction.winners(metric)
        alike = sum(theirs == ours for theirs, ours in scenarios.values())
        lines.append(f"lowest {metric}: the published architecture in {alike} of {len(scenarios)} scenarios")
    for label in POISSON_PAIRS if poisson else ():
        row = reproduction.row(label, "pd", THROUGHPUT)
        theirs, ours = max(row, key=lambda c: c.published), max(row, key=lambda c: c.simulated)
        most = max(c.completions for c in row if c.concurrency >= 64)
        lines.append(
            f"{label}: pd peaks at C={ours.concurrency} (published: {theirs.concurrency}); "
            f"at C >= 64 it completes at most {most:.1f} requests"
        )
    return lines
