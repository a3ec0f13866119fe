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
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import redirect_stdout, suppress
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip
FIRST_PORT = 8123
PATIENCE_S = 300  # for a wave to start
TOLD = re.compile(  # lines of a server's log that say what to model
    r"KV cache size|Asynchronous scheduling|Async scheduling|max_num_scheduled_tokens|cudagraph|Graph capturing|"
    r"Model loading took|torch.compile took|Chunked prefill|model runner|Using .* backend|drafter|synthetic",
    re.IGNORECASE,
)
METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p50", "p90", "p95", "p99")
TOTALS = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_per_position_acceptance_rates",
)  # fmt: skip


class Server:
    """One `vllm serve`, from its start until its process group is gone."""

    def __init__(self, job: dict[str, Any], port: int, models: Path, folder: Path) -> None:
        self.job, self.port, self.models, self.folder = job, port, models, folder
        flags = [*job.get("serve", []), "--load-format", "dummy", "--max-model-len", "8192"]
        if "kv_gib" in job:
            flags += ["--kv-cache-memory-bytes", str(int(job["kv_gib"] * 2**30)), "--gpu-memory-utilization", "0.1"]
        if spec := job.get("spec"):
            told = spec | ({"model": str(models / spec["model"])} if spec.get("model") else {})
            flags += ["--speculative-config", json.dumps(told)]
        self.command = ["vllm", "serve", str(models / job["model"]), *flags]
        self.log = folder / f"{job['name']}.server.log"
        python = [sys.executable, "-m", "vllm.entrypoints.cli.main", *self.command[1:]]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*python, "--port", str(port), "--host", "127.0.0.1"], stdout=log, stderr=subprocess.STDOUT,
                env=os.environ | ENVIRONMENT | job.get("env", {}), start_new_session=True,
            )  # fmt: skip

    def is_up(self) -> bool:
        with suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=2):
            return True
        return False

    def told(self) -> list[str]:
        """What its log says of scheduling, graphs and memory."""
        lines = self.log.read_text(errors="replace").splitlines()
        return list(dict.fromkeys(line.partition("] ")[2][:300] for line in lines if TOLD.search(line)))

    def stop(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, sent)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
                return

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
        private = ["--backend", "vllm", "--base-url", f"http://127.0.0.1:{self.port}", "--endpoint", "/v1/completions"]
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
        begin = time.monotonic()
        servers = []
        for at, job in enumerate(members):
            servers.append(Server(job, FIRST_PORT + at, given.models.resolve(), given.output))
            time.sleep(job.get("apart_s", 0))
        waiting = list(servers)
        while waiting and left() > 20 and time.monotonic() - begin < PATIENCE_S:
            for server in list(waiting):
                if server.is_up() or server.process.poll() is not None:
                    waiting.remove(server)
                    print(f"{server.job['name']}: {time.monotonic() - begin:.0f} s", server.process.poll(), flush=True)
            time.sleep(0.5)
        try:
            for server in servers:
                print(server.job["name"], "wave", wave, flush=True)
                with (given.output / "servers.jsonl").open("a") as file:
                    about = {"server": server.job["name"], "log": server.told()}
                    file.write(json.dumps(about) + "\n")
                if server in waiting or server.process.poll() is not None:
                    wrong = [line for line in server.log.read_text().splitlines() if "rror" in line]
                    print("  NOT up:", *wrong[-12:], sep="\n   ")
                    continue
                try:
                    measure(server, given.output / "rows.jsonl", left)
                except Exception as error:
                    print("  failed:", repr(error)[:300], flush=True)
        finally:
            for server in servers:
                server.stop()
    print(f"{left():.0f} s left")


if __name__ == "__main__":
    main()
