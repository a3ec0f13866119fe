"""`pdvsim run`: one experiment, its table and its files. `realrun` has the same options."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pdvsim.bench.inputs import checked, forewarn
from pdvsim.cli.command import Command
from pdvsim.common.console import say
from pdvsim.common.files import Content, sealed, write_all
from pdvsim.common.presets import ExperimentOptions
from pdvsim.common.progress import Progress
from pdvsim.sim.config import Experiment
from pdvsim.view.run import Run


@dataclass(frozen=True)
class RunOptions(ExperimentOptions, Experiment):
    """One run: an architecture, under a load, on a GPU."""

    def answer(self) -> Run:
        """The run, which prints as a table and has its records as frames."""
        from pdvsim.bench.band import ends
        from pdvsim.bench.length import long_enough
        from pdvsim.sim.run import simulate

        given = self.experiment(self.arch)
        checked(given)
        experiment = long_enough(given)
        return Run(simulate(experiment), ends(experiment))


@dataclass(frozen=True)
class RunCommand(Command):
    """Simulate one experiment and print its table, in the style of `vllm bench serve`."""

    given: RunOptions = field(default_factory=RunOptions)
    output: str | None = None
    """Write the result to this file, as JSON with the keys of vLLM."""
    save_result: bool = False
    """Write the result to --result-dir; the file name has label, load, architecture and date."""
    result_dir: str = "."
    """Folder for --save-result."""
    label: str = "pdvsim"
    """Prefix of the file name of --save-result."""
    save_detailed: bool = False
    """Also write requests, launches and deliveries as parquet, next to the result."""
    trace_out: str | None = None
    """Write a timeline for ui.perfetto.dev to this file."""
    html: str | None = None
    """Write the table, its plot and provenance to this file, as one page."""
    overwrite: bool = False
    """Replace existing files; default: refuse them."""

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment to simulate."""
        return self.given.experiment(self.given.arch)

    def __post_init__(self) -> None:
        if not self.given.scoring.detailed and (self.save_detailed or self.trace_out or self.html):
            raise ValueError("--save-detailed, --trace-out and --html need records, which --no-detailed does not keep")
        if any(c in "/\\" or not c.isprintable() for c in self.label):
            raise ValueError(f"label is part of a file name: it must print and have no slash, got {self.label!r}")

    def execute(self) -> int:
        from pdvsim.bench.band import ends, wanted
        from pdvsim.bench.length import long_enough, too_short
        from pdvsim.sim.run import simulate

        checked(self.experiment)  # reports bad input before a folder is made
        files = self.files()
        experiment = long_enough(self.experiment)
        forewarn([experiment])
        runs = 3 if wanted(experiment) else 1
        with Progress(runs * experiment.traffic.num_prompts, "requests", self.json) as progress:
            result = simulate(experiment, progress.update, traced=bool(self.trace_out))
            run = Run(result, ends(experiment, progress.update))
        document = files.write(run)
        print(document if self.json else run.table())
        if short := too_short(experiment.traffic, run.metrics):
            hint = "raise --num-prompts" if experiment.scoring.steady else "--steady makes it long enough"
            say("pdvsim", f"{short}; {hint}")
        if files.paths:
            say("pdvsim", f"saved {', '.join(map(str, files.paths))}")
        return 0

    def files(self, *further_records: str) -> RunFiles:
        """The files that are asked for; a ValueError or OSError if one cannot be written."""
        from pdvsim.bench.output import DETAILS, check_folder, now, record_files

        date = now()
        results = [Path(self.output)] if self.output else []
        if self.save_result or (self.save_detailed and not results):
            results.append(check_folder(Path(self.result_dir)) / result_name(self.experiment, self.label, date))
        names = (*DETAILS, *further_records)
        tables = record_files(results[0].with_suffix(""), names) if self.save_detailed else {}
        traces, pages = ((Path(name),) if name else () for name in (self.trace_out, self.html))
        files = RunFiles(self.label, date, tuple(results), tables, traces, pages)
        files.check(self.experiment.files, self.overwrite)
        return files


@dataclass(frozen=True)
class RunFiles:
    """Output files of one run: results, records, timeline and page."""

    label: str
    date: str
    results: tuple[Path, ...]
    details: dict[str, Path]
    traces: tuple[Path, ...]
    pages: tuple[Path, ...] = ()

    def check(self, inputs: Iterable[str], overwrite: bool) -> None:
        """A ValueError or OSError if a file cannot be written."""
        from pdvsim.bench.output import check_file

        taken = {os.path.realpath(path): "the run reads it as input" for path in inputs}
        for path in self.paths:
            place = os.path.realpath(path)
            if place in taken:
                raise ValueError(f"{path} cannot be written: {taken[place]}")
            taken[place] = "two options name it"
            check_file(path, overwrite)

    @property
    def paths(self) -> tuple[Path, ...]:
        return (*self.results, *self.details.values(), *self.traces, *self.pages)

    def write(self, run: Run) -> str:
        """Write everything, the result after its records, whose digests it has; returns it as a JSON document."""
        from pdvsim.bench.output import dumps, parquet, plain, run_document, write_records
        from pdvsim.sim.metrics.timeline import trace

        telemetry = parquet(run.telemetry) if "telemetry" in self.details else b""
        digests = write_records(self.details, run.result, telemetry=telemetry)
        document = plain(run_document(run.result, run.metrics, self.date, self.label))
        document["records_sha256"] = {path.name: digests[name] for name, path in self.details.items()}
        text = dumps(sealed(document))
        content: dict[Path, Content] = dict.fromkeys(self.results, (text + "\n").encode())
        content |= dict.fromkeys(self.traces, lambda file: file.writelines(trace(run.result)))
        write_all(content | {path: run.page().encode() for path in self.pages})
        return text


def result_name(experiment: Experiment, label: str, date: str) -> str:
    """File name in vLLM's format, with the architecture instead of the model."""
    traffic, arch = experiment.traffic, experiment.arch.rpartition(":")[2]
    concurrency = "" if traffic.max_concurrency is None else f"-concurrency{traffic.max_concurrency}"
    return f"{label}-{traffic.request_rate}qps{concurrency}-{arch}-{date}.json"
