"""`pdvsim validate`: the errors of all real runs, as tables and a page, or stored with the profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdvsim.bench import output
from pdvsim.calibration.validate import compare
from pdvsim.cli.page import write_page
from pdvsim.cli.validate.base import Compared, RecordedRuns, both_cell, missed, shipped
from pdvsim.common.version import __version__
from pdvsim.sim.config import Hardware
from pdvsim.sim.limits import Jobs
from pdvsim.sim.trust import ANY, Errors, as_text, errors_path
from pdvsim.view.calibration_plots import validation_figure
from pdvsim.view.report.sheet import Sheet
from pdvsim.view.table import grid, percent_cell, rows_table

WORST_RUNS_SHOWN = 10
BAR_METRICS = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms")


@dataclass(frozen=True)
class ValidateRuns(RecordedRuns):
    """Compare real runs on a GPU, the default"""

    ablations: bool = True
    """Predict with one contention model, without the others for comparison."""
    write: bool = False
    """Save the errors next to the profile; all other commands take their error ranges from there."""
    html: str | None = None
    """Write tables, plot and provenance to this file, as one page."""
    jobs: Jobs | None = None
    """Concurrent simulations; default: one per core."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.write and self.contention != "fluid":
            raise ValueError("--write needs --contention fluid")

    def answer(self) -> Compared:
        """All real runs and their simulation, with the other contention models if `ablations`."""
        runs = self.served_runs()
        numbers = {run.id: number for number, run in enumerate(runs, 1)}
        runs = [run for run in runs if self.held_out or not run.held_out]
        if not runs:
            raise ValueError("all runs are held out; --held-out shows them")
        others = [each for each in compare.CONTENTIONS if each != self.contention] if self.ablations else []
        validation = compare.validate(runs, [self.contention, *others], self.profile, self.jobs, self.json)
        document = compare.document(validation, numbers)
        return Compared(document, _tables(document), validation.unfinished)

    def execute(self) -> int:
        plot, page = map(output.optional_file, (self.plot, self.html))
        comparison = self.answer()
        document, code = comparison.document, self.printed(comparison)
        if (plot or page) and document["runs"]:
            figure = validation_figure(document)
            if plot:
                output.save({plot: output.picture(figure, plot)})
            lead = f"{len(document['runs'])} real runs compared with simulations."
            paths = ", ".join(map(str, self.runs or shipped()))
            facts = {"pdvsim": __version__, "date": output.now(), "runs": paths, "profile": document["foundation"]}
            pictures = {"Predicted and measured": figure}
            write_page(page, Sheet("Simulated against real", lead, [("", [comparison.text])], pictures, facts))
        if self.write and not code:
            self._write(document)
        return code

    def _write(self, document: Mapping[str, Any]) -> None:
        """Store the errors next to the profile, for all predictions with it; without held-out runs."""
        path = errors_path(Hardware(profile=self.profile))
        if path is None:
            raise ValueError("--write needs a profile file")
        leads = {metric: lead["limit"] for metric, lead in document["leads"]["by_metric"].items()}
        errors = Errors(
            profile=document["foundation"],
            runs=len(document["runs"]),
            drafters=sorted({run.experiment.server.drafted_by for run in self.served_runs() if not run.held_out}),
            reached=document["reached"],
            bars=document["bars"],
            leads={metric: math.ceil(1e3 * size) / 1e3 for metric, size in leads.items()},
        )
        output.save({output.check_file(path): as_text(errors).encode()})


def _tables(document: Mapping[str, Any]) -> str:
    """Errors by group and metric, the worst runs, leads, error bars; then held-out runs."""
    blocks = []
    if document["runs"]:
        blocks += [_errors(document), _worst(document["runs"])]
    if (leads := document["leads"])["pairs"]:
        rows = [
            [_short(m), *map(percent_cell, (lead["median"], lead["p95"])), f"{lead['order_right']} of {lead['apart']}"]
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
            rows.append(
                {
                    "errors of": _short(name) if part == "by_metric" else name,
                    "runs": str(errors.get("runs", len(document["runs"]))),
                    "median": percent_cell(errors["median"]),
                    "95%": percent_cell(errors["p95"]),
                    "target": missed(errors, limits),
                    **{title: both_cell(_parts(model, part).get(name)) for title, model in others.items()},
                }
            )
    if not paced:
        return rows_table(rows)
    raw, after = (both_cell(_parts(paced[side], "")["all"]) for side in ("raw", "after"))
    return f"{rows_table(rows)}\n{paced['runs']} runs scaled to the speed of their machine: {raw} before, {after} after"


def _parts(model: Mapping[str, Any], part: str) -> Mapping[str, Any]:
    """The errors of a model by the names of a part; without a part, those of all metrics and runs."""
    if part or "median_abs_error" not in model:
        by_name: Mapping[str, Any] = model.get(part, {})
        return by_name
    return {"all": {"median": model["median_abs_error"], "p95": model["p95_abs_error"]}}


def _worst(runs: Sequence[Mapping[str, Any]]) -> str:
    """The runs with the largest mean absolute error."""

    def off(run: Mapping[str, Any]) -> float:
        return float(sum(map(abs, run["errors"].values())) / len(run["errors"]))

    rows = []
    for run in sorted((run for run in runs if run["errors"]), key=off, reverse=True)[:WORST_RUNS_SHOWN]:
        metric = max(run["errors"], key=lambda name: abs(run["errors"][name]))
        real, predicted = (run[side]["output_throughput"] for side in ("measured", "predicted"))
        labels = [str(run["number"] or "-"), *(run[name] for name in ("arch", "pair", "dataset", "load"))]
        largest = f"{_short(metric)} {percent_cell(run['errors'][metric], '+')}"
        rows.append([*labels, f"{real:.0f}", f"{predicted:.0f}", percent_cell(off(run)), largest])
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
            held = [f"{percent_cell(share['covered'])} of {share['runs']}" if share else "-" for share in shares]
            rows.append([known, group, *(percent_cell(bar.get(metric)) for metric in BAR_METRICS), *held])
    header = ["predicted for", "90% within ±", *map(_short, BAR_METRICS), *(f"covered {name}" for name in kinds)]
    return grid(header, rows)


def _short(metric: str) -> str:
    if metric == "output_throughput":
        return "out tok/s"
    which, name, _ = metric.split("_")
    return f"{which} {name.upper()}"
