"""The original question's page: the five published plots, and where each architecture succeeds or fails."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from pdvsim.published.original import AGAINST, ARCHS, KINDS, LEAD, PAIRS, Fare, best, changes, tallies
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.style import arch_colour, arch_marker
from pdvsim.view.table import rows_table

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LOADS = {"concurrency": "C at once", "request_rate": "Poisson, 0.05 C a second"}
TICKS = (1, 2, 4, 8, 16, 32, 64, 128)


def original_figures(rows: pd.DataFrame, caption: str) -> dict[str, Figure]:
    """The five plots by their headings."""
    return {
        "Throughput": _lines(rows, [("output_throughput", "tok/s", 1.0)], caption),
        "Latency": _lines(
            rows, [("mean_e2el_ms", "mean, seconds", 1e-3), ("p99_e2el_ms", "P99, seconds", 1e-3)], caption, log=True
        ),
        "GPU utilisation": _lines(
            rows, [("gpu_busy", "% of the time", 100.0)], f"{caption} Busy: at least one work is running."
        ),
        "Acceptance": _lines(
            rows, [("spec_decode_acceptance_rate", "% of the drafts", 1.0)],
            f"{caption} The same coins for all: what differs is how long adaptive drafts.",
        ),
        f"Improvement over {AGAINST}": _heatmap(rows, caption),
    }  # fmt: skip


@styled()
def _lines(rows: pd.DataFrame, metrics: Sequence[tuple[str, str, float]], caption: str, log: bool = False) -> Figure:
    """A row of panels for each load and metric, a column for each pair."""
    shown = [(kind, *metric) for kind in KINDS for metric in metrics]
    figure = new_figure(15, 3.3 * len(shown), caption)
    panels = figure.subplots(len(shown), len(PAIRS), squeeze=False, sharex=True)
    for line, (kind, metric, unit, scale) in zip(panels, shown, strict=True):
        for axes, (label, pair) in zip(line, PAIRS.items(), strict=True):
            mine = rows[(rows["pair"] == pair) & (rows["load_kind"] == kind)]
            for arch in ARCHS:
                of_arch = mine[mine["arch"] == arch]
                axes.plot(
                    of_arch["load"], of_arch[metric] * scale, marker=arch_marker(arch), color=arch_colour(arch),
                    markersize=5, linewidth=1.5, label=arch,
                )  # fmt: skip
            _axes(axes, f"{label}, {LOADS[kind]}", unit)
            if log:
                axes.set_yscale("log")
                axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            else:
                axes.set_ylim(bottom=0)
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(ARCHS), frameon=False)
    return figure


def _axes(axes: Axes, title: str, unit: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(TICKS, [str(tick) for tick in TICKS])
    axes.minorticks_off()
    axes.set_xlabel("C")
    axes.set_ylabel(unit)
    axes.set_title(title, fontweight="bold", loc="left", fontsize=10)


@styled(grid=False)
def _heatmap(rows: pd.DataFrame, caption: str) -> Figure:
    """Change of throughput over `AGAINST`, in percent: blue is faster, red slower."""
    table = changes(rows, "output_throughput")
    others = [arch for arch in ARCHS if arch != AGAINST]
    figure = new_figure(18, 6, f"{caption} Percent of {AGAINST}'s tokens per second; colours end at 30.")
    panels = figure.subplots(len(KINDS), len(PAIRS), squeeze=False)
    for line, kind in zip(panels, KINDS, strict=True):
        for axes, (label, pair) in zip(line, PAIRS.items(), strict=True):
            cells = [[100 * value for value in table[pair, kind, arch]] for arch in others]
            axes.imshow(cells, cmap="RdBu", vmin=-30, vmax=30, aspect="auto")
            for y, row in enumerate(cells):
                for x, value in enumerate(row):
                    colour = "white" if abs(value) > 20 else "0.15"
                    axes.text(x, y, f"{value:+.0f}", ha="center", va="center", fontsize=8, color=colour)
            levels = [f"{level:g}" for level in table[pair, kind, AGAINST].index]
            axes.set_xticks(range(len(levels)), levels, fontsize=8)
            axes.set_yticks(range(len(others)), others, fontsize=9)
            axes.set_title(f"{label}, {LOADS[kind]}", fontweight="bold", loc="left", fontsize=10)
            axes.set_xlabel("C", fontsize=9)
    return figure


def original_text(rows: pd.DataFrame) -> str:
    """Success and failure: in words, against `AGAINST`, and who is first at each level."""
    found = tallies(rows)
    winners = [
        {"pair": label, "load": LOADS[kind], "first in tokens per second, by C": _runs(best(rows, pair, kind))}
        for label, pair in PAIRS.items()
        for kind in KINDS
    ]
    return "\n\n".join(
        [
            _verdict(found),
            f"Success and failure: throughput and P99 latency against {AGAINST}; a lead or a lag is over {LEAD:.0%}",
            rows_table([_line(tally) for tally in found]),
            rows_table(winners),
        ]
    )


def _verdict(found: Sequence[Fare]) -> str:
    """What the published claim comes to."""
    pdv = [tally for tally in found if tally.arch in ("pdv", "pdv-unified")]
    ahead = sum(len(tally.ahead) for tally in pdv)
    behind = sum(len(tally.behind) for tally in pdv)
    cells = sum(tally.levels for tally in pdv)
    most = max(pdv, key=lambda tally: tally.most)
    least = min(pdv, key=lambda tally: tally.least)
    return (
        f"pdv and pdv-unified lead {AGAINST} by more than {LEAD:.0%} in {ahead} of {cells} cells and lag by more in "
        f"{behind}; the best is {most.most:+.1%} ({most.arch}, {most.pair}, {LOADS[most.kind]}), the worst "
        f"{least.least:+.1%} ({least.arch}, {least.pair}, {LOADS[least.kind]})."
    )


def _line(tally: Fare) -> dict[str, str]:
    return {
        "pair": next(label for label, pair in PAIRS.items() if pair == tally.pair),
        "load": LOADS[tally.kind],
        "arch": tally.arch,
        "leads at C": _listed(tally.ahead),
        "lags at C": _listed(tally.behind),
        "tok/s": f"{tally.least:+.1%} to {tally.most:+.1%}",
        "P99": f"{tally.least_p99:+.1%} to {tally.most_p99:+.1%}",
    }


def _listed(levels: Sequence[int]) -> str:
    return ",".join(map(str, levels)) or "none"


def _runs(by_level: dict[int, str]) -> str:
    """Levels with the same winner together."""
    pieces = []
    for arch, group in groupby(by_level.items(), key=lambda item: item[1]):
        levels = [level for level, _ in group]
        pieces.append(f"{arch} {levels[0]}" + (f" to {levels[-1]}" if len(levels) > 1 else ""))
    return ", ".join(pieces)
