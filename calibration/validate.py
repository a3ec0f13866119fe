"""Predicted against measured: the same experiments under both clocks, metric by metric.

`python -m pdvsim.calibration.validate calibration/data/h200/runs.jsonl` simulates every real run in the file with the
built-in profile and prints the errors; nothing in the profile is fitted on these runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.calibration.runs import Load
from pdvsim.sim.config import Contention
from pdvsim.sim.metrics import summarise
from pdvsim.sim.run import simulate

METRICS = (
    "output_throughput",
    *(f"{which}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for which in ("mean", "median", "p95", "p99")),
)


@dataclass(frozen=True)
class Checked:
    """One real run and its prediction: relative errors by metric, predicted over measured less one."""

    load: Load
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def errors(self) -> dict[str, float]:
        return {
            name: self.predicted[name] / self.measured[name] - 1
            for name in METRICS
            if self.measured.get(name) and not math.isnan(self.predicted[name])
        }


def check(line: dict[str, Any], contention: Contention = "fluid") -> Checked:
    """Simulate the experiment of one recorded run."""
    load = Load(**line["load"])
    experiment = load.experiment()
    experiment = replace(experiment, hardware=replace(experiment.hardware, contention=contention))
    predicted = summarise(simulate(experiment))
    return Checked(load, line["metrics"], {name: float(predicted[name]) for name in METRICS})


def read(path: str | Path) -> list[dict[str, Any]]:
    """The runs of a file; a ValueError of one line if it is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        lines = [json.loads(line) for line in text.splitlines()]
        for line in lines:
            Load(**line["load"])
            line["metrics"]["output_throughput"]
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of real runs: {' '.join(str(error).split())}") from None
    if not lines:
        raise ValueError(f"{path}: holds no runs")
    return lines


def document(checked: Sequence[Checked]) -> dict[str, Any]:
    """All errors, and their medians and 95th percentiles overall, by metric and by architecture."""
    every = [abs(e) for c in checked for e in c.errors.values()]

    def middle(errors: list[float]) -> dict[str, float]:
        return {"median": float(np.median(errors)), "p95": float(np.percentile(errors, 95))}

    archs = list(dict.fromkeys(c.load.arch for c in checked))
    return {
        "runs": [{"load": vars(c.load), "errors": c.errors} for c in checked],
        "median_abs_error": float(np.median(every)),
        "p95_abs_error": float(np.percentile(every, 95)),
        "by_metric": {m: middle([abs(c.errors[m]) for c in checked if m in c.errors]) for m in METRICS},
        "by_arch": {a: middle([abs(e) for c in checked if c.load.arch == a for e in c.errors.values()]) for a in archs},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pdvsim.calibration.validate", description=__doc__.split("\n")[0])
    parser.add_argument("runs", help="file of real runs, as pdvsim.calibration.runs writes it")
    parser.add_argument("--contention", default="fluid", choices=("fluid", "serial", "max"))
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    options = parser.parse_args(argv)
    try:
        checked = [check(line, options.contention) for line in read(options.runs)]
    except ValueError as error:
        print(f"validate: error: {error}", file=sys.stderr)
        return 2
    found = document(checked)
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    shown = (
        "output_throughput",
        "mean_ttft_ms",
        "p99_ttft_ms",
        "mean_tpot_ms",
        "mean_itl_ms",
        "p99_itl_ms",
        "mean_e2el_ms",
    )
    print(f"{'arch':14} {'load':>12} {'tok/s real':>10} {'sim':>8}  " + " ".join(f"{m:>17}" for m in shown))
    for c in checked:
        at = f"C={c.load.concurrency}" if c.load.concurrency else f"{c.load.request_rate:g} req/s"
        figures = " ".join(f"{c.errors.get(m, math.nan):+17.1%}" for m in shown)
        real, predicted = c.measured["output_throughput"], c.predicted["output_throughput"]
        print(f"{c.load.arch:14} {at:>12} {real:10.0f} {predicted:8.0f}  {figures}")
    for name, spread in {**found["by_arch"], **found["by_metric"]}.items():
        print(f"{name:20} median {spread['median']:6.1%}   95th percentile {spread['p95']:6.1%}")
    print(f"{'all':20} median {found['median_abs_error']:6.1%}   95th percentile {found['p95_abs_error']:6.1%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
