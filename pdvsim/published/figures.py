"""Figures of the published tables beside the simulated ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdvsim.published.fair import HEADLINE, Fair
from pdvsim.published.reproduce import Reproduction, TableCell
from pdvsim.view.figure import new_figure, styled
from pdvsim.view.style import arch_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@styled()
def reproduction_figure(reproduction: Reproduction) -> Figure:
    """Published against simulated."""
    return _three_way(reproduction) if reproduction.table == "three-way" else _poisson(reproduction)


def _figure(panels: int, width_inches: float, caption: str) -> tuple[Figure, list[Axes]]:
    """A figure of panels side by side."""
    figure = new_figure(width_inches, 5.0, caption)
    return figure, list(figure.subplots(1, panels, squeeze=False).flat)


def _three_way(reproduction: Reproduction) -> Figure:
    """Bars are published, diamonds simulated."""
    note = "The single request is calibrated on, and of the five pd's mean chose their order; the rest is predicted."
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
            published = axes.bar(at, [c.published / 1e3 for c in row], 0.24, color=colour, label=arch, alpha=0.75)
            errors = ["fitted" if c.requests == 1 else f"{c.error:+.0%}" for c in row]
            axes.bar_label(published, errors, padding=9, fontsize=9, color="0.25")
            axes.plot(at, [c.simulated / 1e3 for c in row], "D", color="black", markersize=6, label="_")
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.set_ylim(3, 1000)
        axes.set_xticks(range(len(loads)), [str(load) for load in loads])
        axes.grid(False, axis="x")
        axes.set_xlabel("Requests, all submitted at once")
        axes.set_ylabel("seconds")
        axes.set_title(title, fontweight="bold", loc="left")
    panels[0].plot([], [], "D", color="black", label="simulated, with its error")
    handles, labels = panels[0].get_legend_handles_labels()
    order = (
        [labels.index(arch) for arch in archs] + [len(labels) - 1] if labels[-1] not in archs else range(len(labels))
    )
    names = [f"{labels[i]}, published" if labels[i] in archs else labels[i] for i in order]
    figure.legend([handles[i] for i in order], names, loc="outside upper center", ncols=4, frameon=False)
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
        _axes(axes, "Concurrency level C (0.05 C requests/s for 30 s)", "tok/s of completed requests", label)
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


def _axes(axes: Axes, x_label: str, y_label: str, title: str) -> None:
    ticks = (1, 2, 4, 8, 16, 32, 64, 128)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(0, 15)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_title(title, fontweight="bold", loc="left")


@styled()
def fair_figure(fair: Fair) -> Figure:
    """Throughput to the end, and mean latency, of the published programs and of pdvsim's policies."""
    poisson = fair.table == "poisson-30s"
    label = f" Arrivals and acceptance of {HEADLINE}." if poisson else ""
    note = f"Published programs as simulated on an A100; pdvsim on {fair.gpu}: {fair.foundation}.{label}"
    figure, panels = _figure(3 if poisson else 2, 16 if poisson else 13, note)
    who = list(dict.fromkeys((row.engine, row.arch) for row in fair.rows))
    loads = list(dict.fromkeys(row.concurrency for row in fair.rows))
    named = {
        concurrency: f"{concurrency}"
        if poisson
        else f"{next(r.requests for r in fair.rows if r.concurrency == concurrency)}"
        for concurrency in loads
    }
    if poisson:
        programs = [w for w in who if w[0] == "published"]
        for i, (engine, arch) in enumerate(programs):
            rows = [fair.row(engine, arch, c) for c in loads]
            at = [j + (i - 0.5) * 0.4 for j in range(len(loads))]
            panels[0].bar(at, [r.all_tokens or 0.0 for r in rows], 0.36, color=arch_colour(arch), alpha=0.35)
            panels[0].bar(at, [r.completed_only or 0.0 for r in rows], 0.36, color=arch_colour(arch))
        panels[0].set_title("By the cut-off: completed (solid), all (pale)", fontweight="bold", loc="left")
        panels[0].set_ylabel("tok/s")
    for axes, (metric, title, unit) in zip(
        panels[-2:],
        (("output_throughput", "Served to the end", "tok/s"), ("mean_e2el_ms", "Mean latency", "seconds")),
        strict=True,
    ):
        shown: list[float] = []
        for i, (engine, arch) in enumerate(who):
            scale = 1e-3 if metric.endswith("_ms") else 1.0
            values = [getattr(fair.row(engine, arch, c), metric) * scale for c in loads]
            name = f"{arch}, published program" if engine == "published" else f"{arch}, pdvsim on {fair.gpu}"
            style = "o-" if engine == "published" else "s--"
            size = 14 - 2 * i  # rings, so that what coincides is seen to
            axes.plot(
                range(len(loads)), values, style, color=arch_colour(arch), linewidth=2, markersize=size,
                markerfacecolor="none", markeredgewidth=2, label=name,
            )  # fmt: skip
            shown += values
        if max(shown) > 20 * min(shown):
            axes.set_yscale("log")
            axes.set_ylim(min(shown) / 2, max(shown) * 2)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
        else:
            axes.set_ylim(0, 1.1 * max(shown))
        axes.set_title(title, fontweight="bold", loc="left")
        axes.set_ylabel(unit)
    for axes in panels:
        axes.set_xticks(range(len(loads)), [named[load] for load in loads])
        axes.set_xlabel("Concurrency level C" if poisson else "Requests, all submitted at once")
    handles, names = panels[-1].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=4, frameon=False)
    return figure
