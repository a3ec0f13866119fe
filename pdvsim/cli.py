"""The `pdvsim` command: run, sweep, profile, profiles. Tables on standard output, everything else on standard error.

Bad input is one line on standard error and exit code 2; Ctrl-C is one line and 130. Only what a command needs is
imported, and only that command's parser is built.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.console import guarded, say

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.sim.sweep import Sweep

HELP = """\
usage: pdvsim [-h] [--version] {run,sweep,profile,profiles} ...

Which serving architecture for speculative decoding, on your GPU and load, and how sure.

commands:
  run        one experiment: pdvsim run --arch pdv --request-rate 8
  sweep      architectures x loads x replications: pdvsim sweep --arch pdv,pd --concurrency 1,8,64 --num-runs 5
  profile    measure models on this GPU: pdvsim profile --models llama-2-7b --pairs tinyllama-1.1b:llama-2-7b -o DIR
  profiles   the GPUs, models, profiles and samples that come with pdvsim

options:
  -h, --help   this text; `pdvsim COMMAND --help` lists a command's options
  --version    the version
"""
PAIRED_METRICS = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return guarded("pdvsim", lambda: _dispatch(list(sys.argv[1:] if argv is None else argv)))


def _dispatch(argv: list[str]) -> int:
    commands: dict[str, Callable[[list[str]], int]] = {
        "run": _run,
        "sweep": _sweep,
        "profile": _profile,
        "profiles": _profiles,
    }
    first = argv[0] if argv else None
    if first in ("-h", "--help"):
        sys.stdout.write(HELP)
        return 0
    if first == "--version":
        from pdvsim import __version__

        print(f"pdvsim {__version__}")
        return 0
    if first is None or first not in commands:
        import difflib

        what = "no command" if first is None else f"unknown {'option' if first[:1] == '-' else 'command'} {first!r}"
        close = difflib.get_close_matches(first or "", commands, n=1)
        hint = f"; did you mean {close[0]}?" if close else f"; commands: {', '.join(commands)} (see pdvsim --help)"
        raise ValueError(what + hint)
    return commands[first](argv[1:])


def _run(argv: list[str]) -> int:
    from pdvsim.args import RunCommand, parse

    args = parse(RunCommand, argv, "pdvsim run")

    from pdvsim import Run, output
    from pdvsim.progress import Progress
    from pdvsim.sim.run import simulate

    experiment, date = args.experiment, output.now()
    results: list[Path] = [Path(args.output)] if args.output else []
    if args.save_result or (args.save_detailed and not results):
        name = output.result_name(experiment, args.label, date)
        results.append(output.check_folder(Path(args.result_dir)) / name)
    stems = [path.with_suffix("") for path in results[:1]] if args.save_detailed else []
    details = [stem.with_name(f"{stem.name}.{name}.parquet") for stem in stems for name in _DETAILS]
    trace = Path(args.trace_out) if args.trace_out else None
    for path in (*results, *details, *([trace] if trace else [])):
        output.check_file(path)

    with Progress(experiment.traffic.num_prompts, "requests", args.json) as progress:
        run = Run(simulate(experiment, progress.update))
    document = output.dumps(output.run_document(run.result, run.metrics, date, args.label))
    for path in results:
        path.write_text(document + "\n", encoding="utf-8")
    for path, frame in zip(details, (run.requests, run.launches, run.deliveries), strict=False):
        frame.to_parquet(path, index=False)
    if trace:
        from pdvsim.sim.timeline import write_trace

        write_trace(run.result, trace)
    print(document if args.json else run.table())
    _saved((*results, *details, *([trace] if trace else [])))
    return 0


_DETAILS = ("requests", "launches", "deliveries")


def _sweep(argv: list[str]) -> int:
    from pdvsim.args import SweepCommand, parse

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
        from pdvsim.plots import save_sweep

        frame.to_parquet(files[0], index=False)
        save_sweep(frame, files[2])
        _print_sweep(frame, sweep, config, args.json)
    elif args.json:
        print(output.dumps({**config, "points": []}))
    _saved(files if len(frame) else files[1:2])
    if interrupted:
        _say(f"interrupted: {len(frame)} of {len(points)} points saved in {folder}")
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


def _profile(argv: list[str]) -> int:
    from pdvsim.args import ProfileCommand, parse

    args = parse(ProfileCommand, argv, "pdvsim profile")

    from pdvsim.profiler.command import profile

    return profile(args, argv, _say)


def _profiles(argv: list[str]) -> int:
    from pdvsim.args import ProfilesCommand, parse

    args = parse(ProfilesCommand, argv, "pdvsim profiles")

    from pdvsim import output, table
    from pdvsim.profiler.header import shipped
    from pdvsim.sim.models import GPUS, MODELS
    from pdvsim.sim.profile import builtin

    profiles = {name: builtin(name) for name in GPUS}
    document = {
        "gpus": [
            {
                "gpu": name,
                "bandwidth_tb_per_s": gpu.bandwidth_bytes_per_s / 1e12,
                "tflop_per_s": gpu.flops_per_s / 1e12,
                "memory_gib": gpu.memory_bytes / 2**30,
                "source": gpu.source,
            }
            for name, gpu in GPUS.items()
        ],
        "profiles": [
            {"gpu": name, "profile": p.name, "foundation": p.foundation, "models": len(p.models)}
            for name, p in profiles.items()
        ],
        "models": [
            {
                "model": name,
                "params_b": model.params / 1e9,
                "weights_gb": model.weight_bytes / 1e9,
                "kv_kib_per_token": model.kv_bytes_per_token / 2**10,
            }
            for name, model in MODELS.items()
        ],
    }
    if samples := shipped():
        document["samples"] = samples
    print(output.dumps(document) if args.json else table.profiles_table(document))
    return 0


def _saved(paths: Sequence[Path]) -> None:
    if paths:
        _say(f"saved {', '.join(map(str, paths))}")


def _say(text: str) -> None:
    say("pdvsim", text)


if __name__ == "__main__":
    sys.exit(main())
