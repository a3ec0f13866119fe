"""Many runs as one table, one row each, with notes on their foundation, error ranges and replications.

Values are flat, as in a sweep's rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pdvsim.sim.metrics.summary import percentile_name
from pdvsim.sim.prices.reach import NOTABLE_SHARE, SIZES
from pdvsim.view.style import number_text
from pdvsim.view.table import (
    BRACKETS,
    DETAIL,
    TextTable,
    banded,
    cell,
    load_name,
    load_text,
    mean_of,
    missing,
)

LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
UNJUDGED = ("closed loop", "burst")  # stability of loads without a rate to keep up with
DRAINING = 0.8  # mean share of a closed loop's concurrency below which a note is printed
BANDED = ("output_throughput", "mean_tpot_ms")  # columns that show their error range


def comparison_table(
    entries: Sequence[Mapping[str, Any]],
    percentiles: Iterable[float] = (99.0,),
    varied: Sequence[str] = (),
    differences: Sequence[Mapping[str, Any]] = (),
) -> TextTable:
    """One row per load, varied value and architecture: throughput, latencies, acceptance, stability.

    `differences` of one metric from the first architecture, if any, are a column too.
    """
    tail = max(percentiles, default=None)
    marks = {"mean": "mean"} | ({} if tail is None else {percentile_name(tail).upper(): percentile_name(tail)})
    columns: list[tuple[str, str]] = [("req/s", "request_throughput"), ("out tok/s", "output_throughput")]
    if any(not missing(entry.get("request_goodput")) for entry in entries):
        columns.append(("goodput", "request_goodput"))
    for name in ("ttft", "tpot"):
        columns += [(f"{word} {LATENCIES[name][0]} ms", f"{mark}_{name}_ms") for word, mark in marks.items()]
    columns.append(("tok/round", "spec_decode_acceptance_length"))
    if any(not missing(entry.get("prefix_cache_hit_rate")) for entry in entries):
        columns.append(("hit %", "prefix_cache_hit_rate"))
    leads = {_row_key(d, varied): cell(d["relative"], scale=100, sign="+") for d in differences}
    latency = bool(leads) and differences[0]["metric"].endswith("_ms")
    rows = []
    for entry in entries:
        row = {load_name(entry["load_kind"]): load_text(entry["load"])}
        row |= {name: _text(entry[name]) for name in varied} | {"arch": str(entry["arch"])}
        for title, key in columns:
            row[title] = banded(entry, key) if key in BANDED else cell(entry.get(key))
            if key == "request_goodput":
                row["in time %"] = cell(100 * mean_of(entry[key], 0.0) / mean_of(entry["request_throughput"], 1.0))
            if leads and key == "output_throughput":
                row["E2EL %" if latency else "gain %"] = leads.get(_row_key(entry, varied), "")
        rows.append(row | {"stability": stability_text(entry)})
    means = [title for title, _ in reversed(columns) if title.startswith("mean")]
    unjudged = all(row["stability"] in UNJUDGED for row in rows)
    spare = ("req/s", "goodput", *(["stability"] if unjudged else []), *means, DETAIL, "tok/round")
    notes = [*dict.fromkeys(map(founded, entries)), *uncertainty(entries)]
    if leads:
        first = differences[0]["against"]
        what = f"gain: in out tok/s over {first}"
        if latency:
            what = f"E2EL: mean end-to-end latency against {first}, lower is better (arrivals set the throughput)"
        notes.append(f"{what}, paired by seed; compare this, not two ± ranges")
    return TextTable(rows, spare, notes)


def _row_key(entry: Mapping[str, Any], varied: Sequence[str]) -> tuple[str, ...]:
    return load_text(entry["load"]), *(_text(entry[name]) for name in varied), str(entry["arch"])


def uncertainty(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes on brackets and ± of entries, or their absence; loops that drain; values outside the measured range."""
    notes = [*most_outside(entries), *(note for note in [_draining(entries)] if note)]
    notes += _ranges(entries)
    replications = max(int(entry.get("replications", 1)) for entry in entries)
    if replications > 1:
        return [*notes, interval_note(replications)]
    return [*notes, "one replication: no interval, no significance; --num-runs 5 gives intervals"]


def interval_note(replications: int) -> str:
    """What ± is."""
    return f"±: 95% confidence over {replications} replications"


def _ranges(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Explanation of the error ranges of entries, by architecture or load if they differ."""
    texts = [text if isinstance(text := entry.get("error_range"), str) else "" for entry in entries]
    places = [(str(entry["arch"]), f"{load_name(entry['load_kind'])} {load_text(entry['load'])}") for entry in entries]
    archs, loads = ([place[at] for place in places] for at in (0, 1))
    names = next(
        (names for names in (archs, loads) if len(set(zip(names, texts, strict=True))) == len(set(names))),
        [f"{arch} at {load}" for arch, load in places],
    )
    notes = []
    for text in dict.fromkeys(filter(None, texts)):
        those = dict.fromkeys(name for name, other in zip(names, texts, strict=True) if other == text)
        of = f" of {', '.join(those)}" if len(set(texts)) > 1 else ""
        notes.append(f"{BRACKETS}{of}: {text}")
    return notes


def _draining(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """A note on closed loops with long start and end phases, whose throughput is not that of the load."""
    worst, note = DRAINING, None
    for entry in entries:
        rate, e2el_ms = (entry.get(key) for key in ("request_throughput", "mean_e2el_ms"))
        if entry["load_kind"] != "concurrency" or missing(rate) or missing(e2el_ms):
            continue
        there = mean_of(rate) * mean_of(e2el_ms) / 1e3
        if there < worst * entry["load"]:  # Little's law
            worst = there / entry["load"]
            note = f"concurrency {load_text(entry['load'])}: {there:.0f} on average, as the loop fills and drains"
    return note and f"{note}; raise --num-prompts"


def outside(values: Mapping[str, Any]) -> str | None:
    """Share of a run's GPU time outside the measured range, in which dimension and how far; None below 1%."""
    share = mean_of(values.get("outside_measured_share"))
    if not share > NOTABLE_SHARE:
        return None
    parts = []
    for prefix, where in (("", ""), ("together_", "co-running: ")):
        sizes = {n: mean_of(values.get(f"outside_measured_{prefix}{n}")) for n in SIZES}
        far = {name: most for name, most in sizes.items() if not math.isnan(most)}
        if "prompt_tokens" in far:
            far.pop("tokens", None)  # included in prompt tokens
        limits = {name: mean_of(values[f"outside_measured_{prefix}{name}_limit"]) for name in far}
        texts = [f"{SIZES[name]} up to {most:,.0f} ({limits[name]:,.0f})" for name, most in far.items()]
        parts += [where + ", ".join(texts).replace("(", "(measured to ", 1)] if texts else []
    return f"{share:.0%} of GPU time: {'; '.join(parts)}"


def most_outside(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The same for the entry furthest outside, as a note; none if all are inside or the range is unknown."""
    worst = max(entries, key=lambda entry: mean_of(entry.get("outside_measured_share"), 0.0))
    text = outside(worst)
    return [f"{worst['arch']}, outside the measured range: {text}"] if text else []


def paired_table(differences: Sequence[Mapping[str, Any]], varied: Sequence[str]) -> TextTable:
    """Relative gain of each architecture over the first, paired by seed."""
    rows = [
        {"metric": d["metric"], load_name(d["load_kind"]): load_text(d["load"])}
        | {name: _text(d[name]) for name in varied}
        | {"arch": d["arch"], f"against {d['against']}": f"{cell(d['relative'], scale=100, sign='+')} %"}
        | {"": d.get("unsure", "")}
        for d in differences
    ]
    each = f", {differences[0]['confidence']:.2%} each" if "confidence" in differences[0] else ""
    return TextTable(rows, notes=[f"paired differences, same seeds, 95% confidence over replications{each}"])


def profiles_table(document: Mapping[str, Any]) -> str:
    """GPUs, profiles and models, as three blocks; the sources of GPUs are in the document only."""
    blocks = []
    for name, rows in document.items():
        shown = [{key.replace("_", " "): _text(row[key]) for key in row if key != "source"} for row in rows]
        blocks.append(f"{name.capitalize()}\n{TextTable(shown, ('profile',))}")
    return "\n\n".join(blocks)


def points_table(rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """The points of a sweep, one row each."""
    shown = [
        {load_name(row["load_kind"]) if name == "load" else name: load_text(value) if name == "load" else _text(value)
         for name, value in row.items() if name not in ("load_kind", "run")} for row in rows
    ]  # fmt: skip
    return TextTable(shown)


def stability_text(entry: Mapping[str, Any]) -> str:
    """The labels of an entry's replications, from stable to inconclusive."""
    return ", ".join(sorted(str(entry.get("stability", "")).split("/"), reverse=True))


def founded(entry: Mapping[str, Any]) -> str:
    """Foundation of a row or an entry, with the error bar of predicted forward times."""
    bar = mean_of(entry.get("forward_error_bar"), 0.0)
    within = f"; forward times within {bar:.0%}" if bar > 0 else ""
    return f"profile {entry.get('profile', '?')}: {entry.get('foundation', '?')}{within}"


def _text(value: Any) -> str:
    return "-" if value is None else number_text(value, 4) if isinstance(value, float) else str(value)
