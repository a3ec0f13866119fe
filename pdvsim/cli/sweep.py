"""`pdvsim sweep`: loads x architectures x whatever is varied x replications, as a folder of rows, tables and a plot."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.cli.args import SweepCommand, parse
from pdvsim.common.console import say
from pdvsim.common.progress import Progress
from pdvsim.common.workers import cores
from pdvsim.study.backends import check_reachable
from pdvsim.study.estimate import cost, forewarn
from pdvsim.study.inputs import check_points
from pdvsim.study.stats import headline, over_replications, paired_differences, varied

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.study.folder import SweepDir
    from pdvsim.study.sweep import Sweep

PAIRED_METRICS = ("output_throughput", "mean_e2el_ms", "mean_ttft_ms", "mean_tpot_ms")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 where some points failed and the others are there."""
    args = parse(SweepCommand, argv, "pdvsim sweep")

    from pdvsim.study import output
    from pdvsim.study.folder import SweepDir
    from pdvsim.study.sweepcheck import read_config

    date = output.now()
    sweep = args.options.sweep()
    folder = SweepDir(Path(args.output or f"results/sweep-{date}"), sweep, args.save_detailed)
    check_points(sweep.points(), servable=not args.continue_on_error)  # before anything is written
    if args.dry_run:
        return _dry_run(folder, args)

    where = args.options.where()
    check_reachable(where)
    total = len(sweep.points())
    failures, interrupted = 0, False
    with folder.opened(date, args.resume):
        if where.name == "loky":
            forewarn([point.experiment for point in sweep.points()], where.jobs)
        found = folder.survey()
        for line in found.notices():
            _notice(f"{folder.path}: {line}")
        rows = found.rows
        try:
            with Progress(total, "points", args.json, after_s=0) as progress:
                failures = folder.run(where, args.continue_on_error, progress.update, rows, _notice)
        except KeyboardInterrupt:
            interrupted = True
        except (ValueError, OSError):
            _notice(f"stopped: {_kept(folder, len(rows), total)}")
            raise
        if interrupted:  # the user is waiting: no plot and no tables
            if rows:
                folder.summarise(rows, None)
            _notice(f"interrupted: {_kept(folder, len(rows), total)}")
            return 130
        frame, saved = folder.summarise(rows, partial(_draw, sweep))
        config = {k: v for k, v in read_config(folder.path).items() if k not in ("sha256", "made")}
    if len(frame):
        _print_sweep(frame, sweep, config, args)
    elif args.json:
        print(output.dumps({**config, "points": []}))
    say("pdvsim", f"saved {', '.join(map(str, saved))}")
    if failures:
        say("pdvsim", f"{failures} of {total} points failed: the reasons are in {folder.path / 'failed'}")
    return 1 if failures else 0


def _notice(text: str) -> None:
    say("pdvsim", text)


def _draw(sweep: Sweep, frame: pd.DataFrame) -> bytes:
    from pdvsim.view.plots import sweep_png

    return sweep_png(frame, asdict(sweep.base))


def _kept(folder: SweepDir, done: int, total: int) -> str:
    return f"{done} of {total} points are in {folder.path}; --resume goes on"


def _dry_run(folder: SweepDir, args: SweepCommand) -> int:
    """List the points and what they may take; nothing is written."""
    from pdvsim.study import output
    from pdvsim.study.folder import listed
    from pdvsim.view import table

    folder.check(args.resume)
    points = folder.sweep.points()
    done = set(folder.survey().rows) if args.resume else set()
    rows = listed(points, done)
    needed_s = cost([p.experiment for i, p in enumerate(points) if i not in done]).core_s
    jobs = (
        min(args.options.jobs or cores(), max(1, len(points) - len(done))) if args.options.backend == "loky" else None
    )
    estimate = {"core_s": needed_s, "jobs": jobs, "wall_s": None if jobs is None else needed_s / jobs}
    if args.json:
        print(output.dumps({"points": rows, "estimate": estimate}))
        return 0
    print(table.points_table(rows))
    left = f"{len(points) - len(done)} of {len(points)} points to run"
    spread = "spread over the cluster" if jobs is None else f"about {needed_s / jobs:.0f} s on {jobs}"
    print(f"{left}: an estimated {needed_s:.0f} s of one core, {spread}")
    return 0


def _print_sweep(frame: pd.DataFrame, sweep: Sweep, config: dict[str, Any], args: SweepCommand) -> None:
    from pdvsim.study import output
    from pdvsim.view import table

    entries, names = over_replications(frame), varied(frame)
    differences = [
        difference
        for metric in PAIRED_METRICS
        for difference in (paired_differences(frame, metric, sweep.archs[0]) if len(sweep.archs) > 1 else [])
    ]
    if args.json:
        parts = {"points": frame.to_dict("records"), "summary": entries, "paired_differences": differences}
        foundation = "; ".join(dict.fromkeys(str(entry.get("foundation")) for entry in entries))
        print(output.dumps({**config, "foundation": foundation, **parts}))
        return
    scoring = sweep.base.scoring
    if args.verbose:
        for entry in entries:
            load = {"max_concurrency" if entry["load_kind"] == "concurrency" else "request_rate": entry["load"]}
            print(table.serving_table(entry | load, scoring.percentile_metrics, scoring.metric_percentiles) + "\n")
    differences = differences if sweep.num_runs > 1 else []
    compared_by = headline((entry["load_kind"], entry["load"]) for entry in entries)
    leads = [d for d in differences if d["metric"] == compared_by]
    print(table.comparison_table(entries, percentiles=scoring.metric_percentiles, varied=names, differences=leads))
    if differences and args.verbose:
        print("\n" + table.paired_table(differences, names))
