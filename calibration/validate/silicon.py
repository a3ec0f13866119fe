"""Measured servers of other engines (`servers`) against simulations of their load on the engines' profiles.

Errors of TPOT and TTFT, and AIConfigurator's estimates of the same rows.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pdvsim.calibration.validate.servers import FOLDER, ROUNDS, SiliconRow
from pdvsim.sim.hardware.composed import engine_profile
from pdvsim.sim.hardware.shapes import Floats
from pdvsim.sim.run import simulate

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
    result = simulate(experiment, profile=profile.covering(experiment.pair).padded("profile"))
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
