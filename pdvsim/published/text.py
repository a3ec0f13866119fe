"""The published tables beside the simulated ones, as text."""

from __future__ import annotations

import textwrap

from pdvsim.published.explain import explain
from pdvsim.published.fair import HEADLINE, Fair
from pdvsim.published.model_comparison import SHIFT, SHIFT_SPREAD, ModelComparison
from pdvsim.published.reproduce import ENOUGH, TARGETS, Reproduction, TableCell
from pdvsim.published.tables import SOURCE, Constant
from pdvsim.view.table import cell, rows_table

SHOWN = {
    "three-way": ("request_latency_p95", "request_latency_mean", "total_time"),
    "poisson-30s": ("throughput_completed_only",),
}
COMPARED = (  # metric, title, scale, digits
    ("request_latency_mean", "mean s", 1e-3, 1),
    ("request_latency_p95", "P95 s", 1e-3, 1),
    ("throughput", "requests/s", 1.0, 3),
)


def reproduction_text(reproduction: Reproduction, every: bool = False) -> str:
    """Constants, cells and how far they are from the published ones; `every` shows all metrics."""
    shown = [c for c in reproduction.cells if every or c.metric in SHOWN[reproduction.table]]
    blocks = [
        f"{reproduction.table}: {SOURCE}, and what the programs' mechanisms give",
        _constants(reproduction.constants),
        rows_table([_cell_row(c, reproduction) for c in shown]),
    ]
    if not reproduction.interrupted:
        blocks.append("\n".join(_verdict(reproduction)))
    return "\n\n".join(blocks)


def comparison_text(comparison: ModelComparison) -> str:
    """Constants, the predicted rows, and what they assume."""
    rows = []
    for pair, requests, system in dict.fromkeys((c.pair, c.requests, c.system) for c in comparison.cells):
        line = {"pair": pair, "requests": str(requests), "arch": system}
        for metric, title, scale, digits in COMPARED:
            found = comparison.cell(pair, system, requests, metric)
            low, high = (cell(value, digits, scale) for value in found.interval)
            line[title] = f"{cell(found.simulated, digits, scale)} ({low} to {high})"
        rows.append(line)
    note = (
        "The pair that was calibrated is as three-way predicts it. Of the others are assumed: forwards anywhere "
        "between launches added to the arithmetic and launches hidden behind it; a request accepted as the calibrated "
        f"pair's in its place or as any of its fifty, then all of a pair moved by {SHIFT:+g} in log odds, give or take "
        f"{SHIFT_SPREAD:g}. In brackets: nine in ten of {comparison.replications} replications, with the "
        f"{comparison.model_error:.1%} by which the calibrated pair's latencies miss."
    )
    return "\n\n".join(
        [
            "model-comparison: the three_way programs on three pairs, fp32, A100; predicted, no figure of it was seen",
            _constants(comparison.constants),
            rows_table(rows),
            textwrap.fill(note, 118),
        ]
    )


def fair_text(fair: Fair) -> str:
    """The same workloads scored fairly, beside pdvsim's own policies, and what that means."""
    rows = []
    for row in fair.rows:
        line = {"C": str(row.concurrency), "requests": str(row.requests)}
        line["who"] = "published program" if row.engine == "published" else f"pdvsim on {fair.gpu}"
        line["arch"] = row.arch
        if fair.table == "poisson-30s":
            line["completed by 60 s"] = cell(row.completions, 1)
            line["tok/s as published"] = cell(row.completed_only)
            line["all tok/s by 60 s"] = cell(row.all_tokens)
        line["tok/s to the end"] = cell(row.output_throughput)
        line["mean s"] = cell(row.mean_e2el_ms / 1e3)
        line["P95 s"] = cell(row.p95_e2el_ms / 1e3)
        rows.append(line)
    label = f", arrivals and acceptance of {HEADLINE}" if fair.table == "poisson-30s" else ""
    note = f"profile of {fair.gpu}: {fair.foundation}"
    paragraphs = [textwrap.fill(text, 118) for text in explain(fair)]
    return "\n\n".join([f"Scored fairly{label}", rows_table(rows) + f"\n{note}", *paragraphs])


def _constants(constants: tuple[Constant, ...]) -> str:
    rows = []
    for constant in constants:
        value = constant.value if isinstance(constant.value, str) else f"{constant.value * 1e3:.3f} ms"
        named = dict.fromkeys(f"{key.arch} C={key.concurrency} {key.metric}" for key in constant.cells)
        cells = ", ".join(named)
        rows.append({"constant": constant.name, "value": value, "meaning": constant.meaning, "calibrated on": cells})
    return rows_table(rows)


def _cell_row(found: TableCell, reproduction: Reproduction) -> dict[str, str]:
    several = len({c.pair for c in reproduction.cells}) > 1
    mark = "calibrated" if found.used_for_calibration else ""
    if found in reproduction.missed():
        mark = "missed"
    return {
        **({"pair": found.pair} if several else {}),
        "C": str(found.concurrency),
        "arch": found.arch,
        "metric": found.metric,
        "published": cell(found.published),
        "simulated": cell(found.simulated),
        "error %": cell(found.error, 1, 100, "+"),
        "spread %": cell(found.spread / found.published, 1, 100),
        "completions": cell(found.completions, 1),
        "": mark,
    }


def _verdict(reproduction: Reproduction) -> list[str]:
    """The targets, and how they were met."""
    targets = TARGETS[reproduction.table]
    predicted = [c for c in reproduction.targeted() if not c.used_for_calibration]
    worst = max(predicted, key=lambda c: abs(c.error))
    many = f" on {ENOUGH} completions or more" if reproduction.table == "poisson-30s" else ""
    lines = [
        f"{' and '.join(targets)}{many}: {len(predicted)} cells not calibrated on, "
        f"{len(predicted) - len(reproduction.missed())} within {next(iter(targets.values())):.0%}; "
        f"worst {worst.error:+.1%} ({worst.pair}, {worst.arch}, C={worst.concurrency})",
        f"simulated: mean over {reproduction.replications} replications; "
        "spread: their standard deviation (a published figure is a single run)",
    ]
    if reproduction.table == "three-way":
        for metric in targets:
            said = [
                f"C={concurrency} {ours}" + ("" if ours == told else f" (published: {told})")
                for concurrency, (told, ours) in reproduction.winners(metric).items()
            ]
            lines.append(f"least {metric}: {', '.join(said)}")
    else:
        for label in dict.fromkeys(c.pair for c in reproduction.cells):
            row = reproduction.row(label, "pd", "throughput_completed_only")
            told, ours = max(row, key=lambda c: c.published), max(row, key=lambda c: c.simulated)
            most = max(c.completions for c in row if c.concurrency >= 64)
            lines.append(
                f"{label}: pd peaks at C={ours.concurrency} (published: {told.concurrency}); "
                f"at C >= 64 it completes at most {most:.1f} requests"
            )
    return lines
