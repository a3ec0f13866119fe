"""Plots of the published and the simulated tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdvsim.published.fair import HEADLINE, Fair
from pdvsim.published.reproduce import Reproduction, TableCell
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.style import arch_colour, arch_marker

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled()
def reproduction_figure(reproduction: Reproduction) -> Figure:
    """Published against simulated."""
    draw = {"three-way": _three_way, "poisson-30s": _poisson, "model-comparison": _comparison}
    return draw[reproduction.table](reproduction)


def _figure(panels: int, width_inches: float, caption: str) -> tuple[Figure, list[Axes]]:
    """A figure with panels in one row."""
    figure = new_figure(width_inches, 5.0, caption)
    return figure, list(figure.subplots(1, panels, squeeze=False).flat)


def _three_way(reproduction: Reproduction) -> Figure:
    """Coloured marks are published, black diamonds simulated: both on a logarithmic axis, which has no foot."""
    note = "The single request and, for the order of the five, pd's mean are calibrated; the rest is predicted."
    figure, panels = _figure(2, 13, f"TinyLlama-1.1B to Llama-2-7B, A100, fp32. {note}")
    archs = list(dict.fromkeys(c.arch for c in reproduction.cells))
    loads = list(dict.fromkeys(c.requests for c in reproduction.cells))
    for axes, (metric, title) in zip(
        panels, (("request_latency_p95", "P95 latency"), ("request_latency_mean", "Mean latency")), strict=True
    ):
        for i, arch in enumerate(archs):
            row = [c for c in reproduction.cells if c.metric == metric and c.arch == arch]
            at = [loads.index(c.requests) + (i - 1) * 0.27 for c in row]
            colour = arch_colour(arch)
            both = [(x, (c.published / 1e3, c.simulated / 1e3)) for x, c in zip(at, row, strict=True)]
            for x, ends in both:
                axes.plot([x, x], ends, color=colour, linewidth=2, zorder=1)
            axes.plot(
                at, [c.published / 1e3 for c in row], arch_marker(arch), color=colour, markersize=11,
                label=f"{arch}, published", zorder=2,
            )  # fmt: skip
            axes.plot(at, [c.simulated / 1e3 for c in row], "D", color="black", markersize=5, label="_", zorder=3)
            for (x, ends), c in zip(both, row, strict=True):
                axes.annotate(
                    "fitted" if c.requests == 1 else f"{c.error:+.0%}", (x, max(ends)), xytext=(0, 9),
                    textcoords="offset points", ha="center", fontsize=9, color="0.25",
                )  # fmt: skip
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(3, 1000)
        axes.set_xticks(range(len(loads)), [str(load) for load in loads])
        axes.grid(False, axis="x")
        axes.set_xlabel("Requests, all submitted together")
        axes.set_ylabel("seconds")
        axes.set_title(title, fontweight="bold", loc="left")
    panels[0].plot([], [], "D", color="black", label="simulated, with its error")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    return figure


def _poisson(reproduction: Reproduction) -> Figure:
    """Marks are published, lines simulated; the band is one standard deviation of single runs."""
    labels = list(dict.fromkeys(c.pair for c in reproduction.cells))
    figure, panels = _figure(
        len(labels), 16, "Completed-only throughput with the 60 s cut-off, as published. Band: one standard deviation "
        "of single runs. All three labels ran the same 34B verifier.",
    )  # fmt: skip
    cells = [c for c in reproduction.cells if c.metric == "throughput_completed_only"]
    for axes, label in zip(panels, labels, strict=True):
        for arch in ("pd", "pdv-unified"):
            row = [c for c in cells if c.pair == label and c.arch == arch]
            _curve(axes, row, arch)
        ticks = (1, 2, 4, 8, 16, 32, 64, 128)
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 15)
        axes.set_xlabel("Concurrency level C (0.05 C requests/s for 30 s)")
        axes.set_ylabel("tok/s of completed requests")
        axes.set_title(label, fontweight="bold", loc="left")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    return figure


def _curve(axes: Axes, row: list[TableCell], name: str) -> None:
    colour = arch_colour(name)
    x = [c.concurrency for c in row]
    axes.plot(x, [c.simulated for c in row], color=colour, linewidth=2, label=f"{name}, simulated")
    low, high = [max(0.0, c.simulated - c.spread) for c in row], [c.simulated + c.spread for c in row]
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    style, size = ("o", 11) if name == "pd" else ("s", 6)  # one shows behind the other where they agree
    published = [c.published for c in row]
    axes.plot(x, published, style, color=colour, markersize=size, markeredgecolor="white", label=f"{name}, published")


@styled()
def fair_figure(fair: Fair) -> Figure:
    """Throughput to the end, and mean latency: one line per load and program or policy."""
    poisson = fair.table == "poisson-30s"
    label = f" Arrivals and acceptance of {HEADLINE}." if poisson else ""
    note = (
        f"Filled: published programs as simulated on an A100; hollow: pdvsim on {fair.gpu}, {fair.foundation}.{label}"
    )
    who = list(dict.fromkeys((row.engine, row.arch) for row in fair.rows))
    loads = list(dict.fromkeys(row.concurrency for row in fair.rows))
    lines = [(load, engine, arch) for load in loads for engine, arch in who]
    metrics: list[tuple[str, str, float]] = [
        ("output_throughput", "Served to the end (tok/s)", 1.0),
        ("mean_e2el_ms", "Mean latency (seconds)", 1e-3),
    ]
    if poisson:
        note += " First panel: by the cut-off, of completed requests (filled) and of all (ring)."
        metrics.insert(0, ("completed_only", "By the cut-off (tok/s)", 1.0))
    figure = new_figure(5 * len(metrics) + 2.5, 0.26 * len(lines) + 1.0, note)
    panels = list(figure.subplots(1, len(metrics), squeeze=False, sharey=True).flat)
    for axes, (metric, title, scale) in zip(panels, metrics, strict=True):
        shown = []
        for y, (load, engine, arch) in enumerate(lines):
            row = fair.row(engine, arch, load)
            value = getattr(row, metric)
            if value is None:
                continue
            filled = arch_colour(arch) if engine == "published" else "white"
            marks = [(value * scale, filled)]
            if metric == "completed_only" and row.all_tokens is not None:
                marks.insert(0, (row.all_tokens, "white"))
                axes.plot([value, row.all_tokens], [y, y], color=arch_colour(arch), linewidth=1.5, zorder=1)
            for x, face in marks:
                axes.plot(
                    x, y, arch_marker(arch), color=arch_colour(arch), markersize=8, markeredgewidth=1.8,
                    markerfacecolor=face, zorder=2,
                )  # fmt: skip
                shown.append(x)
        if min(shown) > 0 and max(shown) > 20 * min(shown):
            axes.set_xscale("log")
            axes.set_xlim(min(shown) / 2, max(shown) * 2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
            axes.minorticks_off()
        else:
            axes.set_xlim(0, 1.1 * max(shown))
        axes.set_title(title, fontweight="bold", loc="left")
    names = [f"{arch}, {'published' if engine == 'published' else 'pdvsim'}" for _, engine, arch in lines]
    for number, load in enumerate(loads):
        requests = next(row.requests for row in fair.rows if row.concurrency == load)
        at = f"C = {load}" if poisson else f"{requests} request{'s' if requests > 1 else ''}"
        names[number * len(who)] = f"{at}:  {names[number * len(who)]}"
    _name_lines(panels, names, len(who))
    return figure


def _name_lines(panels: list[Axes], names: list[str], block: int) -> None:
    """Lines from top to bottom with their names, and a border after each block of them."""
    for axes in panels:
        for border in range(block, len(names), block):
            axes.axhline(border - 0.5, color="0.6", linewidth=1)
    panels[0].set_yticks(range(len(names)), names, fontsize=9)
    panels[0].set_ylim(len(names) - 0.5, -0.5)


def _comparison(reproduction: Reproduction) -> Figure:
    """Mean, P95 and requests/s: a line per pair, load and program; published, explained and predicted blind."""
    figure = new_figure(
        14, 5.0, "A100, no KV cache. Predicted blind: as three-way, in fp32, with 90% intervals. "
        "Explained: bf16, Poisson arrivals, one fitted constant.",
    )  # fmt: skip
    rows = list(dict.fromkeys((c.pair, c.requests, c.arch) for c in reproduction.cells))
    metrics = (
        ("request_latency_mean", "Mean latency (seconds)", 1e-3),
        ("request_latency_p95", "P95 latency (seconds)", 1e-3),
        ("throughput", "Requests/s", 1.0),
    )
    panels = list(figure.subplots(1, len(metrics), squeeze=False, sharey=True).flat)
    for axes, (metric, title, scale) in zip(panels, metrics, strict=True):
        of_row = {(c.pair, c.requests, c.arch): c for c in reproduction.cells if c.metric == metric}
        for y, row in enumerate(rows):
            cell, colour, marker = of_row[row], arch_colour(row[2]), arch_marker(row[2])
            if blind := cell.predicted:
                axes.plot([scale * blind.low, scale * blind.high], [y, y], color="0.7", linewidth=2, zorder=1)
                axes.plot(scale * blind.value, y, marker, color="0.7", markerfacecolor="white", markersize=7, zorder=2)
            axes.plot(scale * cell.published, y, marker, color=colour, markersize=10, zorder=3)
            axes.plot(scale * cell.simulated, y, "D", color="black", markersize=4.5, zorder=4)
        axes.set_xlim(left=0)
        axes.set_title(title, fontweight="bold", loc="left")
    names = [
        f"{pair}:  {requests} requests, {arch}" if i % 4 == 0 else f"{requests} requests, {arch}"
        for i, (pair, requests, arch) in enumerate(rows)
    ]
    _name_lines(panels, names, 4)
    for arch in dict.fromkeys(row[2] for row in rows):
        panels[0].plot([], [], arch_marker(arch), color=arch_colour(arch), label=f"{arch}, published")
    panels[0].plot([], [], "D", color="black", label="explained")
    panels[0].plot([], [], "o-", color="0.7", markerfacecolor="white", label="predicted blind")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure
