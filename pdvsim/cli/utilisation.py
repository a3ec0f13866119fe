"""How busy the GPU is under each architecture: `python -m pdvsim.cli.utilisation run` on a CUDA card, then `report`.

`run` serves every architecture at 1, 8, 32 and 64 at once, and `baseline` with 1 to 8 workers. `report` gives, side by
side, what the card says of itself (NVML), what the launches say, and what the simulator says.

What the figures tell: NVML's "SM busy" is the share of time in which any kernel ran, on however few of the SMs, and its
"memory busy" that in which memory was read or written at all. Launches count likewise, without the gaps between the
kernels of one launch. None says how well the GPU is used: that is tokens per second, and bytes over the bandwidth.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

from pdvsim.calibration.validate.launches import PARTS, gather, launches_of
from pdvsim.calibration.validate.runs import serve_all, tiny
from pdvsim.calibration.validate.served import ServedRun, read_runs
from pdvsim.common.commandline import command_line
from pdvsim.common.console import guarded
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Experiment, Scoring, Server, Traffic
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.metrics.works import busy_share
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.relevance import suited
from pdvsim.sim.run import simulate
from pdvsim.study import output
from pdvsim.view.calibration_plots import utilisation_figure
from pdvsim.view.table import cell, rows_table

PAIR = "tinyllama-1.1b:llama-2-7b"
AT_ONCE = {1: 16, 8: 64, 32: 160, 64: 256}  # of how many requests: some five seconds, twenty samples of NVML's
WORKERS = tuple(range(1, 9))
ONE_BY_ONE = 24  # requests that baseline, at batch 1, serves in that time
RUNS = Path("utilisation/runs.jsonl")
TOKENS = 128  # of each prompt and each output

Row = dict[str, Any]


def planned(folder: Path) -> Iterator[ServedRun]:
    """What is to be served: every architecture at every load, and baseline with more and more workers."""
    server = Server(PAIR, max_num_seqs=64)
    for arch in ARCHS:
        for at_once, count in AT_ONCE.items():
            count = min(count, ONE_BY_ONE) if arch == "baseline" else count
            yield _planned(arch, at_once, max(count, at_once), server, folder)
    for workers in WORKERS:
        yield _planned("baseline", workers, 3 * workers, replace(server, num_workers=workers), folder)


def _planned(arch: str, at_once: int, count: int, server: Server, folder: Path) -> ServedRun:
    traffic = Traffic("random", num_prompts=count, input_len=TOKENS, output_len=TOKENS, max_concurrency=at_once)
    scoring = Scoring(percentile_metrics=("ttft", "tpot", "e2el"))
    experiment = suited(Experiment(arch, traffic, server=server, scoring=scoring))
    return ServedRun(command_line("realrun", experiment), 0, False, {}, {}, folder)


def row_of(run: ServedRun) -> Row:
    """What the card, the launches and the simulator say of one run."""
    launches, result = launches_of(run), simulate(suited(run.experiment))
    simulated = summarise(result)
    return {
        "arch": run.experiment.arch,
        "at_once": run.experiment.traffic.max_concurrency,
        "workers": run.experiment.server.num_workers if run.experiment.arch == "baseline" else None,
        "sm_busy": run.meta.get("mean_gpu_percent", math.nan) / 100,
        "memory_busy": run.meta.get("mean_memory_percent", math.nan) / 100,
        "samples": run.meta.get("telemetry_samples", 0),
        "busy": busy_share({name: launches[name].to_numpy() for name in ("start_s", "end_s")}),
        "bandwidth": _bandwidth(run.metrics),
        "throughput": run.metrics["output_throughput"],
        "span_s": run.metrics["mean_e2el_ms"] / 1e3,
        "simulated_busy": busy_share(result.launches),
        "simulated_bandwidth": _bandwidth(simulated),
        "simulated_throughput": simulated["output_throughput"],
        "simulated_span_s": simulated["mean_e2el_ms"] / 1e3,
    }


def _bandwidth(metrics: Row) -> float:
    """Bytes that all lanes moved, over what the card could have copied; nan where that is not known."""
    return float(sum(lane.get("bandwidth_share") or math.nan for lane in metrics["lanes"].values()))


def grows(rows: Sequence[Row]) -> list[Row]:
    """Those of baseline with as many users as workers."""
    return [row for row in rows if row["workers"] is not None and row["workers"] == row["at_once"]]


def report_text(rows: Sequence[Row]) -> str:
    """Two tables, measured and simulated side by side."""
    both = [row for row in rows if row["at_once"] in AT_ONCE and (row["workers"] is None or row["workers"] == 4)]
    lines = [
        {
            "arch": row["arch"],
            "at once": str(row["at_once"]),
            "SM busy %": cell(row["sm_busy"], 0, 100),
            "memory busy %": cell(row["memory_busy"], 0, 100),
            "samples": str(row["samples"]),
            "launches busy %": cell(row["busy"], 1, 100),
            "simulated": cell(row["simulated_busy"], 1, 100),
            "bandwidth %": cell(row["bandwidth"], 1, 100),
            "simulated ": cell(row["simulated_bandwidth"], 1, 100),
            "tok/s": cell(row["throughput"], 0),
            "simulated  ": cell(row["simulated_throughput"], 0),
        }
        for row in both
    ]
    spans = [
        {
            "workers": str(row["workers"]),
            "seconds a request": cell(row["span_s"], 3),
            "simulated": cell(row["simulated_span_s"], 3),
            "tok/s": cell(row["throughput"], 0),
            "simulated ": cell(row["simulated_throughput"], 0),
        }
        for row in grows(rows)
    ]
    return "\n\n".join(
        [
            rows_table(lines),
            "baseline: each worker runs one request at a time, at batch 1, all on one stream",
            rows_table(spans),
        ]
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run or report; returns the exit code."""
    return guarded("utilisation", lambda: _main(argv))


def _main(argv: Sequence[str] | None) -> int:
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser(prog="python -m pdvsim.cli.utilisation", description=description)
    parser.add_argument("step", choices=("run", "report"))
    parser.add_argument("-o", "--output", type=Path, default=RUNS, help="the runs, a line each")
    parser.add_argument("--minutes", type=float, default=math.inf, help="run: start none after so long")
    parser.add_argument("--only", nargs="*", default=(), metavar="TEXT", help="run: if the command holds these")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="run: tiny models, to try the command")
    options = parser.parse_args(argv)
    if options.step == "report":
        if (options.output.parent / PARTS).exists():
            gather(options.output.parent)
        rows = [row_of(run) for run in read_runs(options.output)]
        print(report_text(rows))
        path = output.check_file(options.output.with_name("utilisation.png"))
        return output.save({path: output.picture(utilisation_figure(rows, grows(rows)), path)})
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("no CUDA device: this is measured on one; --tiny --device cpu tries the command")
    begin = monotonic()

    def say(text: str) -> None:
        print(f"{monotonic() - begin:6.1f} s  {text}", flush=True)

    folder = output.check_folder(options.output.parent)
    plan = [run for run in planned(folder) if all(text in run.command for text in options.only)]
    plan = [tiny(run) for run in plan] if options.tiny else plan
    machine = Machine(device=options.device, tiny=options.tiny)
    serve_all(plan, options.output, 60 * options.minutes, machine, say)
    return 0


if __name__ == "__main__":
    sys.exit(main())
