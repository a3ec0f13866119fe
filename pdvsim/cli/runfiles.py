"""The output files of one run: paths, checks and content."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pdvsim.bench.output import check_file, dumps, parquet, plain, run_document, write_records
from pdvsim.common.files import Content, sealed, write_all
from pdvsim.sim.config import Experiment
from pdvsim.sim.metrics.timeline import trace
from pdvsim.view.run import Run


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
