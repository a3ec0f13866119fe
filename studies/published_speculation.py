"""Speed-ups by speculation that others measured on real engines, against pdvsim's.

    python studies/published_speculation.py [--engine pdvsim] [--held-out] [--fit]

Each row of `calibration/data/published_speculation.csv` is one published pair of runs, plain and drafted, with its
settings and source. Both are simulated as closed loops of the stated concurrency, with lengths typical of the data set
and an equal acceptance at every position that gives the stated acceptance length. EAGLE-1 heads are simulated as MTP
layers: one layer that joins state and embedding, and the target's output projection. Engines have the constants of
their version, where these differ.

A tree is simulated as a chain of as many steps with the tree's acceptance length, whose forwards are priced as the
tree's: the verify over `verified_tokens` per row, and each step of the drafter after the first over `topk` rows per
request.

Rows marked held_out are set apart as a test: no constant may be fitted to them. They are shown only when asked for.
`--fit` prints the two constants of drafting (`EngineStep.round_s` and `draft_s`) with the least mean error of the
visible rows of each engine. The shipped ones are these, rounded.

Not modelled: answers that are much longer than others. Qwen3-30B-A3B's runs at 32 and 64 requests had few requests
running most of the time: their plain throughput is a sixth of what the engine reaches with all.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import brentq, minimize

from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware.composed import ComposedProfile, engine_profile
from pdvsim.sim.hardware.kernels import shipped_tables
from pdvsim.sim.hardware.profile import Profile
from pdvsim.sim.limits import MAX_DRAFT
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.sim.specs import Pair

DATA = Path(__file__).resolve().parent.parent / "calibration" / "data" / "published_speculation.csv"
# Mean tokens in and out: four from SpecDecode-Bench's traces; thinking from AngelSlim's issue (tokens per second times
# seconds, of 160 answers); the others assumed
LENGTHS = {
    "mt-bench": (100, 250), "gsm8k": (94, 166), "sharegpt": (355, 728), "cnn": (838, 323), "instructcoder": (171, 262),
    "long-spec-bench": (4500, 1000), "mt-bench-thinking": (100, 1089),
}  # fmt: skip
# Releases of the months that sources state instead of a version
RELEASES = {
    "March 2025": "0.4.4", "April 2025": "0.8.4", "July 2025": "0.9.2", "September 2025": "0.10.2",
    "November 2025": "0.11.2", "December 2025": "0.5.6",
}  # fmt: skip
NEAR = 0.1
LEAST_REQUESTS = 8
LEAST_LENGTHS, FIGURES = 3, ("published", "predicted")
TRIED_S = 1e-3  # of each constant, to see how a speed-up changes with it


class Compared(NamedTuple):
    """A published speed-up and the predicted one."""

    row: dict[str, str]
    published: float
    predicted: float

    @property
    def is_tree(self) -> bool:
        return bool(self.row["topk"])

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1

    @property
    def is_near(self) -> bool:
        return abs(self.error) <= NEAR

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
    return applicable(Experiment("colocated", traffic, accepted, Server(pair, num_speculative_tokens=k), hardware))


def profile_of(row: dict[str, str], one: Experiment, more: tuple[float, float] | None = None) -> Profile:
    """The profile of a row's engine and version; `more`: seconds per round and per draft in place of its own."""
    engine = one.hardware.predicted_engine
    if engine == "pdvsim":
        return covering_profile(one)
    profile = engine_profile(engine, row["card"], RELEASES.get(row["version"], row["version"]))
    if more is not None:
        profile = replace(profile, step=replace(profile.step, round_s=more[0], draft_s=more[1]))
    pair = one.pair if one.speculates else Pair(one.pair.target, one.pair.target)
    covering = profile.covering(pair).padded("profile")
    return as_tree(covering, row, one) if one.speculates and row["topk"] else covering


def as_tree(profile: Profile, row: dict[str, str], one: Experiment) -> Profile:
    """Return the same with a tree's forwards in place of a chain's, at the row's concurrency."""
    assert isinstance(profile, ComposedProfile)
    pair, requests, steps = one.pair, int(row["concurrency"]), int(row["k"])
    context = requests * sum(LENGTHS[row["dataset"]])
    target, drafter = profile.cost_model(pair.target), profile.cost_model(pair.draft)
    tokens = int(row["verified_tokens"])
    parts = -(-tokens // MAX_DRAFT)  # attention wider than was measured reads the cache once for each part
    chain, tree = target.price(requests, steps + 1), target.price(parts * requests, -(-tokens // parts))
    wider_s = tree.seconds(parts * context) - chain.seconds(context)
    one_s, many_s = (drafter.price(requests * rows_each).seconds_0 for rows_each in (1, int(row["topk"])))
    more_s = wider_s + (steps - 1) * (many_s - one_s)
    fit = profile.models[pair.target.name]
    wider = replace(fit, width_knots=tuple((width, s + more_s * (width > 1)) for width, s in fit.width_knots))
    return replace(profile, models=profile.models | {pair.target.name: wider})


def compare(row: dict[str, str], engine: str | None = None, more: tuple[float, float] | None = None) -> Compared:
    """Simulate both sides of a row."""
    sides = [experiment(row, k, engine) for k in (0, int(row["k"]))]
    plain, drafted = (summarise(simulate(one, profile=profile_of(row, one, more))) for one in sides)
    if row["unit"] == "TPOT ms":
        return Compared(row, float(row["speedup"]), plain["mean_tpot_ms"] / drafted["mean_tpot_ms"])
    return Compared(row, float(row["speedup"]), drafted["output_throughput"] / plain["output_throughput"])


def fitted(visible: Sequence[dict[str, str]]) -> tuple[float, float]:
    """Seconds per round and per forward of a drafter with the least mean error of these rows.

    The time of a drafted run over a plain one is linear in both, so three simulations of each row determine it.
    """
    tried = ((0.0, 0.0), (TRIED_S, 0.0), (0.0, TRIED_S))
    times = np.array([[1 / compare(row, more=more).predicted for more in tried] for row in visible])
    slopes = (times[:, 1:] - times[:, :1]) / TRIED_S
    published = np.array([float(row["speedup"]) for row in visible])

    def error(constants_ms: np.ndarray) -> float:
        over = (times[:, 0] + slopes @ np.abs(constants_ms) / 1000) * published
        return float(np.mean(np.abs(np.log(over))))

    starts = [(round_ms, draft_ms) for round_ms in (0.5, 2.0, 4.0) for draft_ms in (0.1, 0.4)]
    best = min((minimize(error, start, method="Nelder-Mead") for start in starts), key=lambda result: result.fun)
    return abs(best.x[0]) / 1000, abs(best.x[1]) / 1000


def summary(name: str, compared: list[Compared]) -> str:
    """Return how many are near, and how many have the right direction."""
    near, right = sum(one.is_near for one in compared), sum(one.has_direction for one in compared)
    errors = [one.error for one in compared]
    return (
        f"{name}: {near} of {len(compared)} within {NEAR:.0%} ({near / len(compared):.0%}), median error "
        f"{np.median(np.abs(errors)):.0%} (signed {np.median(errors):+.0%}), "
        f"direction right in {right} of {len(compared)}"
    )


def best_lengths(compared: Sequence[Compared]) -> list[str]:
    """Of sources with several draft lengths: the best one and its gain, published and predicted."""
    groups: dict[tuple[str, ...], list[Compared]] = {}
    for one in compared:
        settings = (one.row[name] for name in ("source", "target", "drafter", "concurrency", "topk"))
        groups.setdefault(tuple(settings), []).append(one)
    lines = []
    for (source, target, drafter, *_), group in groups.items():
        if len({one.row["k"] for one in group}) >= LEAST_LENGTHS:
            published, predicted = (max(group, key=lambda one: getattr(one, name)) for name in FIGURES)
            lines.append(
                f"{source}, {target}, {drafter}: best {published.published:.2f} at k = {published.row['k']} published, "
                f"{predicted.predicted:.2f} at k = {predicted.row['k']} predicted"
            )
    return lines


def print_row(one: Compared) -> None:
    row = one.row
    marks = {"tree": one.is_tree, "held out": bool(row["held_out"]), "WRONG DIRECTION": not one.has_direction}
    print(
        f"{row['engine']:7} {row['card']:10} {row['target']:14} {row['drafter']:7} {row['k']:>2} "
        f"{row['concurrency']:>6} {float(row['acceptance_length']):7.2f} {one.published:10.2f} {one.predicted:10.2f} "
        f"{one.error:+7.0%}  {row['source']}{''.join(f' ({name})' for name, holds in marks.items() if holds)}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", help="predict all rows with this engine; default: that of each row, if supported")
    parser.add_argument("--held-out", action="store_true", help="also the rows that are kept aside")
    parser.add_argument("--fit", action="store_true", help="print constants that fit the visible rows best")
    args = parser.parse_args()
    if args.fit:
        for engine in ("vllm", "sglang"):
            of_engine = [row for row in rows() if experiment(row, 0, None).hardware.predicted_engine == engine]
            round_s, draft_s = fitted(of_engine)
            print(f"{engine}, {len(of_engine)} rows: round_s {round_s:.2e}, draft_s {draft_s:.2e}", flush=True)
        return 0
    compared = []
    print("engine  card       target         drafter  k  batch  length  published  predicted   error  source")
    for row in rows(args.held_out):
        compared.append(compare(row, args.engine))
        print_row(compared[-1])
    visible = [one for one in compared if not one.row["held_out"]]
    groups = {
        "chains": [one for one in visible if not one.is_tree],
        "trees": [one for one in visible if one.is_tree],
        "all": visible,
        "published to gain": [one for one in visible if one.published >= 1],
        "published to lose": [one for one in visible if one.published < 1],
        "held out": [one for one in compared if one.row["held_out"]],
    }
    for name, part in groups.items():
        if part:
            print(summary(name, part))
    print("\n".join(best_lengths(compared)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
