"""`pdvsim calibrate --from-bench`: correct the predictions for your engine by its benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

from pdvsim.bench import output
from pdvsim.calibration.fit.bench import described, fit_bench, separation
from pdvsim.calibration.validate.bench import BenchedLoad, check_drafter, read_load
from pdvsim.common.files import write_whole
from pdvsim.common.progress import Progress
from pdvsim.sim.config import Acceptance, Experiment, Hardware, Server
from pdvsim.sim.metrics.summary import summarise
from pdvsim.sim.relevance import vet
from pdvsim.sim.run import simulate
from pdvsim.view.table import grid, percent_cell

FITTED = ("output_throughput", "mean_tpot_ms")
WHEN = ("before", "after")
COMPARED = {"output_throughput": "throughput", "mean_tpot_ms": "mean TPOT", "mean_ttft_ms": "mean TTFT"}


def correction(
    paths: Sequence[str], pair: str | None, hardware: Hardware, tokens: int, quiet: bool
) -> tuple[bytes, dict[str, Any], str]:
    """Fit the results of one server: the content of the file, the document, and what the correction explains."""
    loads = [read_load(name) for name in paths]
    if any(load.k for load in loads):
        check_drafter(pair or _named(loads), Server())
    server = Server(pair or _named(loads), max_num_batched_tokens=tokens)
    asked = replace(hardware, band=False)
    cases = [(load, load.experiment("colocated", Acceptance(), server, asked, None)) for load in loads]
    hardware = cases[0][1].hardware
    vet([experiment for _, experiment in cases])
    fit = fit_bench(cases)
    about = {"pace_engine": hardware.predicted_engine, "model": server.pair, "gpu": hardware.gpu}
    document = fit.document() | about | {"fitted_to": list(paths)}
    rows: list[dict[str, Any]] = []
    with Progress(2 * len(cases), "simulations", quiet) as progress, TemporaryDirectory() as scratch:
        machine = Path(scratch) / "machine.json"
        write_whole(machine, output.dumps(document).encode())
        for at, (name, (load, experiment)) in enumerate(zip(paths, cases, strict=True)):
            before = _errors(load, experiment)
            progress.update(2 * at + 1)
            after = _errors(load, replace(experiment, hardware=replace(hardware, machine=str(machine))))
            progress.update(2 * at + 2)
            rows.append({"bench": name, "before": before, "after": after})
    without, corrected = (fmean(abs(row[when][m]) for row in rows for m in FITTED if m in row[when]) for when in WHEN)
    if corrected > without:
        raise ValueError(
            "the correction predicts throughput and TPOT of these results worse than none "
            f"({percent_cell(without)} off before, {percent_cell(corrected)} after): nothing is saved"
        )
    notes = separation(fit, len(paths))
    width = max(map(len, described(fit)))
    lines = [
        f"Correction of the profile of {hardware.predicted_engine} on {hardware.gpu}",
        *(f"{name + ':':{width + 2}}{value}" for name, value in described(fit).items()),
        *notes,
        "\nError of the simulated benchmarks, without -> with the correction",
        grid(["", *COMPARED.values()], [[Path(row["bench"]).name, *map(_change(row), COMPARED)] for row in rows]),
        "\nEvery command takes the file as --machine",
    ]
    content = (output.dumps(document) + "\n").encode()
    return content, document | {"results": rows, "notes": notes}, "\n".join(lines)


def _named(loads: Sequence[BenchedLoad]) -> str:
    """The model that all results name; a ValueError if they name none, or several."""
    names = {load.model for load in loads}
    if len(names) != 1 or None in names:
        raise ValueError("the results do not name one model: give --model, or --pair draft:target")
    return str(names.pop())


def _errors(load: BenchedLoad, experiment: Experiment) -> dict[str, float]:
    errors = load.joined(summarise(simulate(experiment, requests=load.requests(experiment.acceptance)))).errors
    return {name: errors[name] for name in COMPARED if name in errors}


def _change(row: dict[str, Any]) -> Any:
    def text(metric: str) -> str:
        both = [row[when].get(metric) for when in WHEN]
        return "" if None in both else " -> ".join(percent_cell(error, "+") for error in both)

    return text
