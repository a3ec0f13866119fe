"""`pdvsim validate`: real serving runs against the same runs simulated."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import tyro

from pdvsim.calibration.validate import runs
from pdvsim.cli.args import parse
from pdvsim.common.console import say
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.common.version import __version__
from pdvsim.sim.config import Arch, Contention
from pdvsim.sim.limits import Range, check_ranges
from pdvsim.view.report.sheet import Sheet

SHOWN = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms",
         "p99_itl_ms", "mean_e2el_ms", "p99_e2el_ms")  # fmt: skip
RUN_ONLY = ("pairs", "archs", "repeats", "budget_s", "tiny")


@dataclass(frozen=True)
class ValidateCommand:
    """Compare real serving runs with the same experiments simulated, seed by seed."""

    runs: tyro.conf.Positional[str | None] = None
    """File of real runs, one JSON object a line; default: the H200's that come with pdvsim."""
    run: bool = False
    """First run the experiments on this machine's GPU, into the file of runs; those in it already are kept."""
    pairs: tuple[str, ...] = ()
    """With --run: pairs draft:target; default: tinyllama-1.1b:llama-2-7b."""
    archs: tuple[Arch, ...] = ()
    """With --run: architectures; default: all."""
    repeats: int = 1
    """With --run: runs of each experiment."""
    budget_s: float = math.inf
    """With --run: start no run after so many seconds."""
    tiny: bool = False
    """With --run: tiny models on the CPU, to try the command. Their errors mean nothing."""
    profile: str | None = None
    """A profile file (JSON) instead of the built-in one of the H200."""
    contention: Contention = "fluid"
    """How streams share the simulated GPU."""
    ablations: bool = True
    """Also predict with the other contention models, to show what the measured one is worth."""
    plot: str | None = None
    """Write predicted against measured to this file (PNG)."""
    html: str | None = None
    """Write the tables, the picture and where they come from to this file, as one page."""
    jobs: Annotated[int | None, tyro.conf.arg(help="Runs simulated side by side; default: one per core.")] = None
    json: bool = False
    """Print one JSON document instead of the tables."""

    def __post_init__(self) -> None:
        check_ranges(self, budget_s=Range(1, 30 * 86400, or_inf=True))
        if self.run and self.runs is None:
            raise ValueError("--run needs the file to write the runs to: pdvsim validate RUNS.jsonl --run")
        if not self.run:
            for name in RUN_ONLY:
                if getattr(self, name) != getattr(type(self), name):
                    raise ValueError(f"--{name.replace('_', '-')} goes with --run")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(ValidateCommand, argv, "pdvsim validate")

    from pdvsim.calibration.validate import compare as validate
    from pdvsim.study import output

    path = Path(args.runs) if args.runs else _shipped()
    plot, page = (output.check_file(Path(name)) if name else None for name in (args.plot, args.html))
    if args.run:
        _serve(args, output.check_file(path))
    lines = validate.read(path)
    others = [c for c in validate.CONTENTIONS if c != args.contention] if args.ablations else []
    contentions = [args.contention, *others]
    with Progress(len(validate.experiments(lines)) * len(contentions), "simulations", args.json) as progress:
        found = validate.validate(
            lines, contentions, args.profile, args.jobs, lambda done, total: progress.update(done)
        )
    document = validate.document(found, lines)
    print(output.dumps(document) if args.json else _tables(document))
    if (plot or page) and document["runs"]:
        from pdvsim.view.calibration_plots import validation_figure

        figure = validation_figure(document)
        if plot:
            write_whole(plot, output.picture(figure, plot))
            say("pdvsim", f"saved {plot}")
        if page:
            lead = f"{len(document['runs'])} real runs against the same runs simulated."
            facts = {"pdvsim": __version__, "date": output.now(), "runs": str(path), "profile": document["foundation"]}
            sheet = Sheet("Simulated against real", lead, _tables(document), {"Predicted and measured": figure}, facts)
            write_whole(page, sheet.html().encode())
            say("pdvsim", f"saved {page}")
    if not found.complete:
        say("pdvsim", f"interrupted: {len(document['runs'])} of {len(lines)} runs compared")
    return 0 if found.complete else 130


def _shipped() -> Path:
    return Path(str(files("pdvsim.calibration"))) / "data" / "h200" / "runs.jsonl"


def _serve(args: ValidateCommand, path: Path) -> None:
    """Run the experiments on this machine, in this process."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise ValueError(f"--run needs {error.name}: pip install 'pdvsim[gpu]'") from None
    if not args.tiny and not torch.cuda.is_available():
        raise ValueError("--run needs a CUDA device, and this machine has none; --tiny tries the command on the CPU")
    argv = ["-o", str(path), "--repeats", str(args.repeats), "--budget-s", str(args.budget_s)]
    argv += ["--pairs", ",".join(args.pairs)] if args.pairs else []
    argv += ["--archs", ",".join(args.archs)] if args.archs else []
    with contextlib.redirect_stdout(sys.stderr):  # its lines are progress; the table is ours
        code = runs.main([*argv, *(["--tiny"] if args.tiny else [])])
    if code:
        raise ValueError("the runs ended early; see above")


def _tables(document: Mapping[str, Any]) -> str:
    """Every run; the errors by architecture and by metric beside the ablations and the spread of repeats; of leads."""
    from pdvsim.view.table import cell, grid

    def percent(value: float | None, sign: str = "") -> str:
        return "-" if value is None or math.isnan(value) else f"{cell(value, 1, 100, sign)}%"

    def both(errors: Mapping[str, float] | None) -> str:
        return f"{percent(errors['median'])} / {percent(errors['p95'])}" if errors else "-"

    header = ["pair", "arch", "load", "real tok/s", "sim tok/s", *(_short(metric) for metric in SHOWN)]
    rows = []
    for run in document["runs"]:
        load = run["load"]
        at = f"C={load['concurrency']}" if load["concurrency"] else f"{load['request_rate']:g} req/s"
        real, predicted = (run[side]["output_throughput"] for side in ("measured", "predicted"))
        errors = [percent(run["errors"].get(metric), "+") for metric in SHOWN]
        again = f" #{load['repeat']}" if load["repeat"] else ""
        rows.append([load["pair"], load["arch"], at + again, f"{real:.0f}", f"{predicted:.0f}", *errors])
    blocks = ["Error of the prediction, run by run\n" + grid(header, rows)]

    ablations, spread = document["ablations"], document["spread"]
    header = ["median / p95 of errors", document["contention"], *ablations, "spread of repeated runs"]
    models = [document, *ablations.values()]
    rows = []
    for part in ("by_arch", "by_metric"):
        for name in document[part]:
            repeated = spread["by_metric"].get(name) if spread and part == "by_metric" else None
            label = name if part == "by_arch" else _short(name)
            rows.append([label, *(both(model[part].get(name)) for model in models), both(repeated)])
    whole = [
        {"median": m["median_abs_error"], "p95": m["p95_abs_error"]} for m in (*models, *([spread] if spread else []))
    ]
    rows.append(["all", *(both(errors) for errors in whole), *([] if spread else ["-"])])
    blocks.append(grid(header, rows))
    if (found := document["leads"])["pairs"]:
        rows = [
            [_short(m), percent(lead["median"]), percent(lead["p95"]), f"{lead['order_right']} of {lead['apart']}"]
            for m, lead in found["by_metric"].items()
            if m in SHOWN
        ]
        header = ["a predicted lead is off by", "median", "95%", "order right, where over 3% apart"]
        pairs = f"{found['pairs']} pair{'s' if found['pairs'] > 1 else ''} of architectures"
        blocks.append(f"{grid(header, rows)}\n{pairs}, each in the same closed loop (without baseline)")
    again = f"{spread['runs']} repeated runs" if spread else "no experiment was repeated"
    blocks.append(f"{len(document['runs'])} runs, {again}; profile {document['foundation']}")
    return "\n\n".join(blocks)


def _short(metric: str) -> str:
    if metric == "output_throughput":
        return "out tok/s"
    which, name, _ = metric.split("_")
    return f"{which} {name.upper()}"
