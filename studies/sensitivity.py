"""How much predictions change if every forward takes some percent longer, as on another card of the same type.

    python studies/sensitivity.py [PERCENT]

The held-out real runs are simulated with the H200's profile, and with all its forward times that much longer.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace

import numpy as np

from pdvsim.calibration.validate.served import METRICS, read_runs
from pdvsim.cli.validate.runs import shipped
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate


def main(percent: float) -> None:
    """Print the median and the 95th percentile of the changes by metric."""
    changes: dict[str, list[float]] = defaultdict(list)
    for run in (run for path in shipped() for run in read_runs(path) if run.held_out):
        experiment = applicable(run.experiment)
        profile = covering_profile(experiment)
        slower = replace(
            profile, models={name: terms.scaled(1 + percent / 100) for name, terms in profile.models.items()}
        )
        before, after = (summarise(simulate(experiment, profile=each)) for each in (profile, slower))
        for name in METRICS:
            if before.get(name):
                changes[name].append(abs(after[name] / before[name] - 1))
    changes["all"] = [change for values in changes.values() for change in values]
    print("| metric | runs | median | 95th percentile |\n|---|---|---|---|")
    for name in ("all", "output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms"):
        values = np.array(changes[name])
        print(f"| {name} | {len(values)} | {np.nanmedian(values):.1%} | {np.nanquantile(values, 0.95):.1%} |")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 1.0)
