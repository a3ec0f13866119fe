"""Tables as text: one run in the layout of `vllm bench serve`, many runs one row each, profiles.

Every table states the foundation of its values. Values are flat, as in a sweep's rows; an Interval prints as its mean
and, from two replications on, the half-width of its confidence interval.
"""

from __future__ import annotations

import html
import math
import re
import shlex
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from shutil import get_terminal_size
from typing import Any

from pdvsim.sim.core import KINDS
from pdvsim.sim.hardware.reach import NOTABLE_SHARE, SIZES
from pdvsim.sim.metrics.summary import STEPS, percentile_name
from pdvsim.sim.records import LANES
from pdvsim.study.stats import Interval
from pdvsim.view.style import number_text

Section = tuple[str, list[tuple[str, str]]]

WIDTH = 50
UNKNOWN_WIDTH = 160  # columns, if the output is not a terminal
DETAIL = "±, brackets, decimals"  # dropped on a narrow terminal; differences keep their ±
LONG_TEXT, SHORT_TEXT = 24, 14  # columns of longer texts are folded first, to no less; the others if need be
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
UNJUDGED = ("closed loop", "burst")  # stability of loads without a rate to keep up with
DRAINING = 0.8  # mean share of a closed loop's concurrency below which a note is printed
BANDED = ("output_throughput", "mean_tpot_ms")  # columns that show their error range
SPECULATION = (
    ("Acceptance rate per drafted token (%):", "spec_decode_acceptance_rate", 2),  # vLLM's
    ("Acceptance rate per judged token (%):", "spec_decode_judged_acceptance_rate", 2),
    ("Acceptance length:", "spec_decode_acceptance_length", 2),
    ("Drafts:", "spec_decode_num_drafts", 0),
    ("Draft tokens:", "spec_decode_draft_tokens", 0),
    ("Judged tokens:", "spec_decode_judged_tokens", 0),
    ("Accepted tokens:", "spec_decode_accepted_tokens", 0),
)

PREFIXES = (
    ("Queried prompt tokens:", "prefix_cache_queries", 0),
    ("Cached prompt tokens:", "prefix_cache_hits", 0),
    ("Hit rate (%):", "prefix_cache_hit_rate", 2),
    ("Mean cached tokens of a request:", "mean_num_cached_tokens", 2),
    ("Mean TTFT of hits (ms):", "mean_ttft_hit_ms", 2),
    ("Mean TTFT of misses (ms):", "mean_ttft_miss_ms", 2),
    ("Cached tokens on the GPU:", "kv_gpu_hit_tokens", 0),
    ("Cached tokens fetched from host:", "kv_host_hit_tokens", 0),
    ("Cached tokens fetched from SSD:", "kv_ssd_hit_tokens", 0),
    ("On host, but faster to prefill:", "kv_host_slower_tokens", 0),
    ("On SSD, but faster to prefill:", "kv_ssd_slower_tokens", 0),
    ("Prefill of 1,000 tokens (ms):", "kv_prefill_ms", 2),
    ("Fetch of 1,000 from host (ms):", "kv_host_fetch_ms", 2),
    ("Fetch of 1,000 from SSD (ms):", "kv_ssd_fetch_ms", 2),
    ("Evicted blocks:", "prefix_cache_evictions", 0),
    ("Peak KV tokens:", "kv_peak_tokens", 0),
    ("Peak shared KV tokens:", "kv_peak_shared_tokens", 0),
    ("Conversations:", "conversations", 0),
    ("GPU-seconds per conversation:", "gpu_s_per_conversation", 2),
)
PREEMPTION = (("Preemptions:", "preemptions", 0), ("Recomputed tokens:", "recomputed_tokens", 0))


@dataclass(frozen=True)
class TextTable:
    """Rows with the same keys. Printed, it fits the terminal; on a page it is complete."""

    rows: Sequence[Mapping[str, str]]
    spare: Sequence[str] = ()  # columns, and DETAIL, omitted on a narrow terminal, in this order
    notes: Sequence[str] = ()  # under it

    def __str__(self) -> str:
        return "\n".join([*fitted_table(self.rows, self.spare), *self.notes])

    def html(self) -> str:
        """As an HTML table, numbers to the right, with its notes; texts are escaped."""
        numbers = [name for name in self.rows[0] if all(_is_figure(row[name]) for row in self.rows)]
        left, right = ' style="text-align:left"', dict.fromkeys(numbers, ' style="text-align:right"')

        def line(kind: str, cells: Mapping[str, str]) -> str:
            texts = (f"{right.get(name, left)}>{html.escape(text)}" for name, text in cells.items())
            return f"<tr>{''.join(f'<{kind}{text}</{kind}>' for text in texts)}</tr>"

        head = line("th", {name: name for name in self.rows[0]})
        body = "".join(line("td", row) for row in self.rows)
        notes = f'<p class="note">{"<br>".join(map(html.escape, self.notes))}</p>' if self.notes else ""
        return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>{notes}'


def continued(command: str) -> str:
    """A command within the terminal's width, its lines joined by backslashes: flags stay with their values."""
    words, lines = shlex.split(command), [""]
    if len(command) <= _width() or shlex.join(words) != command:  # the second: more than words and quotes
        return command
    for at, word in enumerate(words):
        flag = word.startswith("-") and at + 1 < len(words) and not words[at + 1].startswith("-")
        room = len(shlex.quote(word)) + (1 + len(shlex.quote(words[at + 1])) if flag else 0)
        if lines[-1].strip() and len(lines[-1]) + 1 + room > _width() - len(" \\"):
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}"
    return " \\\n".join([lines[0].lstrip(), *lines[1:]])


def serving_table(values: Mapping[str, Any], percentiles: Iterable[float] = (99.0,)) -> str:
    """One load point in the layout of `vllm bench serve`, followed by lanes and request times."""
    lines: list[str] = []
    for title, rows in sections(values, percentiles):
        lines.append(f"{title:=^{WIDTH}}" if not lines else f"{title:-^{WIDTH}}")
        for label, text in rows:
            first, *more = _folded(text, max(_width() - 41, SHORT_TEXT))
            lines += [f"{label:<40} {first}".rstrip(), *(" " * 41 + rest for rest in more)]
    return "\n".join([*lines, "=" * WIDTH])


def serving_html(values: Mapping[str, Any], percentiles: Iterable[float]) -> str:
    """The same as HTML, for a notebook: a table up to the latencies, the rest collapsed."""
    tables = []
    parts = sections(values, percentiles)
    first = 1 + sum(title in dict(LATENCIES.values()).values() for title, _ in parts)
    for part in (parts[:first], parts[first:]):
        rows = []
        for title, section in part:
            rows.append(f'<tr><th colspan="2" style="text-align:left">{html.escape(title.strip())}</th></tr>')
            rows += [f"<tr><td>{html.escape(label)}</td><td>{html.escape(text)}</td></tr>" for label, text in section]
        tables.append(f"<table>{''.join(rows)}</table>")
    return f"{tables[0]}<details><summary>speculation, batches, lanes</summary>{tables[1]}</details>"


def sections(values: Mapping[str, Any], percentiles: Iterable[float]) -> list[Section]:
    """The parts of a serving table: titles, labels and formatted values. Absent values have no line."""
    parts: list[Section] = [(" Serving Benchmark Result ", _origin(values) + _lines(values, TOTALS))]
    for name, (short, title) in LATENCIES.items():
        marks = [("Mean", "mean"), ("Median", "median")]
        marks += [(percentile_name(p).upper(), percentile_name(p)) for p in percentiles]
        parts.append((title, _lines(values, [(f"{word} {short} (ms):", f"{key}_{name}_ms", 2) for word, key in marks])))
    speculation = _lines(values, SPECULATION)
    if speculation and "acceptance_source" in values:
        speculation.insert(0, ("Acceptance:", str(values["acceptance_source"])))
    per_position = values.get("spec_decode_per_position_acceptance_rates")
    if isinstance(per_position, Sequence):
        speculation += [(f"  Position {i} (%):", cell(rate, scale=100)) for i, rate in enumerate(per_position)]
    parts.append(("Speculative Decoding", speculation))
    happened = [line for line in PREEMPTION if getattr(values.get(line[1]), "mean", values.get(line[1]))]
    parts.append(("KV Cache", _lines(values, happened)))
    looked = "prefix_cache_queries" in values or "conversations" in values
    parts.append(("Prefix Cache", _lines(values, PREFIXES) if looked else []))
    batches = [(f"Mean {kind} batch (rows):", f"kinds_{kind}_mean_batch", 2) for kind in KINDS if kind != "prefill"]
    parts.append(("Batches", _lines(values, [("Mean prefill (tokens):", "kinds_prefill_mean_tokens", 2), *batches])))
    steps = [(f"{step.capitalize()} (ms):", f"breakdown_ms_{step}", 2) for step in STEPS]
    parts.append(("Mean Time of a Request", _lines(values, steps)))
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
        parts.append((f"Lane: {lane}", shares + rest))
    return [(title, rows) for title, rows in parts if rows]


def comparison_table(
    entries: Sequence[Mapping[str, Any]],
    metrics: Iterable[str] = ("ttft", "tpot"),
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
    if any(not _missing(entry.get("request_goodput")) for entry in entries):
        columns.append(("goodput", "request_goodput"))
    for name in metrics:
        columns += [(f"{word} {LATENCIES[name][0]} ms", f"{mark}_{name}_ms") for word, mark in marks.items()]
    columns.append(("tok/round", "spec_decode_acceptance_length"))
    if any(not _missing(entry.get("prefix_cache_hit_rate")) for entry in entries):
        columns.append(("hit %", "prefix_cache_hit_rate"))
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
        rows.append(row | {"stability": stability_text(entry)})
    means = [title for title, _ in reversed(columns) if title.startswith("mean")]
    unjudged = all(row["stability"] in UNJUDGED for row in rows)
    spare = ("tok/round", "req/s", *(["stability"] if unjudged else []), DETAIL, *means)
    notes = [*dict.fromkeys(map(founded, entries)), *uncertainty(entries)]
    if leads:
        first = differences[0]["against"]
        what = f"gain: in out tok/s over {first}"
        if latency:
            what = f"E2EL: mean end-to-end latency against {first}, lower is better (arrivals set the throughput)"
        notes.append(f"{what}, paired by seed; compare this, not two ± ranges")
    return TextTable(rows, spare, notes)


def _seat(entry: Mapping[str, Any], varied: Sequence[str]) -> tuple[str, ...]:
    return load_text(entry["load"]), *(_text(entry[name]) for name in varied), str(entry["arch"])


def uncertainty(entries: Sequence[Mapping[str, Any]]) -> list[str]:
    """Notes on brackets and ± of entries, or their absence; loops that drain; values outside the measured range."""
    notes = [*most_outside(entries), *(note for note in [_draining(entries)] if note)]
    notes += _ranges(entries)
    replications = max(int(entry.get("replications", 1)) for entry in entries)
    if replications > 1:
        return [*notes, f"±: 95% confidence over {replications} replications"]
    return [*notes, "one replication: no interval, no significance; --num-runs 5 gives intervals"]


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
        notes.append(f"error range in brackets{of}: {text}")
    return notes


def _draining(entries: Sequence[Mapping[str, Any]]) -> str | None:
    """A note on closed loops with long start and end phases, whose throughput is not that of the load."""
    worst, said = DRAINING, None
    for entry in entries:
        rate, stay = (entry.get(key) for key in ("request_throughput", "mean_e2el_ms"))
        if entry["load_kind"] != "concurrency" or _missing(rate) or _missing(stay):
            continue
        there = _mean(rate) * _mean(stay) / 1e3
        if there < worst * entry["load"]:  # Little's law
            worst = there / entry["load"]
            said = f"concurrency {load_text(entry['load'])}: {there:.0f} on average, as the loop fills and drains"
    return said and f"{said}; raise --num-prompts"


def outside(values: Mapping[str, Any]) -> str | None:
    """Share of a run's GPU time outside the measured range, in which dimension and how far; None below 1%."""
    share = _mean(values.get("outside_measured_share"))
    if not share > NOTABLE_SHARE:
        return None
    parts = []
    for prefix, where in (("", ""), ("together_", "co-running: ")):
        sizes = {n: _mean(values.get(f"outside_measured_{prefix}{n}")) for n in SIZES}
        far = {name: most for name, most in sizes.items() if not math.isnan(most)}
        if "prompt_tokens" in far:
            far.pop("tokens", None)  # included in prompt tokens
        limits = {name: _mean(values[f"outside_measured_{prefix}{name}_limit"]) for name in far}
        said = [f"{SIZES[name]} up to {most:,.0f} ({limits[name]:,.0f})" for name, most in far.items()]
        parts += [where + ", ".join(said).replace("(", "(measured to ", 1)] if said else []
    return f"{share:.0%} of GPU time: {'; '.join(parts)}"


def most_outside(entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """The same for the entry furthest outside, as a note; none if all are inside or the range is unknown."""
    worst = max(entries, key=lambda entry: _mean(entry.get("outside_measured_share"), 0.0))
    said = outside(worst)
    return [f"{worst['arch']}, outside the measured range: {said}"] if said else []


def _mean(value: Any, missing: float = math.nan) -> float:
    value = value.mean if isinstance(value, Interval) else value
    return missing if _missing(value) else float(value)


def paired_table(differences: Sequence[Mapping[str, Any]], varied: Sequence[str] = ()) -> str:
    """Relative gain of each architecture over the first, paired by seed."""
    rows = [
        {"metric": d["metric"], load_name(d["load_kind"]): load_text(d["load"])}
        | {name: _text(d[name]) for name in varied}
        | {"arch": d["arch"], f"against {d['against']}": f"{cell(d['relative'], scale=100, sign='+')} %"}
        for d in differences
    ]
    return "Paired differences, same seeds, 95% confidence over replications\n" + rows_table(rows)


def profiles_table(document: Mapping[str, Any]) -> str:
    """GPUs, profiles and models, as three blocks."""
    blocks = (
        f"{name.capitalize()}\n" + rows_table([{key: _text(value) for key, value in row.items()} for row in rows])
        for name, rows in document.items()
    )
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
        sure = not value.half_width > 1e-9 * abs(value.mean)  # one run, or equal in all
        return mean if sure else f"{mean} ±{value.half_width * scale:.{decimals}f}"
    text = f"{value * scale:{sign}.{decimals}f}"
    return text if float(text) else text.replace("-", "")  # no minus zero


def banded(values: Mapping[str, Any], key: str, decimals: int = 2) -> str:
    """A cell with its error: relative, or a range if forward times are predicted."""
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


def stability_text(entry: Mapping[str, Any]) -> str:
    """The labels of an entry's replications, from stable to inconclusive."""
    return ", ".join(sorted(str(entry.get("stability", "")).split("/"), reverse=True))


def load_text(load: float) -> str:
    """A load as a number; a trace has none."""
    return "trace" if math.isnan(load) else f"{load:g}"


def fitted_table(rows: Sequence[Mapping[str, str]], spare: Iterable[str], headings: Sequence[str] = ()) -> list[str]:
    """Rows with the same keys as a grid that fits the terminal, and a line on omitted columns.

    Headings and long texts are folded first; then columns of `spare` are omitted, in order. `headings`, one per row,
    are printed above the first row that has them.
    """
    width, out = _width(), list[str]()
    shown, top, body = rows, *_laid_out(rows, width)
    for name in spare:
        if len(top[-1]) <= width:
            break
        before = shown
        if name == DETAIL:
            shown = [{key: _plainer(value) for key, value in row.items()} for row in shown]
        else:
            shown = [{key: value for key, value in row.items() if key != name} for row in shown]
        out += [name] if shown != before else []
        top, body = _laid_out(shown, width)
    if len(top[-1]) > width:
        top, body = _laid_out(shown, width, 1, 1)
    for at in range(len(headings)):
        if at == 0 or headings[at] != headings[at - 1]:
            body[at].insert(0, headings[at])
    left_out = [f"left out to fit {width} columns: {', '.join(out)}"] if out else []
    return [*top, *(line for lines in body for line in lines), *left_out]


def _width() -> int:
    return get_terminal_size((UNKNOWN_WIDTH, 24)).columns


def _plainer(text: str) -> str:
    """A value without its interval, error range and minor decimals; a difference without the decimals."""
    if not _is_figure(text):
        return text
    if text[:1].isdigit():
        text = re.sub(r" ±[\d.]+| \([±\d][^)]*\)", "", text)
    most = r"\d{3,}\.\d+" if text[:1].isdigit() else r"\d{2,}\.\d+"
    return re.sub(most, lambda number: f"{float(number[0]):.0f}", text)


def _folded(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_long_words=False, break_on_hyphens=False) or [""]


def _heading_room(name: str, cells: int) -> int:
    """Width of a heading: that of its cells if it fits, else the least for two lines."""
    if len(name) <= cells:
        return cells
    word = max(map(len, re.split(" (?!%)", name)))  # "gain %" is one
    return next(width for width in range(word, len(name) + 1) if len(_folded(name, width)) <= 2)


def rows_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same keys as one grid, the keys as its header."""
    return grid(list(rows[0]), [list(row.values()) for row in rows])


def _missing(value: Any) -> bool:
    value = value.mean if isinstance(value, Interval) else value
    return value is None or (isinstance(value, float) and math.isnan(value))


def _origin(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Architecture, models, GPU and foundation of a run."""
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
    """Foundation of a row or an entry, with the error bar of predicted forward times."""
    bar = _mean(entry.get("forward_error_bar"), 0.0)
    within = f"; forward times within {bar:.0%}" if bar > 0 else ""
    return f"profile {entry.get('profile', '?')}: {entry.get('foundation', '?')}{within}"


def _text(value: Any) -> str:
    return "-" if value is None else number_text(value, 4) if isinstance(value, float) else str(value)


def _is_figure(text: str) -> bool:
    return text[:1].isdigit() or text[:1] in "+-"


def grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as wide as its cells, numbers right-aligned."""
    top, body = _columns([[name, *column] for name, *column in zip(header, *rows, strict=True)])
    return "\n".join([*top, *(line for lines in body for line in lines)])


def _laid_out(
    rows: Sequence[Mapping[str, str]], width: int, long: int = LONG_TEXT, short: int = SHORT_TEXT
) -> tuple[list[str], list[list[str]]]:
    """The lines of the header and of each row, folded if they are wider than `width`.

    Columns wider than `long` are folded, the widest first, to at least `short`.
    """
    columns = [[name, *(row[name] for row in rows)] for name in rows[0]]
    top, body = _columns(columns)
    if len(top[-1]) <= width:
        return top, body
    widest = [max(map(len, cells)) for _, *cells in columns]
    rooms = [[_heading_room(name, room), room] for room, (name, *_) in zip(widest, columns, strict=True)]
    over = sum(max(room) for room in rooms) + 2 * len(rooms) - 2 - width
    for at in sorted(range(len(columns)), key=lambda at: -widest[at]):
        word = max(len(word) for text in columns[at] for word in text.split(" "))
        if over > 0 and widest[at] > max(long, word) and not all(map(_is_figure, columns[at][1:])):
            room = max(short, word, widest[at] - over)
            over -= max(rooms[at]) - room
            rooms[at] = [room, room]
    return _columns(columns, rooms)


def _columns(
    columns: Sequence[Sequence[str]], rooms: Sequence[Sequence[int]] = ()
) -> tuple[list[str], list[list[str]]]:
    """Columns, each a name and its cells, as the lines of the header and of each row.

    `rooms` are the maximum widths of name and cells; words are never broken.
    """
    right = [all(map(_is_figure, cells)) for _, *cells in columns]
    cut = [
        [_folded(text, max(1, rooms[at][n > 0])) if rooms else [text] for n, text in enumerate(column)]
        for at, column in enumerate(columns)
    ]
    widths = [max(len(line) for cell in column for line in cell) for column in cut]
    blocks = []
    for n, row in enumerate(zip(*cut, strict=True)):
        height = max(map(len, row))
        padded = [[""] * (height - len(cell)) + cell if n == 0 else cell + [""] * (height - len(cell)) for cell in row]
        lines = zip(*padded, strict=True)
        aligned = ([t.rjust(w) if r else t.ljust(w) for t, w, r in zip(x, widths, right, strict=True)] for x in lines)
        blocks.append(["  ".join(line).rstrip() for line in aligned])
    return [*blocks[0], "-" * sum(widths, 2 * len(widths) - 2)], blocks[1:]
