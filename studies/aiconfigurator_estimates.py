"""AIConfigurator's own estimates of the held-out silicon rows: TTFT and TPOT, written row by row.

    python studies/aiconfigurator_estimates.py ROWS.csv OUT.csv

Runs in an environment of its own with `pip install aiconfigurator==0.12.0`; two to five seconds per row. ROWS.csv is
`systems/silicon_sample.csv` of aiconfigurator-core. The version of the row's engine is tried first, then the
newest that it has tables of. Measured times are not read.
"""

import contextlib
import csv
import io
import logging
import sys
import zlib

NAMES = {
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-8B-Instruct": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Llama-3.1-8B-Instruct-FP8": "meta-llama/Meta-Llama-3.1-8B",
    "nvidia/Qwen3-32B-NVFP4": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-32B": "Qwen/Qwen3-32B",
    "Qwen/Qwen3-235B-A22B-FP8": "Qwen/Qwen3-235B-A22B-FP8",
    "deepseek-ai/DeepSeek-R1": "deepseek-ai/DeepSeek-R1",
    "deepseek-ai/DeepSeek-V3": "deepseek-ai/DeepSeek-V3",
    "openai/gpt-oss-120b": "openai/gpt-oss-120b",
}
DENSE = ("Llama", "Qwen3-32B")


def wanted(row: dict[str, str]) -> bool:
    """Held-out rows of aggregated servers without expert, data or pipeline parallelism that pdvsim predicts."""
    single = all(float(row[name] or 1) <= 1 for name in ("pp_size", "attention_dp_size", "moe_ep_size"))
    return (
        row["mode"] == "agg"
        and single
        and row["model_path"] in NAMES
        and row["system"] in ("h100_sxm", "h200_sxm", "b200_sxm")
        and float(row["tp_size"]) in (1, 2, 4, 8)
        and zlib.crc32(row["id"].encode()) % 3 == 0
    )


def estimate(row: dict[str, str]) -> tuple[float, float, str]:
    """TTFT and TPOT in milliseconds, or why there is none."""
    from aiconfigurator.cli.api import cli_estimate  # in its own environment alone

    sizes = {name: int(float(row[name])) for name in ("batch_size", "tp_size", "pp_size", "isl", "osl")}
    kinds: dict[str, str] = {"gemm_quant_mode": row["gemm_quant_mode"]} if row["gemm_quant_mode"] else {}
    if not any(name in row["model_path"] for name in DENSE):
        sizes |= {"moe_tp_size": sizes["tp_size"], "moe_ep_size": 1}
        if "gpt-oss" in row["model_path"]:
            kinds = {}  # its own MXFP4 experts; the file calls them nvfp4
    failure = ""
    for version in dict.fromkeys((row["backend_version"] or None, None)):
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                result = cli_estimate(
                    NAMES[row["model_path"]], row["system"], backend_name=row["backend"], backend_version=version,
                    **sizes, **kinds,
                )  # fmt: skip
            return result.ttft, result.tpot, ""
        except Exception as error:
            failure = " ".join(str(error).split())[:80]
    return 0.0, 0.0, failure


def main() -> None:
    logging.disable(logging.CRITICAL)
    with open(sys.argv[1], newline="") as file:
        rows = [row for row in csv.DictReader(file) if wanted(row)]
    rows.sort(key=lambda row: zlib.crc32(row["id"].encode()))  # if it is stopped, what it has is a sample of all
    with open(sys.argv[2], "w", newline="") as file:
        out = csv.writer(file)
        out.writerow(["id", "ttft_ms", "tpot_ms", "failure"])
        for number, row in enumerate(rows, 1):
            ttft, tpot, failure = estimate(row)
            out.writerow([row["id"], f"{ttft:.2f}", f"{tpot:.3f}", failure])
            file.flush()
            if number % 50 == 0:
                print(number, "of", len(rows), flush=True)


if __name__ == "__main__":
    main()
