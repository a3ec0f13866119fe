"""The original question end to end, as one page: `python -m pdvsim.cli.original`, or `make original`.

Seven architectures, three pairs, 14 levels of concurrency in closed loops and under Poisson arrivals, on the built-in
ShareGPT: the five published plots, and where each architecture succeeds and fails.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from pdvsim.cli.page import facts_of
from pdvsim.common.progress import Progress
from pdvsim.published.original import levels, points, run_original
from pdvsim.published.original_view import original_figures, original_text
from pdvsim.published.tables import load_published
from pdvsim.study import output
from pdvsim.view.report.sheet import Sheet

LEAD = (
    "Does a verify lane pay? The published architectures and today's usual one on pdvsim's engine: ShareGPT's lengths, "
    "drafts of four, each pair's published acceptance, the same settings for all."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run it; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pdvsim.cli.original", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-o", "--output", type=Path, default=Path("results/original"), help="folder of the page")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=None, help="processes; default: one a core")
    parser.add_argument("--levels", default="", help="some levels only, e.g. 1,8,64; default: the 14 published")
    options = parser.parse_args(argv)
    folder = output.check_folder(options.output)
    page, table = (output.check_file(folder / name) for name in ("original.html", "points.parquet"))
    published = load_published()
    chosen = tuple(int(level) for level in options.levels.split(",") if level) or levels(published)
    asked = list(points(published, chosen, options.gpu, options.seed))
    with Progress(len(asked), "runs") as progress:
        rows = run_original(asked, options.jobs, progress.update)
    text = original_text(rows)
    print(text)
    facts = facts_of(asked[0].experiment)
    caption = f"Simulated, {options.gpu} ({facts['foundation']}), seed {options.seed}."
    sheet = Sheet("The original question", LEAD, text, original_figures(rows, caption), facts)
    return output.save({page: sheet.html().encode(), table: output.parquet(rows)})


if __name__ == "__main__":
    raise SystemExit(main())
