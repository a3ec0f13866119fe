"""A comparison over pairs and cards, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pdvsim.sim.config import Scoring
from pdvsim.sim.metrics.summary import percentile_name
from pdvsim.study.compare import COST
from pdvsim.view.table import banded, cell, fitted_table, founded, load_name, load_text, uncertainty


def comparison_text(document: Mapping[str, Any], scoring: Scoring) -> str:
    """One row per pair, card, load and architecture; then the paired differences, if there are replications."""
    entries = document["summary"]
    columns = [("out tok/s", "output_throughput"), ("mean latency ms", "mean_e2el_ms")]
    columns += [(f"{percentile_name(p).upper()} latency ms", f"{percentile_name(p)}_e2el_ms") for p in tails(scoring)]
    columns += [("accepted % of drafted", "spec_decode_acceptance_rate")]
    columns += [("of judged", "spec_decode_judged_acceptance_rate"), ("tok/round", "spec_decode_acceptance_length")]
    if COST in entries[0]:
        columns.append(("USD/M out tok", COST))
    rows = [
        {
            **_seat(entry),
            "settings": str(entry.get("settings", "")),
            **{title: banded(entry, key) for title, key in columns},
            "stability": str(entry.get("stability", "")),
        }
        for entry in entries
    ]
    notes = list(dict.fromkeys(f"{e['gpu']}, {founded(e)}" for e in entries))
    replications = max(int(entry["replications"]) for entry in entries)
    notes += uncertainty(entries)
    if COST not in entries[0]:
        notes.append("no cost: give the price of a card's hour with --gpu-hour-usd")
    tail = [title for title, _ in columns if title.startswith("P")]
    spare = ("of judged", "accepted % of drafted", "tok/round", "stability", *tail, "settings")
    blocks = ["\n".join([*fitted_table(rows, spare, _places(entries)), *notes])]
    if document["paired_differences"] and replications > 1:
        blocks.append(_paired(document["paired_differences"]))
    return "\n\n".join(blocks)


def tails(scoring: Scoring) -> tuple[float, ...]:
    """The percentiles a table shows, highest last."""
    return tuple(sorted(scoring.metric_percentiles))


def _places(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{entry['pair']} on {entry['gpu']}" for entry in entries]


def _seat(entry: Mapping[str, Any]) -> dict[str, str]:
    return {load_name(entry["load_kind"]): load_text(entry["load"]), "arch": str(entry["arch"])}


def _paired(differences: list[dict[str, Any]]) -> str:
    against = f"against {differences[0]['against']} %"
    rows = [
        {
            **_seat(d),
            "metric": d["metric"],
            against: cell(d["relative"], scale=100, sign="+"),
            "": "" if d["told_apart"] else "not told apart" if d["enough_runs"] else "too few runs to tell",
        }
        for d in differences
    ]
    errors = sorted({d["error"] for d in differences})
    limit = f"{errors[0]:.1%}" if len(errors) == 1 else f"{errors[0]:.1%} to {errors[-1]:.1%}"
    note = f"not told apart: the interval reaches into the profile's own error of {limit}"
    if not all(d["enough_runs"] for d in differences):
        note = "so few runs show no significant difference; more are needed (--num-runs)"
    return (
        f"Paired differences, same seeds, {differences[0]['confidence']:.2%} confidence each, 95% for all together\n"
        + "\n".join(fitted_table(rows, (), _places(differences)))
        + f"\n{note}"
    )
