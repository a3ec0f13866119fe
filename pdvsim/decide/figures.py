"""Plots of capacities, finalists, flips and winner maps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from pdvsim.bench.stats import Interval, interval
from pdvsim.decide.advice import CANDIDATES, FLIPS, Advice
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.goal import NAMES, level_title
from pdvsim.decide.grid import place_text
from pdvsim.decide.report import gpus_text
from pdvsim.decide.runs import load_words
from pdvsim.decide.surroundings import Flips
from pdvsim.decide.winners import WinnerMap, confidence_text
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import policy_of
from pdvsim.view.figure import legend_above, new_figure, styled, titled
from pdvsim.view.forest import forest_figure
from pdvsim.view.setting import points_line, run_seeds, setting_line
from pdvsim.view.style import AXIS_NAMES, arch_colour, number_text, paler

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

AXES = {
    "load": "Request rate (req/s)", "concurrency": "Concurrent requests", "requests": "Requests in the batch",
    "acceptance": "Acceptance rate",
}  # fmt: skip
LEGEND_INCHES, LETTER_INCHES = 0.75, 0.1  # of a legend entry without its text, and of a letter
MARKERS = "osD^vP*X"  # one per architecture, so that coinciding curves are still distinguishable


def capacity_pictures(capacities: Capacities) -> dict[str, Figure]:
    """The rates held, if any search has finished."""
    return {"Rates held": capacity_figure(capacities)} if capacities.rows else {}


def capacity_figure(capacities: Capacities) -> Figure:
    """The rate held by each architecture, and with prices the cost per million output tokens."""
    entries = capacities.summary()
    panels = [("rate", "Rate held within the service levels", "req/s")]
    if capacities.gpu_hour_usd is not None:
        price = f"Cost at that rate, at ${capacities.gpu_hour_usd:g} per GPU-hour"
        panels.append(("usd_per_million_output_tokens", price, "$ per million output tokens"))
    names = [str(entry["arch"]) for entry in entries]
    colours = list(map(arch_colour, names))
    with styled():
        figure = new_figure(2.0 + 5.5 * len(panels), _height(len(entries)), _footnote(capacities))
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)
        for axes, (key, title, unit) in zip(grid.flat, panels, strict=True):
            _bars(axes, names, [entry[key] for entry in entries], colours)
            titled(axes, title, unit)
    return figure


def advice_pictures(advice: Advice) -> dict[str, Figure]:
    """Where the decision changes, or the finalists if that was not searched; none without a decision."""
    if advice.recommended is None:
        return {}
    return {FLIPS: flips_figure(advice)} if advice.flips_drawn else {CANDIDATES: finalists_figure(advice)}


def finalists_figure(advice: Advice) -> Figure:
    """The objective of every finalist, the best first."""
    ask, goal = advice.question, advice.question.goal
    values = {c: interval(map(goal.value, rows)) for c, rows in advice.finals.items()}
    order = sorted(values, key=lambda c: -goal.sign * values[c].mean)
    names = [ask.described(c) + (f" ({advice.standing})" if c == advice.recommended else "") for c in order]
    note = f"{_asked_line(advice)} Whiskers: 95% confidence over {ask.num_runs} seeds."
    with styled():
        figure = new_figure(11, _height(len(order)), f"{note} Profile {advice.rows[0]['profile']}.")
        axes = figure.subplots()
        _bars(axes, names, [values[c] for c in order], [arch_colour(c.arch) for c in order])
        titled(axes, NAMES[goal.objective])
    return figure


def _height(rows: int) -> float:
    """Height in inches at which all bars have the same thickness."""
    return 1.3 + 0.45 * rows


def across(figure: Figure, labels: Sequence[str]) -> int:
    """Legend entries that fit in one row."""
    return max(1, int(figure.get_figwidth() / (LEGEND_INCHES + LETTER_INCHES * max(map(len, labels)))))


def _bars(axes: Axes, names: Sequence[str], values: Sequence[Interval], colours: Sequence[str]) -> None:
    """One bar per name, from the top, with its interval and value."""
    rows, end = range(len(names)), _frame(values)
    means = [0.0 if math.isnan(value.mean) else value.mean for value in values]
    above = [upper(value) - mean for value, mean in zip(values, means, strict=True)]
    below = list(map(min, above, means))  # rates and costs are not negative
    axes.barh(rows, means, 0.62, color=colours)
    axes.errorbar(means, rows, xerr=[below, above], fmt="none", ecolor="0.15", elinewidth=1.5, capsize=4)
    for row, mean, more in zip(rows, means, above, strict=True):  # on a white background, as an interval may cross it
        axes.annotate(
            number_text(mean) if mean else "none", (min(mean + more, end), row), xytext=(8, 0),
            textcoords="offset points", va="center", color="0.15", fontweight="bold", size=11,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        )  # fmt: skip
    axes.set_yticks(rows, names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.2 * end)
    axes.grid(visible=False, axis="y")


def _frame(values: Sequence[Interval]) -> float:
    """Axis limit: intervals from two replications can be very long."""
    top = max((value.mean for value in values if value.mean > 0), default=1.0)
    return min(max([top, *map(upper, values)]), 2 * top)


def upper(value: Interval) -> float:
    """Upper end of an interval; the value itself for one run, 0 for none."""
    return 0.0 if math.isnan(value.mean) else value.ends[1]


def _footnote(capacities: Capacities) -> str:
    plan, goal = capacities.plan, capacities.plan.goal
    levels = ", ".join(f"{level_title(name)} ≤ {level:g} ms" for name, level in goal.levels_ms.items())
    seeds = run_seeds(plan.base.traffic.seed, plan.num_runs)
    note = setting_line(asdict(plan.base), "the highest rate held", seeds, drafts="each architecture at its best")
    note += f" {levels}{goal.share_text}. Simulated, profile {capacities.rows[0]['profile']}."
    if plan.num_runs > 1:
        note += f" Whiskers, which may be cut at the frame: 95% confidence over {plan.num_runs} replications."
    settings = dict.fromkeys(f"{entry['arch']} with {entry['settings']}" for entry in capacities.summary())
    return f"{note} Settings: {'; '.join(settings)}."


def flips_figure(advice: Advice) -> Figure:
    """The objective of every finalist over load and acceptance; shaded where the recommendation is unchanged."""
    ask, goal, flips, named = advice.question, advice.question.goal, advice.flips_drawn, advice.finalists
    assert advice.recommended is not None
    best = ask.name(advice.recommended)
    compared = {name for one_axis in flips for probe in one_axis.probes.values() for name in probe.values}
    archs = [name for name in named if name in compared]
    note = f"{_asked_line(advice)} Shaded: {best} is best. Bars: 95% confidence over {ask.num_runs} seeds; "
    note += "none where fewer seeds showed that no other could lead. "
    note += "Dashed: service levels exactly met. " if goal.objective == "headroom" else ""
    with styled():
        figure = new_figure(7.5 * len(flips), 5.2, note + f"Profile {advice.rows[0]['profile']}.")
        colours = {name: arch_colour(named[name].arch) for name in archs}
        for axes, one_axis in zip(figure.subplots(1, len(flips), squeeze=False).flat, flips, strict=True):
            _lines(axes, one_axis, archs, colours, best, advice.standing)
            axes.set_ylabel(NAMES[goal.objective])
            if goal.objective == "headroom":
                axes.axhline(1, color="0.3", linewidth=1.2, linestyle="--")
        legend_above(figure, figure.axes[0], across(figure, figure.axes[0].get_legend_handles_labels()[1]))
    return figure


def _asked_line(advice: Advice) -> str:
    base, several = advice.question.base, bool(advice.question.drafters)
    return setting_line(
        asdict(base),
        f"{load_words(base.traffic)} given",
        run_seeds(base.traffic.seed, len(advice.rows)),
        pair=base.pair.target.name if several else None,
        drafts=f"each architecture{' and drafter' if several else ''} at its best",
        acceptance="" if several else None,  # each drafter has its own
    )


def _lines(axes: Axes, flips: Flips, archs: list[str], colours: dict[str, Any], best: str, chosen: str) -> None:
    """One curve per architecture over one axis, with the given load and the range of the same recommendation."""
    for arch, marker, dashes in zip(archs, MARKERS, itertools.cycle(("-", "--", "-.", ":")), strict=False):
        at = [x for x in sorted(flips.probes) if arch in flips.probes[x].values]
        values = [flips.probes[x].values[arch] for x in at]
        most = max(value.n for probe in flips.probes.values() for value in probe.values.values())
        half = [v.half if v.n == most else 0.0 for v in values]
        label = f"{arch} ({chosen})" if arch == best else arch
        axes.errorbar(
            at, [v.mean for v in values], half, color=colours[arch], label=label, marker=marker, capsize=3,
            linewidth=3 if arch == best else 1.8, linestyle=dashes,
        )  # fmt: skip
    axes.axvspan(flips.stands(-1), flips.stands(1), color="0.93", zorder=0)
    axes.axvline(flips.here, color="0.3", linewidth=1.2, linestyle=":")
    if flips.axis != "acceptance":
        axes.set_xscale("log", base=2)
        axes.set_xticks([flips.here * 2.0**power for power in range(-2, 3) if flips.here * 2.0**power in flips.probes])
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    means = [v.mean for probe in flips.probes.values() for v in probe.values.values()]
    if max(means) > 10 * min(means) > 0:
        axes.set_yscale("log")
        axes.set_ylim(min(means) / 2, max(means) * 2)  # limits from the curves, as intervals may reach 0
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()
    titled(axes, "Over acceptance" if flips.axis == "acceptance" else "Over the load", AXES[flips.axis])


def map_pictures(answer: WinnerMap) -> dict[str, Figure]:
    """The map, and the differences from the architecture that all are compared with, if one is named."""
    grid, compared = answer.grid, answer.differences
    pictures = {"The map": map_figure(answer)} if answer.cells else {}
    if compared is not None and compared.paired:
        bases = [asdict(grid.placed(load, place)) for load, place in grid.cells()]
        setting = points_line(compared.points, bases)
        pictures["Differences"] = forest_figure(compared.summary, compared.paired, setting)
    return pictures


def map_figure(answer: WinnerMap) -> Figure:
    """Cells in the winner's colour with its lead over the second; pale and hatched if it is not significant."""
    import seaborn as sns
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch, Rectangle

    grid, archs = answer.grid, [str(arch) for arch in answer.grid.archs]
    places, loads = list(reversed(grid.places)), grid.loads
    palette = [_colour(fleet.of(grid.base)) for fleet in grid.fleets] or [arch_colour(arch) for arch in archs]
    codes = np.full((len(places), len(loads)), np.nan)
    texts = dict.fromkeys(np.ndindex(codes.shape), "")
    note = setting_line(
        asdict(grid.base),
        f"{loads[0]:g} to {loads[-1]:g} {'req/s' if grid.request_rate else 'concurrent requests'}",
        run_seeds(grid.base.traffic.seed, grid.num_runs),
        pair=f"{len(places)} pairs" if grid.axis == "size" else None,
        card=f"{len(places)} cards"
        if grid.axis == "card"
        else gpus_text(grid.fleets[-1].gpus(grid.base), grid.base.hardware.gpu)
        if grid.fleets
        else None,
        drafts=f"each {'fleet' if grid.fleets else 'architecture'} at its best",
        acceptance="" if grid.axis == "acceptance" else None,
    )
    note += " In a cell: the winner, its draft length and its lead over the second. "
    note += f"{confidence_text(answer)}."
    note += f" Simulated, profile {answer.rows[0]['profile']}."
    with styled(grid=False):
        figure = new_figure(3.5 + 1.7 * len(loads), 2.2 + 0.85 * len(places), note)
        axes = figure.subplots()
        unsure: list[tuple[int, int]] = []
        for i, place in enumerate(places):
            for j, load in enumerate(loads):
                cell = answer.cell(load, place)
                words = cell.words(1 if grid.fleets else 2) if cell else ["not run"]
                texts[i, j] = "\n".join(words).replace("none keeps", "none\nkeeps")
                if cell is not None and cell.winner is not None:
                    codes[i, j] = archs.index(cell.winner)
                    unsure += [] if cell.sure else [(j, i)]
        sns.heatmap(
            codes, ax=axes, cmap=ListedColormap(palette), vmin=-0.5, vmax=len(archs) - 0.5, cbar=False,
            linewidths=2, linecolor="white", xticklabels=[f"{x:g}" for x in loads],
            yticklabels=[place_text(place).replace(":", ":\n") for place in places],
        )  # fmt: skip
        axes.set_facecolor("0.92")
        for corner in unsure:
            axes.add_patch(Rectangle(corner, 1, 1, facecolor=(1, 1, 1, 0.55), linewidth=0))
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor="0.45", hatch="///", linewidth=0))
        for (i, j), text in texts.items():
            box = {"boxstyle": "round,pad=0.25", "facecolor": "white", "edgecolor": "none", "alpha": 0.85}
            if text:
                axes.text(j + 0.5, i + 0.5, text, ha="center", va="center", size=12, color="0.1", bbox=box)
        axes.tick_params(axis="y", rotation=0)
        sides = {"acceptance": "Acceptance rate", "size": "Pair draft:target (ratio of parameters)", "card": "Card"}
        titled(axes, f"Best by {NAMES[grid.goal.objective]}", AXIS_NAMES[grid.load_kind], sides[grid.axis])
        handles = [Patch(color=colour, label=arch) for arch, colour in zip(archs, palette, strict=True)]
        handles.append(Patch(facecolor="white", edgecolor="0.35", hatch="///", label="not significant"))
        columns = across(figure, [*archs, "not significant"])
        figure.legend(handles=handles, loc="outside upper center", ncols=columns, frameon=False)
    return figure


def _colour(candidate: Experiment) -> str:
    """Colour of its architecture; paler if a server that can be split is replicated."""
    policy, hardware = policy_of(candidate.arch), candidate.hardware
    single = (candidate.arch in ("pd", "pdv") or policy.in_steps()) and candidate.gpus == 1
    return paler(arch_colour(candidate.arch), 0.45 if single and not hardware.place else 0.0)
