"""`pdvsim run`: one experiment, its table and its files."""

from __future__ import annotations

from pdvsim.cli.args import RunCommand, parse
from pdvsim.common.console import forewarn, say


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(RunCommand, argv, "pdvsim run")

    from pdvsim import Run
    from pdvsim.common.progress import Progress
    from pdvsim.sim.run import simulate
    from pdvsim.study.band import ends, wanted
    from pdvsim.study.inputs import checked
    from pdvsim.study.output import RunFiles
    from pdvsim.study.sweep import Point

    requests = checked(args.experiment)  # bad input is refused before a folder is made for the result
    files = RunFiles.checked(args)
    forewarn([Point("request_rate", args.experiment.traffic.request_rate, 0, args.experiment)])
    runs = 3 if wanted(args.experiment) else 1
    with Progress(runs * args.experiment.traffic.num_prompts, "requests", args.json) as progress:
        result = simulate(args.experiment, progress.update, requests=requests)
        run = Run(result, ends(args.experiment, progress.update))
    document = files.write(run)
    print(document if args.json else run.table())
    if files.paths:
        say("pdvsim", f"saved {', '.join(map(str, files.paths))}")
    return 0
