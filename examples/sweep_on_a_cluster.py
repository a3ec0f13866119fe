"""Sweep on a cluster: the points of a sweep run wherever Dask has workers.

    python sweep_on_a_cluster.py                     # this machine's cores
    python sweep_on_a_cluster.py tcp://10.0.0.1:8786

Rows have the same order and values everywhere. For long sweeps use the command,
`pdvsim sweep --scheduler … -o FOLDER`: it saves each finished point, and --resume continues.
"""

import sys

import pdvsim


def main(scheduler: str | None = None, num_prompts: int = 100) -> None:
    """Two architectures, four loads, three draft lengths, three seeds each."""
    points = pdvsim.sweep(
        arch=["colocated", "pdv"],
        concurrency=[1, 4, 16, 64],
        vary={"num_speculative_tokens": [1, 2, 4]},
        num_runs=3,
        num_prompts=num_prompts,
        scheduler=scheduler,
    )
    best = points.groupby(["load", "arch", "num_speculative_tokens"])["output_throughput"].mean().unstack().round(0)
    print("output tokens/s, by draft length\n")
    print(best.to_string())


if __name__ == "__main__":
    arguments = sys.argv[1:]
    small = {"num_prompts": 4} if "small" in arguments else {}
    main(*(argument for argument in arguments if argument != "small"), **small)
