"""The simulator's speed against that of another commit, run alternately on this machine.

    make bench AGAINST=v0.1.0        (python tests/benchmarks/against.py v0.1.0 [--repeats 5])

Each figure is processor time of `pdvsim.run` in a fresh process, the least of several: other work on the machine only
adds to it. In brackets the least and the greatest of the pairs' own ratios. Start-up is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXED = {"dataset_name": "random", "input_len": 128, "output_len": 128}
LOADS: dict[str, dict[str, object]] = {
    "10 requests": {"max_concurrency": 10, "num_prompts": 10},
    "concurrency 1": {"max_concurrency": 1, "num_prompts": 300},
    "concurrency 64, fixed lengths": {"max_concurrency": 64, "num_prompts": 1500, **FIXED},
    "concurrency 64, ShareGPT": {"max_concurrency": 64, "num_prompts": 1500},
    "4 per second": {"request_rate": 4, "num_prompts": 3000},
    "goodput, 4 per second": {"request_rate": 4, "num_prompts": 1000, "controller": "goodput"},
}
ARCHS = ("autoregressive", "colocated", "pdv")
TIMED = """
import json, sys, time
import pdvsim
flags = json.loads(sys.argv[1])
pdvsim.run(**{**flags, "num_prompts": 5})
begin = time.process_time()
pdvsim.run(**flags)
print(time.process_time() - begin)
"""


def seconds(tree: Path, flags: dict[str, object]) -> float:
    """Processor time of one run with the code in `tree`."""
    out = subprocess.run(
        [sys.executable, "-c", TIMED, json.dumps(flags)],
        env={**os.environ, "PYTHONPATH": str(tree)},
        cwd=tempfile.gettempdir(),
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return float(out.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "then"
        git = ["git", "-C", str(ROOT), "worktree"]
        if subprocess.run([*git, "add", "--quiet", "--detach", str(tree), args.commit]).returncode:
            sys.exit(2)
        try:
            for arch in ARCHS:
                for name, load in LOADS.items():
                    if arch == "autoregressive" and "controller" in load:
                        continue
                    flags = {"arch": arch, "engine": "pdvsim", "pair": "tinyllama-1.1b:llama-2-7b", **load}
                    pairs = [(seconds(tree, flags), seconds(ROOT, flags)) for _ in range(args.repeats)]
                    then, now = (min(side) for side in zip(*pairs, strict=True))
                    ratios = [a / b for a, b in pairs]
                    print(
                        f"{arch:>14}  {name:<29} {args.commit[:10]} {then:6.2f} s   here {now:6.2f} s   "
                        f"{then / now:5.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})",
                        flush=True,
                    )
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=False)


if __name__ == "__main__":
    main()
