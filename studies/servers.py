"""Measure real vLLM servers on one GPU: a plan of servers and benches, with random weights and pinned acceptance.

    python studies/servers.py PLAN.jsonl --models FOLDER -o OUT [--limit SECONDS]

A line of the plan is a server: its name, model, flags, speculative configuration, wave, and benches (concurrency `c` or
`rate`, number of requests `n`, mean lengths `in` and `out`). The servers of a wave start together, each with a KV cache
of its own size, and are measured one at a time while the others idle: starting takes longer than measuring. Every bench
becomes one row in OUT/rows.jsonl: commands, versions, what the server's log says, lengths, metrics and date. A third of
the rows, by hash of their commands, is marked `held_out`: nothing is ever fitted to these.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import time
from contextlib import redirect_stdout
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

from pdvsim.realrun.engines import EngineServer

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
PATIENCE_S = 300  # for a wave to start
METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p50", "p90", "p95", "p99")
TOTALS = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_per_position_acceptance_rates",
)  # fmt: skip


class Server:
    """One `vllm serve` of a plan."""

    def __init__(self, job: dict[str, Any], models: Path, folder: Path) -> None:
        self.job, self.models, self.folder = job, models, folder
        flags = [*job.get("serve", []), "--load-format", "dummy", "--max-model-len", "8192"]
        if "kv_gib" in job:
            flags += ["--kv-cache-memory-bytes", str(int(job["kv_gib"] * 2**30)), "--gpu-memory-utilization", "0.1"]
        if spec := job.get("spec"):
            told = spec | ({"model": str(models / spec["model"])} if spec.get("model") else {})
            flags += ["--speculative-config", json.dumps(told)]
        self.command = ["vllm", "serve", str(models / job["model"]), *flags]
        words, log = ["-m", "vllm.entrypoints.cli.main", *self.command[1:]], folder / f"{job['name']}.server.log"
        self.process = EngineServer(words, ENVIRONMENT | job.get("env", {}), log)

    def bench(self, bench: dict[str, Any], seed: int) -> dict[str, Any]:
        """Run `vllm bench serve` in this process; the row of its result."""
        import vllm
        from vllm.benchmarks import serve
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = FlexibleArgumentParser()
        serve.add_cli_args(parser)
        name = f"{self.job['name']}__{bench_name(bench)}.json"
        words = [
            "--model", str(self.models / self.job["model"]), "--dataset-name", "random", "--random-input-len",
            str(bench["in"]), "--random-output-len", str(bench["out"]), "--random-range-ratio",
            str(bench.get("range", 0.5)), "--ignore-eos", "--num-prompts", str(bench["n"]), "--seed",
            str(bench.get("seed", seed)), "--temperature", "0",
        ]  # fmt: skip
        words += ["--max-concurrency", str(bench["c"])] if bench.get("c") else []
        words += ["--request-rate", str(bench["rate"])] if bench.get("rate") else []
        words += ["--random-prefix-len", str(bench["prefix"])] if bench.get("prefix") else []
        words += ["--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,90,95,99"]
        private = ["--backend", "vllm", "--base-url", self.process.url, "--endpoint", "/v1/completions"]
        private += ["--save-result", "--save-detailed", "--result-dir", str(self.folder), "--result-filename", name]
        with (self.folder / f"{self.job['name']}.bench.log").open("a") as log, redirect_stdout(log):
            asyncio.run(serve.main_async(parser.parse_args([*words, *private, "--disable-tqdm"])))
        result = json.loads((self.folder / name).read_text())
        result.pop("generated_texts", None)
        (self.folder / name).write_text(json.dumps(result))
        commands = (
            shlex.join(self.command).replace(f"{self.models}/", ""),
            shlex.join(words).replace(f"{self.models}/", ""),
        )
        return {
            "server": self.job["name"], "bench": bench_name(bench), "engine": "vllm", "version": vllm.__version__,
            "held_out": is_held_out(*commands), "serve": commands[0], "bench_serve": commands[1],
            "model": self.job["model"], "speculation": self.job.get("spec"), "load": bench,
            "date": time.strftime("%Y-%m-%d"), "input_lens": result.get("input_lens"),
            "output_lens": result.get("output_lens"),
            **{key: result.get(key) for key in TOTALS},
            **{f"{s}_{m}_ms": result.get(f"{s}_{m}_ms") for m in METRICS for s in STATISTICS},
        }  # fmt: skip


def bench_name(bench: dict[str, Any]) -> str:
    """The load as part of a file's name."""
    load = f"c{bench['c']}" if bench.get("c") else f"r{bench['rate']}"
    return f"{load}_in{bench['in']}_out{bench['out']}" + (f"_prefix{bench['prefix']}" if bench.get("prefix") else "")


def is_held_out(*commands: str) -> bool:
    """Whether the row of these commands is of the third that is never fitted to."""
    return int(sha256(" ".join(commands).encode()).hexdigest(), 16) % 3 == 0


def measure(server: Server, rows: Path, left: Any) -> None:
    """Warm a server up, and append the rows of its benches as they end."""
    for warm in ({"c": 8, "n": 24, "in": 256, "out": 24}, {"c": 64, "n": 64, "in": 128, "out": 8}):
        server.bench(warm | {"seed": 900}, 0)
    for at, bench in enumerate(server.job["benches"]):
        if left() < 25:
            print("  no time for", bench_name(bench))
            return
        begin = time.monotonic()
        row = server.bench(bench, 100 + at)
        with rows.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            f"  {row['bench']:>20} {row['output_throughput']:9.1f} tok/s  TPOT {row['mean_tpot_ms']:7.3f}  "
            f"TTFT {row['mean_ttft_ms']:8.1f}  ITL {row['mean_itl_ms']:7.3f} p99 {row['p99_itl_ms']:7.2f}  "
            f"{row['spec_decode_acceptance_length'] or 1:.2f} tokens per round  [{time.monotonic() - begin:.0f} s]",
            flush=True,
        )


def main() -> None:
    """Measure the servers of a plan, wave by wave, until the time is over."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("plan", type=Path)
    parser.add_argument("--models", type=Path, required=True, help="folder of model folders")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=3600, help="seconds")
    given = parser.parse_args()
    end: float = time.monotonic() + given.limit
    given.output.mkdir(parents=True, exist_ok=True)

    def left() -> float:
        return end - time.monotonic()

    jobs = [json.loads(line) for line in given.plan.read_text().splitlines() if line.strip()]
    for wave, members in groupby(jobs, key=lambda job: job.get("wave", job["name"])):
        if left() < 120:
            print("no time for wave", wave)
            break
        begin, servers = time.monotonic(), list[Server]()
        try:
            for job in members:
                servers.append(Server(job, given.models.resolve(), given.output))
                time.sleep(job.get("apart_s", 0))
            failed = set[str]()
            for what in ("start", "measure"):  # all are up before the first is measured
                for server in (server for server in servers if server.job["name"] not in failed):
                    print(f"wave {wave}: {what} {server.job['name']}", flush=True)
                    try:
                        if what == "start":
                            server.process.wait(min(left() - 20, begin + PATIENCE_S - time.monotonic()))
                        else:
                            measure(server, given.output / "rows.jsonl", left)
                    except Exception as error:  # the others of the wave may still do
                        failed.add(server.job["name"])
                        print("  failed:", repr(error)[:300], flush=True)
            for server in servers:
                about = {"server": server.job["name"], "log": server.process.told()}
                with (given.output / "servers.jsonl").open("a") as file:
                    file.write(json.dumps(about) + "\n")
        finally:
            for server in servers:
                server.process.close()
    print(f"{left():.0f} s left")


if __name__ == "__main__":
    main()
