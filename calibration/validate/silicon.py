"""Measured servers of other engines (`servers`) against simulations of their load on the engines' profiles.

Errors of TPOT and TTFT, rows that contradict each other or physics, and AIConfigurator's estimates of the same rows.
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
from pdvsim.sim.assembly import ServerParts, covering_profile
from pdvsim.sim.config import Experiment
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.hardware.shapes import Floats
from pdvsim.sim.hardware.steps import EngineStep
from pdvsim.sim.run import simulate

MTP_IMAGE = (
    "1.2.0rc6.post3"  # InferenceX's configurations use it for dsr1-fp8-b200-trt-mtp and dsr1-fp4-b200-trt-mtp alone
)
SETTINGS = ("concurrency", "tensor_parallel", "weights")
UNLIKE = 0.1  # rows of equal settings that differ by more contradict each other
KERNELS_OVER_RUN = 1.1
LARGE_FORWARD = 8192  # tokens of a forward in which prompts are prefilled fast


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


def oddities(rows: Sequence[SiliconRow]) -> dict[str, str]:
    """Why rows contradict each other or physics, by their names."""
    reasons = {row.id: reason for row in rows if (reason := _oddity(row))}
    alike: dict[tuple[object, ...], list[SiliconRow]] = {}
    for row in rows:
        if row.id not in reasons:
            alike.setdefault(row.like(), []).append(row)
    for group in alike.values():
        times = [row.tpot_ms for row in group]
        if max(times) > (1 + UNLIKE) * min(times):
            span = f"{min(times):.1f} to {max(times):.1f} ms"
            reasons |= {row.id: f"rows of the same settings have a TPOT of {span}" for row in group}
    return reasons


def _oddity(row: SiliconRow) -> str:
    if row.version == MTP_IMAGE and "DeepSeek" in row.model:
        return "InferenceX serves this image with MTP drafts"
    if row.kind == "plain" and not row.dense and row.moe_tp not in (0, row.tensor_parallel):
        return f"its tensor parallelism is stated as {row.tensor_parallel} and, for experts, {row.moe_tp}"
    experiment = row.experiment
    target, profile = experiment.pair.target, covering_profile(experiment)
    if target.weight_bytes > profile.gpu.memory_bytes:
        return f"its weights, {target.weight_bytes / 1e9:.0f} GB per GPU, do not fit the card"
    if row.kind == "apart":
        return ""
    run_ms = row.ttft_ms + row.tokens_out * row.tpot_ms
    kernels_ms = row.concurrency * _prefill_s(experiment) * 1000
    if kernels_ms > KERNELS_OVER_RUN * run_ms:
        times = kernels_ms / run_ms
        return f"prefilling its {row.concurrency} prompts takes {times:.1f} times as long as a whole request"
    room = ServerParts(experiment, profile).kv_capacity
    if row.ttft_ms > row.tokens_out * row.tpot_ms and room > row.concurrency * (row.tokens_in + row.tokens_out):
        return "its requests wait longer than they decode, although the KV cache holds all: fewer ran concurrently"
    return ""


def _prefill_s(experiment: Experiment) -> float:
    """The kernels of one prompt in a large forward, without what the engine adds."""
    hardware, traffic = experiment.hardware, experiment.traffic
    assert hardware.engine is not None
    assert traffic.input_len is not None
    kernels = replace(engine_profile(hardware.engine, hardware.gpu), step=EngineStep()).covering(experiment.pair)
    prompts = [(0, traffic.input_len)] * max(1, LARGE_FORWARD // traffic.input_len)
    seconds = kernels.cost_model(experiment.pair.target).price(0, prompts=prompts).seconds_0
    return seconds / len(prompts) / hardware.data_parallel_size  # each rank prefills as many


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
