"""Measure real vLLM or SGLang servers on one GPU: a plan of servers and benches, random weights, pinned acceptance.

    python studies/servers.py PLAN.jsonl --models FOLDER -o OUT [--limit SECONDS]

A line of the plan is a server: its name, engine, model, flags, speculative configuration, wave, and benches
(concurrency `c` or `rate`, number of requests `n`, mean lengths `in` and `out`). With `profile` a bench also traces
that many steps of vLLM, whose parts become a line of OUT/steps.jsonl. `runs` are commands of realrun that the server
serves too; they become OUT/served.jsonl. The servers of a wave start together, each with a KV cache
of its own size, and are measured one at a time while the others idle: starting takes longer than measuring. Every bench
becomes one row in OUT/rows.jsonl: commands, versions, what the server's log says, lengths, metrics and date. A third of
the rows, by hash of their commands, is marked `held_out`: nothing is ever fitted to these.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import re
import shlex
import sys
import time
from contextlib import redirect_stdout
from hashlib import sha256
from itertools import groupby, pairwise
from pathlib import Path
from threading import Timer
from typing import Any
from urllib.request import Request, urlopen

import numpy as np

from pdvsim.calibration.validate.runs import serve_all
from pdvsim.calibration.validate.served import ServedRun
from pdvsim.cli.realrun import server_line
from pdvsim.realrun.engines import SERVED_NAME, EngineBench, EngineServer
from pdvsim.realrun.machine import Machine

ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
PATIENCE_S = 300  # for a wave to start
STEPS = 40  # that a trace has
METRICS = ("ttft", "tpot", "itl", "e2el")
STATISTICS = ("mean", "median", "p50", "p90", "p95", "p99")
TOTALS = (
    "duration", "completed", "total_input_tokens", "total_output_tokens", "request_throughput", "output_throughput",
    "spec_decode_acceptance_rate", "spec_decode_acceptance_length", "spec_decode_num_drafts",
    "spec_decode_per_position_acceptance_rates",
)  # fmt: skip


class Server:
    """One server of a plan."""

    def __init__(self, job: dict[str, Any], models: Path, folder: Path) -> None:
        self.job, self.models, self.folder = job, models, folder
        self.engine, environment = job.get("engine", "vllm"), dict(job.get("env", {}))
        model, spec = str(models / job["model"]), job.get("spec")
        flags = [*job.get("serve", []), "--load-format", "dummy"]
        if self.engine == "vllm":
            flags += ["--max-model-len", "8192", "--served-model-name", model, SERVED_NAME]
            if "kv_gib" in job:
                memory = str(int(job["kv_gib"] * 2**30))
                flags += ["--kv-cache-memory-bytes", memory, "--gpu-memory-utilization", "0.1"]
            if spec:
                told = spec | ({"model": str(models / spec["model"])} if spec.get("model") else {})
                flags += ["--speculative-config", json.dumps(told)]
            if any("profile" in bench for bench in job["benches"]):
                told = {"profiler": "torch", "torch_profiler_dir": str(self.traces), "torch_profiler_with_stack": False}
                flags += ["--profiler-config", json.dumps(told | {"ignore_frontend": True, "max_iterations": STEPS})]
                environment["VLLM_CUSTOM_SCOPES_FOR_PROFILING"] = "1"
            self.command = ["vllm", "serve", model, *flags]
            words = ["-m", "vllm.entrypoints.cli.main", *self.command[1:]]
        else:
            flags += ["--context-length", "8192", "--served-model-name", model, "--enable-metrics"]
            flags += ["--max-total-tokens", str(job["kv_tokens"])] if "kv_tokens" in job else []
            if spec:
                k, rates = spec["num_speculative_tokens"], spec["synthetic_acceptance_rates"]
                flags += ["--speculative-algorithm", spec["method"], "--speculative-draft-model-path"]
                flags += [str(models / spec["model"]), "--speculative-num-steps", str(k)]
                flags += ["--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(k + 1)]
                environment |= {
                    "SGLANG_SIMULATE_ACC_LEN": f"{1 + sum(rates):.3f}", "SGLANG_SIMULATE_ACC_METHOD": "match-expected",
                    "SGLANG_SIMULATE_ACC_TOKEN_MODE": "real-draft-token",
                }  # fmt: skip
            self.command = ["python", "-m", "sglang.launch_server", "--model-path", model, *flags]
            words = self.command[1:]
        self.environment, log = environment, folder / f"{job['name']}.server.log"
        self.process = EngineServer(words, ENVIRONMENT | environment, log)

    @property
    def traces(self) -> Path:
        return self.folder.absolute() / f"{self.job['name']}.traces"

    def bench(self, bench: dict[str, Any], seed: int) -> dict[str, Any]:
        """Run the engine's own bench program in this process; the row of its result."""
        name = f"{self.job['name']}__{bench_name(bench)}.json"
        path = self.folder / name
        words = ["--model", str(self.models / self.job["model"]), "--num-prompts", str(bench["n"])]
        words += ["--seed", str(bench.get("seed", seed)), "--temperature", "0"]
        words += ["--max-concurrency", str(bench["c"])] if bench.get("c") else []
        words += ["--request-rate", str(bench["rate"])] if bench.get("rate") else []
        log = self.folder / f"{self.job['name']}.bench.log"
        with log.open("a") as file, redirect_stdout(file):
            run = vllm_bench if self.engine == "vllm" else sglang_bench
            words, version, result = run(words, bench, self.process.url, path)
        result.pop("generated_texts", None)
        path.write_text(json.dumps(result))
        commands = (
            shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.command])
            .replace(f"{self.models}/", "")
            .replace(str(self.traces), "TRACES"),
            shlex.join(words).replace(f"{self.models}/", ""),
        )
        return {
            "server": self.job["name"], "bench": bench_name(bench), "engine": self.engine, "version": version,
            "held_out": is_held_out(*commands), "serve": commands[0], "bench_serve": commands[1],
            "model": self.job["model"], "speculation": self.job.get("spec"), "load": bench,
            "date": time.strftime("%Y-%m-%d"), "input_lens": result.get("input_lens"),
            "output_lens": result.get("output_lens"),
            **{key: result.get(key) for key in TOTALS},
            **{f"{s}_{m}_ms": result.get(f"{s}_{m}_ms") for m in METRICS for s in STATISTICS},
        }  # fmt: skip

    def traced(self, bench: dict[str, Any], seed: int) -> dict[str, Any]:
        """The parts of the steps of a bench, by a profiler's trace that begins when its servers' batch is full."""
        before = set(self.traces.glob("*.json*"))

        def profile(what: str) -> None:
            with urlopen(Request(f"{self.process.url}/{what}_profile", method="POST"), timeout=120) as answer:
                answer.read()

        starting = Timer(1.0, profile, ["start"])
        starting.start()
        self.bench(bench | {"seed": 950 + seed}, 0)
        starting.join()
        profile("stop")
        end = time.monotonic() + 90
        while not (new := set(self.traces.glob("*.json*")) - before) and time.monotonic() < end:
            time.sleep(0.5)
        time.sleep(1.0)  # until it is written whole
        steps = step_parts(json.loads(gzip.decompress(new.pop().read_bytes()))["traceEvents"])
        return {"server": self.job["name"], "bench": bench_name(bench), "date": time.strftime("%Y-%m-%d"), **steps}


Measured = tuple[list[str], str, dict[str, Any]]  # public flags, version, result


def vllm_bench(words: list[str], bench: dict[str, Any], url: str, path: Path) -> Measured:
    """`vllm bench serve`."""
    import vllm
    from vllm.benchmarks import serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    words = [
        *words[:2], "--dataset-name", "random", "--random-input-len", str(bench["in"]), "--random-output-len",
        str(bench["out"]), "--random-range-ratio", str(bench.get("range", 0.5)), "--ignore-eos", *words[2:],
    ]  # fmt: skip
    words += ["--random-prefix-len", str(bench["prefix"])] if bench.get("prefix") else []
    words += ["--percentile-metrics", ",".join(METRICS), "--metric-percentiles", "50,90,95,99"]
    private = ["--backend", "vllm", "--base-url", url, "--endpoint", "/v1/completions"]
    private += ["--save-result", "--save-detailed", "--result-dir", str(path.parent), "--result-filename", path.name]
    asyncio.run(serve.main_async(parser.parse_args([*words, *private, "--disable-tqdm"])))
    return words, vllm.__version__, json.loads(path.read_text())


def sglang_bench(words: list[str], bench: dict[str, Any], url: str, path: Path) -> Measured:
    """`sglang.benchmark.serving`, with the lengths of the other bench and its percentiles."""
    from sglang.benchmark import serving
    from sglang.version import __version__

    most = {name: round(bench[name] * (1 + bench.get("range", 0.5))) for name in ("in", "out")}
    ratio = (1 - bench.get("range", 0.5)) / (1 + bench.get("range", 0.5))
    words = [*words, "--dataset-name", "random-ids", "--random-input-len", str(most["in"]), "--random-output-len"]
    words += [str(most["out"]), "--random-range-ratio", f"{ratio:.4f}"]
    path.unlink(missing_ok=True)
    private = ["--backend", "sglang-oai", "--base-url", url, "--output-file", str(path), "--output-details"]
    given, sys.argv = sys.argv, ["serving", *words, *private, "--disable-tqdm", "--warmup-requests", "0"]
    try:
        serving.cli_main()
    except SystemExit as stop:
        raise ValueError(f"the bench ended with {stop}") from None
    finally:
        sys.argv = given
    result: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    ttfts, gaps = np.array(result["ttfts"]), [np.array(itls) for itls in result["itls"]]
    outputs = np.array(result["output_lens"])
    ends = ttfts + [gap.sum() for gap in gaps]
    samples = {
        "ttft": ttfts, "tpot": (ends - ttfts)[outputs > 1] / (outputs[outputs > 1] - 1),
        "itl": np.concatenate(gaps), "e2el": ends,
    }  # fmt: skip
    for name, values in samples.items():
        result[f"mean_{name}_ms"], result[f"median_{name}_ms"] = 1e3 * values.mean(), 1e3 * np.median(values)
        result |= {f"p{q}_{name}_ms": 1e3 * np.quantile(values, q / 100) for q in (50, 90, 95, 99)}
    result["spec_decode_acceptance_length"] = result.get("accept_length")
    return words, __version__, result


def step_parts(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over the steps of a trace: their period, and how long each annotated part took the host.

    `gpu_busy_us` is when at least one kernel ran, so the rest of the period is what the GPU waited.
    """
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    parts = [e for e in spans if e.get("cat") == "user_annotation"]
    starts = [e for e in parts if e["name"].startswith("execute_")]
    busy = np.array([(e["ts"], e["ts"] + e["dur"]) for e in spans if e.get("cat") in ("kernel", "gpu_memcpy")])
    kinds: dict[str, list[dict[str, float]]] = {}
    for start, following in pairwise(starts):
        prompts, rows = re.findall(r"_(\d+)\(", start["name"])
        kind = "prompts and rows" if int(prompts) and int(rows) else "prompts" if int(prompts) else "rows"
        begin, end = start["ts"], following["ts"]
        inside = np.clip(busy, begin, end)
        covered, at = 0.0, begin
        for first, last in inside[inside[:, 1] > inside[:, 0]]:
            covered, at = covered + max(0.0, last - max(first, at)), max(at, last)
        step = {"period_us": end - begin, "gpu_busy_us": covered}
        for part in parts:
            if begin <= part["ts"] < end:
                name = "execute" if part is start else part["name"]
                step[name] = step.get(name, 0.0) + part["dur"]
        kinds.setdefault(kind, []).append(step)
    return {
        kind: {"steps": len(steps)}
        | {name: round(float(np.median([s.get(name, 0.0) for s in steps])), 1) for name in sorted(set().union(*steps))}
        for kind, steps in kinds.items()
    }


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
        if bench.get("profile"):
            with rows.with_name("steps.jsonl").open("a") as file:
                file.write(json.dumps(server.traced(bench, at)) + "\n")
            continue
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
    if runs := server.job.get("runs"):
        bench = EngineBench(Machine(models=str(server.models)), server_line, server=server.process)
        plan = [ServedRun(f"{command} --engine {server.engine}", 0, True, {}, {}, rows.parent) for command in runs]
        serve_all(plan, rows.with_name("served.jsonl"), left() - 20, bench, print)


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
