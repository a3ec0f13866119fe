"""The tables of validations: errors by group, real runs, and their launches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from pdvsim.sim.trust import ANY
from pdvsim.view.table import cell, grid, missing, percent_cell

WORST_RUNS_SHOWN = 10
BAR_METRICS = ("output_throughput", "mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "mean_e2el_ms")
LEAST_SHARE = 0.0005  # least share of the time that gets its own line


def both_cell(errors: Mapping[str, float] | None) -> str:
    """Median / 95th percentile, or a dash for nothing."""
    if not errors or missing(errors["median"]):
        return "-"
    return f"{percent_cell(errors['median'])} / {percent_cell(errors['p95'])}"


Shown = Callable[[str, str, Mapping[str, Any]], str]  # the text of a group, from its kind, its name and its errors


def error_tables(document: Mapping[str, Any], columns: Sequence[tuple[str, Shown]]) -> list[str]:
    """The tables of errors of a validation: one per way to group its rows, a line per group."""
    return [
        grid(
            [kind, *(header for header, _ in columns)],
            [
                [_short(part) if kind == "metric" else part, *(show(kind, part, cells) for _, show in columns)]
                for part, cells in parts.items()
            ],
        )
        for kind, parts in document["by"].items()
    ]


def sizes_of(metric: str) -> Shown:
    """A column of the median and the 95th percentile of a metric's errors."""
    return lambda kind, part, cells: both_cell(cells[metric])


def missed(errors: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """The limits of a group's errors, and whether one is missed."""
    verdict = " missed" * any(errors[name] > limit for name, limit in limits.items())
    return " / ".join(map(percent_cell, limits.values())) + verdict


# real runs ----------------------------------------------------------------------------------------------------------


def runs_text(document: Mapping[str, Any]) -> str:
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
        errors = _errors({**document, **held, "ablations": {}, "spread": None})
        blocks += [f"Held out: nothing was tuned on these runs\n{errors}", _worst(held["runs"])]
    spread = document["spread"]
    again = f"{spread['by']['all']['all']['rows']} repeated runs" if spread else "no experiment was repeated"
    apart = f" and {len(held['runs'])} held out" if held else ""
    blocks.append(f"{len(document['runs'])} runs{apart}, {again}; profile {document['foundation']}")
    return "\n\n".join(blocks)


def _errors(document: Mapping[str, Any]) -> str:
    """Median and 95th percentile overall, by metric and by group, with targets, ablations and the spread."""
    targets, paced = document["targets"], document["paced"]

    def target(kind: str, part: str, cells: Mapping[str, Any]) -> str:
        if kind == "all":
            return missed(cells, {"median": targets["median"], "p95": targets["p95"]})
        limit = targets.get(part) if kind == "metric" else targets["group"]
        return missed(cells, {} if limit is None else {"p95": limit})

    def other(side: Mapping[str, Any]) -> Shown:
        return lambda kind, part, cells: both_cell(side["by"].get(kind, {}).get(part))

    others = {"pace known": paced["after"]} if paced else {}
    others |= document["ablations"] | ({"repeated runs": document["spread"]} if document["spread"] else {})
    columns: list[tuple[str, Shown]] = [
        ("runs", lambda kind, part, cells: str(cells["rows"])),
        ("median / 95%", lambda kind, part, cells: both_cell(cells)),
        ("target", target),
        *((title, other(side)) for title, side in others.items()),
    ]
    text = "\n\n".join(error_tables(document, columns))
    if not paced:
        return text
    raw, after = (paced[side]["by"]["all"]["all"] for side in ("raw", "after"))
    speeds = f"{both_cell(raw)} before, {both_cell(after)} after"
    return f"{text}\n{raw['rows']} runs scaled to the speed of their machine: {speeds}"


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
            parts = [covered[known] for covered in kinds.values()]
            shares = parts if group == ANY else [part["by"]["group"].get(group) for part in parts]
            held = [f"{percent_cell(share['covered'])} of {share['runs']}" if share else "-" for share in shares]
            rows.append([known, group, *(percent_cell(bar.get(metric)) for metric in BAR_METRICS), *held])
    header = ["predicted for", "90% within ±", *map(_short, BAR_METRICS), *(f"covered {name}" for name in kinds)]
    return grid(header, rows)


def _short(metric: str) -> str:
    if metric == "output_throughput":
        return "out tok/s"
    which, name, _ = metric.split("_")
    return f"{which} {name.upper()}"


def launch_tables(comparison: Mapping[str, Any]) -> Iterator[str]:
    """Contributions to the error by kind and size, largest first; then the gaps."""
    yield f"{comparison['run']}\nprofile {comparison['foundation']}"
    shown = [row for row in comparison["rows"] if abs(row["share"]) >= LEAST_SHARE]
    timed = ("measured_ms", "predicted_ms", "measured_stretch", "predicted_stretch")
    rows = []
    for row in sorted(shown, key=lambda row: -abs(row["share"])):
        counts, times = (str(row[side]) for side in ("measured", "predicted")), (cell(row[name], 3) for name in timed)
        rows.append([row["what"], row["sizes"], *counts, *times, percent_cell(row["share"], "+")])
    rows.append(["all", *[""] * 7, percent_cell(comparison["error"], "+")])
    header = ["launches", "rows or tokens", "real", "sim", "real ms", "sim ms", "real / alone", "sim / alone",
              "share of GPU time"]  # fmt: skip
    yield grid(header, rows)
    rows = []
    for lane, sides in comparison["gaps"].items():
        real, sim = (sides[side] for side in ("measured", "predicted"))
        figures = [f"{cell(real[key], 1)} / {cell(sim[key], 1)}" for key in ("median_us", "p95_us")]
        rows.append([lane, *figures, f"{percent_cell(real['share'])} / {percent_cell(sim['share'])}"])
    idle = " / ".join(percent_cell(comparison["idle"][side]) for side in ("measured", "predicted"))
    rows.append(["GPU idle", "-", "-", idle])
    yield grid(["gaps, real / sim", "median us", "95% us", "share of time"], rows)
