"""How busy the GPU is under each architecture: `python studies/utilisation.py run` on a CUDA card, then `report`.

`run` serves every architecture at concurrency 1, 8, 32 and 64, and `baseline` with 1 to 8 workers. `report` compares
NVML's figures, those computed from the launches, and the simulator's prediction, and draws results/utilisation.png.
Both take the file of the runs, by default utilisation/runs.jsonl; a second `run` continues where the first stopped.

NVML's "SM busy" is the share of time in which any kernel ran, on however few of the SMs, and its "memory busy" that in
which memory was read or written at all. Launches count likewise, without the gaps between the kernels of one launch.
None shows how well the GPU is used; tokens per second and bytes over the bandwidth do.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdvsim.bench import output
from pdvsim.calibration.validate.launches import PARTS_FOLDER, gather, launches_of
from pdvsim.calibration.validate.runs import Workbench, serve_all
from pdvsim.calibration.validate.served import ServedRun, read_runs
from pdvsim.common.commandline import command_line
from pdvsim.common.console import say
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Experiment, Scoring, Server, Traffic
from pdvsim.sim.metrics.launches import busy_share
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.policies import ARCHS
from pdvsim.sim.relevance import applicable
from pdvsim.sim.run import simulate
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.style import arch_colour, arch_marker, arch_rank
from pdvsim.view.table import cell, rows_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PAIR = "tinyllama-1.1b:llama-2-7b"
CONCURRENCY = {1: 16, 8: 64, 32: 160, 64: 256}  # concurrency: requests, for five seconds or twenty samples of NVML
WORKERS = tuple(range(1, 9))
ONE_BY_ONE = 24  # requests of baseline, which serves at batch 1
PICTURE = Path("results/utilisation.png")
TOKENS = 128  # length of prompts and outputs

Row = Mapping[str, Any]


def planned(folder: Path) -> Iterator[ServedRun]:
    """The runs to serve: every architecture at every load, and baseline with 1 to 8 workers."""
    server = Server(PAIR, max_num_seqs=64)
    for arch in ARCHS:
        for concurrency, count in CONCURRENCY.items():
            count = min(count, ONE_BY_ONE) if arch == "baseline" else count
            yield _planned(arch, concurrency, max(count, concurrency), server, folder)
    for workers in WORKERS:
        yield _planned("baseline", workers, 3 * workers, replace(server, num_workers=workers), folder)


def _planned(arch: str, concurrency: int, count: int, server: Server, folder: Path) -> ServedRun:
    traffic = Traffic("random", num_prompts=count, input_len=TOKENS, output_len=TOKENS, max_concurrency=concurrency)
    scoring = Scoring()
    experiment = applicable(Experiment(arch, traffic, server=server, scoring=scoring))
    return ServedRun(command_line("realrun", experiment), 0, False, {}, {}, folder)


def row_of(run: ServedRun) -> Row:
    """One run according to NVML, its launches and the simulator."""
    launches, result = launches_of(run), simulate(applicable(run.experiment))
    simulated = summarise(result)
    return {
        "arch": run.experiment.arch,
        "concurrency": run.experiment.traffic.max_concurrency,
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
    """Bytes moved by all lanes as a share of the copy bandwidth; nan if that is not known."""
    return float(sum(lane.get("bandwidth_share") or math.nan for lane in metrics["lanes"].values()))


def grows(rows: Sequence[Row]) -> list[Row]:
    """Those of baseline with as many users as workers."""
    return [row for row in rows if row["workers"] is not None and row["workers"] == row["concurrency"]]


def report_text(rows: Sequence[Row]) -> str:
    """Two tables, measured and simulated side by side."""
    both = [
        row for row in rows if row["concurrency"] in CONCURRENCY and (row["workers"] is None or row["workers"] == 4)
    ]
    lines = [
        {
            "arch": row["arch"],
            "concurrency": str(row["concurrency"]),
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
            "seconds per request": cell(row["span_s"], 3),
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


@styled()
def utilisation_figure(rows: Sequence[Row], workers: Sequence[Row]) -> Figure:
    """GPU utilisation and bandwidth, measured and simulated, and a request's latency by number of workers."""
    caption = (
        "Lines: simulated. Filled: by launches. Hollow: NVML's SM busy and memory busy. "
        "Busy is any kernel, on however few SMs; bandwidth is bytes to be moved, over what a copy reaches."
    )
    figure = new_figure(15.6, 5.4, caption)
    busy, moved, spans = figure.subplots(1, 3)
    panels = ((busy, "busy", "sm_busy", "GPU busy"), (moved, "bandwidth", "memory_busy", "Memory bandwidth"))
    for axes, by_launches, by_card, title in panels:
        for arch in sorted({str(row["arch"]) for row in rows}, key=arch_rank):
            of_arch = [row for row in rows if row["arch"] == arch and row not in workers]
            of_arch.sort(key=lambda row: row["concurrency"])
            x, colour, marker = [row["concurrency"] for row in of_arch], arch_colour(arch), arch_marker(arch)
            axes.plot(x, [100 * row[f"simulated_{by_launches}"] for row in of_arch], color=colour, lw=1.5, label=arch)
            axes.plot(x, [100 * row[by_launches] for row in of_arch], marker, color=colour, label="_")
            axes.plot(x, [100 * row[by_card] for row in of_arch], marker, color=colour, mfc="white", label="_")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(0, 105)
        axes.set_xlabel("Concurrent requests")
        axes.set_title(title, fontweight="bold", loc="left")
    busy.set_ylabel("%")
    busy.legend(fontsize=8, frameon=False, ncols=2, loc="lower left")
    x, colour = [row["workers"] for row in workers], arch_colour("baseline")
    spans.plot(x, [row["simulated_span_s"] for row in workers], color=colour, label="simulated")
    spans.plot(x, [row["span_s"] for row in workers], arch_marker("baseline"), color=colour, label="measured")
    spans.set_ylim(bottom=0)
    spans.set_xticks(x)
    spans.set_xlabel("Workers of baseline, each with one request")
    spans.set_ylabel("seconds per request")
    spans.set_title("Workers on one stream", fontweight="bold", loc="left")
    spans.legend(frameon=False)
    return figure


def report(runs: Path) -> None:
    """Print both tables and draw the picture."""
    if (runs.parent / PARTS_FOLDER).exists():
        gather(runs.parent)
    rows = [row_of(run) for run in read_runs(runs)]
    print(report_text(rows))
    path = output.check_file(PICTURE)
    output.save({path: output.picture(utilisation_figure(rows, grows(rows)), path)})


def main(step: str, file: str = "utilisation/runs.jsonl") -> None:
    """`run` or `report`, and the file of the runs."""
    runs = Path(file)
    if step == "report":
        report(runs)
    else:
        folder = output.check_folder(runs.parent)
        tell = partial(say, "utilisation")
        serve_all(list(planned(folder)), runs, math.inf, Workbench(Machine(), tell), tell)


if __name__ == "__main__":
    main(*sys.argv[1:])
