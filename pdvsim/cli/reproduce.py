"""`pdvsim reproduce`: simulate the published PD-Verify tables with the rules of their programs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdvsim.cli.command import Command
from pdvsim.common.progress import Progress
from pdvsim.common.version import __version__
from pdvsim.published import TableName
from pdvsim.sim.limits import NumRuns, Placed, Seed, check_ranges

DEFAULT_RUNS: dict[TableName, int] = {"three-way": 20, "poisson-30s": 16, "model-comparison": 20}


@dataclass(frozen=True)
class ReproduceCommand(Command):
    """Simulate a published table with its own programs and rules, and print it next to the published one."""

    table: Placed[TableName]
    """The published table. model-comparison runs the three-way programs on three pairs."""
    num_runs: NumRuns | None = None
    """Replications: orders of the requests for three-way and model-comparison (default: 20), draws of acceptance for
    poisson-30s (default: 16)."""
    seed: Seed = 0
    """Seed of the replications; the arrivals of poisson-30s are the published ones."""
    all_metrics: bool = False
    """Print all metrics, as --json always does."""
    output: str | None = None
    """Folder for cells.parquet and reproduce.json; default: results/reproduce-TABLE-DATE-TIME."""

    def __post_init__(self) -> None:
        check_ranges(self)

    def execute(self) -> int:
        from pdvsim.bench import output
        from pdvsim.published.reproduce import reproduce, reproduction_text
        from pdvsim.published.tables import load_published

        folder = output.check_folder(Path(self.output or f"results/reproduce-{self.table}-{output.now()}"))
        files = [output.check_file(folder / name) for name in ("cells.parquet", "reproduce.json")]
        runs = self.num_runs or DEFAULT_RUNS[self.table]
        published = load_published()
        with Progress(len(published.rows(self.table.replace("-", "_"))), "rows", self.json) as progress:
            reproduction = reproduce(self.table, published, runs, self.seed, progress.update)
        cut = reproduction.interrupted
        if cut and not reproduction.cells:
            raise KeyboardInterrupt

        import pandas as pd

        found: dict[str, Any] = {"pdvsim_version": __version__, "seed": self.seed} | reproduction.document()
        document = output.dumps(found)
        print(document if self.json else reproduction_text(reproduction, self.all_metrics))
        contents = [output.parquet(pd.DataFrame(found["cells"])), (document + "\n").encode()]
        return output.save(dict(zip(files, contents, strict=True)), "only the finished rows" if cut else "")
