"""AIConfigurator's own estimates of the held-out silicon rows: TTFT and TPOT, written row by row.

    python studies/aiconfigurator_estimates.py [FOLDER]

Runs in an environment of its own with `pip install aiconfigurator==0.12.0`; about a second per row. FOLDER is
`calibration/data/silicon`, whose `rows.csv` it reads and whose `aiconfigurator.csv` it continues: rows
that are there are not estimated again, so it can be stopped at any time. The version of the row's engine is tried
first, then the newest that it has tables of. Measured times are not read.

Experts have a row's weights too, as in AIConfigurator's own adapter of InferenceX's rows; those of 8 bits have a scale
per block, as published.

Rows with prefill apart are those whose layout is known and that do not draft. A decode worker's batch is its share of
the concurrency; prefill has one prompt at a time, as in NVIDIA's own comparison.
"""

import contextlib
import csv
import io
import logging
import re
import sys
import zlib
from functools import cache
from pathlib import Path

SYSTEMS = {"h100-sxm": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "b300": "b300_sxm"}
NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "nvidia/DeepSeek-R1-NVFP4": "deepseek-ai/DeepSeek-R1",
    "zhipuai/GLM-5": "zai-org/GLM-5",
}
DENSE = ("Llama", "Qwen3-32B")
IN_8_BITS = ("DeepSeek", "MiniMax", "Qwen3-235B-A22B-FP8")  # as they are published
SIDES = ("prefill", "decode")
Row = dict[str, str]


def wanted(row: Row) -> bool:
    """Held-out rows of servers whose layout is known and that do not draft."""
    workers = not is_apart(row) or (row["prefill_workers"] != "0" and row["drafts"] == "none")
    sizes = is_apart(row) or int(row["tensor_parallel"]) in (1, 2, 4, 8)
    return workers and sizes and row["concurrency"] != "0" and zlib.crc32(row["id"].encode()) % 3 == 0


def is_apart(row: Row) -> bool:
    """Return whether its prefill has GPUs of its own."""
    return bool(row["prefill_workers"])


def spread(row: Row) -> bool:
    """Return whether it has expert or data parallelism, on the same GPUs for all."""
    return not is_apart(row) and any(row[name] != "1" for name in ("data_parallel", "expert_parallel"))


def place(row: Row) -> tuple[int, int]:
    """Expert and data parallelism first, then prefill apart; each in an order that is random but always the same."""
    return 0 if spread(row) else 1 if is_apart(row) else 2, zlib.crc32(row["id"].encode())


def shape(row: Row) -> dict[str, object]:
    """Its lengths, batch and GPUs as AIConfigurator's arguments."""
    sizes: dict[str, object] = {"isl": int(row["tokens_in"]), "osl": int(row["tokens_out"])}
    load = int(row["concurrency"])
    if not is_apart(row):
        return sizes | gpus(row) | {"batch_size": max(1, load // int(row["data_parallel"]))}
    sizes["mode"] = "disagg"
    for side in SIDES:
        of_side = "prefill_" if side == "prefill" else ""
        sizes |= {f"{side}_{name}": size for name, size in gpus(row, of_side).items()}
        sizes[f"{side}_num_workers"] = int(row[f"{of_side}workers"])
    ranks = int(row["workers"]) * int(row["data_parallel"])
    return sizes | {"prefill_batch_size": 1, "decode_batch_size": max(1, round(load / ranks))}


def gpus(row: Row, side: str = "") -> dict[str, object]:
    tensor, ranks, experts = (int(row[f"{side}{kind}_parallel"]) for kind in ("tensor", "data", "expert"))
    sizes: dict[str, object] = {"tp_size": tensor, "pp_size": 1, "attention_dp_size": ranks}
    if not any(name in row["model"] for name in DENSE):
        sizes |= {"moe_tp_size": tensor * ranks // experts, "moe_ep_size": experts}
    return sizes


def quantised(row: Row) -> dict[str, str]:
    """Its weights as AIConfigurator's arguments, where they are not those of the published model."""
    weights = row["weights"]
    if weights == "bfloat16" or "gpt-oss" in row["model"]:  # that one has its own MXFP4; the file calls it nvfp4
        return {}
    if weights == "int4_wo":  # of experts alone
        return {"moe_quant_mode": weights}
    experts = {"moe_quant_mode": "fp8_block" if weights == "fp8" else weights}
    as_published = "fp8" in weights and any(name in row["model"] for name in IN_8_BITS)
    dense = any(name in row["model"] for name in DENSE)
    return {"gemm_quant_mode": weights} | ({} if dense or as_published else experts)


def reason(error: str) -> str:
    """Why there is no estimate, without keys of tables and names of files."""
    return re.split(r" \{| at /| \(", " ".join(error.split()))[0][:80]


def estimate(row: Row) -> tuple[float, float, str]:
    """TTFT and TPOT in milliseconds, or why there is none."""
    from aiconfigurator.cli.api import cli_estimate  # in its own environment alone

    failure = ""
    for version in dict.fromkeys((row["version"] or None, None)):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                result = cli_estimate(
                    NAMES.get(row["model"], row["model"]), SYSTEMS.get(row["card"], row["card"]),
                    backend_name=row["engine"], backend_version=version, **shape(row), **quantised(row),
                )  # fmt: skip
            return result.ttft, result.tpot, ""
        except Exception as error:
            failure = reason(str(error))
    return 0.0, 0.0, failure


def main() -> None:
    from aiconfigurator_core.sdk import perf_database  # reads 600 files to find the newest version, for every row

    perf_database.get_supported_databases = cache(perf_database.get_supported_databases)
    logging.disable(logging.CRITICAL)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "calibration/data/silicon")
    path = folder / "aiconfigurator.csv"
    with (folder / "rows.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if wanted(row)]
    known = set()
    if path.exists():
        with path.open(newline="") as file:
            known = {row["id"] for row in csv.DictReader(file)}
    todo = sorted((row for row in rows if row["id"] not in known), key=place)
    with path.open("a", newline="") as file:
        out = csv.writer(file)
        if not known:
            out.writerow(["id", "ttft_ms", "tpot_ms", "failure"])
        for number, row in enumerate(todo, 1):
            ttft, tpot, failure = estimate(row)
            out.writerow([row["id"], f"{ttft:.2f}", f"{tpot:.3f}", failure])
            file.flush()
            if number % 50 == 0:
                print(number, "of", len(todo), flush=True)


if __name__ == "__main__":
    main()
