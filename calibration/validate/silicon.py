"""Measured servers of other engines (`servers`) against simulations of their load on the engines' profiles.

Errors of TPOT and TTFT, and AIConfigurator's estimates of the same rows.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pdvsim.calibration.validate.servers import FOLDER, ROUNDS, SiliconRow
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.prices.shapes import Floats
from pdvsim.sim.run import simulate

LARGE = {"expert-parallel": "expert or data parallelism", "apart": "prefill apart"}
SETTINGS = ("concurrency", "tensor_parallel", "weights")


@dataclass(frozen=True)
class Prediction:
    """A row, and what a simulation gives for it."""

    row: SiliconRow
    ttft_ms: float
    tpot_ms: float

    @property
    def tpot_error(self) -> float:
        return self.tpot_ms / self.row.tpot_ms - 1

    @property
    def ttft_error(self) -> float:
        return self.ttft_ms / self.row.ttft_ms - 1


def predict(row: SiliconRow) -> Prediction:
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
    return Prediction(row, 1000 * ttft, 1000 * tpot)


def over_rounds(times_s: Floats, concurrency: int) -> float:
    """The mean over all rounds of a benchmark, of which the first, the last and some others were simulated."""
    first, last = times_s[:concurrency], times_s[-concurrency:]
    between = times_s[concurrency:-concurrency] if len(times_s) > 2 * concurrency else last
    return float(first.mean() + (ROUNDS - 2) * between.mean() + last.mean()) / ROUNDS


@dataclass(frozen=True)
class Estimate:
    """AIConfigurator's estimate of a row."""

    ttft_ms: float
    tpot_ms: float


def read_estimates(path: Path = FOLDER / "aiconfigurator.csv") -> tuple[dict[str, Estimate], dict[str, str]]:
    """AIConfigurator's estimates by row, and why there is none of others (`studies/aiconfigurator_estimates.py`)."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    times = {row["id"]: Estimate(float(row["ttft_ms"]), float(row["tpot_ms"])) for row in rows if not row["failure"]}
    return times, {row["id"]: row["failure"] for row in rows if row["failure"]}


def ratios(predictions: Sequence[Prediction]) -> tuple[float, float]:
    """Median and 95th percentile of the errors of a predicted ratio of two rows' TPOT.

    The rows are of one engine, version, card, model and length, and differ in one of `SETTINGS`.
    """
    errors = []
    for varied in SETTINGS:
        groups: dict[tuple[object, ...], list[Prediction]] = {}
        for one in predictions:
            groups.setdefault(one.row.like(varied), []).append(one)
        pairs = (pair for group in groups.values() for pair in itertools.combinations(group, 2))
        errors += [math.expm1(abs(math.log((1 + a.tpot_error) / (1 + b.tpot_error)))) for a, b in pairs]
    return spread(errors)


def spread(errors: Iterable[float]) -> tuple[float, float]:
    """Median and 95th percentile of absolute errors."""
    sizes = np.abs(list(errors))
    if not sizes.size:
        return 0.0, 0.0
    return float(np.median(sizes)), float(np.quantile(sizes, 0.95))


def group_of(row: SiliconRow) -> str:
    """The group that a row's errors are reported in."""
    return LARGE.get(row.kind, "dense" if row.dense else "mixtures of experts")


def kind_of(reason: str) -> str:
    """A reason without its figures, and without names in quotes."""
    words = re.sub(r"'[^']*('|$)", "…", reason).split()
    return " ".join("…" if any(sign.isdecimal() for sign in word) else word for word in words)


def document(
    predictions: Sequence[Prediction], odd: dict[str, str], failures: dict[str, str], held_out: bool
) -> dict[str, Any]:
    """Errors by engine, card, model and concurrency, AIConfigurator's of the same rows, and what was left out."""
    estimates, refusals = read_estimates()
    refused = Counter(kind_of(refusals[one.row.id]) for one in predictions if one.row.id in refusals)
    by: dict[str, Callable[[Prediction], str]] = {
        "kind": lambda one: group_of(one.row),
        "engine and card": lambda one: f"{one.row.engine} {one.row.card}",
        "model": lambda one: one.row.model,
        "concurrency": lambda one: str(1 << (one.row.concurrency.bit_length() - 1)),
    }
    tables = {
        name: {part: _errors(group, estimates) for part, group in _parts(predictions, key).items()}
        for name, key in by.items()
    }
    return {
        "held_out": held_out,
        "all": _errors(predictions, estimates),
        "by": tables,
        "ratios": {"rows": len(predictions), **dict(zip(("median", "p95"), ratios(predictions), strict=True))},
        "not_estimated": [{"reason": reason, "rows": count} for reason, count in refused.most_common()],
        "odd": odd,
        "failed": failures,
        "rows": [
            {"id": one.row.id, "tpot_ms": one.tpot_ms, "ttft_ms": one.ttft_ms, "tpot_error": one.tpot_error,
             "ttft_error": one.ttft_error}
            for one in predictions
        ],
    }  # fmt: skip


def _parts(predictions: Iterable[Prediction], key: Callable[[Prediction], str]) -> dict[str, list[Prediction]]:
    parts: dict[str, list[Prediction]] = {}
    for one in predictions:
        parts.setdefault(key(one), []).append(one)
    return dict(sorted(parts.items(), key=lambda part: (int(part[0]) if part[0].isdecimal() else 0, part[0])))


def _errors(group: Sequence[Prediction], estimates: dict[str, Estimate]) -> dict[str, Any]:
    """TPOT and TTFT, and both programs' on the rows that AIConfigurator estimates as well."""
    shared = [one for one in group if one.row.id in estimates]
    timed, waited = ([one for one in some if one.row.ttft_counts] for some in (group, shared))
    return {
        "rows": len(group),
        "tpot": spread(one.tpot_error for one in group),
        "ttft": spread(one.ttft_error for one in timed),
        "shared": len(shared),
        "tpot_shared": spread(one.tpot_error for one in shared),
        "tpot_aiconfigurator": spread(estimates[one.row.id].tpot_ms / one.row.tpot_ms - 1 for one in shared),
        "ttft_shared": spread(one.ttft_error for one in waited),
        "ttft_aiconfigurator": spread(estimates[one.row.id].ttft_ms / one.row.ttft_ms - 1 for one in waited),
    }
