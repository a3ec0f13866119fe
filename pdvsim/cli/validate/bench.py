"""Benchmarks of your server: compared with simulations (`validate --bench`) and with each other (`compare`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pdvsim.bench.band import spanned
from pdvsim.bench.join import Joined
from pdvsim.calibration.validate.bench import BenchedLoad, check_drafter, intervals, read_load
from pdvsim.cli.validate.base import Compared, ValidationCommand
from pdvsim.decide.error import lead_error
from pdvsim.sim.config import Acceptance, Arch, Experiment, Hardware, Server
from pdvsim.sim.limits import DraftLength, Paths, Placed, Redefined
from pdvsim.sim.relevance import vet
from pdvsim.sim.run import simulate
from pdvsim.view.style import metric_label
from pdvsim.view.table import cell, grid, percent_cell

UNKNOWN = "unknown"


@dataclass(frozen=True)
class BenchedServer(ValidationCommand):
    """A server of your own that was benchmarked"""

    pair: str | None = None
    """The models of the benchmarked server, as draft:target, or the target alone (or --model)."""
    arch: Arch = "colocated"
    """Architecture of the benchmarked server; vLLM is colocated."""
    num_speculative_tokens: Redefined[DraftLength | None] = None
    """Draft length of the benchmarked server; default: that of the result."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: Server = field(default_factory=Server)
    hardware: Hardware = field(default_factory=Hardware)


@dataclass(frozen=True)
class ValidateBench(BenchedServer):
    """Compare a benchmark of your own server (--bench)"""

    key = "bench"

    bench: Paths = ()
    """Instead of recorded runs: compare a result of `vllm bench serve` on your server with a simulation of its load.
    Two results are also compared with each other, as by `pdvsim compare`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.pair is None:
            raise ValueError("--bench needs the served models: give --model or --pair draft:target")

    def answer(self) -> Compared:
        return compare_benches(self.bench, self)


@dataclass(frozen=True)
class CompareCommand(BenchedServer):
    """Compare two results of `vllm bench serve` of the same load, and with --pair or --model also their simulations."""

    results: Placed[Paths] = field(kw_only=True)
    """Two results: the second is compared with the first. One without drafts is the first."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.results) != 2:
            raise ValueError(f"compare takes two results of `vllm bench serve`, got {len(self.results)}")
        simulated = self.arch, self.num_speculative_tokens, self.acceptance, self.server, self.hardware
        if self.pair is None and BenchedServer(None, *simulated) != BenchedServer():
            raise ValueError("to simulate these results, name their models: give --model or --pair draft:target")

    def answer(self) -> Compared:
        return compare_benches(self.results, self)


def compare_benches(paths: Sequence[str], server: BenchedServer) -> Compared:
    """One result with its simulation; or two results of one load, with their simulations if the server is named."""
    loads = [read_load(path) for path in paths]
    if server.pair is not None:
        lengths = [load.k if server.num_speculative_tokens is None else server.num_speculative_tokens for load in loads]
        if any(lengths):
            check_drafter(server.pair, server.server)
    if len(loads) == 1:
        document, text, _ = _predicted(server, server.arch, paths[0], loads[0])
        return Compared(document, text)
    if len(loads) != 2:
        raise ValueError(f"two results of one load can be compared, not {len(loads)}")
    cases = list(zip(paths, loads, strict=True))
    if loads[1].k == 0 < loads[0].k:
        cases.reverse()  # without drafts first
    (_, first), (_, second) = cases
    sent = [replace(load.traffic, input_len=None, output_len=None) for load in (first, second)]
    if sent[0] != sent[1]:
        raise ValueError(f"{' and '.join(path for path, _ in cases)} differ in their load: bench both alike")
    document, blocks = _changes(cases), list[str]()
    if server.pair is not None:
        blocks = _both_predicted(server, cases, document)
    return Compared(document, "\n\n".join([*blocks, _change_table(document, cases)]))


def _changes(cases: Sequence[tuple[str, BenchedLoad]]) -> dict[str, Any]:
    """Metrics of the second result over the first's, less one, with their intervals."""
    (_, first), (_, second) = cases
    known = intervals(first, second)
    changes = {
        name: {
            "first": first.measured[name], "second": second.measured[name], "change": change,
            "interval": known.get(name),
        }
        for name, change in Joined(first, first.measured, second.measured).errors.items()
    }  # fmt: skip
    return {"results": [path for path, _ in cases], "draft_lengths": [load.k for _, load in cases], "changes": changes}


def _both_predicted(
    server: BenchedServer, cases: Sequence[tuple[str, BenchedLoad]], document: dict[str, Any]
) -> list[str]:
    """Simulate both loads, and add predicted changes and the speed-up to the document; returns the blocks of text."""
    plain: Arch = "autoregressive" if server.arch == "colocated" else server.arch
    drafting = cases[0][1].k == 0 < cases[1][1].k
    archs = (plain if drafting else server.arch), server.arch
    found = [_predicted(server, arch, path, load) for arch, (path, load) in zip(archs, cases, strict=True)]
    both = [one["metrics"] for one, _, _ in found]
    for name, row in document["changes"].items():
        if all(name in metrics for metrics in both):
            row["predicted_change"] = both[1][name]["predicted"] / both[0][name]["predicted"] - 1
    timed = math.isfinite(cases[0][1].traffic.request_rate) and "mean_tpot_ms" in document["changes"]
    metric, sign = ("mean_tpot_ms", -1) if timed else ("output_throughput", 1)
    row = document["changes"][metric]
    measured, predicted = ((1 + row[change]) ** sign for change in ("change", "predicted_change"))
    error, limit = predicted / measured - 1, lead_error(found[1][2], metric)
    inside = abs(math.log1p(error)) <= math.log1p(limit)
    document["benches"] = [one for one, _, _ in found]
    document["speed_up"] = {
        "metric": metric, "measured": measured, "predicted": predicted, "error": error, "range": limit,
        "inside": inside,
    }  # fmt: skip
    what, over = ("Drafting", "plain decoding") if drafting else ("The second", "the first")
    return [
        *(f"{path}\n{text}" for (path, _), (_, text, _) in zip(cases, found, strict=True)),
        f"{what}, by {metric}: {measured:.2f} times {over} measured, {predicted:.2f} predicted "
        f"({percent_cell(error, '+')}), {'inside' if inside else 'outside'} the error range of such ratios, "
        f"{percent_cell(limit)}",
    ]


def _predicted(
    options: BenchedServer, arch: Arch, path: str, load: BenchedLoad
) -> tuple[dict[str, Any], str, Experiment]:
    """One benchmark and the simulation of its load."""
    k = options.num_speculative_tokens
    server = replace(options.server, pair=str(options.pair), num_speculative_tokens=k or 0)
    experiment = load.experiment(arch, options.acceptance, server, options.hardware, k)
    vet([experiment])
    result = simulate(experiment, requests=load.requests(experiment.acceptance))
    predicted = spanned(result)
    joined = load.joined(predicted)
    rows = {
        name: {"measured": load.measured[name], "predicted": predicted[name], "error": error}
        for name, error in joined.errors.items()
        if load.times is not None or name[0] != "p"  # percentiles of lengths that are means say nothing
    }
    facts = _facts(load, experiment, result.meta, predicted)
    bar, off = result.meta.get("forward_error_bar"), rows.get("mean_tpot_ms", {}).get("error")
    if bar and off is not None:
        inside = "inside" if abs(off) <= bar else "outside"
        facts.insert(0, f"mean TPOT is predicted {off:+.1%}: {inside} the error range of this profile, {bar:.0%}")
    if options.hardware.machine is None and options.hardware.profile is None:
        served = server.pair.rpartition(":")[2] if not load.k else server.pair
        facts.append(
            "to correct for your engine: pdvsim calibrate --from-bench "
            f"{path} {'--pair' if load.k else '--model'} {served} --gpu {options.hardware.gpu} -o mine.json; "
            "then add --machine mine.json to any command"
        )
    cells = [
        [metric_label(name), cell(row["measured"]), cell(row["predicted"]), percent_cell(row["error"], "+")]
        for name, row in rows.items()
    ]
    text = "\n".join([grid(["", "measured", "predicted", "error"], cells), *facts])
    return {"bench": path, "metrics": rows, "notes": facts}, text, experiment


def _change_table(document: Mapping[str, Any], cases: Sequence[tuple[str, BenchedLoad]]) -> str:
    """Both results by metric, with the difference."""
    foreseen = any("predicted_change" in row for row in document["changes"].values())
    rows = []
    for name, row in document["changes"].items():
        ends = row["interval"]
        interval = UNKNOWN if ends is None else " to ".join(percent_cell(end, "+") for end in ends)
        predicted = [percent_cell(row.get("predicted_change"), "+")] if foreseen else []
        figures = cell(row["first"]), cell(row["second"]), percent_cell(row["change"], "+")
        rows.append([metric_label(name), *figures, interval, *predicted])
    header = ["", "first", "second", "difference", "95% interval", *(["predicted"] if foreseen else [])]
    drafts = [f"draft length {load.k}" if load.k else "no drafts" for _, load in cases]
    names = [f"{which}: {path}, {of}" for which, (path, _), of in zip(("first", "second"), cases, drafts, strict=True)]
    note = (
        "Intervals are from resampled requests of these two runs; how a server varies between runs is not in them. "
        "Unknown: one figure of a whole run, a percentile of few requests, or a result without --save-detailed"
    )
    return "\n".join([*names, grid(header, rows), note])


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
