"""Real runs to hold predictions against: `python -m pdvsim.calibration.validate.runs -o runs.jsonl`, on a CUDA card.

Each architecture serves the same requests in closed loops, and under Poisson arrivals at shares of what it reached at
the highest concurrency. One line a run: the load and every metric. A second call into the same file goes on
where the first stopped. Needs torch, Triton, numpy, SimPy and tyro.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

from pdvsim.common.files import write_whole
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Arch, Experiment, Scoring, Server, Traffic
from pdvsim.sim.limits import MAX_DATA_BYTES
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.reading import parse_json, read_text

CONCURRENCY = {1: 6, 8: 48, 32: 160, 64: 256}  # closed loops, with their number of requests
SHARES = (0.5, 0.8)  # of the rate that the highest concurrency reached
SECONDS = 6.0  # of arrivals at such a rate
TOKENS = 128  # prompt and output
ORDER: tuple[Arch, ...] = (
    "pd", "pdv", "colocated", "pdv-hybrid", "baseline", "pdv-unified", "adaptive", "autoregressive",
)  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """How a run is loaded: a closed loop, or a rate."""

    arch: Arch
    pair: str
    concurrency: int | None
    request_rate: float | None
    num_prompts: int
    repeat: int = 0

    def experiment(self) -> Experiment:
        """The run as an experiment, for either clock: the engine's limits hold for both."""
        rate = math.inf if self.request_rate is None else self.request_rate
        return Experiment(
            arch=self.arch,
            traffic=Traffic(
                dataset_name="random", input_len=TOKENS, output_len=TOKENS, num_prompts=self.num_prompts,
                request_rate=rate, max_concurrency=self.concurrency,
            ),
            server=Server(pair=self.pair, max_num_seqs=64, max_prompts_per_forward=4, kv_cache="reserved"),
            scoring=Scoring(percentile_metrics=("ttft", "tpot", "itl", "e2el"), metric_percentiles=(95.0, 99.0)),
        )  # fmt: skip


def loads(arch: Arch, pair: str, repeats: int) -> Iterator[Scenario]:
    """The closed loops of an architecture; the highest first, for the rates that follow from it."""
    for repeat in range(repeats):
        for concurrency in sorted(CONCURRENCY, reverse=True):
            prompts = max(6, concurrency) if arch == "baseline" else CONCURRENCY[concurrency]  # one at a time is slow
            yield Scenario(arch, pair, concurrency, None, prompts, repeat)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure real runs, going on where an earlier call stopped; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pdvsim.calibration.validate.runs", description=__doc__.split("\n")[0]
    )
    parser.add_argument("-o", "--output", type=Path, required=True, help="file of runs, one JSON object a line")
    parser.add_argument("--pairs", default="tinyllama-1.1b:llama-2-7b", help="draft:target, separated by commas")
    parser.add_argument("--archs", default=",".join(ORDER), help=f"of {', '.join(ARCHS)}")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--budget-s", type=float, default=math.inf, help="start no run after so many seconds")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to try the command")
    options = parser.parse_args(argv)
    import torch

    if not options.tiny and not torch.cuda.is_available():
        print("no CUDA device: real runs are measured on one", file=sys.stderr)
        return 2
    done = _done(options.output)
    begin = monotonic()
    for pair in options.pairs.split(","):
        models = None
        for arch in options.archs.split(","):
            if monotonic() - begin > options.budget_s:
                print(f"{monotonic() - begin:6.1f} s  budget spent before {arch}", flush=True)
                return 0
            models = (models or {}) | _serve_all(arch, pair, models, options, done, begin)
    return 0


def _done(path: Path) -> dict[str, dict[str, Any]]:
    if not path.exists():
        return {}
    done: dict[str, dict[str, Any]] = {}
    text = read_text(path, MAX_DATA_BYTES)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            run = parse_json(line)
            done[json.dumps(run["load"], sort_keys=True)] = run
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path}: line {number} is no run; remove it to go on") from None
    return done


def _serve_all(
    arch: Arch, pair: str, models: Any, options: argparse.Namespace, done: dict[str, dict[str, Any]], begin: float
) -> Any:
    """All runs of one architecture on one set of captured graphs; returns the models for the next."""
    from pdvsim.realrun.site import prepare, serve
    from pdvsim.sim.metrics.summary import summarise
    from pdvsim.sim.workload.requests import make_requests

    machine = Machine(device="cpu" if options.tiny else "cuda", tiny=options.tiny)
    closed = list(loads(arch, pair, options.repeats))
    if options.tiny:
        closed = [replace(load, num_prompts=4) for load in closed]
    largest = closed[0].experiment()
    unbounded = replace(largest, traffic=replace(largest.traffic, max_concurrency=None))  # the rates' runs ask for more
    rig = prepare(unbounded, machine, make_requests(largest.traffic, largest.acceptance), models=models)
    print(f"{monotonic() - begin:6.1f} s  {arch}: {rig.graphs} graphs captured", flush=True)
    serve(replace(largest, traffic=replace(largest.traffic, num_prompts=min(64, largest.traffic.num_prompts))),
          machine, rig=rig)  # fmt: skip
    todo = list(closed)
    while todo:
        load = todo.pop(0)
        key = json.dumps(asdict(load), sort_keys=True)
        if key not in done:
            if monotonic() - begin > options.budget_s:
                break
            result = serve(load.experiment(), machine, rig=rig)
            meta = {k: v for k, v in result.meta.items() if k != "telemetry"}
            done[key] = {"load": asdict(load), "metrics": summarise(result), "meta": meta}
            before = options.output.read_bytes() if options.output.exists() else b""
            write_whole(options.output, before + (json.dumps(done[key], default=str) + "\n").encode())
        metrics = done[key]["metrics"]
        at = f"C={load.concurrency}" if load.concurrency else f"{load.request_rate} req/s"
        print(
            f"{monotonic() - begin:6.1f} s  {arch:14} {at} #{load.repeat}: {metrics['output_throughput']:.0f} tok/s, "
            f"ttft {metrics['mean_ttft_ms']:.1f} ms, tpot {metrics['mean_tpot_ms']:.2f} ms, "
            f"idle {done[key]['meta'].get('host_idle_share')}",
            flush=True,
        )
        if load.concurrency == max(CONCURRENCY) and load.repeat == 0:
            rates = [round(share * metrics["request_throughput"], 2) for share in SHARES] if not options.tiny else []
            todo += [
                Scenario(arch, pair, None, rate, max(4, int(rate * SECONDS)), repeat)
                for repeat in range(options.repeats)
                for rate in rates
            ]
    return rig.models


if __name__ == "__main__":
    sys.exit(main())
