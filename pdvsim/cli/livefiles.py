"""Save a live session as ordinary results: rerun it from its actions with all records, and list its command lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from pdvsim.bench import output
from pdvsim.bench.pool import parallel_map
from pdvsim.bench.results import load
from pdvsim.cli.run import RunFiles
from pdvsim.common.commandline import command_line, flags_of
from pdvsim.common.files import write_whole
from pdvsim.live.session import Action, Knobs, Setup, replay
from pdvsim.sim.config import Experiment
from pdvsim.view.report.document import build
from pdvsim.view.report.sheet import page
from pdvsim.view.run import Run

SET_BY_SESSION = ("num_prompts", "metric_percentiles")


def _flags(experiment: Experiment) -> Iterable[str]:
    return flags_of({n: value for n, value in experiment.given(real=True).items() if n not in SET_BY_SESSION})


def command_lines(
    setup: Setup, actions: Sequence[Action], knobs: Knobs, now_s: float, experiments: Sequence[Experiment]
) -> str:
    """Commands that repeat a session, and changes that no command line can repeat."""
    live = ["pdvsim", "live", "--arch", ",".join(setup.archs)]
    begun = [*live, *_flags(setup.base)]
    if not actions:
        runs = [command_line("pdvsim run", e) for e in experiments]
        return "\n".join(["No setting was changed. To repeat the session:", shlex.join(begun), *runs])
    present = [*live, *_flags(setup.turned(knobs))]
    lines = ["Settings at the start:", shlex.join(begun), "Settings at the end:", shlex.join(present)]
    lines.append(f"Changes up to {now_s:.2f} s, which a command line cannot repeat (full precision: session.json):")
    before = setup.knobs
    for action in actions:
        what = "a burst of requests"
        if action.knobs is not None:
            what = ", ".join(f"{k} {before[k]} to {v}" for k, v in action.knobs.items() if v != before[k])
            before = action.knobs
        lines.append(f"  at {action.at_s:.2f} s: {what}")
    return "\n".join(lines)


def write_session(setup: Setup, actions: Sequence[Action], now_s: float, folder: Path) -> str:
    """Write table, records and page of each architecture, and one report; returns the message."""
    output.check_folder(folder)
    date, experiments, paths, tables = output.now(), [], [], []
    for result in replay(setup, actions, now_s):
        if not len(result.requests["id"]):
            raise ValueError("nothing to save: no request has arrived yet")
        name = result.experiment.arch.rpartition(":")[2]
        stem = folder / name
        result_file, page_file = (folder / f"{name}.json",), (folder / f"{name}.html",)
        written = RunFiles("live", date, result_file, output.record_files(stem), (), page_file)
        run = Run(result)
        written.write(run)
        experiments.append(result.experiment)
        paths.append(written.results[0])
        tables.append(run.table())
    write_whole(folder / "report.html", page(build(load(paths))).encode())
    knobs = next((action.knobs for action in reversed(actions) if action.knobs is not None), setup.knobs)
    lines = command_lines(setup, actions, knobs, now_s, experiments)
    write_whole(folder / "session.txt", "\n\n".join([*tables, lines, ""]).encode())
    document = {"archs": setup.archs, "config": output.settings(setup.base), "until_s": now_s}
    document["tape"] = [output.settings(action) for action in actions]
    write_whole(folder / "session.json", (output.dumps(document) + "\n").encode())
    each = "for each architecture a result, records and a page"
    return f"saved {folder}: report.html, session.txt, and {each}\n{lines}"


def saved(setup: Setup, actions: Sequence[Action], now_s: float) -> str:
    """Save a session in a process of its own; returns the outcome."""
    folder = Path(f"results/live-{output.now()}").absolute()
    try:
        [outcome] = parallel_map(write_session, [(setup, actions, now_s, folder)], lambda: None)
    except (ValueError, OSError) as error:
        return f"nothing was saved: {error}"
    return outcome
