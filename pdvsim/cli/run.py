"""`pdvsim run`: one experiment, its table and its files."""

from __future__ import annotations

from pdvsim.cli.runcommand import RunCommand
from pdvsim.common.arguments import parse
from pdvsim.common.console import say
from pdvsim.common.progress import Progress
from pdvsim.study.estimate import forewarn
from pdvsim.study.inputs import checked
from pdvsim.view.run import Run


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(RunCommand, argv, "pdvsim run")

    from pdvsim.cli.runfiles import RunFiles
    from pdvsim.sim.run import simulate
    from pdvsim.study.band import ends, wanted
    from pdvsim.study.length import long_enough, too_short

    checked(args.experiment)  # reports bad input before a folder is made
    files = RunFiles.checked(args)
    experiment = long_enough(args.experiment)
    forewarn([experiment])
    runs = 3 if wanted(experiment) else 1
    with Progress(runs * experiment.traffic.num_prompts, "requests", args.json) as progress:
        result = simulate(experiment, progress.update, traced=bool(args.trace_out))
        run = Run(result, ends(experiment, progress.update))
    document = files.write(run)
    print(document if args.json else run.table())
    if short := too_short(experiment.traffic, run.metrics):
        hint = "raise --num-prompts" if experiment.scoring.steady else "--steady makes it long enough"
        say("pdvsim", f"{short}; {hint}")
    if files.paths:
        say("pdvsim", f"saved {', '.join(map(str, files.paths))}")
    return 0
