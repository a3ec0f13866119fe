"""The published and the simulated tables as text."""

from __future__ import annotations

from pdvsim.published.reproduce import ENOUGH, TARGETS, Reproduction, TableCell
from pdvsim.published.tables import SOURCE, Constant
from pdvsim.view.table import cell, rows_table

SHOWN = {
    "three-way": ("request_latency_p95", "request_latency_mean", "total_time"),
    "poisson-30s": ("throughput_completed_only",),
    "model-comparison": ("request_latency_p95", "request_latency_mean", "throughput"),
}


def reproduction_text(reproduction: Reproduction, every: bool = False) -> str:
    """Constants, and cells with their errors; `every` shows all metrics."""
    shown = [c for c in reproduction.cells if every or c.metric in SHOWN[reproduction.table]]
    blocks = [
        f"{reproduction.table}: {SOURCE}, and a simulation of the programs",
        _constants(reproduction.constants),
        rows_table([_cell_row(c, reproduction) for c in shown]),
    ]
    if not reproduction.interrupted:
        blocks.append("\n".join(_verdict(reproduction)))
    return "\n\n".join(blocks)


def _constants(constants: tuple[Constant, ...]) -> str:
    rows = []
    for constant in constants:
        value = constant.value if isinstance(constant.value, str) else f"{constant.value * 1e3:.3f} ms"
        named = dict.fromkeys(f"{key.arch} C={key.concurrency} {key.metric}" for key in constant.cells)
        cells = ", ".join(named)
        rows.append({"constant": constant.name, "value": value, "meaning": constant.meaning, "calibrated on": cells})
    return rows_table(rows)


def _cell_row(figure: TableCell, reproduction: Reproduction) -> dict[str, str]:
    several = len({c.pair for c in reproduction.cells}) > 1
    mark = "calibrated" if figure.used_for_calibration else ""
    if figure in reproduction.missed():
        mark = "missed"
    digits = 3 if figure.unit == "req/s" else 2
    return {
        **({"pair": figure.pair} if several else {}),
        "C": str(figure.concurrency),
        "arch": figure.arch,
        "metric": figure.metric,
        "published": cell(figure.published, digits),
        "simulated": cell(figure.simulated, digits),
        "error %": cell(figure.error, 1, 100, "+"),
        "spread %": cell(figure.spread / figure.published, 1, 100),
        "completions": cell(figure.completions, 1),
        "": mark,
    }


def _verdict(reproduction: Reproduction) -> list[str]:
    """The targets and the results."""
    targets = TARGETS[reproduction.table]
    predicted = [c for c in reproduction.targeted() if not c.used_for_calibration]
    worst = max(predicted, key=lambda c: abs(c.error))
    many = f" on {ENOUGH} completions or more" if reproduction.table == "poisson-30s" else ""
    lines = [
        f"{' and '.join(targets)}{many}: {len(predicted)} cells not used for calibration, "
        f"{len(predicted) - len(reproduction.missed())} within {next(iter(targets.values())):.0%}; "
        f"worst {worst.error:+.1%} ({worst.pair}, {worst.arch}, C={worst.concurrency})",
        f"simulated: mean over {reproduction.replications} replications; "
        "spread: their standard deviation (each published value is a single run)",
    ]
    if reproduction.table != "poisson-30s":
        for metric in targets:
            scenarios = reproduction.winners(metric)
            said = [
                f"C={concurrency} {ours}" + ("" if ours == told else f" (published: {told})")
                for (_, concurrency), (told, ours) in scenarios.items()
            ]
            if reproduction.table == "model-comparison":
                alike = sum(told == ours for told, ours in scenarios.values())
                said = [f"the published architecture in {alike} of {len(scenarios)} scenarios"]
            lines.append(f"lowest {metric}: {', '.join(said)}")
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
