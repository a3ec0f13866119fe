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
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from pdvsim.bench.join import middle
from pdvsim.sim.core import ServingEngine
from pdvsim.sim.models.specs import GpuSpec
from pdvsim.sim.prices.kernels import CONTEXTS, TOPK, KernelTables
from pdvsim.sim.prices.shapes import ITEM_BYTES, experts_roofline, from_neighbours, packed, unpacked

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
# Whole experts: the name of their tables, on which GPUs, and whether every expert has as many tokens
WHOLE = (("moe-ep", "spread", False), ("moe-wide", "wide", False), ("moe-even", "all", True))
SENT = (("moe-sent", "all", False), ("moe-sent-even", "all", True))  # of tokens that were sent to them
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
    arrays = _products(source.table("gemm", "gemm_perf"))
    decode, prompts = (source.table("attention", f"{phase}_attention_perf") for phase in ("generation", "context"))
    arrays |= _attention("decode", {"rows": "batch_size", "context": "step"}, decode)
    arrays |= _attention("prefill", {"length": "isl"}, prompts)
    reduces = source.table("comm", "custom_allreduce_perf")
    if (like := RACKS.get(gpu.name)) is not None:
        rack = _Source(folder, SYSTEMS[like], engine).table("comm", "custom_allreduce_perf")
        reduces = pd.concat([reduces, rack[rack.num_gpus > reduces.num_gpus.max()]])
    arrays |= _reduce(reduces)
    for op, name, pack_one in _TABLES:
        if (table := source.optional(op, name)) is not None:
            arrays |= pack_one(table)
        packed_one()
    arrays |= _whole(WHOLE, source)
    if (table := source.optional("comm", "nccl_perf", engine="nccl")) is not None:
        arrays |= _nccl(table)
    arrays |= _deepep(source) | _nodes(source)
    borrowed = BORROWED.get((engine, gpu.name), {})
    for kind, owner in borrowed.items():
        lender = _Source(folder, SYSTEMS[gpu.name], owner)
        lent = _experts(lender.table("moe", "moe_perf")) | _whole(WHOLE, lender)
        arrays |= {name: values for name, values in lent.items() if name.split("/")[1] == kind}
    if gpu.name in BLACKWELL:
        there = [card for card in (gpu.name, ONE_CHIP[gpu.name]) if _root(folder, SYSTEMS[card])]
        arrays |= _whole(SENT, *(_Source(folder, SYSTEMS[card], "trtllm") for card in there), kinds=SENT_KINDS)
        timed = _Source(folder, SYSTEMS[NVLINK_TIMED], "trtllm") if _root(folder, SYSTEMS[NVLINK_TIMED]) else None
        if timed and (table := timed.optional("comm", "trtllm_alltoall_perf")) is not None:
            arrays |= _nvlink(table)
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


def left_out(tables: KernelTables) -> list[dict[str, Any]]:
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
    return [{"kernels": name, "points": off.size, **middle(off)} for name, off in errors.items() if off.size]


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
        rows, fixed, slopes = tables.attention("decode", heads, kv_heads, int(size), cache).lines()
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
        for path in self.paths(op, name, engine or self.engine):
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

    def paths(self, op: str, name: str, engine: str) -> list[Path]:
        """An engine's tables, newest first."""
        assert self.root is not None
        folder = self.root / self.system / op / engine
        return sorted(folder.glob(f"*/{name}.parquet"), key=_version, reverse=True)


def _version(path: Path) -> list[int]:
    name = path.parent.name.replace("rc", ".").replace("post", ".")
    return [int(part) if part.isdecimal() else 0 for part in name.split(".")]


def _timed(
    prefix: str,
    table: pd.DataFrame,
    axes: Mapping[str, str],
    points: tuple[str, list[str]] | None = None,
    padded: bool = False,
) -> Arrays:
    """Packed times on the grid of a table's columns, with the values of each axis; of several kernels the fastest.

    `points`, the first axis, are the distinct values of several columns together, under one name. Where shapes can be
    `padded` to a larger one, no size takes longer than that: what does is a hiccup.
    """
    arrays, columns = Arrays(), list(axes.values())
    if points is not None:
        name, several = points
        arrays[name] = table[several].drop_duplicates().to_numpy(np.int32 if name == "shapes" else np.int16)
        table, columns = table.assign(code=table.groupby(several, sort=False).ngroup()), ["code", *columns]
    values = [np.sort(table[column].unique()) for column in columns]
    times = np.full([len(each) for each in values], np.inf)
    places = tuple(np.searchsorted(each, table[column]) for each, column in zip(values, columns, strict=True))
    np.minimum.at(times, places, table.latency.to_numpy(float) * 1e-3)
    if padded:
        known = np.isfinite(times)
        for axis in range(times.ndim):
            times = np.flip(np.minimum.accumulate(np.flip(times, axis), axis), axis)
        times = np.where(known, times, np.inf)
    arrays |= dict(zip(axes, (each.astype(np.int32) for each in values[-len(axes) :]), strict=True))
    return {f"{prefix}/{name}": array for name, array in (arrays | {"t": packed(times)}).items()}


def _by_kind(
    name: str, kinds: str | pd.Series[str], axes: Mapping[str, str], table: pd.DataFrame, **more: Any
) -> Arrays:
    """One grid for each value of a column or of `kinds`, as of the KV cache; prompts are timed alone."""
    table = table.assign(kind=table[kinds] if isinstance(kinds, str) else kinds)
    table = table[table.batch_size == 1] if "isl" in axes.values() else table
    arrays = Arrays()
    for kind, part in table.groupby("kind"):
        arrays |= _timed(f"{name}/{kind}", part, axes, **more)
    return arrays


def _together(table: pd.DataFrame, by: list[str], step: str, steps: int) -> pd.DataFrame:
    """The latency of all steps of an operation, of each the fastest kernel; no row where a step was not timed."""
    each = table.groupby([*by, step]).latency.min().unstack()
    if each.shape[1] < steps:
        return pd.DataFrame({name: [] for name in (*by, "latency")})
    return each.sum(axis=1, skipna=False).rename("latency").dropna().reset_index()


def _products(table: pd.DataFrame) -> Arrays:
    table = table[(table.n >= LEAST_SIDE) & (table.k >= LEAST_SIDE) & table.gemm_dtype.isin(list(ITEM_BYTES))]
    least = table.groupby("gemm_dtype").latency.transform("min")
    quick = least <= MOST_WAIT * table[table.gemm_dtype == "bfloat16"].latency.min()
    return _by_kind("gemm", "gemm_dtype", {axis: axis for axis in "mnk"}, table[quick], padded=True)


def _attention(name: str, axes: Mapping[str, str], table: pd.DataFrame) -> Arrays:
    """Attention by head size, cache and window, over pairs of query and KV heads."""
    table = table.assign(window_size=table.get("window_size", 0))
    table = table[table.window_size.isin(WINDOWS) & (table.num_heads >= table.num_key_value_heads)]
    if "attn_dtype" in table and (table.attn_dtype == "bfloat16").any():
        table = table[table.attn_dtype == "bfloat16"]
    table = table[table.head_dim <= WIDEST_HEAD]
    kinds = table.head_dim.astype(str) + "-" + table.kv_cache_dtype + "-" + table.window_size.astype(int).astype(str)
    return _by_kind(name, kinds, axes, table, points=("pairs", ["num_heads", "num_key_value_heads"]))


def _experts(table: pd.DataFrame, name: str = "moe", more: tuple[str, ...] = ()) -> Arrays:
    def routing(known: pd.Series[str]) -> str:
        return next(each for each in ROUTING if (known == each).any())

    table = table[table.distribution == table.groupby("moe_dtype").distribution.transform(routing)]
    table = table.assign(inner=table.inter_size // table.moe_tp_size)
    shape = ["hidden_size", "inner", "topk", "num_experts", *more]
    return _by_kind(name, "moe_dtype", {"tokens": "num_tokens"}, table, points=("shapes", shape))


def _whole(parts: tuple[tuple[str, str, bool], ...], *sources: _Source, kinds: tuple[str, ...] = ()) -> Arrays:
    """Whole experts on several GPUs, by `WHOLE` or `SENT`; of several sources the fastest."""
    arrays = Arrays()
    for name, spread, even in parts:
        tables = [table for one in sources if (table := one.optional("moe", "moe_perf", spread)) is not None]
        if not tables:
            if not arrays:
                break
            continue
        table = pd.concat(tables)
        if spread != "spread":
            table = table[(table.num_experts >= WIDE_EXPERTS) & table.num_tokens.isin(WIDE_TOKENS)]
        if even:
            table = table[table.distribution == "balanced"]
        arrays |= _experts(table[table.moe_dtype.isin(kinds)] if kinds else table, name, ("moe_ep_size",))
    return arrays


def _reduce(table: pd.DataFrame) -> Arrays:
    if "backend" in table and table.backend.str.contains("graph").any():
        table = table[table.backend.str.contains("graph")]
    return _timed("reduce/graph", table, {"gpus": "num_gpus", "elements": "message_size"})


def _nccl(table: pd.DataFrame) -> Arrays:
    table = table[table.op_name.isin(("all_gather", "reduce_scatter")) & (table.nccl_dtype == "half")]
    return _by_kind("nccl", "op_name", {"gpus": "num_gpus", "elements": "message_size"}, table)


def _nvlink(table: pd.DataFrame) -> Arrays:
    """TensorRT-LLM's exchange over NVLink, by what it sends, ranks and tokens of a rank: all steps together."""
    table = table[(table.kernel_source == "NVLinkTwoSided") & table.op_name.isin(NVLINK_STEPS)]
    whole = _together(table, ["moe_dtype", "moe_ep_size", "num_tokens"], "op_name", 1)
    return _by_kind("nvlink", "moe_dtype", {"ranks": "moe_ep_size", "tokens": "num_tokens"}, whole)


def _deepep(source: _Source) -> Arrays:
    """DeepEP's dispatch and combine in two modes, low latency and high throughput, by size and tokens of a rank."""
    sizes, arrays = list(HIDDEN_BY_TOKENS.values()), Arrays()
    if source.engine == "sglang":
        for mode, (name, field) in DEEPEP.items():
            table = source.optional("comm", f"wideep_deepep_{name}_perf")
            if table is not None:
                table = table[(table.num_topk == TOPK) & (table.node_num == 1)].rename(columns={"num_token": sizes[1]})
                arrays |= _timed(f"deepep/{mode}", _both_ways(table, field), HIDDEN_BY_TOKENS)
    elif (table := source.optional("comm", "moe_a2a_perf")) is not None:
        table = table[(table.topk == TOPK) & table.comm_dtype.isin(("default", "bfloat16")) & (table.node_num == 1)]
        for mode in DEEPEP:
            whole = _together(table[table.comm_backend.str.endswith(mode)], sizes, "phase", 1)
            if len(whole):
                arrays |= _timed(f"deepep/{mode}", whole.assign(latency=whole.latency * 1e-3), HIDDEN_BY_TOKENS)
    return arrays


def _nodes(source: _Source) -> Arrays:
    """DeepEP on one node and on several, by tokens of a rank: timed in SGLang for one model."""
    arrays = Arrays()
    for mode, (name, field) in DEEPEP.items():
        for path in source.paths("comm", f"wideep_deepep_{name}_perf", "sglang"):
            table = pd.read_parquet(path)
            part = _both_ways(table[(table.num_topk == TOPK) & (table.num_experts == NODES_EXPERTS)], field)
            common = part.groupby("num_token").node_num.nunique()
            part = part[part.num_token.isin(common[common == part.node_num.nunique()].index)]
            if part.node_num.nunique() > 1:
                prefix = f"deepep-nodes/{mode}"
                arrays |= _timed(prefix, part, {"nodes": "node_num", "tokens": "num_token"})
                arrays[f"{prefix}/hidden"] = part.hidden_size.unique().astype(np.int32)
                break
    return arrays


def _both_ways(table: pd.DataFrame, field: str) -> pd.DataFrame:
    """Dispatch and combine together, on the default number of multiprocessors where a table has several."""
    if "dispatch_sms" in table:
        table = table[(table.dispatch_sms == EXCHANGE_SMS) & (table.combine_sms == EXCHANGE_SMS)]
    return table.assign(latency=(table[f"dispatch_{field}"] + table[f"combine_{field}"]) * 1e-3)


def _sparse(kind: str, prompts: bool, table: pd.DataFrame) -> Arrays:
    """Self-selecting modules of sparse attention, by the hidden size of their models and by cache: products included.

    With the products that all engines timed: bfloat16 where it was, and compressed attention as it is served.
    """
    compressed = kind in ("csa", "hca")
    least, most = (0, 0) if prompts else (LEAST_SPARSE_CONTEXT, LONGEST_CONTEXT if compressed else 1 << 20)
    table = table[(table.num_heads >= LEAST_SPARSE_HEADS) & table.step.between(least, most)]
    table = table[~table.op_name.str.contains("skip") & table.model.isin(list(SPARSE_MODELS))]
    table = table[table.batch_size == 1] if prompts else table
    hidden = table.model.map(SPARSE_MODELS).astype(int)
    products = table.groupby(hidden).gemm_type.transform("max" if compressed else "min")
    kinds = (kind + "-" + hidden.astype(str) + "-" + table.kv_cache_dtype)[table.gemm_type == products]
    table, name = table[table.gemm_type == products], f"sparse-{'prefill' if prompts else 'decode'}"
    used = {f"{name}/{of}/products": np.array(each) for of, each in table.gemm_type.groupby(kinds).first().items()}
    return _by_kind(name, kinds, PROMPT_BY_HEADS if prompts else DECODE_BY_HEADS, table) | used


def _streams(table: pd.DataFrame) -> Arrays:
    """Mixing the streams of hidden states before and after attention and MLP of a layer, together."""
    return _timed("streams/all", _together(table, list(HIDDEN_BY_TOKENS.values()), "op_name", 2), HIDDEN_BY_TOKENS)


def _states(kind: str, table: pd.DataFrame) -> Arrays:
    """Kernels of layers that keep a state: rows of one token, and one prompt; the convolution and the update."""
    arrays = Arrays()
    for phase, name, size in (("generation", "decode", "batch_size"), ("context", "prefill", "seq_len")):
        part = table[(table.phase == phase) & ((table.batch_size == 1) | (phase == "generation"))]
        # of several kernels that do the same the fastest, and then one of each
        part = part.assign(conv=part.kernel_source.str.contains("conv1d"))
        each = _together(part, ["num_v_heads", "num_k_heads", size], "conv", 2)
        if len(each):
            arrays |= _timed(f"state-{name}/{kind}", each, {"at": size}, ("heads", ["num_k_heads", "num_v_heads"]))
    return arrays


def _absorbed(table: pd.DataFrame) -> Arrays:
    """The products before and after attention in the compressed space, together."""
    part = table[table.bmm_dtype == "bfloat16"].groupby(["num_heads", "num_tokens"]).latency.sum().reset_index()
    return _timed("latent-bmm/bfloat16", part, {"heads": "num_heads", "tokens": "num_tokens"})


HIDDEN_BY_TOKENS = {"hidden": "hidden_size", "tokens": "num_tokens"}
DECODE_BY_HEADS = {"heads": "num_heads", "rows": "batch_size", "context": "step"}
PROMPT_BY_HEADS = {"heads": "num_heads", "length": "isl"}
_TABLES: tuple[tuple[str, str, Callable[[pd.DataFrame], Arrays]], ...] = (  # that an engine may have, what packs each
    ("moe", "moe_perf", _experts),
    ("mla", "generation_mla_perf", partial(_by_kind, "latent-decode", "kv_cache_dtype", DECODE_BY_HEADS)),
    ("mla", "context_mla_perf", partial(_by_kind, "latent-prefill", "kv_cache_dtype", PROMPT_BY_HEADS)),
    ("mla_bmm", "mla_bmm_perf", _absorbed),
    *(
        (op, f"{name}{phase}_module_perf", partial(_sparse, kind, phase == "context"))
        for op, name, kind in (
            ("sparse_attention", "dsa_", "dsa"),
            ("msa", "msa_", "msa"),
            ("sparse_attention", "dsv4_csa_", "csa"),
            ("sparse_attention", "dsv4_hca_", "hca"),
        )
        for phase in ("generation", "context")
    ),
    ("mhc", "mhc_module_perf", _streams),
    ("linear_attention", "gdn_perf", partial(_states, "gdn")),
    ("kda", "kda_perf", partial(_states, "kda")),
)
PARTS = len(_TABLES)
