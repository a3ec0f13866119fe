"""The host between launches in service and in the warm-up before: `python studies/host_times.py`.

Of all visible runs on one lane: how much longer a gap is before a launch that carries prompts, and which share of a
warm-up's deviation from the profile is found in the run after it (`HOST_SHARE`).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pdvsim.calibration.fit.service import join_s, read_gaps
from pdvsim.calibration.validate.served import SHIPPED, read_runs
from pdvsim.sim.prices.pace import pace_in
from pdvsim.sim.prices.profile import builtin

DATA = Path(__file__).parents[1] / "calibration" / "data" / "h200"
FEWEST = 50  # gaps of a run


def main() -> int:
    """Print both."""
    paths = [DATA / name for name in SHIPPED]
    paces = {run.id: pace_in(run.meta) for path in paths for run in read_runs(path)}
    gaps, host = read_gaps(paths), builtin("h200").host
    carried = int((gaps["carried"] & gaps["whole"] & gaps["rest_s"].notna()).sum())
    print(f"{gaps['run'].nunique()} runs; {carried} launches with prompts: {1e6 * join_s(gaps):.0f} us more")
    warm, real = [], []
    for id, here in gaps[~(gaps["carried"] | gaps["read"])].groupby("run"):
        pace = paces[str(id)]
        if pace is not None and pace.host_s is not None and len(here) >= FEWEST:
            rows = float(here["rows"].mean())
            usual_s = host.between_s + host.row_s * rows
            warm.append(1e6 * (pace.host_s + pace.row_s * rows - usual_s))
            real.append(1e6 * (float(here["gap_s"].mean()) - usual_s))
    probed, runs = np.array(warm), np.array(real)
    share = float(probed @ runs / (probed @ probed))
    print(f"{len(probed)} runs with a warm-up; share of its deviation found in service: {share:.2f}")
    for name, off in (("the profile", runs), ("the warm-up", runs - probed), ("that share", runs - share * probed)):
        print(f"  mean error with {name}: {np.mean(np.abs(off)):.0f} us")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
