"""`pdvsim sweep`: loads x architectures x whatever is varied x replications, as a folder of rows, tables and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.args import SweepCommand, parse
from pdvsim.console import forewarn, say

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.sim.backends import Row
    from pdvsim.sim.sweep import Sweep
    from pdvsim.sweepdir import SweepDir

PAIRED_METRICS = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code: 1 where some points failed and the others are there."""
    args = parse(SweepCommand, argv, "pdvsim sweep")

    from pdvsim import output
    from pdvsim.progress import Progress
    from pdvsim.sim.backends import check_reachable
    from pdvsim.sim.files import write_whole
    from pdvsim.sim.inputs import check_points
    from pdvsim.sweepdir import SweepDir, read_config

    date = output.now()
    sweep = args.options.sweep()
    folder = SweepDir(Path(args.output or f"results/sweep-{date}"), sweep, args.save_detailed)
    check_points(sweep.points(), servable=not args.continue_on_error)  # before anything is written
    if args.dry_run:
        return _dry_run(folder, args, date)

    where = args.options.where()
    check_reachable(where)
    if where.name == "loky":
        forewarn(sweep.points(), where.jobs)
    total = len(sweep.points())
    rows: dict[int, Row] = {}
    failures, interrupted = 0, False
    with folder.opened(date, args.resume):
        try:
            with Progress(total, "points", args.json, after_s=0) as progress:
                failures = folder.run(where, args.continue_on_error, progress.update, rows)
        except KeyboardInterrupt:
            interrupted = True
        except (ValueError, OSError):
            say("pdvsim", f"stopped: {_kept(folder, total)}")
            raise
        frame = folder.summarise(rows)
        saved = [folder.config_file]
        if len(frame):
            from pdvsim.plots import sweep_png

            plot = folder.path / "sweep.png"
            write_whole(plot, sweep_png(frame))
            saved = [folder.summary_file, *saved, plot]
        config = read_config(folder.path)
    if len(frame):
        _print_sweep(frame, sweep, config, args.json)
    elif args.json:
        print(output.dumps({**config, "points": []}))
    say("pdvsim", f"saved {', '.join(map(str, saved))}")
    if failures:
        say("pdvsim", f"{failures} of {total} points failed: the reasons are in {folder.path / 'failed'}")
    if interrupted:
        say("pdvsim", f"interrupted: {_kept(folder, total)}")
    return 130 if interrupted else 1 if failures else 0


def _kept(folder: SweepDir, total: int) -> str:
    return f"{len(folder.indices())} of {total} points are in {folder.path}; --resume goes on"


def _dry_run(folder: SweepDir, args: SweepCommand, date: str) -> int:
    """List the points and what they may take; nothing is written."""
    from pdvsim import output, table
    from pdvsim.sim.backends import cores
    from pdvsim.sim.estimate import cost
    from pdvsim.sweepdir import listed

    folder.check(date, args.resume)
    points = folder.sweep.points()
    done = set(folder.indices()) if args.resume else set()
    rows = listed(points, done)
    needed_s = cost([p for i, p in enumerate(points) if i not in done]).core_s
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


def _print_sweep(frame: pd.DataFrame, sweep: Sweep, config: dict[str, Any], as_json: bool) -> None:
    from pdvsim import output, table
    from pdvsim.sim.stats import over_replications, paired_differences, varied

    entries, names = over_replications(frame), varied(frame)
    differences = [
        difference
        for metric in PAIRED_METRICS
        for difference in (paired_differences(frame, metric, sweep.archs[0]) if len(sweep.archs) > 1 else [])
    ]
    if as_json:
        parts = {"points": frame.to_dict("records"), "summary": entries, "paired_differences": differences}
        foundation = "; ".join(dict.fromkeys(str(entry.get("foundation")) for entry in entries))
        print(output.dumps({**config, "foundation": foundation, **parts}))
        return
    scoring = sweep.base.scoring
    if len(sweep.archs) == 1 and not names:
        for entry in entries:
            load = {"max_concurrency" if entry["load_kind"] == "concurrency" else "request_rate": entry["load"]}
            print(table.serving_table(entry | load, scoring.percentile_metrics, scoring.metric_percentiles) + "\n")
    print(table.comparison_table(entries, percentiles=scoring.metric_percentiles, varied=names))
    if differences and sweep.num_runs > 1:
        print("\n" + table.paired_table(differences, names))
