"""`pdvsim validate --bench`: compare a benchmark of your server with its simulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pdvsim.bench.band import spanned
from pdvsim.calibration.validate.bench import BenchedLoad, read_load
from pdvsim.cli.validate.options import Compared, ValidateOptions
from pdvsim.sim.config import Experiment
from pdvsim.sim.relevance import vet
from pdvsim.sim.run import simulate
from pdvsim.view.table import cell, grid, percent_cell

TITLES = {
    "request_throughput": "Request throughput (req/s)",
    "output_throughput": "Output token throughput (tok/s)",
    "total_token_throughput": "Total token throughput (tok/s)",
}


def compare_bench(args: ValidateOptions, path: str, pair: str) -> Compared:
    """A benchmark and the simulation of its load with the given draft length, or its own."""
    k, load = args.num_speculative_tokens, read_load(path)
    server = replace(args.server, pair=pair, num_speculative_tokens=k or 0)
    hardware = replace(args.hardware, profile=args.profile, contention=args.contention)
    experiment = load.experiment(args.arch, args.acceptance, server, hardware, k)
    vet([experiment])
    result = simulate(experiment, requests=load.requests(experiment.acceptance))
    predicted = spanned(result)
    errors = load.errors(predicted)
    rows = {
        name: {"measured": load.measured[name], "predicted": predicted[name], "error": error}
        for name, error in errors.items()
    }
    facts = _facts(load, experiment, result.meta, predicted)
    if hardware.machine is None and hardware.profile is None:
        served = server.pair.rpartition(":")[2] if not load.k else server.pair
        facts.append(
            "to correct for your engine: pdvsim calibrate --from-bench "
            f"{path} {'--pair' if load.k else '--model'} {served} --gpu {hardware.gpu} -o mine.json; "
            "then add --machine mine.json to any command"
        )
    return Compared({"bench": path, "metrics": rows, "notes": facts}, _text(rows, facts))


def _text(rows: Mapping[str, Mapping[str, float]], facts: list[str]) -> str:
    cells = [
        [_title(name), cell(row["measured"]), cell(row["predicted"]), percent_cell(row["error"], "+")]
        for name, row in rows.items()
    ]
    return "\n".join([grid(["", "measured", "predicted", "error"], cells), *facts])


def _title(metric: str) -> str:
    """A metric as vLLM prints it."""
    if metric in TITLES:
        return TITLES[metric]
    which, name, _ = metric.split("_")
    return f"{which.capitalize()} {name.upper()} (ms)"


def _facts(
    load: BenchedLoad, experiment: Experiment, meta: Mapping[str, Any], predicted: Mapping[str, Any]
) -> list[str]:
    """The simulated load, server and profile, with the error range."""
    traffic, rates = load.traffic, experiment.acceptance.synthetic_acceptance_rates
    sent = [f"{traffic.request_rate:g} req/s"] if traffic.request_rate < float("inf") else []
    sent += [f"concurrency {traffic.max_concurrency}"] if traffic.max_concurrency else []
    lengths = f"on average {traffic.input_len} tokens in, {traffic.output_len} out"
    drafts = f"draft length {experiment.longest_draft}" if experiment.speculates else "no drafts"
    accepted = f", accepted {', '.join(f'{rate:.2f}' for rate in rates)}" if experiment.speculates and rates else ""
    return [
        f"{traffic.num_prompts} requests, {' and '.join(sent) or 'all sent at the start'}; {lengths}",
        f"{experiment.arch} of {experiment.server.pair}, {drafts}{accepted}",
        *load.notes,
        f"profile {meta['profile']}: {meta['foundation']}; error range: {predicted.get('error_range', 'none')}",
    ]
