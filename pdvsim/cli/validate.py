"""`pdvsim validate`: compare real serving runs with simulations, or serve a plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pdvsim.calibration.validate.served import SHIPPED, ServedRun, read_runs
from pdvsim.common.console import say
from pdvsim.common.options import Paths, Placed, parse, plain
from pdvsim.common.progress import Progress
from pdvsim.common.version import __version__
from pdvsim.realrun.machine import Machine
from pdvsim.sim.config import Acceptance, Arch, Contention, Experiment, Hardware, Server
from pdvsim.sim.limits import check_ranges
from pdvsim.sim.relevance import applicable
from pdvsim.sim.trust import ANY, Errors, as_text, errors_path
from pdvsim.study import output
from pdvsim.view.calibration_plots import launches_figure, validation_figure
from pdvsim.view.report.sheet import Sheet
from pdvsim.view.table import cell, grid, rows_table

if TYPE_CHECKING:
    import pandas as pd

RUNS = "runs.jsonl"
WORST_RUNS_SHOWN = 10
BENCH_ONLY = {"pair", "arch", "acceptance", "server", "hardware"}
BAR_METRICS = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms")
LEAST_SHARE = 0.0005  # least share of the time that gets its own line


@dataclass(frozen=True)
class BenchedServer(Server):
    """With --bench: the benchmarked server."""

    num_speculative_tokens: int | None = None  # type: ignore[assignment]
    """Draft length; default: that of the benchmark."""


@dataclass(frozen=True)
class ValidateCommand:
    """Compare real serving runs with simulations of the same experiments and seeds."""

    runs: Placed[Paths] = ()
    """Files of real runs, one JSON object per line; default: the H200 runs included in pdvsim."""
    run: str | None = None
    """Compare one run launch by launch: its number, or a result of realrun --save-detailed."""
    own_policies: bool = False
    """Execute the policy files that the runs name as file.py:Class. Use this only for files you trust."""
    held_out: bool = False
    """Also show the held-out runs, which are not used to develop the model."""
    profile: str | None = None
    """Profile file (JSON) instead of the built-in one of the H200."""
    write: bool = False
    """Save the errors next to the profile; all other commands take their error ranges from there."""
    contention: Contention = "fluid"
    """How streams share the simulated GPU."""
    ablations: bool = True
    """Also predict with the other contention models, for comparison. --no-ablations leaves them out."""
    plot: str | None = None
    """Plot predicted against measured metrics to this file (PNG)."""
    html: str | None = None
    """Write tables, plot and provenance to this file, as one page."""
    jobs: int | None = None
    """Concurrent simulations; default: one per core."""
    json: bool = False
    """Print one JSON document instead of the tables."""
    serve: str | None = None
    """Instead of comparing, serve the runs planned in this file on this machine's GPU and append them to --output."""
    output: str = RUNS
    """With --serve: file of real runs. Runs already in it are not served again."""
    minutes: float = math.inf
    """With --serve: start no run after this many minutes."""
    tiny: bool = False
    """With --serve: try the command with tiny models and short requests on the CPU."""
    bench: str | None = None
    """Instead of recorded runs: compare a result of `vllm bench serve` on your server with a simulation of its load."""
    silicon: Literal["all", "vllm", "sglang", "trtllm"] | None = None
    """Instead of recorded runs: compare measured servers of this engine, or of all, with simulations of their load.
    With --held-out: the rows that no constant was fitted to."""
    rows: int | None = None
    """With --silicon: predict at most so many rows, spread over all."""
    pair: str | None = None
    """With --bench: the served models, as draft:target, or the target alone (or --model)."""
    arch: Arch = "colocated"
    """With --bench: the architecture; vLLM is colocated."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    server: BenchedServer = field(default_factory=BenchedServer)
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        check_ranges(self)
        usual = {f.name: f.default_factory() if callable(f.default_factory) else f.default for f in fields(self)}
        given = {name for name, value in usual.items() if getattr(self, name) != value}
        if self.bench is None and given & BENCH_ONLY:
            raise ValueError("--pair, --arch and server options need --bench")
        if self.bench is not None and given - {"bench", "profile", "contention", "json", *BENCH_ONLY}:
            raise ValueError("--bench can be combined only with server options, --profile, --contention and --json")
        if self.bench is not None and self.pair is None:
            raise ValueError("--bench needs the served models: give --model or --pair draft:target")
        if self.silicon is not None and given - {"silicon", "held_out", "rows", "jobs", "json"}:
            raise ValueError("--silicon can be combined only with --held-out, --rows, --jobs and --json")
        if self.rows is not None and self.silicon is None:
            raise ValueError("--rows needs --silicon")
        if self.serve is None and given & {"output", "minutes", "tiny"}:
            raise ValueError("--output, --minutes and --tiny need --serve")
        if self.serve is not None and given - {"own_policies", "serve", "output", "minutes", "tiny"}:
            raise ValueError("--serve can only be combined with --output, --minutes, --tiny and --own-policies")
        if self.html and self.run is not None:
            raise ValueError("--html is a page of all runs and cannot be combined with --run")
        if self.write and (self.run is not None or self.contention != "fluid"):
            raise ValueError("--write needs all runs and --contention fluid")


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    args = parse(ValidateCommand, argv, "pdvsim validate")
    if args.serve is not None:
        return _serve(args, args.serve)
    if args.silicon is not None:
        from pdvsim.cli.validate_silicon import compare_silicon

        engine = None if args.silicon == "all" else args.silicon
        return compare_silicon(engine, args.held_out, args.rows, args.jobs, args.json)
    if args.bench is not None and args.pair is not None:
        from pdvsim.cli.validate_bench import compare_bench

        k = args.server.num_speculative_tokens
        server = plain(Server, replace(args.server, pair=args.pair, num_speculative_tokens=k or 0))
        hardware = replace(args.hardware, profile=args.profile, contention=args.contention)
        return compare_bench(args.bench, args.arch, args.acceptance, server, hardware, k, args.json)

    from pdvsim.calibration.validate import compare

    plot, page = (output.check_file(Path(name)) if name else None for name in (args.plot, args.html))
    if args.run is not None:
        return _one(args, plot)
    runs = _read(args)
    numbers = {run.id: number for number, run in enumerate(runs, 1)}
    runs = [run for run in runs if args.held_out or not run.held_out]
    if not runs:
        raise ValueError("all runs are held out; --held-out shows them")
    others = [c for c in compare.CONTENTIONS if c != args.contention] if args.ablations else []
    contentions = [args.contention, *others]
    with Progress(len(compare.commands(runs)) * len(contentions), "simulations", args.json) as progress:

        def told(done: int, total: int) -> None:
            progress.total = total
            progress.update(done)

        validation = compare.validate(runs, contentions, args.profile, args.jobs, told)
    document = compare.document(validation, numbers)
    print(output.dumps(document) if args.json else _tables(document))
    if (plot or page) and document["runs"]:
        from pdvsim.cli.page import write_page

        figure = validation_figure(document)
        if plot:
            output.save({plot: output.picture(figure, plot)})
        lead = f"{len(document['runs'])} real runs compared with simulations."
        paths = ", ".join(map(str, args.runs or _shipped()))
        facts = {"pdvsim": __version__, "date": output.now(), "runs": paths, "profile": document["foundation"]}
        pictures = {"Predicted and measured": figure}
        write_page(page, Sheet("Simulated against real", lead, [("", [_tables(document)])], pictures, facts))
    if not validation.complete:
        done = len(validation.checked[args.contention])
        say("pdvsim", f"interrupted: {done} of {len(runs)} runs compared")
        return 130
    if args.write:
        _write(args, runs, document)
    return 0


def _serve(args: ValidateCommand, plan: str) -> int:
    """Serve a plan, and collect the launches of its runs in one table."""
    from pdvsim.calibration.validate.launches import gather
    from pdvsim.calibration.validate.runs import serve_all, tiny

    runs = read_runs(plan, planned=True, own_policies=args.own_policies)
    path = output.check_file(Path(args.output))
    machine = Machine(device="cpu" if args.tiny else "cuda", tiny=args.tiny)
    try:
        serve_all(
            list(map(tiny, runs)) if args.tiny else runs, path, 60 * args.minutes, machine, partial(say, "pdvsim")
        )
    finally:
        gather(path.parent)
    return 0


def _read(args: ValidateCommand) -> list[ServedRun]:
    paths = [Path(path) for path in args.runs] or _shipped()
    return [run for path in paths for run in read_runs(path, own_policies=args.own_policies)]


def _shipped() -> list[Path]:
    folder = Path(str(files("pdvsim.calibration"))) / "data" / "h200"
    return [folder / name for name in SHIPPED]


def _write(args: ValidateCommand, runs: Sequence[ServedRun], document: Mapping[str, Any]) -> None:
    """Store the errors next to the profile, for all predictions with it; without held-out runs."""
    path = errors_path(Hardware(profile=args.profile))
    if path is None:
        raise ValueError("--write needs a profile file")
    leads = {metric: lead["limit"] for metric, lead in document["leads"]["by_metric"].items()}
    errors = Errors(
        profile=document["foundation"],
        runs=len(document["runs"]),
        drafters=sorted({run.experiment.server.drafted_by for run in runs if not run.held_out}),
        reached=document["reached"],
        bars=document["bars"],
        leads={metric: math.ceil(1e3 * size) / 1e3 for metric, size in leads.items()},
    )
    output.save({output.check_file(path): as_text(errors).encode()})


# all runs ------------------------------------------------------------------------------------------------------------


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None or math.isnan(value) else f"{cell(value, 1, 100, sign)}%"


def _both(errors: Mapping[str, float] | None) -> str:
    return f"{_percent(errors['median'])} / {_percent(errors['p95'])}" if errors else "-"


def _tables(document: Mapping[str, Any]) -> str:
    """Errors by group and metric, the worst runs, leads, error bars; then held-out runs."""
    blocks = []
    if document["runs"]:
        blocks += [_errors(document), _worst(document["runs"])]
    if (leads := document["leads"])["pairs"]:
        rows = [
            [_short(m), _percent(lead["median"]), _percent(lead["p95"]), f"{lead['order_right']} of {lead['apart']}"]
            for m, lead in leads["by_metric"].items()
        ]
        header = ["error of a predicted lead", "median", "95%", "order right, leads over 3%"]
        pairs = f"{leads['pairs']} pair{'s' if leads['pairs'] > 1 else ''} of servers"
        blocks.append(f"{grid(header, rows)}\n{pairs}, each on the same requests in a closed loop (without baseline)")
    blocks += [_bars(document)] if document["bars"] else []
    if held := document["held_out"]:
        blocks.append(
            "Held out: nothing was tuned on these runs\n"
            + _errors({**document, **held, "ablations": {}, "spread": None})
        )
        blocks.append(_worst(held["runs"]))
    spread = document["spread"]
    again = f"{spread['runs']} repeated runs" if spread else "no experiment was repeated"
    apart = f" and {len(held['runs'])} held out" if held else ""
    blocks.append(f"{len(document['runs'])} runs{apart}, {again}; profile {document['foundation']}")
    return "\n\n".join(blocks)


def _errors(document: Mapping[str, Any]) -> str:
    """Median and 95th percentile overall, by metric and by group, with targets, ablations and the spread."""
    targets, paced = document["targets"], document["paced"]
    others = {"pace known": paced["after"]} if paced else {}
    others |= {**document["ablations"], "repeated runs": document["spread"] or {}}
    rows = []
    for part in ("", "by_metric", "by_arch", "by_pair", "by_dataset", "by_load"):
        for name, errors in _parts(document, part).items():
            limits = {"median": targets["median"], "p95": targets["p95"]}
            if part:
                limit = targets.get(name) if part == "by_metric" else targets["group"]
                limits = {} if limit is None else {"p95": limit}
            missed = " missed" * any(errors[key] > limit for key, limit in limits.items())
            rows.append(
                {
                    "errors of": _short(name) if part == "by_metric" else name,
                    "runs": str(errors.get("runs", len(document["runs"]))),
                    "median": _percent(errors["median"]),
                    "95%": _percent(errors["p95"]),
                    "target": " / ".join(map(_percent, limits.values())) + missed,
                    **{title: _both(_parts(model, part).get(name)) for title, model in others.items()},
                }
            )
    if not paced:
        return rows_table(rows)
    raw, after = (_both(_parts(paced[side], "")["all"]) for side in ("raw", "after"))
    return f"{rows_table(rows)}\n{paced['runs']} runs scaled to the speed of their machine: {raw} before, {after} after"


def _parts(model: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """The errors of a model by the names of a part; without a part, those of all metrics and runs."""
    if part or "median_abs_error" not in model:
        return model.get(part, {})  # type: ignore[no-any-return]
    return {"all": {"median": model["median_abs_error"], "p95": model["p95_abs_error"]}}


def _worst(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs with the largest mean absolute error."""

    def off(run: Mapping[str, Any]) -> float:
        return float(sum(map(abs, run["errors"].values())) / len(run["errors"]))

    rows = []
    for run in sorted((run for run in runs if run["errors"]), key=off, reverse=True)[:WORST_RUNS_SHOWN]:
        metric = max(run["errors"], key=lambda name: abs(run["errors"][name]))
        real, predicted = (run[side]["output_throughput"] for side in ("measured", "predicted"))
        rows.append(
            [
                str(run["number"] or "-"),
                run["arch"],
                run["pair"],
                run["dataset"],
                run["load"],
                f"{real:.0f}",
                f"{predicted:.0f}",
                _percent(off(run)),
                f"{_short(metric)} {_percent(run['errors'][metric], '+')}",
            ]
        )
    header = ["worst runs", "arch", "pair", "data set", "load", "real tok/s", "sim tok/s", "mean error", "largest"]
    return grid(header, rows)


def _bars(document: Mapping[str, Any]) -> str:
    """Error ranges that `run` prints, by group, and the share of runs within them."""
    kinds = {"of other runs": document["coverage"]}
    kinds |= {"of held-out runs": document["held_out"]["coverage"]} if document["held_out"] else {}
    rows = []
    for known, bars in document["bars"].items():
        for group, bar in bars.items():
            shares = [covered[known]["by_group"].get(group) for covered in kinds.values()]
            if group == ANY:
                shares = [covered[known] for covered in kinds.values()]
            held = [f"{_percent(share['covered'])} of {share['runs']}" if share else "-" for share in shares]
            rows.append([known, group, *(_percent(bar.get(metric)) for metric in BAR_METRICS), *held])
    header = ["predicted for", "90% within ±", *map(_short, BAR_METRICS), *(f"covered {name}" for name in kinds)]
    return grid(header, rows)


def _short(metric: str) -> str:
    if metric == "output_throughput":
        return "out tok/s"
    which, name, _ = metric.split("_")
    return f"{which} {name.upper()}"


# one run -------------------------------------------------------------------------------------------------------------


def _one(args: ValidateCommand, plot: Path | None) -> int:
    """One run, launch by launch."""
    from pdvsim.calibration.validate import compare
    from pdvsim.calibration.validate.launches import compared, priced, simulated
    from pdvsim.sim.assembly import covering_profile

    experiment, measured, metrics, name = _chosen(args)
    hardware = replace(experiment.hardware, contention=args.contention, profile=args.profile, band=False)
    experiment = applicable(replace(experiment, hardware=hardware))
    profile = covering_profile(experiment)
    measured, predicted = priced(measured, experiment, profile), simulated(experiment, profile)
    comparison = compared(measured, predicted) | {"run": name, "foundation": profile.foundation}
    comparison["dataset"], comparison["arch"], comparison["pair"] = (
        compare.dataset(experiment),
        experiment.arch,
        experiment.server.pair,
    )
    comparison["output_throughput"] = metrics.get("output_throughput")
    print(output.dumps(comparison) if args.json else "\n\n".join(_launch_tables(comparison)))
    if plot:
        output.save({plot: output.picture(launches_figure(measured, predicted, comparison), plot)})
    return 0


def _chosen(args: ValidateCommand) -> tuple[Experiment, pd.DataFrame, Mapping[str, Any], str]:
    """The experiment, launches, metrics and name of the requested run."""
    from pdvsim.calibration.validate.launches import launches_of, saved_run

    assert args.run is not None
    if not args.run.isdecimal():
        return *saved_run(Path(args.run), args.own_policies), args.run
    runs = _read(args)
    if not 1 <= int(args.run) <= len(runs):
        raise ValueError(f"--run: there are runs 1 to {len(runs)}, got {args.run}")
    run = runs[int(args.run) - 1]
    if run.held_out and not args.held_out:
        raise ValueError(f"run {args.run} is held out; --held-out shows it")
    return run.experiment, launches_of(run), run.metrics, f"run {args.run}: {run.command}"


def _launch_tables(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Contributions to the error by kind and size, largest first; then the gaps."""
    yield f"{comparison['run']}\nprofile {comparison['foundation']}"
    shown = [row for row in comparison["rows"] if abs(row["share"]) >= LEAST_SHARE]
    rows = [
        [
            row["what"],
            row["sizes"],
            str(row["measured"]),
            str(row["predicted"]),
            cell(row["measured_ms"], 3),
            cell(row["predicted_ms"], 3),
            cell(row["measured_stretch"], 3),
            cell(row["predicted_stretch"], 3),
            _percent(row["share"], "+"),
        ]
        for row in sorted(shown, key=lambda row: -abs(row["share"]))
    ]
    rows.append(["all", *[""] * 7, _percent(comparison["error"], "+")])
    header = ["launches", "rows or tokens", "real", "sim", "real ms", "sim ms", "real / alone", "sim / alone",
              "share of GPU time"]  # fmt: skip
    yield grid(header, rows)
    rows = []
    for lane, sides in comparison["gaps"].items():
        real, sim = (sides[side] for side in ("measured", "predicted"))
        figures = [f"{cell(real[key], 1)} / {cell(sim[key], 1)}" for key in ("median_us", "p95_us")]
        rows.append([lane, *figures, f"{_percent(real['share'])} / {_percent(sim['share'])}"])
    idle = " / ".join(_percent(comparison["idle"][side]) for side in ("measured", "predicted"))
    rows.append(["GPU idle", "-", "-", idle])
    yield grid(["gaps, real / sim", "median us", "95% us", "share of time"], rows)
