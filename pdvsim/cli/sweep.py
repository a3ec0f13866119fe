"""`pdvsim sweep`: loads x architectures x varied flags x replications, as a folder of rows, tables and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pdvsim.bench.inputs import check_points, cost, forewarn
from pdvsim.bench.pool import Backend, check_reachable, cores
from pdvsim.bench.stats import over_replications, paired_differences, varied
from pdvsim.bench.sweep import DEFAULT_RATES, Sweep, frame_of
from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.options import Option, converted, nearest, options
from pdvsim.common.presets import ExperimentOptions
from pdvsim.common.progress import Progress
from pdvsim.sim.config import Acceptance, Arch, Experiment
from pdvsim.sim.limits import Jobs, NumRuns, Paths, RequestRate, Requests, of
from pdvsim.sim.policies import USUAL_ARCHS
from pdvsim.view.setting import acceptance_notes, points_line

if TYPE_CHECKING:
    import pandas as pd

    from pdvsim.bench.run import SweepDir
    from pdvsim.view.plots import SweepPoints

VARIES_ACCEPTANCE = {"pair", "drafter", *(field.name for field in fields(Acceptance))}
PAIRED_METRICS = ("output_throughput", "mean_e2el_ms", "mean_ttft_ms", "mean_tpot_ms")


@dataclass(frozen=True)
class SweepCommand(Command, ExperimentOptions):
    """Simulate loads x architectures x varied flags x replications on all cores; print tables, save rows and a plot.

    Each finished point is a line in the folder's rows.jsonl: after a crash, --resume runs the missing ones.
    """

    arch: tuple[Arch, ...] = USUAL_ARCHS
    """Serving architectures to compare."""
    concurrency: tuple[Requests, ...] = ()
    """Loads as concurrent requests (closed loop), e.g. 1,2,4,8."""
    request_rate: tuple[RequestRate, ...] = ()
    """Loads as requests per second (open loop); default without --concurrency: 1,2,4,8,16,32,64."""
    num_runs: NumRuns = 1
    """Replications of each point; replication i has seed --seed + i, the same for every architecture."""
    vary: Paths = ()
    """Other flags to vary, e.g. num-speculative-tokens=2,4,8 pair=a:b,c:d. Write a list value as 0.8+0.6."""
    jobs: Annotated[Jobs | None, of(without=["scheduler"])] = None
    """Concurrent simulations on this machine; default: one per core."""
    scheduler: str | None = None
    """Run the points on the workers of a running Dask cluster: address of its scheduler, e.g. tcp://10.0.0.1:8786."""
    output: str | None = None
    """Folder for rows.jsonl, and sweep.json, summary.parquet and sweep.png; default: results/sweep-DATE-TIME."""
    resume: bool = False
    """Continue the sweep in the folder, if there is one: run the points that are missing or failed, or are new."""
    continue_on_error: bool = False
    """If a point fails, record the reason in rows.jsonl and continue with the others."""
    save_detailed: bool = False
    """Also write each point's requests, launches and deliveries as parquet, to details/."""
    check: Paths = ()
    """Check that these sweep folders or JSON files of runs are complete and unchanged; run nothing. The exit code is 0
    if so, else 1."""
    dry_run: bool = False
    """List the points and estimate the time; write nothing."""
    csv: str | None = None
    """Also write the rows to this file, as CSV."""
    verbose: bool = False
    """Also print each point in the style of `vllm bench serve`, and the differences from the first architecture."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.backend, self.sweep
        if self.save_detailed and not self.scoring.detailed:
            raise ValueError("--save-detailed needs records, which --no-detailed does not keep")

    @property
    def backend(self) -> Backend:
        """The processes or cluster that run the points."""
        return Backend(self.jobs, self.scheduler)

    @cached_property
    def sweep(self) -> Sweep:
        """The sweep these options describe."""
        if not self.arch:
            raise ValueError("arch needs at least one value")
        vary = axes(self.vary)
        base = self.experiment(self.arch[0], assumed=bool(VARIES_ACCEPTANCE & set(vary)))
        return Sweep(self.arch, self.concurrency, self.request_rate, self.num_runs, base, vary)

    def answer(self) -> SweepPoints:
        """The points as a frame that prints as a summary and has `plot()`, one row per run. Nothing is written."""
        from pdvsim.bench.output import tidy
        from pdvsim.bench.run import run
        from pdvsim.view.plots import SweepPoints

        points = SweepPoints(tidy(frame_of(run(self.sweep.points(), self.backend))))
        points.setting = points_line(points, [asdict(self.sweep.base)])
        return points

    def execute(self) -> int:
        """Run the missing points; returns the exit code: 1 if some points failed."""
        from pdvsim.bench import output
        from pdvsim.bench.run import SweepDir, SweepInterrupted, run

        if self.check:
            return self._check()
        date, csv = output.now(), output.optional_file(self.csv)
        sweep, where = self.sweep, self.backend
        path = output.check_folder(Path(self.output or f"results/sweep-{date}"))
        folder = SweepDir(path, sweep, self.save_detailed)
        points = sweep.points()
        check_points(points, servable=not self.continue_on_error)  # before anything is written
        if self.dry_run:
            return self._dry_run(folder)

        if where.scheduler is not None:
            check_reachable(where.scheduler)

        def stopped(what: str) -> None:
            done = f"{len(folder.done())} of {len(points)} points"
            say("pdvsim", f"{what}: {done} are in {path}; continue with --resume")

        with folder.opened(self.resume) as kept:
            if where.scheduler is None:
                forewarn([point.experiment for point in points], where.jobs)
            try:
                with Progress(len(points), "points", self.json, after_s=0) as progress:
                    rows = run(points, where, progress.update, kept, folder.details, self.continue_on_error)
            except SweepInterrupted as stop:  # no plot and no tables, as the user is waiting
                folder.export(stop.rows, date, None)
                stopped("interrupted")
                return 130
            except (ValueError, OSError):
                stopped("stopped")
                raise
            frame, saved = folder.export(rows, date, self._drawn)
            if csv is not None:
                write_whole(csv, output.csv(frame))
                saved = [*saved, csv]
        if rows:
            self._print(frame, {"date": date} | folder.config)
        elif self.json:
            print(output.dumps({"date": date} | folder.config | {"points": []}))
        say("pdvsim", f"saved {', '.join(map(str, saved))}")
        if failures := len(points) - len(rows):
            say("pdvsim", f"{failures} of {len(points)} points failed; the reasons are in {path / 'rows.jsonl'}")
        return 1 if failures else 0

    def _check(self) -> int:
        """Check the named results; returns 0 if all are complete and unchanged, else 1."""
        from pdvsim.bench.results import check_result

        checked = {name: check_result(Path(name)) for name in self.check}
        document = {name: {"whole": whole, "lines": lines} for name, (whole, lines) in checked.items()}
        self.show(document, "\n".join(f"{name}: {line}" for name, (_, lines) in checked.items() for line in lines))
        return int(not all(whole for whole, _ in checked.values()))

    def _dry_run(self, folder: SweepDir) -> int:
        """List the points and the estimated time; writes nothing."""
        from pdvsim.view.comparison import points_table

        folder.check(self.resume)
        points = self.sweep.points()
        done = set(folder.done()) if self.resume else set()
        rows = [{"point": i} | p.labels | {"state": "done" if i in done else "to do"} for i, p in enumerate(points)]
        left = [point.experiment for i, point in enumerate(points) if i not in done]
        needed_s = cost(left).core_s
        jobs = None if self.scheduler is not None else min(self.jobs or cores(), max(1, len(left)))
        estimate = {"core_s": needed_s, "jobs": jobs, "wall_s": None if jobs is None else needed_s / jobs}
        spread = "spread over the cluster" if jobs is None else f"about {needed_s / jobs:.0f} s on {jobs}"
        needed = f"{len(left)} of {len(points)} points to run: an estimated {needed_s:.0f} s of one core, {spread}"
        self.show({"points": rows, "estimate": estimate}, f"{points_table(rows)}\n{needed}")
        return 0

    def _drawn(self, frame: pd.DataFrame) -> bytes:
        from pdvsim.view.plots import sweep_png

        return sweep_png(frame, asdict(self.sweep.base))

    def _print(self, frame: pd.DataFrame, config: dict[str, Any]) -> None:
        from pdvsim.bench.output import dumps
        from pdvsim.view.comparison import paired_table
        from pdvsim.view.plots import sweep_table
        from pdvsim.view.serving import serving_table

        sweep, entries = self.sweep, over_replications(frame)
        metrics = PAIRED_METRICS if len(sweep.archs) > 1 else ()
        differences = [one for metric in metrics for one in paired_differences(frame, metric, sweep.archs[0])]
        if self.json:
            parts = {"points": frame.to_dict("records"), "summary": entries, "paired_differences": differences}
            foundation = "; ".join(dict.fromkeys(str(entry.get("foundation")) for entry in entries))
            print(dumps({**config, "foundation": foundation, **parts}))
            return
        if self.verbose:
            for entry in entries:
                load = {"max_concurrency" if entry["load_kind"] == "concurrency" else "request_rate": entry["load"]}
                print(serving_table(entry | load, sweep.base.scoring.metric_percentiles) + "\n")
        print(sweep_table(frame))
        for note in acceptance_notes(point.experiment for point in sweep.points() if point.experiment.speculates):
            print(note)
        if differences and self.verbose and sweep.num_runs > 1:
            print(f"\n{paired_table(differences, varied(frame))}")


assert DEFAULT_RATES == (1, 2, 4, 8, 16, 32, 64), "the help of --request-rate names the default loads"
OWN_LISTS = {"arch": "arch", "request_rate": "request-rate", "max_concurrency": "concurrency", "seed": "num-runs"}


def axes(tokens: Sequence[str]) -> dict[str, tuple[Any, ...]]:
    """Flags to vary and their values, from "flag=value,value"; a ValueError as for the flag itself."""
    known = options(Experiment)
    varied: dict[str, tuple[Any, ...]] = {}
    for token in tokens:
        flag, equals, values = token.partition("=")
        name = flag.lstrip("-").replace("-", "_")
        if not equals:
            raise ValueError(f"vary takes flag=value,value, got {token!r}")
        if name not in known:
            raise ValueError(f"vary: unknown flag {flag}{nearest(name, known).replace('_', '-')}")
        if name in OWN_LISTS:
            raise ValueError(f"vary: use --{OWN_LISTS[name]} for {flag}")
        if name in varied:
            raise ValueError(f"vary names {flag} twice")
        if not values:
            raise ValueError(f"vary: {name.replace('_', '-')} needs a value")
        varied[name] = tuple(_varied(known[name], value) for value in values.split(","))
    return varied


def _varied(option: Option, text: str) -> Any:
    """One value of a flag, parsed as on the command line."""
    if option.one is bool:
        return converted(option, {"true": True, "false": False}.get(text.lower(), text))
    return converted(option, text.split("+") if option.is_list else text)
