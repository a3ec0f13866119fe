"""Accuracy of a profile from an engine's log: `python studies/own_engine.py [FOLDER]`.

Eight runs of our own engine on an H200 (draft lengths 0 and 4, at concurrency 1, 4, 16 and 64) gave the logs in FOLDER,
by default calibration/data/h200/own-engine, and two of them the benchmarks. The profile fitted to these alone predicts
twelve other runs, as does the profile of the card's kernels. Profile and errors are written to results/own-engine.
Targets: median 4%, 95th percentile 12%.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdvsim.bench.join import middle
from pdvsim.bench.output import check_folder
from pdvsim.calibration.fit.build import save
from pdvsim.calibration.fit.engine import calibrate_engine, read_bench, read_logs
from pdvsim.calibration.validate.served import read_runs
from pdvsim.common.files import write_whole
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.models.presets import pair
from pdvsim.sim.prices.cards import gpu
from pdvsim.sim.run import simulate

KEPT = Path(__file__).parents[1] / "calibration/data/h200/own-engine"
RESULTS = Path("results/own-engine")
PAIR, CARD = "tinyllama-1.1b:llama-2-7b", "h200"
METRICS = ("output_throughput", "mean_tpot_ms", "mean_ttft_ms")


def prove(recorded: Path, folder: Path) -> dict[str, Any]:
    """Fit a profile to the saved logs and benchmarks, and predict the other runs with it."""
    runs = read_runs(recorded / "runs.jsonl")
    logs = read_logs(tuple(str(recorded / f"k{k}.log") for k in (0, 4)))
    benches = tuple(read_bench(str(path)) for path in sorted(recorded.glob("k*-16.json")))
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


def main(recorded: Path = KEPT) -> None:
    """Fit, and print the errors."""
    print(json.dumps(prove(recorded, check_folder(RESULTS))["errors"], indent=1))


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
