"""`pdvsim validate --bench`: compare a benchmark of your server with its simulation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pdvsim.bench.band import spanned
from pdvsim.calibration.validate.bench import BenchedLoad, check_drafter, read_load
from pdvsim.cli.validate.options import Compared, ValidateOptions
from pdvsim.decide.error import lead_error
from pdvsim.sim.config import Arch, Experiment
from pdvsim.sim.relevance import vet
from pdvsim.sim.run import simulate
from pdvsim.view.serving import TOTALS
from pdvsim.view.style import metric_label
from pdvsim.view.table import cell, grid, percent_cell

TITLES = {metric: title.rstrip(":") for title, metric, _ in TOTALS}  # as vLLM prints them


def compare_bench(args: ValidateOptions, paths: Sequence[str], pair: str) -> Compared:
    """Benchmarks and simulations of their loads with the given draft length, or their own.

    Of one server without drafts and with them: also what drafting gains, measured and predicted.
    """
    loads = [read_load(path) for path in paths]
    lengths = [load.k if args.num_speculative_tokens is None else args.num_speculative_tokens for load in loads]
    if any(lengths):
        check_drafter(pair, args.server)
    if len(loads) == 1:
        return _compared(args, args.arch, paths[0], loads[0], pair)[0]
    if len(loads) > 2 or min(lengths) > 0 or not max(lengths):
        raise ValueError("--bench takes one result, or two of one server: without drafts and with them")
    plain, drafted = sorted(zip(loads, paths, strict=True), key=lambda case: case[0].k)
    sent = [replace(load.traffic, input_len=None, output_len=None) for load, _ in (plain, drafted)]
    if sent[0] != sent[1]:
        raise ValueError(f"--bench: {plain[1]} and {drafted[1]} differ in their load")
    without: Arch = "autoregressive" if args.arch == "colocated" else args.arch
    both = [_compared(args, arch, path, load, pair) for arch, (load, path) in ((without, plain), (args.arch, drafted))]
    gain = _gain([compared.document["metrics"] for compared, _ in both], both[1][1], sent[0].request_rate)
    verdict = "inside" if gain["inside"] else "outside"
    text = (
        f"Drafting, by {gain['metric']}: {gain['measured']:.2f} times plain decoding measured, "
        f"{gain['predicted']:.2f} predicted ({percent_cell(gain['error'], '+')}), {verdict} the error range of such "
        f"ratios, {percent_cell(gain['range'])}"
    )
    blocks = [f"{compared.document['bench']}\n{compared.text}" for compared, _ in both]
    document = {"benches": [compared.document for compared, _ in both], "speed_up": gain}
    return Compared(document, "\n\n".join([*blocks, text]))


def _gain(metrics: Sequence[Mapping[str, Any]], drafting: Experiment, request_rate: float) -> dict[str, Any]:
    """What drafting gains: tokens per second, or time per token where requests arrive at a rate."""
    metric = "mean_tpot_ms" if math.isfinite(request_rate) else "output_throughput"
    if any(metric not in rows for rows in metrics):
        raise ValueError(f"--bench: both results need {metric}")
    plain, drafted = (rows[metric] for rows in metrics)
    sign = -1 if metric == "mean_tpot_ms" else 1
    measured, predicted = ((drafted[side] / plain[side]) ** sign for side in ("measured", "predicted"))
    error, limit = predicted / measured - 1, lead_error(drafting, metric)
    inside = abs(math.log1p(error)) <= math.log1p(limit)
    return {
        "metric": metric, "measured": measured, "predicted": predicted, "error": error, "range": limit,
        "inside": inside,
    }  # fmt: skip


def _compared(
    args: ValidateOptions, arch: Arch, path: str, load: BenchedLoad, pair: str
) -> tuple[Compared, Experiment]:
    """One benchmark and the simulation of its load."""
    k = args.num_speculative_tokens
    server = replace(args.server, pair=pair, num_speculative_tokens=k or 0)
    hardware = replace(args.hardware, profile=args.profile, contention=args.contention)
    experiment = load.experiment(arch, args.acceptance, server, hardware, k)
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
    return Compared({"bench": path, "metrics": rows, "notes": facts}, _text(rows, facts)), experiment


def _text(rows: Mapping[str, Mapping[str, float]], facts: list[str]) -> str:
    cells = []
    for metric, row in rows.items():
        title = TITLES.get(metric) or metric_label(metric)
        cells.append([title, cell(row["measured"]), cell(row["predicted"]), percent_cell(row["error"], "+")])
    return "\n".join([grid(["", "measured", "predicted", "error"], cells), *facts])


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
