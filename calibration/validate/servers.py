"""Measured servers of vLLM, SGLang and TensorRT-LLM: what each was, its load as an experiment, and the errors.

The rows are NVIDIA's collection in aiconfigurator-core 0.12.0 (`systems/silicon_sample.csv`, Apache-2.0): mean TTFT and
TPOT. Most are InferenceX's. Its load generator (github.com/SemiAnalysisAI/InferenceX, `utils/bench_serving` and
`benchmarks/benchmark_lib.sh`) keeps `concurrency` requests running, sends ten times as many after a warm-up of twice as
many, and draws lengths between 0.8 and 1 times the stated ones. NVIDIA's own rows have the stated lengths
(`UNSTATED_SPREAD`); the number of their requests is not known and taken alike. A row also has what the scripts that
started its server set; `calibration/data/silicon/README.md` says how that is known. A third of the rows is held out, by
a checksum of their names. AIConfigurator's estimates of the same rows are errors of their own.

Not modelled: MTP drafts, options that a row does not state, and the version of the engine where it is not the tables'.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pdvsim.bench.join import Joined, middle
from pdvsim.calibration.validate.table import cell, error_table
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.engines.profiles import engine_profile
from pdvsim.sim.models.layers import All2All
from pdvsim.sim.prices.shapes import Floats
from pdvsim.sim.run import simulate

FOLDER = Path(str(files("pdvsim.calibration"))) / "data" / "silicon"
HELD_OUT = 3  # one row in this number
SPREAD = (0.9, 1 / 9)  # InferenceX's lengths: mean over stated, and half the width over the mean
# NVIDIA's rows do not state theirs. Visible rows of SGLang look as if requests stayed in step for ever; those of the
# others as if they drifted apart, as with this spread
UNSTATED_SPREAD = {"vllm": 0.015, "sglang": 0.0, "trtllm": 0.015}
ROUNDS = 10  # requests per concurrent one
# Output tokens that are simulated of a row, of at least this many requests per concurrent one. The first of them, which
# all arrive together, and the last, which finish alone, count as one in ROUNDS each nevertheless.
MOST_TOKENS, LEAST_ROUNDS = 3_000_000, 3
MOST_TOKENS_IN_STEPS = 300_000  # the same of servers whose steps are simulated one by one: ranks, or prefill apart
LARGE_LOAD = 1_000_000  # output tokens per round from which on two rounds are enough
DENSE = ("llama-3.1-8b", "llama-3.1-70b", "qwen3-32b")
IN_4_BITS = ("kimi-k2.5",)  # whose experts are published so
ONE_NVLINK = ("gb200", "gb300")  # of which racks of 72 GPUs have one NVLink; servers of others are nodes over RDMA
EXPERTS = 256  # of DeepSeek, of which some have copies
ServerKind = Literal["plain", "expert-parallel", "apart"]
LARGE = {"expert-parallel": "expert or data parallelism", "apart": "prefill apart"}
SETTINGS = ("concurrency", "tensor_parallel", "weights")
TIMES = ("tpot_ms", "ttft_ms")
SIDES = ("shared", "aiconfigurator")  # errors of pdvsim and of AIConfigurator on the rows that the latter estimates


@dataclass(frozen=True)
class ServerLayout:
    """GPUs of one side of servers with prefill apart."""

    workers: int  # servers of this side, each of tensor_parallel x data_parallel GPUs; 0: not known
    tensor_parallel: int
    data_parallel: int
    expert_parallel: int


@dataclass(frozen=True)
class StatedServer:
    """What a row states of a server and its load; rows that agree in it are of one setting."""

    id: str
    engine: ServingEngine
    version: str  # empty: not stated
    model: str
    card: str
    source: str
    weights: str
    tokens_in: int
    tokens_out: int
    concurrency: int  # of the whole server, not of a data-parallel rank; 0: not known
    tensor_parallel: int  # these of the servers that decode, where prefill is apart
    data_parallel: int  # ranks that attention is replicated over; 1: none
    expert_parallel: int  # GPUs that experts are spread over; 1: they are sharded like all else
    moe_tp: int
    workers: int = 1  # servers that decode
    prefill: ServerLayout | None = None
    drafts: str = "none"  # none, mtp or unstated

    def like(self, *varied: str) -> tuple[object, ...]:
        """All of it but its name, and what may vary."""
        others = ("id", "moe_tp", *varied)
        return tuple(getattr(self, part.name) for part in fields(StatedServer) if part.name not in others)


@dataclass(frozen=True, kw_only=True)
class SiliconRow(StatedServer):
    """One measured server, or several with prefill apart: its settings and its times."""

    name: str  # the model with its weights, as pdvsim calls it
    image: str  # the version whose constants it is simulated with
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    tokens_per_step: int = Server.max_num_batched_tokens
    batch: int = 0  # requests that an engine or rank decodes at most; 0: all
    slots: int = 0  # experts with copies; 0: no copies
    exchange: All2All | None = None  # of tokens among ranks, where it is not the engine's default
    receive_interval: int = Server.receive_interval
    prompt_wait_steps: int = Server.prompt_wait_steps
    prompt_wait_share: float = Server.prompt_wait_share
    rank_wait: int | None = None
    rank_gather: int = Server.attention_dp_batching_wait_iters
    prompts_in_graphs: bool = False  # CUDA graphs of TensorRT-LLM
    odd: str = ""  # why it contradicts other rows or physics, and is left out
    ttft_ms: float
    tpot_ms: float

    @property
    def held_out(self) -> bool:
        return zlib.crc32(self.id.encode()) % HELD_OUT == 0

    @property
    def kind(self) -> ServerKind:
        """How its GPUs work together."""
        if self.prefill is not None:
            return "apart"
        return "expert-parallel" if self.data_parallel > 1 or self.expert_parallel > 1 else "plain"

    @property
    def dense(self) -> bool:
        return self.name.removesuffix("-fp8").removesuffix("-nvfp4") in DENSE

    @property
    def ttft_counts(self) -> bool:
        """Whether its TTFT is one of a server: SGLang's NVFP4 rows of 2025 wait seconds, whatever their load."""
        return not (self.engine == "sglang" and self.weights == "nvfp4" and not self.version)

    @cached_property
    def experiment(self) -> Experiment:
        """The server and its load; a ValueError where it cannot be simulated."""
        mean, spread = SPREAD if self.source == "inferencex" else (1.0, UNSTATED_SPREAD[self.engine])
        output = round(mean * self.tokens_out)
        tokens = output * self.concurrency
        most_tokens = MOST_TOKENS_IN_STEPS if self.data_parallel > 1 or self.prefill is not None else MOST_TOKENS
        rounds = min(ROUNDS, max(LEAST_ROUNDS if tokens < LARGE_LOAD else 2, most_tokens // tokens))
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
            max_num_seqs=self.batch or self.concurrency,
            max_num_batched_tokens=self.tokens_per_step,
            kv_cache_dtype=self.kv_cache_dtype,
            receive_interval=self.receive_interval,
            prompt_wait_steps=self.prompt_wait_steps,
            prompt_wait_share=self.prompt_wait_share,
            attention_dp_timeout_iters=self.rank_wait,
            attention_dp_batching_wait_iters=self.rank_gather,
        )
        arch = "autoregressive" if self.prefill is None else "pd"
        return Experiment(arch, traffic, server=server, hardware=hardware_of(self))


def hardware_of(row: SiliconRow) -> Hardware:
    """The GPUs of a row as options: the one place where its layout is read.

    A server is `tensor_parallel` x `data_parallel` GPUs. `data_parallel` is vLLM's --data-parallel-size: ranks with
    their own attention and requests, over which `concurrency` is divided. `expert_parallel` above 1 is
    --enable-expert-parallel; experts are spread over these GPUs and sharded over the rest (`moe_tp`).

    With prefill apart, `row.prefill` is the layout of the servers that prefill, `row.prefill.workers` their number, and
    the row's own fields and `row.workers` are those of the servers that decode.
    """
    sides, own = [(row.expert_parallel, row.moe_tp)], row.prefill
    apart: dict[str, Any] = {}
    if own is not None:
        sides.append((own.expert_parallel, own.tensor_parallel * own.data_parallel // own.expert_parallel))
        if (own.expert_parallel > 1) != (row.expert_parallel > 1):
            raise ValueError("servers that spread experts on one side alone are not simulated")
        apart = {
            "disaggregate": f"{own.workers}p{row.workers}d",
            "prefill_tensor_parallel_size": own.tensor_parallel,
            "prefill_data_parallel_size": own.data_parallel,
            "kv_link": "nvlink5" if row.card in ONE_NVLINK else "400gbe",
            "kv_transfer": "prompt",
        }
    if any(spread > 1 and sharded > 1 for spread, sharded in sides):
        raise ValueError("experts that are both spread and sharded are not simulated")
    return Hardware(
        gpu=row.card,
        engine=row.engine,
        tensor_parallel_size=row.tensor_parallel,
        data_parallel_size=row.data_parallel,
        enable_expert_parallel=row.expert_parallel > 1,
        all2all_backend=row.exchange,
        enable_eplb=bool(row.slots),
        num_redundant_experts=max(0, row.slots - EXPERTS),
        band=False,
        **apart,
    )


def not_simulated(rows: Iterable[SiliconRow]) -> dict[str, str]:
    """Why rows are not simulated, by their names."""
    return {row.id: reason for row in rows if (reason := _obstacle(row))}


def _obstacle(row: SiliconRow) -> str:
    if row.drafts != "none":
        return "it drafts with MTP" if row.drafts == "mtp" else "whether it drafts with MTP is not known"
    if row.prefill is not None and not (row.workers and row.prefill.workers):
        return "its layout is not known"
    if not row.concurrency:
        return "its concurrency is not known"
    if row.weights.startswith("int4") and row.name not in IN_4_BITS:
        return "weights of 4-bit integers are not simulated"
    try:
        covering_profile(row.experiment)
    except ValueError as error:
        return str(error).split("; ")[0]
    return ""


def read_rows(path: Path = FOLDER / "rows.csv") -> list[SiliconRow]:
    """All measured servers."""
    kinds: dict[str, Any] = {"int": int, "float": float, "bool": lambda text: text == "1", "int | None": int}
    convert = {part.name: kinds.get(str(part.type), str) for part in fields(SiliconRow)}
    sizes = [part.name for part in fields(ServerLayout)]
    rows = []
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            side = [row.pop(f"prefill_{name}") for name in sizes]
            values = {name: convert[name](text) for name, text in row.items() if name in convert and text}
            prefill = ServerLayout(*map(int, side)) if side[0] else None
            rows.append(SiliconRow(**{"version": "", **values}, prefill=prefill))
    return rows


# predicted -----------------------------------------------------------------------------------------------------------


PredictedRow = Joined[SiliconRow]


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


def joined(
    row: SiliconRow, predicted: Mapping[str, float], estimate: Mapping[str, float] | None = None
) -> PredictedRow:
    """A row with predictions of its times, and next to them those of a row that AIConfigurator estimates as well."""
    measured = {"tpot_ms": row.tpot_ms} | ({"ttft_ms": row.ttft_ms} if row.ttft_counts else {})
    times = dict(predicted)
    for side, those in zip(SIDES, (predicted, estimate), strict=True) if estimate else ():
        times |= {f"{side}_{name}": those[name] for name in TIMES if name in (those or {})}
        measured |= {f"{side}_{name}": measured[name] for name in TIMES if name in measured}
    return Joined(row, measured, times)


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


LABELS: dict[str, Callable[[PredictedRow], str]] = {
    "kind": lambda one: group_of(one.of),
    "engine and card": lambda one: f"{one.of.engine} {one.of.card}",
    "model": lambda one: one.of.model,
    "concurrency": lambda one: str(1 << (one.of.concurrency.bit_length() - 1)),
    "all": lambda one: "all",
}


def document(
    rows: Sequence[SiliconRow], times: Mapping[str, Mapping[str, float]], failures: Mapping[str, str], held_out: bool
) -> dict[str, Any]:
    """Errors by engine, card, model and concurrency, AIConfigurator's of the same rows, and what was left out.

    `times` are those predicted of rows, by their names.
    """
    estimates, refusals = read_estimates()
    usual = sorted((row for row in rows if row.id in times), key=lambda row: row.id)
    predicted = [joined(row, times[row.id], estimates.get(row.id)) for row in usual]
    refused = Counter(kind_of(refusals[row.id]) for row in usual if row.id in refusals)
    absent = not_simulated(rows)
    left_out = Counter((group_of(row), kind_of(absent[row.id])) for row in rows if row.id in absent)
    metrics = [*TIMES, *(f"{side}_{name}" for side in SIDES for name in TIMES)]
    return {
        "held_out": held_out,
        "by": error_table(predicted, LABELS, lambda part: {name: cell(part, name) for name in metrics}),
        "ratios": {"rows": len(predicted), **ratios(predicted)},
        "not_estimated": [{"reason": reason, "rows": count} for reason, count in refused.most_common()],
        "odd": {row.id: row.odd for row in rows if row.odd and row.id not in absent},
        "failed": dict(failures),
        "not_simulated": [
            {"kind": of_kind, "reason": reason, "rows": count} for (of_kind, reason), count in left_out.most_common()
        ],
        "rows": [{"id": one.of.id, **times[one.of.id], "errors": one.errors} for one in predicted],
    }
