"""Pack AIConfigurator's kernel tables of one engine on one card into one small file.

The folder is `systems` of the Python package aiconfigurator-core, or of github.com/ai-dynamo/aiconfigurator
(`aic-core/src/aiconfigurator_core/systems`). The newest version of each table is taken. Experts on several GPUs are
taken whole: of up to 8 GPUs all sizes, of 16 to 64, and of balanced ones, some (`WIDE_TOKENS`). Beams, and windows
other than none and 128 tokens, are left out.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pdvsim.sim.core import ServingEngine
from pdvsim.sim.hardware.kernels import TOPK, KernelTables
from pdvsim.sim.hardware.shapes import CONTEXTS, ITEM_BYTES, experts_roofline, from_neighbours, packed, unpacked
from pdvsim.sim.specs import GpuSpec

SYSTEMS = {
    "a100-80gb": "a100_sxm",
    "h100-sxm": "h100_sxm",
    "h200": "h200_sxm",
    "b200": "b200_sxm",
    "b300": "b300_sxm",
    "gb200": "gb200",
    "gb300": "gb300",
    "l40s": "l40s",
}
BLACKWELL = ("b200", "b300", "gb200", "gb300")
LEAST_SIDE = 128  # of a product; narrower ones are routers, which cost a kernel's fixed time
LEAST_TESTED = 512  # sides of the products that are left out in turn: those of models' layers
# A kind of products whose fastest takes this many times as long as the fastest of 16 bits waited for the host:
# vLLM's fp8_block on a B200 takes 167 us at every size. On H100 and H200 it is 21 times, which the measured servers of
# vLLM 0.12 with such weights bear out.
MOST_WAIT = 50
WINDOWS = (0, 128)
WIDEST_HEAD = 256
LARGEST_GROUP, LARGEST_WIDE = 8, 64
WIDE_EXPERTS = 128  # of models that are served on more than 8 GPUs, at least
WIDE_TOKENS = tuple(2**power for power in range(15))
# Exchanges of tokens among ranks, of tokens that take TOPK experts. SGLang's table has a column of the multiprocessors
# that it uses, of which its default is taken
EXCHANGE_SMS = 20
NODES_EXPERTS = 256  # of the model that DeepEP was timed with on several nodes
DEEPEP = {"ll": ("ll", "avg_t_us"), "ht": ("normal", "transmit_us")}  # SGLang's tables, and their columns of times
# GPUs of whole experts
GROUPS = {"spread": (2, LARGEST_GROUP), "wide": (LARGEST_GROUP + 1, LARGEST_WIDE), "all": (2, LARGEST_WIDE)}
NVLINK_STEPS = ("alltoall_prepare", "alltoall_dispatch", "alltoall_combine")  # of TensorRT-LLM's exchange, two-sided
NVLINK_TIMED = "gb200"  # the card that it was timed on; the others with NVLink 5 are taken to need as long
LEAST_ROWS = {"moe": 2000, "dsa": 4000}  # of a table; a later version may hold a single model
ROUTING = ("power_law_1.01", "power_law_1.2", "balanced")  # first that a table has
# Experts that an engine serves with kernels of a library that were timed in another engine: TensorRT-LLM's own on
# Blackwell (backend TRTLLM, in SGLang and vLLM flashinfer_trtllm), OpenAI's in Triton on Hopper (backend TRITON)
BORROWED: dict[tuple[str, str], dict[str, str]] = {
    **{("trtllm", card): {"fp8_block": "sglang", "w4a8_mxfp4_mxfp8": "sglang"} for card in BLACKWELL},
    **{("vllm", card): {"w4a8_mxfp4_mxfp8": "sglang"} for card in BLACKWELL},
    ("trtllm", "h100-sxm"): {"w4a16_mxfp4": "vllm"},
    ("trtllm", "h200"): {"w4a16_mxfp4": "vllm"},
}
# On Blackwell, tokens that were sent to the rank of their expert are multiplied by other kernels than those of every
# rank has: DeepGEMM for 8 bits, and CUTLASS. Both were timed in TensorRT-LLM, which has them for all data-parallel
# ranks (NVIDIA's recipes, github.com/NVIDIA/srt-slurm); SGLang and vLLM have them with DeepEP. Cards of one chip lend
# each other such tables: some on B200 and GB200 took twice as long as those on the other.
SENT_KINDS = ("fp8_block", "nvfp4")
ONE_CHIP = {"b200": "gb200", "gb200": "b200", "b300": "gb300", "gb300": "b300"}
# TensorRT-LLM's own kernels for NVFP4 experts (backend TRTLLM) were timed on the cards with the older chip alone
OWN_KERNELS, OLDER_CHIP = "moe_torch_flow_min_latency", {"b300_sxm": "b200_sxm", "gb300": "gb200"}
# Groups over several nodes of a rack were timed on the GB300 alone; smaller ones take as long on both
RACKS = {"gb200": "gb300"}
# Hidden sizes of the models whose sparse attention was timed; others of the same sizes have the same kernels
SPARSE_MODELS = {
    "deepseek-ai/DeepSeek-V3.2": 7168,
    "zai-org/GLM-5": 6144,
    "zai-org/GLM-5-FP8": 6144,
    "MiniMaxAI/MiniMax-M3": 6144,
    "sgl-project/DeepSeek-V4-Flash-FP8": 4096,
    "deepseek-ai/DeepSeek-V4-Pro": 7168,
    "sgl-project/DeepSeek-V4-Pro-FP8": 7168,
}
LONGEST_CONTEXT = 65_536  # of compressed attention; SGLang's longer ones, of one or two rows, have another kernel
LEAST_SPARSE_HEADS, LEAST_SPARSE_CONTEXT = 8, 63
Arrays = dict[str, NDArray[Any]]


def pack(
    folder: Path, engine: ServingEngine, gpu: GpuSpec, packed_one: Callable[[], None] = lambda: None
) -> KernelTables:
    """The tables of an engine on a card; a ValueError where the folder has none. It has `PARTS` parts."""
    if gpu.name not in SYSTEMS:
        raise ValueError(f"--gpu {gpu.name}: kernel tables are known of {', '.join(SYSTEMS)}")
    source = _Source(folder, SYSTEMS[gpu.name], engine)
    arrays: Arrays = {}
    arrays |= _products(source.table("gemm", "gemm_perf"))
    arrays |= _decode(source.table("attention", "generation_attention_perf"))
    arrays |= _prefill(source.table("attention", "context_attention_perf"))
    reduces = source.table("comm", "custom_allreduce_perf")
    if (like := RACKS.get(gpu.name)) is not None:
        rack = _Source(folder, SYSTEMS[like], engine).table("comm", "custom_allreduce_perf")
        reduces = pd.concat([reduces, rack[rack.num_gpus > reduces.num_gpus.max()]])
    arrays |= _reduce(reduces)
    for op, name, pack_one in _TABLES:
        if (table := source.optional(op, name)) is not None:
            arrays |= pack_one(table)
        packed_one()
    arrays |= _spread(source) | _exchange(source)
    borrowed = BORROWED.get((engine, gpu.name), {})
    for kind, owner in borrowed.items():
        lender = _Source(folder, SYSTEMS[gpu.name], owner)
        lent = _experts(lender.table("moe", "moe_perf")) | _spread(lender)
        arrays |= {name: values for name, values in lent.items() if name.split("/")[1] == kind}
    if gpu.name in BLACKWELL:
        there = [card for card in (gpu.name, ONE_CHIP[gpu.name]) if _root(folder, SYSTEMS[card])]
        arrays |= _sent(*(_Source(folder, SYSTEMS[card], "trtllm") for card in there))
        if _root(folder, SYSTEMS[NVLINK_TIMED]):
            arrays |= _nvlink(_Source(folder, SYSTEMS[NVLINK_TIMED], "trtllm"))
    about = {
        "borrowed": borrowed
        | ({"all-reduces of 8 and 16 GPUs": RACKS[gpu.name]} if gpu.name in RACKS else {})
        | ({"exchange over NVLink": NVLINK_TIMED} if gpu.name in BLACKWELL and gpu.name != NVLINK_TIMED else {}),
        "engine": engine,
        "system": SYSTEMS[gpu.name],
        "versions": source.versions,
        "source": "aiconfigurator-core 0.12.0, NVIDIA, Apache-2.0",
        "date": "2026-11",
    }
    return KernelTables(about, gpu, arrays)


def as_bytes(tables: KernelTables) -> bytes:
    """Return the tables as the bytes of their file."""
    buffer = io.BytesIO()
    arrays: dict[str, Any] = {**tables.arrays, "about": np.array(json.dumps(dict(tables.about)))}
    with zipfile.ZipFile(buffer, "w") as file:  # as numpy's savez_compressed, but a sixth smaller
        for name, array in arrays.items():
            part = io.BytesIO()
            np.save(part, array)
            file.writestr(zipfile.ZipInfo(f"{name}.npy"), part.getvalue(), zipfile.ZIP_LZMA)
    return buffer.getvalue()


@dataclass(frozen=True)
class KernelErrors:
    """Errors of a kind of kernels at points left out of the interpolation."""

    kernels: str
    points: int
    median: float
    p95: float


def left_out(tables: KernelTables) -> list[KernelErrors]:
    """Return the interpolated time of each timed shape from the others: products, and experts by their tokens.

    Attention is read as lines in the context; its errors are those of the lines at the timed contexts.
    """
    errors: dict[str, NDArray[np.float64]] = {}
    for kind in tables.kinds("gemm"):
        shares, axes = tables.product_shares(kind)
        wide = (axes[1][None, :, None] >= LEAST_TESTED) & (axes[2][None, None, :] >= LEAST_TESTED)
        off = np.expm1(from_neighbours(shares, axes) - shares)
        errors[f"products, {kind}"] = off[wide & np.isfinite(off)]
    for kind in tables.kinds("moe"):
        errors[f"experts, {kind}"] = _left_out_tokens(tables, kind)
    for kind in tables.kinds("decode"):
        if kind.endswith("-0"):
            errors[f"decode attention, {kind.removesuffix('-0')}"] = _off_lines(tables, kind)
    return [
        KernelErrors(name, off.size, float(np.median(np.abs(off))), float(np.quantile(np.abs(off), 0.95)))
        for name, off in errors.items()
        if off.size
    ]


def _left_out_tokens(tables: KernelTables, kind: str) -> NDArray[np.float64]:
    """Experts at each number of tokens, from the numbers around it."""
    tokens = tables.arrays[f"moe/{kind}/tokens"].astype(float)
    off = []
    for shape, times in zip(tables.arrays[f"moe/{kind}/shapes"], tables.arrays[f"moe/{kind}/t"], strict=True):
        logs = unpacked(times) - np.log(experts_roofline(tables.gpu, kind, tokens, *shape.astype(float)))
        given = np.isfinite(logs)
        at, known = np.log(tokens[given]), logs[given]
        if len(at) < 3:
            continue
        share = (at[1:-1] - at[:-2]) / (at[2:] - at[:-2])
        off.append(np.expm1((1 - share) * known[:-2] + share * known[2:] - known[1:-1]))
    return np.concatenate(off) if off else np.zeros(0)


def _off_lines(tables: KernelTables, kind: str) -> NDArray[np.float64]:
    """Decode attention on its lines, against its times at contexts of usual lengths."""
    size, cache, _ = kind.split("-")
    off = []
    arrays = {name: tables.arrays[f"decode/{kind}/{name}"] for name in ("pairs", "rows", "context", "t")}
    context = arrays["context"].astype(float)
    usual = (context >= CONTEXTS[0]) & (context <= CONTEXTS[1])
    for (heads, kv_heads), times in zip(arrays["pairs"].tolist(), np.exp(unpacked(arrays["t"])), strict=True):
        rows, fixed, slopes = tables.decode(heads, kv_heads, int(size), cache)
        places = np.searchsorted(arrays["rows"], rows)
        lines = fixed[:, None] + slopes[:, None] * rows[:, None] * context[None, :]
        one = (lines / times[places] - 1)[:, usual]
        off.append(one[np.isfinite(one)])
    return np.concatenate(off)


def _root(folder: Path, system: str) -> Path | None:
    """The folder that has those of systems; None if it lacks this one."""
    return next((path for path in (folder / "data", folder) if (path / system).is_dir()), None)


class _Source:
    def __init__(self, folder: Path, system: str, engine: str) -> None:
        self.root = _root(folder, system)
        if self.root is None:
            raise ValueError(f"--from-kernels {folder}: no folder data/{system} there")
        self.system, self.engine = system, engine
        self.versions: dict[str, str] = {}

    def table(self, op: str, name: str, spread: str = "") -> pd.DataFrame:
        table = self.optional(op, name, spread)
        if table is None:
            raise ValueError(f"--from-kernels: no {name} of {self.engine} on {self.system}")
        return table

    def optional(self, op: str, name: str, spread: str = "", engine: str = "") -> pd.DataFrame | None:
        """The newest table; of experts, those on one GPU or sharded, or, by a name in `GROUPS`, whole ones."""
        for path in self._paths(op, name, engine or self.engine):
            table = pd.read_parquet(path)
            if op == "moe" and self.engine == "trtllm" and self.system in OLDER_CHIP:
                older = pd.read_parquet(str(path).replace(f"/{self.system}/", f"/{OLDER_CHIP[self.system]}/"))
                table = pd.concat([table, older[older.kernel_source == OWN_KERNELS]])
            if "moe_tp_size" in table and spread:
                table = table[(table.moe_tp_size == 1) & table.moe_ep_size.between(*GROUPS[spread])]
            elif "moe_tp_size" in table:
                table = table[(table.moe_ep_size == 1) & (table.moe_tp_size <= LARGEST_GROUP)]
            label = name.split("_")[0] if op == "sparse_attention" else op
            if len(table) > LEAST_ROWS.get(label, 0):
                self.versions[f"{op} {name}" if op == "comm" else f"{label} {spread}".strip()] = path.parent.name
                return table
        return None

    def versions_of(self, op: str, name: str, engine: str) -> Iterator[pd.DataFrame]:
        """An engine's tables, newest first."""
        return map(pd.read_parquet, self._paths(op, name, engine))

    def _paths(self, op: str, name: str, engine: str) -> list[Path]:
        assert self.root is not None
        folder = self.root / self.system / op / engine
        return sorted(folder.glob(f"*/{name}.parquet"), key=_version, reverse=True)


def _version(path: Path) -> list[int]:
    name = path.parent.name.replace("rc", ".").replace("post", ".")
    return [int(part) if part.isdecimal() else 0 for part in name.split(".")]


def _grid(
    table: pd.DataFrame, columns: list[str], largest_first: bool = False
) -> tuple[list[NDArray[Any]], NDArray[np.int16]]:
    """Sorted values of the columns, and the packed times on their grid; of several kernels the fastest.

    With `largest_first` no size takes longer than a larger one, which it could be padded to: what does is a hiccup.
    """
    axes = [np.sort(table[column].unique()) for column in columns]
    times = np.full([len(axis) for axis in axes], np.inf)
    places = tuple(np.searchsorted(axis, table[column]) for axis, column in zip(axes, columns, strict=True))
    np.minimum.at(times, places, table.latency.to_numpy(float) * 1e-3)
    if largest_first:
        known = np.isfinite(times)
        for axis in range(times.ndim):
            times = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = np.where(known, times, np.inf)
    return [axis.astype(np.int32) for axis in axes], packed(times)


def _by(table: pd.DataFrame, column: str) -> Iterator[tuple[str, pd.DataFrame]]:
    """The table in parts, by the values of a column."""
    for value in sorted(table[column].unique()):
        yield str(value), table[table[column] == value]


def _products(table: pd.DataFrame) -> Arrays:
    arrays: Arrays = {}
    table = table[(table.n >= LEAST_SIDE) & (table.k >= LEAST_SIDE)]
    least = table.groupby("gemm_dtype").latency.min()
    for kind, part in _by(table, "gemm_dtype"):
        if kind not in ITEM_BYTES or least[kind] > MOST_WAIT * least["bfloat16"]:
            continue
        axes, times = _grid(part, ["m", "n", "k"], largest_first=True)
        arrays |= {f"gemm/{kind}/{name}": axis for name, axis in zip("mnk", axes, strict=True)}
        arrays[f"gemm/{kind}/t"] = times
    return arrays


def _attention(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Tables by head size, cache and window."""
    table = table.assign(window_size=table.get("window_size", 0))
    table = table[table.window_size.isin(WINDOWS) & (table.num_heads >= table.num_key_value_heads)]
    if "attn_dtype" in table and (table.attn_dtype == "bfloat16").any():
        table = table[table.attn_dtype == "bfloat16"]
    table = table[table.head_dim <= WIDEST_HEAD]
    names = table.head_dim.astype(str) + "-" + table.kv_cache_dtype + "-" + table.window_size.astype(int).astype(str)
    return list(_by(table.assign(name=names), "name"))


def _paired(part: pd.DataFrame, columns: list[str]) -> tuple[Arrays, list[NDArray[Any]], NDArray[np.int16]]:
    pairs = part[["num_heads", "num_key_value_heads"]].drop_duplicates().to_numpy()
    codes = {tuple(pair): code for code, pair in enumerate(pairs.tolist())}
    keys = zip(part.num_heads.tolist(), part.num_key_value_heads.tolist(), strict=True)
    axes, times = _grid(part.assign(pair=[codes[key] for key in keys]), ["pair", *columns])
    return {"pairs": pairs.astype(np.int16)}, axes[1:], times


def _decode(table: pd.DataFrame) -> Arrays:
    arrays: Arrays = {}
    for kind, part in _attention(table):
        pairs, axes, times = _paired(part, ["batch_size", "step"])
        columns = pairs | {"rows": axes[0], "context": axes[1], "t": times}
        arrays |= {f"decode/{kind}/{name}": values for name, values in columns.items()}
    return arrays


def _prefill(table: pd.DataFrame) -> Arrays:
    arrays: Arrays = {}
    for kind, part in _attention(table[table.batch_size == 1]):
        pairs, axes, times = _paired(part, ["isl"])
        columns = pairs | {"length": axes[0], "t": times}
        arrays |= {f"prefill/{kind}/{name}": values for name, values in columns.items()}
    return arrays


def _spread(source: _Source) -> Arrays:
    """Tables of whole experts on several GPUs."""
    table = source.optional("moe", "moe_perf", "spread")
    if table is None:
        return {}
    arrays = _experts(table, "moe-ep", ("moe_ep_size",))
    if (table := source.optional("moe", "moe_perf", "wide")) is not None:
        arrays |= _experts(_some(table), "moe-wide", ("moe_ep_size",))
    if (table := source.optional("moe", "moe_perf", "all")) is not None:
        arrays |= _even(table, "moe-even")
    return arrays


def _sent(*sources: _Source) -> Arrays:
    """Whole experts of tokens that were sent to them, on any number of GPUs: the fastest of all sources."""
    tables = [table for source in sources if (table := source.optional("moe", "moe_perf", "all")) is not None]
    if not tables:
        return {}
    table = pd.concat(tables)
    table = table[table.moe_dtype.isin(SENT_KINDS)]
    return _experts(_some(table), "moe-sent", ("moe_ep_size",)) | _even(table, "moe-sent-even")


def _even(table: pd.DataFrame, name: str) -> Arrays:
    """Return the same where every expert has as many tokens, in place of the usual routing."""
    table = table[table.distribution == "balanced"]
    return _experts(_some(table), name, ("moe_ep_size",))


def _some(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table.num_experts >= WIDE_EXPERTS) & table.num_tokens.isin(WIDE_TOKENS)]


def _exchange(source: _Source) -> Arrays:
    """Collectives of NCCL by all values, and DeepEP's dispatch and combine by tokens of a rank."""
    arrays: Arrays = {}
    table = source.optional("comm", "nccl_perf", engine="nccl")
    if table is not None:
        for operation in ("all_gather", "reduce_scatter"):
            part = table[(table.op_name == operation) & (table.nccl_dtype == "half")]
            axes, times = _grid(part, ["num_gpus", "message_size"])
            columns = {"gpus": axes[0], "elements": axes[1], "t": times}
            arrays |= {f"nccl/{operation}/{name}": values for name, values in columns.items()}
    for mode, part in _deepep(source):
        axes, times = _grid(part, ["hidden_size", "num_tokens"])
        columns = {"hidden": axes[0], "tokens": axes[1], "t": times}
        arrays |= {f"deepep/{mode}/{name}": values for name, values in columns.items()}
    return arrays | _nodes(source)


def _nvlink(source: _Source) -> Arrays:
    """TensorRT-LLM's exchange over NVLink, by what it sends, ranks and tokens of a rank: all steps together."""
    arrays: Arrays = {}
    table = source.optional("comm", "trtllm_alltoall_perf")
    if table is None:
        return {}
    table = table[(table.kernel_source == "NVLinkTwoSided") & table.op_name.isin(NVLINK_STEPS)]
    for kind, part in _by(table, "moe_dtype"):
        sizes = ["moe_ep_size", "num_tokens"]
        steps = part.groupby([*sizes, "op_name"]).latency.min().unstack()
        axes, times = _grid(steps.sum(axis=1, skipna=False).rename("latency").dropna().reset_index(), sizes)
        columns = {"ranks": axes[0], "tokens": axes[1], "t": times}
        arrays |= {f"nvlink/{kind}/{name}": values for name, values in columns.items()}
    return arrays


def _nodes(source: _Source) -> Arrays:
    """DeepEP on one node and on several, by tokens of a rank: timed in SGLang for one model."""
    arrays: Arrays = {}
    for mode, (name, field) in DEEPEP.items():
        for table in source.versions_of("comm", f"wideep_deepep_{name}_perf", "sglang"):
            part = _by_sms(table[(table.num_topk == TOPK) & (table.num_experts == NODES_EXPERTS)])
            common = part.groupby("num_token").node_num.nunique()
            part = part[part.num_token.isin(common[common == part.node_num.nunique()].index)]
            if part.node_num.nunique() == 1 or not len(part):
                continue
            part = part.assign(latency=(part[f"dispatch_{field}"] + part[f"combine_{field}"]) * 1e-3)
            axes, times = _grid(part, ["node_num", "num_token"])
            columns = {"nodes": axes[0], "tokens": axes[1], "hidden": part.hidden_size.unique().astype(np.int32)}
            arrays |= {f"deepep-nodes/{mode}/{axis}": values for axis, values in (columns | {"t": times}).items()}
            break
    return arrays


def _by_sms(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the default number of multiprocessors, where a table has several."""
    if "dispatch_sms" not in table:
        return table
    return table[(table.dispatch_sms == EXCHANGE_SMS) & (table.combine_sms == EXCHANGE_SMS)]


def _deepep(source: _Source) -> Iterator[tuple[str, pd.DataFrame]]:
    """Milliseconds of its two modes, low latency and high throughput, by size of a token and tokens of a rank."""
    sizes = ["hidden_size", "num_tokens"]
    if source.engine == "sglang":
        for mode, (name, field) in DEEPEP.items():
            table = source.optional("comm", f"wideep_deepep_{name}_perf")
            if table is not None:
                table = table[(table.num_topk == TOPK) & (table.node_num == 1)].rename(columns={"num_token": sizes[1]})
                table = _by_sms(table)
                yield mode, table.assign(latency=(table[f"dispatch_{field}"] + table[f"combine_{field}"]) * 1e-3)
        return
    table = source.optional("comm", "moe_a2a_perf")
    if table is not None:
        table = table[(table.topk == TOPK) & table.comm_dtype.isin(("default", "bfloat16")) & (table.node_num == 1)]
        for mode in ("ll", "ht"):
            part = table[table.comm_backend.str.endswith(mode)]
            phases = part.groupby([*sizes, "phase"]).latency.min().unstack()
            whole = (phases.sum(axis=1, skipna=False) * 1e-3).rename("latency").dropna().reset_index()
            if len(whole):
                yield mode, whole


def _experts(table: pd.DataFrame, name: str = "moe", more: tuple[str, ...] = ()) -> Arrays:
    arrays: Arrays = {}
    for kind, part in _by(table, "moe_dtype"):
        routing = next(name for name in ROUTING if (part.distribution == name).any())
        part = part[part.distribution == routing]
        part = part.assign(inner=part.inter_size // part.moe_tp_size)
        columns = ["hidden_size", "inner", "topk", "num_experts", *more]
        shapes = part[columns].drop_duplicates().to_numpy()
        codes = {tuple(shape): code for code, shape in enumerate(shapes.tolist())}
        keys = part[columns].itertuples(index=False, name=None)
        axes, times = _grid(part.assign(shape=[codes[key] for key in keys]), ["shape", "num_tokens"])
        axes_and_times = {"shapes": shapes.astype(np.int32), "tokens": axes[1], "t": times}
        arrays |= {f"{name}/{kind}/{part}": values for part, values in axes_and_times.items()}
    return arrays


def _reduce(table: pd.DataFrame) -> Arrays:
    if "backend" in table and table.backend.str.contains("graph").any():
        table = table[table.backend.str.contains("graph")]
    axes, times = _grid(table, ["num_gpus", "message_size"])
    return {"reduce/graph/gpus": axes[0], "reduce/graph/elements": axes[1], "reduce/graph/t": times}


def _latent_decode(table: pd.DataFrame) -> Arrays:
    arrays: Arrays = {}
    for kind, part in _by(table, "kv_cache_dtype"):
        axes, times = _grid(part, ["num_heads", "batch_size", "step"])
        columns = {"heads": axes[0], "rows": axes[1], "context": axes[2], "t": times}
        arrays |= {f"latent-decode/{kind}/{name}": values for name, values in columns.items()}
    return arrays


def _latent_prefill(table: pd.DataFrame) -> Arrays:
    arrays: Arrays = {}
    for kind, part in _by(table[table.batch_size == 1], "kv_cache_dtype"):
        axes, times = _grid(part, ["num_heads", "isl"])
        columns = {"heads": axes[0], "length": axes[1], "t": times}
        arrays |= {f"latent-prefill/{kind}/{name}": values for name, values in columns.items()}
    return arrays


def _sparse_decode(table: pd.DataFrame, kind: str) -> Arrays:
    """Modules of sparse attention, by the hidden size of their models and by cache: products included."""
    arrays: Arrays = {}
    longest = LONGEST_CONTEXT if kind in ("csa", "hca") else 1 << 20
    table = table[(table.num_heads >= LEAST_SPARSE_HEADS) & table.step.between(LEAST_SPARSE_CONTEXT, longest)]
    for name, part in _by_model(table, kind):
        axes, times = _grid(part, ["num_heads", "batch_size", "step"])
        columns = {"heads": axes[0], "rows": axes[1], "context": axes[2], "t": times, "products": _products_of(part)}
        arrays |= {f"sparse-decode/{name}/{axis}": values for axis, values in columns.items()}
    return arrays


def _sparse_prefill(table: pd.DataFrame, kind: str) -> Arrays:
    arrays: Arrays = {}
    table = table[(table.num_heads >= LEAST_SPARSE_HEADS) & (table.batch_size == 1) & (table.step == 0)]
    for name, part in _by_model(table, kind):
        axes, times = _grid(part, ["num_heads", "isl"])
        columns = {"heads": axes[0], "length": axes[1], "t": times, "products": _products_of(part)}
        arrays |= {f"sparse-prefill/{name}/{axis}": values for axis, values in columns.items()}
    return arrays


def _products_of(part: pd.DataFrame) -> NDArray[Any]:
    """The type of the products that a module was timed with."""
    return np.array(part.gemm_type.iloc[0])


def _by_model(table: pd.DataFrame, kind: str) -> list[tuple[str, pd.DataFrame]]:
    """Return the self-selecting modules with the products that all engines timed."""
    table = table[~table.op_name.str.contains("skip") & table.model.isin(list(SPARSE_MODELS))]
    hidden = table.model.map(SPARSE_MODELS).astype(int)
    # bfloat16 where it was timed; compressed attention with the products that it is served with
    fewest = table.groupby(hidden).gemm_type.transform("max" if kind in ("csa", "hca") else "min")
    table = table.assign(name=kind + "-" + hidden.astype(str) + "-" + table.kv_cache_dtype)[table.gemm_type == fewest]
    return list(_by(table, "name"))


def _streams(table: pd.DataFrame) -> Arrays:
    """Mixing the streams of hidden states before and after attention and MLP of a layer, together."""
    fastest = table.groupby(["hidden_size", "num_tokens", "op_name"]).latency.min()
    part = fastest.groupby(level=[0, 1]).agg(["sum", "size"])
    part = part[part["size"] == 2].rename(columns={"sum": "latency"}).reset_index()
    axes, times = _grid(part, ["hidden_size", "num_tokens"])
    columns = {"hidden": axes[0], "tokens": axes[1], "t": times}
    return {f"streams/all/{name}": values for name, values in columns.items()}


_dsa_decode, _dsa_prefill = partial(_sparse_decode, kind="dsa"), partial(_sparse_prefill, kind="dsa")
_msa_decode, _msa_prefill = partial(_sparse_decode, kind="msa"), partial(_sparse_prefill, kind="msa")


def _states(table: pd.DataFrame, kind: str) -> Arrays:
    """Kernels of layers that keep a state: rows of one token, and one prompt; the convolution and the update."""
    arrays: Arrays = {}
    for phase, name, size in (("generation", "decode", "batch_size"), ("context", "prefill", "seq_len")):
        part = table[(table.phase == phase) & ((table.batch_size == 1) | (phase == "generation"))]
        heads = part[["num_k_heads", "num_v_heads"]].drop_duplicates().sort_values(["num_v_heads", "num_k_heads"])
        codes = {tuple(pair): code for code, pair in enumerate(heads.to_numpy().tolist())}
        keys = zip(part.num_k_heads.tolist(), part.num_v_heads.tolist(), strict=True)
        part = part.assign(code=[codes[key] for key in keys], conv=part.kernel_source.str.contains("conv1d"))
        # of several kernels that do the same the fastest, and then one of each
        each = part.groupby(["code", size, "conv"]).latency.min().groupby(["code", size]).agg(["sum", "size"])
        each = each[each["size"] == 2].rename(columns={"sum": "latency"}).reset_index()
        if each.empty:
            continue
        axes, times = _grid(each, ["code", size])
        columns = {"heads": heads.to_numpy()[axes[0]].astype(np.int16), "at": axes[1], "t": times}
        arrays |= {f"state-{name}/{kind}/{axis}": values for axis, values in columns.items()}
    return arrays


_gated_delta, _kda = partial(_states, kind="gdn"), partial(_states, kind="kda")


def _absorbed(table: pd.DataFrame) -> Arrays:
    """The products before and after attention in the compressed space, together."""
    part = table[table.bmm_dtype == "bfloat16"].groupby(["num_heads", "num_tokens"]).latency.sum().reset_index()
    axes, times = _grid(part, ["num_heads", "num_tokens"])
    columns = {"heads": axes[0], "tokens": axes[1], "t": times}
    return {f"latent-bmm/bfloat16/{name}": values for name, values in columns.items()}


_TABLES = (  # that an engine may have, and what packs each
    ("moe", "moe_perf", _experts),
    ("mla", "generation_mla_perf", _latent_decode),
    ("mla", "context_mla_perf", _latent_prefill),
    ("mla_bmm", "mla_bmm_perf", _absorbed),
    ("sparse_attention", "dsa_generation_module_perf", _dsa_decode),
    ("sparse_attention", "dsa_context_module_perf", _dsa_prefill),
    ("msa", "msa_generation_module_perf", _msa_decode),
    ("msa", "msa_context_module_perf", _msa_prefill),
    ("sparse_attention", "dsv4_csa_generation_module_perf", partial(_sparse_decode, kind="csa")),
    ("sparse_attention", "dsv4_csa_context_module_perf", partial(_sparse_prefill, kind="csa")),
    ("sparse_attention", "dsv4_hca_generation_module_perf", partial(_sparse_decode, kind="hca")),
    ("sparse_attention", "dsv4_hca_context_module_perf", partial(_sparse_prefill, kind="hca")),
    ("mhc", "mhc_module_perf", _streams),
    ("linear_attention", "gdn_perf", _gated_delta),
    ("kda", "kda_perf", _kda),
)
PARTS = len(_TABLES)
