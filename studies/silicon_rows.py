"""Make `rows.csv`, `apart.csv` and `limits.csv` of `calibration/data/silicon` from NVIDIA's collection of servers.

    python studies/silicon_rows.py SAMPLE.csv INFERENCEX SRT-SLURM [FOLDER]

SAMPLE.csv is `systems/silicon_sample.csv` of aiconfigurator-core 0.12.0; INFERENCEX a clone of
github.com/SemiAnalysisAI/InferenceX and SRT-SLURM one of github.com/NVIDIA/srt-slurm, with their histories. All are
Apache-2.0. FOLDER is where the files go.

The collection states some layouts wrongly. What is corrected, and how it is known:

- InferenceX states `tp` (GPUs of a server), `ep` and whether attention is data-parallel. Two of its three imports
  multiply: a server of tp 8, ep 8 is there as tensor parallelism 64, or data parallelism 64. Their ids state 8 and 8,
  and rows of the first import, with equal times to all digits, state 8 and 8 as well.
- For vLLM they state tp 4, ep 4 as data parallelism 4 and expert parallelism 16. InferenceX's scripts start tensor
  parallelism 4 with --enable-expert-parallel, or data parallelism where `dp-attn` is set; Kimi-K2.5's pass no expert
  parallelism at all.
- `batch_size` is per data-parallel rank; `silicon_concurrency` is the load generator's, for the whole server.
- 19 rows of NVIDIA without expert parallelism state a load of two to 32 times their batch. Several servers or ranks
  shared it, and which is not stated: their concurrency is written as 0.
- Servers with prefill apart: only one import states workers, expert parallelism of decoding, and data parallelism.
  Rows of the others have its layout where their times are equal to all digits ("twin"), or that of InferenceX's
  configurations where one alone fits ("configuration"). Otherwise they have 0 workers.
- That import has no rows with MTP drafts; the others have, without saying so. `drafts` is "none" or "mtp" where the
  configurations state, else "unstated".
- InferenceX starts gpt-oss-120b with TensorRT-LLM on H200s with as many expert-parallel GPUs as tensor-parallel ones
  (gptoss-fp4-h200-trt: "For all sequence lengths, EP=TP"). Rows without a version do not state it; their times are
  those of rows that do.

`limits.csv` has what the collection lacks of servers with prefill apart in TensorRT-LLM: the requests that an engine
or rank decodes at most, experts with copies (EPLB), and the tokens of a forward of prompts. InferenceX's
configurations name the recipes of srt-slurm that state them; the newest version of a recipe that has the row's load
counts. Older ones state the first two themselves. 0: not known.
"""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

CARDS = {"h100_sxm": "h100-sxm", "h200_sxm": "h200", "b200_sxm": "b200", "b300_sxm": "b300"}
ENGINES = {"trtllm": "trt", "sglang": "sglang", "vllm": "vllm"}  # as InferenceX's configurations end
PREFIXES = {
    "deepseek-ai/DeepSeek-R1": "dsr1",
    "deepseek-ai/DeepSeek-V3": "dsr1",
    "openai/gpt-oss-120b": "gptoss",
    "moonshotai/Kimi-K2.5": "kimik2.5",
    "zhipuai/GLM-5": "glm5",
}
# InferenceX on 15 December, 15 January, 10 February, 1 and 24 March, 5 and 26 April
COMMITS = ("029199755", "d3b67c8cc", "8fe499ff4", "f267602ff", "6a5dad463", "bddbf4031", "82bc50058")
WEIGHTS = {"fp4": "nvfp4", "fp8": "fp8"}  # as InferenceX calls them, and as the rows do
CONFIGURATIONS = ".github/configs/nvidia-master.yaml"
DATA_PARALLEL = ("cfg707", "cfg727")  # of MiniMax-M2.5 in 4 bits: the loads that `dp-attn` is set for
SHARED_OUT = ("openai/gpt-oss-120b", "trtllm", "h200", "inferencex")  # rows whose experts are whole on every GPU
SIDES = ("prefill", "decode")
LAYOUT = ("workers", "tensor_parallel", "data_parallel", "expert_parallel")
SHARED = ("id", "engine", "version", "model", "card", "source", "weights", "tokens_in", "tokens_out", "concurrency")
ROWS = (*SHARED, "tensor_parallel", "data_parallel", "expert_parallel", "moe_tp", "ttft_ms", "tpot_ms")
LIMITED = ("model", "card", "weights", "tokens_in", "tokens_out", "concurrency")
LIMITS = (*LIMITED, "workers", "tensor_parallel", "data_parallel", "batch", "slots", "prompt_tokens")
APART = (*SHARED, *(f"{side}_{part}" for side in SIDES for part in LAYOUT), "drafts", "layout", "ttft_ms", "tpot_ms")
Row = dict[str, str]
Layout = tuple[int, int, int, int]  # of prefill or decode, as in LAYOUT


def number(text: str, without: int = 0) -> int:
    return int(float(text)) if text else without


def shared(row: Row) -> dict[str, Any]:
    """Return the columns that both kinds of rows have."""
    origin = row["silicon_data_source"]
    load = re.search(r"silicon_concurrency=(\d+)", origin)
    theirs = re.match(r"source_file=2026|db-dump|source_file=\S*gap-analysis", origin)
    return {
        "id": row["id"],
        "engine": row["backend"],
        "version": row["backend_version"],
        "model": row["model_path"],
        "card": CARDS.get(row["system"], row["system"]),
        "source": "inferencex" if theirs else "nvidia",
        "weights": row["gemm_quant_mode"] or "bfloat16",
        "tokens_in": row["isl"],
        "tokens_out": row["osl"],
        "concurrency": int(load[1]) if load else number(row["batch_size"]),
        "ttft_ms": round(float(row["silicon_ttft_ms"]), 2),
        "tpot_ms": round(float(row["silicon_tpot_ms"]), 3),
    }


def together(row: Row) -> dict[str, Any]:
    """A server that prefills and decodes, in its real layout."""
    out, origin = shared(row), row["silicon_data_source"]
    tensor, moe_tp = number(row["tp_size"]), number(row["moe_tp_size"])
    ranks, experts = number(row["attention_dp_size"], 1) or 1, number(row["moe_ep_size"], 1) or 1
    if out["source"] == "nvidia":
        batch = number(row["batch_size"])
        if experts > 1:  # their data parallelism shows in the batch alone
            ranks = out["concurrency"] // batch
            tensor //= ranks
        elif batch != out["concurrency"]:
            out["concurrency"] = 0
    elif row["backend"] == "vllm" and ranks > 1:
        experts = tensor
        ranks = tensor if row["id"].endswith(DATA_PARALLEL) else 1
        tensor //= ranks
    elif experts > 1 and origin.startswith(("source_file=2026-04", "db-dump")):
        tensor, ranks = (max(1, size // experts) for size in (tensor, ranks))
    if "Kimi" in row["model_path"] and row["backend"] == "vllm":
        experts, moe_tp = 1, tensor
    if (row["model_path"], row["backend"], out["card"], out["source"]) == SHARED_OUT:
        experts = tensor
    if experts > 1 or ranks > 1:
        moe_tp = tensor * ranks // experts
    layout = {"tensor_parallel": tensor, "data_parallel": ranks, "expert_parallel": experts, "moe_tp": moe_tp}
    return out | layout


def stated(row: Row) -> tuple[Layout, Layout]:
    """The layout of a row with prefill apart, as it is stated."""
    parts = ("num_workers", "tp_size", "attention_dp_size", "moe_ep_size")
    first, second = (tuple(number(row[f"{side}_{part}"], 1) or 1 for part in parts) for side in SIDES)
    return first, second  # type: ignore[return-value]


def configured(parts: dict[str, Any]) -> Layout:
    """The layout of one side of a configuration."""
    gpus = parts["tp"]
    ranks = gpus if parts["dp-attn"] else 1
    return parts["num-worker"], gpus // ranks, ranks, parts["ep"]


def points(clone: Path) -> Iterator[tuple[tuple[Any, ...], str, dict[str, Any]]]:
    """InferenceX's servers with prefill apart: model, type, card, engine and lengths; drafts; the configuration."""
    for commit in COMMITS:
        command = ["git", "-C", str(clone), "show", f"{commit}:{CONFIGURATIONS}"]
        document = yaml.safe_load(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for name, one in document.items():
            model, kind, card, *_ = name.split("-")
            engine = name.removesuffix("-mtp").rsplit("-", 1)[1]
            lengths = one.get("seq-len-configs") or one.get("scenarios", {}).get("fixed-seq-len", [])
            for part, point in [(length, point) for length in lengths for point in length["search-space"]]:
                drafts = "mtp" if name.endswith("-mtp") else point.get("spec-decoding", "none")
                if "prefill" in point:
                    yield (model, kind, card, engine, part["isl"], part["osl"]), drafts, point


def configurations(clone: Path) -> dict[tuple[Any, ...], set[tuple[str, Layout, Layout]]]:
    """Those servers, by model, type, card, engine, lengths and concurrency."""
    known: dict[tuple[Any, ...], set[tuple[str, Layout, Layout]]] = {}
    for key, drafts, point in points(clone):
        server = (drafts, configured(point["prefill"]), configured(point["decode"]))
        for load in point.get("conc-list", []):
            known.setdefault((*key, load), set()).add(server)
    return known


def limits(clone: Path, recipes: Path) -> Iterator[dict[str, Any]]:
    """What the recipes of TensorRT-LLM's servers with prefill apart set, without drafts."""
    limits_of: dict[tuple[Any, ...], set[tuple[int, ...]]] = {}
    for (model, kind, card, engine, *lengths), drafts, point in points(clone):
        if (engine, drafts) != ("trt", "none"):
            continue
        settings, server = str(point), (model, CARDS.get(f"{card}_sxm", card), WEIGHTS[kind], *lengths)
        copies = re.search(r"_eplb(\d+)_", settings)
        named = re.search(r"DECODE_MAX_BATCH_SIZE=(\d+)", settings) or re.search(r"_batch(\d+)_", settings)
        workers, tensor, ranks, _ = configured(point["decode"])
        for load in point.get("conc-list", []):
            path = re.search(r"CONFIG_FILE=([\w./-]+)", settings)
            stated = recipe(recipes, path[1], load) if path else None
            if stated is None and named is None:
                continue
            batch, tokens = stated or (int(named[1]), 0)  # type: ignore[index]
            key = *server, load, workers, tensor, ranks
            limits_of.setdefault(key, set()).add((batch, int(copies[1]) if copies else 0, tokens))
    for key, all_of in sorted(limits_of.items(), key=str):
        if len(all_of) == 1:
            yield dict(zip(LIMITS, (*key, *all_of.pop()), strict=True))


@cache
def versions(recipes: Path, path: str) -> tuple[dict[str, Any], ...]:
    """All versions of a recipe, the newest first."""
    git = ["git", "-C", str(recipes)]
    log = subprocess.run([*git, "log", "--all", "--format=%H", "--", path], check=True, capture_output=True, text=True)
    texts = [
        subprocess.run([*git, "show", f"{one}:{path}"], capture_output=True, text=True) for one in log.stdout.split()
    ]
    return tuple(yaml.safe_load(one.stdout) for one in texts if not one.returncode)


def recipe(recipes: Path, path: str, load: int) -> tuple[int, int] | None:
    """Requests of a rank that decodes and prompt tokens of a forward, by the newest version for a load."""
    for one in versions(recipes, path):
        if str(load) in re.findall(r"\d+", str(one["benchmark"].get("concurrencies", ""))):
            sides = one["backend"]["trtllm_config"]
            return sides["decode"]["max_batch_size"], sides["prefill"]["max_num_tokens"]
    return None


def apart(rows: list[Row], clone: Path) -> Iterator[dict[str, Any]]:
    """Servers with prefill apart, in their real layout where it is known."""
    known = configurations(clone)
    twins = {times(row): stated(row) for row in rows if row["silicon_data_source"].startswith("db-dump")}
    for row in rows:
        out = shared(row)
        key = (PREFIXES.get(row["model_path"]), row["precision"], row["system"].removesuffix("_sxm"))
        lengths = (int(row["isl"]), int(row["osl"]), out["concurrency"])
        fitting = known.get((*key, ENGINES[row["backend"]], *lengths), set())
        here = stated(row)
        whole = row["silicon_data_source"].startswith("db-dump") or out["source"] == "nvidia"
        if whole or times(row) in twins:
            limits, layout = twins.get(times(row), here), "stated" if whole else "twin"
            fitting = {one for one in fitting if one[1:] == limits} or {("none", *limits)}
            drafts = "mtp" if {one[0] for one in fitting} == {"mtp"} else "none"
        else:
            # GPUs of either side and experts of prefill are those of the import
            sizes = (here[0][1] * here[0][2], here[1][1] * here[1][2], here[0][3])
            fitting = {one for one in fitting if (one[1][1] * one[1][2], one[2][1] * one[2][2], one[1][3]) == sizes}
            kinds = {one[0] for one in fitting}
            drafts = kinds.pop() if len(kinds) == 1 else "unstated"
            if len({one[1:] for one in fitting}) == 1:
                _, *both = next(iter(fitting))
                limits, layout = (both[0], both[1]), "configuration"
            else:
                limits, layout = ((0, *here[0][1:]), (0, *here[1][1:])), "unknown"
        for side, of_side in zip(SIDES, limits, strict=True):
            out |= {f"{side}_{part}": size for part, size in zip(LAYOUT, of_side, strict=True)}
        yield out | {"drafts": drafts, "layout": layout}


def times(row: Row) -> tuple[float, float]:
    """Return what identifies a measurement: rows that agree in both times are one."""
    return round(float(row["silicon_ttft_ms"]), 2), round(float(row["silicon_tpot_ms"]), 3)


def write(path: Path, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        out = csv.DictWriter(file, columns, lineterminator="\n")
        out.writeheader()
        out.writerows(rows)


def main() -> None:
    sample, clone, recipes = map(Path, sys.argv[1:4])
    folder = Path(sys.argv[4] if len(sys.argv) > 4 else "calibration/data/silicon")
    with sample.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    rows.sort(key=lambda row: row["id"])
    write(folder / "rows.csv", ROWS, [together(row) for row in rows if row["mode"] == "agg"])
    write(folder / "apart.csv", APART, list(apart([row for row in rows if row["mode"] == "disagg"], clone)))
    write(folder / "limits.csv", LIMITS, list(limits(clone, recipes)))


if __name__ == "__main__":
    main()
