"""`pdvsim reproduce`: simulate the published PD-Verify tables with the rules of their programs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.common.options import Placed, parse
from pdvsim.common.progress import Progress
from pdvsim.common.version import __version__
from pdvsim.sim.hardware.models import gpu
from pdvsim.sim.limits import check_ranges

if TYPE_CHECKING:
    from pdvsim.published.fair import Fair
    from pdvsim.published.reproduce import Reproduction

DEFAULT_RUNS = {"three-way": 20, "poisson-30s": 16, "model-comparison": 20}
FAIR_RUNS = 4


@dataclass(frozen=True)
class ReproduceCommand:
    """Simulate a published table with its own programs and rules, print it next to the published one, save a plot."""

    table: Placed[Literal["three-way", "poisson-30s", "model-comparison"]]
    """The published table. model-comparison runs the three-way programs on three pairs."""
    num_runs: int | None = None
    """Replications: orders of the requests for three-way and model-comparison (default: 20), draws of acceptance for
    poisson-30s (default: 16)."""
    seed: int = 0
    """Seed of the replications; the arrivals of poisson-30s are the published ones."""
    fair: bool = False
    """Also score the same workloads fairly (at most 4 replications) and compare with pdvsim's own policies."""
    gpu: str | None = None
    """With --fair: GPU of pdvsim's own policies; default: h200."""
    all_metrics: bool = False
    """Print all metrics, as --json always does."""
    output: str | None = None
    """Folder for cells.parquet, reproduce.json and the plots; default: results/reproduce-TABLE-DATE-TIME."""
    json: bool = False
    """Print one JSON document instead of the tables."""

    def __post_init__(self) -> None:
        check_ranges(self)
        if self.table == "model-comparison" and self.fair:
            raise ValueError("--fair needs three-way or poisson-30s")
        if self.gpu is not None:
            gpu(self.gpu)
            if not self.fair:
                raise ValueError("--gpu needs --fair: the published programs have their own GPU")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(ReproduceCommand, argv, "pdvsim reproduce")

    from pdvsim.published.reproduce import reproduce
    from pdvsim.published.tables import load_published
    from pdvsim.study import output

    folder = output.check_folder(Path(args.output or f"results/reproduce-{args.table}-{output.now()}"))
    names = ("cells.parquet", "reproduce.json", "reproduce.png", *(("fair.png",) if args.fair else ()))
    files = [output.check_file(folder / name) for name in names]
    runs = args.num_runs or DEFAULT_RUNS[args.table]
    published = load_published()
    with Progress(len(published.rows(args.table.replace("-", "_"))), "rows", args.json) as progress:
        reproduction = reproduce(args.table, published, runs, args.seed, progress.update)
    cut = reproduction.interrupted
    if cut and not reproduction.cells:
        raise KeyboardInterrupt
    fair = None
    if args.fair and not cut:
        from pdvsim.published.fair import score_both

        fair = score_both(args.table, load_published(), min(runs, FAIR_RUNS), args.seed, args.gpu or "h200")

    import pandas as pd

    document = _document(args, reproduction, fair)
    cells = pd.DataFrame([cell.document() for cell in reproduction.cells])
    contents: list[bytes | None] = [output.parquet(cells), (output.dumps(document) + "\n").encode()]
    if not cut:
        from pdvsim.published.figures import fair_figure, reproduction_figure

        contents.append(output.picture(reproduction_figure(reproduction), files[2]))
        if fair is not None:
            contents.append(output.picture(fair_figure(fair), files[3]))
    contents += [None] * (len(files) - len(contents))
    if args.json:
        print(output.dumps(document))
    else:
        from pdvsim.published.text import fair_text, reproduction_text

        print(reproduction_text(reproduction, args.all_metrics))
        if fair is not None:
            print("\n" + fair_text(fair))
    return output.save(dict(zip(files, contents, strict=True)), "only the finished rows" if cut else "")


def _document(args: ReproduceCommand, reproduction: Reproduction, fair: Fair | None) -> dict[str, Any]:
    """Provenance of the simulation."""
    from pdvsim.published.explain import explain
    from pdvsim.published.tables import SOURCE

    document = {
        "table": args.table,
        "source": SOURCE,
        "pdvsim_version": __version__,
        "interrupted": reproduction.interrupted,
        "replications": reproduction.replications,
        "seed": args.seed,
        "constants": [asdict(constant) for constant in reproduction.constants],
        "cells": [cell.document() for cell in reproduction.cells],
        "missed": [cell.document() for cell in reproduction.missed()],
    }
    if reproduction.differences:
        document["differences"] = [asdict(difference) for difference in reproduction.differences]
    if fair is not None:
        rows = [row.document() for row in fair.rows]
        document["fair"] = {"gpu": fair.gpu, "foundation": fair.foundation, "rows": rows, "meaning": explain(fair)}
    return document
