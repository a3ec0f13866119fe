"""Measured servers of vLLM, SGLang and TensorRT-LLM, and the same loads simulated on the engines' profiles.

The rows are NVIDIA's collection in aiconfigurator-core 0.12.0 (`systems/silicon_sample.csv`, Apache-2.0): mean TTFT and
TPOT of aggregated servers without expert, data or pipeline parallelism, of the models that pdvsim has. A third of them
is held out, by a checksum of their names.

Most rows are InferenceX's. Its load generator (github.com/SemiAnalysisAI/InferenceX, `utils/bench_serving` and
`benchmarks/benchmark_lib.sh`) keeps `concurrency` requests running, sends ten times as many after a warm-up of twice as
many, and draws lengths between 0.8 and 1 times the stated ones. Batch limits and the type of the KV cache are those of
its scripts. NVIDIA's own rows have the stated lengths (`UNSTATED_SPREAD`); the number of their requests is not known
and taken alike.

Not modelled: MTP drafts, options that a row does not state, and the version of the engine where it is not the tables'.
"""

from __future__ import annotations

import csv
import itertools
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from importlib.resources import files
from pathlib import Path

import numpy as np

from pdvsim.sim.assembly import covering_profile, kv_capacity
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.hardware.composed import compose, engine_profile
from pdvsim.sim.hardware.costs import CostModel
from pdvsim.sim.hardware.kernels import Floats
from pdvsim.sim.hardware.models import shard
from pdvsim.sim.hardware.steps import EngineStep
from pdvsim.sim.run import simulate

FOLDER = Path(str(files("pdvsim.calibration"))) / "data" / "silicon"
HELD_OUT = 3  # one row in so many
SPREAD = (0.9, 1 / 9)  # InferenceX's lengths: mean over stated, and half the width over the mean
# NVIDIA's rows do not state theirs. Visible rows of SGLang look as if requests stayed in step for ever; those of the
# others as if they drifted apart, as with this spread
UNSTATED_SPREAD = {"vllm": 0.015, "sglang": 0.0, "trtllm": 0.015}
ROUNDS = 10  # requests per concurrent one
# Output tokens that are simulated of a row, of at least so many requests per concurrent one. The first of them, which
# all arrive together, count as one in ROUNDS nevertheless.
MOST_TOKENS, LEAST_ROUNDS = 300_000, 3
LARGE_LOAD = 1_000_000  # output tokens per round from which on two rounds are enough
MODELS = {
    "meta-llama/Llama-3.1-70B": "llama-3.1-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "llama-3.1-8b",
    "Qwen/Qwen3-32B": "qwen3-32b",
    "nvidia/Qwen3-32B-NVFP4": "qwen3-32b",
    "Qwen/Qwen3-235B-A22B-FP8": "qwen3-235b-a22b",
    "deepseek-ai/DeepSeek-R1": "deepseek-v3",
    "deepseek-ai/DeepSeek-V3": "deepseek-v3",
    "openai/gpt-oss-120b": "gpt-oss-120b",
}
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
NATIVE = ("gpt-oss-120b",)  # its published weights are what is served, whatever a row calls them
MTP_IMAGE = (
    "1.2.0rc6.post3"  # InferenceX's configurations use it for dsr1-fp8-b200-trt-mtp and dsr1-fp4-b200-trt-mtp alone
)
TOKENS_PER_STEP = {"vllm": 8192, "sglang": 16_384, "trtllm": 8192}  # defaults, and those of InferenceX's scripts
LARGE_STEP = 16_384  # in InferenceX's scripts for TensorRT-LLM with Llama-3.1-70B, about as much with gpt-oss
# Rows without a version were measured in October and November 2025, when InferenceX had images of these
UNSTATED = {"vllm": "0.10.2", "sglang": "0.5.3", "trtllm": "1.1.0"}
SETTINGS = ("concurrency", "tensor_parallel", "weights")
UNLIKE = 0.1  # rows of equal settings that differ by more contradict each other
KERNELS_OVER_RUN = 1.1
LARGE_FORWARD = 8192  # tokens of a forward in which prompts are prefilled fast


@dataclass(frozen=True)
class SiliconRow:
    """One measured server."""

    id: str
    engine: ServingEngine
    version: str  # empty: not stated
    model: str
    card: str
    source: str
    weights: str
    tokens_in: int
    tokens_out: int
    concurrency: int
    tensor_parallel: int
    moe_tp: int
    ttft_ms: float
    tpot_ms: float

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.id.encode()) % HELD_OUT == 0

    @property
    def name(self) -> str:
        """The model as pdvsim calls it, with its weights."""
        plain = MODELS[self.model]
        if plain in NATIVE:
            return plain
        if self.weights == "nvfp4":
            return f"{plain}-nvfp4"
        return f"{plain}-fp8" if self.weights.startswith("fp8") and plain != "deepseek-v3" else plain

    @property
    def dense(self) -> bool:
        return MODELS[self.model] in DENSE

    @property
    def ttft_counts(self) -> bool:
        """Whether its TTFT is one of a server: SGLang's NVFP4 rows of 2025 wait seconds, whatever their load."""
        return not (self.engine == "sglang" and self.weights == "nvfp4" and not self.version)

    @property
    def kv_cache_dtype(self) -> str:
        """As in InferenceX's scripts; TensorRT-LLM caches in 8 bits what has such weights."""
        model = MODELS[self.model]
        if model == "llama-3.1-70b":
            return "fp8"
        if model == "deepseek-v3":
            return "fp8" if self.engine == "trtllm" or self.card == "b200" else "auto"
        if model == "gpt-oss-120b":
            return "fp8" if self.card == "b200" else "auto"
        return "fp8" if self.engine == "trtllm" and self.weights != "bfloat16" else "auto"

    @property
    def tokens_per_step(self) -> int:
        """Prompt tokens that a forward may carry. TensorRT-LLM does not cut prompts by default."""
        if self.engine != "trtllm":
            return TOKENS_PER_STEP[self.engine]
        if self.source == "inferencex" and MODELS[self.model] in ("llama-3.1-70b", "gpt-oss-120b"):
            return LARGE_STEP
        return max(TOKENS_PER_STEP["trtllm"], self.tokens_in + self.concurrency + 64)

    @cached_property
    def experiment(self) -> Experiment:
        """The server and its load."""
        mean, spread = SPREAD if self.source == "inferencex" else (1.0, UNSTATED_SPREAD[self.engine])
        output = round(mean * self.tokens_out)
        tokens = output * self.concurrency
        rounds = min(ROUNDS, max(LEAST_ROUNDS if tokens < LARGE_LOAD else 2, MOST_TOKENS // tokens))
        traffic = Traffic(
            dataset_name="random",
            input_len=round(mean * self.tokens_in),
            output_len=output,
            random_range_ratio=spread,
            num_prompts=rounds * self.concurrency,
            max_concurrency=self.concurrency,
        )
        server = Server(
            pair=f"none:{self.name}",
            max_num_seqs=self.concurrency,
            max_num_batched_tokens=self.tokens_per_step,
            kv_cache_dtype="fp8" if self.kv_cache_dtype == "fp8" else "auto",
        )
        hardware = Hardware(gpu=self.card, engine=self.engine, tensor_parallel_size=self.tensor_parallel, band=False)
        return Experiment("autoregressive", traffic, server=server, hardware=hardware)

    def like(self, *varied: str) -> tuple[object, ...]:
        """All that a row states, but for what was measured and what may vary."""
        others = ("id", "ttft_ms", "tpot_ms", "moe_tp", *varied)
        return tuple(getattr(self, part.name) for part in fields(self) if part.name not in others)


def read_rows(path: Path = FOLDER / "rows.csv") -> list[SiliconRow]:
    """The rows of the file."""
    kinds = {part.name: part.type for part in fields(SiliconRow)}
    convert = {"int": int, "float": float}
    with path.open(newline="", encoding="utf-8") as file:
        return [
            SiliconRow(**{name: convert.get(str(kinds[name]), str)(value) for name, value in row.items()})
            for row in csv.DictReader(file)
        ]


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
    profile = engine_profile(row.engine, row.card, row.version or UNSTATED[row.engine])
    result = simulate(experiment, profile=profile.covering(experiment.pair).padded("profile"))
    requests = result.requests
    order = np.argsort(requests["arrival_s"], kind="stable")
    ttft_s = (requests["first_token_s"] - requests["arrival_s"])[order]
    decode_s = (requests["finish_s"] - requests["first_token_s"])[order]
    tpot_s = decode_s / np.maximum(1, requests["output_tokens"][order] - 1)
    ttft, tpot = (_over_rounds(times, row.concurrency) for times in (ttft_s, tpot_s))
    return Prediction(row, 1000 * ttft, 1000 * tpot)


def _over_rounds(times_s: Floats, concurrency: int) -> float:
    """The mean over all rounds of a benchmark, of which the first and some of the others were simulated."""
    first, later = times_s[:concurrency], times_s[concurrency:]
    return float(first.mean() + (ROUNDS - 1) * later.mean()) / ROUNDS


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
    if not row.dense and row.moe_tp not in (0, row.tensor_parallel):
        return f"its tensor parallelism is stated as {row.tensor_parallel} and, for experts, {row.moe_tp}"
    experiment = row.experiment
    target, profile = experiment.pair.target, covering_profile(experiment)
    if target.weight_bytes > profile.gpu.memory_bytes:
        return f"its weights, {target.weight_bytes / 1e9:.0f} GB per GPU, do not fit the card"
    run_ms = row.ttft_ms + row.tokens_out * row.tpot_ms
    kernels_ms = row.concurrency * _prefill_s(experiment) * 1000
    if kernels_ms > KERNELS_OVER_RUN * run_ms:
        times = kernels_ms / run_ms
        return f"prefilling its {row.concurrency} prompts takes {times:.1f} times as long as a whole request"
    room = kv_capacity(experiment, profile)
    if row.ttft_ms > row.tokens_out * row.tpot_ms and room > row.concurrency * (row.tokens_in + row.tokens_out):
        return "its requests wait longer than they decode, although the KV cache holds all: fewer ran concurrently"
    return ""


def _prefill_s(experiment: Experiment) -> float:
    """The kernels of one prompt in a large forward, without what the engine adds."""
    hardware, traffic = experiment.hardware, experiment.traffic
    assert hardware.engine is not None
    assert traffic.input_len is not None
    tables = engine_profile(hardware.engine, hardware.gpu).tables
    assert tables is not None
    spec = shard(experiment.server.models().target, hardware.tensor_parallel_size)
    prices, tokens = CostModel(spec, compose(tables, EngineStep(), spec)), traffic.input_len
    prompts = [(0, tokens)] * max(1, LARGE_FORWARD // tokens)
    return prices.price(0, prompts=prompts).seconds_0 / len(prompts)


@dataclass(frozen=True)
class Estimate:
    """AIConfigurator's estimate of a row."""

    ttft_ms: float
    tpot_ms: float


def read_estimates(path: Path = FOLDER / "aiconfigurator.csv") -> dict[str, Estimate]:
    """AIConfigurator's estimates by row, of those that it has any of (`studies/aiconfigurator_estimates.py`)."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    return {row["id"]: Estimate(float(row["ttft_ms"]), float(row["tpot_ms"])) for row in rows if not row["failure"]}


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
