"""What a sweep of many short points costs beyond simulating them, and whether its memory stays flat.

    python tests/benchmarks/sweep_overhead.py [--points 1000] [--jobs 2] [--num-prompts 250]

The sweep runs as users run it (`pdvsim sweep`, files written). Processor time is compared, not wall time, so that a
busy machine does not matter: the share of all processor time, start-up and tables included, that was spent inside
`simulate`. On an idle machine the wall time is printed against it: cores kept busy by simulation.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from pathlib import Path

from pdvsim.cli import main as pdvsim
from pdvsim.common.outcomes import Row
from pdvsim.study import sweep
from pdvsim.study.sweep import Point

real = sweep.run_point


def timed(index: int, point: Point) -> Row:
    """A point's row, with the processor time of its simulation as one more column."""
    begin_s = time.process_time()
    row = real(index, point)
    return row | {"simulate_cpu_s": time.process_time() - begin_s}


def rss_mb() -> float:
    """Memory of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=1000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--num-prompts", type=int, default=250)
    args = parser.parse_args()

    import pandas as pd

    import pdvsim.study.folder as sweepdir

    sweepdir.run_point = timed
    folder = Path(tempfile.mkdtemp()) / "sweep"
    memory: list[tuple[int, float]] = []

    def watch() -> None:
        while True:
            mb = rss_mb()  # before counting: the figure is of then or earlier
            memory.append((len(list(folder.glob("parts/*.json"))), mb))
            time.sleep(2)

    threading.Thread(target=watch, daemon=True).start()
    argv = ["sweep", "--arch", "colocated", "--concurrency", "8", "--jobs", str(args.jobs)]
    argv += [
        "--pair",
        "tinyllama-1.1b:llama-2-7b",
        "--num-runs",
        str(args.points),
        "--num-prompts",
        str(args.num_prompts),
    ]
    begin_s = time.perf_counter()
    code = pdvsim([*argv, "-o", str(folder), "--json"])
    wall_s = time.perf_counter() - begin_s
    from joblib.externals.loky import get_reusable_executor

    get_reusable_executor().shutdown(wait=True)  # only then do its processes' times count
    mine, workers = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    here_s, there_s = (usage.ru_utime + usage.ru_stime for usage in (mine, workers))
    inside_s = float(pd.read_parquet(folder / "summary.parquet")["simulate_cpu_s"].sum())
    shutil.rmtree(folder.parent)
    assert code == 0
    early = next((mb for done, mb in memory if done >= args.points // 4), memory[-1][1])
    late = next((mb for done, mb in memory if done >= 0.9 * args.points), memory[-1][1])
    lines = (
        f"{args.points} points of {args.num_prompts} requests on {args.jobs} of {os.cpu_count()} cores",
        f"  processor time  {here_s + there_s:8.1f} s: {inside_s:.1f} s in simulation = "
        f"{100 * inside_s / (here_s + there_s):.1f}%",
        f"  of it: workers  {there_s:8.1f} s, parent {here_s:.1f} s ({1e3 * here_s / args.points:.1f} ms a point)",
        f"  wall time       {wall_s:8.1f} s: simulation kept {inside_s / wall_s:.2f} of {args.jobs} cores busy",
        f"  parent's memory {early:8.1f} MB after a quarter of the points, {late:.1f} MB after nine tenths",
        f"  workers' peak   {workers.ru_maxrss / 1024:8.1f} MB",
    )
    print("\n".join(lines), file=sys.stderr)


if __name__ == "__main__":
    main()
