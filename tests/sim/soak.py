"""An hour of laws under random examples, and of sweeps that are killed: `make soak`, or run this file.

The property tests of the simulator, and the sweep that is killed at random moments and resumed, run again and again,
each time with examples of another seed. Ends with 1 at the first seed that breaks a law, with the command to run again.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

TESTS = Path(__file__).parents[1]
LAWS = {
    "sim/test_laws.py": (
        "conservation", "a_block_changes_nothing", "a_block_is_cut_at_an_instant", "rounds_are_leviathans",
        "more_bandwidth_never_hurts_anyone_in_a_queue_of_one_server",
    ),
    "sim/test_streaming.py": ("the_metrics_are_those_of_the_records",),
    "sim/test_prefix.py": ("blocks_are_conserved_under_random_traffic",),
    "bench/test_sweepdir.py": ("killed_at_random_moments_and_resumed",),
}  # fmt: skip


def main() -> int:
    """Soak; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    begin_s, seed = time.monotonic(), args.seed
    tests = [f"{TESTS / file}::test_{law}" for file, laws in LAWS.items() for law in laws]
    while time.monotonic() - begin_s < 60 * args.minutes:
        command = [sys.executable, "-m", "pytest", "-x", f"--hypothesis-seed={seed}", *tests]
        if subprocess.run(command, env=os.environ | {"PDVSIM_SOAK": str(seed)}, check=False).returncode:
            print(f"seed {seed} breaks a law; again: PDVSIM_SOAK={seed} {shlex.join(command)}")
            return 1
        seed += 1
    print(f"{(time.monotonic() - begin_s) / 60:.1f} minutes, seeds {args.seed} to {seed - 1}: all laws hold")
    return 0


if __name__ == "__main__":
    sys.exit(main())
