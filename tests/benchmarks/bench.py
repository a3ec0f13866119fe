"""Speed and memory of the simulator on 10,000 requests (1.87 million output tokens, Poisson 4/s), one process each.

    python tests/benchmarks/bench.py [--output bench.json]

Each figure is a fresh process, start-up included, records kept; times are also given as a number of SimPy's bare
timeouts, whose rate is measured with each run, so that a noisy machine does not matter.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

WORKLOAD = Path(__file__).parent / "data" / "bench_10000_poisson4.jsonl"
PAIR = "tinyllama-1.1b:llama-2-7b"


def one_run(arch: str, requests: int) -> None:
    """Simulate and print peak memory; run in a process of its own."""
    from pdvsim.sim.config import Experiment, Server, Traffic
    from pdvsim.sim.metrics.summary import summarise
    from pdvsim.sim.models.presets import MODELS
    from pdvsim.sim.run import simulate

    for name in PAIR.split(":"):  # the workload goes on to 3,072 tokens, where TinyLlama's context ends at 2,048
        MODELS[name] = replace(MODELS[name], max_position_embeddings=None)

    trace = {"dataset_name": "mooncake", "dataset_path": str(WORKLOAD), "num_prompts": requests, "seed": 0}
    if requests <= 10_000:
        traffic = Traffic(**trace, use_trace_timestamps=True)
    else:  # the file's lengths drawn again and again, at the same rate
        traffic = Traffic(**trace, request_rate=4.0)
    result = simulate(Experiment(arch=arch, traffic=traffic, server=Server(pair=PAIR)))
    summary = summarise(result)
    assert summary["completed"] == requests
    print(json.dumps({"rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))


def timed(arch: str, requests: int) -> tuple[float, float]:
    """Seconds and peak memory (MB) of one run in a fresh process."""
    begin = time.perf_counter()
    command = [sys.executable, __file__, "--one", arch, str(requests)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return time.perf_counter() - begin, json.loads(out)["rss_mb"]


def timeouts_per_s(count: int = 400_000) -> float:
    """SimPy's own rate: one process that does nothing but wait."""
    import simpy

    def wait(env: simpy.Environment) -> object:
        for _ in range(count):
            yield env.timeout(1.0)

    env = simpy.Environment()
    env.process(wait(env))
    begin = time.perf_counter()
    env.run()
    return count / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default="bench.json")
    parser.add_argument("--repeats", type=int, default=3, help="the best of so many is reported")
    parser.add_argument("--million", action="store_true", help="also 1,000,000 requests (colocated; minutes)")
    parser.add_argument("--one", nargs=2, metavar=("ARCH", "REQUESTS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        one_run(args.one[0], int(args.one[1]))
        return

    figures: dict[str, object] = {}
    rates, peaks = [timeouts_per_s()], []
    for arch in ("colocated", "pdv"):
        runs = []
        for _ in range(args.repeats):
            runs.append(timed(arch, 10_000))
            rates.append(timeouts_per_s())
        figures[f"{arch}_s"] = min(seconds for seconds, _ in runs)
        peaks.append(max(rss for _, rss in runs))
        print(f"{arch:>12}  10,000 requests  {figures[f'{arch}_s']:6.2f} s   peak {peaks[-1]:.0f} MB", flush=True)
    figures["peak_rss_mb"] = max(peaks)
    figures["simpy_timeouts_per_s"] = max(rates)
    growth = {}
    for requests in (1_000, 10_000, 100_000) + ((1_000_000,) if args.million else ()):
        seconds, rss = timed("colocated", requests)
        growth[str(requests)] = {"seconds": seconds, "rss_mb": rss}
        print(f"   colocated {requests:>9,} requests {seconds:7.2f} s   peak {rss:.0f} MB", flush=True)
    figures["by_requests"] = growth
    help_s = []
    for _ in range(5):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-m", "pdvsim", "--help"], check=True, capture_output=True)
        help_s.append(time.perf_counter() - begin)
    figures["help_s"] = min(help_s)
    for arch in ("colocated", "pdv"):
        ratio = float(str(figures[f"{arch}_s"])) * max(rates)
        figures[f"{arch}_in_timeouts"] = ratio
        at_580k = ratio / 580_000
        print(f"{arch:>12}  {ratio / 1e6:.2f} million bare timeouts; {at_580k:.2f} s where SimPy does 580,000/s")
    print(f"      SimPy  {max(rates):,.0f} bare timeouts/s;  pdvsim --help {figures['help_s']:.2f} s")
    Path(args.output).write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
