"""Speed-ups by speculation that others measured on real engines, against pdvsim's.

    python studies/published_speculation.py [--engine pdvsim] [--held-out]

Each row of `calibration/data/published_speculation.csv` is one published pair of runs, plain and drafted, with its
settings and source. Both are simulated as closed loops of the stated concurrency, with lengths typical of the data set
and an equal acceptance at every position that gives the stated acceptance length. EAGLE-1 heads are simulated as MTP
layers: one layer that joins state and embedding, and the target's output projection.

Rows marked held_out are kept aside as a test: no constant may be fitted to them. They are shown only when asked for.

Left out: trees of drafts, which are simulated as chains of as many steps (column verified_tokens: how many tokens the
engine verified). Those rows are counted apart.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path
from typing import Any, NamedTuple

from scipy.optimize import brentq

from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware.kernels import shipped_tables
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate

DATA = Path(__file__).resolve().parent.parent / "calibration" / "data" / "published_speculation.csv"
# Mean tokens in and out: the middle four from SpecDecode-Bench's traces, the others assumed
LENGTHS = {
    "mt-bench": (100, 250), "gsm8k": (94, 166), "sharegpt": (355, 728), "cnn": (838, 323), "instructcoder": (171, 262),
    "long-spec-bench": (4500, 1000),
}  # fmt: skip
NEAR = 0.1
LEAST_REQUESTS = 8


class Compared(NamedTuple):
    """A published speed-up and the predicted one."""

    row: dict[str, str]
    published: float
    predicted: float

    @property
    def is_tree(self) -> bool:
        return bool(self.row["verified_tokens"])

    @property
    def is_near(self) -> bool:
        return abs(self.predicted / self.published - 1) <= NEAR

    @property
    def has_direction(self) -> bool:
        """Whether both say that speculation pays, or both that it does not."""
        return (self.predicted >= 1) == (self.published >= 1)


def rows(held_out: bool = False) -> list[dict[str, str]]:
    """The published rows."""
    with DATA.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if held_out or not row["held_out"]]


def rates_of(length: float, k: int) -> tuple[float, ...]:
    """Shares of drafts accepted at each position, if each is as likely to be accepted, that give a mean length."""
    if length >= k + 1:
        return (1.0,) * k
    rate = float(brentq(lambda p: sum(p**n for n in range(1, k + 1)) - (length - 1), 0.0, 1.0))
    return tuple(rate**n for n in range(1, k + 1))


def experiment(row: dict[str, str], k: int, engine: str | None) -> Experiment:
    """One side of a row."""
    target, drafter, clients = row["target"], row["drafter"], int(row["concurrency"])
    prompt, output = LENGTHS[row["dataset"]]
    pair = f"ngram:{target}" if drafter == "ngram" else f"{drafter}-{target}:{target}"
    traffic = Traffic(
        "random", num_prompts=max(LEAST_REQUESTS, 3 * clients), max_concurrency=clients, input_len=prompt,
        output_len=output, random_range_ratio=0.3,
    )  # fmt: skip
    accepted = (
        Acceptance(synthetic_acceptance_rates=rates_of(float(row["acceptance_length"]), k)) if k else Acceptance()
    )
    options: dict[str, Any] = {"tensor_parallel_size": int(row["gpus"]), "band": False}
    known = any((row["engine"], row["card"]) == tables[:2] for tables in shipped_tables())
    options["engine"] = engine or (row["engine"] if known else "pdvsim")  # that of the row, where its times are known
    hardware = Hardware(row["card"], **options)
    return suited(Experiment("colocated", traffic, accepted, Server(pair, num_speculative_tokens=k), hardware))


def compare(row: dict[str, str], engine: str | None = None) -> Compared:
    """Simulate both sides of a row."""
    plain, drafted = (summarise(simulate(experiment(row, k, engine))) for k in (0, int(row["k"])))
    if row["unit"] == "TPOT ms":
        return Compared(row, float(row["speedup"]), plain["mean_tpot_ms"] / drafted["mean_tpot_ms"])
    return Compared(row, float(row["speedup"]), drafted["output_throughput"] / plain["output_throughput"])


def summary(name: str, compared: list[Compared]) -> str:
    """How many are near, and how many have the right direction."""
    near, right = sum(one.is_near for one in compared), sum(one.has_direction for one in compared)
    off = sorted(abs(one.predicted / one.published - 1) for one in compared)
    return (
        f"{name}: {near} of {len(compared)} within {NEAR:.0%} ({near / len(compared):.0%}), median error "
        f"{off[len(off) // 2]:.0%}, direction right in {right} of {len(compared)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", help="predict all rows with this engine; default: that of each row, if supported")
    parser.add_argument("--held-out", action="store_true", help="also the rows that are kept aside")
    args = parser.parse_args()
    compared = []
    print("engine  card       target         drafter  k  batch  length  published  predicted   error  source")
    for row in rows(args.held_out):
        one = compare(row, args.engine)
        compared.append(one)
        print(
            f"{row['engine']:7} {row['card']:10} {row['target']:14} {row['drafter']:7} {row['k']:>2} "
            f"{row['concurrency']:>6} {float(row['acceptance_length']):7.2f} {one.published:10.2f} "
            f"{one.predicted:10.2f} "
            f"{one.predicted / one.published - 1:+7.0%}  {row['source']}{' (tree)' if one.is_tree else ''}"
            f"{'' if one.has_direction else '  WRONG DIRECTION'}",
            flush=True,
        )
    for name, part in (
        ("chains", [one for one in compared if not one.is_tree]), ("trees", [one for one in compared if one.is_tree]),
        ("all", compared),
    ):  # fmt: skip
        if part:
            print(summary(name, part))
    return 0


if __name__ == "__main__":
    sys.exit(main())
