"""The simulator's speed next to that of BLIS (github.com/inference-sim/inference-sim, Go), on the same requests.

    python studies/blis.py /path/to/blis [--repeats 3] [--requests 10000]

Both serve Llama-2-7B on one H100: default lengths, Poisson arrivals at 4 per second. BLIS replays our requests.
Each figure is the processor time of a whole process, start-up included, the least of several: other work on the
machine mostly adds to it. The two take turns, one process at a time. BLIS's steps are counted in a run of their own.

The work differs. BLIS has no drafts and no concurrent lanes, runs every step, holds every token and hashes KV blocks
(SHA-256). pdvsim counts KV blocks, advances rounds in blocks, and records every launch and delivery.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from pdvsim.sim.config import Acceptance, Traffic
from pdvsim.sim.workload.requests import make_requests

ROOT = Path(__file__).parents[1]
RATE = 4.0
ARCHS = ("autoregressive", "colocated", "pdv")
# BLIS's trace format; a row has a column for each name.
COLUMNS = (
    "request_id,client_id,tenant_id,slo_class,session_id,round_index,prefix_group,prefix_length,streaming,input_tokens,"
    "output_tokens,text_tokens,image_tokens,audio_tokens,video_tokens,reason_ratio,model,deadline_us,"
    "server_input_tokens,arrival_time_us,send_time_us,first_chunk_time_us,last_chunk_time_us,num_chunks,status,"
    "error_message,finish_reason"
)
ROW = "{id},,,,,0,,0,false,{prompt},{output},0,0,0,0,0,,0,0,{at_us},{at_us},0,0,0,ok,,"


@dataclass
class Contender:
    """One command, what it simulated and how long it took each time."""

    name: str
    command: list[str]
    folder: Path
    seconds: list[float] = field(default_factory=list)
    tokens: tuple[int, int] = (0, 0)
    launches: int = 0
    rounds: int = 0

    def run(self) -> None:
        """Run once: keep its processor time, and the tokens and launches that it reports."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        out = subprocess.run(
            self.command, cwd=self.folder, env=environment, check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        self.seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        report = json.loads(out[out.index("{") :])
        self.tokens = report["total_input_tokens"], report["total_output_tokens"]
        if "kinds" in report:
            self.launches = report["launches"]
            self.rounds = sum(
                kind["launches"] for name, kind in report["kinds"].items() if name in ("decode", "verify")
            )


def write_trace(folder: Path, requests: int) -> list[str]:
    """Our requests as a trace of BLIS; the flags that name it."""
    header, data = folder / "trace.yaml", folder / "trace.csv"
    header.write_text("trace_version: 3\ntime_unit: microseconds\nmode: generated\nwarm_up_requests: 0\n")
    rows = [
        ROW.format(
            id=request.id,
            prompt=request.prompt_tokens,
            output=request.output_tokens,
            at_us=round(request.arrival_s * 1e6),
        )
        for request in make_requests(Traffic(request_rate=RATE, num_prompts=requests), Acceptance())
    ]
    data.write_text("\n".join([COLUMNS, *rows]) + "\n")
    return ["--trace-header", str(header), "--trace-data", str(data)]


def count_steps(blis: Contender) -> int:
    """Steps of one more run, from its log."""
    command = [*blis.command, "--log", "debug"]
    with subprocess.Popen(
        command, cwd=blis.folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        steps = sum("<< StepEvent" in line for line in process.stderr)
    if process.returncode:
        sys.exit(f"{shlex.join(command)} failed")
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("blis", type=Path, help="the program, in the folder of its defaults.yaml and model_configs")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--requests", type=int, default=10_000)
    args = parser.parse_args()
    program = args.blis.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        replay = [str(program), "replay", *write_trace(folder, args.requests)]
        replay += ["--model", "meta-llama/llama-2-7b-hf", "--hardware", "H100", "--tp", "1", "--latency-model"]
        theirs = [
            Contender(f"BLIS, {model}", [*replay, model], program.parent) for model in ("trained-physics", "roofline")
        ]
        load = [
            "--pair",
            "tinyllama-1.1b:llama-2-7b",
            "--gpu",
            "h100-sxm",
            "--request-rate",
            f"{RATE:g}",
            "--num-prompts",
            str(args.requests),
            "--json",
            "--no-band",
        ]  # one simulation, not three
        run = [sys.executable, "-m", "pdvsim", "run"]
        ours = [Contender(f"pdvsim, {arch}", [*run, "--arch", arch, *load], folder) for arch in ARCHS]
        for contender in (*theirs, *ours):
            print(shlex.join(contender.command))
        for _ in range(args.repeats):
            for contender in (*theirs, *ours):
                contender.run()
        for blis in theirs:
            blis.launches = blis.rounds = count_steps(blis)
    if len({contender.tokens for contender in (*theirs, *ours)}) > 1:
        sys.exit("the simulators served different requests")
    prompt, output = ours[0].tokens
    print(
        f"\n{args.requests:,} requests, {prompt:,} prompt tokens, {output:,} output tokens; least of {args.repeats}\n"
    )
    print("| simulator | processor time, s | over BLIS's least time | GPU launches | decode or verify rounds |")
    print("|---|---|---|---|---|")
    fastest = min(min(blis.seconds) for blis in theirs)
    for contender in (*theirs, *ours):
        least, most = min(contender.seconds), max(contender.seconds)
        print(
            f"| {contender.name} | {least:.1f} (to {most:.1f}) | {least / fastest:.2f} | "
            f"{contender.launches:,} | {contender.rounds:,} |"
        )


if __name__ == "__main__":
    main()
