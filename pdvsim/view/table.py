"""Tables as text: one run in the layout of `vllm bench serve`, many runs one row each, profiles.

Every table says what the figures are founded on. Values are flat, as a sweep's rows are; an Interval prints as its
mean and, from two replications on, the half-width of its confidence interval.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from shutil import get_terminal_size
from typing import Any

from pdvsim.sim.core import KINDS
from pdvsim.sim.hardware.reach import SIZES, TELLING
from pdvsim.sim.metrics.summary import STEPS, percentile_name
from pdvsim.sim.records import LANES
from pdvsim.study.stats import Interval

Section = tuple[str, list[tuple[str, str]]]

WIDTH = 50
UNKNOWN_WIDTH = 160  # of a table whose reader is no terminal
LATENCIES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
TOTALS = (
    ("Successful requests:", "completed", 0),
    ("Failed requests:", "failed", 0),
    ("Maximum request concurrency:", "max_concurrency", 0),
    ("Request rate configured (RPS):", "request_rate", 2),
    ("Benchmark duration (s):", "duration", 2),
    ("Total input tokens:", "total_input_tokens", 0),
    ("Total generated tokens:", "total_output_tokens", 0),
    ("Request throughput (req/s):", "request_throughput", 2),
    ("Request goodput (req/s):", "request_goodput", 2),
    ("Output token throughput (tok/s):", "output_throughput", 2),
    ("Peak output token throughput (tok/s):", "max_output_tokens_per_s", 2),
    ("Peak concurrent requests:", "max_concurrent_requests", 2),
    ("Total token throughput (tok/s):", "total_token_throughput", 2),
)
DRAINING = 0.8  # share of a closed loop's requests that are there on average, below which a table says so
BANDED = ("output_throughput", "mean_tpot_ms")  # columns that have room for their error band
SPECULATION = (
    ("Acceptance rate per drafted token (%):", "spec_decode_acceptance_rate", 2),  # vLLM's
    ("Acceptance rate per judged token (%):", "spec_decode_judged_acceptance_rate", 2),
    ("Acceptance length:", "spec_decode_acceptance_length", 2),
    ("Drafts:", "spec_decode_num_drafts", 0),
    ("Draft tokens:", "spec_decode_draft_tokens", 0),
    ("Judged tokens:", "spec_decode_judged_tokens", 0),
    ("Accepted tokens:", "spec_decode_accepted_tokens", 0),
)

PREEMPTION = (("Preemptions:", "preemptions", 0), ("Recomputed tokens:", "recomputed_tokens", 0))


def serving_table(values: Mapping[str, Any], percentiles: Iterable[float] = (99.0,)) -> str:
    """One load point as `vllm bench serve` prints it, with the lanes and the requests' time behind."""
    lines: list[str] = []
    for title, rows in sections(values, percentiles):
        lines.append(f"{title:=^{WIDTH}}" if not lines else f"{title:-^{WIDTH}}")
        lines += [f"{label:<40} {text:<10}".rstrip() for label, text in rows]
    return "\n".join([*lines, "=" * WIDTH])


def serving_html(values: Mapping[str, Any], percentiles: Iterable[float]) -> str:
    """The same as HTML, for a notebook: a table up to the latencies, the rest folded away."""
    tables = []
    found = sections(values, percentiles)
    first = 1 + sum(title in dict(LATENCIES.values()).values() for title, _ in found)
    for part in (found[:first], found[first:]):
        rows = []
        for title, section in part:
            rows.append(f'<tr><th colspan="2" style="text-align:left">{html.escape(title.strip())}</th></tr>')
            rows += [f"<tr><td>{html.escape(label)}</td><td>{html.escape(text)}</td></tr>" for label, text in section]
        tables.append(f"<table>{''.join(rows)}</table>")
    return f"{tables[0]}<details><summary>speculation, batches, lanes</summary>{tables[1]}</details>"


def sections(values: Mapping[str, Any], percentiles: Iterable[float]) -> list[Section]:
    """The parts of a serving table: titles, labels and formatted values. Absent values have no line."""
    found: list[Section] = [(" Serving Benchmark Result ", _origin(values) + _lines(values, TOTALS))]
    for name, (short, title) in LATENCIES.items():
        marks = [("Mean", "mean"), ("Median", "median")]
        marks += [(percentile_name(p).upper(), percentile_name(p)) for p in percentiles]
        found.append((title, _lines(values, [(f"{word} {short} (ms):", f"{key}_{name}_ms", 2) for word, key in marks])))
    speculation = _lines(values, SPECULATION)
    per_position = values.get("spec_decode_per_position_acceptance_rates")
    if isinstance(per_position, Sequence):
        speculation += [(f"  Position {i} (%):", cell(rate, scale=100)) for i, rate in enumerate(per_position)]
    found.append(("Speculative Decoding", speculation))
    happened = [line for line in PREEMPTION if getattr(values.get(line[1]), "mean", values.get(line[1]))]
    found.append(("KV Cache", _lines(values, happened)))
    batches = [(f"Mean {kind} batch (rows):", f"kinds_{kind}_mean_batch", 2) for kind in KINDS if kind != "prefill"]
    found.append(("Batches", _lines(values, [("Mean prefill (tokens):", "kinds_prefill_mean_tokens", 2), *batches])))
    parts = [(f"{step.capitalize()} (ms):", f"breakdown_ms_{step}", 2) for step in STEPS]
    found.append(("Mean Time of a Request", _lines(values, parts)))
    for lane in LANES:
        rows = (("busy", "utilisation"), ("bandwidth", "bandwidth_share"))
        shares = [
            (f"{label.capitalize()} (%):", cell(values[f"lanes_{lane}_{key}"], scale=100))
            for label, key in rows
            if f"lanes_{lane}_{key}" in values and not _missing(values[f"lanes_{lane}_{key}"])
        ]
        rest = _lines(
            values,
            (("Launches:", f"lanes_{lane}_launches", 0), ("Mean queue depth:", f"lanes_{lane}_mean_queue_depth", 2)),
        )
        found.append((f"Lane: {lane}", shares + rest))
    return [(title, rows) for title, rows in found if rows]


def comparison_table(
    entries: Sequence[Mapping[str, Any]],
    metrics: Iterable[str] = ("ttft", "tpot"),
    percentiles: Iterable[float] = (99.0,),
    varied: Sequence[str] = (),
    differences: Sequence[Mapping[str, Any]] = (),
) -> str:
    """One row per load, value of what was varied and architecture: throughput, latencies, acceptance, stability.

    `differences` of one metric from the first architecture, where there are some, are a column too.
    """
    tail = max(percentiles, default=None)
    marks = {"mean": "mean"} | ({} if tail is None else {percentile_name(tail).upper(): percentile_name(tail)})
    columns: list[tuple[str, str]] = [("req/s", "request_throughput"), ("out tok/s", "output_throughput")]
    if any(not _missing(entry.get("request_goodput")) for entry in entries):
        columns.append(("goodput", "request_goodput"))
    for name in metrics:
        columns += [(f"{word} {LATENCIES[name][0]} ms", f"{mark}_{name}_ms") for word, mark in marks.items()]
    columns.append(("tok/round", "spec_decode_acceptance_length"))
    leads = {_seat(d, varied): cell(d["relative"], scale=100, sign="+") for d in differences}
    latency = bool(leads) and differences[0]["metric"].endswith("_ms")
    rows = []
    for entry in entries:
        row = {load_name(entry["load_kind"]): load_text(entry["load"])}
        row |= {name: _text(entry[name]) for name in varied} | {"arch": str(entry["arch"])}
        for title, key in columns:
            row[title] = banded(entry, key) if key in BANDED else cell(entry.get(key))
            if leads and key == "output_throughput":
                row["E2EL %" if latency else "gain %"] = leads.get(_seat(entry, varied), "")
        rows.append(row | {"stability": str(entry.get("stability", ""))})
    spare = ("tok/round", "req/s", *(title for title, _ in columns if title.startswith("P")), "stability")
    notes = [*dict.fromkeys(map(founded, entries)), *uncertainty(entries)]
    if leads:
        first = differences[0]["against"]
        what = f"gain: in out tok/s over {first}"
        if latency:
            what = f"E2EL: mean end-to-end latency against {first}, lower is better (arrivals set the throughput)"
        notes.append(f"{what}, paired by seed; compare this, not two ± ranges")
    return "\n".join([*fitted_table(rows, spare), *notes])


def _seat(entry: Mapping[str, Any], varied: Sequence[str]) -> tuple[str, ...]:
    return load_text(entry["load"]), *(_text(entry[name]) for name in varied), str(entry["arch"])


def uncertainty(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the brackets and the ± of entries mean, or that there are none; loads not kept up; times not measured."""
    notes = [*most_outside(entries), *(note for note in [_draining(entries)] if note)]
    notes += _ranges(entries)
    replications = max(int(entry.get("replications", 1)) for entry in entries)
    if replications > 1:
        return [*notes, f"±: 95% confidence over {replications} replications"]
    return [*notes, "one replication: no interval, no significance; --num-runs 5 gives intervals"]


def _ranges(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the error ranges of entries are or why there is none, by architecture or load where these differ in it."""
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
        notes.append(f"error range in brackets{of}: {text}")
    return notes


def _draining(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """A note on closed loops that were long on their way up and down: their throughput is not that of the load."""
    worst, said = DRAINING, None
    for entry in entries:
        rate, stay = (entry.get(key) for key in ("request_throughput", "mean_e2el_ms"))
        if entry["load_kind"] != "concurrency" or _missing(rate) or _missing(stay):
            continue
        there = _mean(rate) * _mean(stay) / 1e3
        if there < worst * entry["load"]:  # Little's law: so many were there on average
            worst = there / entry["load"]
            said = f"concurrency {load_text(entry['load'])}: {there:.0f} on average, as the loop fills and drains"
    return said and f"{said}; raise --num-prompts"


def outside(values: Mapping[str, Any]) -> str | None:
    """How much of a run's GPU time is beyond what was measured, which way and how far; None below a hundredth."""
    share = _mean(values.get("outside_measured_share"))
    if not share > TELLING:
        return None
    parts = []
    for prefix, where in (("", ""), ("together_", "co-running: ")):
        sizes = {n: _mean(values.get(f"outside_measured_{prefix}{n}")) for n in SIZES}
        far = {name: most for name, most in sizes.items() if not math.isnan(most)}
        if "prompt_tokens" in far:
            far.pop("tokens", None)  # what they are made of
        limits = {name: _mean(values[f"outside_measured_{prefix}{name}_limit"]) for name in far}
        said = [f"{SIZES[name]} up to {most:,.0f} ({limits[name]:,.0f})" for name, most in far.items()]
        parts += [where + ", ".join(said).replace("(", "(measured to ", 1)] if said else []
    return f"{share:.0%} of GPU time: {'; '.join(parts)}"


def most_outside(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The same of whichever entry is furthest out, as a note; none where all are inside or the range is unknown."""
    worst = max(entries, key=lambda entry: _mean(entry.get("outside_measured_share"), 0.0))
    said = outside(worst)
    return [f"{worst['arch']}, outside the measured range: {said}"] if said else []


def _mean(value: Any, missing: float = math.nan) -> float:
    value = value.mean if isinstance(value, Interval) else value
    return missing if _missing(value) else float(value)


def paired_table(differences: Sequence[Mapping[str, Any]], varied: Sequence[str] = ()) -> str:
    """What each architecture gains over the first, as a share, from runs with the same seeds."""
    load, against = load_name(differences[0]["load_kind"]), f"against {differences[0]['against']}"
    header = ["metric", load, *varied, "arch", against]
    rows = [
        [
            d["metric"],
            load_text(d["load"]),
            *(_text(d[name]) for name in varied),
            d["arch"],
            f"{cell(d['relative'], scale=100, sign='+')} %",
        ]
        for d in differences
    ]
    return "Paired differences, same seeds, 95% confidence over replications\n" + grid(header, rows)


def profiles_table(document: Mapping[str, Any]) -> str:
    """GPUs, profiles and models, as three blocks."""
    blocks = []
    for name, rows in document.items():
        header = list(rows[0])
        blocks.append(f"{name.capitalize()}\n" + grid(header, [[_text(row[key]) for key in header] for row in rows]))
    return "\n\n".join(blocks)


def points_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The points of a sweep, one row each."""
    header = [name for name in rows[0] if name not in ("load_kind", "run")]
    shown = [load_name(rows[0]["load_kind"]) if name == "load" else name for name in header]
    return grid(shown, [[load_text(r[n]) if n == "load" else _text(r[n]) for n in header] for r in rows])


def cell(value: Any, decimals: int = 2, scale: float = 1.0, sign: str = "") -> str:
    """A number, an Interval, or a dash for nothing."""
    if _missing(value):
        return "-"
    if isinstance(value, Interval):
        mean = cell(value.mean, decimals, scale, sign)
        sure = not value.half_width > 1e-9 * abs(value.mean)  # of one run, or the same in all
        return mean if sure else f"{mean} ±{value.half_width * scale:.{decimals}f}"
    text = f"{value * scale:{sign}.{decimals}f}"
    return text if float(text) else text.replace("-", "")  # no minus zero


def banded(values: Mapping[str, Any], key: str, decimals: int = 2) -> str:
    """A cell, followed by how far it may be off: a share, or where forward times were predicted from where to where."""
    text, ends = cell(values.get(key), decimals), [values.get(f"{key}_{end}") for end in ("low", "high")]
    if not math.isnan(error := _mean(values.get(f"{key}_error"))):
        return f"{text} (±{100 * error:.1f}%)"
    if any(_missing(end) for end in ends):
        return text
    low, high = (cell(_mean(end), decimals) for end in ends)
    return f"{text} ({low} to {high})"


def load_name(kind: str) -> str:
    """A kind of load as a heading."""
    return {"concurrency": "concurrency", "request_rate": "rate req/s"}.get(kind, kind)


def load_text(load: float) -> str:
    """A load as a number; a trace has none."""
    return "trace" if math.isnan(load) else f"{load:g}"


def fitted_table(rows: Sequence[Mapping[str, str]], spare: Iterable[str], headings: Sequence[str] = ()) -> list[str]:
    """Rows of the same keys as a grid that fits the terminal, and a line on what was left out for that.

    That is columns of `spare`, in its order. A heading, one for each row, stands above the first row that has it.
    """
    width = get_terminal_size((UNKNOWN_WIDTH, 24)).columns
    shown, out = list(rows), []
    lines = rows_table(shown).splitlines()
    for name in (name for name in spare if name in rows[0]):
        if len(lines[1]) <= width:
            break
        out.append(name)
        shown = [{key: value for key, value in row.items() if key != name} for row in shown]
        lines = rows_table(shown).splitlines()
    for at in reversed(range(len(headings))):
        if at == 0 or headings[at] != headings[at - 1]:
            lines.insert(2 + at, headings[at])
    return [*lines, *([f"left out to fit the width, and in the files: {', '.join(out)}"] if out else [])]


def rows_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows of the same keys as one grid, the keys as its header."""
    return grid(list(rows[0]), [list(row.values()) for row in rows])


def _missing(value: Any) -> bool:
    value = value.mean if isinstance(value, Interval) else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def _origin(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Who was simulated on what, and what that is founded on."""
    labels = (("Architecture:", "arch"), ("Models (draft:target):", "pair"), ("GPU:", "gpu"), ("Profile:", "profile"))
    rows = [(label, str(values[key])) for label, key in labels if values.get(key) is not None]
    gpus = _mean(values.get("gpus"), 0.0)
    rows += [("GPUs in total:", f"{gpus:.0f}")] if gpus > 1 else []
    rows += [("Foundation:", str(values["foundation"]))] if "foundation" in values else []
    bar = _mean(values.get("forward_error_bar"), 0.0)
    rows += [("Error bar of forward times, 95%:", f"{bar:.0%}")] if bar else []
    rows += [("Error range (in brackets):", str(values["error_range"]))] if "error_range" in values else []
    beyond = outside(values)
    rows += [("Outside the measured range:", beyond)] if beyond else []
    return rows + ([("Stability:", str(values["stability"]))] if "stability" in values else [])


def _lines(values: Mapping[str, Any], labels: Iterable[tuple[str, str, int]]) -> list[tuple[str, str]]:
    shown = ((label, key, decimals) for label, key, decimals in labels if values.get(key) != math.inf)
    return [(label, banded(values, key, decimals)) for label, key, decimals in shown if not _missing(values.get(key))]


def founded(entry: Mapping[str, Any]) -> str:
    """What a row or an entry rests on, with the error bar of forward times that are predicted."""
    bar = _mean(entry.get("forward_error_bar"), 0.0)
    within = f"; forward times within {bar:.0%}" if bar > 0 else ""
    return f"profile {entry.get('profile', '?')}: {entry.get('foundation', '?')}{within}"


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns wide enough for their cells, numbers to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    right = [all(row[i][:1].isdigit() or row[i][:1] in "+-" for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(text.rjust(w) if r else text.ljust(w) for text, w, r in zip(row, widths, right, strict=True)).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join([lines[0], "-" * sum(widths, 2 * len(widths) - 2), *lines[1:]])
