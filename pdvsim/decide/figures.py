"""Plots of capacities, finalists, flips and winner maps."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from pdvsim.decide.advice import FLIPS, Advice
from pdvsim.decide.capacity import Capacities
from pdvsim.decide.goal import NAMES, level_title
from pdvsim.decide.grid import place_text
from pdvsim.decide.report import gpus_text
from pdvsim.decide.runs import load_words
from pdvsim.decide.speedup import Drafting, Speedup, measured_pairs
from pdvsim.decide.surroundings import Flips
from pdvsim.decide.winners import WinnerMap, confidence_text
from pdvsim.sim.config import Experiment
from pdvsim.sim.policies import policy_of
from pdvsim.view.charts import DASHES, Bar, Chart, Curve, Tile, curves_of
from pdvsim.view.differences import forest_figure
from pdvsim.view.figure import chart_figure
from pdvsim.view.setting import points_line, run_seeds, setting_line
from pdvsim.view.style import AXIS_NAMES, arch_colour, number_text, paler

if TYPE_CHECKING:
    from matplotlib.figure import Figure

AXES = {
    "load": "Request rate (req/s)", "concurrency": "Concurrent requests", "requests": "Requests in the batch",
    "acceptance": "Acceptance rate",
}  # fmt: skip
NOBODY = "#ebebeb"  # colour of a cell without a winner
MARKERS = "osD^vP*X"  # one per architecture, so that coinciding curves are still distinguishable


def capacity_pictures(capacities: Capacities) -> dict[str, Figure]:
    """The rate held by each architecture, and with prices the cost, if any search has finished."""
    plan, goal, entries = capacities.plan, capacities.plan.goal, capacities.summary()
    if not entries:
        return {}
    panels = {"rate": ("Rate held within the service levels", "req/s")}
    if capacities.gpu_hour_usd is not None:
        price = f"Cost at that rate, at ${capacities.gpu_hour_usd:g} per GPU-hour"
        panels["usd_per_million_output_tokens"] = price, "$ per million output tokens"
    charts = []
    for key, (title, unit) in panels.items():
        bars = []
        for row, entry in enumerate(entries):
            value, held = entry[key], entry[key].mean > 0
            half = entry["high"] - value.mean if key == "rate" else value.half
            text, end, half = (number_text(value.mean), value.mean, half) if held else ("none", 0.0, 0.0)
            bars.append(Bar(row, 0.0, end, arch_colour(entry["arch"]), text, half=half))
        charts.append(Chart(title, "", unit, rows=[str(e["arch"]) for e in entries], bars=bars, labelled=True))
    levels = ", ".join(f"{level_title(name)} ≤ {level:g} ms" for name, level in goal.levels_ms.items())
    seeds = run_seeds(plan.base.traffic.seed, plan.num_runs)
    note = setting_line(asdict(plan.base), "the highest rate held", seeds, drafts="each architecture at its best")
    note += f" {levels}{goal.share_text}. Simulated, profile {capacities.rows[0]['profile']}."
    if plan.num_runs > 1:
        note += f" Whiskers: errors of the model and of {plan.num_runs} seeds (of cost: of seeds)."
    settings = dict.fromkeys(f"{entry['arch']} with {entry['settings']}" for entry in entries)
    height = 1.3 + 0.45 * len(entries)  # at which all bars have the same thickness
    figure = chart_figure([charts], f"{note} Settings: {'; '.join(settings)}.", inches=(5.6, height))
    return {"Rates held": figure}


def advice_pictures(advice: Advice) -> dict[str, Figure]:
    """Where the decision changes; none if that was not searched, as a curve of one point is no curve."""
    return {FLIPS: flips_figure(advice)} if any(len(flips.probes) > 1 for flips in advice.flips) else {}


def flips_figure(advice: Advice) -> Figure:
    """The objective of the finalists over load and acceptance; shaded where the recommendation is unchanged."""
    ask = advice.question
    drawn = [flips for flips in reversed(advice.flips) if len(flips.probes) > 1]
    note = f"{_asked_line(advice)} Shaded: unchanged. Bands: 95% confidence over {ask.num_runs} seeds; "
    note += "none where fewer seeds showed that no other could lead. "
    note += "Dashed: service levels exactly met. " if ask.goal.objective == "headroom" else ""
    charts = [_curves(flips, advice) for flips in drawn]
    figure = chart_figure([charts], note + f"Profile {advice.rows[0]['profile']}.", inches=(7.0, 4.4))
    for axes, flips in zip(figure.axes, drawn, strict=True):
        axes.axvspan(flips.stands(-1), flips.stands(1), color="0.93", zorder=0)
        axes.axvline(flips.here, color="0.3", linewidth=1.2, linestyle=":")
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


def _curves(flips: Flips, advice: Advice) -> Chart:
    """One curve per finalist."""
    probes, goal = sorted(flips.probes.items()), advice.question.goal
    curves = []
    styles = zip(advice.finalists.items(), itertools.cycle(MARKERS), itertools.cycle(DASHES), strict=False)
    for (name, candidate), marker, dash in styles:
        values = {at: probe.values[name] for at, probe in probes if name in probe.values}
        if values:
            half = [value.half if value.n >= advice.question.num_runs else 0.0 for value in values.values()]
            label = f"{name} ({advice.standing})" if name == advice.best else name
            curve = Curve(label, arch_colour(candidate.arch), list(values), [v.mean for v in values.values()], half)
            curves.append(replace(curve, hollow=[False] * len(values), marker=marker, dash=dash))
    means = [y for curve in curves for y in curve.y]
    ticks = [flips.here * 2.0**power for power in range(-2, 3) if flips.here * 2.0**power in flips.probes]
    axis, over = AXES[flips.axis], "acceptance" if flips.of else "load"
    return Chart(
        f"Over the {over}", NAMES[goal.objective], f"{axis} of {flips.of}" if flips.of else axis, curves,
        log_x=not flips.of, ticks=() if flips.of else [(tick, f"{tick:g}") for tick in ticks],
        log_y=max(means) > 10 * min(means) > 0, levels=[1.0] if goal.objective == "headroom" else (),
    )  # fmt: skip


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
    grid, archs = answer.grid, [str(arch) for arch in answer.grid.archs]
    places, loads = list(reversed(grid.places)), grid.loads
    palette = [_colour(fleet.of(grid.base)) for fleet in grid.fleets] or [arch_colour(arch) for arch in archs]
    colours = dict(zip(archs, palette, strict=True))
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
    note += " In a cell: the winner, its draft length and its lead over the second. Hatched: not significant. "
    note += f"{confidence_text(answer)}."
    note += f" Simulated, profile {answer.rows[0]['profile']}."
    cells = []
    for i, place in enumerate(places):
        for j, load in enumerate(loads):
            found = answer.found.get((load, place))
            words = found.words(1 if grid.fleets else 2) if found else ["not run"]
            colour, unsure = NOBODY, False
            if found is not None and found.winner is not None:
                colour, unsure = colours[found.winner], not found.sure
            text = "\n".join(words).replace("none keeps", "none\nkeeps")
            cells.append(Tile(i, j, paler(colour, 0.55) if unsure else colour, text, unsure))
    sides = {"acceptance": "Acceptance rate", "size": "Pair draft:target (ratio of parameters)", "card": "Card"}
    chart = Chart(
        f"Best by {NAMES[grid.goal.objective]}", sides[grid.axis], AXIS_NAMES[grid.load_kind], cells=cells,
        rows=[place_text(place).replace(":", ":\n") for place in places], columns=[f"{load:g}" for load in loads],
        key=[*colours.items()],
    )  # fmt: skip
    return chart_figure([[chart]], note, inches=(3.0 + 1.7 * len(loads), 1.4 + 0.85 * len(places)))


def _colour(candidate: Experiment) -> str:
    """Colour of its architecture; paler if a server that can be split is replicated."""
    policy, hardware = policy_of(candidate.arch), candidate.hardware
    single = (candidate.arch in ("pd", "pdv") or policy.in_steps()) and candidate.gpus == 1
    return paler(arch_colour(candidate.arch), 0.45 if single and not hardware.place else 0.0)


def speedup_pictures(answer: Speedup) -> dict[str, Figure]:
    """The gains, if any pair of runs has finished."""
    return {"Gains": speedup_figure(answer)} if answer.gains else {}


def speedup_figure(answer: Speedup) -> Figure:
    """Gains over concurrency: a panel per drafter, a curve per draft length, and what was measured of this model."""
    ask = answer.question
    loads, measured = sorted(ask.concurrency), measured_pairs([ask.server(name) for name in ask.options])
    charts = []
    for drafter in dict.fromkeys(name.drafter for name in ask.options):
        first = [answer.ranged(Drafting(drafter, k), loads[0]) for k in ask.lengths]
        curves, best = [], max(zip(first, ask.lengths, strict=True), key=lambda one: one[0].mean if one[0] else 0.0)[1]
        for style, k in zip(curves_of(({"series": f"k={k}"} for k in ask.lengths), "k"), ask.lengths, strict=True):
            known = [(load, gain) for load in loads if (gain := answer.ranged(Drafting(drafter, k), load))]
            at, gains = [load for load, _ in known], [gain for _, gain in known]
            band: dict[str, Any] = (
                {"low": [gain.low for gain in gains], "high": [gain.high for gain in gains]} if k == best else {}
            )
            full = [False] * len(at)
            curves.append(replace(style, x=at, y=[gain.mean for gain in gains], hollow=full, **band))
            points = sorted((p.clients, p.measured["speedup"]) for p in measured[Drafting(drafter, k)])
            x, y = [x for x, _ in points], [y for _, y in points]
            curves += [replace(style, name="", x=x, y=y, hollow=[True] * len(x), dash="none")] if points else []
        charts.append(
            Chart(drafter, "Times as fast as plain decoding", "Concurrent requests", curves, log_x=True, free=True,
                  ticks=[(load, f"{load:g}") for load in loads], levels=[1.0])
        )  # fmt: skip
    note = setting_line(asdict(ask.base), "closed loops", run_seeds(ask.base.traffic.seed, ask.num_runs), drafts="",
                        pair=ask.base.pair.target.name, acceptance="")  # fmt: skip
    note += " Band, of the best draft length: errors of seeds and of the model."
    if any(measured.values()):
        note += " Hollow: servers of this model and engine that were measured, with their own lengths and acceptance."
    return chart_figure([charts], f"{note} Simulated, profile {answer.rows[0]['profile']}.", inches=(5.2, 4.2))
