"""Many broken files and command lines: `make fuzz`, or `python tests/fuzz.py --count 100000 --first 0`.

Cases are numbered by their seed. They run in blocks, each in a process with bounded memory, so that one that ends its
process is found as well. Every failure is printed with the command that does it again; a run that was stopped goes on
from the seed it had reached (`--first`). Ends with 1 if the law of `fuzzcases` was broken.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BLOCK = 500
MOST_BYTES = 12 << 30  # of address space
PATIENCE_S = 1200.0  # with one block


def main() -> int:
    """Run the cases; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--first", type=int, default=0, help="seed of the first case")
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--commands", type=float, default=0.3, help="share of command lines; the others call loaders")
    parser.add_argument("--cheap", action="store_true", help="command lines of searches end before they simulate")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return _block(args)
    failures, begin_s, ways = 0, time.monotonic(), [f"--commands={args.commands}", *(["--cheap"] * args.cheap)]
    for first in range(args.first, args.first + args.count, BLOCK):
        seed = first
        end = min(first + BLOCK, args.first + args.count)
        while seed < end:  # again after a case that ended its process
            block = [sys.executable, __file__, "--worker", *ways, "--first", str(seed), "--count", str(end - seed)]
            try:
                done = subprocess.run(block, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False)
                output, code = done.stdout, done.returncode
            except subprocess.TimeoutExpired as stop:
                output, code = (stop.stdout or b"").decode(), -1  # type: ignore[union-attr]
            lines = [line for line in output.splitlines() if line]
            for line in lines:
                if line.startswith("FAILED"):
                    failures += 1
                    print(line, flush=True)
            if lines and lines[-1] == "done":
                break
            at = max([seed, *(int(line[3:]) for line in lines if line.startswith("at "))])
            failures += 1
            print(f"FAILED seed {at}: its process ended with {code}; again: {_again(at, ways)}", flush=True)
            seed = at + 1
        print(f"{end - args.first} cases, {failures} failures, {time.monotonic() - begin_s:.0f} s", flush=True)
    return 1 if failures else 0


def _again(seed: int, ways: list[str]) -> str:
    return f"python tests/fuzz.py --first {seed} --count 1 {' '.join(ways)}"


def _block(args: argparse.Namespace) -> int:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    import fuzzcases

    with tempfile.TemporaryDirectory() as folder:
        yard = fuzzcases.make_yard(Path(folder))
        for seed in range(args.first, args.first + args.count):
            print(f"at {seed}", flush=True)
            case = fuzzcases.case(seed, yard, args.commands, args.cheap)
            if broken := fuzzcases.violation(case, yard):
                ways = [f"--commands={args.commands}", *(["--cheap"] * args.cheap)]
                print(f"FAILED seed {seed}: {broken}; {case.what!r}; again: {_again(seed, ways)}", flush=True)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
