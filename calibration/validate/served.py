"""Stored real runs: one JSON object per line, with the experiment and its metrics.

`command` is what was run (`realrun` and its flags; files are named from the folder of the runs), `repeat` counts runs
of one command, `held_out` excludes it from tuning, `metrics` are those of the run, `meta` is where and when.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pdvsim.common.commandline import experiment_of
from pdvsim.common.files import sha256, write_whole
from pdvsim.realrun.machine import as_served
from pdvsim.sim.config import Experiment
from pdvsim.sim.limits import MAX_DATA_BYTES, MAX_TOKENS
from pdvsim.sim.reading import error_text, parse_json, quoted, read_text

# real runs on H200s
SHIPPED = (
    "runs.jsonl",
    "truth.jsonl",
    "ahead.jsonl",
    "experts.jsonl",
    "prefixes.jsonl",
    "tail.jsonl",
    "parallel.jsonl",
    "lanes.jsonl",
    "fresh.jsonl",
    "edges.jsonl",
    "waves.jsonl",
)
FAMILIES = ("ttft", "tpot", "itl", "e2el")
MARKS = ("mean", "median", "p90", "p95", "p99")
METRICS = ("output_throughput", *(f"{mark}_{name}_ms" for name in FAMILIES for mark in MARKS))  # that are compared
MOST_MS, MOST_PER_S = 1e9, 1e9  # that a server can have: eleven days, and tokens per second
EARLIER_TOKENS = 2 * MAX_TOKENS  # limit of a file's requests in runs whose record has none: nothing was left out


@dataclass(frozen=True)
class ServedRun:
    """One real run; without metrics, one that is to be made."""

    command: str
    repeat: int
    held_out: bool
    metrics: dict[str, Any]
    meta: dict[str, Any]
    folder: Path  # that its files are named from
    own_policies: bool = False  # policy files that the command names may be run

    @cached_property
    def experiment(self) -> Experiment:
        """The experiment of the command, as the engine serves it; a ValueError if the command has none."""
        if "--arch" not in self.command:
            raise ValueError(f"{self.command[:80]!r} names no --arch")
        given = experiment_of(self.command, self.own_policies)
        traffic, acceptance = given.traffic, given.acceptance
        if traffic.dataset_path is not None:
            known = not self.metrics or "longest_request" in self.meta
            longest = traffic.max_model_len or (None if known else EARLIER_TOKENS)
            path = str(self.folder / traffic.dataset_path)
            traffic = replace(traffic, dataset_path=path, max_model_len=longest)
        if acceptance.acceptance_trace is not None:
            acceptance = replace(acceptance, acceptance_trace=str(self.folder / acceptance.acceptance_trace))
        return as_served(replace(given, traffic=traffic, acceptance=acceptance))

    @property
    def id(self) -> str:
        """The name under which its launches are filed."""
        return sha256(f"{self.command} #{self.repeat}".encode())[:12]

    @property
    def line(self) -> str:
        """The run as a line of its file."""
        fields = {name: getattr(self, name) for name in ("command", "repeat", "held_out", "metrics", "meta")}
        return json.dumps({name: value for name, value in fields.items() if value != {}}, default=str) + "\n"


def read_runs(path: str | Path, planned: bool = False, own_policies: bool = False) -> list[ServedRun]:
    """The runs of a file, or what it plans; a ValueError of one line if it is not one.

    Policy files that it names are refused unless `own_policies` are trusted: to look at one is to run it.
    """
    number = 0
    try:
        runs = []
        for line in read_text(path, MAX_DATA_BYTES).splitlines():
            number += 1
            entry = parse_json(line)
            if isinstance(entry, dict) and "request_throughput" in entry and "command" not in entry:
                raise ValueError(f"it is a benchmark's result, for --bench {path} --model NAME")
            runs.append(_read(entry, Path(path).parent, planned, own_policies))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        where = f", line {number}" if number else ""
        raise ValueError(f"{path}{where}: not a file of real runs: {error_text(error)}") from None
    if not runs:
        raise ValueError(f"{path}: holds no runs")
    return runs


def _read(line: dict[str, Any], folder: Path, planned: bool, own_policies: bool) -> ServedRun:
    repeat = line.get("repeat", 0)
    if type(repeat) is not int or repeat < 0:
        raise ValueError(f"repeat must be a whole number from 0, got {quoted(repeat)}")
    run = ServedRun(
        command=str(line["command"]),
        repeat=repeat,
        held_out=line.get("held_out", False) is True,
        metrics=dict(line.get("metrics", {}) if planned else line["metrics"]),
        meta=dict(line.get("meta", {})),
        folder=folder,
        own_policies=own_policies,
    )
    _ = run.experiment
    for name in METRICS:
        value = run.metrics.get(name)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise ValueError(f"{name} must be a number from 0, or null, got {quoted(value)}")
        if value is not None and value > (most := MOST_MS if name.endswith("_ms") else MOST_PER_S):
            raise ValueError(f"{name} is {value:g}: no server has more than {most:g}")
    if not planned and not run.metrics["output_throughput"] > 0:
        raise ValueError("output_throughput is not above 0")
    return run


def write_runs(path: Path, runs: Iterable[ServedRun]) -> None:
    """Write all runs of a file."""
    write_whole(path, "".join(run.line for run in runs).encode())
