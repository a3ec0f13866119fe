"""`pdvsim sweep`: architectures x loads x replications, as tables, a parquet file and a plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.args import SweepCommand, parse
from pdvsim.console import say

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.sim.sweep import Sweep

PAIRED_METRICS = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(SweepCommand, argv, "pdvsim sweep")

    from pdvsim import output
    from pdvsim.progress import Progress
    from pdvsim.sim.sweep import SweepInterrupted, run_sweep

    date = output.now()
    folder = output.check_folder(Path(args.output or f"results/sweep-{date}"))
    files = [output.check_file(folder / name) for name in ("summary.parquet", "sweep.json", "sweep.png")]
    sweep = args.options.sweep()
    points = sweep.points()
    interrupted = False
    try:
        with Progress(len(points), "points", args.json, after_s=0) as progress:
            frame = run_sweep(points, args.options.jobs, lambda done, total: progress.update(done))
    except SweepInterrupted as stop:
        frame, interrupted = stop.points, True

    config = {"date": date, "interrupted": interrupted, "points": len(frame), **_resolved(sweep)}
    files[1].write_text(output.dumps(config) + "\n", encoding="utf-8")
    if len(frame):
        from pdvsim.plots import sweep_png

        frame.to_parquet(files[0], index=False)
        files[2].write_bytes(sweep_png(frame))
        _print_sweep(frame, sweep, config, args.json)
    elif args.json:
        print(output.dumps({**config, "points": []}))
    saved = files if len(frame) else files[1:2]
    say("pdvsim", f"saved {', '.join(map(str, saved))}")
    if interrupted:
        say("pdvsim", f"interrupted: {len(frame)} of {len(points)} points saved in {folder}")
    return 130 if interrupted else 0


def _resolved(sweep: Sweep) -> dict[str, Any]:
    """A sweep as it was run, defaults filled in."""
    from pdvsim import __version__, output

    loads = dict.fromkeys((p.load_kind, p.load) for p in sweep.points())
    settings = output.settings(sweep) | {"loads": [{"kind": k, "load": output.setting(v)} for k, v in loads]}
    return {"pdvsim_version": __version__, "sweep": settings}


def _print_sweep(frame: pd.DataFrame, sweep: Sweep, config: dict[str, Any], as_json: bool) -> None:
    from pdvsim import output, table
    from pdvsim.sim.stats import over_replications, paired_differences

    entries = over_replications(frame)
    differences = [
        difference
        for metric in PAIRED_METRICS
        for difference in (paired_differences(frame, metric, sweep.archs[0]) if len(sweep.archs) > 1 else [])
    ]
    if as_json:
        parts = {"points": frame.to_dict("records"), "summary": entries, "paired_differences": differences}
        print(output.dumps({**config, "foundation": entries[0].get("foundation"), **parts}))
        return
    scoring = sweep.base.scoring
    if len(sweep.archs) == 1:
        for entry in entries:
            load = {"max_concurrency" if entry["load_kind"] == "concurrency" else "request_rate": entry["load"]}
            values = {"pair": sweep.base.server.pair, **entry, **load}
            print(table.serving_table(values, scoring.percentile_metrics, scoring.metric_percentiles) + "\n")
    print(table.comparison_table(entries, percentiles=scoring.metric_percentiles))
    if differences and sweep.num_runs > 1:
        print("\n" + table.paired_table(differences))
