"""Accuracy of a profile from an engine's log: `python studies/own_engine.py FOLDER`, on an H200.

Eight runs of our own engine (draft lengths 0 and 4, at concurrency 1, 4, 16 and 64) give the logs, two of them the
benchmarks. The profile fitted to these alone predicts twelve other runs, as does the profile of the card's kernels.
Where FOLDER holds runs already, nothing is served and no GPU is needed: by default it is
calibration/data/h200/own-engine. Profile and errors are written to results/own-engine. Targets: median 4%, 95th
percentile 12%.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from pdvsim.bench.output import check_folder
from pdvsim.calibration.fit.build import save
from pdvsim.calibration.fit.engine import calibrate_engine, read_bench, read_logs
from pdvsim.calibration.fit.points import middle
from pdvsim.calibration.validate.runs import Workbench
from pdvsim.calibration.validate.served import ServedRun, read_runs, write_runs
from pdvsim.common.commandline import command_line
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.version import __version__
from pdvsim.realrun.machine import Machine, as_served
from pdvsim.sim.config import Acceptance, Experiment, Server, Traffic
from pdvsim.sim.hardware.models import gpu, pair
from pdvsim.sim.metrics.iterations import iteration_lines
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.records import Result
from pdvsim.sim.run import simulate

KEPT = Path(__file__).parents[1] / "calibration/data/h200/own-engine"
RESULTS = Path("results/own-engine")
PAIR, CARD = "tinyllama-1.1b:llama-2-7b", "h200"
USERS = (1, 4, 16, 64)
DRAFTS = (0, 4)
BENCHED = 16  # concurrent requests in the runs that stand for benchmarks
METRICS = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms")
# draft length, concurrency, prompt and output tokens: other k, other loads, other lengths
OTHERS = (
    (0, 8, 256, 200), (0, 32, 256, 200), (0, 48, 700, 100), (1, 24, 256, 200), (2, 8, 256, 200), (2, 48, 128, 300),
    (3, 16, 700, 100), (3, 32, 64, 400), (4, 2, 256, 200), (4, 32, 512, 128), (6, 8, 256, 200), (6, 64, 256, 200),
)  # fmt: skip


def run_of(k: int, users: int, prompt: int = 256, output: int = 200, *, seed: int = 0) -> Experiment:
    """A closed loop of colocated serving."""
    traffic = Traffic(
        dataset_name="random", num_prompts=max(12, 3 * users), max_concurrency=users, input_len=prompt,
        output_len=output, random_range_ratio=0.3, seed=seed,
    )  # fmt: skip
    server = Server(pair=PAIR, num_speculative_tokens=k)
    return as_served(Experiment("colocated", traffic, Acceptance(acceptance_rate=0.7), server))


def serve(folder: Path, machine: Machine) -> None:
    """Serve on this machine, and save logs, benchmarks and the other runs in `folder`."""
    fitted = [run_of(k, users) for k in DRAFTS for users in USERS]
    others = [run_of(k, users, prompt, output, seed=1) for k, users, prompt, output in OTHERS]
    results = dict(_served([*fitted, *others], machine))
    for k in DRAFTS:
        lines: list[str] = []
        for experiment in fitted:
            users = experiment.traffic.max_concurrency
            if experiment.server.num_speculative_tokens == k:
                lines += iteration_lines(results[experiment], "pdvsim", __version__)
                if users == BENCHED:
                    bench = {"max_concurrency": users} | summarise(results[experiment])
                    write_whole(folder / f"k{k}-{users}.json", (json.dumps(bench, indent=1) + "\n").encode())
        write_whole(folder / f"k{k}.log", "".join(f"{line}\n" for line in lines).encode())
    runs = []
    for experiment in others:
        meta = {key: value for key, value in results[experiment].meta.items() if key != "telemetry"}
        command, metrics = command_line("realrun", experiment), summarise(results[experiment])
        runs.append(ServedRun(command, 0, False, metrics, meta, folder))
    write_runs(folder / "runs.jsonl", runs)


def prove(recorded: Path, folder: Path) -> dict[str, Any]:
    """Fit a profile to the saved logs and benchmarks, and predict the other runs with it."""
    runs = read_runs(recorded / "runs.jsonl")
    logs = read_logs(tuple(str(recorded / f"k{k}.log") for k in DRAFTS))
    benches = tuple(read_bench(str(path)) for path in sorted(recorded.glob(f"k*-{BENCHED}.json")))
    fitted = calibrate_engine(logs, benches, pair(PAIR), gpu(CARD), "own-engine")
    profile = folder / "own-engine.json"
    save(fitted.profile, profile)
    rows: list[dict[str, Any]] = []
    for run in runs:
        experiment, hardware = run.experiment, run.experiment.hardware
        ways = {"log": replace(hardware, profile=str(profile)), "kernels": replace(hardware, gpu=CARD)}
        predicted = {way: summarise(simulate(replace(experiment, hardware=one))) for way, one in ways.items()}
        errors = {way: {m: one[m] / run.metrics[m] - 1 for m in METRICS} for way, one in predicted.items()}
        rows.append({"command": run.command, "errors": errors})
    document = {**fitted.document(), "runs": rows, "errors": {way: _summed(rows, way) for way in ("log", "kernels")}}
    write_whole(folder / "own-engine.errors.json", (json.dumps(document, indent=1) + "\n").encode())
    return document


def _summed(rows: list[dict[str, Any]], way: str) -> dict[str, dict[str, float]]:
    """Errors of one profile, by metric and over all metrics."""
    by_metric = {metric: [row["errors"][way][metric] for row in rows] for metric in METRICS}
    together = [error for errors in by_metric.values() for error in errors]
    return {metric: middle(errors) for metric, errors in [*by_metric.items(), ("all", together)]}


def _served(experiments: Sequence[Experiment], machine: Machine) -> Iterator[tuple[Experiment, Result]]:
    """Serve all runs, with one rig per draft length."""
    bench = Workbench(machine, partial(say, "own_engine"))
    by_length = sorted(experiments, key=_draft_length)
    for k, group in groupby(by_length, key=_draft_length):
        alike = list(group)
        bench.ready(alike)
        for experiment in alike:
            say("own_engine", f"k={k}, {experiment.traffic.max_concurrency} concurrent requests")
            yield experiment, bench.served(experiment)


def _draft_length(experiment: Experiment) -> int:
    return experiment.server.num_speculative_tokens


def main(recorded: Path = KEPT) -> None:
    """Serve if there are no runs, fit, and print the errors."""
    if not (recorded / "runs.jsonl").exists():
        serve(check_folder(recorded), Machine())
    print(json.dumps(prove(recorded, check_folder(RESULTS))["errors"], indent=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
