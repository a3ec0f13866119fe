"""Measured servers of vLLM, SGLang and TensorRT-LLM: what each was, and its load as an experiment.

The rows are NVIDIA's collection in aiconfigurator-core 0.12.0 (`systems/silicon_sample.csv`, Apache-2.0): mean TTFT and
TPOT of servers that prefill and decode on the same GPUs (`rows.csv`), and of those with prefill apart (`apart.csv`).
`studies/silicon_rows.py` makes the files and says which layouts it corrects. A third of the rows is held out, by a
checksum of their names.

Most rows are InferenceX's. Its load generator (github.com/SemiAnalysisAI/InferenceX, `utils/bench_serving` and
`benchmarks/benchmark_lib.sh`) keeps `concurrency` requests running, sends ten times as many after a warm-up of twice as
many, and draws lengths between 0.8 and 1 times the stated ones. Limits, waits and the type of the KV cache are those of
its scripts (`scripts`). NVIDIA's own rows have the stated lengths (`UNSTATED_SPREAD`); the number of their requests is
not known and taken alike.

Not modelled: MTP drafts, options that a row does not state, and the version of the engine where it is not the tables'.
"""

from __future__ import annotations

import csv
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pdvsim.calibration.validate.scripts import BLACKWELL, StatedServer
from pdvsim.sim.assembly import covering_profile
from pdvsim.sim.config import Experiment, Hardware, Server, Traffic
from pdvsim.sim.hardware.links import NODE
from pdvsim.sim.layers import All2All

FOLDER = Path(str(files("pdvsim.calibration"))) / "data" / "silicon"
HELD_OUT = 3  # one row in this number
SHARED_IMAGE, CONFIGURED = "1.1.0rc2.post2", "_cfg"  # of rows that drafts may have been made for, and that state it
DRAFTED_QWEN = "0.5.9"  # the version of SGLang that some rows of Qwen3.5 have drafts in
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
NATIVE = ("gpt-oss-120b",)  # its published weights are what is served, whatever a row calls them
IN_8_BITS = ("deepseek-v3", "minimax-m2")  # as they are published
IN_4_BITS = ("kimi-k2.5",)  # the same of its experts
ONE_NVLINK = ("gb200", "gb300")  # of which racks of 72 GPUs have one NVLink; servers of others are nodes over RDMA
RECIPES = {"deepseek-v3": "dsr1", "kimi-k2.5": "kimik2.5", "gpt-oss-120b": "gptoss"}  # as `limits.csv` calls them
TOKENS_APART = {"vllm": 8192, "sglang": 16_384, "trtllm": 8192}  # per forward of servers with prefill apart
COPIES, EXPERTS, UNEVEN = 32, 256, (24, 48, 72)  # of experts of DeepSeek, by number of GPUs
ServerKind = Literal["plain", "expert-parallel", "apart"]


@dataclass(frozen=True)
class ServerLayout:
    """GPUs of one side of servers with prefill apart."""

    workers: int  # servers of this side, each of tensor_parallel x data_parallel GPUs; 0: not known
    tensor_parallel: int
    data_parallel: int
    expert_parallel: int


class Limits(NamedTuple):
    """What a recipe of TensorRT-LLM sets; 0: not known, and no copies."""

    batch: int = 0  # requests that an engine or rank decodes at most
    slots: int = 0  # experts with copies
    prompt_tokens: int = 0  # of a forward that prefills


@dataclass(frozen=True)
class SiliconRow(StatedServer):
    """One measured server, or several with prefill apart."""

    ttft_ms: float
    tpot_ms: float
    workers: int = 1  # servers that decode
    prefill: ServerLayout | None = None
    drafts: str = "none"  # none, mtp or unstated

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
    def name(self) -> str:
        """The model as pdvsim calls it, with its weights."""
        plain = self.served
        if plain in NATIVE:
            return plain
        if self.weights == "nvfp4":
            return f"{plain}-nvfp4"
        return f"{plain}-fp8" if self.weights.startswith("fp8") and plain not in IN_8_BITS else plain

    @property
    def dense(self) -> bool:
        return self.served in DENSE

    @property
    def ttft_counts(self) -> bool:
        """Whether its TTFT is one of a server: SGLang's NVFP4 rows of 2025 wait seconds, whatever their load."""
        return not (self.engine == "sglang" and self.weights == "nvfp4" and not self.version)

    @property
    def limits(self) -> Limits:
        """Limits set by the recipe of a server with prefill on other GPUs, where it is known."""
        if self.kind != "apart" or self.engine != "trtllm" or self.served not in RECIPES:
            return Limits()
        key = self.card, self.weights, self.tokens_in, self.tokens_out, self.concurrency
        layout = self.workers, self.tensor_parallel, self.data_parallel
        return _limits().get((RECIPES[self.served], *key, *layout), Limits())

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
            max_num_seqs=self.limits.batch or self.concurrency,
            max_num_batched_tokens=self.tokens_per_step,
            kv_cache_dtype="fp8" if self.kv_cache_dtype == "fp8" else "auto",
        )
        if self.prefill is not None:  # other scripts start these
            least = self.limits.prompt_tokens or TOKENS_APART[self.engine]
            whole = self.tokens_in + 64 if self.engine == "trtllm" else 0
            server = replace(server, max_num_batched_tokens=max(least, whole))
            return Experiment("pd", traffic, server=server, hardware=hardware_of(self))
        (steps, share), (timeout, gathering) = self.prompt_wait, self.rank_wait
        server = replace(
            server,
            receive_interval=self.receive_interval,
            prompt_wait_steps=steps,
            prompt_wait_share=share,
            attention_dp_timeout_iters=timeout,
            attention_dp_batching_wait_iters=gathering,
        )
        return Experiment("autoregressive", traffic, server=server, hardware=hardware_of(self))

    def like(self, *varied: str) -> tuple[object, ...]:
        """All that a row states, but for what was measured and what may vary."""
        others = ("id", "ttft_ms", "tpot_ms", "moe_tp", *varied)
        return tuple(getattr(self, part.name) for part in fields(self) if part.name not in others)


def hardware_of(row: SiliconRow) -> Hardware:
    """The GPUs of a row as options: the one place where its layout is read.

    A server is `tensor_parallel` x `data_parallel` GPUs. `data_parallel` is vLLM's --data-parallel-size: ranks with
    their own attention and requests, over which `concurrency` is divided. `expert_parallel` above 1 is
    --enable-expert-parallel; experts are spread over these GPUs and sharded over the rest (`moe_tp`). Over more GPUs
    than a node has, SGLang exchanges tokens with DeepEP, and TensorRT-LLM on H100 too. Numbers of GPUs that do not
    divide the experts have copies of some, `COPIES` as in SGLang's recipes (github.com/NVIDIA/srt-slurm).

    With prefill apart, `row.prefill` is the layout of the servers that prefill, `row.prefill.workers` their number, and
    the row's own fields and `row.workers` are those of the servers that decode.
    """
    sides = [(row.expert_parallel, row.moe_tp)]
    if row.prefill is not None:
        own = row.prefill
        sides.append((own.expert_parallel, own.tensor_parallel * own.data_parallel // own.expert_parallel))
        if (own.expert_parallel > 1) != (row.expert_parallel > 1):
            raise ValueError("servers that spread experts on one side alone are not simulated")
    if any(spread > 1 and sharded > 1 for spread, sharded in sides):
        raise ValueError("experts that are both spread and sharded are not simulated")
    hardware = Hardware(
        gpu=row.card,
        engine=row.engine,
        tensor_parallel_size=row.tensor_parallel,
        data_parallel_size=row.data_parallel,
        enable_expert_parallel=row.expert_parallel > 1,
        all2all_backend=_exchange(row),
        enable_eplb=bool(row.limits.slots) or row.data_parallel in UNEVEN,
        num_redundant_experts=COPIES if row.data_parallel in UNEVEN else max(0, row.limits.slots - EXPERTS),
        band=False,
    )
    if row.prefill is None:
        return hardware
    return replace(
        hardware,
        disaggregate=f"{row.prefill.workers}p{row.workers}d",
        prefill_tensor_parallel_size=row.prefill.tensor_parallel,
        prefill_data_parallel_size=row.prefill.data_parallel,
        kv_link="nvlink5" if row.card in ONE_NVLINK else "400gbe",
        kv_transfer="prompt",
    )


def _exchange(row: SiliconRow) -> All2All | None:
    """Return how its ranks exchange tokens, where it is not the engine's default.

    In NVIDIA's recipes (github.com/NVIDIA/srt-slurm) TensorRT-LLM uses DeepEP on H100 and its own kernels on racks.
    DeepGEMM, which multiplies 8 bits, exchanges over NVLink only where it is configured to, which is on racks.
    """
    if row.data_parallel == 1 or row.expert_parallel == 1:
        return None
    if row.engine == "trtllm" and row.card in BLACKWELL:
        return "allgather_reducescatter" if row.weights == "fp8" and row.card not in ONE_NVLINK else None
    if row.data_parallel <= NODE:
        return None
    return "deepep_high_throughput" if row.engine == "trtllm" else "deepep_low_latency"


@cache
def _limits() -> dict[tuple[object, ...], Limits]:
    with (FOLDER / "limits.csv").open(newline="", encoding="utf-8") as file:
        rows = [[text if text[:1].isalpha() else int(text) for text in row.values()] for row in csv.DictReader(file)]
    own = len(Limits._fields)
    return {tuple(row[:-own]): Limits(*map(int, row[-own:])) for row in rows}


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
    if row.weights.startswith("int4") and row.served not in IN_4_BITS:
        return "weights of 4-bit integers are not simulated"
    try:
        covering_profile(row.experiment)
    except ValueError as error:
        return str(error).split("; ")[0]
    return ""


def read_rows(folder: Path = FOLDER) -> list[SiliconRow]:
    """The rows of both files."""
    with (folder / "rows.csv").open(newline="", encoding="utf-8") as file:
        rows = _marked([SiliconRow(**_typed(row)) for row in csv.DictReader(file)])
    with (folder / "apart.csv").open(newline="", encoding="utf-8") as file:
        return rows + [_apart(row) for row in csv.DictReader(file)]


def _marked(rows: list[SiliconRow]) -> list[SiliconRow]:
    """The rows with those marked that may have been drafted for.

    InferenceX serves DeepSeek-R1 from one image of TensorRT-LLM with and without MTP drafts. One of its imports, whose
    names have the number of a configuration, has plain rows alone. The others do not say: their rows are plain where
    they equal a row of that import. It also serves Qwen3.5 in 8 bits from SGLang 0.5.9 both ways (qwen3.5_fp8_b200.sh
    and qwen3.5_fp8_b200_mtp.sh): rows of four GPUs with sharded experts have a TPOT well below those of eight.
    """
    measured = {(row.card, row.ttft_ms, row.tpot_ms) for row in rows if CONFIGURED in row.id}

    def may_draft(row: SiliconRow) -> bool:
        if row.served == "qwen3.5-397b-a17b":
            four = row.tensor_parallel == 4 and row.kind == "plain" and row.weights.startswith("fp8")
            return four and row.version == DRAFTED_QWEN
        image = row.version == SHARED_IMAGE and row.served == "deepseek-v3"
        return image and (row.card, row.ttft_ms, row.tpot_ms) not in measured

    return [replace(row, drafts="unstated") if may_draft(row) else row for row in rows]


def _apart(row: dict[str, str]) -> SiliconRow:
    sizes = {name.removeprefix("prefill_"): int(size) for name, size in row.items() if name.startswith("prefill_")}
    own = {name.removeprefix("decode_"): text for name, text in row.items() if not name.startswith("prefill_")}
    gpus = int(own["tensor_parallel"]) * int(own["data_parallel"])
    own["moe_tp"] = str(gpus // int(own["expert_parallel"]))
    own.pop("layout")
    if own["engine"] == "trtllm" and own["version"].startswith("0."):
        own["version"] = ""  # it is that of Dynamo, which starts the servers
    return SiliconRow(**_typed(own), prefill=ServerLayout(**sizes))


def _typed(row: dict[str, str]) -> dict[str, Any]:
    """A row's texts as its fields' types."""
    kinds = {part.name: str(part.type) for part in fields(SiliconRow)}
    convert: dict[str, Any] = {"int": int, "float": float}
    return {name: convert.get(kinds[name], str)(text) for name, text in row.items()}
