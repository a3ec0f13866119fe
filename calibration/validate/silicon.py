"""Measured servers of other engines (`servers`) against simulations of their load on the engines' profiles.

Errors of TPOT and TTFT, and AIConfigurator's estimates of the same rows.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.bench.join import Joined, grouped, middle, of_metric
from pdvsim.calibration.validate.servers import FOLDER, ROUNDS, SiliconRow
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.prices.shapes import Floats
from pdvsim.sim.run import simulate

LARGE = {"expert-parallel": "expert or data parallelism", "apart": "prefill apart"}
SETTINGS = ("concurrency", "tensor_parallel", "weights")
PredictedRow = Joined[SiliconRow]
LABELS: dict[str, Callable[[PredictedRow], str]] = {
    "kind": lambda one: group_of(one.of),
    "engine and card": lambda one: f"{one.of.engine} {one.of.card}",
    "model": lambda one: one.of.model,
    "concurrency": lambda one: str(1 << (one.of.concurrency.bit_length() - 1)),
}


def predict(row: SiliconRow) -> PredictedRow:
    """Simulate a row's load; a ValueError where the server could not hold it."""
    experiment = row.experiment
    profile = engine_profile(row.engine, row.card, row.image)
    if row.prompts_in_graphs:
        profile = replace(profile, step=replace(profile.step, eager_layer_s=0.0))
    result = simulate(experiment, profile=profile.covering(experiment.pair))
    requests = result.requests
    order = np.argsort(requests["arrival_s"], kind="stable")
    ttft_s = (requests["first_token_s"] - requests["arrival_s"])[order]
    decode_s = (requests["finish_s"] - requests["first_token_s"])[order]
    tpot_s = decode_s / np.maximum(1, requests["output_tokens"][order] - 1)
    ttft, tpot = (over_rounds(times, row.concurrency) for times in (ttft_s, tpot_s))
    return joined(row, {"ttft_ms": 1000 * ttft, "tpot_ms": 1000 * tpot})


def joined(row: SiliconRow, predicted: Mapping[str, float]) -> PredictedRow:
    """A row with predictions of its times: ours, or AIConfigurator's."""
    measured = {"tpot_ms": row.tpot_ms} | ({"ttft_ms": row.ttft_ms} if row.ttft_counts else {})
    return Joined(row, measured, predicted)


def over_rounds(times_s: Floats, concurrency: int) -> float:
    """The mean over all rounds of a benchmark, of which the first, the last and some others were simulated."""
    first, last = times_s[:concurrency], times_s[-concurrency:]
    between = times_s[concurrency:-concurrency] if len(times_s) > 2 * concurrency else last
    return float(first.mean() + (ROUNDS - 2) * between.mean() + last.mean()) / ROUNDS


def read_estimates(path: Path = FOLDER / "aiconfigurator.csv") -> tuple[dict[str, dict[str, float]], dict[str, str]]:
    """AIConfigurator's estimates by row, and why there is none of others (`studies/aiconfigurator_estimates.py`)."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = {
        row["id"]: {name: float(row[name]) for name in ("ttft_ms", "tpot_ms")} for row in rows if not row["failure"]
    }
    return times, {row["id"]: row["failure"] for row in rows if row["failure"]}


def ratios(rows: Sequence[PredictedRow]) -> dict[str, float]:
    """Median and 95th percentile of the errors of a predicted ratio of two rows' TPOT.

    The rows are of one engine, version, card, model and length, and differ in one of `SETTINGS`.
    """
    errors = []
    for varied in SETTINGS:
        off: dict[tuple[object, ...], list[float]] = {}
        for one in rows:
            off.setdefault(one.of.like(varied), []).append(one.errors["tpot_ms"])
        pairs = (pair for group in off.values() for pair in itertools.combinations(group, 2))
        errors += [math.expm1(abs(math.log((1 + a) / (1 + b)))) for a, b in pairs]
    return middle(errors)


def group_of(row: SiliconRow) -> str:
    """The group that a row's errors are reported in."""
    return LARGE.get(row.kind, "dense" if row.dense else "mixtures of experts")


def kind_of(reason: str) -> str:
    """A reason without its figures, and without names in quotes."""
    words = re.sub(r"'[^']*('|$)", "…", reason).split()
    return " ".join("…" if any(sign.isdecimal() for sign in word) else word for word in words)


def document(
    rows: Sequence[PredictedRow], odd: dict[str, str], failures: dict[str, str], held_out: bool
) -> dict[str, Any]:
    """Errors by engine, card, model and concurrency, AIConfigurator's of the same rows, and what was left out."""
    estimates, refusals = read_estimates()
    refused = Counter(kind_of(refusals[one.of.id]) for one in rows if one.of.id in refusals)
    tables = {}
    for name, label in LABELS.items():
        parts = grouped(rows, label)
        ordered = sorted(parts, key=lambda part: (int(part) if part.isdecimal() else 0, part))
        tables[name] = {part: _errors(parts[part], estimates) for part in ordered}
    return {
        "held_out": held_out,
        "all": _errors(rows, estimates),
        "by": tables,
        "ratios": {"rows": len(rows), **ratios(rows)},
        "not_estimated": [{"reason": reason, "rows": count} for reason, count in refused.most_common()],
        "odd": odd,
        "failed": failures,
        "rows": [{"id": one.of.id, **one.predicted, "errors": one.errors} for one in rows],
    }


def _errors(rows: Sequence[PredictedRow], estimates: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """TPOT and TTFT, and both programs' on the rows that AIConfigurator estimates as well."""
    shared = [one for one in rows if one.of.id in estimates]
    theirs = [joined(one.of, estimates[one.of.id]) for one in shared]
    sides = {"": rows, "_shared": shared, "_aiconfigurator": theirs}
    errors = {
        f"{name}{side}": middle(of_metric(those, f"{name}_ms"))
        for side, those in sides.items()
        for name in ("tpot", "ttft")
    }
    return {"rows": len(rows), "shared": len(shared), **errors}
